"""Making host memory ready shortly before it is used.

The kernel allocates and clears a page at its first access. A store that waits for pages takes
several times as long, so a thread of the lowest priority stays a little ahead of the highest slot
in use. It does not touch the whole pool: others may need the memory until the pool is full.

Source: Linux, sched(7) (SCHED_IDLE); Documentation/admin-guide/mm/transhuge.rst.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from typing import Final

import numpy as np
import numpy.typing as npt

from safe_offload.layout import PAGE_BYTES, HostLayout

logger = logging.getLogger(f"vllm.{__name__}")

AHEAD_BYTES: Final = 256 << 20
"""Touched beyond the highest slot in use."""
CHUNK_BYTES: Final = 2 << 20
"""Touched between two checks for a stop: a huge page."""
STOP_TIMEOUT_S: Final = 5.0
"""How long one chunk may take with the lowest priority on a busy machine."""

Touch = Callable[[int, int, int], None]
"""(address, length_bytes, step_bytes): read and write back one byte of each step, as one."""


class FirstTouch:
    """Touches the slots beyond the highest that was stored, in the order in which they are granted.

    Only `will_store`, on the loop's thread, changes `_num_wanted`; only `stop` sets `_is_stopping`.
    `touch` must not change what another thread writes at the same time. The memory has one slab.
    """

    def __init__(
        self, touch: Touch, address: int, layout: HostLayout, ahead_bytes: int = AHEAD_BYTES
    ) -> None:
        self._touch = touch
        self._address = address
        self._layout = layout
        self._num_ahead = max(1, ahead_bytes // layout.geometry.slot_bytes)
        self._num_wanted = min(self._num_ahead, layout.num_slots)
        self._is_wanted = threading.Event()
        self._is_wanted.set()
        self._is_stopping = False
        self._thread = threading.Thread(target=self._run, name="safe-offload-touch", daemon=True)
        try:
            self._thread.start()
        except RuntimeError as error:
            logger.debug("Host memory is not touched before it is used: %s", error)

    def __repr__(self) -> str:
        return f"<FirstTouch: {self._num_wanted} of {self._layout.num_slots} slots wanted>"

    def will_store(self, slot_ids: npt.NDArray[np.int64]) -> None:
        """Prepare for a store into slots; the thread is woken for an eighth of `ahead_bytes`.

        A slot beyond those wanted was not granted in order (the self-test's).
        """
        highest = int(slot_ids.max())
        num_wanted = min(highest + 1 + self._num_ahead, self._layout.num_slots)
        is_next = highest < self._num_wanted
        if is_next and num_wanted - self._num_wanted > self._num_ahead // 8:
            self._num_wanted = num_wanted
            self._is_wanted.set()

    def stop(self) -> bool:
        """End the thread; return whether it has ended, so that the memory may be unmapped."""
        self._is_stopping = True
        self._is_wanted.set()
        if self._thread.ident is not None:
            self._thread.join(STOP_TIMEOUT_S)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
        except (AttributeError, OSError) as error:  # not on Linux, or forbidden in this container
            logger.debug("Host memory is not touched before it is used: %s", error)
            return
        num_touched = 0
        while not self._is_stopping:
            self._is_wanted.wait()
            self._is_wanted.clear()
            num_wanted = self._num_wanted
            self._touch_slots(num_touched, num_wanted)
            num_touched = num_wanted

    def _touch_slots(self, start: int, end: int) -> None:
        segments = self._layout.geometry.segments
        for offset, segment in zip(self._layout.array_offsets(), segments, strict=True):
            array = self._address + offset
            address = array + start * segment.length_bytes
            end_address = array + end * segment.length_bytes
            while address < end_address and not self._is_stopping:
                length_bytes = min(CHUNK_BYTES, end_address - address)
                self._touch(address, length_bytes, PAGE_BYTES)
                address += length_bytes
