"""A queue of slots, the building block of eviction policies."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from itertools import chain, islice


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
        """Remove the stale entries of the next batches, at least `num_entries` entries."""
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
