"""Copies for a KV cache on a GPU, CUDA or HIP.

One stream for each direction, of the lowest priority. A copy waits, on the device, for what the
compute stream had been given when it was submitted; a fence makes the compute stream wait, on the
device, for the copy. The host waits for neither. That loads wait for the compute stream too orders
them behind fences: a load is submitted behind the fences on its targets.

The end of a copy is an event that a thread of its own sleeps on, one for each direction. There is
no host callback: a Python function called by the driver takes the interpreter's lock inside it.
"""

from __future__ import annotations

import asyncio
import enum
import logging
import threading
from collections import deque
from concurrent.futures import Future
from queue import SimpleQueue

import numpy as np
import numpy.typing as npt

from safe_offload.errors import DeviceError, TransferError
from safe_offload.layout import HostLayout
from safe_offload.protocol import FailureReason
from safe_offload.worker.backends import row_kernel
from safe_offload.worker.backends.base import Completion, Copy, Direction
from safe_offload.worker.backends.device import Buffer, Device, Event
from safe_offload.worker.backends.ranges import RangeBuffers, RangeTable, Runs
from safe_offload.worker.backends.row_kernel import RowArguments
from safe_offload.worker.checksums import SlotChecksums
from safe_offload.worker.host_memory import HostMemory
from safe_offload.worker.page_lock import PageLock

logger = logging.getLogger(f"vllm.{__name__}")


class CopyPath(enum.Enum):
    """How the bytes of a copy are moved."""

    BATCH = "batch"
    """One call of the driver for all ranges: the copy engines do it."""
    KERNEL = "kernel"
    """One kernel launch: multiprocessors do it."""
    EACH = "each"
    """One call of the driver for each range."""


KERNEL_RANGE_BYTES = {Direction.LOAD: 28 * 1024, Direction.STORE: 0}
"""Ranges shorter than this on average are copied by the kernel.

On an H100 the kernel wins for loads below 28 KiB, and the copy engine for stores of any length.
Source: vLLM 0.32.0, v1/kv_offload/cpu/swap_blocks_triton.py, and gpu_worker.py.
"""
KERNEL_RANGES_MIN = 16
"""Fewer ranges than this are not worth a launch (same source)."""
BUFFER_WORDS_MIN = 1024


class GpuCompletion:
    """A copy that has been issued.

    Attributes:
        event: passed when the copy has ended.
        failure: why it will not have copied everything, if that is known.
    """

    __slots__ = ("event", "failure", "future")

    def __init__(self, event: Event, failure: TransferError | None) -> None:
        self.event = event
        self.failure = failure
        self.future: Future[None] = Future()
        # From here on nobody who waits for it can cancel it.
        self.future.set_running_or_notify_cancel()

    async def wait(self) -> None:
        """See `Completion.wait`."""
        await asyncio.wrap_future(self.future)

    def cancel(self) -> bool:
        """See `Completion.cancel`; what a stream has been given cannot be taken back."""
        return False


class Events:
    """Events to be used again. A stream that waits for one has taken note of its point already."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._idle: deque[Event] = deque()

    def take(self) -> Event:
        """An event that nobody uses."""
        try:
            return self._idle.popleft()
        except IndexError:
            return self._device.make_event()

    def give(self, event: Event) -> None:
        """An event is no longer used."""
        self._idle.append(event)


class Lane:
    """The copies of one direction: a stream, and a thread that waits for each to end."""

    def __init__(self, device: Device, events: Events, name: str) -> None:
        self.stream = device.make_stream()
        self.ranges = RangeBuffers()
        self._device = device
        self._events = events
        self._idle_buffers: deque[Buffer] = deque()
        self._issued: SimpleQueue[tuple[GpuCompletion, Buffer | None] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=f"safe-offload-{name}", daemon=True)
        self._thread.start()

    def take_buffer(self, num_words: int) -> Buffer:
        """A buffer of at least this size, idle until the copy that uses it has ended."""
        for _ in range(len(self._idle_buffers)):
            buffer = self._idle_buffers.popleft()
            if len(buffer.host) >= num_words:
                return buffer
        return self._device.make_buffer(max(BUFFER_WORDS_MIN, 1 << (num_words - 1).bit_length()))

    def follow(self, failure: TransferError | None, buffer: Buffer | None) -> GpuCompletion:
        """Wait for what the stream has been given so far."""
        event = self._events.take()
        event.record(self.stream)
        completion = GpuCompletion(event, failure)
        self._issued.put((completion, buffer))
        return completion

    def close(self) -> None:
        """Wait until all copies have ended, and give the stream back."""
        self._issued.put(None)
        self._thread.join()
        try:
            self._device.driver.destroy_stream(self.stream.cuda_stream)
        except DeviceError as error:
            logger.debug("The stream is left to the end of the process: %s", error)

    def _run(self) -> None:
        while (issued := self._issued.get()) is not None:
            completion, buffer = issued
            failure = completion.failure
            try:
                self._device.driver.bind_thread()
                completion.event.synchronize()
                self._events.give(completion.event)
            except Exception as error:
                failure = TransferError(FailureReason.COPY_FAILED, str(error))
            if buffer is not None:
                self._idle_buffers.append(buffer)
            if failure is None:
                completion.future.set_result(None)
            else:
                completion.future.set_exception(failure)


class GpuBackend:
    """See `Backend`.

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
        self._device = device
        self._driver = device.driver
        self._layout = layout
        self._host = host
        self._host_address = host.tensor.data_ptr()
        self._path = path
        self._table = RangeTable(base_address, self._host_address, layout)
        self._checksums = SlotChecksums(host.tensor.numpy(), layout)
        self._events = Events(device)
        self._is_closed = False
        self._lanes = {
            direction: Lane(device, self._events, direction.value) for direction in Direction
        }
        self._segments = self._prepare_kernel(base_address)
        self._is_mapped: bool | None = None
        self._lock = PageLock(self._driver, self._host_address, layout)

    @property
    def num_usable_slots(self) -> int:
        """See `Backend.num_usable_slots`."""
        return self._lock.num_usable_slots

    def mark(self) -> Event:
        """See `Backend.mark`."""
        event = self._events.take()
        event.record(self._device.compute_stream())
        return event

    def issue(self, copy: Copy, after: Event) -> GpuCompletion:
        """See `Backend.issue`."""
        self._table.check(copy)
        if self._is_closed:
            raise TransferError(FailureReason.NOT_RUNNING, "the backend was closed")
        lane = self._lanes[copy.direction]
        buffer = failure = None
        try:
            self._driver.bind_thread()
            lane.stream.wait_event(after)
        except Exception as error:
            raise TransferError(FailureReason.COPY_FAILED, str(error)) from error
        self._events.give(after)
        try:
            buffer = self._copy(copy, lane)
        except Exception as error:
            # A part of it may be under way: it has failed when that has ended.
            failure = TransferError(FailureReason.COPY_FAILED, str(error))
        return lane.follow(failure, buffer)

    def fence(self, completion: Completion, timeout_s: float) -> bool:
        """Let the compute stream wait for the copy, on the device."""
        assert isinstance(completion, GpuCompletion)
        if not completion.future.done():
            # If the copy ends here and its event is used again, the stream waits for a later copy:
            # longer than it must, never for something that waits for it.
            self._device.compute_stream().wait_event(completion.event)
        return True

    def checksums(self, slot_ids: npt.NDArray[np.int64]) -> npt.NDArray[np.uint64]:
        """See `Backend.checksums`."""
        return self._checksums.of(slot_ids)

    def close(self) -> None:
        """See `Backend.close`; what has been issued is done."""
        if self._is_closed:
            return
        self._is_closed = True
        for lane in self._lanes.values():
            lane.close()
        self._lock.close()
        self._host.close()

    # ---- how to copy ---------------------------------------------------------------------------

    def _copy(self, copy: Copy, lane: Lane) -> Buffer | None:
        """Give a copy to the lane's stream; returns what must stay until it has ended."""
        runs = self._table.runs(copy)
        path = self._choose(runs, len(copy.block_ids))
        if path is CopyPath.KERNEL:
            return self._launch(copy, lane)
        ranges = self._table.ranges(runs, lane.ranges)
        if path is CopyPath.BATCH:
            self._driver.copy_batch(ranges, copy.direction, lane.stream.cuda_stream)
        else:
            self._driver.copy_each(ranges, lane.stream.cuda_stream)
        return None

    def _choose(self, runs: Runs, num_blocks: int) -> CopyPath:
        if self._lock.is_pageable:
            return CopyPath.EACH
        batch_or_each = CopyPath.BATCH if self._driver.has_batch else CopyPath.EACH
        if self._path is CopyPath.KERNEL or self._path is None:
            num_ranges = len(runs) * len(self._layout.geometry.segments)
            range_bytes = num_blocks * self.slot_bytes / num_ranges
            is_wanted = self._path is CopyPath.KERNEL or (
                range_bytes < KERNEL_RANGE_BYTES[runs.direction] and num_ranges >= KERNEL_RANGES_MIN
            )
            return CopyPath.KERNEL if is_wanted and self._can_launch() else batch_or_each
        return CopyPath.EACH if self._path is CopyPath.EACH else batch_or_each

    def _prepare_kernel(self, base_address: int) -> Buffer | None:
        """Compile the kernel and give the device its table of segments; None if it cannot be."""
        if self._path in (CopyPath.BATCH, CopyPath.EACH):
            return None
        word_bytes = row_kernel.word_bytes(self._layout, base_address, self._host_address)
        if not self._device.load_kernel(word_bytes):
            return None
        table = row_kernel.segment_table(self._layout, base_address, self._host_address)
        buffer = self._device.make_buffer(table.size)
        buffer.host[: table.size] = table.view(np.int64).ravel()
        stream = self._lanes[Direction.LOAD].stream
        self._driver.copy(
            buffer.device_address, buffer.host_address, table.nbytes, stream.cuda_stream
        )
        event = self._events.take()
        event.record(stream)
        event.synchronize()
        return buffer

    def _can_launch(self) -> bool:
        """Whether kernels find the host memory, and under the host's own addresses; asked once."""
        if self._segments is None:
            return False
        if self._is_mapped is None:
            try:
                found = self._driver.device_address(self._host_address)
            except DeviceError:
                found = 0
            self._is_mapped = found == self._host_address
            if not self._is_mapped:
                logger.info("Host memory has another address on this device; no kernel is used.")
        return self._is_mapped

    def _launch(self, copy: Copy, lane: Lane) -> Buffer:
        assert self._segments is not None
        num_pairs = len(copy.block_ids)
        buffer = lane.take_buffer(2 * num_pairs)
        buffer.host[:num_pairs] = copy.block_ids
        buffer.host[num_pairs : 2 * num_pairs] = copy.slot_ids
        size_bytes = 2 * num_pairs * buffer.host.itemsize
        self._driver.copy(
            buffer.device_address, buffer.host_address, size_bytes, lane.stream.cuda_stream
        )
        segments = self._layout.geometry.segments
        row_bytes_max = max(segment.length_bytes for segment in segments)
        arguments = RowArguments(
            segments=self._segments.device_address,
            block_ids=buffer.device_address,
            slot_ids=buffer.device_address + num_pairs * buffer.host.itemsize,
            num_pairs=num_pairs,
            num_segments=len(segments),
            pieces_per_row=-(-row_bytes_max // row_kernel.PIECE_BYTES),
            slots_per_slab=self._layout.slots_per_slab,
            slab_bytes=self._layout.slab_bytes,
            is_store=int(copy.direction is Direction.STORE),
        )
        self._device.launch(arguments, lane.stream)
        return buffer
