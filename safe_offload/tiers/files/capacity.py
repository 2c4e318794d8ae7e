"""The capacity of a directory, enforced together by all processes that share it.

The file `usage` contains the number of bytes reserved. A process reserves some ahead, under a
`flock` that it holds for microseconds, and writes objects into its reservation. So the directory
never holds more than `usage` says, which is never more than the limit. The reservation of a killed
process lasts until the next count. A process without a limit reserves what it writes as well, for
those with one.

When little is left, one process counts the objects and evicts the least recently used; with
tenants, those of the tenants most over quota first (`_payments`). It holds `evict.lock`, which the
kernel releases with its process. A count sees only what has been written, so it voids all
reservations made before (the generation in `usage`).

When the file system is full, a batch is evicted, and `evict.lock` records what was left. If no more
than that is there when it is full again, others have taken the room: nothing is evicted.
"""

from __future__ import annotations

import fcntl
import os
import struct
import threading
import time
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
import xxhash

from safe_offload.config.tenants import WHOLE, payments
from safe_offload.config.units import MIB
from safe_offload.tiers.files.directory import (
    FILE_MODE,
    NotOursError,
    Stored,
    path_of,
    refusal,
    remove,
    require_ours,
    walk,
)

USAGE_FILE: Final = "usage"
LOCK_FILE: Final = "evict.lock"
EVICT_FROM: Final = 0.97
EVICT_TO: Final = 0.9
ORPHAN_AGE_S: Final = 3600.0

_AHEAD_BYTES_MAX: Final = 64 * MIB
_AHEAD_SHARE: Final = 64
_LOCK_PATIENCE_S: Final = 0.2
_LOCK_PAUSE_S: Final = 0.001
_PATIENCE_S: Final = 1.0
_PAUSE_S: Final = 0.05  # after a count that made no room
_TRY_AGAIN_NS: Final = 3600 * 10**9  # whether others have left room
_LOCK_FLAGS: Final = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_PAIR: Final = struct.Struct("<QQ")
_DIGEST: Final = struct.Struct("<Q")
_PAIR_BYTES: Final = _PAIR.size + _DIGEST.size
_UNKNOWN_BYTES: Final = 1 << 62  # taken, until it is known: more than any limit
_UNCOUNTED: Final = -1
_UNDIVIDED: Final[Mapping[int, int]] = {}


class Usage(NamedTuple):
    """The content of the file `usage`: bytes of objects and reservations, and the number of counts.

    A reservation is void if it was made in another generation.
    """

    generation: int
    taken_bytes: int

    @classmethod
    def read(cls, usage_fd: int) -> Usage | None:
        """Return the content of the file; None if it is damaged."""
        pair = _read_pair(usage_fd)
        return None if pair is None else cls(*pair)

    def write(self, usage_fd: int) -> None:
        """Write it, in one call."""
        _write_pair(usage_fd, *self)


@dataclass(frozen=True, slots=True)
class Kept:
    """The result of a count; orphans are old temporary files, which were deleted."""

    held_bytes: int
    num_evicted: int = 0
    evicted_bytes: int = 0
    num_orphans: int = 0


class CapacityShare:
    """The share of one process in the capacity of a directory; any thread may call it.

    `limit_bytes` is of all processes together; `shares` returns the guaranteed share of each mark.
    """

    def __init__(
        self, limit_bytes: int | None, shares: Callable[[], Mapping[int, int]] = dict
    ) -> None:
        self._limit_bytes = limit_bytes
        self._shares = shares
        self._lock = threading.Lock()
        self._room = threading.Condition(self._lock)
        self._generation = -1
        self._ahead_bytes = 0
        self._is_short = False
        self._count_again_at_s = 0.0
        self.num_counts = 0  # how often `keep` has ended
        self.used_bytes = -1

    def take(self, root_fd: int, size_bytes: int) -> int | None:
        """Reserve room for a file; return the generation for `settle`, or None if there is no room.

        OSError: the directory cannot be written, or its file system has no `flock`.
        """
        with self._lock:
            if self._draw(root_fd, size_bytes):
                return self._generation
            return _UNCOUNTED if self._limit_bytes is None else None

    def settle(self, root_fd: int, size_bytes: int, generation: int) -> None:
        """Make sure that a file, now renamed, is counted; raise as `take`.

        A count that began since its room was reserved may have missed it, or not: it is added.
        """
        with _opened(USAGE_FILE, root_fd) as usage_fd:
            usage = Usage.read(usage_fd)
            if usage is None or usage.generation == generation or not self._locked(usage_fd):
                return
            usage = Usage.read(usage_fd)
            if usage is not None:
                Usage(usage.generation, usage.taken_bytes + size_bytes).write(usage_fd)

    def is_too_small_for(self, size_bytes: int) -> bool:
        """Return whether a file is larger than the whole capacity."""
        return self._limit_bytes is not None and size_bytes > self._limit_bytes

    def wants_count(self, *, is_refused: bool = False) -> bool:
        """Return whether to call `keep`: little is left or a write failed, and it may help."""
        return (self._is_short or is_refused) and time.monotonic() >= self._count_again_at_s

    def await_count(self, num_counts: int) -> None:
        """Wait, a short time at most, until there have been more counts."""
        with self._lock:
            self._room.wait_for(lambda: self.num_counts != num_counts, _PATIENCE_S)

    def _draw(self, root_fd: int, size_bytes: int) -> bool:
        with _opened(USAGE_FILE, root_fd) as usage_fd:
            usage = Usage.read(usage_fd)
            if usage is not None and usage.generation == self._generation:
                if self._ahead_bytes >= size_bytes:
                    self._ahead_bytes -= size_bytes
                    return True
            else:
                self._ahead_bytes = 0
            if not self._locked(usage_fd):
                return False
            usage = Usage.read(usage_fd)
            got_bytes = 0 if usage is None else self._grant(usage.taken_bytes, size_bytes)
            if usage is None or not got_bytes:
                self._is_short = True
                return False
            if usage.generation != self._generation:
                self._generation, self._ahead_bytes = usage.generation, 0
            taken_bytes = usage.taken_bytes + got_bytes
            Usage(usage.generation, taken_bytes).write(usage_fd)
            self._ahead_bytes += got_bytes - size_bytes
            self._is_short = taken_bytes > EVICT_FROM * (self._limit_bytes or _UNKNOWN_BYTES)
            if taken_bytes < _UNKNOWN_BYTES:
                self.used_bytes = taken_bytes
            return True

    def _grant(self, taken_bytes: int, size_bytes: int) -> int:
        """Return how much to reserve: some ahead, or just `size_bytes`; 0 if that is too much."""
        limit_bytes = self._limit_bytes
        if limit_bytes is None:  # ahead, so little that others with a limit have theirs
            known_bytes = taken_bytes if taken_bytes < _UNKNOWN_BYTES else 0
            return max(size_bytes, min(_AHEAD_BYTES_MAX, known_bytes // _AHEAD_SHARE))
        left_bytes = limit_bytes - taken_bytes
        wanted_bytes = max(size_bytes, min(_AHEAD_BYTES_MAX, limit_bytes // _AHEAD_SHARE))
        got_bytes = wanted_bytes if wanted_bytes <= left_bytes else size_bytes
        return got_bytes if got_bytes <= left_bytes else 0

    def _locked(self, usage_fd: int) -> bool:
        """Lock `usage`; return False if that is impossible and we have no limit."""
        try:
            _lock(usage_fd)
        except OSError:
            if self._limit_bytes is not None:
                raise
            return False
        return True

    def keep(self, root_fd: int, *, is_disk_full: bool = False) -> Kept | None:
        """Call `keep` with the limit, and record how much room there is.

        Return None if another process counted; this has waited for it.
        """
        kept, has_room = None, False
        try:
            shares = self._shares()
            kept = keep(root_fd, self._limit_bytes, is_disk_full=is_disk_full, shares=shares)
            if kept is None:
                has_room = _await_other_count(root_fd)
            else:
                limit_bytes = self._limit_bytes or kept.held_bytes
                has_room = kept.held_bytes <= EVICT_FROM * limit_bytes
            return kept
        finally:
            with self._lock:
                self._is_short = False
                if kept is not None:
                    self.used_bytes = kept.held_bytes
                self._count_again_at_s = time.monotonic() + (0.0 if has_room else _PAUSE_S)
                self.num_counts += 1
                self._room.notify_all()

    def close(self, root_fd: int) -> None:
        """Release the reservation; raise as `take`."""
        with self._lock:
            if self._ahead_bytes <= 0:
                return
            with _opened(USAGE_FILE, root_fd) as usage_fd:
                _lock(usage_fd)
                usage = Usage.read(usage_fd)
                if usage is not None and usage.generation == self._generation:
                    taken_bytes = max(usage.taken_bytes - self._ahead_bytes, 0)
                    Usage(usage.generation, taken_bytes).write(usage_fd)
            self._ahead_bytes = 0


def keep(
    root_fd: int,
    limit_bytes: int | None,
    *,
    is_disk_full: bool = False,
    shares: Mapping[int, int] = _UNDIVIDED,
) -> Kept | None:
    """Count the objects, delete orphans, and evict if there is more than EVICT_FROM of the limit.

    With `is_disk_full`, evict a batch in any case, unless the last one has made no room. Return
    None if another process is counting. OSError: as `CapacityShare.take`.
    """
    with _opened(LOCK_FILE, root_fd) as lock_fd:
        try:
            fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return None
        with _opened(USAGE_FILE, root_fd) as usage_fd:
            before = _begin_count(usage_fd)
        num_orphans, files = _count(root_fd)
        held_bytes = files.total_bytes
        last = _LastBatch(lock_fd)
        to_bytes = _target(held_bytes, limit_bytes, before)
        if is_disk_full:
            batch_bytes = last.next_bytes(held_bytes - files.temporary_bytes)
            to_bytes = min(to_bytes, held_bytes - batch_bytes)
        due = files.due(held_bytes - to_bytes, shares)
        num_evicted, evicted_bytes = 0, 0
        if due:
            num_evicted, evicted_bytes = _evict(root_fd, due, shares)
        held_bytes -= evicted_bytes
        if is_disk_full and num_evicted:
            last.record(held_bytes - files.temporary_bytes, evicted_bytes)
        with _opened(USAGE_FILE, root_fd) as usage_fd:
            _end_count(usage_fd, before, held_bytes)
        return Kept(held_bytes, num_evicted, evicted_bytes, num_orphans)


class _LastBatch:
    """The record in `evict.lock` of the last batch that was evicted for a full file system."""

    def __init__(self, lock_fd: int) -> None:
        self._lock_fd = lock_fd
        self._at_ns = os.fstat(lock_fd).st_mtime_ns
        last = _read_pair(lock_fd)
        if last is None:
            self.record(0, 0)  # while there is room for it
        self._held_bytes, self._evicted_bytes = last or (0, 0)

    def next_bytes(self, held_bytes: int) -> int:
        """Return how much to evict, as the file system is full again.

        If others have taken more than half of the room that the last batch made, one object an
        hour, to find out whether that has changed.
        """
        if held_bytes >= self._held_bytes + self._evicted_bytes // 2:
            return held_bytes - int(EVICT_TO * held_bytes)
        return int(time.time_ns() - self._at_ns > _TRY_AGAIN_NS)

    def record(self, held_bytes: int, evicted_bytes: int) -> None:
        with suppress(OSError):  # no room for that either
            _write_pair(self._lock_fd, held_bytes, evicted_bytes)


def _target(held_bytes: int, limit_bytes: int | None, before: Usage) -> int:
    if limit_bytes is None:
        return held_bytes
    # A little less may be held than is reserved, and there must be room afterwards.
    if max(held_bytes, min(before.taken_bytes, limit_bytes)) > EVICT_FROM * limit_bytes:
        return min(int(EVICT_TO * limit_bytes), held_bytes)
    return held_bytes


def _begin_count(usage_fd: int) -> Usage:
    """Void all reservations; return the usage before."""
    _lock(usage_fd)
    usage = Usage.read(usage_fd)
    if usage is None:
        usage = Usage(time.time_ns(), _UNKNOWN_BYTES)
    begun = Usage(usage.generation + 1, usage.taken_bytes)
    begun.write(usage_fd)
    return begun


def _end_count(usage_fd: int, before: Usage, held_bytes: int) -> None:
    """Write the bytes held, and those reserved since the count began."""
    _lock(usage_fd)
    usage = Usage.read(usage_fd) or before
    taken_since = max(usage.taken_bytes - before.taken_bytes, 0)
    Usage(before.generation, held_bytes + taken_since).write(usage_fd)


def _payments(held: Mapping[int, int], excess: int, shares: Mapping[int, int]) -> dict[int, int]:
    """Return by mark how much of the excess to evict: nothing of a mark's share of the rest.

    Shares are at most the whole together, so what exceeds them is always enough.
    """
    kept = sum(held.values()) - excess
    above = [n - shares.get(mark, 0) * kept // WHOLE for mark, n in held.items()]
    return dict(zip(held, payments(list(held.values()), above, excess), strict=True))


class _Files:
    """Sizes, times of use and marks of files, 20 bytes for each."""

    def __init__(self) -> None:
        self._sizes = array("q")
        self._used_at = array("q")
        self._marks = array("i")
        self.temporary_bytes = 0

    def add(self, file: Stored) -> None:
        self.temporary_bytes += file.size_bytes * file.is_temporary
        self._sizes.append(file.size_bytes)
        self._used_at.append(file.used_at_ns)
        self._marks.append(file.mark)

    @property
    def total_bytes(self) -> int:
        return sum(self._sizes)

    def due(self, excess_bytes: int, shares: Mapping[int, int]) -> dict[int, tuple[int, int]]:
        """Return by mark up to which time of use to evict files, the oldest first, and how much."""
        if excess_bytes <= 0:
            return {}
        sizes, used_at = (np.array(n, dtype=np.int64) for n in (self._sizes, self._used_at))
        marks = np.array(self._marks)
        marks[~np.isin(marks, list(shares))] = 0
        of_mark = {int(mark): np.flatnonzero(marks == mark) for mark in np.unique(marks)}
        held = {mark: int(sizes[files].sum()) for mark, files in of_mark.items()}
        due = {}
        for mark, due_bytes in _payments(held, excess_bytes, shares).items():
            if due_bytes > 0:
                files = of_mark[mark][np.argsort(used_at[of_mark[mark]], kind="stable")]
                last = int(np.searchsorted(np.cumsum(sizes[files]), due_bytes))
                due[mark] = int(used_at[files[min(last, len(files) - 1)]]), due_bytes
        return due


def _count(root_fd: int) -> tuple[int, _Files]:
    """Delete orphans; return their number, and the other files."""
    files, num_orphans = _Files(), 0
    orphan_before_ns = time.time_ns() - int(ORPHAN_AGE_S * 1e9)
    for file, folder_fd in walk(root_fd):
        if file.is_temporary and file.used_at_ns < orphan_before_ns:
            num_orphans += remove(file.file, folder_fd)
        else:
            files.add(file)
    return num_orphans, files


def _evict(
    root_fd: int, due: Mapping[int, tuple[int, int]], shares: Mapping[int, int]
) -> tuple[int, int]:
    """Delete the least recently used files of each mark, until all that is due is gone."""
    num_evicted, gone_bytes = 0, Counter[int]()
    for file, folder_fd in walk(root_fd):
        mark = file.mark if file.mark in shares else 0
        until_ns, due_bytes = due.get(mark, (0, 0))
        is_due = file.used_at_ns <= until_ns and gone_bytes[mark] < due_bytes
        if is_due and not file.is_temporary and remove(file.file, folder_fd):
            num_evicted += 1
            gone_bytes[mark] += file.size_bytes
    return num_evicted, gone_bytes.total()


@contextmanager
def _opened(name: str, root_fd: int) -> Iterator[int]:
    """Open one of the two files, if it is ours; closing it releases its lock."""
    uids = (os.geteuid(), os.fstat(root_fd).st_uid)
    try:
        opened_fd = os.open(name, _LOCK_FLAGS, FILE_MODE, dir_fd=root_fd)
    except IsADirectoryError:
        where = os.path.join(path_of(root_fd), name)
        raise NotOursError(f"{where!r} is a directory, not a file", f"rm -r {where!r}") from None
    except OSError as error:
        why: OSError | None = error
        with suppress(OSError):
            found = os.stat(name, dir_fd=root_fd, follow_symlinks=False)
            why = refusal(found, os.path.join(path_of(root_fd), name), uids)
        raise why or error from None
    try:
        require_ours(opened_fd, *uids)
        yield opened_fd
    finally:
        os.close(opened_fd)


def _read_pair(file_fd: int) -> tuple[int, int] | None:
    """Return two numbers; None if they are missing or damaged."""
    found = os.pread(file_fd, _PAIR_BYTES + 1, 0)
    fields = found[: _PAIR.size]
    if len(found) != _PAIR_BYTES or found[_PAIR.size :] != _digest(fields):
        return None
    first, second = _PAIR.unpack(fields)
    return first, second


def _write_pair(file_fd: int, first: int, second: int) -> None:
    fields = _PAIR.pack(first, second)
    os.pwrite(file_fd, fields + _digest(fields), 0)
    os.ftruncate(file_fd, _PAIR_BYTES)


def _digest(fields: bytes) -> bytes:
    return _DIGEST.pack(xxhash.xxh3_64_intdigest(fields))


def _await_other_count(root_fd: int) -> bool:
    """Wait briefly until no process counts; return whether none does."""
    with _opened(LOCK_FILE, root_fd) as lock_fd:
        try:
            _lock(lock_fd, _PATIENCE_S)
        except BlockingIOError:
            return False
        return True


def _lock(file_fd: int, patience_s: float | None = None) -> None:
    """Lock a file; other processes hold `usage` for microseconds.

    OSError: another process, which may be stopped, holds it for long; or there is no `flock`.
    """
    give_up_at_s = time.monotonic() + (_LOCK_PATIENCE_S if patience_s is None else patience_s)
    while True:
        try:
            fcntl.flock(file_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > give_up_at_s:
                raise
            time.sleep(_LOCK_PAUSE_S)
        else:
            return
