"""Files that this process has mapped and another one can map too, found by address.

Most are memfds, which have no name, so processes that are killed leave nothing behind.
"""

from __future__ import annotations

import ctypes
import fcntl
import itertools
import os
import weakref
from mmap import mmap
from typing import NamedTuple


class MappedFile(NamedTuple):
    """A file that is mapped.

    Attributes:
        number: never used again.
        descriptor: open while it is mapped.
        guard: of a lock; whoever maps the file, and may write to it, keeps it open. -1: none.
    """

    number: int
    descriptor: int
    start: int
    size_bytes: int
    guard: int = -1

    @property
    def descriptors(self) -> tuple[int, ...]:
        """What another process is given to map it."""
        return (self.descriptor,) if self.guard < 0 else (self.descriptor, self.guard)


_known: dict[int, MappedFile] = {}
_next = itertools.count()


def make_memfd(size_bytes: int) -> int:
    """Return the descriptor of new memory."""
    descriptor = os.memfd_create("safe-offload", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(descriptor, size_bytes)
        # A memory that shrinks would end, by SIGBUS, every process that has it mapped.
        seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def map_new(size_bytes: int) -> mmap:
    """Map new memory."""
    descriptor = make_memfd(size_bytes)
    try:
        return map_file(descriptor)
    finally:
        os.close(descriptor)


def map_file(descriptor: int, guard: int = -1) -> mmap:
    """Map all of a file; the caller closes its descriptor, and keeps the guard open."""
    mapping = mmap(descriptor, 0)
    start, number = address_of(memoryview(mapping)), next(_next)
    _known[number] = MappedFile(number, os.dup(descriptor), start, len(mapping), guard)
    weakref.finalize(mapping, _forget, number)
    return mapping


def find_file(address: int) -> MappedFile | None:
    """Return which of them is mapped at an address, if one is."""
    for file in list(_known.values()):
        if file.start <= address < file.start + file.size_bytes:
            return file
    return None


def address_of(buffer: memoryview) -> int:
    """Return where a writable buffer begins."""
    return ctypes.addressof(ctypes.c_char.from_buffer(buffer))


def _forget(number: int) -> None:
    os.close(_known.pop(number).descriptor)
