"""Copies for a KV cache on a GPU, CUDA or HIP.

One stream for each direction. A copy waits, on the device, for what the compute stream had been
given when it was submitted, which orders a load after the fences on its targets. A fence makes the
compute stream wait, on the device, for the copy.

The end of a copy is an event that a thread of its own sleeps on, one for each direction: a Python
function called by the driver would take the interpreter's lock inside it.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from queue import SimpleQueue
from typing import Any

import numpy as np
import numpy.typing as npt

from safe_offload.errors import CaptureError, DeviceError, TransferError
from safe_offload.layout import HostLayout
from safe_offload.protocol import FailureReason, MemoryFacts
from safe_offload.worker.backends import row_kernel
from safe_offload.worker.backends.base import Completion, Copy, CopyPath, Direction
from safe_offload.worker.backends.device import Device
from safe_offload.worker.backends.ranges import RangeTable, Runs
from safe_offload.worker.backends.row_kernel import RowArguments
from safe_offload.worker.checksums import SlotChecksums
from safe_offload.worker.host_memory import HostMemory
from safe_offload.worker.page_lock import PageLock

logger = logging.getLogger(f"vllm.{__name__}")

KERNEL_RANGE_BYTES = {Direction.LOAD: 128 * 1024, Direction.STORE: 0}
"""Ranges shorter than this on average are copied by the kernel, if there are `KERNEL_RANGES_MIN`.

Measured on an H100: docs/benchmarks/gpu.md. Nobody waits for a store, and copy engines take no
multiprocessors from the forward.
"""
KERNEL_RANGES_MIN = 16


class GpuCompletion:
    """A copy that has been issued.

    Attributes:
        path: how it is copied.
        event: passed when the copy has ended.
        failure: why it will not have copied everything, if that is known.
        used: memory that must stay until the copy has ended.
    """

    __slots__ = ("event", "failure", "future", "path", "used")

    def __init__(
        self, path: CopyPath, event: Any, failure: TransferError | None, used: list[Any]
    ) -> None:
        self.path = path
        self.event = event
        self.failure = failure
        self.used = used
        self.future: Future[None] = Future()
        # From here on it cannot be cancelled.
        self.future.set_running_or_notify_cancel()

    async def wait(self) -> None:
        """See `Completion.wait`."""
        await asyncio.wrap_future(self.future)

    def cancel(self) -> bool:
        """See `Completion.cancel`; what a stream has been given cannot be taken back."""
        return False


class Lane:
    """The copies of one direction: a stream, and a thread that waits for each to end."""

    def __init__(self, device: Device, name: str) -> None:
        self.stream = device.make_stream()
        self._device = device
        self._issued: SimpleQueue[GpuCompletion | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=f"safe-offload-{name}", daemon=True)
        self._thread.start()

    def follow(
        self, path: CopyPath, failure: TransferError | None, used: list[Any]
    ) -> GpuCompletion:
        """Wait for what the stream has been given so far."""
        completion = GpuCompletion(path, self._device.record(self.stream), failure, used)
        self._issued.put(completion)
        return completion

    def close(self) -> None:
        """Wait until all copies have ended."""
        self._issued.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (completion := self._issued.get()) is not None:
            failure = completion.failure
            try:
                self._device.bind_thread()
                completion.event.synchronize()
            except Exception as error:
                failure = TransferError(FailureReason.COPY_FAILED, str(error))
            completion.used.clear()
            if failure is None:
                completion.future.set_result(None)
            else:
                completion.future.set_exception(failure)


class GpuBackend:
    """See `Backend` and `ProvableBackend`.

    `paths` and `num_demotions` change on the loop's thread, `_is_closed` when the loop has ended.

    Args:
        device: that the KV cache is on.
        base_address: of the KV cache's storage, on the device.
        layout: where blocks and slots lie; each slab becomes usable when it is page-locked.
        host: the slots. Closed by `close`.
        path: how to copy; None chooses by the lengths of the ranges.
    """

    def __init__(
        self,
        device: Device,
        base_address: int,
        layout: HostLayout,
        host: HostMemory,
        path: CopyPath | None = None,
    ) -> None:
        self.slot_bytes = layout.geometry.slot_bytes
        self.num_slots = layout.num_slots
        self.num_demotions = 0
        self._device = device
        self._layout = layout
        self.host = host
        self._table = RangeTable(base_address, host.tensor.data_ptr(), layout)
        self._checksums = SlotChecksums(host.tensor.numpy(), layout)
        self._prefers_kernel = path is CopyPath.KERNEL
        self._is_closed = False
        self._lock = PageLock(device, host.tensor.data_ptr(), layout)
        self.lanes = {direction: Lane(device, direction.value) for direction in Direction}
        self._segments: Any = None
        with ThreadPoolExecutor(1) as own_thread:
            self.paths = own_thread.submit(self._find_paths, path, base_address).result()

    def __repr__(self) -> str:
        return f"<GpuBackend: {self.num_slots} slots, {self._lock!r}, {self.paths}>"

    @property
    def num_usable_slots(self) -> int:
        """See `Backend.num_usable_slots`."""
        return self._lock.num_usable_slots

    @property
    def memory(self) -> MemoryFacts:
        """See `ProvableBackend.memory`."""
        return self._lock.facts

    def undisturbed(self) -> AbstractContextManager[None]:
        """See `ProvableBackend.undisturbed`: page-locking pauses."""
        return self._lock.paused()

    def use(self, paths: tuple[CopyPath, ...]) -> None:
        """See `ProvableBackend.use`."""
        self.paths = paths

    def mark(self) -> Any:
        """See `Backend.mark`."""
        return self._device.record(self._device.compute_stream())

    def issue(self, copy: Copy, after: Any) -> GpuCompletion:
        """See `Backend.issue`."""
        self._table.check(copy)
        if self._is_closed or not self.paths:
            raise TransferError(FailureReason.NOT_RUNNING, "closed, or without a way to copy")
        lane = self.lanes[copy.direction]
        used: list[Any] = []
        failure = None
        try:
            self._device.bind_thread()
            lane.stream.wait_event(after)
        except Exception as error:
            raise TransferError(FailureReason.COPY_FAILED, str(error)) from error
        runs = self._table.runs(copy)
        path = self._choose(runs, len(copy.block_ids))
        if path is CopyPath.KERNEL and not self._take_ids(copy, lane, used):
            path = self._without_kernel()
        try:
            self._copy(path, copy, runs, used)
        except Exception as error:
            # A part of it may be under way: it has failed when that has ended.
            failure = TransferError(FailureReason.COPY_FAILED, f"{path.value}: {error}")
            self._demote(path, error)
        return lane.follow(path, failure, used)

    def fence(self, completion: Completion, timeout_s: float) -> bool:
        """Let the compute stream wait for the copy, on the device."""
        assert isinstance(completion, GpuCompletion)
        self._device.compute_stream().wait_event(completion.event)
        return True

    def checksums(self, slot_ids: npt.NDArray[np.int64]) -> npt.NDArray[np.uint64]:
        """See `Backend.checksums`."""
        return self._checksums.of(slot_ids)

    def end_copies(self) -> None:
        """See `Backend.end_copies`; what has been issued is done."""
        if not self._is_closed:
            self._is_closed = True
            for lane in self.lanes.values():
                lane.close()

    def close(self) -> None:
        """See `Backend.close`."""
        self.end_copies()
        if self._lock.close():
            self.host.close()

    # ---- how to copy ---------------------------------------------------------------------------

    def _find_paths(self, path: CopyPath | None, base_address: int) -> tuple[CopyPath, ...]:
        """Return the ways to copy that are there, from the wanted one on.

        On a thread of its own: vLLM's may allocate from memory that is gone in a sleep.
        """
        self._device.bind_thread()
        paths = list(CopyPath)[list(CopyPath).index(path) if path is not None else 0 :]
        if self._lock.is_pageable:
            return (CopyPath.EACH,)
        if CopyPath.KERNEL in paths and not self._has_kernel(base_address):
            paths.remove(CopyPath.KERNEL)
        if CopyPath.BATCH in paths and not self._device.driver.has_batch:
            paths.remove(CopyPath.BATCH)
        return tuple(paths)

    def _has_kernel(self, base_address: int) -> bool:
        """Compile the kernel and give the device its table of segments, if kernels can be used."""
        address, stream = self.host.tensor.data_ptr(), self.lanes[Direction.LOAD].stream
        try:
            self._device.load_kernel(row_kernel.word_bytes(self._layout, base_address, address))
            if not self._device.sees(address):
                raise DeviceError("host memory has another address on the device")
            table = row_kernel.segment_table(self._layout, base_address, address)
            self._segments = self._device.make_buffer(table.size, stream)
            self._segments[0].numpy()[:] = table.view(np.int64).ravel()
            self._device.upload(self._segments, stream)
            self._device.record(stream).synchronize()
        except Exception as error:
            logger.warning(
                "Small blocks are copied without a kernel of their own, which is slower (%s: %s). "
                "Fix: pip install 'safe-offload[cuda12]' (or cuda13, rocm).",
                type(error).__name__,
                error,
            )
            return False
        return True

    def _choose(self, runs: Runs, num_blocks: int) -> CopyPath:
        """Return the path for a copy: the kernel for many short ranges, else the first other."""
        num_ranges = len(runs) * len(self._layout.geometry.segments)
        range_bytes = num_blocks * self.slot_bytes / num_ranges
        is_short = range_bytes < KERNEL_RANGE_BYTES[runs.direction]
        if self._prefers_kernel or (is_short and num_ranges >= KERNEL_RANGES_MIN):
            return self.paths[0]
        return self._without_kernel()

    def _without_kernel(self) -> CopyPath:
        return next((path for path in self.paths if path is not CopyPath.KERNEL), self.paths[0])

    def _copy(self, path: CopyPath, copy: Copy, runs: Runs, used: list[Any]) -> None:
        """Give a copy to its stream; what must stay until it has ended is put into `used`."""
        lane, driver = self.lanes[copy.direction], self._device.driver
        if path is CopyPath.KERNEL:
            self._launch(copy, lane, *used)
            return
        ranges = self._table.ranges(runs)
        if path is CopyPath.BATCH:
            driver.copy_batch(ranges, copy.direction, lane.stream.cuda_stream)
        else:
            driver.copy_each(ranges, lane.stream.cuda_stream)

    def _take_ids(self, copy: Copy, lane: Lane, used: list[Any]) -> bool:
        """Put memory for the ids of a launch into `used`; return whether there is any now."""
        try:
            used.append(self._device.make_buffer(2 * len(copy.block_ids), lane.stream))
        except Exception as error:
            logger.debug("A copy goes without the kernel: %s", error)
            return False
        return True

    def _launch(self, copy: Copy, lane: Lane, buffer: Any) -> None:
        num_pairs = len(copy.block_ids)
        host, partner = buffer
        np.concatenate((copy.block_ids, copy.slot_ids), out=host.numpy())
        self._device.upload(buffer, lane.stream)
        segments = self._layout.geometry.segments
        row_bytes_max = max(segment.length_bytes for segment in segments)
        step = max(1, row_kernel.LAUNCH_BYTES // self.slot_bytes)
        word_bytes = partner.element_size()
        for start in range(0, num_pairs, step):
            arguments = RowArguments(
                segments=self._segments[1].data_ptr(),
                block_ids=partner.data_ptr() + start * word_bytes,
                slot_ids=partner.data_ptr() + (num_pairs + start) * word_bytes,
                num_pairs=min(step, num_pairs - start),
                num_segments=len(segments),
                pieces_per_row=-(-row_bytes_max // row_kernel.PIECE_BYTES),
                slots_per_slab=self._layout.slots_per_slab,
                slab_bytes=self._layout.slab_bytes,
                is_store=int(copy.direction is Direction.STORE),
            )
            self._device.launch(arguments, lane.stream)

    def _demote(self, path: CopyPath, error: Exception) -> None:
        """Leave a path that has failed, if there is another one."""
        if isinstance(error, CaptureError) or self.paths == (path,):
            return
        self.paths = tuple(other for other in self.paths if other is not path)
        self.num_demotions += 1
        logger.error(
            'A copy by "%s" failed (%s). Copies go by "%s" from now on, which may be slower. If '
            'this repeats after a restart, set "copy_path": "%s" and open an issue with this log.',
            path.value,
            str(error),  # a log record must not keep the frames, and with them the buffer
            '", "'.join(other.value for other in self.paths),
            self.paths[0].value,
        )
