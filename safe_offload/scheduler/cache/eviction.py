"""Which filled slot goes first when a new one is needed: policies over slots that nothing leases.

A policy knows nothing of prompts. What it needs of them comes with the order of a release, the tail
of a prefix before its head: a block is worth nothing without those before it. A lease is what an
access is elsewhere. A call takes thousands of slots on the scheduler's way to the next step: hence
no object for each slot, and a batch, not a slot, is what moves.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from itertools import chain

PROTECTED_SHARE = 0.2
"""Of the evictable slots. More holds more against a flood of one-off prompts, and loses hits where
recency is all that counts (docs/benchmarks.md: eviction policies)."""


class EvictionPolicy:
    """Order of the filled slots that nothing leases: LRU, and what other orders override.

    The slot goes first that was released longest ago. Deterministic, each call one step.
    """

    def __init__(self, num_slots: int) -> None:
        # Mutable, here and in each policy: changed by the methods below and by nothing else.
        self._queue = _Queue(num_slots)
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

    def hurry(self, slots: Sequence[int], now_s: float) -> None:
        """Let evictable slots go before all others, the first of them first."""
        self.hold(slots)
        self._queue.prepend(slots, now_s)

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


class Slru(EvictionPolicy):
    """Segmented LRU: what was never hit goes before what was.

    A slot whose content is new waits on probation; one that was hit is protected when it is
    released. Protected slots may be a share of the evictable ones; those above it, the longest
    unused first, go to the end of the probation queue, as if they had just been released for the
    first time. So one-off prompts, however long, push out each other and what has been of no use
    for a while, and a prefix that many prompts share outlasts them.

    Source: R. Karedla, J. S. Love, B. G. Wherry, "Caching strategies to improve disk system
    performance", IEEE Computer 27(3), 1994. Of our own is that a slot moves when it is released,
    and that the share is of what is evictable, enforced when something is evicted.
    """

    def __init__(self, num_slots: int) -> None:
        super().__init__(num_slots)  # its queue is the one on probation
        self._protected = _Queue(num_slots)
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


POLICIES: dict[str, Callable[[int], EvictionPolicy]] = {
    "lru": EvictionPolicy,
    "slru": Slru,
}
"""By the name that `eviction_policy` gives; made of the number of slots."""


class _Queue:
    """Slots in order: appended in batches, taken from the front, removed from anywhere.

    A slot's ticket is the number of the batch that it is in, 0 if in none. To remove a slot is to
    clear its ticket: its entry is stale from then on, also when the slot is in another batch again.
    Stale entries are swept out in proportion to what is appended, so that no call pays for all.
    """

    def __init__(self, num_slots: int) -> None:
        # All is mutable, and changed here only.
        self._tickets = [0] * num_slots
        self._last_ticket = 0
        # Tickets, when they were released, and slots, the last one to go first: the end is where a
        # list is cheap. All of `_swept` goes before all of `_batches`.
        self._swept: deque[tuple[int, float, list[int]]] = deque()
        self._batches: deque[tuple[int, float, list[int]]] = deque()
        self._num_entries = 0  # of all batches, those that are stale too
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
        """Return the first slots, as `take` would."""
        found: list[int] = []
        for ticket, _, batch in chain(self._swept, self._batches):
            if len(found) >= count:
                break
            found += [slot for slot in reversed(batch) if self._tickets[slot] == ticket]
        return found[: max(0, count)]

    def remove(self, slots: Iterable[int]) -> None:
        tickets = self._tickets
        num_removed = 0
        for slot in slots:
            if tickets[slot]:
                tickets[slot] = 0
                num_removed += 1
        self._num_slots -= num_removed

    def take(self, count: int) -> list[tuple[float, list[int]]]:
        """Take up to `count` slots, in order, each batch with the time of its release."""
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
            if len(slots) < len(tail):  # then more of the batch may be stale
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
        """Rid the next batches, of at least `num_entries` entries, of the stale ones."""
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
