"""The directory of a file tier for operators: lists, reads and deletes.

It follows no link, and touches nothing without a name of ours.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterator
from typing import Final

from safe_offload.tiers import naming
from safe_offload.tiers.files.directory import open_folder, opened_folder, remove, walk
from safe_offload.tiers.store import Item, item_at, listed

_READ_FLAGS: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_NOT_EMPTY_OR_GONE: Final = (errno.ENOTEMPTY, errno.EEXIST, errno.ENOENT, errno.ENOTDIR)


def namespaces(root_fd: int) -> list[str]:
    """Return the names of all namespaces, in order."""
    with os.scandir(root_fd) as entries:
        return listed(entry.name for entry in entries if entry.is_dir(follow_symlinks=False))


def items(root_fd: int, namespace: str) -> Iterator[Item]:
    """Yield the files of all namespaces, or of one."""
    for file, _ in walk(root_fd, namespace):
        key = f"{file.namespace}/{file.folder}/{file.file}"
        item = item_at(key, file.size_bytes, file.used_at_ns / 1e9)
        if item is not None:
            yield item._replace(is_temporary=file.is_temporary)


def read(key: str, start: int, length: int, root_fd: int) -> bytes:
    """Return bytes of a file, and drop them from the page cache."""
    with _folder_of(key, root_fd) as (folder_fd, file):
        _require_file(file, folder_fd)
        file_fd = os.open(file, _READ_FLAGS, dir_fd=folder_fd)
    try:
        found = os.pread(file_fd, length, start)
        with contextlib.suppress(OSError):
            os.posix_fadvise(file_fd, start, length, os.POSIX_FADV_DONTNEED)
        return found
    finally:
        os.close(file_fd)


def _require_file(file: str, folder_fd: int) -> None:
    """Refuse anything but a file: opening a device or a pipe may have effects."""
    if not stat.S_ISREG(os.stat(file, dir_fd=folder_fd, follow_symlinks=False).st_mode):
        raise OSError(errno.EINVAL, "it is not a regular file")


def delete(key: str, root_fd: int) -> bool:
    """Delete a file; return whether it existed."""
    try:
        with _folder_of(key, root_fd) as (folder_fd, file):
            return remove(file, folder_fd)
    except (FileNotFoundError, NotADirectoryError):
        return False


def remove_folders(namespace: str, root_fd: int) -> None:
    """Remove the rest of a namespace: all but its files; without files, its description too.

    This includes links (not their targets), pipes and empty folders in the place of something of
    ours. It leaves the content of a folder in the place of a file, and other names beside the 256
    folders.
    """
    with opened_folder(namespace, root_fd) as namespace_fd:
        if namespace_fd is None:
            return
        for folder in filter(naming.is_object_folder, os.listdir(namespace_fd)):
            with opened_folder(folder, namespace_fd) as folder_fd:
                for file in () if folder_fd is None else os.listdir(folder_fd):
                    remove_strange(file, folder_fd)
            if folder_fd is None:
                remove(folder, namespace_fd)
            remove_strange(folder, namespace_fd)
        if next(items(root_fd, namespace), None) is None:
            remove(naming.DESCRIPTION_FILE, namespace_fd)
            remove_strange(naming.DESCRIPTION_FILE, namespace_fd)
    remove_strange(namespace, root_fd)


def remove_strange(name: str, parent_fd: int | None) -> None:
    """Remove anything but a file: an empty folder, a link, a pipe."""
    try:
        mode = os.stat(name, dir_fd=parent_fd, follow_symlinks=False).st_mode
        if stat.S_ISDIR(mode):
            os.rmdir(name, dir_fd=parent_fd)
        elif not stat.S_ISREG(mode):
            os.unlink(name, dir_fd=parent_fd)
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
