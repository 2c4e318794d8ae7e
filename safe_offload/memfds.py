"""Memory of this process that another one can map too, found by address.

A memfd has no name, so processes that are killed leave nothing behind.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import weakref
from mmap import mmap
from typing import NamedTuple


class Memfd(NamedTuple):
    """A mapped memfd; `number` is never used again, `descriptor` is open while it is mapped."""

    number: int
    descriptor: int
    start: int
    size_bytes: int


_known: dict[int, Memfd] = {}
_next = itertools.count()


def map_memfd(descriptor: int) -> mmap:
    """Map all of a memfd; the caller closes its descriptor."""
    mapping = mmap(descriptor, 0)
    start, number = address_of(memoryview(mapping)), next(_next)
    _known[number] = Memfd(number, os.dup(descriptor), start, len(mapping))
    weakref.finalize(mapping, _forget, number)
    return mapping


def find_memfd(address: int) -> Memfd | None:
    """Return what is mapped at an address; None if it is no memfd of ours."""
    for memfd in list(_known.values()):
        if memfd.start <= address < memfd.start + memfd.size_bytes:
            return memfd
    return None


def address_of(buffer: memoryview) -> int:
    """Return where a writable buffer begins."""
    return ctypes.addressof(ctypes.c_char.from_buffer(buffer))


def _forget(number: int) -> None:
    os.close(_known.pop(number).descriptor)
