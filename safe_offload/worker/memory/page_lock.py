"""Page-locking host memory in place, slab by slab, on a thread of its own.

Touching every page takes the better part of a minute for 128 GiB. So the first slab is locked at
once and the others in the background. A driver that refuses the first slab leaves the memory
pageable, which is slower and works; one that refuses a later slab, or a machine whose memory runs
short, leaves a smaller pool.

While a driver locks it lets other threads wait, and most of that time goes into touching pages. So
they are touched before, and the driver then gets a pause as long as the lock took.

vLLM captures CUDA graphs meanwhile. Page-locking is unsafe in a capture: it fails and can end the
engine (vllm#45850, #46933), unless the thread's capture mode is relaxed (`Locker.bind_thread`).
Should the driver refuse because of a capture all the same, the slab is tried again later.
"""

from __future__ import annotations

import ctypes
import logging
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Final, Protocol

from safe_offload.config.units import format_bytes
from safe_offload.errors import CaptureError, DeviceError
from safe_offload.layout import HostLayout
from safe_offload.protocol import MemoryFacts, MemoryKind
from safe_offload.worker.memory import placement
from safe_offload.worker.memory.host_memory import HEADROOM_BYTES_MIN, available_host_bytes

logger = logging.getLogger(f"vllm.{__name__}")

SLAB_BYTES = 512 << 20  # locked in a fraction of a second, long enough for long runs
PAUSE_S = 0.005  # between slabs at least: the driver lets others wait meanwhile (vllm#54578)
RETRY_S = 0.1  # until a slab is tried again that was refused because of a capture
FIRST_SLAB_TIMEOUT_S = 60.0
TOUCH_THREADS: Final = 4
TOUCH_BYTES: Final = 32 << 20
"""Touched in one call, which holds a lock that vLLM's own allocations wait for."""
MADV_POPULATE_WRITE: Final = 23
"""Source: Linux, madvise(2), from 5.14 on."""


class Locker(Protocol):
    """A device that page-locks; see `Device` (copies/device.py)."""

    pci_address: str

    def bind_thread(self) -> None: ...

    def lock(self, address: int, size_bytes: int) -> None: ...

    def unlock(self, address: int) -> None:
        """Undo `lock`."""


class PageLock:
    """Locks the slabs of a host memory, and unlocks them at the end.

    Its thread alone changes `facts`, to another object once no more will be locked, and
    `_num_locked`; others read them.
    """

    def __init__(self, device: Locker, address: int, layout: HostLayout) -> None:
        self._device = device
        self._address = address
        self._layout = layout
        self._num_locked = 0
        self._is_held = False
        self.facts = MemoryFacts(MemoryKind.LOCKING, "unknown")
        self._has_begun = threading.Event()
        self._stopping = threading.Event()
        self._may_lock = threading.Event()
        self._may_lock.set()
        self._thread = threading.Thread(target=self._run, name="safe-offload-lock", daemon=True)
        self._thread.start()
        self._has_begun.wait(FIRST_SLAB_TIMEOUT_S)

    def __repr__(self) -> str:
        return f"<PageLock: {self._num_locked} of {self._layout.num_slabs} slabs>"

    @property
    def is_pageable(self) -> bool:
        """Return whether the memory is used unlocked, as the driver refused to lock it."""
        return self.facts.kind is MemoryKind.PAGEABLE

    @property
    def num_usable_slots(self) -> int:
        """Slots that may be used by now."""
        if self.is_pageable:
            return self._layout.num_slots
        return self._layout.num_slots_within(self._num_locked)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Begin no other slab inside of this: while one is locked, the driver lets others wait."""
        self._may_lock.clear()
        try:
            yield
        finally:
            self._may_lock.set()

    def close(self) -> bool:
        """Stop locking and unlock everything; nothing may copy any more. A second call is free.

        Return whether the memory may be unmapped: the driver has let go of all of it.
        """
        self._stopping.set()
        self._may_lock.set()
        self._thread.join()
        return not self._is_held

    def _run(self) -> None:
        try:
            self._device.bind_thread()
            self._lock_all()
        except Exception as error:
            self._give_up(error)
        finally:
            self._has_begun.set()
        self._stopping.wait()
        self._unlock_all()

    def _lock_all(self) -> None:
        start_s = time.monotonic()
        node = placement.numa_node_of(self._device.pci_address)
        problem = "" if node is None else placement.move_thread_to(node)
        locking_s = 0.0
        for index in range(self._layout.num_slabs):
            if index:
                self._stopping.wait(max(PAUSE_S, locking_s))
                self._may_lock.wait()
                if self._stopping.is_set():
                    return
                if available_host_bytes() < self._layout.slab_bytes + HEADROOM_BYTES_MIN:
                    self._run_short()
                    return
            touching_s = time.monotonic()
            touch(self._slab(index), self._layout.slab_bytes)
            begin_s = time.monotonic()
            if not self._lock(index):
                return
            locking_s = time.monotonic() - begin_s
            if not index:
                self._log_plan(begin_s - touching_s + locking_s, max(PAUSE_S, locking_s))
            self._num_locked = index + 1
            self._has_begun.set()
        pages = placement.pages_of(self._address, self._layout.size_bytes)
        huge = "unknown" if pages.huge_percent is None else f"{pages.huge_percent} %"
        self.facts = MemoryFacts(MemoryKind.PAGE_LOCKED, huge, tuple(pages.node_percent))
        logger.info(
            "Page-locked %s of host memory in %.1f s: %s. The GPU is %s.%s",
            format_bytes(self._layout.size_bytes),
            time.monotonic() - start_s,
            pages,
            "on an unknown NUMA node" if node is None else f"on NUMA node {node}",
            f" Its cores could not be used to place the memory there: {problem}."
            if problem
            else "",
        )

    def _log_plan(self, slab_s: float, pause_s: float) -> None:
        logger.info(
            "Page-locking %s of host memory in the background, at %.1f GB/s: about %.0f s. Locked "
            "memory is used immediately; requests do not wait for the rest.",
            format_bytes(self._layout.size_bytes),
            self._layout.slab_bytes / 1e9 / (slab_s + pause_s),
            (self._layout.num_slabs - 1) * (slab_s + pause_s),
        )

    def _lock(self, index: int) -> bool:
        """Lock a slab, however long captures go on; False if `close` was called first."""
        while True:
            try:
                self._device.lock(self._slab(index), self._layout.slab_bytes)
                return True
            except CaptureError as error:
                logger.debug("Page-locking waits for a capture to end: %s", error)
                if self._stopping.wait(RETRY_S):
                    return False

    def _unlock_all(self) -> None:
        while self._num_locked:
            self._num_locked -= 1
            try:
                self._device.unlock(self._slab(self._num_locked))
            except DeviceError as error:
                self._is_held = True
                logger.warning("A slab of host memory stays page-locked until exit: %s", error)

    def _slab(self, index: int) -> int:
        return self._address + index * self._layout.slab_bytes

    def _run_short(self) -> None:
        self.facts = MemoryFacts(MemoryKind.PAGE_LOCKED, "unknown")
        logger.warning(
            "Not enough memory on this machine, or under the container's limit, for the whole "
            "pool: it stays at %s of %s, with %s available. Fix: lower "
            '"cpu_bytes_to_use", free memory, or raise the limit.',
            format_bytes(self._num_locked * self._layout.slab_bytes),
            format_bytes(self._layout.size_bytes),
            format_bytes(available_host_bytes()),
        )

    def _give_up(self, error: Exception) -> None:
        kind = MemoryKind.PAGE_LOCKED if self._num_locked else MemoryKind.PAGEABLE
        self.facts = MemoryFacts(kind, "unknown")
        logger.warning(
            "The driver page-locked %s of %s of host memory and then refused (%s). %s Fix: raise "
            "the limit for locked memory (ulimit -l unlimited; docker run --ulimit memlock=-1), "
            'or lower "cpu_bytes_to_use".',
            format_bytes(self._num_locked * self._layout.slab_bytes),
            format_bytes(self._layout.size_bytes),
            error,
            "The pool stays pageable: copies are slower and block one another."
            if self.is_pageable
            else "The pool is limited to the locked memory.",
        )


def touch(address: int, size_bytes: int) -> None:
    """Let the system give all pages of a range, by several threads near the calling one.

    Where the system cannot do that, the driver touches them when it locks.
    """
    libc = ctypes.CDLL(None)

    def populate(offset: int) -> None:
        length_bytes = min(TOUCH_BYTES, size_bytes - offset)
        libc.madvise(
            ctypes.c_void_p(address + offset), ctypes.c_size_t(length_bytes), MADV_POPULATE_WRITE
        )

    with ThreadPoolExecutor(TOUCH_THREADS, "safe-offload-touch") as threads:
        list(threads.map(populate, range(0, size_bytes, TOUCH_BYTES)))
