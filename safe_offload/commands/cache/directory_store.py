"""The directory of a file tier, as `safe-offload cache` uses it."""

from __future__ import annotations

import contextlib
import errno
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from safe_offload.commands.cache.store import LOOKING, CacheError, Item, TierStore, name_at
from safe_offload.config.printing import without_secrets
from safe_offload.config.units import MIB
from safe_offload.tiers import naming
from safe_offload.tiers.files import directory
from safe_offload.tiers.files.capacity import USAGE_FILE, Kept, Order, keep
from safe_offload.tiers.naming import HEADER_BYTES

_PIECE_BYTES: Final = 4 * MIB
_PATIENCE_S: Final = 30.0
_PAUSE_S: Final = 0.1
_READ_FLAGS: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_NOT_EMPTY_OR_GONE: Final = (errno.ENOTEMPTY, errno.EEXIST, errno.ENOENT, errno.ENOTDIR)


class DirectoryStore(TierStore):
    """A directory.

    Raises:
        CacheError: it cannot be opened.
    """

    def __init__(self, path: str) -> None:
        self.label = path
        try:
            self._root_fd = directory.open_root(path)
        except OSError as error:
            raise CacheError(
                f"{without_secrets(path)} cannot be opened: {error.strerror}. Fix: name the "
                'directory of a tier (the path of its "url"), as a user who can read it.'
            ) from None

    def is_cache(self) -> bool:
        return bool(self._namespaces()) or os.access(USAGE_FILE, os.F_OK, dir_fd=self._root_fd)

    def namespaces(self) -> Mapping[str, bytes]:
        return {name: self._description(name) for name in self._namespaces()}

    def items(self, namespace: str = "") -> Iterator[Item]:
        for file, _ in directory.walk(self._root_fd, namespace):
            name = name_at(file.namespace, file.folder, file.file)
            place = f"{file.namespace}/{file.folder}/{file.file}"
            used_at_s = file.used_at_ns / 1e9
            yield Item(file.namespace, place, name, file.size_bytes, used_at_s, file.is_temporary)

    def pieces(self, item: Item) -> Iterator[bytes]:
        with self._folder_of(item) as (folder_fd, file):
            file_fd = os.open(file, _READ_FLAGS, dir_fd=folder_fd)
        try:
            yield os.read(file_fd, HEADER_BYTES)
            while piece := os.read(file_fd, _PIECE_BYTES):
                yield piece
            with contextlib.suppress(OSError):  # what is only checked need not stay in memory
                os.posix_fadvise(file_fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(file_fd)

    def _delete(self, items: Sequence[Item]) -> list[Item]:
        return [item for item in items if self._remove(item)]

    def prune(self, to_bytes: int | None, used_before_s: float) -> Kept:
        """See `TierStore`; engines that share the directory know of it."""
        if self.is_dry:
            return super().prune(to_bytes, used_before_s)
        give_up_at_s = time.monotonic() + _PATIENCE_S
        order = Order(to_bytes, int(used_before_s * 1e9), self._seen, self._gone)
        while True:
            kept = keep(self._root_fd, None, order=order)
            if kept is not None:
                return kept
            if time.monotonic() > give_up_at_s:
                raise CacheError(
                    f"{self.label}: an engine is evicting. Fix: try again in a minute."
                )
            time.sleep(_PAUSE_S)

    def _seen(self, size_bytes: int) -> None:
        if self.progress.what == LOOKING:
            self.progress.advance(1, size_bytes)

    def _gone(self, size_bytes: int) -> None:
        self.count_deleted(1, size_bytes)

    def _forget(self, namespaces: Sequence[str]) -> None:
        """An engine may be writing to one of them again."""
        for namespace in namespaces:
            self._remove_folders(namespace)
        self.prune(None, 0.0)  # so that engines know how much is there now

    def close(self) -> None:
        os.close(self._root_fd)

    def _namespaces(self) -> list[str]:
        return sorted(
            name for name in os.listdir(self._root_fd) if naming.is_namespace_folder(name)
        )

    def _description(self, namespace: str) -> bytes:
        try:
            folder_fd = directory.open_folder(namespace, self._root_fd)
        except OSError:
            return b""
        try:
            file_fd = os.open(naming.DESCRIPTION_FILE, _READ_FLAGS, dir_fd=folder_fd)
        except OSError:
            return b""
        finally:
            os.close(folder_fd)
        try:
            return os.read(file_fd, MIB)
        finally:
            os.close(file_fd)

    @contextlib.contextmanager
    def _folder_of(self, item: Item) -> Iterator[tuple[int, str]]:
        """Open the folder of an object's file, following no link."""
        namespace, folder, file = item.place.split("/")
        namespace_fd = directory.open_folder(namespace, self._root_fd)
        try:
            folder_fd = directory.open_folder(folder, namespace_fd)
        finally:
            os.close(namespace_fd)
        try:
            yield folder_fd, file
        finally:
            os.close(folder_fd)

    def _remove(self, item: Item) -> bool:
        try:
            with self._folder_of(item) as (folder_fd, file):
                return directory.remove(file, folder_fd)
        except FileNotFoundError:
            return False

    def _remove_folders(self, namespace: str) -> None:
        try:
            namespace_fd = directory.open_folder(namespace, self._root_fd)
        except FileNotFoundError:
            return
        try:
            for folder in os.listdir(namespace_fd):
                if naming.is_object_folder(folder):
                    _remove_folder(folder, namespace_fd)
            if os.listdir(namespace_fd) == [naming.DESCRIPTION_FILE]:
                directory.remove(naming.DESCRIPTION_FILE, namespace_fd)
        finally:
            os.close(namespace_fd)
        _remove_folder(namespace, self._root_fd)


def _remove_folder(name: str, parent_fd: int) -> None:
    """Remove a folder if it is empty."""
    try:
        os.rmdir(name, dir_fd=parent_fd)
    except OSError as error:
        if error.errno not in _NOT_EMPTY_OR_GONE:
            raise
