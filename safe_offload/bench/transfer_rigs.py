"""Our backend and what it is compared with, over the same memory, each way ready to be timed."""

import ctypes
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

import numpy as np
import torch

from safe_offload.bench.transfer_grid import Case, Traffic, Way
from safe_offload.errors import SafeOffloadError
from safe_offload.protocol import MemoryKind
from safe_offload.worker.backends.base import Copy, Direction
from safe_offload.worker.backends.cpu import CpuBackend
from safe_offload.worker.backends.device import Device
from safe_offload.worker.backends.gpu import GpuBackend
from safe_offload.worker.backends.ranges import Ranges, RangeTable, Runs
from safe_offload.worker.host_memory import HostMemory
from safe_offload.worker.threads import DirectionThreads

PATIENCE_S = 120.0
PAUSE_S = 0.01

TimedCopy = Callable[[], float]
"""Copies everything once; returns how long it took, in s."""


class Stopwatch(Protocol):
    """Time on the device, between two points of its streams."""

    def start(self, stream: Any) -> None:
        """Take the time when the stream gets here."""

    def stop(self, stream: Any) -> None:
        """Take the time when the stream gets here."""

    def elapsed_s(self) -> float:
        """Wait for the second point; return the time between the two."""


class CudaStopwatch:
    """See `Stopwatch`; two events of torch's with timing."""

    def __init__(self) -> None:
        self._first, self._second = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def start(self, stream: Any) -> None:
        """See `Stopwatch`."""
        self._first.record(stream)

    def stop(self, stream: Any) -> None:
        """See `Stopwatch`."""
        self._second.record(stream)

    def elapsed_s(self) -> float:
        """See `Stopwatch`."""
        self._second.synchronize()
        return float(self._first.elapsed_time(self._second)) / 1e3


class Rig:
    """A KV cache, a host pool as large, and our backend between them.

    Args:
        case: the size of both.
        storage: shape (case.size_bytes,), uint8.

    Attributes:
        clock: between which points a way is timed.
        missing: ways that cannot be measured here, and why.
    """

    clock: str
    backend: Any
    """A CpuBackend or GpuBackend: the completions of both have a future."""

    def __init__(self, case: Case, storage: torch.Tensor) -> None:
        self.case = case
        self.storage = storage
        self.layout = case.make_layout()
        self.host = HostMemory.allocate(self.layout.size_bytes)
        self.table = RangeTable(storage.data_ptr(), self.host.tensor.data_ptr(), self.layout)
        self.missing: dict[Way, str] = {}

    def ways(self, traffic: Traffic) -> dict[Way, TimedCopy]:
        """Return every way that can be measured here."""
        raise NotImplementedError

    def copy(self, copies: Sequence[Copy]) -> None:
        """Copy by our backend, and wait."""
        completions = [self.backend.issue(copy, self.backend.mark()) for copy in copies]
        for completion in completions:
            completion.future.result(PATIENCE_S)

    def check(self) -> None:
        """Store everything, wipe the KV cache and load it again; touches every page, too.

        Raises:
            SafeOffloadError: other bytes came back.
        """
        words = self.storage.view(torch.int32)
        expected = torch.arange(len(words), dtype=torch.int32, device=words.device)
        words.copy_(expected)
        self.copy(make_copies(self.case, Traffic.STORE))
        self.storage.zero_()
        self.copy(make_copies(self.case, Traffic.LOAD))
        if not torch.equal(words, expected):
            raise SafeOffloadError(f"{self.case}: other bytes came back than were stored")

    def close(self) -> None:
        """Give back threads and memory."""
        self.backend.close()

    def large_copy(self, direction: Direction, traffic: Traffic) -> tuple[int, int, int]:
        """Return target, source and bytes of one contiguous copy of as many bytes."""
        size_bytes = self.case.moved_bytes(traffic)
        offset = 0
        if traffic is Traffic.BOTH:
            size_bytes //= 2
            offset = 0 if direction is Direction.STORE else size_bytes
        in_storage = self.storage.data_ptr() + offset
        in_host = self.host.tensor.data_ptr() + offset
        if direction is Direction.STORE:
            return in_host, in_storage, size_bytes
        return in_storage, in_host, size_bytes

    def ranges(self, copy: Copy) -> Ranges:
        """Return what a copy consists of, neighbours joined."""
        return self.table.ranges(self.table.runs(copy))


class CpuRig(Rig):
    """See `Rig`: both memories on the host, one thread for each direction."""

    clock = "wall clock; every way has one thread for each direction, woken and waited for in it"

    def __init__(self, case: Case) -> None:
        super().__init__(case, torch.empty(case.size_bytes, dtype=torch.uint8))
        self.backend = CpuBackend(
            self.storage.data_ptr(), self.layout, self.host, DirectionThreads("safe-offload")
        )
        self._threads = ThreadPoolExecutor(len(Direction))

    def ways(self, traffic: Traffic) -> dict[Way, TimedCopy]:
        """See `Rig`."""
        copies = make_copies(self.case, traffic)
        large = [self.large_copy(copy.direction, traffic) for copy in copies]
        lists = [self._lists(copy) for copy in copies]
        return {
            Way.OURS: lambda: _time(lambda: self.copy(copies)),
            Way.LIMIT: lambda: self._time_each(lambda copy: ctypes.memmove(*copy), large),
            Way.LOOP: lambda: self._time_each(_move_each, lists),
        }

    def close(self) -> None:
        """See `Rig`."""
        super().close()
        self._threads.shutdown()

    def _lists(self, copy: Copy) -> tuple[list[int], list[int], list[int]]:
        ranges = self.ranges(copy)
        return ranges.targets.tolist(), ranges.sources.tolist(), ranges.lengths.tolist()

    def _time_each(self, move: Callable[[Any], object], copies: Sequence[Any]) -> float:
        """In threads that wait for work, as our backend's do."""
        return _time(lambda: list(self._threads.map(move, copies)))


class GpuRig(Rig):
    """See `Rig`: the host memory page-locked, streams for what we are compared with.

    Args:
        device: that the storage is on.
        stopwatch: for its streams.

    Raises:
        SafeOffloadError: host memory cannot be page-locked.
    """

    clock = "device time, from the compute stream's point at the call until it has got the bytes"

    def __init__(
        self, case: Case, storage: torch.Tensor, device: Device, stopwatch: Stopwatch
    ) -> None:
        super().__init__(case, storage)
        self.device = device
        self.stopwatch = stopwatch
        self.backend = GpuBackend(device, storage.data_ptr(), self.layout, self.host)
        self._streams: dict[Direction, Any] = {}
        try:
            self._wait_until_locked()
            for direction in Direction:
                self._streams[direction] = device.make_stream()
        except BaseException:
            self.close()
            raise

    def ways(self, traffic: Traffic) -> dict[Way, TimedCopy]:
        """See `Rig`."""
        copies = make_copies(self.case, traffic)
        driver = self.device.driver
        large = {c.direction: self.large_copy(c.direction, traffic) for c in copies}
        ranges = {c.direction: self.ranges(c) for c in copies}

        def copy_large(direction: Direction) -> None:
            driver.copy(*large[direction], self._streams[direction].cuda_stream)

        def copy_each(direction: Direction) -> None:
            driver.copy_each(ranges[direction], self._streams[direction].cuda_stream)

        directions = list(large)
        return {
            Way.OURS: lambda: self._time_ours(copies),
            Way.LIMIT: lambda: self._time(directions, copy_large),
            Way.LOOP: lambda: self._time(directions, copy_each),
        } | self._ways_of_vllm(copies)

    def close(self) -> None:
        """See `Rig`."""
        self._streams.clear()
        super().close()

    def _wait_until_locked(self) -> None:
        end_s = time.monotonic() + PATIENCE_S
        while self.backend.num_usable_slots < self.backend.num_slots:
            if time.monotonic() > end_s:
                raise SafeOffloadError(
                    f"{self.host.size_bytes} bytes were not page-locked within {PATIENCE_S:.0f} s; "
                    "fix: a smaller --max-bytes"
                )
            time.sleep(PAUSE_S)
        if self.backend.memory.kind is MemoryKind.PAGEABLE:
            raise SafeOffloadError(
                f"the driver does not page-lock {self.host.size_bytes} bytes; "
                "fix: ulimit -l unlimited, or a smaller --max-bytes"
            )

    def _time_ours(self, copies: Sequence[Copy]) -> float:
        compute = self.device.compute_stream()
        self.stopwatch.start(compute)
        completions = [self.backend.issue(copy, self.backend.mark()) for copy in copies]
        for completion in completions:
            self.backend.fence(completion, PATIENCE_S)
        self.stopwatch.stop(compute)
        for completion in completions:
            completion.future.result(PATIENCE_S)
        return self.stopwatch.elapsed_s()

    def _time(self, directions: Sequence[Direction], give: Callable[[Direction], None]) -> float:
        """The same order as in `_time_ours`, on streams and by events of our own."""
        compute = self.device.compute_stream()
        self.stopwatch.start(compute)
        start = self.device.record(compute)
        ends = []
        for direction in directions:
            self._streams[direction].wait_event(start)
            give(direction)
            ends.append(self.device.record(self._streams[direction]))
        for end in ends:
            compute.wait_event(end)
        self.stopwatch.stop(compute)
        return self.stopwatch.elapsed_s()

    def _ways_of_vllm(self, copies: Sequence[Copy]) -> dict[Way, TimedCopy]:
        """Each is tried once: there are many reasons why one may not work here."""
        ways: dict[Way, TimedCopy] = {}
        for way, make in (
            (Way.VLLM_BATCH, self._vllm_batches),
            (Way.VLLM_KERNEL, self._vllm_kernels),
        ):
            try:
                gives = make(copies)
                if gives:
                    timed = self._vllm_way(gives)
                    timed()
                    ways[way] = timed
            except Exception as error:
                self.missing[way] = f"{type(error).__name__}: {error}"
        return ways

    def _vllm_way(self, gives: dict[Direction, Callable[[], None]]) -> TimedCopy:
        return lambda: self._time(list(gives), lambda direction: gives[direction]())

    def _vllm_batches(self, copies: Sequence[Copy]) -> dict[Direction, Callable[[], None]]:
        from safe_offload.bench import vllm_copies

        shape = (self.case.num_layers, self.case.num_blocks, self.case.range_bytes)
        sides = (self.storage, self.host.tensor)
        caches, hosts = (list(side[: self.case.size_bytes].view(shape)) for side in sides)
        return {
            copy.direction: vllm_copies.batched_call(
                copy, (caches, hosts), self._streams[copy.direction]
            )
            for copy in copies
        }

    def _vllm_kernels(self, copies: Sequence[Copy]) -> dict[Direction, Callable[[], None]]:
        from safe_offload.bench import vllm_copies

        directions = [copy.direction for copy in copies]
        if directions != [Direction.LOAD]:
            return {}
        if not vllm_copies.has_kernel_for(self.case.range_bytes, Direction.LOAD):
            return {}
        ranges = self._ranges_apart(copies[0])
        stream = self._streams[Direction.LOAD]
        return {Direction.LOAD: vllm_copies.kernel_launch(ranges, stream)}

    def _ranges_apart(self, copy: Copy) -> Ranges:
        """A range for each block of each layer, as vLLM has them, neighbours or not."""
        blocks, slots = (ids.astype(np.uint64) for ids in (copy.block_ids, copy.slot_ids))
        return self.table.ranges(Runs(copy.direction, blocks, slots, None))


def make_copies(case: Case, traffic: Traffic) -> list[Copy]:
    """Return the copy of all blocks, or the two of half of them each."""
    blocks = slots = np.arange(case.num_blocks, dtype=np.int64)
    if not case.is_contiguous:
        generator = np.random.default_rng(0)
        blocks, slots = generator.permutation(blocks), generator.permutation(slots)
    if traffic is not Traffic.BOTH:
        return [Copy(Direction(traffic.value), blocks, slots)]
    half = case.num_blocks // 2
    return [
        Copy(Direction.STORE, blocks[:half], slots[:half]),
        Copy(Direction.LOAD, blocks[half : 2 * half], slots[half : 2 * half]),
    ]


def _move_each(lists: tuple[list[int], list[int], list[int]]) -> None:
    for target, source, length in zip(*lists, strict=True):
        ctypes.memmove(target, source, length)


def _time(work: Callable[[], object]) -> float:
    start_s = time.perf_counter()
    work()
    return time.perf_counter() - start_s
