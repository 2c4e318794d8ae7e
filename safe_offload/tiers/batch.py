"""Objects that a tier moves together, and its batches in flight."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any, Final

from safe_offload.tiers.base import Buffers, Name, Result
from safe_offload.tiers.waiting import outlast

_BAD_NAMES_MAX: Final = 100_000


class Batch:
    """The objects of one call, known by their index, and what became of each.

    Attributes:
        left: what has not been begun.
        results: CANCELLED for what has not ended.
    """

    def __init__(self, names: Sequence[Name], slots: Sequence[Buffers]) -> None:
        self.names = names
        self.slots = slots
        self.left = deque(range(len(names)))
        self.results = [Result.CANCELLED] * len(names)

    def take_left(self) -> Iterator[int]:
        """Yield what has not been begun; several threads may do so at the same time."""
        while True:
            try:
                index = self.left.popleft()
            except IndexError:
                return
            yield index

    def settle(self, indices: Iterable[int], result: Result) -> None:
        """Note what became of some objects."""
        for index in indices:
            self.results[index] = result


class Calls:
    """The calls of a tier in flight; it belongs to the loop's thread.

    Attributes:
        is_closed: no call may begin.
    """

    def __init__(self) -> None:
        self.is_closed = False
        self._under_way: dict[Callable[[], object], Collection[asyncio.Future[Any]]] = {}

    async def outlast(
        self, workers: Collection[asyncio.Future[Any]], give_up: Callable[[], object]
    ) -> None:
        """Return when all workers of a call have ended, however often it is cancelled.

        Each time, and by `close`, `give_up` is called. What workers raise is left to the caller.
        """
        self._under_way[give_up] = workers
        try:
            await outlast(workers, give_up)
        finally:
            del self._under_way[give_up]

    async def close(self) -> None:
        """Give up all calls, and wait for them; a second call is free."""
        self.is_closed = True
        for give_up in list(self._under_way):
            give_up()
        while self._under_way:
            await asyncio.wait([each for workers in self._under_way.values() for each in workers])
            await asyncio.sleep(0)  # the calls that wait for them go on


class BadNames(set[Name]):
    """Names of what can be neither read nor deleted, which is not offered again."""

    def add(self, name: Name) -> None:
        """Add a name; all others are forgotten when there are too many."""
        if len(self) >= _BAD_NAMES_MAX:
            self.clear()
        super().add(name)
