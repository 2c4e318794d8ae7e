"""The order in which filled slots are overwritten: the interface of eviction policies, and LRU.

A policy knows no prompts: the order of the slots of a release says all that matters. A lease is
what other caches call an access. A call takes thousands of slots while vLLM's scheduler waits:
hence batches move, not slots, and no slot is an object.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from itertools import chain, islice
from typing import ClassVar

Hashes = Sequence[bytes | None]


class EvictionPolicy:
    """The order of the filled slots without a lease. Deterministic; each call is one step.

    Args:
        num_slots: of the pool.
        hashes: by slot, the hash of the block that it holds, to recognize evicted blocks.
    """

    may_refuse: ClassVar = False  # `admits` may return False

    def __init__(self, num_slots: int, hashes: Hashes = ()) -> None:
        # Mutable, here and in each policy, and changed by the methods below only.
        self._queue = SlotQueue(num_slots)
        self._age_s = 0.0

    def release(self, slots: Sequence[int], now_s: float) -> None:
        """Make filled slots evictable.

        Args:
            slots: none of them evictable yet, none twice, in the order of their eviction: the tail
                of a prefix first, because it is useless without its head.
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
        """Remove slots, leased or not, whose contents are worthless, with their history."""
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


class SlotQueue:
    """Slots in order: appended in batches, taken from the front, removed anywhere.

    A slot's ticket is the number of its batch, 0 without one. Removing a slot clears its ticket;
    its entry is stale from then on, even when the slot joins another batch. Each append sweeps out
    stale entries in proportion to its size, so no call pays for all of them.

    Bound: an entry per slot, and about as many stale ones.
    """

    def __init__(self, num_slots: int) -> None:
        # All is mutable, and changed here only.
        self._tickets = [0] * num_slots
        self._last_ticket = 0
        # Ticket, time of release and slots of each batch. The last slot is taken first, because
        # the end of a list is cheap. `_swept` comes before `_batches`.
        self._swept: deque[tuple[int, float, list[int]]] = deque()
        self._batches: deque[tuple[int, float, list[int]]] = deque()
        self._num_entries = 0  # including stale ones
        self._num_slots = 0

    def __len__(self) -> int:
        return self._num_slots

    def append(self, slots: Sequence[int], released_s: float) -> None:
        """Add slots to the end; the first of them is taken first."""
        if not slots:
            return
        self._last_ticket = ticket = self._last_ticket + 1
        tickets = self._tickets
        for slot in slots:
            tickets[slot] = ticket
        self._batches.append((ticket, released_s, list(reversed(slots))))
        self._num_slots += len(slots)
        self._num_entries += len(slots)
        if self._num_entries > 2 * self._num_slots:
            self._sweep(4 * len(slots))

    def prepend(self, slots: Sequence[int], released_s: float) -> None:
        """Add slots to the front; the first of them is taken first."""
        if not slots:
            return
        self._last_ticket = ticket = self._last_ticket + 1
        for slot in slots:
            self._tickets[slot] = ticket
        self._swept.appendleft((ticket, released_s, list(reversed(slots))))
        self._num_slots += len(slots)
        self._num_entries += len(slots)

    def peek(self, count: int) -> list[int]:
        """Return the first slots, in the order of `take`."""
        found: list[int] = []
        for ticket, _, batch in chain(self._swept, self._batches):
            if len(found) >= count:
                break
            live = (slot for slot in reversed(batch) if self._tickets[slot] == ticket)
            found += islice(live, count - len(found))
        return found

    def remove(self, slots: Iterable[int]) -> None:
        """Remove those of the slots that are in the queue."""
        tickets = self._tickets
        num_removed = 0
        for slot in slots:
            if tickets[slot]:
                tickets[slot] = 0
                num_removed += 1
        self._num_slots -= num_removed

    def take(self, count: int) -> list[tuple[float, list[int]]]:
        """Remove and return up to `count` slots in order, by batch with its time of release."""
        taken: list[tuple[float, list[int]]] = []
        tickets = self._tickets
        num_left = max(0, min(count, self._num_slots))
        self._num_slots -= num_left
        while num_left:
            batches = self._swept or self._batches
            ticket, released_s, batch = batches[0]
            num_before = len(batch)
            tail = batch[-num_left:]
            del batch[-num_left:]
            slots = [slot for slot in reversed(tail) if tickets[slot] == ticket]
            if len(slots) < len(tail):  # more of the batch may be stale
                batch[:] = [slot for slot in batch if tickets[slot] == ticket]
            if not batch:
                batches.popleft()
            self._num_entries -= num_before - len(batch)
            for slot in slots:
                tickets[slot] = 0
            num_left -= len(slots)
            taken.append((released_s, slots))
        return taken

    def _sweep(self, num_entries: int) -> None:
        tickets = self._tickets
        while num_entries > 0:
            if not self._batches:
                self._batches, self._swept = self._swept, self._batches
                return
            ticket, released_s, batch = self._batches.popleft()
            live = [slot for slot in batch if tickets[slot] == ticket]
            if live:
                self._swept.append((ticket, released_s, live))
            self._num_entries -= len(batch) - len(live)
            num_entries -= len(batch)
