"""Which filled slot goes first when a new one is needed: policies over slots that nothing leases.

A policy knows nothing of prompts. What it needs of them comes with the order of a release, the tail
of a prefix before its head: a block is worth nothing without those before it. A lease is what an
access is elsewhere. A call takes thousands of slots on the scheduler's way to the next step: hence
no object for each slot, and a batch, not a slot, is what moves.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import ClassVar

from safe_offload.scheduler.eviction.slot_queue import SlotQueue

Hashes = Sequence[bytes | None]


class EvictionPolicy:
    """Order of the filled slots that nothing leases: a queue, and what other orders override.

    Deterministic, each call one step.

    `hashes` has what each filled slot holds, for policies that know again what they evicted;
    `may_refuse` says whether there is anything that `admits` does not admit.
    """

    may_refuse: ClassVar = False

    def __init__(self, num_slots: int, hashes: Hashes = ()) -> None:
        # Mutable, here and in each policy: changed by the methods below and by nothing else.
        self._queue = SlotQueue(num_slots)
        self._age_s = 0.0

    def release(self, slots: Sequence[int], now_s: float) -> None:
        """Make filled slots evictable.

        Args:
            slots: none of them evictable yet, none twice, in the order in which they may go: the
                tail of a prefix first.
            now_s: from which their age counts.
        """
        self._queue.append(slots, now_s)

    def lease(self, slots: Iterable[int]) -> None:
        """Take out slots whose content is needed again (a hit).

        One that was leased already may be among them; it has been used once more. Slots from
        `evict` are leased without this call: what they will hold is new.
        """
        self._queue.remove(slots)

    def hold(self, slots: Iterable[int]) -> None:
        """Take out slots whose content is read, leased or not, which is no use of it (a spill)."""
        self._queue.remove(slots)

    def evict_first(self, slots: Sequence[int], now_s: float) -> None:
        """Make filled slots evictable before all others, the first of them first; see `release`."""
        self._queue.prepend(slots, now_s)

    def admits(self, count: int, last_slot: int | None, first_hash: bytes, now_s: float) -> bool:
        """Whether what a request would store is worth as much as what would go for it.

        Args:
            count: slots that would be evicted.
            last_slot: the last one with what comes before; None if nothing is there.
            first_hash: of the first block to be stored.
        """
        return True

    def peek(self, count: int) -> list[int]:
        """Return up to `count` slots that are evicted next, the first to go first."""
        return self._queue.peek(count)

    def evict(self, count: int, now_s: float) -> list[int]:
        """Take out up to `count` slots to be overwritten, the first to go first."""
        return self._evicted(self._queue.take(count), now_s)

    def forget(self, slots: Iterable[int]) -> None:
        """Take out those of the slots that are evictable: what they hold is worthless.

        One that is leased may be among them; what was known of its use is forgotten.
        """
        self._queue.remove(slots)

    def __len__(self) -> int:
        return len(self._queue)

    def take_age_s(self) -> float:
        """Return the time since the release of each slot evicted since the last call, added up."""
        age_s, self._age_s = self._age_s, 0.0
        return age_s

    def _evicted(self, batches: list[tuple[float, list[int]]], now_s: float) -> list[int]:
        """Add the age of all batches to the sum, and return their slots."""
        evicted: list[int] = []
        for released_s, slots in batches:
            self._age_s += len(slots) * (now_s - released_s)
            evicted += slots
        return evicted

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {len(self)} evictable slots>"


class Lru(EvictionPolicy):
    """The slot goes first that was released longest ago."""
