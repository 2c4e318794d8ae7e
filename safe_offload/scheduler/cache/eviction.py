"""Which filled slot goes first when a new one is needed: policies over slots that nothing leases.

A policy knows nothing of prompts. What it needs of them comes with the order of a release, the tail
of a prefix before its head: a block is worth nothing without those before it. A lease is what an
access is elsewhere. A call takes thousands of slots on the scheduler's way to the next step: hence
no object for each slot, and a batch, not a slot, is what moves.
"""

from __future__ import annotations

import heapq
import itertools
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, groupby

PROTECTED_SHARE = 0.2
"""Of the evictable slots. More holds more against a flood of one-off prompts, and loses hits where
recency is all that counts (docs/benchmarks.md: eviction policies)."""
HORIZON_S = 60.0  # to `Returns` a use so much later is worth half as much
GHOSTS_MAX = 4096  # evicted batches that `Returns` knows again


Hashes = Sequence[bytes | None]


class EvictionPolicy:
    """Order of the filled slots that nothing leases: LRU, and what other orders override.

    The slot goes first that was released longest ago. Deterministic, each call one step.

    `hashes` has what each filled slot holds, for policies that know again what they evicted.
    """

    def __init__(self, num_slots: int, hashes: Hashes = ()) -> None:
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

    def __init__(self, num_slots: int, hashes: Hashes = ()) -> None:
        super().__init__(num_slots, hashes)  # its queue is the one on probation
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


class Returns(EvictionPolicy):
    """What is least likely to be used again soon goes first, as far as the past tells.

    What a request releases is a batch, or several where its prompt went on from several. A batch is
    of a kind: new, or used again after gaps of this order, or left over where its conversation went
    on without it; of each kind only the oldest and the newest are compared. Evicted batches are
    known again by the hash of their first block, so that what returns too late is learned of too.
    """

    def __init__(self, num_slots: int, hashes: Hashes = ()) -> None:
        super().__init__(num_slots, hashes)  # its queue has what was hurried
        self._hashes = hashes or [None] * num_slots
        self._now_s = 0.0
        self._last_ticket = 0
        self._num_slots = 0  # in batches
        self._tickets = [0] * num_slots  # of the batch that a slot is in, 0 if in none
        self._kinds = bytearray(num_slots)  # of slots in no batch: what they will be released as
        self._batches: dict[int, _Batch] = {}
        self._by_kind: list[OrderedDict[int, _Batch]] = [OrderedDict() for _ in range(_NUM_KINDS)]
        self._used: list[tuple[_Batch, int, list[int], bool]] = []  # the gap is not known yet
        self._ghosts: OrderedDict[bytes, _Batch] = OrderedDict()
        self._worth = _Worth(num_slots)

    def release(self, slots: Sequence[int], now_s: float) -> None:
        """See `EvictionPolicy`."""
        self._set_time(now_s)
        new: list[int] = []
        for kind, run in groupby(slots, self._kinds.__getitem__):
            if kind == _NEW:
                new += run
                continue
            if kind & _SHARED:
                self._add_new(new)
                new = []
            self._add([*new, *run], kind)  # what is new follows on it
            new = []
        self._add_new(new)

    def lease(self, slots: Iterable[int]) -> None:
        """See `EvictionPolicy`."""
        for batch, run in self._take_out(list(slots)):
            goes_on = len(run) >= batch.num_live and batch.kind < _SHARED
            self._used.append((batch, batch.kind, run, goes_on))
            if goes_on and batch.num_live and batch.kind != _LEFT:
                self._by_kind[_queue_of(batch.kind)].pop(batch.ticket)
                batch.kind = _LEFT
                self._by_kind[_LEFT][batch.ticket] = batch

    def hold(self, slots: Iterable[int]) -> None:
        """See `EvictionPolicy`."""
        for batch, run in self._take_out(list(slots)):
            for slot in run:
                self._kinds[slot] = batch.kind

    def peek(self, count: int) -> list[int]:
        """See `EvictionPolicy`."""
        found = self._queue.peek(count)
        for batch in self._in_order():
            if len(found) >= count:
                break
            found += reversed(batch.live(self._tickets))
        return found[: max(0, count)]

    def evict(self, count: int, now_s: float) -> list[int]:
        """See `EvictionPolicy`."""
        self._set_time(now_s)
        evicted = super().evict(count, now_s)
        tickets, emptied = self._tickets, []
        for batch in self._in_order() if len(evicted) < count else ():
            for slot in (taken := batch.take(count - len(evicted), tickets)):
                tickets[slot] = 0
            self._age_s += len(taken) * (now_s - batch.released_s)
            evicted += taken
            self._num_slots -= len(taken)
            if not batch.num_live:
                emptied.append((batch, taken[-1]))
            if len(evicted) >= count:
                break
        for batch, first_slot in emptied:
            self._bury(batch, first_slot)
        for slot in evicted:
            self._kinds[slot] = _NEW
        return evicted

    def forget(self, slots: Iterable[int]) -> None:
        """See `EvictionPolicy`."""
        self._set_time(self._now_s)
        deque(self._take_out(slots := list(slots)), maxlen=0)
        for slot in slots:
            self._kinds[slot] = _NEW

    def __len__(self) -> int:
        return len(self._queue) + self._num_slots

    def _set_time(self, now_s: float) -> None:
        """Learn from the leases since the last call, of which the time is known only now."""
        self._now_s = now_s
        used, self._used = self._used, []
        for batch, kind, run, goes_on in used:
            new_kind = self._used_again(kind, now_s - batch.released_s, len(run), was_gone=False)
            for slot in run:
                self._kinds[slot] = new_kind if goes_on else new_kind | _SHARED

    def _used_again(self, kind: int, gap_s: float, count: int, *, was_gone: bool) -> int:
        """Learn that slots were used again; return the kind that they are now."""
        gap = _age_bin(gap_s)
        if not gap:  # a request that was looked at twice, or preempted
            return kind
        self._worth.observe(_queue_of(kind), gap, count, was_gone=was_gone)
        known = kind & ~_SHARED
        return kind & _SHARED | _USED + ((known - _USED + gap) // 2 if known >= _USED else gap)

    def _add_new(self, slots: list[int]) -> None:
        """Add slots that follow on nothing, unless what they hold was evicted before."""
        if slots:
            kind = _NEW
            ghost = self._ghosts.pop(self._hashes[slots[-1]] or b"", None)
            if ghost is not None:
                gap_s = self._now_s - ghost.released_s
                kind = self._used_again(ghost.kind & ~_SHARED, gap_s, ghost.size, was_gone=True)
            self._add(slots, kind)

    def _add(self, slots: list[int], kind: int) -> None:
        self._last_ticket = ticket = self._last_ticket + 1
        tickets = self._tickets
        for slot in slots:
            tickets[slot] = ticket
        slots.reverse()
        batch = _Batch(ticket, kind, self._now_s, slots, len(slots), len(slots))
        self._batches[ticket] = self._by_kind[_queue_of(kind)][ticket] = batch
        self._num_slots += len(slots)

    def _take_out(self, slots: list[int]) -> Iterator[tuple[_Batch, list[int]]]:
        """Take slots out of their batches; yield these, each with its slots."""
        self._queue.remove(slots)
        tickets = self._tickets
        for ticket, found in groupby(slots, tickets.__getitem__):
            if ticket:
                run = list(dict.fromkeys(found))
                for slot in run:
                    tickets[slot] = 0
                batch = self._batches[ticket]
                batch.num_live -= len(run)
                self._num_slots -= len(run)
                yield batch, run
                if not batch.num_live:
                    self._drop(batch)
                elif 2 * batch.num_live < len(batch.slots):
                    batch.slots = batch.live(tickets)

    def _drop(self, batch: _Batch) -> None:
        del self._batches[batch.ticket], self._by_kind[_queue_of(batch.kind)][batch.ticket]

    def _bury(self, batch: _Batch, first_slot: int) -> None:
        self._drop(batch)
        self._worth.lose(_queue_of(batch.kind), batch.size)
        first_hash = self._hashes[first_slot]
        if first_hash is not None:
            self._ghosts[first_hash] = batch
            if len(self._ghosts) > GHOSTS_MAX:
                self._ghosts.popitem(last=False)

    def _in_order(self) -> Iterator[_Batch]:
        """Yield all batches, those worth least first; none may be added or dropped meanwhile."""
        ends: list[tuple[float, int, int, int, _Batch, Iterator[_Batch]]] = []

        def offer(kind: int, end: int, batches: Iterator[_Batch]) -> None:
            for batch in itertools.islice(batches, 1):
                worth = self._worth.table[kind][_age_bin(self._now_s - batch.released_s)]
                heapq.heappush(ends, (worth, batch.ticket, end, kind, batch, batches))

        num_left = list(map(len, self._by_kind))
        for kind, batches in enumerate(self._by_kind):
            offer(kind, 0, iter(batches.values()))
            offer(kind, 1, reversed(batches.values()))
        while ends:
            _, _, end, kind, batch, rest = heapq.heappop(ends)
            if num_left[kind]:
                num_left[kind] -= 1
                yield batch
                offer(kind, end, rest)


_NUM_AGES = 32
_NEW, _LEFT, _USED = 0, 1, 2  # kinds; from `_USED` on with the mean of the last gaps' age bins
_SHARED = 128  # flag of what others use too: what follows on it is not of its conversation
_NUM_KINDS = _USED + _NUM_AGES // 2
_LEARN_EVERY, _KEPT = 64, 0.99  # batches; of all counts, each time


def _age_bin(age_s: float) -> int:
    return min(_NUM_AGES - 1, int(16 * age_s * age_s).bit_length())  # half octaves from 0.25 s


def _queue_of(kind: int) -> int:
    kind &= ~_SHARED
    return kind if kind < _USED else _USED + (kind - _USED) // 2


@dataclass(slots=True)
class _Batch:
    """Slots that were released together; `Returns` alone changes it."""

    ticket: int
    kind: int
    released_s: float
    slots: list[int]  # the last one is the first to go; some may be stale, as in `_Queue`
    num_live: int
    size: int

    def live(self, tickets: list[int]) -> list[int]:
        return [slot for slot in self.slots if tickets[slot] == self.ticket]

    def take(self, count: int, tickets: list[int]) -> list[int]:
        if len(self.slots) > self.num_live:
            self.slots = self.live(tickets)
        taken = self.slots[-count:]
        del self.slots[-count:]
        self.num_live = len(self.slots)
        taken.reverse()
        return taken


class _Worth:
    """What a slot is worth, by kind and age: 1 if it is used again now, half at `HORIZON_S`.

    What is seldom seen is taken to be like all kinds together, and these to be used again in a
    tenth of the cases in each half octave. The idea is that of N. Beckmann, H. Chen, A. Cidon,
    "LHD: improving cache hit rate by maximizing hit density", NSDI 2018.
    """

    def __init__(self, num_slots: int) -> None:
        self.table = [[0.0] * _NUM_AGES for _ in range(_NUM_KINDS)]
        self._returned = [[0.0] * _NUM_AGES for _ in range(_NUM_KINDS)]
        self._lost = [0.0] * _NUM_KINDS
        self._prior = 0.1 * num_slots
        self._num_seen = 0

    def observe(self, kind: int, age: int, count: int, *, was_gone: bool) -> None:
        """Slots were used again; if they had been lost, they are not any more."""
        self._returned[kind][age] += count
        if was_gone:
            self._lost[kind] = max(0.0, self._lost[kind] - count)
        self._num_seen += 1
        if self._num_seen % _LEARN_EVERY == 1:
            self._learn()

    def lose(self, kind: int, count: int) -> None:
        """Slots are evicted: for now they count as never used again."""
        self._lost[kind] += count

    def _learn(self) -> None:
        returned = [sum(column) for column in zip(*self._returned, strict=True)]
        chances = _chances(returned, sum(self._lost), [0.1] * _NUM_AGES, self._prior)
        for kind, of_kind in enumerate(self._returned):
            left, worth = _chances(of_kind, self._lost[kind], chances, self._prior), 0.0
            for age in range(_NUM_AGES - 1, -1, -1):
                discount = HORIZON_S / (HORIZON_S + _HALF_S[age])
                worth = discount * (left[age] + (1 - left[age]) * discount * worth)
                self.table[kind][age] = worth
            of_kind[:] = [count * _KEPT for count in of_kind]
        self._lost = [count * _KEPT for count in self._lost]


_EDGES_S = [0.0, *(0.25 * 2 ** (age / 2) for age in range(_NUM_AGES))]
_HALF_S = [(later - first) / 2 for first, later in itertools.pairwise(_EDGES_S)]


def _chances(
    returned: list[float], lost: float, expected: list[float], weight: float
) -> list[float]:
    """Return for each age which part of what was not used before was used again at it."""
    chances, at_risk = [], lost
    for age in range(_NUM_AGES - 1, -1, -1):
        at_risk += returned[age]
        chances.append((returned[age] + weight * expected[age]) / (at_risk + weight))
    return chances[::-1]


POLICIES: dict[str, Callable[..., EvictionPolicy]] = {
    "lru": EvictionPolicy,
    "slru": Slru,
    "returns": Returns,
}
"""By the name that `eviction_policy` gives; arguments are those of `EvictionPolicy`."""


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
