"""A GPU rig over a device of threads."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from safe_offload.worker.memory.host_memory import HostMemory
from tests.benchmarks.transfer import make_gpu_rig
from tests.benchmarks.transfer_cases import Case
from tests.benchmarks.transfer_rigs import GpuRig
from tests.worker.copies.fake_device import FakeGpu, FakeStream

MakeGpuRig = Callable[..., GpuRig]


class FakeTimedEvent:
    """As much of torch's events with timing as is needed, on a stream of threads."""

    def __init__(self) -> None:
        self.time_s = 0.0
        self.stream: FakeStream | None = None

    def record(self, stream: FakeStream) -> None:
        self.stream = stream
        stream.enqueue(lambda: setattr(self, "time_s", time.perf_counter()))

    def synchronize(self) -> None:
        assert self.stream is not None
        self.stream.synchronize()

    def elapsed_time(self, end: FakeTimedEvent) -> float:
        return 1e3 * (end.time_s - self.time_s)


@contextmanager
def fake_gpu_rigs() -> Iterator[MakeGpuRig]:
    """Makes rigs, and ends their devices."""
    gpus: list[FakeGpu] = []

    def make(case: Case, host: HostMemory | None = None, num_lockable: int = 1) -> GpuRig:
        gpus.append(FakeGpu())
        gpus[-1].num_lockable = num_lockable
        storage = torch.empty(case.size_bytes, dtype=torch.uint8)
        return GpuRig(case, storage, gpus[-1].open(), FakeTimedEvent, host)

    yield make
    for gpu in gpus:
        gpu.close()


@contextmanager
def gpu_rigs() -> Iterator[MakeGpuRig]:
    """Makes rigs on the GPU of this machine, or on threads where there is none."""
    if torch.cuda.is_available():
        yield make_gpu_rig
        return
    with fake_gpu_rigs() as make:
        yield make
