"""The store of a Mooncake master, through a process that can be killed (`helper.py`).

Bytes move directly between the store and host memory that is a `MappedFile`, which the process maps
too; other memory is copied through a `MappedFile` of the channel's own.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import itertools
import json
import os
import queue
import socket
import threading
from collections.abc import Iterator, Sequence
from mmap import mmap
from multiprocessing.connection import Connection
from multiprocessing.reduction import send_handle
from typing import Any, Final

from safe_offload.config.printing import printable
from safe_offload.config.tiers import MooncakeConfig
from safe_offload.mapped_files import MappedFile, address_of, find_file, map_new
from safe_offload.tiers.base import Buffers
from safe_offload.tiers.mooncake import helper
from safe_offload.tiers.mooncake.settings import ENVIRONMENT
from safe_offload.tiers.process.child_process import ChildProcess

CONNECT_TIMEOUT_S: Final = 2.0
ANSWER_TIMEOUT_S: Final = 30.0
"""How long a call may take, before its process is killed."""
ANSWER_BYTES_MAX: Final = 1 << 20
HELPER: Final = helper.__file__

# Codes of Mooncake's ErrorCode, mooncake-store/include/types.h.
NO_ROOM: Final = -200
INVALID: Final = -600
NOT_FOUND: Final = -704
ABSENT: Final = (NOT_FOUND, -703, -707)
"""The object does not exist, is not written yet, or its lease has expired."""
_HARMLESS: Final = (NO_ROOM, INVALID, *ABSENT, *helper.NO_MASTER)


class Client:
    """Calls to a store; any thread may make them, and waits for the answer. OSError: there is none.

    A call starts the process if there is none. A failure that may leave a transfer in flight kills
    the process: all its calls fail, and no byte moves after they have returned. It gives
    `segment_bytes` of memory to the store, and serves `num_calls` at a time.
    """

    def __init__(self, config: MooncakeConfig, segment_bytes: int = 0, num_calls: int = 1) -> None:
        self._config = config
        self._segment_bytes = segment_bytes
        self._num_calls = num_calls
        self._process: _Process | None = None
        self._starting = threading.Lock()

    def has(self, keys: Sequence[str]) -> list[bool]:
        """Return which objects are there."""
        return [code == 1 for code in self._call("has", keys)]

    def sizes(self, keys: Sequence[str]) -> list[int]:
        """Return how long objects are, or their codes."""
        return self._call("sizes", keys)

    def get(self, keys: Sequence[str], slots: Sequence[Buffers]) -> list[int]:
        """Read objects of the length of their slots; return lengths or codes."""
        return self._call("get", keys, slots)

    def put(self, keys: Sequence[str], slots: Sequence[Buffers]) -> list[int]:
        """Write objects; return codes."""
        is_kept = self._config.store == "hit"  # of others nobody knows whether they will be hit
        return self._call("put", keys, slots, self._config.replicas, is_kept)

    def delete(self, keys: Sequence[str]) -> list[int]:
        """Delete objects; return codes."""
        return self._call("delete", keys)

    def kill(self) -> None:
        """Kill the process, unless it is starting: calls in flight fail when it has ended."""
        if (process := self._process) is not None and process.is_ready:
            process.kill()

    def close(self) -> None:
        """End the process; no call is in flight, and none follows."""
        if (process := self._process) is not None:
            with contextlib.suppress(OSError), process.channel() as channel:
                if self._segment_bytes:  # else the master misses nothing
                    channel.call("close")
            process.end()

    def _call(self, verb: str, keys: Sequence[str], *slots_and_more: Any) -> list[int]:
        if not keys:
            return []
        with self.running().channel() as channel:
            call = channel.move if slots_and_more else channel.codes
            codes: list[int] = call(verb, keys, *slots_and_more)
        if failed := [code for code in codes if code in helper.NO_MASTER]:
            raise OSError(errno.EIO, f"the master of Mooncake does not answer (code {failed[0]})")
        return codes

    def running(self) -> _Process:
        """Return the process, which is started if there is none."""
        with self._starting:
            if self._process is not None and self._process.status is None:
                return self._process
            arguments = setup_arguments(self._config, self._segment_bytes)
            title = f"safe-offload tier {self._config.location.label} client"
            process = self._process = _Process(title, self._num_calls)
            with process.channel() as channel:
                if (code := channel.call("set_up", *arguments)) != 0:
                    said = printable(str(code))
                    raise OSError(errno.EIO, f"Mooncake's client cannot be set up (code {said})")
            process.is_ready = True
            return process


class _Channel:
    """A connection to the process, and memory for bytes that are copied."""

    def __init__(self, process: _Process, connection: Connection) -> None:
        self._process = process
        self._connection = connection
        self._spare: mmap | None = None

    def call(self, verb: str, *arguments: object, descriptors: Sequence[int] = ()) -> Any:
        """Return an answer; descriptors are sent along. OSError if there is none."""
        self._connection.send_bytes(json.dumps([verb, *arguments]).encode())
        for descriptor in descriptors:
            send_handle(self._connection, descriptor, self._process.pid)
        try:
            if not self._connection.poll(ANSWER_TIMEOUT_S):
                raise TimeoutError(errno.ETIMEDOUT, "Mooncake's client does not answer")
            answer, problem = json.loads(self._connection.recv_bytes(ANSWER_BYTES_MAX))
        except (EOFError, ConnectionError) as error:
            raise OSError(errno.EIO, "Mooncake's client has ended") from error
        except (TypeError, ValueError, RecursionError) as error:
            raise OSError(errno.EPROTO, "Mooncake's client sent an invalid message") from error
        if problem:
            raise OSError(errno.EIO, f"Mooncake's client failed: {printable(str(problem), 300)}")
        return answer

    def codes(self, verb: str, keys: Sequence[str], *arguments: object) -> list[int]:
        """Return a code for each key, or fewer that end with one of `NO_MASTER`."""
        answer = self.call(verb, keys, *arguments)
        codes = [code for code in answer if type(code) is int] if type(answer) is list else []
        is_short = bool(codes) and codes[-1] in helper.NO_MASTER
        if codes != answer or (len(codes) != len(keys) and not is_short):
            raise OSError(errno.EPROTO, "Mooncake's client gave no code for each object")
        return codes

    def move(
        self, verb: str, keys: Sequence[str], slots: Sequence[Buffers], *more: object
    ) -> list[int]:
        """Get or put objects; bytes outside mapped files are copied."""
        buffers = [[(address_of(each), each.nbytes) for each in slot if each] for slot in slots]
        found = {at: find_file(at[0]) for slot in buffers for at in slot}
        copied = [at for at, file in found.items() if file is None]
        spare = self._spare_of(sum(length for _, length in copied))
        ends = itertools.accumulate((length for _, length in copied), initial=spare.start)
        copies = dict(zip(copied, ends, strict=False))  # to where they are copied
        files = {at: file or spare for at, file in found.items()}
        for file in {*files.values()}:
            self._process.open(file, self)
        objects = [
            _joined([(files[at], copies.get(at, at[0]), at[1]) for at in slot]) for slot in buffers
        ]
        for (address, length), copy in copies.items() if verb == "put" else ():
            ctypes.memmove(copy, address, length)
        codes = self.codes(verb, keys, objects, *more)
        if any(code < 0 and code not in _HARMLESS for code in codes):
            self._process.end()
        for (address, length), copy in copies.items() if verb == "get" else ():
            ctypes.memmove(address, copy, length)
        return codes

    def _spare_of(self, size_bytes: int) -> MappedFile:
        """Return memory for copies of `size_bytes`."""
        if self._spare is None or len(self._spare) < size_bytes:
            self._spare = map_new(max(size_bytes, 1 << 20))
        file = find_file(address_of(memoryview(self._spare)))
        assert file is not None
        return file


class _Process(ChildProcess):
    """A process that runs `helper.py`, in this group; `is_ready` once its client is set up."""

    def __init__(self, title: str, num_channels: int) -> None:
        pairs = [socket.socketpair() for _ in range(num_channels)]
        theirs = [their.fileno() for _, their in pairs]
        super().__init__((HELPER, title), theirs, ENVIRONMENT)
        self.is_ready = False
        self._channels: queue.SimpleQueue[_Channel] = queue.SimpleQueue()
        for our, their in pairs:
            their.close()
            self._channels.put(_Channel(self, Connection(our.detach())))
        self._opened: set[int] = set()
        self._opening = threading.Lock()

    @contextlib.contextmanager
    def channel(self) -> Iterator[_Channel]:
        """Yield a channel for exclusive use; an error ends the process."""
        channel = self._channels.get()
        try:
            yield channel
        except BaseException:
            self.end()
            raise
        finally:
            self._channels.put(channel)

    def open(self, file: MappedFile, channel: _Channel) -> None:
        """Let the process map a file, once."""
        with self._opening:
            if file.number not in self._opened:
                given = file.descriptors
                channel.call("open", file.number, len(given), descriptors=given)
                self._opened.add(file.number)


def _joined(places: Sequence[tuple[MappedFile, int, int]]) -> list[tuple[int, int, int]]:
    """Return ranges as the process identifies them: number of a file, offset, length.

    Adjacent ranges are joined, as Mooncake moves each alone.
    """
    found: list[tuple[int, int, int]] = []
    for file, address, length in places:
        start = address - file.start
        if found and (found[-1][0], sum(found[-1][1:])) == (file.number, start):
            found[-1] = file.number, found[-1][1], found[-1][2] + length
        else:
            found.append((file.number, start, length))
    return found


def setup_arguments(config: MooncakeConfig, segment_bytes: int) -> tuple[object, ...]:
    """Return the arguments that set a client up; raise OSError if its master is unreachable."""
    place = config.location
    with socket.create_connection((place.host, place.port), CONNECT_TIMEOUT_S) as connection:
        here = os.environ.get("VLLM_HOST_IP") or connection.getsockname()[0]
    network = config.protocol, config.device_name, f"{place.host}:{place.port}"
    return here, config.metadata_server, segment_bytes, 0, *network
