"""Where the runs of `tensor_core` take place without a GPU."""

import random
import threading
from collections.abc import Callable
from concurrent.futures import Future

import numpy as np
import torch

from safe_offload.layout import Geometry, HostLayout
from safe_offload.worker.copies.base import CopyPath, Direction
from safe_offload.worker.copies.cpu import CpuBackend
from safe_offload.worker.copies.gpu import GpuBackend
from safe_offload.worker.copies.threads import DirectionThreads
from safe_offload.worker.memory.host_memory import HostMemory
from tests.simulator.vllm_setup import EngineShape
from tests.worker.copies.fake_device import FakeGpu
from tests.worker.tensor_core import NUM_LAYERS
from tests.worker.waiting import PATIENCE_S

DELAY_S_MAX = 0.01
SLOTS_PER_SLAB = 16


def make_storage(shape: EngineShape) -> torch.Tensor:
    """A KV cache of noise, at an address that every copy path takes."""
    noise = np.random.default_rng(1).integers(1 << 62, size=(NUM_LAYERS, shape.num_blocks, 16))
    return torch.from_numpy(noise)[:, :, : shape.block_words].contiguous()


class LateThreads:
    """See `DirectionThreads`; what they run begins late at random."""

    def __init__(self) -> None:
        self._threads = DirectionThreads("safe-offload")
        self._random = random.Random(1)
        self.close = self._threads.close

    def submit(
        self, direction: Direction, function: Callable[..., None], *args: object
    ) -> Future[None]:
        return self._threads.submit(direction, self._run, function, *args)

    def _run(self, function: Callable[..., None], *args: object) -> None:
        threading.Event().wait(self._random.choice([0.0, 0.0, DELAY_S_MAX]))
        function(*args)


class CpuMachine:
    """vLLM's CPU engine: what it computes is there when it returns."""

    def __init__(self, shape: EngineShape, geometry: Geometry, num_slots: int) -> None:
        self.storage = make_storage(shape)
        layout = HostLayout.in_one_slab(geometry, num_slots)
        host = HostMemory.allocate(layout.size_bytes)
        self.backend = CpuBackend(self.storage.data_ptr(), layout, host, LateThreads())

    def enqueue(self, operation: Callable[[], object]) -> Callable[[], None]:
        operation()
        return lambda: None

    def delay(self, where: Direction | None, amount: float) -> None:
        """Nothing: the copies are late by themselves."""

    def to_device(self, numbers: list[int]) -> torch.Tensor:
        return torch.tensor(numbers)

    def close(self) -> None:
        """Nothing is left."""


class ThreadMachine:
    """A GPU of threads."""

    def __init__(
        self, shape: EngineShape, geometry: Geometry, num_slots: int, path: CopyPath | None = None
    ) -> None:
        self.storage = make_storage(shape)
        self._gpu = FakeGpu()
        layout = HostLayout(geometry, num_slots, SLOTS_PER_SLAB)
        host = HostMemory.allocate(layout.size_bytes)
        self.backend = GpuBackend(self._gpu.open(), self.storage.data_ptr(), layout, host, path)

    def enqueue(self, operation: Callable[[], object]) -> Callable[[], None]:
        done = threading.Event()
        self._gpu.compute.enqueue(operation)
        self._gpu.compute.enqueue(done.set)

        def wait() -> None:
            assert done.wait(PATIENCE_S)

        return wait

    def delay(self, where: Direction | None, amount: float) -> None:
        stream = self._gpu.compute if where is None else self.backend.lanes[where].stream
        stream.enqueue(lambda: threading.Event().wait(amount * DELAY_S_MAX))

    def to_device(self, numbers: list[int]) -> torch.Tensor:
        return torch.tensor(numbers)

    def close(self) -> None:
        self._gpu.close()
