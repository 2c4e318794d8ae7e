"""Objects that a tier moves together, and its batches in flight."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any, Final

from safe_offload.tiers.base import Buffers, Name, Result
from safe_offload.tiers.naming import HEADER_BYTES
from safe_offload.tiers.seals.seal import PLAIN, Digest, Room, Seal, new_room
from safe_offload.tiers.waiting import outlast

_BAD_NAMES_MAX: Final = 100_000


class Batch:
    """The objects of one call, by index, and the result of each, as a `Seal` judges it.

    A store moves bytes; they are judged here, while the next ones arrive.

    Attributes:
        left: objects not begun.
        results: CANCELLED until an object has ended.
        undescribed: namespaces without a description.
    """

    def __init__(
        self,
        names: Sequence[Name],
        slots: Sequence[Buffers],
        seal: Seal = PLAIN,
        bad_names: Collection[Name] = (),
    ) -> None:
        self.names = names
        self.slots = slots
        self.left = deque(range(len(names)))
        self.results = [Result.CANCELLED] * len(names)
        self.undescribed: set[bytes] = set()
        self._seal = seal
        self._bad_names = bad_names

    def take_left(self) -> Iterator[int]:
        """Yield objects not begun; several threads may do so at the same time."""
        while True:
            try:
                index = self.left.popleft()
            except IndexError:
                return
            yield index

    def settle(self, indices: Iterable[int], result: Result) -> None:
        """Set the result of some objects."""
        for index in indices:
            self.results[index] = result

    async def outlast(
        self, jobs: Collection[Future[None]], give_up: Callable[[], object] = lambda: None
    ) -> None:
        """Return when jobs on threads have ended; raise what one of them raised.

        When cancelled, no other object and no other job begins, and `give_up` is called.
        """

        def cancel() -> None:
            self.left.clear()
            for job in jobs:
                job.cancel()
            give_up()

        await outlast([asyncio.wrap_future(job) for job in jobs], cancel)
        for job in jobs:
            if not job.cancelled():
                job.result()

    def is_bad(self, index: int) -> bool:
        """Return whether the stored object is unusable, and so must be overwritten."""
        return self.names[index] in self._bad_names

    def size_of(self, index: int) -> int:
        """Return the bytes of an object as it is stored, with its header."""
        return HEADER_BYTES + sum(buffer.nbytes for buffer in self.slots[index])

    # ---- writing: an object as it is stored ----------------------------------------------------

    def sealed(self, index: int, room: Room = new_room) -> tuple[bytes, Buffers]:
        """Return the header of an object, and its bytes; see `Seal.seal`."""
        return self._seal.seal(self.names[index], self.slots[index], room)

    async def sealed_async(self, index: int) -> tuple[bytes, Buffers]:
        """Return header and bytes, made on another thread if that takes long."""
        return await self._seal.seal_async(self.names[index], self.slots[index])

    async def whole(self, index: int) -> bytes:
        """Return a copy of an object as it is stored."""
        header, body = await self.sealed_async(index)
        return b"".join((header, *body))

    # ---- reading: DONE, CORRUPT or FOREIGN -----------------------------------------------------

    def begin_digest(self) -> Digest | None:
        return self._seal.begin_digest()

    def judge(self, index: int, header: bytes, buffers: Sequence[memoryview]) -> Result:
        return self._seal.judge(header, self.names[index], buffers)

    async def judge_async(self, index: int, header: bytes, digest: Digest | None = None) -> Result:
        """Judge the bytes in the slot, on another thread if that takes long."""
        name, slot = self.names[index], self.slots[index]
        return await self._seal.judge_async(header, name, slot, digest)

    async def take(self, index: int, stored: bytes | memoryview) -> Result:
        """Copy an object as it is stored into its slot, and judge it."""
        if len(stored) != self.size_of(index):
            return Result.CORRUPT
        data = memoryview(stored)[HEADER_BYTES:]
        for buffer in self.slots[index]:
            buffer[:] = data[: buffer.nbytes]
            data = data[buffer.nbytes :]
        return await self.judge_async(index, bytes(stored[:HEADER_BYTES]))


class Calls:
    """The calls of a tier in flight, on the loop's thread; once `is_closed`, none may begin."""

    def __init__(self) -> None:
        self.is_closed = False
        self._under_way: dict[Callable[[], object], Collection[asyncio.Future[Any]]] = {}

    async def outlast(
        self, workers: Collection[asyncio.Future[Any]], give_up: Callable[[], object]
    ) -> None:
        """Return when all workers of a call have ended, however often it is cancelled.

        Each cancellation, and `close`, call `give_up`. The caller handles exceptions of workers.
        """
        self._under_way[give_up] = workers
        try:
            await outlast(workers, give_up)
        finally:
            del self._under_way[give_up]

    async def close(self) -> None:
        """Cancel all calls, and wait for them; a second call does nothing."""
        self.is_closed = True
        for give_up in list(self._under_way):
            give_up()
        while self._under_way:
            await asyncio.wait([each for workers in self._under_way.values() for each in workers])
            await asyncio.sleep(0)  # the calls that wait for them go on


class BadNames(set[Name]):
    """Names of objects that can be neither read nor deleted, and are not offered again."""

    def add(self, name: Name) -> None:
        """Add a name; forget all others if there are too many."""
        if len(self) >= _BAD_NAMES_MAX:
            self.clear()
        super().add(name)
