"""Copies for a KV cache in host memory: vLLM's CPU engine.

There is no stream here: the forward has finished when vLLM's hook returns, and what a GPU orders on
the device is a wait on the host. Each direction has threads of its own.

Bytes are moved in as few calls as possible, with the interpreter lock released: a thread that took
the lock back for every block would stand in the engine's way, and the engine in its own. Runs of
blocks that go to runs of slots are joined; long runs are one `memmove` each, and all short ones go
in batches through `process_vm_readv(2)` on this very process, the system's only gathering copy.
"""

from __future__ import annotations

import asyncio
import ctypes
import logging
import os
from collections.abc import Callable
from concurrent.futures import CancelledError as FutureCancelledError
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError

import numpy as np
import numpy.typing as npt

from safe_offload.errors import TransferError
from safe_offload.layout import HostLayout
from safe_offload.protocol import FailureReason
from safe_offload.worker.backends.base import Completion, Copy, Direction
from safe_offload.worker.backends.ranges import Ranges, RangeTable
from safe_offload.worker.checksums import SlotChecksums
from safe_offload.worker.host_memory import HostMemory
from safe_offload.worker.threads import start_threads

logger = logging.getLogger(f"vllm.{__name__}")

LONG_RUN_BYTES = 256 * 1024
"""Runs from this length on are copied by `memmove`, which is faster than the system call there."""
IOV_MAX = 1024
"""Ranges of one `process_vm_readv` call (Linux, uio.h, UIO_MAXIOV)."""


class CpuCompletion:
    """A copy that a thread runs."""

    def __init__(self, future: Future[None]) -> None:
        self.future = future

    async def wait(self) -> None:
        """See `Completion.wait`."""
        try:
            await asyncio.wrap_future(self.future)
        except asyncio.CancelledError:
            if not self.future.cancelled():
                raise
            raise TransferError(FailureReason.CANCELLED, "it was taken back") from None

    def cancel(self) -> bool:
        """See `Completion.cancel`: a copy that no thread has taken can be taken back."""
        return self.future.cancel()


class CpuBackend:
    """See `Backend`.

    Args:
        base_address: of the KV cache's storage, in bytes.
        layout: where blocks and slots lie.
        host: the slots. Closed by `close`.
        num_threads: copying threads for each direction.
    """

    def __init__(
        self, base_address: int, layout: HostLayout, host: HostMemory, num_threads: int = 1
    ) -> None:
        self.slot_bytes = layout.geometry.slot_bytes
        self.num_slots = self.num_usable_slots = layout.num_slots
        self._host = host
        self._table = RangeTable(base_address, host.tensor.data_ptr(), layout)
        self._checksums = SlotChecksums(host.tensor.numpy(), layout)
        self._gather = _find_gather()
        self._threads = {
            direction: start_threads(num_threads, f"safe-offload-{direction.value}")
            for direction in Direction
        }

    def mark(self) -> None:
        """Nothing to mark: what the engine computed is in memory when a hook is called."""

    def issue(self, copy: Copy, after: None) -> CpuCompletion:
        """See `Backend.issue`."""
        self._table.check(copy)
        try:
            return CpuCompletion(self._threads[copy.direction].submit(self._run, copy))
        except RuntimeError as error:
            raise TransferError(FailureReason.NOT_RUNNING, str(error)) from error

    def fence(self, completion: Completion, timeout_s: float) -> bool:
        """Wait until the copy has ended, one way or the other."""
        assert isinstance(completion, CpuCompletion)
        try:
            completion.future.exception(timeout_s)
        except FutureTimeoutError:
            return False
        except FutureCancelledError:  # not asyncio's: they are two classes
            pass
        return True

    def checksums(self, slot_ids: npt.NDArray[np.int64]) -> npt.NDArray[np.uint64]:
        """See `Backend.checksums`."""
        return self._checksums.of(slot_ids)

    def close(self) -> None:
        """See `Backend.close`."""
        # All queues first: one direction must not go on while the other is waited for.
        for executor in self._threads.values():
            executor.shutdown(wait=False, cancel_futures=True)
        for executor in self._threads.values():
            executor.shutdown(wait=True)
        self._host.close()

    def _run(self, copy: Copy) -> None:
        ranges = self._table.ranges(self._table.runs(copy))
        is_long = ranges.lengths >= LONG_RUN_BYTES
        if not is_long.all():
            self._gather(ranges.where(~is_long))
        if is_long.any():
            _move_each(ranges.where(is_long))


def _move_each(ranges: Ranges) -> None:
    """Copy each range by one `memmove`, the lock released in each."""
    for target, source, length in zip(
        ranges.targets.tolist(), ranges.sources.tolist(), ranges.lengths.tolist(), strict=True
    ):
        ctypes.memmove(target, source, length)


def _find_gather() -> Callable[[Ranges], None]:
    """`process_vm_readv` if the system allows it (some containers do not), else `_move_each`."""
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        readv = libc.process_vm_readv
    except (OSError, AttributeError):
        return _move_each
    readv.restype = ctypes.c_ssize_t
    pointer, count = ctypes.c_void_p, ctypes.c_ulong
    readv.argtypes = [ctypes.c_int, pointer, count, pointer, count, ctypes.c_ulong]

    def gather(ranges: Ranges) -> None:
        pid, lengths = os.getpid(), ranges.lengths
        local = np.stack((ranges.targets, lengths), axis=1)
        remote = np.stack((ranges.sources, lengths), axis=1)
        for start in range(0, len(lengths), IOV_MAX):
            end = min(start + IOV_MAX, len(lengths))
            expected = int(lengths[start:end].sum())
            copied = readv(
                pid,
                local[start:].ctypes.data,
                end - start,
                remote[start:].ctypes.data,
                end - start,
                0,
            )
            if copied != expected:
                detail = os.strerror(ctypes.get_errno()) if copied < 0 else f"{copied} bytes"
                raise TransferError(
                    FailureReason.COPY_FAILED,
                    f"process_vm_readv: expected {expected} bytes, found {detail}",
                )

    probe = np.arange(2, dtype=np.uint64)
    address = np.array([probe.ctypes.data], dtype=np.uint64)
    size = np.array([probe.itemsize], dtype=np.uint64)
    try:
        gather(Ranges(address, address + size, size))
    except TransferError as error:
        logger.info("Gathering by process_vm_readv is not allowed here (%s); using memmove.", error)
        return _move_each
    return gather if int(probe[0]) == 1 else _move_each
