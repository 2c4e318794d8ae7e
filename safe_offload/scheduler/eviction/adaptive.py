"""Eviction in the order that would have hit most lately, of three."""

from __future__ import annotations

import enum
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence

from safe_offload.scheduler.eviction.policy import Hashes
from safe_offload.scheduler.eviction.reuse import SHARED, USED, Batch, ReuseBatches, set_each

FRESH_SHARE = 0.05
"""Of all slots, that what has never been hit keeps in the order `TWO_QUEUES`."""
GHOST_SLOTS = 4
"""Times all slots: what is asked for again after so many were evicted is new to `TWO_QUEUES`."""


class Order(enum.StrEnum):
    """What goes first."""

    LRU = "lru"
    TWO_QUEUES = "2q"
    RETURNS = "returns"


class Adaptive(ReuseBatches):
    """A queue as `EvictionPolicy` has it, until another order than `LRU` is preferred.

    From then on what is released is kept in batches, in all three orders at all times, so that a
    change is one step. What is still in the queue goes before all batches: it was released before
    them, so until it is gone nothing is evicted that `LRU` would keep.

    `TWO_QUEUES` lets what has never been hit go before what has been, down to a small share, and
    knows what was hit too late by the ghosts of `ReuseBatches`.

    Source: T. Johnson, D. Shasha, "2Q: a low overhead high performance buffer management
    replacement algorithm", VLDB 1994. Of our own is that ghosts are batches.

    Bound: an entry for each slot, a batch for each.
    """

    def __init__(self, num_slots: int, hashes: Hashes = (), order: Order = Order.LRU) -> None:
        super().__init__(num_slots, hashes)
        self.order = order
        self._has_batches = order is not Order.LRU
        self._fresh: OrderedDict[int, Batch] = OrderedDict()
        self._used_before: OrderedDict[int, Batch] = OrderedDict()
        self._num_fresh = 0  # slots of the batches in `_fresh`
        self._num_evicted = 0
        self._num_known_max = GHOST_SLOTS * num_slots

    def prefer(self, order: str) -> None:
        """See `EvictionPolicy`."""
        self.order = Order(order or Order.LRU)
        self._has_batches = self._has_batches or self.order is not Order.LRU

    def release(self, slots: Sequence[int], now_s: float) -> None:
        """See `EvictionPolicy`."""
        if self._has_batches:
            super().release(slots, now_s)
        else:
            self._queue.append(slots, now_s)

    def lease(self, slots: Iterable[int]) -> None:
        """See `EvictionPolicy`."""
        if not self._has_batches:
            self._queue.remove(slots)
            return
        if self._queue:
            set_each(self._kinds, self._queue.among(slots := list(slots)), USED | SHARED)
        super().lease(slots)

    def hold(self, slots: Iterable[int]) -> None:
        """See `EvictionPolicy`."""
        if self._has_batches:
            super().hold(slots)
        else:
            self._queue.remove(slots)

    def evict(self, count: int, now_s: float) -> list[int]:
        """See `EvictionPolicy`."""
        if self._has_batches:
            return super().evict(count, now_s)
        return self._evicted(self._queue.take(count), now_s)

    def forget(self, slots: Iterable[int]) -> None:
        """See `EvictionPolicy`."""
        if self._has_batches:
            super().forget(slots)
        else:
            self._queue.remove(slots)

    def admits(self, count: int, last_slot: int | None, first_hash: bytes, now_s: float) -> bool:
        """See `EvictionPolicy`; only `RETURNS` refuses anything."""
        if self.order is not Order.RETURNS:
            return True
        return super().admits(count, last_slot, first_hash, now_s)

    def _add_new(self, slots: list[int], kind: int = SHARED) -> None:
        if not slots:
            return
        num_known = len(slots)  # as what they go on with
        if kind & SHARED:
            first_hash = self._hashes[slots[-1]]
            ghost = self._ghosts.get(first_hash) if first_hash else None
            is_known = ghost and self._num_evicted - ghost.num_evicted <= self._num_known_max
            num_known = ghost.size if ghost and is_known else 0
            kind = self._kind_of_ghost(first_hash)
        num_fresh = max(0, len(slots) - num_known)
        if num_fresh:
            self._add(slots[:num_fresh], kind)
            self._used_before.popitem()
            self._fresh[self._last_ticket] = batch = self._batches[self._last_ticket]
            self._num_fresh += batch.num_live
        if num_fresh < len(slots):
            self._add(slots[num_fresh:], kind)

    def _add(self, slots: list[int], kind: int) -> None:
        super()._add(slots, kind)
        self._used_before[self._last_ticket] = self._batches[self._last_ticket]

    def _bury(self, batch: Batch, first_slot: int) -> None:
        self._num_evicted += batch.size
        batch.note(self._num_evicted)
        super()._bury(batch, first_slot)

    def _count(self, batch: Batch, num_more: int) -> None:
        super()._count(batch, num_more)
        if batch.ticket in self._fresh:
            self._num_fresh += num_more

    def _drop(self, batch: Batch) -> None:
        super()._drop(batch)
        if self._fresh.pop(batch.ticket, None) is None:
            del self._used_before[batch.ticket]

    def _in_order(self) -> Iterator[Batch]:
        if self.order is Order.LRU:
            return iter(self._batches.values())
        return self._by_use() if self.order is Order.TWO_QUEUES else super()._in_order()

    def _by_use(self) -> Iterator[Batch]:
        fresh, used = iter(self._fresh.values()), iter(self._used_before.values())
        num_fresh, num_left = self._num_fresh, self._num_slots
        while num_left:
            is_fresh = num_fresh > FRESH_SHARE * num_left or num_fresh == num_left
            batch = next(fresh if is_fresh else used)
            num_left -= batch.num_live
            num_fresh -= batch.num_live if is_fresh else 0
            yield batch
