"""What a tier is held against: the same bytes, moved by as little code as can be.

A directory against plain pwrite and pread of large files, a server against plain sockets, an
object store against the library's own put and get.
"""

import asyncio
import multiprocessing as mp
import os
import signal
import socket
import struct
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

from safe_offload.config.tiers import TierConfig
from safe_offload.errors import SafeOffloadError
from safe_offload.tiers.base import Buffers
from safe_offload.tiers.objects.bucket import open_store

CONNECT_TIMEOUT_S = 300.0
_REQUEST = struct.Struct("!cQQ")  # whether bytes are to be sent, pieces, bytes of each
_SEND, _TAKE = b"s", b"t"


class Limit(Protocol):
    """Moves the bytes of all slots, in pieces of their size."""

    name: str  # of what sets the limit, in one word

    def write(self, generation: int) -> None:
        """Write all slots, to a place that no other generation has."""

    def read(self, generation: int) -> None:
        """Read what `write` wrote."""

    def close(self) -> None:
        """Give back what was taken."""


class DeviceLimit:
    """See `Limit`: each thread has one large new file, past the page cache where that can be."""

    name = "device"

    def __init__(self, folder: Path, slots: Sequence[Buffers], threads: int) -> None:
        folder.mkdir()
        self._folder, self._slots, self._num_threads = folder, slots, threads
        self._threads = ThreadPoolExecutor(threads)
        self._is_closed = False

    def write(self, generation: int) -> None:
        self._move(os.pwritev, generation)

    def read(self, generation: int) -> None:
        self._move(os.preadv, generation)

    def _move(self, call: Callable[[int, Any, int], int], generation: int) -> None:
        def run(first: int) -> None:
            slots = self._slots[first :: self._num_threads]
            file = _open_direct(self._folder / f"{generation}-{first}")
            size_bytes = slots[0][0].nbytes if slots else 0
            os.ftruncate(file, len(slots) * size_bytes)
            for place, slot in enumerate(slots):
                if self._is_closed:
                    break
                moved = call(file, slot, place * size_bytes)
                if moved != size_bytes:
                    raise SafeOffloadError(f"moved {moved} of {size_bytes} bytes")
            os.close(file)

        list(self._threads.map(run, range(self._num_threads)))

    def close(self) -> None:
        self._is_closed = True
        self._threads.shutdown()


def _open_direct(path: Path) -> int:
    flags = os.O_RDWR | os.O_CREAT
    try:
        return os.open(path, flags | os.O_DIRECT, 0o600)
    except OSError:
        return os.open(path, flags, 0o600)


class SocketLimit:
    """See `Limit`: sockets to a process of this machine, which sends or takes the bytes.

    Each socket has a thread at either end. The process runs on the cores that this one may not use,
    if there are any.
    """

    name = "socket"

    def __init__(self, slots: Sequence[Buffers], num_sockets: int, *, is_unix: bool) -> None:
        self._slots, self._num_sockets = slots, num_sockets
        self._threads = ThreadPoolExecutor(num_sockets)
        family = socket.AF_UNIX if is_unix else socket.AF_INET
        address: Any = "" if is_unix else ("127.0.0.1", 0)  # "": a name in no file system
        with socket.socket(family) as listener:
            listener.bind(address)
            listener.listen(num_sockets)
            arguments = (listener, num_sockets, _other_cores())
            self._process = mp.get_context("spawn").Process(
                target=serve, args=arguments, daemon=True
            )
            self._process.start()
            self._sockets = [socket.socket(family) for _ in range(num_sockets)]
            for each in self._sockets:
                each.settimeout(CONNECT_TIMEOUT_S)
                each.connect(listener.getsockname())
                each.sendall(_REQUEST.pack(_TAKE, 0, 0))
                _receive(each, memoryview(bytearray(1)))  # only then has it started

    def write(self, generation: int) -> None:

        def run(index: int) -> None:
            target, slots = self._sockets[index], self._slots[index :: self._num_sockets]
            target.sendall(_REQUEST.pack(_TAKE, len(slots), self._slots[0][0].nbytes))
            for slot in slots:
                target.sendall(slot[0])
            _receive(target, memoryview(bytearray(1)))

        list(self._threads.map(run, range(self._num_sockets)))

    def read(self, generation: int) -> None:
        """See `Limit.read`; what comes is what was written last, in whichever generation."""

        def run(index: int) -> None:
            source, slots = self._sockets[index], self._slots[index :: self._num_sockets]
            source.sendall(_REQUEST.pack(_SEND, len(slots), self._slots[0][0].nbytes))
            for slot in slots:
                _receive(source, slot[0])

        list(self._threads.map(run, range(self._num_sockets)))

    def close(self) -> None:
        self._threads.shutdown()
        for each in self._sockets:
            each.close()
        self._process.join(CONNECT_TIMEOUT_S)
        self._process.kill()
        self._process.join()


class StoreLimit:
    """See `Limit`: the library's own put and get, of one object for each slot.

    Args:
        paths: from a generation to where its objects are.
        run: runs a coroutine.
    """

    name = "store"

    def __init__(
        self,
        config: TierConfig,
        slots: Sequence[Buffers],
        paths: Callable[[int], Sequence[str]],
        run: Callable[[Coroutine[Any, Any, None]], None],
    ) -> None:
        self._store = open_store(config)
        self._paths = paths
        self._slots = slots
        self._num_connections = config.num_connections
        self._run = run

    def write(self, generation: int) -> None:

        async def put(path: str, slot: memoryview) -> None:
            await self._store.put_async(path, slot, use_multipart=False)

        self._run(self._move(put, generation))

    def read(self, generation: int) -> None:
        """See `Limit.read`; the bytes are left where the library has put them."""

        async def get(path: str, slot: memoryview) -> None:
            response = await self._store.get_async(path)
            found = await response.bytes_async()
            if len(found) != slot.nbytes:
                raise SafeOffloadError(f"read {len(found)} of {slot.nbytes} bytes")

        self._run(self._move(get, generation))

    async def _move(
        self, call: Callable[[str, memoryview], Coroutine[Any, Any, None]], generation: int
    ) -> None:
        todo = iter(zip(self._paths(generation), self._slots, strict=True))

        async def work() -> None:
            for path, slot in todo:
                await call(path, slot[0])

        await asyncio.gather(*(work() for _ in range(self._num_connections)))

    def close(self) -> None:
        """See `Limit.close`; nothing was taken."""


def _other_cores() -> frozenset[int]:
    ours = os.sched_getaffinity(0)
    return frozenset(range(os.cpu_count() or 1)) - ours or frozenset(ours)


def _receive(source: socket.socket, target: memoryview) -> None:
    if not receive(source, target):
        raise SafeOffloadError("the process at the other end of the socket has died")


def serve(listener: socket.socket, num_sockets: int, cores: frozenset[int]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal; it ends when its sockets do
    os.sched_setaffinity(0, cores)
    listener.settimeout(CONNECT_TIMEOUT_S)
    with ThreadPoolExecutor(num_sockets) as threads:
        for _ in range(num_sockets):
            threads.submit(_serve_one, listener.accept()[0])


def _serve_one(connection: socket.socket) -> None:
    head = memoryview(bytearray(_REQUEST.size))
    memory = memoryview(b"")
    while receive(connection, head):
        what, count, size_bytes = _REQUEST.unpack(head)
        # All of it, as a server has it: bytes that are sent again and again stay in a core's cache.
        if memory.nbytes != count * size_bytes:
            memory = memoryview(bytearray(count * size_bytes))
        for start in range(0, memory.nbytes, size_bytes or 1):
            piece = memory[start : start + size_bytes]
            if what == _SEND:
                connection.sendall(piece)
            else:
                receive(connection, piece)
        if what == _TAKE:
            connection.sendall(b"\0")


def receive(source: socket.socket, target: memoryview) -> bool:
    """Fill `target`; return False if the connection ends before that."""
    while target.nbytes:
        num_bytes = source.recv_into(target)
        if not num_bytes:
            return False
        target = target[num_bytes:]
    return True
