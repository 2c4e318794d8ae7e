"""Page-locking host memory in place, slab by slab, on a thread of its own.

Locking touches every page: 128 GiB take the better part of a minute, and the engine must not wait
for it. So slabs become usable one after the other. A driver that refuses the first slab leaves the
memory pageable, which is slower and works; one that refuses a later slab leaves a smaller pool.
"""

from __future__ import annotations

import logging
import threading
import time

from safe_offload.config import format_bytes
from safe_offload.errors import DeviceError
from safe_offload.layout import HostLayout
from safe_offload.worker.backends.driver import Driver

logger = logging.getLogger(f"vllm.{__name__}")

SLAB_BYTES = 512 << 20
"""About what is locked by one call: locked in a fraction of a second, long enough for long runs."""

FIX = (
    "Fix: raise the limit for locked memory (ulimit -l unlimited; docker run --ulimit memlock=-1), "
    'or set a smaller "cpu_bytes_to_use".'
)


class PageLock:
    """Locks the slabs of a host memory, and unlocks them at the end.

    Args:
        driver: locks; its device is made current in the thread.
        address: of the host memory.
        layout: where its slabs are.
    """

    def __init__(self, driver: Driver, address: int, layout: HostLayout) -> None:
        self._driver = driver
        self._address = address
        self._layout = layout
        self._stopping = threading.Event()
        self._num_locked = 0
        self.is_pageable = False
        """The memory is used as it is, because the driver would not lock any of it."""
        self._thread = threading.Thread(target=self._run, name="safe-offload-lock", daemon=True)
        self._thread.start()

    @property
    def num_usable_slots(self) -> int:
        """Slots that may be used by now."""
        if self.is_pageable:
            return self._layout.num_slots
        return self._layout.num_slots_within(self._num_locked)

    def close(self) -> None:
        """Stop locking and unlock everything; nothing may copy any more. A second call is free."""
        self._stopping.set()
        self._thread.join()
        while self._num_locked:
            self._num_locked -= 1
            try:
                self._driver.unlock(self._slab(self._num_locked))
            except DeviceError as error:
                logger.warning("A slab of host memory stays page-locked until exit: %s", error)

    def _slab(self, index: int) -> int:
        return self._address + index * self._layout.slab_bytes

    def _run(self) -> None:
        start_s = time.monotonic()
        try:
            self._driver.bind_thread()
            for index in range(self._layout.num_slabs):
                if self._stopping.is_set():
                    return
                self._driver.lock(self._slab(index), self._layout.slab_bytes)
                self._num_locked = index + 1
        except Exception as error:
            self._give_up(error)
        else:
            logger.info(
                "Page-locked %s of host memory in %.1f s.",
                format_bytes(self._layout.size_bytes),
                time.monotonic() - start_s,
            )

    def _give_up(self, error: Exception) -> None:
        wanted = format_bytes(self._layout.size_bytes)
        if self._num_locked == 0:
            self.is_pageable = True
            logger.warning(
                "The driver does not page-lock host memory (%s). All %s are used as they are; "
                "copies are slower and hold up one another. %s",
                error,
                wanted,
                FIX,
            )
        else:
            locked = format_bytes(self._num_locked * self._layout.slab_bytes)
            logger.warning(
                "The driver page-locked %s of %s of host memory and then refused (%s). The cache "
                "is as large as what is locked. %s",
                locked,
                wanted,
                error,
                FIX,
            )
