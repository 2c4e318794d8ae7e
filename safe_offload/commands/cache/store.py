"""What `safe-offload cache` needs of the place of a tier: namespaces, objects, their bytes."""

from __future__ import annotations

import io
import time
from abc import ABC, abstractmethod
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Final, NamedTuple

import numpy as np

from safe_offload.commands.progress import Progress
from safe_offload.errors import SafeOffloadError
from safe_offload.tiers import naming
from safe_offload.tiers.base import Name
from safe_offload.tiers.files.capacity import ORPHAN_AGE_S, Kept
from safe_offload.tiers.seal import PLAIN, Seal

BATCH_ITEMS: Final = 1000
LOOKING: Final = "listing objects"
DELETING: Final = "deleting"
_CLOCK_S: Final = 1.0
"""Times of use are whole seconds, and may be one off when they are asked for again."""


class CacheError(SafeOffloadError):
    """The place cannot be used as asked."""


class UnreachableError(CacheError):
    """The place does not answer; it may later."""


class Item(NamedTuple):
    """An object that was found.

    Attributes:
        place: where it is, as the place itself calls it.
        name: what its header must say; None if no object is found there.
        used_at_s: when it was last used, since 1970; 0 if that is not known.
        is_temporary: it is being written, or was when its writer died.
    """

    namespace: str
    place: str
    name: Name | None
    size_bytes: int
    used_at_s: float
    is_temporary: bool = False


class TierStore(ABC):
    """The place of a tier.

    Attributes:
        label: what it is called; no secret is in it.
        use: what its times are of: "USED" or, where only that is known, "WRITTEN".
        is_dry: nothing is deleted, to see what would be; `pretend` alone changes it.
        progress: of what is under way; shows nothing until `show_on` replaces it.
    """

    label: str
    use = "USED"
    is_dry = False
    progress = Progress(LOOKING, stream=io.StringIO())

    def pretend(self, is_dry: bool) -> None:
        """Delete nothing from now on, or do."""
        self.is_dry = is_dry

    def show_on(self, progress: Progress) -> None:
        """Count there what is done."""
        self.progress = progress

    def is_cache(self) -> bool:
        """Return whether something may be deleted: always where other names are not touched."""
        return True

    def place_of(self, name: Name) -> str:
        """Return where an object is, or would be; see `Item`."""
        return "/".join((naming.namespace_folder(name.namespace), *naming.path_of(name)))

    @abstractmethod
    def namespaces(self) -> Mapping[str, bytes]:
        """Return the names of all namespaces, with the description of each or nothing."""

    @abstractmethod
    def items(self, namespace: str = "") -> Iterator[Item]:
        """Yield every object, or those of a namespace; what vanishes meanwhile is passed over."""

    @abstractmethod
    def pieces(self, item: Item) -> Iterator[bytes]:
        """Yield the header of an object, HEADER_BYTES if it has one, and then its bytes.

        Raises:
            FileNotFoundError: it is not there any more.
            OSError: it cannot be read.
        """

    def delete(self, items: Sequence[Item]) -> list[Item]:
        """Delete objects; return those that were there."""
        if self.is_dry:
            return list(items)
        deleted = self._delete(items)
        self.count_deleted(len(deleted), sum(item.size_bytes for item in deleted))
        return deleted

    def count_deleted(self, count: int, size_bytes: int) -> None:
        """Show that objects were deleted, unless it is a check that is shown."""
        if self.progress.what == LOOKING:
            self.progress.begin(DELETING)
        if self.progress.what == DELETING:
            self.progress.advance(count, size_bytes)

    def forget(self, namespaces: Sequence[str]) -> None:
        """Delete what else there is of namespaces whose objects are gone."""
        if not self.is_dry:
            self._forget(namespaces)

    @abstractmethod
    def _delete(self, items: Sequence[Item]) -> list[Item]: ...

    @abstractmethod
    def _forget(self, namespaces: Sequence[str]) -> None: ...

    def problem_of(self, item: Item, seal: Seal = PLAIN) -> str:
        """Return what is wrong with an object; empty if nothing is, NOT_CHECKED without its key.

        Raises:
            FileNotFoundError: it is not there any more.
        """
        try:
            pieces = self.pieces(item)
            found = next(pieces, b"")
            if not naming.is_sealed(found) and naming.Header.read(found) is None:
                return "it has no header of this version"
            if item.name is None:
                return "its header names another object"
            return seal.problem_of(found, item.name, map(memoryview, pieces))
        except FileNotFoundError:
            raise
        except OSError as error:
            return f"it cannot be read: {error.strerror}"

    def close(self) -> None:  # noqa: B027 - not every place holds something
        """Give back what is held."""

    def prune(self, to_bytes: int | None, used_before_s: float) -> Kept:
        """Delete what was last used before that, and more until `to_bytes` are there.

        Here all objects are looked at, and then all of them again; 16 bytes of each are kept.

        Raises:
            CacheError: the place does not know when an object was used.
        """
        sizes, used_at = array("q"), array("d")
        num_orphans, orphan_before_s = 0, time.time() - ORPHAN_AGE_S
        for item in self.items():
            if item.is_temporary and item.used_at_s < orphan_before_s:
                num_orphans += 1
                continue
            if not item.used_at_s:
                raise CacheError(
                    f"{self.label} does not report when objects were last used. Fix: let it evict "
                    "(maxmemory and its policy), or use allkeys-lru instead of allkeys-lfu."
                )
            self.progress.advance(1, item.size_bytes)
            sizes.append(item.size_bytes)
            used_at.append(item.used_at_s)
        held_bytes = sum(sizes)
        excess_bytes = 0 if to_bytes is None else held_bytes - to_bytes
        until_s = _cutoff_s(sizes, used_at, excess_bytes)
        num_evicted, evicted_bytes = 0, 0
        if used_before_s or excess_bytes > 0:
            for batch in batches(self.items()):
                due, due_bytes = [], 0
                for item in batch:
                    is_excess = evicted_bytes + due_bytes < excess_bytes
                    is_old = item.used_at_s <= until_s + _CLOCK_S
                    is_due = (is_excess and is_old) or item.used_at_s < used_before_s
                    if is_due and not item.is_temporary:
                        due.append(item)
                        due_bytes += item.size_bytes
                deleted = self.delete(due)
                num_evicted += len(deleted)
                evicted_bytes += sum(item.size_bytes for item in deleted)
        return Kept(held_bytes - evicted_bytes, num_evicted, evicted_bytes, num_orphans)


def batches(items: Iterable[Item]) -> Iterator[list[Item]]:
    """Yield lists of at most BATCH_ITEMS."""
    left = iter(items)
    while batch := list(islice(left, BATCH_ITEMS)):
        yield batch


def name_at(namespace: str, folder: str, file: str) -> Name | None:
    """Return the name of the object that is found there; None if none ever is."""
    name = naming.name_of(namespace, file)
    return name if name is not None and naming.path_of(name)[0] == folder else None


def _cutoff_s(sizes: array[int], used_at: array[float], excess_bytes: int) -> float:
    """Return up to which time of use objects must go, so that the excess does."""
    if excess_bytes <= 0:
        return 0.0
    times = np.array(used_at)
    order = np.argsort(times, kind="stable")
    gone_bytes = np.cumsum(np.array(sizes, dtype=np.int64)[order])
    last = int(np.searchsorted(gone_bytes, excess_bytes))
    return float(times[order[min(last, len(order) - 1)]])
