"""The place of a tier for an operator: synchronous verbs that report their progress."""

from __future__ import annotations

import asyncio
import io
import time
from array import array
from collections.abc import Coroutine, Iterator, Sequence
from typing import Any, Final, TypeVar

import numpy as np

from safe_offload.commands.progress import Progress
from safe_offload.errors import SafeOffloadError
from safe_offload.tiers import naming
from safe_offload.tiers.base import PlaceError
from safe_offload.tiers.files.capacity import ORPHAN_AGE_S, Kept
from safe_offload.tiers.naming import DESCRIPTION_BYTES_MAX, HEADER_BYTES
from safe_offload.tiers.seals.seal import PLAIN, Seal
from safe_offload.tiers.store import Item, Store, pages

LOOKING: Final = "listing objects"
DELETING: Final = "deleting"
_CLOCK_S: Final = 1.0
"""Times of use are whole seconds, and a second reading may differ by one."""
T = TypeVar("T")


class CacheError(SafeOffloadError):
    """An operation on a place cannot be done."""


class Place:
    """A store, one operation at a time.

    Args:
        store: without slots; `close` closes it.
        label: for messages; without secrets.

    Attributes:
        is_dry: nothing is deleted; `pretend` alone changes it.
        progress: of the current operation; invisible until `show_on` replaces it.
    """

    def __init__(self, store: Store, label: str) -> None:
        self.label = label
        self.is_dry = False
        self.progress = Progress(LOOKING, io.StringIO())
        self._store = store
        self._runner = asyncio.Runner()

    @property
    def use(self) -> str:
        """See `Store.use`."""
        return self._store.use

    def pretend(self, is_dry: bool) -> None:
        """Only count deletions from now on, or perform them."""
        self.is_dry = is_dry

    def show_on(self, progress: Progress) -> None:
        """Report progress there."""
        self.progress = progress

    def require_cache(self) -> None:
        """Raise a CacheError for a place that no tier has used; nothing is changed there."""
        if not self._run(self._store.is_ours()):
            raise CacheError(f"{self.label} is not the directory of a tier. Fix: name one.")

    def namespaces(self) -> list[str]:
        """Return the names of all namespaces, at most LISTED_MAX."""
        return self._run(self._store.namespaces())

    def description(self, namespace: str, seal: Seal) -> bytes:
        """Return the description of a namespace, or nothing; encrypted without its key."""
        try:
            key = self._store.description_key(namespace)
            stored = self._read(key, 0, DESCRIPTION_BYTES_MAX)
        except OSError:
            return b""
        return seal.opened_description(bytes.fromhex(namespace), stored)

    def items(self, namespace: str = "") -> Iterator[Item]:
        """Yield every object, or those of a namespace; objects that vanish are skipped."""
        pages = self._store.walk(namespace)

        async def following() -> list[Item] | None:
            return await anext(pages, None)

        while (page := self._run(following())) is not None:
            yield from page

    def pieces(self, item: Item) -> Iterator[bytes]:
        """Yield the header of an object, HEADER_BYTES if it has one, and then its bytes.

        Raises:
            FileNotFoundError: it has vanished.
            OSError: it cannot be read.
        """
        at, length = 0, max(self._store.piece_bytes, HEADER_BYTES)
        while at == 0 or at < item.size_bytes:
            piece = self._read(item.key, at, length)
            if at == 0:
                yield piece[:HEADER_BYTES]
            yield piece[0 if at else HEADER_BYTES :]
            at += len(piece)
            if len(piece) < length:
                break

    def _read(self, key: str, start: int, length: int) -> bytes:
        return self._run(self._store.read(key, start, length))

    def problem_of(self, item: Item, seal: Seal = PLAIN) -> str:
        """Return the defect of an object; empty if there is none, NOT_CHECKED without its key.

        Raises:
            FileNotFoundError: it has vanished.
        """
        try:
            pieces = self.pieces(item)
            found = next(pieces, b"")
            if not naming.version_of(found):
                return "it has no header of this version"
            if item.name is None:
                return "its header names another object"
            return seal.problem_of(found, item.name, map(memoryview, pieces))
        except FileNotFoundError:
            raise
        except OSError as error:
            return f"it cannot be read: {error.strerror}"

    def delete(self, items: Sequence[Item]) -> list[Item]:
        """Delete objects; return those that existed."""
        if self.is_dry:
            return list(items)
        if items and self.progress.what == LOOKING:
            self.progress.begin(DELETING)
        were_there = self._run(self._store.delete([item.key for item in items]))
        deleted = [item for item, was in zip(items, were_there, strict=True) if was]
        if self.progress.what == DELETING:  # else a check is shown
            self.progress.advance(len(deleted), sum(item.size_bytes for item in deleted))
        return deleted

    def forget(self, namespaces: Sequence[str]) -> None:
        """Delete the rest of namespaces whose objects are gone."""
        if not self.is_dry:
            self._run(self._store.forget(namespaces))

    def is_older(self, item: Item, before_s: float) -> bool:
        """Return whether an object was last used before a time; False if it is being written.

        Raises:
            CacheError: the place does not record when objects were used.
        """
        if item.is_temporary:
            return False
        if not item.used_at_s:
            raise CacheError(
                f"{self.label} does not report when objects were last used. Fix: let it evict, or, "
                "on Valkey and Redis, use allkeys-lru instead of allkeys-lfu."
            )
        return item.used_at_s < before_s

    def recount(self) -> None:
        """Update the count that engines share, and delete leftovers of crashes."""
        if not self.is_dry:
            self._run(self._store.recount())

    def close(self) -> None:
        """Close the store."""
        self._run(self._store.close())
        self._runner.close()

    def prune(self, to_bytes: int | None, used_before_s: float) -> Kept:
        """Delete objects last used before a time, and the least recently used beyond `to_bytes`.

        Lists all objects twice, and keeps 16 bytes of each in memory.

        Raises:
            CacheError: the place does not record when objects were used.
        """
        sizes, used_at, num_orphans = self._look()
        held_bytes = sum(sizes)
        excess_bytes = 0 if to_bytes is None else held_bytes - to_bytes
        until_s = _cutoff_s(sizes, used_at, excess_bytes)
        num_evicted, evicted_bytes = 0, 0
        if used_before_s or excess_bytes > 0:
            for page in pages(self.items()):
                due, due_bytes = [], 0
                for item in page:
                    is_excess = evicted_bytes + due_bytes < excess_bytes
                    is_old = item.used_at_s <= until_s + _CLOCK_S
                    is_due = (is_excess and is_old) or item.used_at_s < used_before_s
                    if is_due and not item.is_temporary:
                        due.append(item)
                        due_bytes += item.size_bytes
                deleted = self.delete(due)
                num_evicted += len(deleted)
                evicted_bytes += sum(item.size_bytes for item in deleted)
        if not self.is_dry:
            self._run(self._store.recount())
        return Kept(held_bytes - evicted_bytes, num_evicted, evicted_bytes, num_orphans)

    def _look(self) -> tuple[array[int], array[float], int]:
        """Return sizes and times of use of all objects, and the number of orphaned temporaries."""
        sizes, used_at = array("q"), array("d")
        num_orphans, orphan_before_s = 0, time.time() - ORPHAN_AGE_S
        for item in self.items():
            if item.is_temporary and item.used_at_s < orphan_before_s:
                num_orphans += 1
                continue
            if not item.used_at_s:
                raise CacheError(
                    f"{self.label} does not report when objects were last used. Fix: let it evict, "
                    "or, on Valkey and Redis, use allkeys-lru instead of allkeys-lfu."
                )
            self.progress.advance(1, item.size_bytes)
            sizes.append(item.size_bytes)
            used_at.append(item.used_at_s)
        return sizes, used_at, num_orphans

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        try:
            return self._runner.run(work)
        except PlaceError as error:
            raise CacheError(error.said_of(self.label)) from None


def _cutoff_s(sizes: array[int], used_at: array[float], excess_bytes: int) -> float:
    """Return the latest time of use among the least recently used objects that make the excess."""
    if excess_bytes <= 0:
        return 0.0
    times = np.array(used_at)
    order = np.argsort(times, kind="stable")
    gone_bytes = np.cumsum(np.array(sizes, dtype=np.int64)[order])
    last = int(np.searchsorted(gone_bytes, excess_bytes))
    return float(times[order[min(last, len(order) - 1)]])
