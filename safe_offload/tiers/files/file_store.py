"""A directory as a store: one file for each object, shared by all processes that name it.

An object is written to a temporary file and renamed, so it exists whole or not at all; a crash of
the machine may leave a torn one, which its header shows. Files are not synced: this is a cache.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import itertools
import logging
import os
import secrets
import stat
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final, TypeVar

from safe_offload.config.tenants import TenantsFile
from safe_offload.config.tiers import FileConfig
from safe_offload.findings import Finding
from safe_offload.threads import start_threads
from safe_offload.tiers import naming
from safe_offload.tiers.base import Name, PlaceError, Result, reason_of
from safe_offload.tiers.batch import Batch
from safe_offload.tiers.files import diagnosis, upkeep
from safe_offload.tiers.files.capacity import LOCK_FILE, USAGE_FILE, CapacityShare, keep
from safe_offload.tiers.files.directory import (
    FILE_MODE,
    TEMPORARY_PREFIX,
    NotOursError,
    make_folder,
    mount_point_of,
    open_our_folder,
    open_our_root,
    open_root,
    remove,
    rename,
    size_on_disk,
)
from safe_offload.tiers.files.object_file import TOUCH_AFTER_NS, ObjectFiles, takes_direct
from safe_offload.tiers.rare_log import RareLog
from safe_offload.tiers.store import Item, Store, pages

logger = logging.getLogger(f"vllm.{__name__}")

SWEEP_EVERY_S: Final = 3600.0
PATIENCE_S: Final = 30.0
"""How long an operator waits for an engine that evicts."""

_PAUSE_S: Final = 0.1

_NO_ROOM: Final = (errno.ENOSPC, errno.EDQUOT)
_NOT_WRITABLE: Final = (errno.EROFS, errno.EACCES, errno.EPERM)
_IN_ITS_PLACE: Final = (errno.ELOOP, errno.ENOTDIR, errno.EISDIR, errno.ENOTEMPTY, errno.EEXIST)
_UNREADABLE: Final = (*_IN_ITS_PLACE, errno.EACCES, errno.EPERM, errno.ENXIO, errno.EINVAL)

_FIX: Final = "check its device or mount (dmesg)"
_MAY_NOT: Final = "let the engines' user write there, on a file system that is mounted read-write"
_FIXES: Final = dict.fromkeys((errno.EACCES, errno.EPERM, errno.EROFS), _MAY_NOT)

T = TypeVar("T")
Work = Callable[["_Visit", Batch, int], Result]


class FileStore(Store):
    """See `Store`. Reads, writes and queries have threads of their own, so none waits for another.

    ConfigError: the system refuses a thread, or the file of tenants cannot be used.
    """

    log: _Log

    def __init__(self, config: FileConfig, slot_bytes: int = 0) -> None:
        super().__init__(config, slot_bytes)
        self._config = config
        self._path = config.location.path
        self.log = _Log(self.label)
        self._place = _Place(self._path, self.label)
        path = config.tenants_path
        shares = TenantsFile(path).shares_by_mark if path else dict
        self._capacity = CapacityShare(config.capacity_bytes, shares)
        self._files = ObjectFiles(slot_bytes)
        self._num_threads = config.num_threads if slot_bytes else 0
        self._keep_lock = threading.Lock()
        self._is_counting = False
        self._wanted_after = -1  # how many counts had ended when the last one was wanted
        self._keep_at_s = 0.0
        self._has_made_room = False  # or tries to, on a full disk, and no write has worked since
        self._is_closed = False
        self._root_fd = -1  # of an operator
        if slot_bytes:
            self._readers = start_threads(config.num_threads, "safe-offload-tier-read")
            self._writers = start_threads(config.num_threads, "safe-offload-tier-write")
            self._query_thread = start_threads(1, "safe-offload-tier-ask")
            self._keeper = start_threads(1, "safe-offload-tier-keep")

    # ---- engines, on the event loop -----------------------------------------------------------

    async def has(self, names: Sequence[Name]) -> list[bool]:
        return await self._off_loop(self._query, names)

    async def get(self, batch: Batch) -> None:
        await self._run(self._readers, self._read, batch)

    async def put(self, batch: Batch) -> None:
        await self._run(self._writers, self._write, batch)

    async def delete(self, keys: Sequence[str]) -> list[bool]:
        if self._num_threads:
            return await self._off_loop(self._delete, keys)
        deleted = []
        for key in keys:
            deleted.append(upkeep.delete(key, self._root()))
            await asyncio.sleep(0)  # where Ctrl-C ends it
        return deleted

    async def describe(self, namespace: bytes, text: bytes) -> float:
        await self._off_loop(self._describe, namespace, text)
        return float("inf")

    async def close(self) -> None:
        if self._root_fd >= 0:
            os.close(self._root_fd)
            self._root_fd = -1
        if self._is_closed or not self._num_threads:
            return
        self._is_closed = True
        for executor in (self._readers, self._writers, self._query_thread):
            executor.shutdown(wait=False, cancel_futures=True)
        await asyncio.wait([asyncio.wrap_future(self._keeper.submit(self._leave))])
        self._keeper.shutdown(wait=False)

    async def _off_loop(self, work: Callable[..., T], *args: object) -> T:
        return await asyncio.wrap_future(self._query_thread.submit(work, *args))

    async def _run(self, executor: ThreadPoolExecutor, work: Work, batch: Batch) -> None:
        num_jobs = min(self._num_threads, len(batch.left))
        await batch.outlast([executor.submit(self._work_off, batch, work) for _ in range(num_jobs)])
        self.used_bytes = self._capacity.used_bytes

    # ---- operators ----------------------------------------------------------------------------

    def _root(self) -> int:
        """Return a descriptor of the root for an operator, whichever user owns it."""
        if self._root_fd < 0:
            try:
                self._root_fd = open_root(self._path)
            except OSError as error:
                raise PlaceError(
                    f"it cannot be opened: {error.strerror}",
                    'Name the directory of a tier (the path of its "url"), as a user who can read '
                    "it",
                ) from None
        return self._root_fd

    async def is_ours(self) -> bool:
        """Return whether a tier has used the directory: else nothing is deleted or made there."""
        root_fd = self._root()
        return bool(upkeep.namespaces(root_fd)) or os.access(USAGE_FILE, os.F_OK, dir_fd=root_fd)

    async def namespaces(self) -> list[str]:
        return upkeep.namespaces(self._root())

    async def walk(self, namespace: str = "") -> AsyncIterator[list[Item]]:
        """See `Store.walk`; it blocks the loop."""
        for page in pages(upkeep.items(self._root(), namespace)):
            yield page

    async def read(self, key: str, start: int, length: int) -> bytes:
        return upkeep.read(key, start, length, self._root())

    async def forget(self, namespaces: Sequence[str]) -> None:
        """See `Store.forget`; an engine may be writing to one of them again."""
        refused: list[OSError] = []
        for namespace in namespaces:
            try:
                upkeep.remove_folders(namespace, self._root())
            except OSError as error:
                refused.append(error)
        await self.recount()
        if refused:
            raise refused[0]

    async def recount(self) -> None:
        """See `Store.recount`; sweeps what crashes have left."""
        for file in (USAGE_FILE, LOCK_FILE):
            upkeep.remove_strange(file, self._root())
        give_up_at_s = time.monotonic() + PATIENCE_S
        while keep(self._root(), None) is None:
            if time.monotonic() > give_up_at_s:
                raise PlaceError("an engine is evicting", "Try again in a minute")
            await asyncio.sleep(_PAUSE_S)

    async def diagnose(self) -> list[Finding]:
        """See `Store.diagnose`; it blocks the loop."""
        return list(diagnosis.diagnose(self._config, open_ours))

    # ---- on threads ---------------------------------------------------------------------------

    def _query(self, names: Sequence[Name]) -> list[bool]:
        with _Visit(self._place) as visit:
            return [visit.has(name) for name in names]

    def _delete(self, keys: Sequence[str]) -> list[bool]:
        with _Visit(self._place) as visit:
            return [upkeep.delete(key, visit.root_fd) for key in keys]

    def _describe(self, namespace: bytes, text: bytes) -> None:
        with _Visit(self._place) as visit:
            visit.describe(namespace, text)

    def _work_off(self, batch: Batch, work: Work) -> None:
        rest = Result.FAILED
        try:
            with _Visit(self._place) as visit:
                for index in batch.take_left():
                    batch.results[index] = self._do(work, visit, batch, index)
        except OSError as error:
            self.log.failure(error)
            rest = self._failed(work, error)
        finally:
            batch.settle(batch.take_left(), rest)

    def _do(self, work: Work, visit: _Visit, batch: Batch, index: int) -> Result:
        num_counts = self._capacity.num_counts
        try:
            return work(visit, batch, index)
        except OSError as error:
            if error.errno in _NO_ROOM:
                return self._make_room(error, num_counts)
            self.log.failure(error)
            return self._failed(work, error)

    def _failed(self, work: Work, error: OSError) -> Result:
        is_refused = work == self._write and error.errno in _NOT_WRITABLE
        return Result.REFUSED if is_refused else Result.FAILED

    def _make_room(self, error: OSError, num_counts: int) -> Result:
        """Evict a batch, as a write found the file system full; once until a write succeeds."""
        began_after_count = self._capacity.num_counts == num_counts and not self._is_counting
        if began_after_count and self._has_made_room:
            self.log.no_help(error)
            return Result.STILL_FULL
        if began_after_count:
            self._want_count(is_disk_full=True)
        self.log.no_room(error)
        return Result.FULL

    def _read(self, visit: _Visit, batch: Batch, index: int) -> Result:
        name = batch.names[index]
        folder, file = naming.path_of(name)
        if not visit.enter(name.namespace):
            return Result.ABSENT
        try:
            folder_fd = visit.folder(folder)
            return self._files.read(file, folder_fd, batch, index, is_direct=self._place.is_direct)
        except FileNotFoundError:
            return Result.ABSENT
        except NotOursError:
            raise
        except OSError as error:
            if error.errno not in _UNREADABLE:
                raise
            return Result.UNREADABLE

    def _write(self, visit: _Visit, batch: Batch, index: int) -> Result:
        name, file_bytes = batch.names[index], batch.size_of(index)
        folder, file = naming.path_of(name)
        has_namespace = visit.enter(name.namespace)
        try:
            if not (has_namespace and visit.has_folder(folder)) and visit.make_folder(name, folder):
                batch.undescribed.add(name.namespace)
            folder_fd = visit.folder(folder)
            if not batch.is_bad(index) and _is_there(file, folder_fd, file_bytes):
                return Result.PRESENT
            taken = self._take(visit.root_fd, size_on_disk(file_bytes))
            if taken is None:
                return Result.FULL
            temporary = _temporary_name()
            is_direct = self._place.is_direct
            try:
                self._files.write(temporary, folder_fd, batch, index, is_direct=is_direct)
                rename(temporary, file, folder_fd)
            except BaseException:
                with contextlib.suppress(OSError):
                    remove(temporary, folder_fd)
                raise
            self._capacity.settle(visit.root_fd, size_on_disk(file_bytes), taken)
        except OSError as error:
            if error.errno not in _IN_ITS_PLACE:
                raise
            return Result.UNREADABLE
        self._has_made_room = False
        return Result.DONE

    def _take(self, root_fd: int, size_bytes: int) -> int | None:
        """Reserve room for an object; wait for one eviction if there is none."""
        capacity = self._capacity
        if capacity.is_too_small_for(size_bytes):
            return None
        num_counts = capacity.num_counts
        taken = capacity.take(root_fd, size_bytes)
        wants_count = capacity.wants_count(is_refused=taken is None)
        if wants_count or time.monotonic() > self._keep_at_s:
            self._want_count()
        if taken is None and (wants_count or capacity.num_counts != num_counts):
            capacity.await_count(num_counts)
            taken = capacity.take(root_fd, size_bytes)
        return taken

    def _want_count(self, *, is_disk_full: bool = False) -> None:
        """Schedule a count of the directory, one at a time."""
        with self._keep_lock:
            if self._is_closed:
                return
            self._wanted_after = self._capacity.num_counts
            if self._is_counting:
                return
            self._keep_at_s = time.monotonic() + SWEEP_EVERY_S
            self._has_made_room |= is_disk_full
            self._is_counting = True
            try:
                self._keeper.submit(self._count_while_wanted)
            except RuntimeError:  # closed meanwhile
                self._is_counting = False

    def _count_while_wanted(self) -> None:
        """Count; then again if one was requested after the count had ended."""
        while self._is_counting:
            self._wanted_after = -1
            self._count(is_disk_full=self._has_made_room)
            with self._keep_lock:
                self._is_counting = self._wanted_after == self._capacity.num_counts

    def _count(self, *, is_disk_full: bool) -> None:
        try:
            with _Visit(self._place) as visit:
                kept = self._capacity.keep(visit.root_fd, is_disk_full=is_disk_full)
        except OSError as error:
            self.log.failure(error)
        except Exception:
            logger.exception("Unexpected error in tier %s, which stays in use", self.label)
        else:
            self._has_made_room &= kept is not None
            if kept is not None and (kept.num_evicted or kept.num_orphans):
                self.num_evicted += kept.num_evicted
                logger.debug("%s: %s", self.label, kept)

    def _leave(self) -> None:
        try:
            with _Visit(self._place) as visit:
                self._capacity.close(visit.root_fd)
        except OSError as error:
            logger.debug("%s: what was taken ahead stays taken: %s", self.label, error)


class _Place:
    """The directory, created when it is first used, and again if it was removed.

    After its file system is unmounted, the tier fails until it is back: nothing is written to the
    file system below.
    """

    def __init__(self, path: str, label: str) -> None:
        self.is_direct = False
        self.uid = -1
        self._path = path
        self._label = label
        self._lock = threading.Lock()
        self._known = (-1, -1, -1, -1)  # the root as it was when it was last judged
        self._mount_point = ""

    def open(self) -> int:
        """Return a descriptor of the root, once it is known to be ours."""
        with contextlib.suppress(FileNotFoundError):
            root_fd = open_root(self._path)
            if _identity(root_fd) == self._known:
                return root_fd
            os.close(root_fd)
        with self._lock:
            return self._settle()

    def _settle(self) -> int:
        mount_point = mount_point_of(self._path)
        if self._mount_point not in ("", mount_point):
            raise OSError(errno.ENODEV, f"nothing is mounted at {self._mount_point} any more")
        root_fd, uid = open_ours(self._path, self.uid, make=True)
        known = _identity(root_fd)
        if known[0] != self._known[0]:
            try:
                self.is_direct, self.uid = takes_direct(root_fd, _temporary_name())
            except OSError as error:
                # It is read-only or full; its objects can be read nevertheless.
                logger.debug("%s: no file can be made: %s", self._label, error)
                self.is_direct, self.uid = True, uid
            logger.info(
                "Tier %s is open in process %d, with %s I/O.",
                *(self._label, os.getpid(), "direct" if self.is_direct else "buffered"),
            )
        self._known, self._mount_point = known, mount_point
        return root_fd


class _Visit:
    """Descriptors of the root, of one namespace and of its folders, for a job of one thread."""

    def __init__(self, place: _Place) -> None:
        self._place = place
        self._namespace = b""
        self._namespace_fd = -1
        self._folder_fds: dict[str, int] = {}
        self.root_fd = -1

    def __enter__(self) -> _Visit:
        self.root_fd = self._place.open()
        return self

    def __exit__(self, *error: object) -> None:
        self._leave_namespace()
        os.close(self.root_fd)

    def has(self, name: Name) -> bool:
        """Return whether something of that name can be read."""
        path = "/".join(naming.path_of(name))
        return self.enter(name.namespace) and os.access(path, os.R_OK, dir_fd=self._namespace_fd)

    def has_folder(self, name: str) -> bool:
        return os.access(name, os.F_OK, dir_fd=self._namespace_fd)

    def folder(self, name: str) -> int:
        """Return a descriptor of one of the 256 folders of the namespace."""
        if name not in self._folder_fds:
            opened_fd = open_our_folder(name, self._namespace_fd, self._place.uid)
            self._folder_fds[name] = opened_fd
        return self._folder_fds[name]

    def enter(self, namespace: bytes) -> bool:
        """Open the folder of a namespace; return whether it exists."""
        if namespace == self._namespace:
            return True
        self._leave_namespace()
        folder = naming.namespace_folder(namespace)
        try:
            self._namespace_fd = open_our_folder(folder, self.root_fd, self._place.uid)
        except FileNotFoundError:
            return False
        self._namespace = namespace
        return True

    def make_folder(self, name: Name, folder: str) -> bool:
        """Make one of the 256 folders; return whether its namespace lacks a description."""
        self._leave_namespace()  # it may have been removed
        make_folder(naming.namespace_folder(name.namespace), self.root_fd)
        if not self.enter(name.namespace):
            raise FileNotFoundError(errno.ENOENT, "the folder of the namespace was removed")
        make_folder(folder, self._namespace_fd)
        return not os.access(naming.DESCRIPTION_FILE, os.F_OK, dir_fd=self._namespace_fd)

    def describe(self, namespace: bytes, text: bytes) -> None:
        if not self.enter(namespace):
            return  # it was removed
        temporary = _temporary_name()
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        file_fd = os.open(temporary, flags, FILE_MODE, dir_fd=self._namespace_fd)
        try:
            os.write(file_fd, text)
        finally:
            os.close(file_fd)
        rename(temporary, naming.DESCRIPTION_FILE, self._namespace_fd)

    def _leave_namespace(self) -> None:
        for folder_fd in self._folder_fds.values():
            os.close(folder_fd)
        self._folder_fds.clear()
        if self._namespace:
            os.close(self._namespace_fd)
            self._namespace = b""


class _Log(RareLog):
    """Adds the fix for an error of the file system."""

    def failure(self, error: OSError) -> None:
        if self.is_due(error.errno):
            fix = _FIXES.get(error.errno or 0, _FIX)
            fix = "" if isinstance(error, NotOursError) else f". Fix: {fix}"  # it has its own
            reason = reason_of(error)
            logger.warning("Tier %s failed to read or write: %s%s.", self._label, reason, fix)

    def no_room(self, error: OSError) -> None:
        if self.is_due(error.errno):
            logger.warning(
                "The file system of tier %s is full: %s. Objects are evicted. Fix: free space or "
                'inodes on it, or write a "capacity" into the tier.',
                *(self._label, reason_of(error)),
            )

    def no_help(self, error: OSError) -> None:
        if self.is_due("no help"):
            logger.warning(
                "Evicting objects of tier %s freed no space: %s. Eviction stops; reads continue. "
                "Fix: free space or inodes on its file system, or raise the quota of user %d.",
                *(self._label, reason_of(error), os.geteuid()),
            )


def open_ours(path: str, uid: int = -1, *, make: bool = False) -> tuple[int, int]:
    """Return a descriptor of the root, and which user we are there; raise as `open_our_root`.

    A file server may map root to another user, so a new file shows who we are before it is refused.
    """
    uid = os.geteuid() if uid < 0 else uid
    try:
        return open_our_root(path, uid, make=make), uid
    except NotOursError as refused:
        folder = path
        while not os.path.isdir(folder):
            folder = os.path.dirname(folder)
        try:
            folder_fd = open_root(folder)
            try:
                found = takes_direct(folder_fd, _temporary_name())[1]
            finally:
                os.close(folder_fd)
        except OSError:
            raise refused from None
        if found == uid:
            raise
        return open_our_root(path, found, make=make), found


def _identity(root_fd: int) -> tuple[int, int, int, int]:
    found = os.fstat(root_fd)
    return found.st_dev, found.st_ino, found.st_uid, found.st_mode


_numbers: Final = itertools.count()


def _temporary_name() -> str:
    """Return a name that is unique among threads, processes and machines."""
    return f"{TEMPORARY_PREFIX}{os.getpid()}-{next(_numbers)}-{secrets.token_hex(4)}"


def _is_there(file: str, folder_fd: int, file_bytes: int) -> bool:
    """Return whether an object is there already; if so, this counts as a use of it."""
    try:
        found = os.stat(file, dir_fd=folder_fd, follow_symlinks=False)
    except FileNotFoundError:
        return False
    if not stat.S_ISREG(found.st_mode) or found.st_size != file_bytes:
        return False
    if not os.access(file, os.R_OK, dir_fd=folder_fd):
        return False
    now_ns = time.time_ns()
    if now_ns - found.st_atime_ns > TOUCH_AFTER_NS:
        os.utime(file, ns=(now_ns, found.st_mtime_ns), dir_fd=folder_fd, follow_symlinks=False)
    return True
