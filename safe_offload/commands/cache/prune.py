"""Deleting what has not been used for longest, in a place that does not do it itself."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Final

import numpy as np

from safe_offload.commands.cache.store import CacheError, Item, Store
from safe_offload.tiers.files.capacity import Kept

BATCH_ITEMS: Final = 1000
_CLOCK_S: Final = 1.0
"""Times of use are whole seconds, and may be one off when they are asked for again."""


def batches(items: Iterable[Item]) -> Iterator[list[Item]]:
    """Yield lists of at most BATCH_ITEMS."""
    left = iter(items)
    while batch := list(islice(left, BATCH_ITEMS)):
        yield batch


def prune(store: Store, to_bytes: int | None, used_before_s: float) -> Kept:
    """Do what `Store.prune` says: look at all objects, and then at all of them again.

    Nothing but 16 bytes of each object is kept meanwhile.

    Raises:
        CacheError: the place does not know when an object was used.
    """
    sizes, used_at = array("q"), array("d")
    for item in store.items():
        if not item.used_at_s:
            raise CacheError(
                f"{store.label} does not say when objects were used. Fix: let it evict by itself "
                "(maxmemory and its policy), or choose allkeys-lru in the place of allkeys-lfu."
            )
        sizes.append(item.size_bytes)
        used_at.append(item.used_at_s)
    held_bytes = sum(sizes)
    excess_bytes = 0 if to_bytes is None else held_bytes - to_bytes
    until_s = _cutoff_s(sizes, used_at, excess_bytes)
    num_evicted, evicted_bytes = 0, 0
    if used_before_s or excess_bytes > 0:
        for batch in batches(store.items()):
            due, due_bytes = [], 0
            for item in batch:
                is_excess = evicted_bytes + due_bytes < excess_bytes
                is_old = item.used_at_s <= until_s + _CLOCK_S
                is_due = (is_excess and is_old) or item.used_at_s < used_before_s
                if is_due and not item.is_temporary:
                    due.append(item)
                    due_bytes += item.size_bytes
            deleted = store.delete(due)
            num_evicted += len(deleted)
            evicted_bytes += sum(item.size_bytes for item in deleted)
    return Kept(held_bytes - evicted_bytes, num_evicted, evicted_bytes, 0)


def _cutoff_s(sizes: array[int], used_at: array[float], excess_bytes: int) -> float:
    """Return up to which time of use objects must go, so that the excess does."""
    if excess_bytes <= 0:
        return 0.0
    times = np.array(used_at)
    order = np.argsort(times, kind="stable")
    gone_bytes = np.cumsum(np.array(sizes, dtype=np.int64)[order])
    last = int(np.searchsorted(gone_bytes, excess_bytes))
    return float(times[order[min(last, len(order) - 1)]])
