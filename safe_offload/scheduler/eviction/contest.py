"""Which order of eviction would hit most, from a sample of blocks.

Each order has a host cache in miniature, as `hit_curve.py` has for each size, of keys that are
sampled by their hash. What they would have hit of the same prompts is compared.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_left
from collections import OrderedDict, deque
from collections.abc import Sequence
from itertools import compress, count, filterfalse, repeat
from typing import Any

from safe_offload.scheduler.eviction.adaptive import FRESH_SHARE, GHOST_SLOTS, Order
from safe_offload.scheduler.eviction.reuse import ExpectedReuse

NUM_SAMPLED = 1024  # slots of each miniature; more above 262,144 slots of the host
NUM_SAMPLED_MIN = 32  # with fewer, chance would decide: below 4,096 slots there is no contest
RATE_MAX = 1 / 128  # of all blocks that are sampled
FIRST = 2 / 3  # of `CERTAINTY`, before the first change: the start was no choice
CERTAINTY = 1.5  # standard errors by which another order has to lead
LEAD = 0.02  # of what the present one hits, by which it has to lead as well
START = Order.LRU
AHEAD = 8  # of its slots `RETURNS` evicts so many'th more than it needs: to find the first costs
AT_ONCE = 4  # requests that are compared when one ends, of those that waited
HOLD_S = 120.0  # between two changes, at least
WINDOW = 32.0  # times its slots a miniature is asked for before what it hit counts a third


class Contest:
    """The order that is to be used: the one that is best, with some certainty and some patience.

    Args:
        num_slots: of the host.
        may_refuse: `RETURNS` may refuse to admit blocks worth less than their victims.
        rate_max: the most of all blocks that is sampled.

    Attributes:
        order: that is to be used. Read only.

    Bound: `NUM_SAMPLED` slots in each miniature, or 1/256 of the host's if that is more, and twice
    as many keys that wait.
    """

    def __init__(
        self, num_slots: int, *, may_refuse: bool = True, rate_max: float = RATE_MAX
    ) -> None:
        num_values = max(1, min(int(256 * rate_max), round(256 * NUM_SAMPLED / num_slots)))
        values = b"".join(b"\\x%02x" % value for value in range(num_values))
        self._sampled = re.compile(b"[" + values + b"]")
        self._size = size = max(1, round(num_slots * num_values / 256))
        self._window = WINDOW * size
        # What follows is mutable, and only `see` changes it.
        self.order = START
        self.miniatures = _Lru(size), _TwoQueues(size), _Returns(size, may_refuse=may_refuse)
        self._waiting: deque[tuple[list[bytes], int, float]] = deque()
        self._num_waiting = 0  # keys
        # By how much each order leads another, and the sum of the squares of what that consists of.
        self._leads = {(a, b): [0.0, 0.0] for a in Order for b in Order if a < b}
        self._num_hit = 0.0  # in the present order
        self._num_asked = 0  # since the orders differed last
        self._free_s = -math.inf

    def see(
        self, hashes: Sequence[bytes], num_asked: int, now_s: float, num_empty: int = 0
    ) -> None:
        """A request has ended.

        Args:
            num_asked: its first blocks, which could be hit.
            num_empty: slots of the host. While it has room all orders are the same.
        """
        if not hashes:
            return
        size = len(hashes[0])
        last_bytes = b"".join(hashes)[size - 1 :: size]
        places = list(map(re.Match.start, self._sampled.finditer(last_bytes)))
        if not places:
            return
        waiting = self._waiting
        waiting.append(
            (list(map(hashes.__getitem__, places)), bisect_left(places, num_asked), now_s)
        )
        self._num_waiting += len(places)
        while self._num_waiting > 2 * self._size:
            self._num_waiting -= len(waiting.popleft()[0])
        for _ in range(0 if num_empty else min(AT_ONCE, len(waiting))):
            keys, num_asked, then_s = waiting.popleft()
            self._num_waiting -= len(keys)
            self._use(keys, num_asked, then_s)

    def _use(self, keys: list[bytes], num_asked: int, now_s: float) -> None:
        lru, two_queues, returns = self.miniatures
        found = lru.use(keys, now_s), two_queues.use(keys, now_s), returns.use(keys, now_s)
        self._num_asked += num_asked
        if found[0] == found[1] == found[2]:
            self._num_hit += min(found[0], num_asked)
        else:
            hits = {order: min(num_asked, each) for order, each in zip(Order, found, strict=True)}
            self._num_hit += hits[self.order]
            self._compare(hits)
            if now_s >= self._free_s:
                self._choose(now_s)

    def _compare(self, hits: dict[Order, int]) -> None:
        kept = math.exp(-self._num_asked / self._window)
        self._num_asked = 0
        self._num_hit *= kept
        for (a, b), lead in self._leads.items():
            more = hits[a] - hits[b]
            lead[:] = lead[0] * kept + more, lead[1] * kept + more * more

    def _choose(self, now_s: float) -> None:
        best, best_lead = self.order, LEAD * self._num_hit
        factor = CERTAINTY * (1 if self._free_s > 0 else FIRST)
        for (a, b), (more, squares) in self._leads.items():
            if self.order in (a, b):
                lead = more if b is self.order else -more
                if lead > max(best_lead, factor * math.sqrt(squares)):
                    best, best_lead = a if b is self.order else b, lead
        if best is not self.order:
            self.order = best
            self._free_s = now_s + HOLD_S


class _Miniature:
    """A host cache of few slots, each for one sampled block, that evicts in one order.

    What it holds is mutable, and only `use` changes it.

    Bound: its slots.
    """

    def use(self, keys: Sequence[bytes], now_s: float) -> int:
        """Look up, use and store the blocks of a request; return how many of the first were hit."""
        raise NotImplementedError


class _Lru(_Miniature):
    """What was used longest ago goes first.

    Bound: its slots.
    """

    def __init__(self, num_slots: int) -> None:
        self._num_slots = num_slots
        self._keys: OrderedDict[bytes, None] = OrderedDict()

    def use(self, keys: Sequence[bytes], now_s: float) -> int:
        held = self._keys
        is_held = [*map(held.__contains__, keys)]
        deque(map(held.pop, keys, repeat(None)), maxlen=0)
        held.update(dict.fromkeys(reversed(keys)))
        if len(held) > self._num_slots:
            _evict(held, len(held) - self._num_slots)
        return is_held.index(False) if False in is_held else len(keys)


class _TwoQueues(_Miniature):
    """What was used once goes first.

    Bound: its slots, and `GHOST_SLOTS` times as many that are gone.
    """

    def __init__(self, num_slots: int) -> None:
        self._num_slots = num_slots
        self._fresh, self._used, self._gone = (OrderedDict[bytes, None]() for _ in range(3))

    def use(self, keys: Sequence[bytes], now_s: float) -> int:
        fresh, used, gone = self._fresh, self._used, self._gone
        held = used.keys() & keys | fresh.keys() & keys
        known = held | gone.keys() & keys
        if known:
            for queue in (fresh, used, gone):
                deque(map(queue.pop, known, repeat(None)), maxlen=0)
            used.update(dict.fromkeys(filter(known.__contains__, reversed(keys))))
        if len(known) < len(keys):
            fresh.update(dict.fromkeys(filterfalse(known.__contains__, reversed(keys))))
            num_more = len(fresh) + len(used) - self._num_slots
            if num_more > 0:
                num_fresh = min(num_more, max(0, len(fresh) - int(FRESH_SHARE * self._num_slots)))
                gone.update(_evict(fresh, num_fresh))
                if num_fresh < num_more:
                    gone.update(_evict(used, num_more - num_fresh))
                _evict(gone, len(gone) - GHOST_SLOTS * self._num_slots)
        return next(compress(count(), map(held.isdisjoint, zip(keys))), len(keys))


class _Returns(_Miniature):
    """What is least likely to be used soon goes first.

    Bound: its slots.
    """

    def __init__(self, num_slots: int, *, may_refuse: bool) -> None:
        self._may_refuse = may_refuse
        self._num_ahead = num_slots // AHEAD
        num_slots += self._num_ahead // 2  # as many are empty on average
        self._hashes: list[Any] = [None] * num_slots
        self._slots: dict[bytes, int] = {}
        self._empty = list(range(num_slots))
        self._policy = ExpectedReuse(num_slots, self._hashes)

    def use(self, keys: Sequence[bytes], now_s: float) -> int:
        policy, table = self._policy, self._slots
        found: list[Any] = [*map(table.get, keys)]
        if None not in found:
            policy.lease(found)
            policy.release(found[::-1], now_s)
            return len(keys)
        held = [slot for slot in found if slot is not None]
        policy.lease(held)
        self._store([key for key in keys if key not in table], held[-1:], now_s)
        policy.release([table[key] for key in reversed(keys) if key in table], now_s)
        return found.index(None)

    def _store(self, keys: Sequence[bytes], last_slot: list[int], now_s: float) -> None:
        num_more = len(keys) - len(self._empty)
        if num_more > 0:
            before = last_slot[0] if last_slot else None
            if self._may_refuse and not self._policy.admits(num_more, before, keys[0], now_s):
                return
            evicted = self._policy.evict(num_more + self._num_ahead, now_s)
            deque(map(self._slots.pop, map(self._hashes.__getitem__, evicted)), maxlen=0)
            self._empty += evicted
        slots = self._empty[: len(keys)]
        del self._empty[: len(keys)]
        self._slots.update(zip(keys, slots, strict=False))
        deque(map(self._hashes.__setitem__, slots, keys), maxlen=0)


def _evict(queue: OrderedDict[bytes, Any], count: int) -> list[tuple[bytes, Any]]:
    """Take out the first keys."""
    num_taken = min(max(0, count), len(queue))
    return list(map(queue.popitem, repeat(False, num_taken)))
