"""A place in which nothing is deleted, to see what would be."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from safe_offload.commands.cache.prune import prune
from safe_offload.commands.cache.store import Item, Store
from safe_offload.tiers.files.capacity import ORPHAN_AGE_S, Kept


class DryRun:
    """Implements Store over another one, of which it changes nothing.

    Args:
        store: that would be changed.
    """

    def __init__(self, store: Store) -> None:
        self.label, self.use = store.label, store.use
        self.is_cache, self.close = store.is_cache, store.close
        self._store = store
        self._orphans = set[str]()

    def namespaces(self) -> Mapping[str, bytes]:
        """See Store."""
        return self._store.namespaces()

    def items(self, namespace: str = "") -> Iterator[Item]:
        """See Store; but for the temporaries that `prune` sweeps."""
        orphan_before_s = time.time() - ORPHAN_AGE_S
        for item in self._store.items(namespace):
            if item.is_temporary and item.used_at_s < orphan_before_s:
                self._orphans.add(item.place)
            else:
                yield item

    def pieces(self, item: Item) -> Iterator[bytes]:
        """See Store."""
        return self._store.pieces(item)

    def delete(self, items: Sequence[Item]) -> list[Item]:
        """Return what would be deleted."""
        return list(items)

    def prune(self, to_bytes: int | None, used_before_s: float) -> Kept:
        """Return what `Store.prune` would do."""
        kept = prune(self, to_bytes, used_before_s)
        return replace(kept, num_orphans=len(self._orphans))

    def forget(self, namespaces: Sequence[str]) -> None:
        """Forget nothing."""
