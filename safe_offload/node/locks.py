"""Locks that the kernel takes back when a process ends, and a barrier for memory.

No caller waits for a lock: one that does not get it continues without what the lock guards.

Source: Linux, fcntl(2), "Open file description locks".
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import struct
import threading
import weakref

TESTS, NAPS, LOTS, _TOKENS, _END = (1 << bits for bits in (36, 40, 44, 48, 62))
"""Where kinds of places begin: held while a rank tests its copies in the pool; by an engine while
it leases, writes or grants slots; while a lot is claimed; by each process as long as it lives."""

_open: weakref.WeakSet[Locks] = weakref.WeakSet()


class Locks:
    """Locks on places of one file, for as long as this object is open and its process lives.

    A child that is forked holds none: else it would keep its dead parent's.
    """

    def __init__(self, path: str, *, make: bool = False) -> None:
        flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | (os.O_CREAT if make else 0)
        self.fd = os.open(path, flags, 0o600)  # -1: closed; `close` alone changes it
        _open.add(self)

    def take(self, place: int) -> bool:
        """Lock a place; False if another process holds it. Locking it twice is the same as once."""
        return self._set(fcntl.F_WRLCK, place)

    def give(self, place: int) -> None:
        """Unlock a place."""
        self._set(fcntl.F_UNLCK, place)

    def is_taken(self, place: int, count: int = 1) -> bool:
        """Whether another process holds one of `count` places from this one on."""
        found = fcntl.fcntl(self.fd, fcntl.F_OFD_GETLK, _flock(fcntl.F_WRLCK, place, count))
        return bool(struct.unpack_from("h", found)[0] != fcntl.F_UNLCK)

    def is_used(self) -> bool:
        """Whether another process holds any place, whatever its version uses."""
        return self.is_taken(0, _END)

    def new_token(self) -> int:
        """Lock a place that no process has had: as long as it is taken, this one lives."""
        token = _TOKENS + secrets.randbelow(_END - _TOKENS)
        self.take(token)
        return token

    def close(self) -> None:
        """Unlock all; a second call does nothing."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)

    def _set(self, kind: int, place: int) -> bool:
        with contextlib.suppress(BlockingIOError, PermissionError):
            fcntl.fcntl(self.fd, fcntl.F_OFD_SETLK, _flock(kind, place))
            return True
        return False


def is_token(number: int) -> bool:
    """Whether `Locks.new_token` may have returned a number, as it is read from a table."""
    return _TOKENS <= number < _END


def _flock(kind: int, place: int, count: int = 1) -> bytes:
    return struct.pack("hhqqi4x", kind, os.SEEK_SET, place, count, 0)


def _close_in_child() -> None:
    for locks in list(_open):
        locks.close()


os.register_at_fork(after_in_child=_close_in_child)

_barrier = threading.Lock()


def fence() -> None:
    """Make all earlier writes visible to other processes before any later read.

    The end of one lock and the beginning of the next order writes before reads: on x86-64 each is a
    locked instruction, on aarch64 a store-release that a load-acquire follows (Arm Architecture
    Reference Manual, B2.3, Barrier-ordered-before).
    """
    with _barrier:
        pass
    with _barrier:
        pass
