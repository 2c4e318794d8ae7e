"""The files of pools: made, found, listed and removed.

A pool is a folder of one user in memory that the kernel keeps (tmpfs): a table, and for each rank a
file with its slots (`HostLayout`), a checksum of each, and a last page that identifies the table.
Only the user can read them. They outlive all engines, until they are removed or the machine
restarts.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import mmap
import os
import re
import secrets
import stat
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from safe_offload.errors import SharingError, StalledError
from safe_offload.mapped_files import map_file
from safe_offload.node.locks import Locks
from safe_offload.node.table import NEW, Table, make_file

logger = logging.getLogger(f"vllm.{__name__}")

BASE: Final = Path("/dev/shm")
TABLE: Final = "table"
ABOUT: Final = "about"
ABOUT_BYTES_MAX: Final = 4096
_PART: Final = re.compile(rf"{TABLE}|{ABOUT}|{NEW}|rank\d+")
LAST_BYTES: Final = mmap.PAGESIZE
MAKING_TIMEOUT_S: Final = 10.0
"""How long an engine waits for another that creates the pool without taking another page."""
SAID_AFTER_S: Final = 1.0
POLL_S: Final = 0.02


def user_folder() -> Path:
    """Return where the pools of this user are."""
    return BASE / f"safe_offload-{os.geteuid()}"


@dataclass(frozen=True, slots=True)
class Pool:
    """An existing pool, as `safe-offload cache` shows it."""

    path: Path
    about: str
    size_bytes: int
    num_slots: int
    num_filled: int
    num_engines: int
    is_used: bool


@dataclass(frozen=True, slots=True)
class RankFile:
    """One rank's part of a pool."""

    mapping: mmap.mmap  # its slots, and their checksums (`checksum_table`)
    num_slots: int
    pool_id: bytes
    is_new: bool
    locks: Locks  # on the pool's table; the token is held until they are closed
    token: int


@dataclass(frozen=True, slots=True)
class Wanted:
    """The pool that a rank opens, or creates if it is missing."""

    name: str  # of the pool: engines of one name compute the same bytes
    about: str  # a name for users
    rank: int  # the first of the ranks that hold the same KV cache
    num_slots: int  # of the pool, if this rank creates it
    # Returns the bytes that a number of slots and their checksums take.
    size_of: Callable[[int], int]
    terms: bytes  # the layout of the bytes, the same for all engines
    hash_bytes: int
    # Called with the size of the memory before it is taken; its error is propagated.
    check: Callable[[int], None]


def open_rank(wanted: Wanted) -> RankFile:
    """Open one rank's file of a pool; create what is missing.

    Raises:
        SharingError: the pool cannot be used, or created.
        StalledError: another process creates the pool, and makes no progress.
    """
    try:
        folder = _own_folder(user_folder()) / wanted.name
        with contextlib.closing(_locks_beside(folder)) as locks:
            what, growth = f"creating {folder}", lambda: _sizes_of(folder / NEW)
            wait_for(locks, _place_of(folder), what, MAKING_TIMEOUT_S, growth)
            _remove_unfinished(folder, locks)
            return _open_rank(_own_folder(folder), wanted)
    except OSError as error:
        raise SharingError(f"{user_folder()}: {error}") from error


def _open_rank(folder: Path, wanted: Wanted) -> RankFile:
    table_path, path = folder / TABLE, folder / f"rank{wanted.rank}"
    if not table_path.exists():
        if any(folder.glob("rank*")):
            raise SharingError(f"{folder} has lost its table; {_removal(folder)}")
        Table.make(table_path, wanted.num_slots, wanted.hash_bytes, secrets.token_bytes(16))
        (folder / ABOUT).write_text(wanted.about)
    try:
        table = Table(str(table_path))
    except SharingError as error:
        raise SharingError(f"{error}; {_removal(folder)}") from error
    num_slots, pool_id = table.num_slots, table.pool_id
    size_bytes = -(-wanted.size_of(num_slots) // mmap.PAGESIZE) * mmap.PAGESIZE + LAST_BYTES
    last = pool_id + wanted.terms
    is_new = not path.exists()
    if is_new:
        if table.words.any():
            raise SharingError(f"{folder} has lost {path.name}; {_removal(folder)}")
        # Others make pools at the same time, each below a lock of its own.
        others_bytes = sum(map(_bytes_to_come, folder.parent.glob(f"*/{NEW}")))
        if problem := room_problem(folder, free_bytes(folder) - others_bytes, size_bytes):
            raise SharingError(problem)
        wanted.check(size_bytes + others_bytes)
        # All of it now: a page that is missing later would end the process.
        make_file(path, size_bytes, {size_bytes - LAST_BYTES: last})
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        is_right = os.fstat(fd).st_size == size_bytes
        if not is_right or os.pread(fd, len(last), size_bytes - LAST_BYTES) != last:
            raise SharingError(f"{path} belongs to another table; {_removal(folder)}")
        mapping = map_file(fd, table.locks.fd)
    finally:
        os.close(fd)
    token = table.locks.new_token()
    return RankFile(mapping, num_slots, pool_id, is_new, table.locks, token)


def free_bytes(folder: Path) -> int:
    """Return what this user may still write to the file system of a folder."""
    system = os.statvfs(folder)
    return system.f_bavail * system.f_frsize


def room_problem(folder: Path, free_bytes: int, size_bytes: int) -> str:
    """Return why files of a size do not fit into a folder, and the fix; empty if they fit."""
    if free_bytes >= size_bytes:
        return ""
    return (
        f"{folder} has {free_bytes >> 20} MiB free, and the pool needs {size_bytes >> 20} MiB. "
        f"Fix: enlarge {BASE} (docker run --shm-size; in Kubernetes an emptyDir with medium: "
        'Memory, mounted there; or mount -o remount,size=…), lower "cpu_bytes_to_use", or remove '
        "unused pools (safe-offload cache ls node)"
    )


def _own_folder(path: Path) -> Path:
    """Return a folder that only this user can write, created if it is missing."""
    with contextlib.suppress(FileExistsError):
        path.mkdir(mode=0o700)
    return require_own(path)


def require_own(path: Path) -> Path:
    """Return the path; raise SharingError if another user made it or can write to it."""
    found = path.lstat()
    is_ours = stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid()
    if not is_ours or found.st_mode & 0o077:
        raise SharingError(
            f"{path} is not a folder owned by this user with mode 0700. Fix: remove it, as root "
            "if it belongs to another user"
        )
    return path


def _locks_beside(folder: Path) -> Locks:
    return Locks(str(folder.parent / "lock"), make=True)


def _place_of(folder: Path) -> int:
    """Return the place that is locked while this pool is created, opened or removed."""
    return int.from_bytes(hashlib.sha256(folder.name.encode()).digest()[:4])


def _remove_unfinished(folder: Path, locks: Locks) -> None:
    """Remove unfinished files of killed processes; the caller holds the place of the folder."""
    for new in folder.parent.glob(f"*/{NEW}"):
        place = _place_of(new.parent)
        if locks.take(place):
            new.unlink(missing_ok=True)
            if place != _place_of(folder):
                locks.give(place)


def _sizes_of(path: Path) -> tuple[int, int]:
    """Return the final size of a file and how much of it is allocated; 0 without a file."""
    with contextlib.suppress(FileNotFoundError):
        found = path.lstat()
        return found.st_size, found.st_blocks * 512
    return 0, 0


def _bytes_to_come(path: Path) -> int:
    size_bytes, taken_bytes = _sizes_of(path)
    return max(0, size_bytes - taken_bytes)


def wait_for(
    locks: Locks,
    place: int,
    what: str,
    patience_s: float,
    progress: Callable[[], object] = lambda: None,
) -> None:
    """Lock a place once no other process holds it; log a wait of over a second.

    Args:
        what: the caller waits for, for the log.
        progress: changes its value while the holder of the place makes progress.

    Raises:
        StalledError: no progress for `patience_s`.
    """
    begin_s = gone_on_s = time.monotonic()
    seen, is_said = progress(), False
    while not locks.take(place):
        now_s = time.monotonic()
        if (found := progress()) != seen:
            seen, gone_on_s = found, now_s
        if now_s - gone_on_s > patience_s:
            raise StalledError(f"another process made no progress for {patience_s:g} s ({what})")
        if now_s - begin_s > SAID_AFTER_S and not is_said:
            logger.info("Waiting for another process: %s. It may be suspended.", what)
            is_said = True
        time.sleep(POLL_S)


def _removal(folder: Path) -> str:
    return f"stop the engines that use it, and run: safe-offload cache rm node {folder.name}"


def find_pools() -> list[Pool]:
    """Return the pools of this user; one that cannot be read has no slots.

    Raises SharingError if other users can write to their folder; so does `remove_pool`.
    """
    try:
        paths = sorted(require_own(user_folder()).iterdir())
    except FileNotFoundError:
        return []
    found = []
    for path in paths:
        with contextlib.suppress(FileNotFoundError):  # removed meanwhile
            if stat.S_ISDIR(path.lstat().st_mode):
                found.append(_look_at(path))
    return found


def _look_at(path: Path) -> Pool:
    about = ""
    with contextlib.suppress(OSError):
        about_fd = os.open(path / ABOUT, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            about = os.read(about_fd, ABOUT_BYTES_MAX).decode(errors="replace")
        finally:
            os.close(about_fd)
    size_bytes = sum(found.lstat().st_blocks * 512 for found in path.iterdir())
    table_path, is_used = str(path / TABLE), False
    with contextlib.suppress(FileNotFoundError):
        locks = Locks(table_path)
        is_used = locks.is_used()  # whatever is in the file: another version may have made it
        locks.close()
    try:
        table = Table(table_path)
    except (OSError, SharingError):
        return Pool(path, about, size_bytes, 0, 0, 0, is_used)
    num_filled = int(np.count_nonzero(table.words & np.uint64(1)))
    num_engines, num_slots = len(table.living), table.num_slots
    table.close()
    return Pool(path, about, size_bytes, num_slots, num_filled, num_engines, is_used)


def remove_pool(path: Path, *, is_dry: bool = False) -> str:
    """Remove a pool, or only check whether it could be removed; return why not, if so."""
    require_own(path.parent)
    with contextlib.closing(_locks_beside(path)) as locks:
        if not locks.take(_place_of(path)):
            return "is being created, opened or removed by another process"
        pool = _look_at(path)
        if pool.num_engines:
            return f"is in use by {pool.num_engines} engine{'s' if pool.num_engines > 1 else ''}"
        if pool.is_used:
            return "is in use by an engine that is starting or has another version"
        folder_fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            names = os.listdir(folder_fd)
            if others := sorted(name for name in names if not _PART.fullmatch(name)):
                return f"has {others[0]!r} in it, which is not part of a pool"
            for name in () if is_dry else names:
                os.unlink(name, dir_fd=folder_fd)
        finally:
            os.close(folder_fd)
        if not is_dry:
            path.rmdir()
    return ""
