"""The directory of a file tier as operators look at it: what is there, read and deleted.

No link is followed, and nothing is taken for ours that is not called as ours.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from typing import Final

from safe_offload.tiers import naming
from safe_offload.tiers.files.directory import open_folder, remove, walk
from safe_offload.tiers.store import Item, item_at

_READ_FLAGS: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_NOT_EMPTY_OR_GONE: Final = (errno.ENOTEMPTY, errno.EEXIST, errno.ENOENT, errno.ENOTDIR)


def namespaces(root_fd: int) -> list[str]:
    """Return the names of all namespaces, in order."""
    return sorted(filter(naming.is_namespace_folder, os.listdir(root_fd)))


def items(root_fd: int, namespace: str) -> Iterator[Item]:
    """Yield the files of all namespaces, or of one."""
    for file, _ in walk(root_fd, namespace):
        key = f"{file.namespace}/{file.folder}/{file.file}"
        item = item_at(key, file.size_bytes, file.used_at_ns / 1e9)
        if item is not None:
            yield item._replace(is_temporary=file.is_temporary)


def read(key: str, start: int, length: int, root_fd: int) -> bytes:
    """Return bytes of a file; what is only looked at need not stay in memory."""
    with _folder_of(key, root_fd) as (folder_fd, file):
        file_fd = os.open(file, _READ_FLAGS, dir_fd=folder_fd)
    try:
        found = os.pread(file_fd, length, start)
        with contextlib.suppress(OSError):
            os.posix_fadvise(file_fd, start, length, os.POSIX_FADV_DONTNEED)
        return found
    finally:
        os.close(file_fd)


def delete(key: str, root_fd: int) -> bool:
    """Delete a file; return whether it was there."""
    try:
        with _folder_of(key, root_fd) as (folder_fd, file):
            return remove(file, folder_fd)
    except FileNotFoundError:
        return False


def remove_folders(namespace: str, root_fd: int) -> None:
    """Remove what is empty of a namespace, and its description when nothing else is there."""
    try:
        namespace_fd = open_folder(namespace, root_fd)
    except FileNotFoundError:
        return
    try:
        for folder in os.listdir(namespace_fd):
            if naming.is_object_folder(folder):
                _remove_folder(folder, namespace_fd)
        if os.listdir(namespace_fd) == [naming.DESCRIPTION_FILE]:
            remove(naming.DESCRIPTION_FILE, namespace_fd)
    finally:
        os.close(namespace_fd)
    _remove_folder(namespace, root_fd)


def _remove_folder(name: str, parent_fd: int) -> None:
    try:
        os.rmdir(name, dir_fd=parent_fd)
    except OSError as error:
        if error.errno not in _NOT_EMPTY_OR_GONE:
            raise


@contextlib.contextmanager
def _folder_of(key: str, root_fd: int) -> Iterator[tuple[int, str]]:
    """Open the folder of a file, following no link."""
    *folders, file = key.split("/")
    here_fd = os.dup(root_fd)
    try:
        for folder in folders:
            opened_fd = open_folder(folder, here_fd)
            os.close(here_fd)
            here_fd = opened_fd
        yield here_fd, file
    finally:
        os.close(here_fd)
