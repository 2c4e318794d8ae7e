"""A GPU through torch: the contract's subject, and a machine for runs with content checks."""

import ctypes
import time
from collections.abc import Callable

import numpy as np
import torch

from safe_offload.layout import Geometry, HostLayout
from safe_offload.worker.copies.base import CopyPath, Direction
from safe_offload.worker.copies.device import Device
from safe_offload.worker.copies.driver import load_library
from safe_offload.worker.copies.gpu import GpuBackend
from safe_offload.worker.memory.host_memory import HostMemory
from tests.simulator.vllm_setup import EngineShape
from tests.worker.copies.contract import PATIENCE_S, Bytes, Subject
from tests.worker.machines import SLOTS_PER_SLAB, make_storage
from tests.worker.memory.pools import is_closed

DELAY_CYCLES_MAX = 3_000_000
"""About two milliseconds."""


def sleep_on(stream: torch.cuda.Stream, amount: float) -> None:
    """Hold up a stream: 0 not at all, 1 for about two milliseconds."""
    if amount:
        with torch.cuda.stream(stream):
            torch.cuda._sleep(int(amount * DELAY_CYCLES_MAX))


class Gate:
    """Holds a stream until it is opened: the stream waits for a number in host memory."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._flag = torch.zeros(1, dtype=torch.int32, pin_memory=True)
        is_hip = torch.version.hip is not None
        library = load_library(is_hip=is_hip)
        arguments = (
            ctypes.c_void_p(stream.cuda_stream),
            ctypes.c_void_p(self._flag.data_ptr()),
            ctypes.c_uint32(1),
            ctypes.c_uint(0),  # until the number is at least 1
        )
        if is_hip:
            status = library.hipStreamWaitValue32(*arguments, ctypes.c_uint32(0xFFFFFFFF))
        else:
            status = library.cuStreamWaitValue32_v2(*arguments)
        assert status == 0, f"the stream cannot be held: {status}"

    def open(self) -> None:
        """Let the stream go on."""
        self._flag[0] = 1


class TorchSubject(Subject):
    """The GPU backend over a GPU."""

    def __init__(
        self,
        geometry: Geometry,
        num_slots: int,
        path: CopyPath | None = None,
        slots_per_slab: int = 7,
    ) -> None:
        size_bytes = max(segment.end_bytes(geometry.num_blocks) for segment in geometry.segments)
        self.layout = HostLayout(geometry, num_slots, min(slots_per_slab, num_slots))
        self.storage = torch.zeros(size_bytes + 64, dtype=torch.uint8, device="cuda:0")
        self.host = HostMemory.allocate(self.layout.size_bytes)
        self.device = Device(self.storage.device)
        self.backend = GpuBackend(
            self.device, self.storage.data_ptr(), self.layout, self.host, path
        )
        self._gates: list[Gate] = []
        end_s = time.monotonic() + PATIENCE_S
        while self.backend.num_usable_slots < num_slots and time.monotonic() < end_s:
            time.sleep(0.001)

    def stream(self, direction: Direction) -> torch.cuda.Stream:
        """On which the backend copies."""
        return self.backend.lanes[direction].stream

    def read_storage(self) -> Bytes:
        return self.storage.cpu().numpy()

    def write_storage(self, content: Bytes) -> None:
        self.storage.copy_(torch.from_numpy(content).pin_memory(), non_blocking=True)

    def hold(self, direction: Direction) -> Callable[[], None]:
        return self.hold_stream(self.stream(direction))

    def hold_stream(self, stream: torch.cuda.Stream) -> Callable[[], None]:
        """Keep what comes on a stream from running until the returned function is called."""
        self._gates.append(Gate(stream))
        return self._gates[-1].open

    def is_host_memory_free(self) -> bool:
        return is_closed(self.host) and self.backend.num_usable_slots == 0

    def end(self) -> None:
        """Close what a test has left open."""
        for gate in self._gates:
            gate.open()
        self.backend.close()


class TorchMachine:
    """See `tensor_core.Machine`; `delay_factor` makes all delays of its streams longer."""

    delay_factor = 1.0

    def __init__(
        self, shape: EngineShape, geometry: Geometry, num_slots: int, path: CopyPath | None = None
    ) -> None:
        self.storage = make_storage(shape).cuda(0)
        layout = HostLayout(geometry, num_slots, SLOTS_PER_SLAB)
        host = HostMemory.allocate(layout.size_bytes)
        device = Device(self.storage.device)
        self.backend = GpuBackend(device, self.storage.data_ptr(), layout, host, path)

    def enqueue(self, operation: Callable[[], object]) -> Callable[[], None]:
        operation()
        event = torch.cuda.Event()
        event.record()
        return event.synchronize

    def delay(self, where: Direction | None, amount: float) -> None:
        stream = torch.cuda.current_stream() if where is None else self.backend.lanes[where].stream
        sleep_on(stream, amount * self.delay_factor)

    def to_device(self, numbers: list[int]) -> torch.Tensor:
        return (
            torch.from_numpy(np.array(numbers, np.int64))
            .pin_memory()
            .to(self.storage.device, non_blocking=True)
        )

    def close(self) -> None:
        torch.cuda.synchronize()
