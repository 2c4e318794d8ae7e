"""What goes wrong on a GPU: bad addresses, shutdown in the middle, memory that is not locked."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from safe_offload.errors import DeviceError, TransferError
from safe_offload.protocol import FailureReason, Transfer
from safe_offload.worker.backends.base import Direction
from safe_offload.worker.backends.driver import Driver
from safe_offload.worker.backends.gpu import CopyPath
from safe_offload.worker.backends.ranges import RangeTable
from safe_offload.worker.engine import TransferEngine
from tests.gpu.torch_gpu import TorchSubject
from tests.worker.backends.contract import GEOMETRIES, NUM_SLOTS

LAYERS = GEOMETRIES["layers outermost"]

ILLEGAL_KERNEL = """
import asyncio
from safe_offload.errors import TransferError
from safe_offload.worker.backends.base import Direction
from safe_offload.worker.backends.gpu import CopyPath
from tests.gpu.torch_gpu import TorchSubject
from tests.worker.backends.contract import GEOMETRIES

subject = TorchSubject(GEOMETRIES["layers outermost"], 31, CopyPath.KERNEL)
buffer = subject.backend._segments
buffer.host[:] = 1 << 20
stream = subject.stream(Direction.LOAD)
size_bytes = buffer.host.nbytes
subject.backend._driver.copy(
    buffer.device_address, buffer.host_address, size_bytes, stream.cuda_stream
)
stream.synchronize()

async def fails() -> None:
    for direction in Direction:
        try:
            await subject.copy(direction, [1], [1])
        except TransferError as error:
            print("failed:", error)
        else:
            raise SystemExit("a copy through illegal addresses went well")

asyncio.run(fails())
subject.backend.close()
print("alive")
"""


@pytest.mark.parametrize("path", [CopyPath.BATCH, CopyPath.EACH])
async def test_an_address_that_the_driver_refuses_fails_one_copy_only(path):
    subject = TorchSubject(LAYERS, NUM_SLOTS, path)
    good = subject.backend._table
    subject.backend._table = RangeTable(0x10, 0x10, subject.layout)
    with pytest.raises(TransferError) as caught:
        await subject.copy(Direction.STORE, [1], [1])
    assert caught.value.reason is FailureReason.COPY_FAILED
    subject.backend._table = good
    await subject.copy(Direction.STORE, [1], [1])
    subject.end()


def test_a_kernel_that_goes_astray_fails_every_copy_and_leaves_the_process_alive():
    """The device is lost to the process then (CUDA: cudaErrorIllegalAddress is sticky)."""
    child = subprocess.run(
        [sys.executable, "-c", ILLEGAL_KERNEL], capture_output=True, text=True, timeout=120
    )
    assert child.stdout.count("failed:") == 2, child.stderr
    assert child.stdout.rstrip().endswith("alive"), child.stderr
    assert child.returncode == 0


def test_shutdown_in_the_middle_of_copies_ends_them_all():
    subject = TorchSubject(LAYERS, NUM_SLOTS)
    engine = TransferEngine(subject.backend, 1 << 20)
    engine.start()
    for index in range(200):
        direction = list(Direction)[index % 2]
        engine.submit(direction, Transfer(index, (index % 20,), (index % NUM_SLOTS,)))
    assert engine.close(timeout_s=30.0)
    assert len(engine.drain()) == 200
    assert subject.is_host_memory_free()


async def test_memory_that_the_driver_does_not_lock_is_used_as_it_is(monkeypatch):
    def refuse(self: Driver, address: int, size_bytes: int) -> None:
        raise DeviceError("refused by the test")

    monkeypatch.setattr(Driver, "lock", refuse)
    subject = TorchSubject(LAYERS, NUM_SLOTS)
    assert subject.backend._lock.is_pageable
    storage, host = subject.fill(1)
    await subject.copy(Direction.STORE, [1, 5, 6], [2, 9, 10])
    for block, slot in ((1, 2), (5, 9), (6, 10)):
        for in_storage, in_host in subject.ranges(block, slot):
            host[in_host] = storage[in_storage]
    np.testing.assert_array_equal(subject.read_host(), host)
    subject.end()
