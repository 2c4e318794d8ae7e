"""Which filled slot goes first when a new one is needed: policies over slots that nobody leases.

A policy knows nothing of prompts. What it needs of them comes with the order of a release, the tail
of a prefix before its head: a block is worth nothing without those before it. Slots that are leased
are none of its business until they are released, so that a lease is what an access is elsewhere.

A release of thousands of slots is one call on the scheduler's way to the next step. Hence no object
for each slot, and a batch, not a slot, is what moves.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

PROTECTED_SHARE = 0.2
"""Of the evictable slots. More holds more against a flood of one-off prompts, and loses hits where
recency is all that counts (docs/benchmarks.md: eviction policies)."""


class EvictionPolicy(Protocol):
    """Order of the filled slots that nobody leases; deterministic, each call one step.

    Args:
        num_slots: slots are 0 to `num_slots - 1`.

    Attributes:
        now_s: the time, which whoever asks for ages sets.
    """

    now_s: float

    def release(self, slots: Sequence[int]) -> None:
        """Nobody leases these filled slots any more.

        Args:
            slots: none of them evictable yet, none twice, in the order in which they may go: the
                tail of a prefix first.
        """

    def lease(self, slots: Iterable[int]) -> None:
        """What these slots hold is needed again (a hit): none of them is evictable any more.

        One that was leased already may be among them; it has been used once more. Slots from
        `evict` are leased without this call: what they will hold is new.
        """

    def evict(self, count: int) -> list[int]:
        """Take out slots to be overwritten.

        Returns:
            Up to `count` slots, the first to go first; fewer if no more are evictable.
        """

    def forget(self, slots: Iterable[int]) -> None:
        """What these slots hold is worthless: take out those that are evictable.

        One that is leased may be among them; what was known of its use is forgotten.
        """

    def take_age_s(self) -> float:
        """Time since the release of each slot evicted since the last call, all added up."""

    def __len__(self) -> int:
        """Evictable slots."""


class _Ages:
    """How long it is that evicted slots were released: a sum, since a batch has one time."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._age_s = 0.0

    def take_age_s(self) -> float:
        """See `EvictionPolicy`."""
        age_s, self._age_s = self._age_s, 0.0
        return age_s

    def _add(self, batches: list[tuple[float, list[int]]]) -> list[int]:
        """The slots of all batches, whose age is added to the sum."""
        evicted: list[int] = []
        for released_s, slots in batches:
            self._age_s += len(slots) * (self.now_s - released_s)
            evicted += slots
        return evicted


class Lru(_Ages):
    """The slot goes first that was released longest ago. See `EvictionPolicy`."""

    def __init__(self, num_slots: int) -> None:
        super().__init__()
        self._queue = _Queue(num_slots)

    def release(self, slots: Sequence[int]) -> None:
        """See `EvictionPolicy`."""
        self._queue.append(slots, self.now_s)

    def lease(self, slots: Iterable[int]) -> None:
        """See `EvictionPolicy`."""
        self._queue.remove(slots)

    def evict(self, count: int) -> list[int]:
        """See `EvictionPolicy`."""
        return self._add(self._queue.take(count))

    def forget(self, slots: Iterable[int]) -> None:
        """See `EvictionPolicy`."""
        self._queue.remove(slots)

    def __len__(self) -> int:
        return len(self._queue)


class Slru(_Ages):
    """Segmented LRU: what was never hit goes before what was. See `EvictionPolicy`.

    A slot whose content is new waits on probation; one that was hit is protected when it is
    released. Protected slots may be a share of the evictable ones; those above it, the longest
    unused first, go to the end of the probation queue, as if they had just been released for the
    first time. So one-off prompts, however long, push out each other and what has been of no use
    for a while, and a prefix that many prompts share outlasts them.

    Source: R. Karedla, J. S. Love, B. G. Wherry, "Caching strategies to improve disk system
    performance", IEEE Computer 27(3), 1994. Of our own is that a slot moves when it is released,
    and that the share is of what is evictable, enforced when something is evicted: how many slots
    are leased at other times says nothing about what is worth keeping.
    """

    def __init__(self, num_slots: int) -> None:
        super().__init__()
        self._probation = _Queue(num_slots)
        self._protected = _Queue(num_slots)
        self._was_hit = bytearray(num_slots)

    def release(self, slots: Sequence[int]) -> None:
        """See `EvictionPolicy`."""
        was_hit = self._was_hit
        used = [slot for slot in slots if was_hit[slot]]
        if len(used) < len(slots):
            unused = [slot for slot in slots if not was_hit[slot]] if used else slots
            self._probation.append(unused, self.now_s)
        self._protected.append(used, self.now_s)

    def lease(self, slots: Iterable[int]) -> None:
        """See `EvictionPolicy`."""
        slots = list(slots)
        self._remove(slots)
        was_hit = self._was_hit
        for slot in slots:
            was_hit[slot] = True

    def evict(self, count: int) -> list[int]:
        """See `EvictionPolicy`."""
        self._demote()
        evicted = self._add(self._probation.take(count))
        evicted += self._add(self._protected.take(count - len(evicted)))
        was_hit = self._was_hit
        for slot in evicted:
            was_hit[slot] = False
        return evicted

    def forget(self, slots: Iterable[int]) -> None:
        """See `EvictionPolicy`."""
        slots = list(slots)
        self._remove(slots)
        was_hit = self._was_hit
        for slot in slots:
            was_hit[slot] = False

    def __len__(self) -> int:
        return len(self._probation) + len(self._protected)

    def _demote(self) -> None:
        surplus = len(self._protected) - int(PROTECTED_SHARE * len(self))
        if surplus > 0:
            for released_s, slots in self._protected.take(surplus):
                self._probation.append(slots, released_s)

    def _remove(self, slots: list[int]) -> None:
        self._probation.remove(slots)
        self._protected.remove(slots)


POLICIES: dict[str, Callable[[int], EvictionPolicy]] = {
    "lru": Lru,
    "slru": Slru,
}
"""By the name that `eviction_policy` gives."""


class _Queue:
    """Slots in order: appended in batches, taken from the front, removed from anywhere.

    A slot's ticket is the number of the batch that it is in, 0 if in none. To remove a slot is to
    clear its ticket: the entry in the batch is stale from then on, and stays so when the slot comes
    back in another batch. Stale entries are swept out bit by bit, in proportion to what is
    appended, so that no call pays for all of them.
    """

    def __init__(self, num_slots: int) -> None:
        self._tickets = [0] * num_slots
        self._last_ticket = 0
        # Tickets, when they were released, and slots, the last one to go first: the end is where a
        # list is cheap. All of `_swept` goes before all of `_batches`.
        self._swept: deque[tuple[int, float, list[int]]] = deque()
        self._batches: deque[tuple[int, float, list[int]]] = deque()
        self._num_entries = 0
        self._num_slots = 0

    def __len__(self) -> int:
        return self._num_slots

    def append(self, slots: Sequence[int], released_s: float) -> None:
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

    def remove(self, slots: Iterable[int]) -> None:
        tickets = self._tickets
        num_removed = 0
        for slot in slots:
            if tickets[slot]:
                tickets[slot] = 0
                num_removed += 1
        self._num_slots -= num_removed

    def take(self, count: int) -> list[tuple[float, list[int]]]:
        """Up to so many slots, in order, by when they were released."""
        taken: list[tuple[float, list[int]]] = []
        tickets = self._tickets
        num_left = min(count, self._num_slots)
        self._num_slots -= max(num_left, 0)
        while num_left > 0:
            batches = self._swept or self._batches
            ticket, released_s, batch = batches[0]
            slots = [slot for slot in batch[-num_left:] if tickets[slot] == ticket]
            if len(slots) < num_left:  # there are stale ones, so rid the batch of all of them
                live = [slot for slot in batch if tickets[slot] == ticket]
                self._num_entries -= len(batch) - len(live)
                batch[:] = live
                slots = live[-num_left:]
            del batch[len(batch) - len(slots) :]
            if not batch:
                batches.popleft()
            slots.reverse()
            self._num_entries -= len(slots)
            for slot in slots:
                tickets[slot] = 0
            num_left -= len(slots)
            taken.append((released_s, slots))
        return taken

    def _sweep(self, num_entries: int) -> None:
        """Rid the next batches, of at least so many entries, of the stale ones."""
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
