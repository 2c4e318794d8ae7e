"""Touching host memory ahead of the copies, on a thread of its own.

The kernel gives a page when it is first written, and zeroes it then. In a store that is the larger
part of its time: of 41 ms for the stores of a prompt of 16,000 tokens 37 ms were page faults
(docs/benchmarks.md). And memory that somebody else has taken meanwhile is noticed at the start of
the server, not in the middle of the night. Page-locking does the same for a GPU's host memory.
"""

from __future__ import annotations

import ctypes
import logging
import os
import threading
from typing import Final

from safe_offload.config import format_bytes

logger = logging.getLogger(f"vllm.{__name__}")

PIECE_BYTES: Final = 32 << 20
"""Touched by one call; whoever closes waits for one of them at most."""
_MADV_POPULATE_WRITE: Final = 23  # Linux 5.14, include/uapi/asm-generic/mman-common.h
_LOWEST_PRIORITY: Final = 19


class FirstTouch:
    """Touches a range of memory from its start to its end; what is in it stays as it is.

    System call underneath: madvise(MADV_POPULATE_WRITE), beside which other threads may write. A
    system that does not know it, or that refuses the thread, leaves the range as it is.

    Args:
        address: of the range, at a page boundary.
        size_bytes: of the range.
    """

    def __init__(self, address: int, size_bytes: int) -> None:
        self._address = address
        self._size_bytes = size_bytes
        self._stopping = threading.Event()
        self.num_touched_bytes = 0
        self._thread = threading.Thread(target=self._run, name="safe-offload-touch", daemon=True)
        try:
            self._thread.start()
        except RuntimeError as error:
            self._give_up(error)

    def close(self) -> None:
        """Stop; the range may be unmapped when this returns. A second call does nothing."""
        self._stopping.set()
        if self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        try:
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LOWEST_PRIORITY)
            madvise = ctypes.CDLL(None, use_errno=True).madvise
            madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
            while self.num_touched_bytes < self._size_bytes and not self._stopping.is_set():
                piece_bytes = min(PIECE_BYTES, self._size_bytes - self.num_touched_bytes)
                address = self._address + self.num_touched_bytes
                if madvise(address, piece_bytes, _MADV_POPULATE_WRITE):
                    raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
                self.num_touched_bytes += piece_bytes
        except (AttributeError, OSError) as error:
            self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        logger.info(
            "%s of %s of host memory are not touched ahead, so that the first stores into them "
            "are slower: %s",
            format_bytes(self._size_bytes - self.num_touched_bytes),
            format_bytes(self._size_bytes),
            error,
        )
