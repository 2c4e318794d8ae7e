"""Retries of failed writes to tiers.

A hit has no gaps: one block lost at the head of a prompt costs all blocks after it. So retries go
before new blocks, the oldest first, except while tiers take nothing (`Spills`). They have no lease.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from typing import Final

from safe_offload.scheduler.pending import Write

PAUSES_S: Final = (0.0, 1.0, 4.0, 16.0, 64.0)
"""Pauses before each retry. They outlast an open circuit breaker and a restart of a server."""
WAITING_MAX: Final = 1 << 16
"""Maximum number of waiting blocks; further failed ones are not retried."""


class Retries:
    """Writes that wait for their next try. Bound: `WAITING_MAX`."""

    def __init__(self) -> None:
        self._waiting: tuple[dict[int, tuple[float, Write]], ...] = tuple({} for _ in PAUSES_S)

    def __len__(self) -> int:
        return sum(map(len, self._waiting))

    def add(self, write: Write, tiers: int, now_s: float) -> bool:
        """Schedule a retry, in place of one of the same slot; False if there are too many."""
        number = write.num_failures
        if number >= len(PAUSES_S) or len(self) >= WAITING_MAX:
            return False
        write = write._replace(targets=tiers, num_failures=number + 1)
        self._waiting[number].pop(write.slot, None)
        self._waiting[number][write.slot] = now_s + PAUSES_S[number], write
        return True

    @property
    def due_s(self) -> float:
        """Return the end of the first pause."""
        firsts = (next(iter(waiting.values()))[0] for waiting in self._waiting if waiting)
        return min(firsts, default=float("inf"))

    def take(self, count: int, now_s: float) -> list[Write]:
        """Remove and return up to `count` writes whose pauses have ended."""
        due: list[Write] = []
        for waiting in reversed(self._waiting):
            for slot, (due_s, write) in list(islice(waiting.items(), count - len(due))):
                if due_s > now_s:
                    break
                del waiting[slot]
                due.append(write)
        return due

    def discard(self, slots: Iterable[int]) -> int:
        """Drop the writes of these slots; return their number."""
        found = [(waiting, waiting.keys() & slots) for waiting in self._waiting if waiting]
        for waiting, gone in found:
            for slot in gone:
                del waiting[slot]
        return sum(len(gone) for _, gone in found)

    def clear(self) -> None:
        """Drop all writes."""
        for waiting in self._waiting:
            waiting.clear()
