"""Files that this process has mapped, found by address.

Most are memfds, which have no name, so killed processes leave nothing behind.
"""

from __future__ import annotations

import ctypes
import fcntl
import itertools
import logging
import mmap
import os
import weakref
from typing import NamedTuple

logger = logging.getLogger(f"vllm.{__name__}")


class MappedFile(NamedTuple):
    """A file that is mapped."""

    number: int  # unique
    descriptor: int  # open while it is mapped
    start: int
    size_bytes: int
    # Descriptors that each process that maps the file keeps open: of a lock, or one end of a pipe
    # whose other end is watched.
    guards: tuple[int, ...] = ()

    @property
    def descriptors(self) -> tuple[int, ...]:
        """The descriptors that another process needs to map it."""
        return (self.descriptor, *self.guards)


_known: dict[int, MappedFile] = {}
_next = itertools.count()
_hidden: weakref.WeakSet[mmap.mmap] = weakref.WeakSet()
_of_parent: list[memoryview] = []
"""In a forked child: the parent's mappings, which it must never unmap."""


def _keep_in_child() -> None:
    _of_parent.extend(memoryview(mapping) for mapping in _hidden if not mapping.closed)


os.register_at_fork(after_in_child=_keep_in_child)


def make_memfd(size_bytes: int) -> int:
    """Return the descriptor of new memory of a fixed size."""
    descriptor = os.memfd_create("safe-offload", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(descriptor, size_bytes)
        # Shrinking it would kill, by SIGBUS, every process that has it mapped.
        seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def map_new(size_bytes: int) -> mmap.mmap:
    """Map new memory."""
    descriptor = make_memfd(size_bytes)
    try:
        return map_file(descriptor)
    finally:
        os.close(descriptor)


def map_file(descriptor: int, *guards: int) -> mmap.mmap:
    """Map a whole file; the caller closes the descriptor and keeps the guards open."""
    mapping = mmap.mmap(descriptor, 0)
    hide(mapping)
    start, number = address_of(memoryview(mapping)), next(_next)
    _known[number] = MappedFile(number, os.dup(descriptor), start, len(mapping), guards)
    weakref.finalize(mapping, _forget, number)
    return mapping


def hide(mapping: mmap.mmap) -> None:
    """Exclude memory with KV cache from core dumps and from forked children.

    A child must not copy-on-write pages that a device may write. It must not unmap these addresses,
    where something else may be mapped in it.
    """
    advise(mapping, "MADV_DONTFORK")
    advise(mapping, "MADV_DONTDUMP")
    _hidden.add(mapping)


def is_of_parent(mapping: mmap.mmap) -> bool:
    """Return whether this process was forked from the one that owns this mapping."""
    return any(view.obj is mapping for view in _of_parent)


def advise(mapping: mmap.mmap, option: str) -> bool:
    """Call madvise(2); return whether the system supports and accepts the advice."""
    try:
        mapping.madvise(getattr(mmap, option))
    except (AttributeError, OSError) as error:
        logger.debug("The system did not take %s: %s", option, error)
        return False
    return True


def find_file(address: int) -> MappedFile | None:
    """Return the file that is mapped at an address, or None."""
    for file in list(_known.values()):
        if file.start <= address < file.start + file.size_bytes:
            return file
    return None


def address_of(buffer: memoryview) -> int:
    """Return the address of a writable buffer."""
    return ctypes.addressof(ctypes.c_char.from_buffer(buffer))


def _forget(number: int) -> None:
    os.close(_known.pop(number).descriptor)
