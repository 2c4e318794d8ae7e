"""Copies for a KV cache on a GPU, CUDA or HIP.

One stream for each direction. A copy waits, on the device, for what the compute stream had been
given when it was submitted, which orders a load after the fences on its targets. A fence makes the
compute stream wait, on the device, for the copy. A lane for each direction gives copies to the
driver, in pieces, and waits for their ends.
"""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import Any

import numpy as np

from safe_offload.errors import CaptureError, DeviceError, TransferError
from safe_offload.layout import HostLayout
from safe_offload.protocol import FailureReason, MemoryFacts
from safe_offload.worker.copies import row_kernel
from safe_offload.worker.copies.base import Completion, Copy, CopyPath, Direction, TimedCopy
from safe_offload.worker.copies.cost import Cost, Timed
from safe_offload.worker.copies.device import Device
from safe_offload.worker.copies.lane import FIRST_PIECE_RANGES, GpuCompletion, Lane
from safe_offload.worker.copies.ranges import RangeTable, Runs
from safe_offload.worker.copies.row_kernel import RowArguments
from safe_offload.worker.memory.checksums import slot_checksums
from safe_offload.worker.memory.host_memory import HostMemory
from safe_offload.worker.memory.page_lock import PageLock

logger = logging.getLogger(f"vllm.{__name__}")

KERNEL_RANGE_BYTES = {Direction.LOAD: 128 * 1024, Direction.STORE: 0}
"""Ranges shorter than this on average are copied by the kernel, if there are `KERNEL_RANGES_MIN`.

Measured on an H100: docs/benchmarks/gpu.md. They count where nothing was timed on this machine.
"""
KERNEL_RANGES_MIN = 16
KERNEL_WEIGHT = {Direction.LOAD: 1.0, Direction.STORE: 2.0}
"""By how much the kernel must be faster than copy engines, where both were timed.

Nothing waits for a store, and copy engines take no multiprocessors from the forward.
"""


class GpuBackend:
    """See `Backend` and `ProvableBackend`; `close` closes `host`, the slots.

    `paths` and `num_demotions` change on the threads of the lanes, `_is_closed` when the loop has
    ended. Each slab becomes usable when it is page-locked. Without a `path`, it chooses one for
    each copy by the times measured.
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
        self.load_block_s = 0.0
        self._device = device
        self._layout = layout
        self.host = host
        self._table = RangeTable(base_address, host.tensor.data_ptr(), layout)
        self.checksums = functools.partial(slot_checksums, host.tensor.numpy().data, layout)
        self._prefers_kernel = path is CopyPath.KERNEL
        self._is_closed = False
        self._lock = PageLock(device, host.tensor.data_ptr(), layout)
        changed = threading.Condition()
        load = Lane(device, Direction.LOAD.value, changed)
        store = Lane(device, Direction.STORE.value, changed, first=load)
        self.lanes = {Direction.LOAD: load, Direction.STORE: store}
        self._demoting = threading.Lock()
        self._segments: Any = None
        self._costs: dict[tuple[CopyPath, Direction], Cost | None] = {}
        with ThreadPoolExecutor(1) as own_thread:
            self.paths = own_thread.submit(self._find_paths, path, base_address).result()

    def __repr__(self) -> str:
        return f"<GpuBackend: {self.num_slots} slots, {self._lock!r}, {self.paths}>"

    @property
    def num_usable_slots(self) -> int:
        return self._lock.num_usable_slots

    @property
    def memory(self) -> MemoryFacts:
        return self._lock.facts

    def undisturbed(self) -> AbstractContextManager[None]:
        """See `ProvableBackend.undisturbed`: page-locking pauses."""
        return self._lock.paused()

    @property
    def choices(self) -> tuple[CopyPath, ...]:
        other = self._without_kernel()
        has_choice = CopyPath.KERNEL in self.paths and other is not CopyPath.KERNEL
        return (CopyPath.KERNEL, other) if has_choice and not self._prefers_kernel else ()

    def use(self, paths: tuple[CopyPath, ...], timed: Sequence[TimedCopy] = ()) -> None:
        self.paths = paths
        by_way: dict[tuple[CopyPath, Direction], list[Timed]] = {}
        for one in timed:
            num_ranges = self._num_ranges(self._table.runs(one.copy))
            size_bytes = len(one.copy.block_ids) * self.slot_bytes
            by_way.setdefault((one.path, one.copy.direction), []).append(
                Timed(num_ranges, size_bytes, one.seconds)
            )
        self._costs = {way: Cost.learn(copies) for way, copies in by_way.items()}
        loads = [one for one in timed if one.copy.direction is Direction.LOAD]
        sized = [(one.seconds, len(one.copy.block_ids)) for one in loads]
        self.load_block_s = max((s / num for s, num in sized if num > 1), default=0.0)

    def mark(self) -> Any:
        return self._device.record(self._device.compute_stream())

    def issue(self, copy: Copy, after: Any) -> GpuCompletion:
        self._table.check(copy)
        if self._is_closed or not self.paths:
            raise TransferError(FailureReason.NOT_RUNNING, "closed, or without a way to copy")
        lane = self.lanes[copy.direction]
        completion = GpuCompletion(lane, copy, after, self.paths[0])
        lane.submit(completion, self._give)
        return completion

    def fence(self, completion: Completion, timeout_s: float) -> bool:
        """Let the compute stream wait for the copy, on the device, once all of it was given."""
        assert isinstance(completion, GpuCompletion)
        if not completion.lane.submit_now(completion, timeout_s):
            completion.cancel()  # pieces not submitted yet would be read too late
            return False
        if completion.event is not None:
            self._device.compute_stream().wait_event(completion.event)
        return True

    def join(self, completion: Completion) -> bool:
        """See `Backend.join`; the compute stream waits for the copy, on the device."""
        assert isinstance(completion, GpuCompletion)
        completion.lane.submit_now(completion, None)
        if completion.event is None:  # which leaves nothing to wait for on the device
            completion.lane.stream.synchronize()
            return False
        self._device.compute_stream().wait_event(completion.event)
        return completion.failure is None

    def end_copies(self) -> None:
        """See `Backend.end_copies`; issued copies are completed."""
        if not self._is_closed:
            self._is_closed = True
            for lane in self.lanes.values():
                lane.close()

    def close(self) -> None:
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
                "Small blocks are copied without the copy kernel, which is slower (%s: %s). Fix: "
                "%s.",
                type(error).__name__,
                error,
                self._device.kernel_fix(),
            )
            return False
        return True

    def _choose(self, runs: Runs, num_blocks: int) -> CopyPath:
        other, size_bytes = self._without_kernel(), num_blocks * self.slot_bytes
        if self._prefers_kernel:
            return self.paths[0]
        num_ranges, direction = self._num_ranges(runs), runs.direction
        of_kernel = self._costs.get((CopyPath.KERNEL, direction))
        of_other = self._costs.get((other, direction))
        if of_kernel is None or of_other is None:
            is_short = size_bytes / num_ranges < KERNEL_RANGE_BYTES[direction]
            takes_kernel = is_short and num_ranges >= KERNEL_RANGES_MIN
        else:
            kernel_s = of_kernel.of(num_ranges, size_bytes) * KERNEL_WEIGHT[direction]
            takes_kernel = kernel_s < of_other.of(num_ranges, size_bytes)
        return self.paths[0] if takes_kernel else other

    def _num_ranges(self, runs: Runs) -> int:
        return len(runs) * len(self._layout.geometry.segments)

    def _without_kernel(self) -> CopyPath:
        return next((path for path in self.paths if path is not CopyPath.KERNEL), self.paths[0])

    def _give(self, completion: GpuCompletion) -> Iterator[None]:
        """Give a copy to its stream, piece by piece; runs on the thread of its lane."""
        copy, lane = completion.copy, completion.lane
        self._device.bind_thread()
        lane.stream.wait_event(completion.after)
        runs = self._table.runs(copy)
        path = self._choose(runs, len(copy.block_ids))
        if path is CopyPath.KERNEL and not self._take_ids(completion):
            path = self._without_kernel()
        completion.choose(path)
        try:
            if path is CopyPath.KERNEL:
                yield from self._launch(copy, lane, *completion.used)
            else:
                yield from self._give_ranges(path, copy, lane, runs)
        except Exception as error:
            # Part of it may be in flight: it has failed when that has ended.
            completion.fail(f"{path.value}: {error}")
            self._demote(path, error)

    def _give_ranges(self, path: CopyPath, copy: Copy, lane: Lane, runs: Runs) -> Iterator[None]:
        ranges, stream, start = self._table.ranges(runs), lane.stream.cuda_stream, 0
        while start < len(ranges):
            if start:
                yield
            num_ranges = lane.num_ranges if start else min(lane.num_ranges, FIRST_PIECE_RANGES)
            piece = ranges.part(start, start + num_ranges)
            begin_s = time.perf_counter()
            if path is CopyPath.BATCH:
                self._device.driver.copy_batch(piece, copy.direction, stream)
            else:
                self._device.driver.copy_each(piece, stream)
            lane.keep_pace(len(piece), time.perf_counter() - begin_s)
            start += len(piece)

    def _take_ids(self, completion: GpuCompletion) -> bool:
        """Put memory for the ids of a launch into `used`; return whether there is any now."""
        num_words, stream = 2 * len(completion.copy.block_ids), completion.lane.stream
        try:
            completion.used.append(self._device.make_buffer(num_words, stream))
        except Exception as error:
            logger.debug("A copy goes without the kernel: %s", error)
            return False
        return True

    def _launch(self, copy: Copy, lane: Lane, buffer: Any) -> Iterator[None]:
        num_pairs = len(copy.block_ids)
        host, partner = buffer
        np.concatenate((copy.block_ids, copy.slot_ids), out=host.numpy())
        self._device.upload(buffer, lane.stream)
        segments = self._layout.geometry.segments
        row_bytes_max = max(segment.length_bytes for segment in segments)
        step = max(1, row_kernel.LAUNCH_BYTES // self.slot_bytes)
        word_bytes = partner.element_size()
        for start in range(0, num_pairs, step):
            if start:
                yield
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
        with self._demoting:
            if isinstance(error, CaptureError) or path not in self.paths or self.paths == (path,):
                return
            self.paths = tuple(other for other in self.paths if other is not path)
            self.num_demotions += 1
        logger.error(
            'Copy path "%s" failed (%s). Falling back to "%s", which may be slower. Fix: if '
            'this recurs after a restart, set "copy_path": "%s" and open an issue with this log.',
            path.value,
            str(error),  # a log record must not keep the frames, and with them the buffer
            '", "'.join(other.value for other in self.paths),
            self.paths[0].value,
        )
