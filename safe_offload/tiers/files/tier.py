"""A directory as a tier: one file for each object, shared by all processes that name it.

An object is written to a temporary file of its own and renamed, so that it is there whole or not at
all; a crash of the machine may leave a torn one, which its header shows. Files are not synced: this
is a cache.
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
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from safe_offload.config.tenants import TenantsFile
from safe_offload.config.tiers import TierConfig
from safe_offload.threads import start_threads
from safe_offload.tiers import naming
from safe_offload.tiers.base import Buffers, Name, Result
from safe_offload.tiers.batch import BadNames, Batch, Calls
from safe_offload.tiers.files.capacity import CapacityShare
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
from safe_offload.tiers.files.object_file import (
    TOUCH_AFTER_NS,
    ObjectFiles,
    file_bytes_of,
    takes_direct,
)
from safe_offload.tiers.rare_log import RareLog
from safe_offload.tiers.seal import PLAIN, Seal

logger = logging.getLogger(f"vllm.{__name__}")

SWEEP_EVERY_S: Final = 3600.0

_NO_ROOM: Final = (errno.ENOSPC, errno.EDQUOT)
_IN_ITS_PLACE: Final = (errno.ELOOP, errno.ENOTDIR, errno.EISDIR, errno.ENOTEMPTY, errno.EEXIST)
_UNREADABLE: Final = (*_IN_ITS_PLACE, errno.EACCES, errno.EPERM, errno.ENXIO, errno.EINVAL)

Work = Callable[["_Visit", Name, Buffers], Result]


class FileTier:
    """See `Tier`.

    Reading, writing and asking have threads of their own, so that none waits for another.

    Args:
        config: of the tier; its directory is not touched before it is first used.
        slot_bytes: of the largest slot.
        facts: of its namespaces (naming.py), written down beside the objects.

    Raises:
        ConfigError: the system refuses a thread, or the file of tenants cannot be used.
    """

    def __init__(
        self,
        config: TierConfig,
        slot_bytes: int,
        facts: Mapping[str, object] | None = None,
        seal: Seal = PLAIN,
    ) -> None:
        self.label = config.location.label
        self.used_bytes = -1
        self.num_evicted = 0
        self._log = _Log(self.label)
        self._place = _Place(config.location.path, self.label, {} if facts is None else facts)
        path = config.tenants_path
        shares = TenantsFile(path).shares_by_mark if path else dict
        self._capacity = CapacityShare(config.capacity_bytes, shares)
        self._files = ObjectFiles(slot_bytes, seal)
        self._num_threads = config.num_threads
        self._bad_names = BadNames()
        self._readers = start_threads(config.num_threads, "safe-offload-tier-read")
        self._writers = start_threads(config.num_threads, "safe-offload-tier-write")
        self._asker = start_threads(1, "safe-offload-tier-ask")
        self._keeper = start_threads(1, "safe-offload-tier-keep")
        self._keep_lock = threading.Lock()
        self._is_counting = False
        self._wanted_after = -1  # how many counts had ended when the last one was wanted
        self._keep_at_s = 0.0
        self._has_made_room = False  # or tries to, on a full disk, and no write has worked since
        self._calls = Calls()

    # ---- the protocol, on the event loop ------------------------------------------------------

    async def probe(self, names: Sequence[Name]) -> list[bool]:
        return await asyncio.wrap_future(self._asker.submit(self._ask, names))

    async def fetch(self, names: Sequence[Name], slots: Sequence[Buffers]) -> list[Result]:
        return await self._run(self._readers, self._read, names, slots)

    async def spill(self, names: Sequence[Name], slots: Sequence[Buffers]) -> list[Result]:
        return await self._run(self._writers, self._write, names, slots)

    async def close(self) -> None:
        if self._calls.is_closed:
            return
        await self._calls.close()
        for executor in (self._readers, self._writers, self._asker):
            executor.shutdown(wait=False, cancel_futures=True)
        await asyncio.wait([asyncio.wrap_future(self._keeper.submit(self._leave))])
        self._keeper.shutdown(wait=False)

    async def _run(
        self,
        executor: ThreadPoolExecutor,
        work: Work,
        names: Sequence[Name],
        slots: Sequence[Buffers],
    ) -> list[Result]:
        batch = Batch(names, slots)
        if self._calls.is_closed:
            return batch.results
        num_jobs = min(self._num_threads, len(names))
        jobs = [executor.submit(self._work_off, batch, work) for _ in range(num_jobs)]

        def give_up() -> None:
            batch.left.clear()
            for job in jobs:
                job.cancel()

        await self._calls.outlast([asyncio.wrap_future(job) for job in jobs], give_up)
        self.used_bytes = self._capacity.used_bytes
        return batch.results

    # ---- on threads ---------------------------------------------------------------------------

    def _ask(self, names: Sequence[Name]) -> list[bool]:
        with _Visit(self._place) as visit:
            return [name not in self._bad_names and visit.has(name) for name in names]

    def _work_off(self, batch: Batch, work: Work) -> None:
        """Do objects of a batch until none is left."""
        try:
            with _Visit(self._place) as visit:
                for index in batch.take_left():
                    name, slot = batch.names[index], batch.slots[index]
                    batch.results[index] = self._do(work, visit, name, slot)
        except OSError as error:
            self._log.failure(error)
        except Exception:
            logger.exception("Unexpected error in tier %s, which stays in use", self.label)
        batch.settle(batch.take_left(), Result.FAILED)

    def _do(self, work: Work, visit: _Visit, name: Name, slot: Buffers) -> Result:
        num_counts = self._capacity.num_counts
        try:
            return work(visit, name, slot)
        except OSError as error:
            if error.errno in _NO_ROOM:
                return self._make_room(error, num_counts)
            self._log.failure(error)
            return Result.FAILED

    def _make_room(self, error: OSError, num_counts: int) -> Result:
        """A write found the file system full: evict a batch, once until a write works again."""
        began_after_count = self._capacity.num_counts == num_counts and not self._is_counting
        if began_after_count and self._has_made_room:
            self._log.no_help(error)
            return Result.STILL_FULL
        if began_after_count:
            self._want_count(is_disk_full=True)
        self._log.no_room(error)
        return Result.FULL

    def _read(self, visit: _Visit, name: Name, slot: Buffers) -> Result:
        folder, file = naming.path_of(name)
        if not visit.enter(name.namespace):
            return Result.ABSENT
        try:
            folder_fd = visit.folder(folder)
            result = self._files.read(file, folder_fd, name, slot, is_direct=self._place.is_direct)
            if result in (Result.CORRUPT, Result.FOREIGN):
                self._log.bad_object(result, file)
                remove(file, folder_fd)
        except FileNotFoundError:
            return Result.ABSENT
        except NotOursError:
            raise
        except OSError as error:
            if error.errno not in _UNREADABLE:
                raise
            result = Result.UNREADABLE
        if result is Result.UNREADABLE:
            self._log.bad_object(result, file)
            self._bad_names.add(name)
        return result

    def _write(self, visit: _Visit, name: Name, slot: Buffers) -> Result:
        folder, file = naming.path_of(name)
        file_bytes = file_bytes_of(slot)
        has_namespace = visit.enter(name.namespace)
        try:
            if not has_namespace or not visit.has_folder(folder):
                visit.make_folder(name.namespace, folder)
            folder_fd = visit.folder(folder)
            if _is_there(file, folder_fd, file_bytes):
                return Result.PRESENT
            taken = self._take(visit.root_fd, size_on_disk(file_bytes))
            if taken is None:
                return Result.FULL
            temporary = _temporary_name()
            try:
                self._files.write(temporary, folder_fd, name, slot, is_direct=self._place.is_direct)
                rename(temporary, file, folder_fd)
            except BaseException:
                with contextlib.suppress(OSError):
                    remove(temporary, folder_fd)
                raise
            self._capacity.settle(visit.root_fd, size_on_disk(file_bytes), taken)
        except OSError as error:
            if error.errno not in _IN_ITS_PLACE:
                raise
            self._log.bad_object(Result.UNREADABLE, file)
            return Result.UNREADABLE
        self._bad_names.discard(name)
        self._has_made_room = False
        return Result.DONE

    def _take(self, root_fd: int, size_bytes: int) -> int | None:
        """Take room for an object; wait for one eviction if there is none."""
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
        """Have the directory counted soon, once at a time."""
        with self._keep_lock:
            if self._calls.is_closed:
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
        """Count; then again if that was wanted after the count had ended."""
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
            self._log.failure(error)
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
    """The directory: made when it is first used, and again if it was removed.

    If what is mounted there is unmounted, the tier fails until it is back: nothing is written to
    the file system below.
    """

    def __init__(self, path: str, label: str, facts: Mapping[str, object]) -> None:
        self.is_direct = False
        self.uid = -1
        self._path = path
        self._label = label
        self._facts = facts
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
                # It is read-only or full; what is there can be read all the same.
                logger.debug("%s: no file can be made: %s", self._label, error)
                self.is_direct, self.uid = True, uid
            logger.info(
                "Tier %s is open, with %s I/O.",
                *(self._label, "direct" if self.is_direct else "buffered"),
            )
        self._known, self._mount_point = known, mount_point
        return root_fd

    def describe(self, namespace: bytes, namespace_fd: int) -> None:
        temporary = _temporary_name()
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        file_fd = os.open(temporary, flags, FILE_MODE, dir_fd=namespace_fd)
        try:
            os.write(file_fd, naming.description(namespace, self._facts))
        finally:
            os.close(file_fd)
        rename(temporary, naming.DESCRIPTION_FILE, namespace_fd)


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
        """Return whether there is something of that name that can be read."""
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
        """Open the folder of a namespace; return whether there is one."""
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

    def make_folder(self, namespace: bytes, name: str) -> None:
        """Make one of the 256 folders, and that of its namespace if there is none."""
        self._leave_namespace()  # it may have been removed
        is_new = make_folder(naming.namespace_folder(namespace), self.root_fd)
        if not self.enter(namespace):
            raise FileNotFoundError(errno.ENOENT, "the folder of the namespace was removed")
        if is_new or not os.access(naming.DESCRIPTION_FILE, os.F_OK, dir_fd=self._namespace_fd):
            self._place.describe(namespace, self._namespace_fd)
        make_folder(name, self._namespace_fd)

    def _leave_namespace(self) -> None:
        for folder_fd in self._folder_fds.values():
            os.close(folder_fd)
        self._folder_fds.clear()
        if self._namespace:
            os.close(self._namespace_fd)
            self._namespace = b""


class _Log(RareLog):
    """Says what went wrong, each kind at most once a minute."""

    def failure(self, error: OSError) -> None:
        if self.is_due(error.errno):
            logger.warning("Tier %s failed to read or write: %s", self._label, error)

    def no_room(self, error: OSError) -> None:
        if self.is_due(error.errno):
            logger.warning("The file system of tier %s is full: %s", self._label, error)

    def no_help(self, error: OSError) -> None:
        if self.is_due("no help"):
            logger.warning(
                "Evicting objects of tier %s freed no space: %s. Eviction stops; reads continue. "
                "Fix: free space or inodes on its file system, or raise the quota of user %d",
                *(self._label, error, os.geteuid()),
            )


def open_ours(path: str, uid: int = -1, *, make: bool = False) -> tuple[int, int]:
    """Return a descriptor of the root, and which user we are there; raise as `open_our_root`.

    A file server may map root to another user, so it is asked before all is given up.
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
    """Return a name that no other thread, process or machine uses."""
    return f"{TEMPORARY_PREFIX}{os.getpid()}-{next(_numbers)}-{secrets.token_hex(4)}"


def _is_there(file: str, folder_fd: int, file_bytes: int) -> bool:
    """Return whether an object need not be written, which counts as a use of it."""
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
