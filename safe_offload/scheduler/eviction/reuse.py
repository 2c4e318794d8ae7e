"""Eviction by expected time to reuse, learned from the gaps between past uses."""

from __future__ import annotations

import heapq
import itertools
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, MutableSequence, Sequence
from dataclasses import dataclass
from itertools import compress, groupby, repeat
from typing import Any

import numpy as np

from safe_offload.scheduler.eviction.policy import EvictionPolicy, Hashes

HORIZON_S = 60.0  # a use this much later is worth half as much
GHOSTS_MAX = 4096  # evicted batches that are recognized
_NUM_AGES = 32  # bins
_ADMITTED = -1  # ticket of a ghost whose return was learned when its blocks were admitted
_NEW, _ABANDONED, _USED = 0, 1, 2  # kinds; from `_USED` on by the mean age bin of the last gaps
_SHARED = 128  # flag of a kind: several conversations use these blocks
_NUM_KINDS = _USED + _NUM_AGES // 2
_GROUPS = _NEW, _ABANDONED, _USED  # the first kind of each group of similar kinds
_GROUP_OF_KIND = [min(kind, _USED) for kind in range(_NUM_KINDS)]
_PRIOR, _PRIOR_OF_KIND = 0.1, 1.0  # weights of the broader estimates, in shares of all slots
_LEARN_EVERY = 64  # reuses of batches; sooner at first: 8, 16, 32
_KEPT = 0.97  # share of each count that is kept when it has been learned from


class ExpectedReuse(EvictionPolicy):
    """The batch least likely to be used again soon is evicted first.

    A batch is slots released together: a request releases its new blocks as one, and what it used
    of each older batch as another. A batch has a kind: new, used again after gaps of similar
    length, or abandoned, when its conversation went on without it. Of each kind, only the oldest
    and the newest batch are compared. Evicted batches are recognized by the hash of their first
    block, to learn from late reuse as well. Until anything is learned, the order is that of `Lru`.

    Bound: an entry per slot, a batch per slot in one, and `GHOSTS_MAX`.
    """

    may_refuse = True

    def __init__(self, num_slots: int, hashes: Hashes = ()) -> None:
        super().__init__(num_slots, hashes)  # its queue: slots of `evict_first`
        self._hashes = hashes or [None] * num_slots
        self._now_s = 0.0
        self._last_ticket = 0
        self._num_slots = 0  # in batches
        self._tickets = [0] * num_slots  # of the batch that a slot is in, 0 if in none
        self._kinds = bytearray(num_slots)  # of slots in no batch, from their next release
        self._batches: dict[int, Batch] = {}  # by ticket
        self._by_kind: list[OrderedDict[int, Batch]] = [OrderedDict() for _ in range(_NUM_KINDS)]
        # Leases whose gap is unknown until the time is: batch, its kind, slots, goes on.
        self._used: list[tuple[Batch, int, list[int], bool]] = []
        self._ghosts: OrderedDict[bytes, Batch] = OrderedDict()
        self._worth = _Worth(num_slots)

    def release(self, slots: Sequence[int], now_s: float) -> None:
        self._set_time(now_s)
        new: list[int] = []
        for kind, run in groupby(slots, self._kinds.__getitem__):
            if kind == _NEW:
                new += run
            else:
                self._add_new(new, kind)
                self._add([*run], kind)
                new = []
        self._add_new(new)

    def lease(self, slots: Iterable[int]) -> None:
        for batch, run in self._take_out(list(slots)):
            goes_on = len(run) >= batch.num_live and batch.kind < _SHARED
            self._used.append((batch, batch.kind, run, goes_on))
            if goes_on and batch.num_live and batch.kind != _ABANDONED:
                self._by_kind[_queue_of(batch.kind)].pop(batch.ticket)
                batch.kind = _ABANDONED
                self._by_kind[_ABANDONED][batch.ticket] = batch

    def hold(self, slots: Iterable[int]) -> None:
        for batch, run in self._take_out(list(slots)):
            set_each(self._kinds, run, batch.kind)

    def admits(self, count: int, last_slot: int | None, first_hash: bytes, now_s: float) -> bool:
        """Refused blocks are recognized later as if they were evicted now."""
        self._set_time(now_s)
        kind = self._kind_after(last_slot)
        if kind == _NEW:
            kind = self._kind_of_ghost(first_hash)
        num_left = count - len(self._queue)
        for batch in self._in_order() if num_left > 0 else ():
            num_left -= batch.num_live
            if num_left <= 0:
                if self._worth_of(batch) > self._worth.table[_queue_of(kind)][0]:
                    self._worth.lose(_queue_of(kind), count)
                    self._add_ghost(first_hash, Batch(0, kind, now_s, [], 0, count))
                    return False
                break
        if kind != _NEW:
            self._add_ghost(first_hash, Batch(_ADMITTED, kind, now_s, [], 0, 0))
        return True

    def _kind_of_ghost(self, first_hash: bytes | None) -> int:
        """Return the kind of a batch by its first block; learn from it if it was evicted."""
        ghost = self._ghosts.pop(first_hash or b"", None)
        if ghost is None:
            return _NEW
        kind, gap_s = ghost.kind & ~_SHARED, self._now_s - ghost.released_s
        if ghost.ticket == _ADMITTED:
            return kind
        return self._used_again(kind, gap_s, ghost.size, was_gone=True)

    def _kind_after(self, slot: int | None) -> int:
        """Return the kind of new blocks after the block of a slot, `_NEW` if that is unknown."""
        if slot is None:
            return _NEW
        batch = self._batches.get(self._tickets[slot])
        kind = self._kinds[slot] if batch is None else batch.kind
        if kind & _SHARED or kind == _ABANDONED:
            return _NEW
        return kind if batch is None else _next_kind(kind, self._age_bin_of(batch))

    def peek(self, count: int) -> list[int]:
        found = self._queue.peek(count)
        for batch in self._in_order():
            if len(found) >= count:
                break
            found += reversed(batch.live(self._tickets))
        return found[: max(0, count)]

    def evict(self, count: int, now_s: float) -> list[int]:
        self._set_time(now_s)
        evicted = super().evict(count, now_s)
        tickets, emptied = self._tickets, []
        for batch in self._in_order() if len(evicted) < count else ():
            taken = batch.take(count - len(evicted), tickets)
            set_each(tickets, taken, 0)
            self._age_s += len(taken) * (now_s - batch.released_s)
            evicted += taken
            self._num_slots -= len(taken)
            if not batch.num_live:
                emptied.append((batch, taken[-1]))
            if len(evicted) >= count:
                break
        for batch, first_slot in emptied:
            self._bury(batch, first_slot)
        set_each(self._kinds, evicted, _NEW)
        return evicted

    def forget(self, slots: Iterable[int]) -> None:
        self._set_time(self._now_s)
        deque(self._take_out(slots := list(slots)), maxlen=0)
        set_each(self._kinds, slots, _NEW)

    def __len__(self) -> int:
        return len(self._queue) + self._num_slots

    def _set_time(self, now_s: float) -> None:
        """Set the time, and learn from the leases since the last call, which came without one."""
        self._now_s = now_s
        used, self._used = self._used, []
        for batch, kind, run, goes_on in used:
            new_kind = self._used_again(kind, now_s - batch.released_s, len(run), was_gone=False)
            set_each(self._kinds, run, new_kind if goes_on else new_kind | _SHARED)

    def _used_again(self, kind: int, gap_s: float, count: int, *, was_gone: bool) -> int:
        """Learn that slots were used again; return their new kind."""
        gap = _age_bin(gap_s)
        if not gap:  # one request, looked up twice or preempted
            return kind
        self._worth.observe(_queue_of(kind), gap, count, was_gone=was_gone)
        return kind & _SHARED | _next_kind(kind & ~_SHARED, gap)

    def _add_new(self, slots: list[int], kind_before: int = _SHARED) -> None:
        """Add slots with new blocks; those that continue a conversation get the kind before."""
        if slots:
            is_first = kind_before & _SHARED
            kind = self._kind_of_ghost(self._hashes[slots[-1]]) if is_first else kind_before
            self._add(slots, kind)

    def _add(self, slots: list[int], kind: int) -> None:
        self._last_ticket = ticket = self._last_ticket + 1
        set_each(self._tickets, slots, ticket)
        slots.reverse()
        batch = Batch(ticket, kind, self._now_s, slots, len(slots), len(slots))
        self._batches[ticket] = self._by_kind[_queue_of(kind)][ticket] = batch
        self._num_slots += len(slots)

    def _take_out(self, slots: list[int]) -> Iterator[tuple[Batch, list[int]]]:
        """Remove slots from their batches; yield each batch with those slots."""
        self._queue.remove(slots)
        tickets = self._tickets
        for ticket, found in groupby(slots, tickets.__getitem__):
            if ticket:
                run = list(dict.fromkeys(found))
                set_each(tickets, run, 0)
                batch = self._batches[ticket]
                batch.num_live -= len(run)
                self._num_slots -= len(run)
                yield batch, run
                if not batch.num_live:
                    self._drop(batch)
                elif 2 * batch.num_live < len(batch.slots):
                    batch.slots = batch.live(tickets)

    def _drop(self, batch: Batch) -> None:
        del self._batches[batch.ticket], self._by_kind[_queue_of(batch.kind)][batch.ticket]

    def _bury(self, batch: Batch, first_slot: int) -> None:
        self._drop(batch)
        self._worth.lose(_queue_of(batch.kind), batch.size)
        self._add_ghost(self._hashes[first_slot], batch)

    def _add_ghost(self, first_hash: bytes | None, batch: Batch) -> None:
        if first_hash is not None:
            self._ghosts[first_hash] = batch
            self._ghosts.move_to_end(first_hash)
            if len(self._ghosts) > GHOSTS_MAX:
                self._ghosts.popitem(last=False)

    def _age_bin_of(self, batch: Batch) -> int:
        return _age_bin(self._now_s - batch.released_s)

    def _worth_of(self, batch: Batch) -> float:
        return self._worth.table[_queue_of(batch.kind)][self._age_bin_of(batch)]

    def _in_order(self) -> Iterator[Batch]:
        """Yield all batches in the order of their worth; none may be added or dropped meanwhile."""
        ends: list[tuple[float, int, int, int, Batch, Iterator[Batch]]] = []
        table, now_s = self._worth.table, self._now_s

        def offer(kind: int, end: int, batches: Iterator[Batch]) -> None:
            if batch := next(batches, None):
                age_s = now_s - batch.released_s  # as `_worth_of`, in half as many steps
                age = min(_NUM_AGES - 1, int(16 * age_s * age_s).bit_length())
                heapq.heappush(ends, (table[kind][age], batch.ticket, end, kind, batch, batches))

        num_left = list(map(len, self._by_kind))
        for kind, batches in enumerate(self._by_kind):
            if batches:
                offer(kind, 0, iter(batches.values()))
                offer(kind, 1, reversed(batches.values()))
        while ends:
            *_, end, kind, batch, rest = heapq.heappop(ends)
            if num_left[kind]:
                num_left[kind] -= 1
                yield batch
                offer(kind, end, rest)


def set_each(values: MutableSequence[int], slots: Iterable[int], value: int) -> None:
    """Set the values of slots, without a step of Python for each."""
    deque(map(values.__setitem__, slots, repeat(value)), maxlen=0)


def _age_bin(age_s: float) -> int:
    return min(_NUM_AGES - 1, int(16 * age_s * age_s).bit_length())  # half octaves from 0.25 s


def _queue_of(kind: int) -> int:
    kind &= ~_SHARED
    return kind if kind < _USED else _USED + (kind - _USED) // 2


def _next_kind(kind: int, gap: int) -> int:
    """Return the kind, without flags, of a batch used again after a gap of this age bin."""
    if not gap:
        return kind
    return _USED + ((kind - _USED + gap) // 2 if kind >= _USED else gap)


@dataclass(slots=True)
class Batch:
    """Slots released together; only `ExpectedReuse` changes it.

    Bound: an entry per slot; after a lease, fewer than half are stale.
    """

    ticket: int
    kind: int
    released_s: float
    slots: list[int]  # the last one is evicted first; some may be stale, as in `SlotQueue`
    num_live: int
    size: int  # when it was released

    def live(self, tickets: list[int]) -> list[int]:
        """Return the slots that are still in this batch."""
        return list(
            compress(self.slots, map(self.ticket.__eq__, map(tickets.__getitem__, self.slots)))
        )

    def take(self, count: int, tickets: list[int]) -> list[int]:
        """Remove and return the slots that are evicted first."""
        if len(self.slots) > self.num_live:
            self.slots = self.live(tickets)
        taken = self.slots[-count:]
        del self.slots[-count:]
        self.num_live = len(self.slots)
        taken.reverse()
        return taken


class _Worth:
    """The worth of a slot by kind and age: 1 if it is used again now, half at `HORIZON_S`.

    The chance of reuse at an age is estimated from few cases, and drifts. So each estimate starts
    from a broader one, as if that had been observed on a share of all slots: a kind of used batches
    from all used batches, each group of kinds from all batches, and these from a chance of a tenth
    in each half octave.

    Source: N. Beckmann, H. Chen, A. Cidon, "LHD: improving cache hit rate by maximizing hit
    density", NSDI 2018.

    Bound: an entry per kind and age.
    """

    def __init__(self, num_slots: int) -> None:
        self.table = [[0.0] * _NUM_AGES for _ in range(_NUM_KINDS)]
        self._reused = [[0.0] * _NUM_AGES for _ in range(_NUM_KINDS)]
        self._lost = [0.0] * _NUM_KINDS
        self._num_slots = num_slots
        self._num_seen = 0

    def observe(self, kind: int, age: int, count: int, *, was_gone: bool) -> None:
        """Slots were used again; evicted ones no longer count as lost."""
        self._reused[kind][age] += count
        if was_gone:
            self._lost[kind] = max(0.0, self._lost[kind] - count)
        self._num_seen += 1
        if self._num_seen % min(_LEARN_EVERY, max(8, 1 << self._num_seen.bit_length() - 1)) == 0:
            self._learn()

    def lose(self, kind: int, count: int) -> None:
        """Slots are evicted: until they return, they count as never used again."""
        self._lost[kind] += count

    def _learn(self) -> None:
        reused, lost = np.array(self._reused), np.array(self._lost)
        of_groups = np.add.reduceat(reused, _GROUPS), np.add.reduceat(lost, _GROUPS)
        of_all = np.add.reduce(of_groups[0])[None], np.add.reduce(of_groups[1])[None]
        chances = _chances(*of_all, np.full((1, _NUM_AGES), 0.1), _PRIOR * self._num_slots)
        chances = _chances(*of_groups, chances, _PRIOR * self._num_slots)[_GROUP_OF_KIND]
        left = _chances(reused, lost, chances, _PRIOR_OF_KIND * self._num_slots).T
        later, worth = (1 - left) * _DISCOUNTS, np.zeros(_NUM_KINDS)
        table = np.empty_like(left)
        for age in range(_NUM_AGES - 1, -1, -1):
            table[age] = worth = _DISCOUNTS[age] * (left[age] + later[age] * worth)
        self.table = table.T.tolist()
        self._reused = (reused * _KEPT).tolist()
        self._lost = (lost * _KEPT).tolist()


_EDGES_S = [0.0, *(0.25 * 2 ** (age / 2) for age in range(_NUM_AGES))]
_HALF_S = [(later - first) / 2 for first, later in itertools.pairwise(_EDGES_S)]


_Floats = np.ndarray[Any, np.dtype[np.float64]]
_DISCOUNTS: _Floats = HORIZON_S / (HORIZON_S + np.array(_HALF_S))[:, None]  # by age


def _chances(reused: _Floats, lost: _Floats, expected: _Floats, weight: float) -> _Floats:
    """Return the chance of reuse at each age, for slots not reused before, by kind."""
    at_risk = np.add.accumulate(np.column_stack((lost, reused[:, ::-1])), axis=1)[:, :0:-1]
    chances: _Floats = (reused + weight * expected) / (at_risk + weight)
    return chances
