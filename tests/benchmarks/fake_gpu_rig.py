"""A GPU rig over a device of threads."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from tests.benchmarks.copy_rigs import Case, GpuRig
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

    def make(case: Case, num_lockable: int = 1) -> GpuRig:
        gpus.append(FakeGpu())
        gpus[-1].num_lockable = num_lockable
        storage = torch.empty(case.size_bytes, dtype=torch.uint8)
        compute = gpus[-1].compute
        forward = functools.partial(compute.enqueue, functools.partial(time.sleep, 0.001))
        return GpuRig(case, storage, gpus[-1].open(), FakeTimedEvent, forward)

    yield make
    for gpu in gpus:
        gpu.close()
