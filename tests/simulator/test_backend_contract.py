"""The simulator's backend keeps the contract of the real ones: what it lets pass, they let pass."""

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from safe_offload.layout import Geometry, HostLayout
from safe_offload.worker.copies.base import Direction
from tests.simulator.chance import Chance
from tests.simulator.device import Device, DeviceOptions, Memory, SimBackend, SimCopy
from tests.simulator.virtual_loop import Clock
from tests.worker.copies.contract import BackendContract, Bytes, Subject


class Futures:
    """The part of an event loop that the backend asks for."""

    def create_future(self) -> asyncio.Future[None]:
        return asyncio.get_running_loop().create_future()


class HoldingDevice(Device):
    """A device on which one direction can be held."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.held: set[Direction] = set()

    def _may_move(self, copy: SimCopy) -> bool:
        return copy.copy.direction not in self.held and super()._may_move(copy)


class Ticking:
    """A copy that moves while something waits for it."""

    def __init__(self, device: Device, copy: SimCopy) -> None:
        self._device = device
        self._copy = copy

    async def wait(self) -> None:
        while not self._copy.has_ended:
            self._device.advance_compute(1)
            self._device.tick()
            await asyncio.sleep(0)
        await self._copy.wait()

    def cancel(self) -> bool:
        return self._copy.cancel()


class SimSubject(Subject):
    """The simulator's backend; a word of its memory is one segment's row of a block."""

    def __init__(self, geometry: Geometry, num_slots: int, options: DeviceOptions) -> None:
        self.layout = HostLayout.in_one_slab(geometry, num_slots)
        size_bytes = max(segment.end_bytes(geometry.num_blocks) for segment in geometry.segments)
        self._gaps = np.zeros(size_bytes + 64, np.uint8)
        memory = Memory.empty(geometry.num_blocks, num_slots, len(geometry.segments))
        self.device = HoldingDevice(0, memory, options, Chance(1), Clock())
        self.backend = SimBackend(self.device, Futures(), geometry.slot_bytes)
        self.write_storage(self._gaps)
        self.write_host(np.zeros(self.layout.size_bytes, np.uint8))

    def issue(self, direction: Direction, blocks: list[int], slots: list[int]) -> Any:
        return Ticking(self.device, super().issue(direction, blocks, slots))

    def _rows(self, block: int) -> list[slice]:
        return [in_storage for in_storage, _ in self.ranges(block, 0)]

    def read_storage(self) -> Bytes:
        self.device.synchronize(self.device.num_enqueued)
        content = self._gaps.copy()
        for block, words in enumerate(self.device.memory.gpu):
            for row, word in zip(self._rows(block), words, strict=True):
                content[row] = np.frombuffer(word, np.uint8)
        return content

    def write_storage(self, content: Bytes) -> None:
        def write() -> None:
            self._gaps = content.copy()
            for block, words in enumerate(self.device.memory.gpu):
                words[:] = [content[row].tobytes() for row in self._rows(block)]

        self.device.enqueue(write)

    def read_host(self) -> Bytes:
        content = np.zeros(self.layout.size_bytes, np.uint8)
        for slot, words in enumerate(self.device.memory.host):
            for (offset, length), word in zip(self.layout.ranges_of(slot), words, strict=True):
                content[offset : offset + length] = np.frombuffer(word, np.uint8)
        return content

    def write_host(self, content: Bytes) -> None:
        for slot, words in enumerate(self.device.memory.host):
            rows = self.layout.ranges_of(slot)
            words[:] = [content[offset : offset + length].tobytes() for offset, length in rows]

    def hold(self, direction: Direction) -> Callable[[], None]:
        self.device.held.add(direction)
        return lambda: self.device.held.discard(direction)

    def is_host_memory_free(self) -> bool:
        return self.backend._is_closed


class Contract(BackendContract):
    """What both kinds of device are asked."""

    @pytest.fixture(autouse=True)
    def _unwrap(self, monkeypatch):
        """A fence is asked of the copy itself, not of what waits for it."""
        fence, join = SimBackend.fence, SimBackend.join
        monkeypatch.setattr(SimBackend, "join", lambda backend, copy: join(backend, copy._copy))
        monkeypatch.setattr(
            SimBackend, "fence", lambda backend, copy, left_s: fence(backend, copy._copy, left_s)
        )


class TestDeviceWithStreams(Contract):
    @pytest.fixture
    def make_subject(self):
        options = DeviceOptions(has_streams=True, copy_ticks_max=5)
        return lambda geometry, num_slots: SimSubject(geometry, num_slots, options)


class TestDeviceWithoutStreams(Contract):
    @pytest.fixture
    def make_subject(self):
        options = DeviceOptions(copy_ticks_max=5)
        return lambda geometry, num_slots: SimSubject(geometry, num_slots, options)


del Contract, BackendContract  # only what inherits from them is a test
