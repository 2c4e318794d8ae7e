"""Files that this process has mapped and another one can map too, found by address.

Most are memfds, which have no name, so processes that are killed leave nothing behind.
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
    """A file that is mapped.

    Attributes:
        number: never used again.
        descriptor: open while it is mapped.
        guards: whoever maps the file, and may write to it, keeps these open: of a lock, or the end
            of a pipe that its other end watches.
    """

    number: int
    descriptor: int
    start: int
    size_bytes: int
    guards: tuple[int, ...] = ()

    @property
    def descriptors(self) -> tuple[int, ...]:
        """What another process is given to map it."""
        return (self.descriptor, *self.guards)


_known: dict[int, MappedFile] = {}
_next = itertools.count()
_hidden: weakref.WeakSet[mmap.mmap] = weakref.WeakSet()
_of_parent: list[memoryview] = []
"""Of a forked child: what it must never unmap, since it was not mapped for it."""


def _keep_in_child() -> None:
    _of_parent.extend(memoryview(mapping) for mapping in _hidden if not mapping.closed)


os.register_at_fork(after_in_child=_keep_in_child)


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


def map_new(size_bytes: int) -> mmap.mmap:
    """Map new memory."""
    descriptor = make_memfd(size_bytes)
    try:
        return map_file(descriptor)
    finally:
        os.close(descriptor)


def map_file(descriptor: int, *guards: int) -> mmap.mmap:
    """Map all of a file; the caller closes its descriptor, and keeps the guards open."""
    mapping = mmap.mmap(descriptor, 0)
    hide(mapping)
    start, number = address_of(memoryview(mapping)), next(_next)
    _known[number] = MappedFile(number, os.dup(descriptor), start, len(mapping), guards)
    weakref.finalize(mapping, _forget, number)
    return mapping


def hide(mapping: mmap.mmap) -> None:
    """Keep memory with KV cache out of core dumps and of forked children.

    A child must not copy-on-write pages that a device may write. It does not have them, and never
    unmaps what came to lie there.
    """
    advise(mapping, "MADV_DONTFORK")
    advise(mapping, "MADV_DONTDUMP")
    _hidden.add(mapping)


def is_of_parent(mapping: mmap.mmap) -> bool:
    """Return whether this process was forked from the one that has this mapped."""
    return any(view.obj is mapping for view in _of_parent)


def advise(mapping: mmap.mmap, option: str) -> bool:
    """Return whether the system has this advice, and takes it."""
    try:
        mapping.madvise(getattr(mmap, option))
    except (AttributeError, OSError) as error:
        logger.debug("The system did not take %s: %s", option, error)
        return False
    return True


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
