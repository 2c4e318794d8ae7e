"""The process of a client of Mooncake Store, for `client.Client`.

A client may write to the target of a read after the read has failed and returned, hold the GIL
while it is set up and closed, or hang (0.3.13.post1). Killing this process ends its writes. It ends
with the process that started it, in whose group it stays. It runs as a script that imports nothing
of the package, so it starts in a tenth of a second. Its arguments are its title and the descriptors
of channels, each of which carries one call at a time.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import json
import mmap
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle
from typing import Any, Final

REGISTERED_BYTES: Final = 1 << 30
"""Of host memory registered at once, when a slot in it is first used."""
NICE: Final = 5
"""A thread that calls the client polls until its bytes have moved; the threads that move them, and
the engine's, go first."""
PAUSE_S: Final = 0.0006
RANGE_BYTES: Final = 100 << 10
"""Over TCP, a range costs as much as copying these bytes. Objects of smaller ranges are moved as
one range, through memory of this process."""
FAILED: Final = -800
NO_MASTER: Final = (-900, -901)
"""Codes of calls that the master does not answer."""

Ranges = Sequence[tuple[int, int, int]]
"""Of an object: number of a memory, offset, length."""


def hidden(mapping: mmap.mmap) -> mmap.mmap:
    """Keep a mapping out of core dumps and forked children, as `mapped_files.hide` does."""
    with contextlib.suppress(OSError):
        mapping.madvise(mmap.MADV_DONTFORK)
        mapping.madvise(mmap.MADV_DONTDUMP)
    return mapping


class Memory:
    """A file of the engine, mapped and, as far as it was used, registered."""

    def __init__(self, descriptor: int) -> None:
        self._mapping = hidden(mmap.mmap(descriptor, 0))
        os.close(descriptor)
        self._base = ctypes.addressof(ctypes.c_char.from_buffer(self._mapping))
        self._parts: set[int] = set()
        self._lock = threading.Lock()

    def pieces(self, store: Any, start: int, length: int) -> Iterator[tuple[int, int]]:
        """Yield address and length of the pieces of a range, each in one registered part."""
        end = start + length
        while start < end:
            part = start // REGISTERED_BYTES
            with self._lock:
                if part not in self._parts:
                    self._register(store, part)
            piece_end = min(end, (part + 1) * REGISTERED_BYTES)
            yield self._base + start, piece_end - start
            start = piece_end

    def _register(self, store: Any, part: int) -> None:
        start = part * REGISTERED_BYTES
        length = min(REGISTERED_BYTES, len(self._mapping) - start)
        register(store, self._base + start, length)
        self._parts.add(part)


class Room(threading.local):
    """Registered memory of one thread, through which objects of small ranges are moved."""

    address, size_bytes = 0, 0

    def take(self, store: Any, size_bytes: int) -> int:
        """Return the address of `size_bytes`, valid until the next call."""
        if size_bytes > self.size_bytes:
            if self.size_bytes:
                store.unregister_buffer(self.address)
            self._bytes = ctypes.c_char.from_buffer(hidden(mmap.mmap(-1, size_bytes)))
            self.address = ctypes.addressof(self._bytes)
            self.size_bytes = size_bytes
            register(store, self.address, size_bytes)
        return self.address


class Helper:
    """The client and the memory it uses; its methods are the calls of a `Client`."""

    def __init__(self, store: Any, engine: Any) -> None:
        self._store = store
        self._engine = engine
        self._is_tcp = False
        self._memories: dict[int, Memory] = {}
        self._room = Room()

    def set_up(self, here: str, metadata: str, *more: Any) -> Any:
        """Set the client up; return a code."""
        *_, protocol, devices, _ = more
        self._is_tcp = protocol == "tcp"
        if not self._is_tcp:
            return self._store.setup(here, metadata, *more)
        os.environ["MC_FORCE_TCP"] = "1"  # else the engine takes the RDMA devices that it finds
        code = self._engine.initialize(here, metadata, protocol, devices)
        return code or self._store.setup(here, metadata, *more, self._engine.get_engine())

    def open(self, number: int, num_descriptors: int, channel: Connection) -> None:
        """Map a file by the first descriptor that follows; the others stay open meanwhile."""
        descriptor, *_ = (recv_handle(channel) for _ in range(num_descriptors))
        self._memories[number] = Memory(descriptor)

    def has(self, keys: Sequence[str]) -> Any:
        return self._store.batch_is_exist(keys)

    def sizes(self, keys: Sequence[str]) -> list[int]:
        codes: list[int] = []
        for key in keys:
            codes.append(self._store.get_size(key))
            if codes[-1] in NO_MASTER:
                break  # each of the others would wait for it as long
        return codes

    def get(self, keys: Sequence[str], objects: Sequence[Ranges]) -> Any:
        """See `Client.get`.

        A client's own read polls on a core until all bytes have arrived: over TCP, its transfer
        engine reads what is in memory, and is polled now and then.
        """
        addresses, lengths, copies = self.moved(objects)
        replicas = self._store.batch_get_replica_desc(keys) if self._is_tcp else {}
        reads, others = [], []
        for index, key in enumerate(keys):
            place = place_of(replicas.get(key, ()), sum(lengths[index]))
            if place is None:
                others.append(index)
                continue
            starts = itertools.accumulate(lengths[index], initial=place.buffer_address)
            for address, start, length in zip(
                addresses[index], starts, lengths[index], strict=False
            ):
                read = place.transport_endpoint, [address], [start], [length]
                reads.append(self._engine.batch_transfer_async_read(*read))
        codes = [FAILED] * len(keys)
        if others:
            step_back()
            rest = ([each[index] for index in others] for each in (keys, addresses, lengths))
            found = self._store.batch_get_into_multi_buffers(*rest)
            for index, code in zip(others, found, strict=True):
                codes[index] = code
        for read in reads:
            while read and not (state := self._engine.transfer_check_status(read)):
                time.sleep(PAUSE_S)
            if not read or state < 0:
                return codes  # the engine kills this process
        for index in {*range(len(keys))}.difference(others):
            codes[index] = sum(lengths[index])
        for index, pieces in copies.items():
            for target, source, length in pieces if codes[index] > 0 else ():
                ctypes.memmove(target, source, length)
        return codes

    def put(
        self, keys: Sequence[str], objects: Sequence[Ranges], num_replicas: int, is_kept: object
    ) -> Any:
        from mooncake.store import ReplicateConfig, SoftPinAction

        how = ReplicateConfig()
        how.replica_num = num_replicas
        if is_kept:
            how.soft_pin_action = SoftPinAction.ENABLE
        addresses, lengths, copies = self.moved(objects)
        for source, target, length in itertools.chain(*copies.values()):
            ctypes.memmove(target, source, length)
        step_back()
        return self._store.batch_put_from_multi_buffers(keys, addresses, lengths, how)

    def delete(self, keys: Sequence[str]) -> Any:
        """Delete objects, whoever reads them at this moment."""
        return self._store.batch_remove(keys, True)

    def close(self) -> None:
        """Withdraw the memory of this process from the store."""
        self._store.close()

    def moved(
        self, objects: Sequence[Ranges]
    ) -> tuple[list[list[int]], list[list[int]], dict[int, list[tuple[int, int, int]]]]:
        """Return `places`, but one range for an object of small ones.

        And for each of these the copies: address of a piece, address in that range, length.
        """
        addresses, lengths = self.places(objects)
        if not self._is_tcp:
            return addresses, lengths, {}
        small = [at for at, each in enumerate(lengths) if sum(each) < RANGE_BYTES * len(each)]
        room = self._room.take(self._store, sum(sum(lengths[index]) for index in small))
        copies = {}
        for index in small:
            starts = list(itertools.accumulate(lengths[index], initial=room))
            copies[index] = list(zip(addresses[index], starts, lengths[index], strict=False))
            addresses[index], lengths[index] = [room], [starts[-1] - room]
            room = starts[-1]
        return addresses, lengths, copies

    def places(self, objects: Sequence[Ranges]) -> tuple[list[list[int]], list[list[int]]]:
        """Return addresses and lengths of the memory of objects."""
        addresses: list[list[int]] = [[] for _ in objects]
        lengths: list[list[int]] = [[] for _ in objects]
        for index, ranges in enumerate(objects):
            for number, *place in ranges:
                for address, length in self._memories[number].pieces(self._store, *place):
                    addresses[index].append(address)
                    lengths[index].append(length)
        return addresses, lengths


def register(store: Any, address: int, length: int) -> None:
    """Register memory with a client; raise OSError if it refuses."""
    if code := store.register_buffer(address, length):
        raise OSError(f"{length} bytes of host memory cannot be registered (code {code})")


def step_back() -> None:
    """Lower the priority of this thread."""
    os.setpriority(os.PRIO_PROCESS, 0, NICE)  # of this thread alone


def place_of(replicas: Sequence[Any], size_bytes: int) -> Any:
    """Return where an object of this size is in memory, if it is."""
    in_memory = (each.get_memory_descriptor() for each in replicas if each.is_memory_replica())
    places = (each.buffer_descriptor for each in in_memory)
    return next((place for place in places if place.size == size_bytes), None)


def serve(helper: Helper, channel: Connection) -> None:
    """Answer calls until the engine has ended or closed the channel."""
    while True:
        try:
            verb, *arguments = json.loads(channel.recv_bytes())
            if verb == "open":
                arguments.append(channel)
            try:
                answer = [getattr(helper, verb)(*arguments), ""]
            except Exception as error:
                answer = [None, f"{type(error).__name__}: {error}"]
            channel.send_bytes(json.dumps(answer).encode())
        except (EOFError, OSError):
            os.kill(os.getpid(), signal.SIGKILL)  # whatever the client is doing


def main(kind: type[Helper]) -> None:
    """Serve channels until one has ended, whatever the threads do then."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C is for the engine, which ends it
    title, *descriptors = sys.argv[1:]
    with contextlib.suppress(ImportError):
        import setproctitle

        setproctitle.setproctitle(title)
    from mooncake.engine import TransferEngine
    from mooncake.store import MooncakeDistributedStore

    helper, ends = kind(MooncakeDistributedStore(), TransferEngine()), select.poll()
    for descriptor in map(int, descriptors):
        ends.register(descriptor, 0)
        threading.Thread(target=serve, args=(helper, Connection(descriptor))).start()
    ends.poll()
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main(Helper)
