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
from safe_offload.layout import Geometry
from safe_offload.protocol import FailureReason
from safe_offload.worker.backends.base import Completion, Copy, Direction
from safe_offload.worker.checksums import SlotChecksums
from safe_offload.worker.host_memory import HostMemory
from safe_offload.worker.threads import start_threads

logger = logging.getLogger(f"vllm.{__name__}")

LONG_RUN_BYTES = 256 * 1024
"""Runs from this length on are copied by `memmove`, which is faster than the system call there."""
IOV_MAX = 1024
"""Ranges of one `process_vm_readv` call (Linux, uio.h, UIO_MAXIOV)."""

Ranges = tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint64], npt.NDArray[np.uint64]]
"""Addresses to copy to, addresses to copy from, lengths in bytes."""


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
        geometry: where the blocks lie in it.
        host: the slots; its size decides how many there are. Closed by `close`.
        num_threads: copying threads for each direction.
    """

    def __init__(
        self, base_address: int, geometry: Geometry, host: HostMemory, num_threads: int = 1
    ) -> None:
        self.slot_bytes = geometry.slot_bytes
        self.num_slots = host.size_bytes // geometry.slot_bytes
        self._num_blocks = geometry.num_blocks
        self._host = host
        host_address = host.tensor.data_ptr()
        segments = geometry.segments
        self._block_address = _column(base_address + s.offset_bytes for s in segments)
        self._block_stride = _column(s.stride_bytes for s in segments)
        self._slot_address = _column(
            host_address + offset for offset in geometry.host_offsets(self.num_slots)
        )
        self._row_bytes = _column(s.length_bytes for s in segments)
        self._is_dense = all(s.stride_bytes == s.length_bytes for s in segments)
        self._checksums = SlotChecksums(host.tensor.numpy(), geometry, self.num_slots)
        self._gather = _find_gather()
        self._threads = {
            direction: start_threads(num_threads, f"safe-offload-{direction.value}")
            for direction in Direction
        }

    def mark(self) -> None:
        """Nothing to mark: what the engine computed is in memory when a hook is called."""

    def issue(self, copy: Copy, after: None) -> CpuCompletion:
        """See `Backend.issue`."""
        self._check(copy.block_ids, self._num_blocks, "block")
        self._check(copy.slot_ids, self.num_slots, "slot")
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

    @staticmethod
    def _check(ids: npt.NDArray[np.int64], count: int, what: str) -> None:
        if ids.size and not (int(ids.min()) >= 0 and int(ids.max()) < count):
            raise TransferError(
                FailureReason.BAD_PLAN,
                f"expected {what} ids from 0 to {count - 1}, "
                f"found {int(ids.min())} to {int(ids.max())}",
            )

    def _run(self, copy: Copy) -> None:
        targets, sources, lengths = self._ranges(copy)
        is_long = lengths >= LONG_RUN_BYTES
        if not is_long.all():
            self._gather(targets[~is_long], sources[~is_long], lengths[~is_long])
        if is_long.any():
            _move_each(targets[is_long], sources[is_long], lengths[is_long])

    def _ranges(self, copy: Copy) -> Ranges:
        """The byte ranges of a copy, with neighbours joined."""
        order = np.argsort(copy.block_ids, kind="stable")
        blocks, slots = copy.block_ids[order], copy.slot_ids[order]
        if self._is_dense:
            breaks = np.flatnonzero((np.diff(blocks) != 1) | (np.diff(slots) != 1)) + 1
            starts = np.concatenate(([0], breaks))
            counts = np.diff(np.concatenate((starts, [len(blocks)])))
            blocks, slots = blocks[starts], slots[starts]
        else:
            counts = np.ones_like(blocks)
        block_side = self._block_address + self._block_stride * blocks.astype(np.uint64)
        slot_side = self._slot_address + self._row_bytes * slots.astype(np.uint64)
        lengths = (self._row_bytes * counts.astype(np.uint64)).ravel()
        if copy.direction is Direction.STORE:
            return slot_side.ravel(), block_side.ravel(), lengths
        return block_side.ravel(), slot_side.ravel(), lengths


def _column(values: object) -> npt.NDArray[np.uint64]:
    """One row for each segment, to be broadcast against blocks."""
    return np.fromiter(values, dtype=np.uint64)[:, None]  # type: ignore[call-overload,no-any-return]


def _move_each(
    targets: npt.NDArray[np.uint64],
    sources: npt.NDArray[np.uint64],
    lengths: npt.NDArray[np.uint64],
) -> None:
    """Copy each range by one `memmove`, the lock released in each."""
    for target, source, length in zip(
        targets.tolist(), sources.tolist(), lengths.tolist(), strict=True
    ):
        ctypes.memmove(target, source, length)


def _find_gather() -> Callable[
    [npt.NDArray[np.uint64], npt.NDArray[np.uint64], npt.NDArray[np.uint64]], None
]:
    """`process_vm_readv` if the system allows it (some containers do not), else `_move_each`."""
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        readv = libc.process_vm_readv
    except (OSError, AttributeError):
        return _move_each
    readv.restype = ctypes.c_ssize_t
    pointer, count = ctypes.c_void_p, ctypes.c_ulong
    readv.argtypes = [ctypes.c_int, pointer, count, pointer, count, ctypes.c_ulong]

    def gather(
        targets: npt.NDArray[np.uint64],
        sources: npt.NDArray[np.uint64],
        lengths: npt.NDArray[np.uint64],
    ) -> None:
        pid = os.getpid()
        local = np.stack((targets, lengths), axis=1)
        remote = np.stack((sources, lengths), axis=1)
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
    try:
        size = np.array([8], dtype=np.uint64)
        address = np.array([probe.ctypes.data], dtype=np.uint64)
        gather(address, address + np.uint64(8), size)
    except TransferError as error:
        logger.info("Gathering by process_vm_readv is not allowed here (%s); using memmove.", error)
        return _move_each
    return gather if int(probe[0]) == 1 else _move_each
