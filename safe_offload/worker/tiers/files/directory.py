"""The directory of a file tier: opened anew for every job, checked to be ours, walked.

    ROOT/NAMESPACE/ab/OBJECT        an object, 256 folders below each namespace
    ROOT/NAMESPACE/ab/tmp-…         an object that is being written
    ROOT/NAMESPACE/namespace.json   what the namespace is, for people
    ROOT/usage, ROOT/evict.lock     see capacity.py

No descriptor is kept between jobs, so the file system can be unmounted and the directory removed
while it is in use. Below the root no symbolic link is followed.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterator
from typing import Final, NamedTuple

from safe_offload.worker.tiers.naming import is_namespace_folder, is_object_folder

FILE_MODE: Final = 0o600
FOLDER_MODE: Final = 0o700
TEMPORARY_PREFIX: Final = "tmp-"
PAGE_BYTES: Final = 4096

_FOLDER_FLAGS: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_GONE: Final = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EACCES)


class Stored(NamedTuple):
    """A file that was found below the root.

    Attributes:
        namespace: name of its namespace's folder.
        folder: name of the one below that.
        file: its own name.
        size_bytes: as `size_on_disk` has it.
        used_at_ns: when it was last read or written, since 1970.
    """

    namespace: str
    folder: str
    file: str
    size_bytes: int
    used_at_ns: int

    @property
    def is_temporary(self) -> bool:
        """Return whether it is an object that is being written, or was when its writer died."""
        return self.file.startswith(TEMPORARY_PREFIX)


def size_on_disk(length_bytes: int) -> int:
    """Return what a file takes of the capacity: whole pages."""
    return -(-length_bytes // PAGE_BYTES) * PAGE_BYTES


def open_root(path: str) -> int:
    """Return a descriptor of the root, which may be reached by links.

    Raises:
        OSError: it cannot be opened.
    """
    return os.open(path, _FOLDER_FLAGS)


def open_folder(name: str, parent_fd: int) -> int:
    """Return a descriptor of a folder, which is no link.

    Raises:
        OSError: it cannot be opened.
    """
    return os.open(name, _FOLDER_FLAGS | os.O_NOFOLLOW, dir_fd=parent_fd)


def make_folder(name: str, parent_fd: int) -> bool:
    """Make a folder if there is none; return whether it was made."""
    try:
        os.mkdir(name, FOLDER_MODE, dir_fd=parent_fd)
    except FileExistsError:
        return False
    return True


def require_ours(folder_fd: int, uid: int) -> None:
    """Refuse a folder of another user; take back what others may do in ours.

    Volumes of Kubernetes with an fsGroup are given to a group each time that they are mounted.

    Raises:
        PermissionError: it belongs to another user, who could put anything there.
    """
    found = os.fstat(folder_fd)
    if found.st_uid != uid:
        raise PermissionError(
            errno.EPERM,
            f"a folder below it belongs to user {found.st_uid}, this process is user {uid}. Fix: "
            "run the engines that share it as one user, or give each user a directory",
        )
    if found.st_mode & 0o077:
        os.fchmod(folder_fd, FOLDER_MODE)


def mount_point_of(path: str) -> str:
    """Return where the file system of a path is mounted, also of one that does not exist."""
    path = os.path.realpath(path)
    while not os.path.ismount(path):
        path = os.path.dirname(path)
    return path


def walk(root_fd: int, only: str = "") -> Iterator[tuple[Stored, int]]:
    """Yield every file of every namespace, or of one, with a descriptor of its folder.

    What cannot be opened, and what vanishes meanwhile, is passed over. Anything but a file is too.
    """
    for namespace in [only] if only else sorted(os.listdir(root_fd)):
        if not is_namespace_folder(namespace):
            continue
        with _entered(namespace, root_fd) as namespace_fd:
            for folder in sorted(os.listdir(namespace_fd)) if namespace_fd is not None else ():
                if not is_object_folder(folder):
                    continue
                with _entered(folder, namespace_fd) as folder_fd:
                    if folder_fd is not None:
                        for file in _files(namespace, folder, folder_fd):
                            yield file, folder_fd


@contextlib.contextmanager
def _entered(name: str, parent_fd: int | None) -> Iterator[int | None]:
    """Open a folder; None if it cannot be."""
    assert parent_fd is not None
    try:
        folder_fd = open_folder(name, parent_fd)
    except OSError as error:
        if error.errno not in _GONE:
            raise
        yield None
        return
    try:
        yield folder_fd
    finally:
        os.close(folder_fd)


def _files(namespace: str, folder: str, folder_fd: int) -> Iterator[Stored]:
    with os.scandir(folder_fd) as entries:
        for entry in entries:
            try:
                found = entry.stat(follow_symlinks=False)
            except FileNotFoundError:
                continue
            if stat.S_ISREG(found.st_mode):
                size_bytes = size_on_disk(found.st_size)
                yield Stored(namespace, folder, entry.name, size_bytes, found.st_atime_ns)


def remove(file: str, folder_fd: int) -> bool:
    """Delete a file; return whether it was there."""
    try:
        os.unlink(file, dir_fd=folder_fd)
    except FileNotFoundError:
        return False
    return True
