"""The directory of a file tier: opened anew for every job, checked to be ours, walked.

    ROOT/NAMESPACE/ab/OBJECT        an object, 256 folders below each namespace
    ROOT/NAMESPACE/ab/tmp-…         an object that is being written
    ROOT/NAMESPACE/namespace.json   what the namespace is, for people
    ROOT/usage, ROOT/evict.lock     see capacity.py

No descriptor is kept between jobs, so the file system can be unmounted while it is in use. A folder
is checked by its descriptor, so it cannot be swapped in between: on the way to the root, others
must not be able to replace it; below the root, it must be ours, and no link
(docs/guides/security.md).

Source: open(2) (O_PATH, O_NOFOLLOW), proc_pid_fdinfo(5), Linux (PROC_PID_INIT_INO, proc_ns.h).
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from safe_offload.tiers.naming import is_namespace_folder, is_object_folder

FILE_MODE: Final = 0o600
FOLDER_MODE: Final = 0o700
TEMPORARY_PREFIX: Final = "tmp-"
PAGE_BYTES: Final = 4096

_FOLDER_FLAGS: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_STEP_FLAGS: Final = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC
_PARENT_MODE: Final = 0o755
_LINKS_MAX: Final = 40
_FIRST_PID_NAMESPACE: Final = 0xEFFFFFFC
_NO_FOLDER: Final = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)
_GONE: Final = (*_NO_FOLDER, errno.EACCES)


class Stored(NamedTuple):
    """A file below the root: its namespace's folder, one of that one's 256 folders, its own name.

    Its size is in whole pages; it was last read or written at `used_at_ns`, since 1970. `mark`: see
    `marked_ns`.
    """

    namespace: str
    folder: str
    file: str
    size_bytes: int
    used_at_ns: int
    mark: int

    @property
    def is_temporary(self) -> bool:
        """Return whether it is being written, or was when its writer died."""
        return self.file.startswith(TEMPORARY_PREFIX)


def marked_ns(written_at_ns: int, mark: int) -> int:
    """Return the time of modification of an object, whose microseconds are the mark of its tenant.

    So a count needs nothing but the times of each file, which it reads anyway.
    """
    return written_at_ns - written_at_ns % 10**9 + mark * 1000


def _mark_of(modified_at_ns: int) -> int:
    mark, more_ns = divmod(modified_at_ns % 10**9, 1000)
    return 0 if more_ns else mark


def size_on_disk(length_bytes: int) -> int:
    """Return how much of the capacity a file takes: whole pages."""
    return -(-length_bytes // PAGE_BYTES) * PAGE_BYTES


class NotOursError(PermissionError):
    """A file or folder that others could fill or replace is refused; has its owner and the fix."""

    def __init__(self, problem: str, fix: str) -> None:
        super().__init__(errno.EPERM, f"{problem}. Fix: {fix}")
        self.problem = problem
        self.fix = fix


def open_root(path: str) -> int:
    """Return a descriptor of the root, whichever user owns it."""
    return os.open(path, _FOLDER_FLAGS)


def open_our_root(path: str, uid: int, *, make: bool = False) -> int:
    """Return a descriptor of the root, once no other user could have put another in its place.

    `path` is absolute; links on the way are followed if they are safe. NotOursError: a step is not.
    """
    left = _steps(path)
    here_fd, num_links = os.open("/", _STEP_FLAGS), 0
    try:
        while left:
            name = left.pop()
            if make:
                _make_missing(name, here_fd, FOLDER_MODE if not left else _PARENT_MODE)
            step_fd = os.open(name, _STEP_FLAGS, dir_fd=here_fd)
            try:
                found = os.fstat(step_fd)
                if name != "/":
                    _require_safe(step_fd, here_fd, uid, is_root=not left)
                if stat.S_ISLNK(found.st_mode):
                    num_links += 1
                    if num_links > _LINKS_MAX:
                        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), path)
                    left += _steps(os.readlink("", dir_fd=step_fd))
                else:
                    here_fd, step_fd = step_fd, here_fd
            finally:
                os.close(step_fd)
        return os.open(".", _FOLDER_FLAGS, dir_fd=here_fd)
    finally:
        os.close(here_fd)


def _steps(path: str) -> list[str]:
    """Return the names in a path, the last one first; an absolute one begins with "/"."""
    names = [name for name in path.split("/") if name]
    return names[::-1] + ["/"] * path.startswith("/")


def _make_missing(name: str, parent_fd: int, mode: int) -> None:
    try:
        os.stat(name, dir_fd=parent_fd, follow_symlinks=False)
    except FileNotFoundError:
        with contextlib.suppress(FileExistsError):
            os.mkdir(name, mode, dir_fd=parent_fd)


def _require_safe(step_fd: int, parent_fd: int, uid: int, *, is_root: bool) -> None:
    """Refuse a step on the way to the root, or the root, that belongs to others or is open to all.

    A group that may write is accepted: an fsGroup of Kubernetes makes one of every volume. Its
    members can only take the cache away, since what they put there is judged when it is opened.
    """
    found, where = os.fstat(step_fd), path_of(step_fd)
    if found.st_uid != uid and not _is_root(found.st_uid):
        fix = f"use a directory owned by user {uid}, below directories of root or this user"
        if is_root:
            fix += f"; or, if you trust its contents: chown -h {uid} {where!r}"
        raise NotOursError(
            f"{where!r} belongs to user {found.st_uid}, this process is user {uid}", fix
        )
    if not stat.S_ISDIR(found.st_mode) or not found.st_mode & stat.S_IWOTH:
        return
    is_sticky = bool(found.st_mode & stat.S_ISVTX)
    if (is_sticky and not is_root) or _is_volume(step_fd, parent_fd, found):
        return
    raise NotOursError(
        f"{where!r} is world-writable (mode {stat.S_IMODE(found.st_mode):o})",
        f"use a directory below it, such as {where + '/kv'!r}"
        if is_sticky
        else f"chmod o-w {where!r}",
    )


def _is_root(uid: int) -> bool:
    """Return whether this is root, which has another number in some containers."""
    if uid == 0:
        return True
    with contextlib.suppress(OSError):
        return os.stat("/proc/version").st_uid == uid
    return False


def _is_volume(folder_fd: int, parent_fd: int, found: os.stat_result) -> bool:
    """Return whether a folder of root's is mounted into a container.

    Many volumes are open to every user (emptyDir, local-path, Azure Files). Which users there are
    has been decided by those who start the containers.
    """
    if not _is_root(found.st_uid) or _mount_of(folder_fd) == _mount_of(parent_fd):
        return False
    with contextlib.suppress(OSError):
        return os.stat("/proc/self/ns/pid").st_ino != _FIRST_PID_NAMESPACE
    return False


def _mount_of(opened_fd: int) -> str:
    """Return the id of the mount that a descriptor is on; empty if it is not known."""
    with contextlib.suppress(OSError):
        lines = Path(f"/proc/self/fdinfo/{opened_fd}").read_text().splitlines()
        return next((line for line in lines if line.startswith("mnt_id")), "")
    return ""


def path_of(opened_fd: int) -> str:
    """Return the path of a descriptor, for messages."""
    try:
        return os.readlink(f"/proc/self/fd/{opened_fd}")
    except OSError:
        return "(unknown)"


def open_folder(name: str, parent_fd: int) -> int:
    """Return a descriptor of a folder, which is no link."""
    return os.open(name, _FOLDER_FLAGS | os.O_NOFOLLOW, dir_fd=parent_fd)


@contextlib.contextmanager
def opened_folder(name: str, parent_fd: int) -> Iterator[int | None]:
    """Open a folder as `open_folder`; None if there is none, or a link in its place."""
    try:
        folder_fd = open_folder(name, parent_fd)
    except OSError as error:
        if error.errno not in _NO_FOLDER:
            raise
        yield None
        return
    try:
        yield folder_fd
    finally:
        os.close(folder_fd)


def open_our_folder(name: str, parent_fd: int, uid: int) -> int:
    """Return a descriptor of a folder that `require_ours` accepts."""
    folder_fd = open_folder(name, parent_fd)
    try:
        require_ours(folder_fd, uid)
    except OSError:
        os.close(folder_fd)
        raise
    return folder_fd


def make_folder(name: str, parent_fd: int) -> bool:
    """Make a folder if there is none; return whether it was made."""
    try:
        os.mkdir(name, FOLDER_MODE, dir_fd=parent_fd)
    except FileExistsError:
        return False
    return True


def require_ours(opened_fd: int, *uids: int) -> None:
    """Raise NotOursError for a folder or file of other users; revoke their permissions on ours.

    Kubernetes gives volumes with an fsGroup to a group each time it mounts them.
    """
    found = os.fstat(opened_fd)
    if (problem := refusal(found, opened_fd, uids)) is not None:
        raise problem
    if found.st_mode & 0o077:
        os.fchmod(opened_fd, FOLDER_MODE if stat.S_ISDIR(found.st_mode) else FILE_MODE)


def refusal(found: os.stat_result, where: int | str, uids: Sequence[int]) -> NotOursError | None:
    """Return why a folder or file is refused; None if it is ours, and a file has no other name.

    `where` is its path or descriptor; the first of `uids` is for the message.
    """
    is_file = stat.S_ISREG(found.st_mode) and found.st_nlink <= 1
    if found.st_uid in uids and (is_file or stat.S_ISDIR(found.st_mode)):
        return None
    where = path_of(where) if isinstance(where, int) else where
    if found.st_uid not in uids:
        return NotOursError(
            f"{where!r} belongs to user {found.st_uid}, this process is user {uids[0]}",
            "run the engines that share it as one user, or give each user a directory",
        )
    if stat.S_ISREG(found.st_mode):
        return NotOursError(
            f"{where!r} is one of {found.st_nlink} hard links to a file that may belong to anyone",
            f"rm {where!r}",
        )
    return NotOursError(f"{where!r} is not a regular file", f"rm {where!r}")


def mount_point_of(path: str) -> str:
    """Return where the file system of a path is mounted, also of one that does not exist."""
    path = os.path.realpath(path)
    while not os.path.ismount(path):
        path = os.path.dirname(path)
    return path


def walk(root_fd: int, only: str = "") -> Iterator[tuple[Stored, int]]:
    """Yield every file of every namespace, or of one, with a descriptor of its folder.

    Skip what cannot be opened, what vanishes meanwhile, and anything but a file.
    """
    names = [only] if only else os.listdir(root_fd)
    for namespace, namespace_fd in _folders(root_fd, filter(is_namespace_folder, names)):
        names = os.listdir(namespace_fd)
        for folder, folder_fd in _folders(namespace_fd, filter(is_object_folder, names)):
            for file in _files(namespace, folder, folder_fd):
                yield file, folder_fd


def _folders(parent_fd: int, names: Iterable[str]) -> Iterator[tuple[str, int]]:
    """Yield each folder that can be opened with its descriptor, which is closed afterwards."""
    for name in sorted(names):
        try:
            folder_fd = open_folder(name, parent_fd)
        except OSError as error:
            if error.errno not in _GONE:
                raise
            continue
        try:
            yield name, folder_fd
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
                mark = _mark_of(found.st_mtime_ns)
                yield Stored(namespace, folder, entry.name, size_bytes, found.st_atime_ns, mark)


def remove(file: str, folder_fd: int) -> bool:
    """Delete a file; return whether it existed, and was no folder."""
    try:
        os.unlink(file, dir_fd=folder_fd)
    except (FileNotFoundError, IsADirectoryError):
        return False
    return True


def rename(file: str, to: str, folder_fd: int) -> None:
    """Rename a file within its folder, replacing any file of that name."""
    os.rename(file, to, src_dir_fd=folder_fd, dst_dir_fd=folder_fd)
