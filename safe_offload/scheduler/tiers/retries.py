"""Blocks that a tier failed to take, until they are written again.

A hit has no gaps: one block that is lost at the head of a prompt costs all that is behind it. So
what failed goes before what is new, and what failed most often, the oldest, before all else; but
for while tiers take nothing (`Spills`). As all that waits to be spilled, it is not leased.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from typing import Final

from safe_offload.scheduler.pending import Write

PAUSES_S: Final = (0.0, 1.0, 4.0, 16.0, 64.0)
"""Before each further try. They outlast a circuit breaker that opens, and a server that restarts.
"""
WAITING_MAX: Final = 1 << 16
"""Blocks; those that fail when as many wait are not tried again."""


class Retries:
    """Writes that wait for their next try.

    Its state, which nothing else changes: for each pause, by slot, those that make it and when it
    ends, in this order.

    Bound: `WAITING_MAX`.
    """

    def __init__(self) -> None:
        self._waiting: tuple[dict[int, tuple[float, Write]], ...] = tuple({} for _ in PAUSES_S)

    def __len__(self) -> int:
        return sum(map(len, self._waiting))

    def add(self, write: Write, tiers: int, now_s: float) -> bool:
        """Try a write that has failed again in these tiers; return False if it has had its tries.

        What its slot held before is forgotten.
        """
        number = write.num_failures
        if number >= len(PAUSES_S) or len(self) >= WAITING_MAX:
            return False
        write = write._replace(targets=tiers, num_failures=number + 1)
        self._waiting[number].pop(write.slot, None)
        self._waiting[number][write.slot] = now_s + PAUSES_S[number], write
        return True

    @property
    def due_s(self) -> float:
        """When the first pause ends."""
        firsts = (next(iter(waiting.values()))[0] for waiting in self._waiting if waiting)
        return min(firsts, default=float("inf"))

    def take(self, count: int, now_s: float) -> list[Write]:
        """Take out up to `count` writes whose pauses have ended."""
        due: list[Write] = []
        for waiting in reversed(self._waiting):
            for slot, (due_s, write) in list(islice(waiting.items(), count - len(due))):
                if due_s > now_s:
                    break
                del waiting[slot]
                due.append(write)
        return due

    def discard(self, slots: Iterable[int]) -> int:
        """Forget what these slots held; return how many had something that waits."""
        found = [(waiting, waiting.keys() & slots) for waiting in self._waiting if waiting]
        for waiting, gone in found:
            for slot in gone:
                del waiting[slot]
        return sum(len(gone) for _, gone in found)

    def clear(self) -> None:
        """Forget all."""
        for waiting in self._waiting:
            waiting.clear()
