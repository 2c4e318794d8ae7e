"""The order in which filled slots are overwritten: the interface of eviction policies, and LRU.

A policy knows no prompts. The order of the slots of a release says all that matters: the tail of a
prefix comes before its head, because a block is useless without those before it. A lease is what
other caches call an access. A call takes thousands of slots while vLLM's scheduler waits: hence
batches move, not slots, and no slot is an object.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import ClassVar

from safe_offload.scheduler.eviction.slot_queue import SlotQueue

Hashes = Sequence[bytes | None]


class EvictionPolicy:
    """The order of the filled slots without a lease.

    Deterministic; each call is one step.

    Args:
        num_slots: of the pool.
        hashes: by slot, the hash of the block that it holds, for policies that recognize blocks
            that they evicted.

    Attributes:
        may_refuse: `admits` may return False.
    """

    may_refuse: ClassVar = False

    def __init__(self, num_slots: int, hashes: Hashes = ()) -> None:
        # Mutable, here and in each policy, and changed by the methods below only.
        self._queue = SlotQueue(num_slots)
        self._age_s = 0.0

    def release(self, slots: Sequence[int], now_s: float) -> None:
        """Make filled slots evictable.

        Args:
            slots: none of them evictable yet, none twice, in the order of their eviction: the tail
                of a prefix first.
            now_s: the start of their age.
        """
        self._queue.append(slots, now_s)

    def lease(self, slots: Iterable[int]) -> None:
        """Remove slots whose contents are used again (a hit).

        They may include leased slots, which are used once more. Slots from `evict` are leased
        without this call, because their contents will be new.
        """
        self._queue.remove(slots)

    def hold(self, slots: Iterable[int]) -> None:
        """Remove slots, leased or not, whose contents are only read, not used (a spill)."""
        self._queue.remove(slots)

    def evict_first(self, slots: Sequence[int], now_s: float) -> None:
        """Make filled slots evictable before all others, in this order; see `release`."""
        self._queue.prepend(slots, now_s)

    def admits(self, count: int, last_slot: int | None, first_hash: bytes, now_s: float) -> bool:
        """Return whether the new blocks of a request are worth as much as their victims.

        Args:
            count: slots to evict.
            last_slot: holds the block before the first new one; None without one.
            first_hash: of the first new block.
        """
        return True

    def peek(self, count: int) -> list[int]:
        """Return up to `count` slots, in the order of their eviction."""
        return self._queue.peek(count)

    def evict(self, count: int, now_s: float) -> list[int]:
        """Remove and return up to `count` slots to be overwritten, in the order of eviction."""
        evicted: list[int] = []
        for released_s, slots in self._queue.take(count):
            self._age_s += len(slots) * (now_s - released_s)
            evicted += slots
        return evicted

    def forget(self, slots: Iterable[int]) -> None:
        """Remove slots whose contents are worthless.

        They may include leased slots, whose history is forgotten.
        """
        self._queue.remove(slots)

    def __len__(self) -> int:
        return len(self._queue)

    def take_age_s(self) -> float:
        """Return the sum of the ages of all slots evicted since the last call."""
        age_s, self._age_s = self._age_s, 0.0
        return age_s

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {len(self)} evictable slots>"


class Lru(EvictionPolicy):
    """The slot released the longest ago is evicted first."""
