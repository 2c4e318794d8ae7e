"""Whose turn it is to use a connection to a bucket.

A request waits for its blocks in the order of its tokens, and is served with the part that has come
if the rest is late. So a fetch that came before another goes before it; both together would bring
the first one half as fast. Spills have what fetches leave, and a share that these do not take.
"""

from __future__ import annotations

import asyncio
import itertools
from heapq import heappop, heappush
from typing import Final, NamedTuple

KEPT_SHARE: Final = 0.25
"""Of all turns, one at least, for spills while there are fetches."""


class Rank(NamedTuple):
    """What a turn is for.

    Attributes:
        number: of the fetch or spill, in the order in which they came.
    """

    is_spill: bool
    number: int


_Waiting = list[tuple[int, int, "asyncio.Future[None]"]]


class Turns:
    """A semaphore that knows who goes first. It belongs to the loop's thread.

    Args:
        number: of turns that are had at a time.
    """

    def __init__(self, number: int) -> None:
        self._num_free = number
        self._num_kept = max(1, int(KEPT_SHARE * number))
        self._num_spilling = 0
        self._fetches: _Waiting = []
        self._spills: _Waiting = []
        self._numbers = itertools.count()

    def __repr__(self) -> str:
        waiting = f"{len(self._fetches)} and {len(self._spills)} wait"
        return f"<Turns, {self._num_free} free, {waiting} to fetch and to spill>"

    async def take(self, rank: Rank) -> None:
        """Wait for a turn; `give` must follow."""
        if not self._num_free:
            future = asyncio.get_running_loop().create_future()
            waiting = self._spills if rank.is_spill else self._fetches
            heappush(waiting, (rank.number, next(self._numbers), future))
            try:
                await future  # who gives a turn has counted it
            except asyncio.CancelledError:
                if not future.cancelled():
                    self.give(rank)
                raise
            return
        self._num_free -= 1
        self._num_spilling += rank.is_spill

    def give(self, rank: Rank) -> None:
        """Let the next one have a turn that was taken."""
        self._num_spilling -= rank.is_spill
        waiting = self._first()
        if not waiting:
            self._num_free += 1
            return
        _, _, future = heappop(waiting)
        self._num_spilling += waiting is self._spills
        future.set_result(None)

    def is_wanted(self, rank: Rank) -> bool:
        """Return whether another is to have this turn, rather than the next object of this call."""
        waiting = self._first()
        if not waiting:
            return False
        if waiting is self._spills:
            return not rank.is_spill and self._num_spilling < self._num_kept
        if rank.is_spill:
            return self._num_spilling > self._num_kept
        return waiting[0][0] < rank.number

    def _first(self) -> _Waiting:
        """Return those of whom the first is next; empty if nobody waits."""
        for waiting in (self._fetches, self._spills):
            while waiting and waiting[0][2].done():
                heappop(waiting)  # it was cancelled
        if self._spills and (not self._fetches or self._num_spilling < self._num_kept):
            return self._spills
        return self._fetches
