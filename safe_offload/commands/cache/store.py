"""What `safe-offload cache` needs of the place of a tier: namespaces, objects, their bytes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol

from safe_offload.errors import SafeOffloadError
from safe_offload.tiers.base import Name
from safe_offload.tiers.files.capacity import Kept


class CacheError(SafeOffloadError):
    """The place cannot be used as asked."""


class Item(NamedTuple):
    """An object that was found.

    Attributes:
        namespace: name of its namespace.
        place: where it is, as the place itself calls it.
        name: what its header must say; None if no object is found there.
        size_bytes: that it takes.
        used_at_s: when it was last used, since 1970; 0 if that is not known.
        is_temporary: it is being written, or was when its writer died.
    """

    namespace: str
    place: str
    name: Name | None
    size_bytes: int
    used_at_s: float
    is_temporary: bool = False


class Store(Protocol):
    """The place of a tier.

    Attributes:
        label: what it is called; no secret is in it.
        use: what its times are of: "USED" or, where only that is known, "WRITTEN".
    """

    label: str
    use: str

    def is_cache(self) -> bool:
        """Return whether a tier has used it, so that something may be deleted there."""

    def namespaces(self) -> Mapping[str, bytes]:
        """Return the names of all namespaces, with the description of each or nothing."""

    def items(self, namespace: str = "") -> Iterator[Item]:
        """Yield every object, or those of a namespace; what vanishes meanwhile is passed over."""

    def pieces(self, item: Item) -> Iterator[bytes]:
        """Yield the header of an object, HEADER_BYTES if it has one, and then its bytes.

        Raises:
            FileNotFoundError: it is not there any more.
            OSError: it cannot be read.
        """

    def delete(self, items: Sequence[Item]) -> list[Item]:
        """Delete objects; return those that were there."""

    def prune(self, to_bytes: int | None, used_before_s: float) -> Kept:
        """Delete what was last used before that, and more until so many bytes are there."""

    def forget(self, namespaces: Sequence[str]) -> None:
        """Delete what else there is of namespaces whose objects are gone."""

    def close(self) -> None:
        """Give back what is held."""
