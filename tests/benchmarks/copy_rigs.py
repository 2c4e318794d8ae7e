"""Copies of a size, our backend and what it is compared with, each way ready to be timed."""

import ctypes
import enum
import functools
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from safe_offload.errors import SafeOffloadError
from safe_offload.layout import Geometry, HostLayout, Segment
from safe_offload.protocol import MemoryKind
from safe_offload.worker.copies.base import Copy, Direction
from safe_offload.worker.copies.cpu import CpuBackend
from safe_offload.worker.copies.device import Device
from safe_offload.worker.copies.gpu import GpuBackend
from safe_offload.worker.copies.ranges import Ranges, RangeTable
from safe_offload.worker.copies.threads import DirectionThreads
from safe_offload.worker.memory.host_memory import HostMemory

OURS = "safe_offload"
LIMIT = "one copy"  # all bytes in one contiguous copy: what the hardware gives
LOOP = "loop"  # one call for each range, the ranges worked out beforehand
PATIENCE_S = 120.0
PAUSE_S = 0.01

TimedCopy = Callable[[], float]  # copies everything once; returns the seconds
Give = Callable[[], object]  # makes the copies of one direction, or gives them to the device


class Traffic(enum.Enum):
    """Which copies run at the same time."""

    STORE = "store"
    LOAD = "load"
    BOTH = "both"
    """Half of the blocks stored while the other half is loaded."""


@dataclass(frozen=True, slots=True)
class Case:
    """One size of copy; blocks and slots are in random order."""

    range_bytes: int  # of one block in one layer
    num_blocks: int
    num_layers: int

    @property
    def size_bytes(self) -> int:
        return self.range_bytes * self.num_blocks * self.num_layers

    @property
    def traffics(self) -> tuple[Traffic, ...]:
        """One block cannot be stored and loaded at once."""
        return tuple(Traffic) if self.num_blocks > 1 else (Traffic.STORE, Traffic.LOAD)

    def moved_bytes(self, traffic: Traffic) -> int:
        if traffic is Traffic.BOTH:
            return self.size_bytes // self.num_blocks * (self.num_blocks // 2 * 2)
        return self.size_bytes

    def make_layout(self) -> HostLayout:
        """Return a KV cache as large as the copy, layers outermost, and host slots in one slab."""
        row, layer_bytes = self.range_bytes, self.range_bytes * self.num_blocks
        segments = (Segment(row, index * layer_bytes, row) for index in range(self.num_layers))
        return HostLayout.in_one_slab(Geometry(tuple(segments), self.num_blocks), self.num_blocks)

    def make_copies(self, traffic: Traffic) -> list[Copy]:
        """Return the copy of all blocks, or the two of half of them each."""
        generator = np.random.default_rng(0)
        blocks = generator.permutation(np.arange(self.num_blocks, dtype=np.int64))
        slots = generator.permutation(np.arange(self.num_blocks, dtype=np.int64))
        if traffic is not Traffic.BOTH:
            return [Copy(Direction(traffic.value), blocks, slots)]
        half = self.num_blocks // 2
        return [
            Copy(Direction.STORE, blocks[:half], slots[:half]),
            Copy(Direction.LOAD, blocks[half : 2 * half], slots[half : 2 * half]),
        ]


class Rig:
    """A KV cache of shape (case.size_bytes,), a host pool as large, our backend between them."""

    clock: str  # between which points a way is timed
    backend: Any  # a CpuBackend or GpuBackend; the completions of both have a future
    give_one: Callable[[Direction, int, int, int], Give]  # a copy: target, source, bytes
    _each: Callable[[Direction, Ranges], Give]  # copies of ranges

    def __init__(self, case: Case, storage: torch.Tensor) -> None:
        self.case = case
        self.storage = storage
        self.layout = case.make_layout()
        self.host = HostMemory.allocate(self.layout.size_bytes)
        self.table = RangeTable(storage.data_ptr(), self.host.tensor.data_ptr(), self.layout)

    def ways(self, traffic: Traffic) -> dict[str, TimedCopy]:
        """Return every way to move the bytes."""
        copies = self.case.make_copies(traffic)
        large = {c.direction: self._large(c.direction, traffic) for c in copies}
        each = {c.direction: self._each(c.direction, self.ranges(c)) for c in copies}
        return {
            OURS: lambda: self.time_ours(copies),
            LIMIT: lambda: self.time(large),
            LOOP: lambda: self.time(each),
        }

    def time(self, gives: Mapping[Direction, Give]) -> float:
        """Time copies that are not ours, both directions at once if there are two."""
        raise NotImplementedError

    def time_ours(self, copies: Sequence[Copy]) -> float:
        raise NotImplementedError

    def ranges(self, copy: Copy) -> Ranges:
        """Return what a copy consists of, neighbours joined."""
        return self.table.ranges(self.table.runs(copy))

    def copy(self, copies: Sequence[Copy]) -> None:
        completions = [self.backend.issue(copy, self.backend.mark()) for copy in copies]
        for completion in completions:
            completion.future.result(PATIENCE_S)

    def check(self) -> None:
        """Store everything, wipe the KV cache, load it again, and compare every byte."""
        words = self.storage.view(torch.int32)
        expected = torch.arange(len(words), dtype=torch.int32, device=words.device)
        words.copy_(expected)
        self.copy(self.case.make_copies(Traffic.STORE))
        self.storage.zero_()
        self.copy(self.case.make_copies(Traffic.LOAD))
        if not torch.equal(words, expected):
            raise SafeOffloadError(f"{self.case}: other bytes came back than were stored")

    def close(self) -> None:
        self.backend.close()

    def _large(self, direction: Direction, traffic: Traffic) -> Give:
        """Return one contiguous copy of as many bytes."""
        size_bytes, offset = self.case.moved_bytes(traffic), 0
        if traffic is Traffic.BOTH:
            size_bytes //= 2
            offset = 0 if direction is Direction.STORE else size_bytes
        target, source = self.host.tensor.data_ptr() + offset, self.storage.data_ptr() + offset
        if direction is Direction.LOAD:
            target, source = source, target
        return self.give_one(direction, target, source, size_bytes)


class CpuRig(Rig):
    """See `Rig`: both memories on the host, one thread for each direction."""

    clock = "wall clock; every way has one thread for each direction, woken and waited for in it"

    def __init__(self, case: Case) -> None:
        super().__init__(case, torch.empty(case.size_bytes, dtype=torch.uint8))
        self.backend = CpuBackend(
            self.storage.data_ptr(), self.layout, self.host, DirectionThreads("safe-offload")
        )
        self._threads = ThreadPoolExecutor(len(Direction))

    def time(self, gives: Mapping[Direction, Give]) -> float:
        """See `Rig`; in threads that wait for work, as our backend's do."""
        return _time(lambda: list(self._threads.map(lambda give: give(), gives.values())))

    def time_ours(self, copies: Sequence[Copy]) -> float:
        return _time(lambda: self.copy(copies))

    def close(self) -> None:
        super().close()
        self._threads.shutdown()

    def give_one(self, direction: Direction, target: int, source: int, size_bytes: int) -> Give:
        return lambda: ctypes.memmove(target, source, size_bytes)

    def _each(self, direction: Direction, ranges: Ranges) -> Give:
        lists = [part.tolist() for part in (ranges.targets, ranges.sources, ranges.lengths)]

        def move() -> None:
            for target, source, length in zip(*lists, strict=True):
                ctypes.memmove(target, source, length)

        return move


class GpuRig(Rig):
    """See `Rig`: the host memory page-locked, streams for what we are compared with.

    `make_event` makes events of torch's with timing; `forward` gives the compute stream some work
    that takes longer than a load. SafeOffloadError is raised if host memory cannot be page-locked.
    """

    clock = "device time, from the compute stream's point at the call until it has got the bytes"

    def __init__(
        self,
        case: Case,
        storage: torch.Tensor,
        device: Device,
        make_event: Callable[[], Any],
        forward: Callable[[], object],
    ) -> None:
        super().__init__(case, storage)
        self.device = device
        self.forward = forward
        self._first, self._last = make_event(), make_event()
        self.backend = GpuBackend(device, storage.data_ptr(), self.layout, self.host)
        self.streams: dict[Direction, Any] = {}
        try:
            self._wait_until_locked()
            self.streams = {direction: device.make_stream() for direction in Direction}
        except BaseException:
            self.close()
            raise

    def time(self, gives: Mapping[Direction, Give]) -> float:
        """See `Rig`; in the order of `time_ours`, by streams and events of the rig's own."""
        compute = self.start_clock()
        start = self.device.record(compute)
        ends = []
        for direction, give in gives.items():
            self.streams[direction].wait_event(start)
            give()
            ends.append(self.device.record(self.streams[direction]))
        for end in ends:
            compute.wait_event(end)
        return self.stop_clock()

    def time_ours(self, copies: Sequence[Copy]) -> float:
        self.start_clock()
        completions = [self.backend.issue(copy, self.backend.mark()) for copy in copies]
        for completion in completions:
            self.backend.fence(completion, PATIENCE_S)
        elapsed_s = self.stop_clock()
        for completion in completions:
            completion.future.result(PATIENCE_S)
        return elapsed_s

    def start_clock(self) -> Any:
        """Take the time when the compute stream gets here; return the stream."""
        compute = self.device.compute_stream()
        self._first.record(compute)
        return compute

    def stop_clock(self) -> float:
        """Wait until the compute stream gets here; return the seconds that it took."""
        self._last.record(self.device.compute_stream())
        self._last.synchronize()
        return float(self._first.elapsed_time(self._last)) / 1e3

    def close(self) -> None:
        self.streams.clear()
        super().close()

    def give_one(self, direction: Direction, target: int, source: int, size_bytes: int) -> Give:
        stream = self.streams[direction].cuda_stream
        return lambda: self.device.driver.copy(target, source, size_bytes, stream)

    def _each(self, direction: Direction, ranges: Ranges) -> Give:
        stream = self.streams[direction].cuda_stream
        return lambda: self.device.driver.copy_each(ranges, stream)

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


def make_gpu_rig(case: Case) -> GpuRig:
    """Return a rig on torch's current GPU."""
    device = torch.device("cuda", torch.cuda.current_device())
    storage = torch.empty(case.size_bytes, dtype=torch.uint8, device=device)
    make_event = functools.partial(torch.cuda.Event, enable_timing=True)
    return GpuRig(case, storage, Device(device), make_event, Forward(device))


class Forward:
    """Matrix products as in a prefill of 8,192 tokens: at the 989 TFLOP/s of an H200, 46 ms."""

    NUM_PRODUCTS = 48

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._factors: tuple[torch.Tensor, torch.Tensor] | None = None  # made when first needed

    def __call__(self) -> None:
        if self._factors is None:
            shapes, kind = ((8192, 4096), (4096, 14336)), torch.bfloat16
            first, second = (torch.ones(s, dtype=kind, device=self._device) for s in shapes)
            self._factors = first, second
        for _ in range(self.NUM_PRODUCTS):
            torch.mm(*self._factors)


def _time(work: Callable[[], object]) -> float:
    start_s = time.perf_counter()
    work()
    return time.perf_counter() - start_s
