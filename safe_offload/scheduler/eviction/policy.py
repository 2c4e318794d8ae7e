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

PROTECTED_SHARE = 0.2
"""Of the evictable slots. More holds more against a flood of one-off prompts, and loses hits where
recency is all that counts (docs/benchmarks.md: eviction policies)."""
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

    def prefer(self, order: str) -> None:
        """Evict in this order from now on, if the policy has several."""

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


class Slru(EvictionPolicy):
    """Segmented LRU: what was never hit goes before what was.

    A slot whose content is new waits on probation; one that was hit is protected when it is
    released. Protected slots may be a share of the evictable ones; those above it, the longest
    unused first, go to the end of the probation queue, as if they had just been released for the
    first time. So one-off prompts, however long, push out each other and what has been of no use
    for a while, and a prefix that many prompts share outlasts them.

    Bound: an entry for each slot.

    Source: R. Karedla, J. S. Love, B. G. Wherry, "Caching strategies to improve disk system
    performance", IEEE Computer 27(3), 1994. Of our own is that a slot moves when it is released,
    and that the share is of what is evictable, enforced when something is evicted.
    """

    def __init__(self, num_slots: int, hashes: Hashes = ()) -> None:
        super().__init__(num_slots, hashes)  # its queue is the one on probation
        self._protected = SlotQueue(num_slots)
        self._was_hit = bytearray(num_slots)

    def release(self, slots: Sequence[int], now_s: float) -> None:
        """See `EvictionPolicy`."""
        was_hit = self._was_hit
        used = [slot for slot in slots if was_hit[slot]]
        if len(used) < len(slots):
            unused = [slot for slot in slots if not was_hit[slot]] if used else slots
            self._queue.append(unused, now_s)
        self._protected.append(used, now_s)

    def lease(self, slots: Iterable[int]) -> None:
        """See `EvictionPolicy`."""
        self._take_out(list(slots), was_hit=True)

    def hold(self, slots: Iterable[int]) -> None:
        """See `EvictionPolicy`."""
        slots = list(slots)
        self._queue.remove(slots)
        self._protected.remove(slots)

    def peek(self, count: int) -> list[int]:
        """See `EvictionPolicy`; protected slots that are too many come after all others here."""
        first = self._queue.peek(count)
        return first + self._protected.peek(count - len(first))

    def evict(self, count: int, now_s: float) -> list[int]:
        """See `EvictionPolicy`."""
        num_surplus = len(self._protected) - int(PROTECTED_SHARE * len(self))
        for released_s, slots in self._protected.take(num_surplus):
            self._queue.append(slots, released_s)
        evicted = self._evicted(self._queue.take(count), now_s)
        evicted += self._evicted(self._protected.take(count - len(evicted)), now_s)
        for slot in evicted:
            self._was_hit[slot] = False
        return evicted

    def forget(self, slots: Iterable[int]) -> None:
        """See `EvictionPolicy`."""
        self._take_out(list(slots), was_hit=False)

    def __len__(self) -> int:
        return len(self._queue) + len(self._protected)

    def _take_out(self, slots: list[int], *, was_hit: bool) -> None:
        self._queue.remove(slots)
        self._protected.remove(slots)
        for slot in slots:
            self._was_hit[slot] = was_hit
