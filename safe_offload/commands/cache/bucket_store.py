"""A bucket of an object store, as `safe-offload cache` uses it.

A store says when an object was written, not when it was last read: that stands in its place.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from safe_offload.commands.cache.store import CacheError, Item, TierStore, name_at
from safe_offload.config.tiers import TierConfig
from safe_offload.config.units import MIB
from safe_offload.tiers import naming
from safe_offload.tiers.naming import HEADER_BYTES
from safe_offload.tiers.objects.store import Problem, fix_for, open_store, problem_of, shown

TIMEOUT_S: Final = 60.0
_PIECE_BYTES: Final = 4 * MIB
_PAGE_ITEMS: Final = 1000


class BucketStore(TierStore):
    """A bucket.

    Args:
        store: the bucket, where it is not to be opened here.

    Raises:
        ConfigError: obstore is missing, or cannot use what it was given.
    """

    use = "WRITTEN"

    def __init__(self, config: TierConfig, store: Any = None) -> None:
        self.label = config.location.label
        self._scheme = config.location.scheme
        config = dataclasses.replace(config, timeout_s=TIMEOUT_S)
        self._store: Any = open_store(config) if store is None else store

    def namespaces(self) -> Mapping[str, bytes]:
        import obstore

        with self._errors():
            found = obstore.list_with_delimiter(self._store)["common_prefixes"]
            names = sorted(filter(naming.is_namespace_folder, (path.strip("/") for path in found)))
            return {name: self._description(name) for name in names}

    def items(self, namespace: str = "") -> Iterator[Item]:
        """See `TierStore`; a thousand in each request."""
        import obstore

        with self._errors():
            pages = obstore.list(self._store, namespace or None, chunk_size=_PAGE_ITEMS)
            for page in pages:
                yield from filter(None, map(_item_of, page))

    def pieces(self, item: Item) -> Iterator[bytes]:
        import obstore

        with self._errors(gone=True):
            chunks = obstore.get(self._store, item.place).stream(_PIECE_BYTES)
            head = b""
            for chunk in chunks:
                piece = bytes(chunk)
                if len(head) < HEADER_BYTES:
                    needed = HEADER_BYTES - len(head)
                    head, piece = head + piece[:needed], piece[needed:]
                    if len(head) < HEADER_BYTES:
                        continue
                    yield head
                if piece:
                    yield piece
            if len(head) < HEADER_BYTES:
                yield head

    def _delete(self, items: Sequence[Item]) -> list[Item]:
        """Stores do not say what was there."""
        self._remove([item.place for item in items])
        return list(items)

    def _forget(self, namespaces: Sequence[str]) -> None:
        self._remove([f"{name}/{naming.DESCRIPTION_FILE}" for name in namespaces])

    def _remove(self, paths: list[str]) -> None:
        import obstore

        if not paths:
            return
        with self._errors():
            try:
                obstore.delete(self._store, paths)
            except Exception:  # one is gone, or the store cannot delete many, or does not allow it
                for path in paths:
                    with contextlib.suppress(FileNotFoundError):
                        obstore.delete(self._store, path)

    def _description(self, namespace: str) -> bytes:
        import obstore

        try:
            path = f"{namespace}/{naming.DESCRIPTION_FILE}"
            return bytes(obstore.get_range(self._store, path, start=0, length=MIB))
        except FileNotFoundError:
            return b""

    @contextlib.contextmanager
    def _errors(self, *, gone: bool = False) -> Iterator[None]:
        """Turn what goes wrong inside into a CacheError that says what to do.

        Args:
            gone: an object that is not there is a FileNotFoundError.
        """
        try:
            yield
        except (CacheError, GeneratorExit):
            raise
        except Exception as error:
            problem = problem_of(error)
            if problem is Problem.NOT_FOUND:
                if gone:
                    raise FileNotFoundError(problem.value) from error
                problem = Problem.NO_BUCKET
            raise CacheError(
                f"{self.label}: {problem.value} ({shown(error)}). {fix_for(problem, self._scheme)}"
            ) from error


def _item_of(meta: Mapping[str, Any]) -> Item | None:
    """Return what a listing says of an object; None if it is none of ours."""
    namespace, _, rest = meta["path"].partition("/")
    folder, _, file = rest.partition("/")
    if not naming.is_namespace_folder(namespace) or not naming.is_object_folder(folder):
        return None
    name = name_at(namespace, folder, file)
    return Item(namespace, meta["path"], name, meta["size"], meta["last_modified"].timestamp())
