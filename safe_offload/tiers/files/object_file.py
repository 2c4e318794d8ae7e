"""Reads and writes the file of one object, on a thread that may block.

With O_DIRECT, the kernel moves the bytes straight between device and slot, past the page cache: its
own copy would take more CPU time than everything else. Addresses and lengths must be aligned to the
device's sectors; other slots go through a buffer of the thread.

Source: open(2) (O_DIRECT, O_NOFOLLOW), readv(2), Linux.
"""

from __future__ import annotations

import errno
import mmap
import os
import stat
import threading
import time
from collections.abc import Callable, Sequence
from typing import Final

from safe_offload.mapped_files import hide
from safe_offload.tiers.base import Buffers, Result
from safe_offload.tiers.batch import Batch
from safe_offload.tiers.files.directory import (
    FILE_MODE,
    PAGE_BYTES,
    marked_ns,
    remove,
    size_on_disk,
)
from safe_offload.tiers.naming import HEADER_BYTES

TOUCH_AFTER_NS: Final = 60 * 10**9

_SECTOR_BYTES: Final = 512  # no device has smaller ones
_BUFFERS_MAX: Final = 1024  # IOV_MAX of Linux
# A FIFO in place of a file must not make us wait for its writer.
_READ_FLAGS: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_WRITE_FLAGS: Final = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC

Move = Callable[[int, Sequence[memoryview], int], int]


class ObjectFiles:
    """Reads and writes files of objects; any thread may. `slot_bytes` are of the largest slot."""

    def __init__(self, slot_bytes: int) -> None:
        self._slot_bytes = slot_bytes
        self._own = _OfThread()

    def read(
        self, file: str, folder_fd: int, batch: Batch, index: int, *, is_direct: bool
    ) -> Result:
        """Read an object into its slot: DONE, CORRUPT, FOREIGN or UNREADABLE; or raise OSError."""
        flags = _READ_FLAGS | (os.O_DIRECT if is_direct else 0)
        file_fd = os.open(file, flags, dir_fd=folder_fd)
        try:
            found = os.fstat(file_fd)
            if not stat.S_ISREG(found.st_mode) or found.st_uid != os.fstat(folder_fd).st_uid:
                return Result.UNREADABLE
            if found.st_size != batch.size_of(index):
                return Result.CORRUPT
            result = self._read_into(file_fd, batch, index, is_direct=is_direct)
            if result is Result.DONE:
                _touch(file_fd, found)
            return result
        finally:
            os.close(file_fd)

    def _read_into(self, file_fd: int, batch: Batch, index: int, *, is_direct: bool) -> Result:
        slot, size_bytes, page = batch.slots[index], batch.size_of(index), self._own.page
        num_bytes = _move_straight(os.preadv, file_fd, page, slot, is_direct=is_direct)
        if num_bytes is not None:
            if num_bytes != size_bytes:
                return Result.CORRUPT
            return batch.judge(index, bytes(page), slot)
        whole = self._whole(size_bytes)
        if _move(os.preadv, file_fd, [whole]) != size_bytes:
            return Result.CORRUPT
        body = [whole[HEADER_BYTES:size_bytes]]
        result = batch.judge(index, bytes(whole[:HEADER_BYTES]), body)
        if result is Result.DONE:
            start = HEADER_BYTES
            for buffer in slot:
                buffer[:] = whole[start : start + buffer.nbytes]
                start += buffer.nbytes
        return result

    def write(
        self, file: str, folder_fd: int, batch: Batch, index: int, *, is_direct: bool
    ) -> None:
        """Write an object to a new file, which may be incomplete if this raises OSError."""
        size_bytes, mark = batch.size_of(index), batch.names[index].mark
        flags = _WRITE_FLAGS | (os.O_DIRECT if is_direct else 0)
        file_fd = os.open(file, flags, FILE_MODE, dir_fd=folder_fd)
        try:
            # Its size, so that a count of the directory knows what it will take. Reserving its
            # blocks as well (fallocate) makes the write slower: by a tenth on ext4, by half on
            # tmpfs. One write allocates them all, and fails if there are none.
            os.ftruncate(file_fd, size_bytes)
            head, body = batch.sealed(index, self._body)
            self._write_from(file_fd, head, body, size_bytes, is_direct=is_direct)
            if mark:
                now_ns = time.time_ns()
                os.utime(file_fd, ns=(now_ns, marked_ns(now_ns, mark)))
        finally:
            os.close(file_fd)

    def _write_from(
        self, file_fd: int, head: bytes, body: Buffers, size_bytes: int, *, is_direct: bool
    ) -> None:
        page = self._own.page
        page[:] = head
        num_bytes = _move_straight(os.pwritev, file_fd, page, body, is_direct=is_direct)
        if num_bytes is not None:
            _require_all(num_bytes, size_bytes)
            return
        whole = self._whole(size_bytes)
        start = HEADER_BYTES
        whole[:start] = head
        for buffer in body:
            whole[start : start + buffer.nbytes] = buffer
            start += buffer.nbytes
        _require_all(_move(os.pwritev, file_fd, [whole]), whole.nbytes)
        os.ftruncate(file_fd, size_bytes)

    def _body(self, length_bytes: int) -> memoryview:
        """Return the part of `_whole` after the header."""
        return self._whole(HEADER_BYTES + length_bytes)[HEADER_BYTES : HEADER_BYTES + length_bytes]

    def _whole(self, size_bytes: int) -> memoryview:
        """Return a buffer of this thread for an object with its header, of whole pages."""
        size_bytes = size_on_disk(size_bytes)
        if self._own.whole.nbytes < size_bytes:
            largest_bytes = size_on_disk(HEADER_BYTES + self._slot_bytes)
            hide(mapping := mmap.mmap(-1, max(size_bytes, largest_bytes)))
            self._own.whole = memoryview(mapping)
        return self._own.whole[:size_bytes]


class _OfThread(threading.local):
    """Page-aligned memory of one thread: for a header, and for a whole object once needed."""

    def __init__(self) -> None:
        self.page = memoryview(mmap.mmap(-1, HEADER_BYTES))
        self.whole = self.page


def takes_direct(folder_fd: int, file: str) -> tuple[bool, int]:
    """Return whether files of a folder can bypass the page cache, and the owner of a new one.

    OSError: no file can be created.
    """
    try:
        return True, _try_to_make(file, folder_fd, os.O_DIRECT)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
    return False, _try_to_make(file, folder_fd)


def _try_to_make(file: str, folder_fd: int, flags: int = 0) -> int:
    """Make a file, write to it if it bypasses the page cache, and delete it; return its owner."""
    try:
        file_fd = os.open(file, _WRITE_FLAGS | flags, FILE_MODE, dir_fd=folder_fd)
        try:
            if flags & os.O_DIRECT:
                page = memoryview(mmap.mmap(-1, PAGE_BYTES))
                _require_all(_move(os.pwritev, file_fd, [page]), PAGE_BYTES)
            return os.fstat(file_fd).st_uid
        finally:
            os.close(file_fd)
    finally:
        remove(file, folder_fd)


def _touch(file_fd: int, found: os.stat_result) -> None:
    """Update the time of use of a file, unless it is recent."""
    now_ns = time.time_ns()
    if now_ns - found.st_atime_ns > TOUCH_AFTER_NS:
        try:
            os.utime(file_fd, ns=(now_ns, found.st_mtime_ns))
        except OSError as error:  # a read-only file system
            if error.errno not in (errno.EROFS, errno.EACCES, errno.EPERM):
                raise


def _require_all(num_bytes: int, size_bytes: int) -> None:
    if num_bytes != size_bytes:
        raise OSError(errno.EIO, "a short write")


def _move_straight(
    move: Move, file_fd: int, page: memoryview, slot: Buffers, *, is_direct: bool
) -> int | None:
    """Move a header and a slot; None if O_DIRECT does not take their lengths or addresses."""
    if is_direct and any(buffer.nbytes % _SECTOR_BYTES for buffer in slot):
        return None
    try:
        return _move(move, file_fd, [page, *slot])
    except OSError as error:
        if error.errno != errno.EINVAL or not is_direct:
            raise
        return None


def _move(move: Move, file_fd: int, buffers: Sequence[memoryview]) -> int:
    """Read or write buffers from the start of a file; return how many bytes, fewer at its end."""
    left = [buffer.cast("B") for buffer in buffers if buffer.nbytes]
    offset = 0
    while left:
        num_bytes = move(file_fd, left[:_BUFFERS_MAX], offset)
        if num_bytes == 0:
            break
        offset += num_bytes
        while left and num_bytes >= left[0].nbytes:
            num_bytes -= left.pop(0).nbytes
        if num_bytes:
            left[0] = left[0][num_bytes:]
    return offset
