"""What goes wrong on a GPU: bad addresses, shutdown in the middle, memory that is not locked."""

from __future__ import annotations

import subprocess
import sys
import time
from unittest.mock import Mock

import pytest
import torch

from safe_offload.errors import DeviceError
from safe_offload.layout import Segment, make_geometry
from safe_offload.protocol import MemoryKind, Transfer
from safe_offload.worker.copies.base import CopyPath, Direction
from safe_offload.worker.copies.device import Device
from safe_offload.worker.loop_thread import LoopThread
from safe_offload.worker.transfers import Transfers
from tests.gpu.torch_gpu import TorchSubject
from tests.worker.copies.contract import GEOMETRIES, NUM_SLOTS

LAYERS = GEOMETRIES["layers outermost"]

ILLEGAL_KERNEL = """
import time
from safe_offload.config.options import OffloadConfig
from safe_offload.protocol import StepPlan, Transfer, ids_of
from safe_offload.worker.copies.base import CopyPath, Direction
from safe_offload.worker.bridge import WorkerBridge
from safe_offload.worker.loop_thread import LoopThread
from safe_offload.worker.opening import Opened, Opening
from safe_offload.worker.memory.shared_memory import ALONE
from safe_offload.worker.transfers import Transfers
from tests.gpu.torch_gpu import TorchSubject
from tests.worker.copies.contract import GEOMETRIES

subject = TorchSubject(GEOMETRIES["layers outermost"], 31, CopyPath.KERNEL)
subject.backend.use((CopyPath.KERNEL,))
buffer = subject.backend._segments
buffer[0][:] = 1 << 20
stream = subject.stream(Direction.LOAD)
subject.device.upload(buffer, stream)
stream.synchronize()

config = OffloadConfig()
opening = Opening(
    config=config,
    kv_cache_config=None,
    rank=0,
    num_ranks_on_host=1,
    namespace_facts_of=lambda *_: None,
)
bridge = WorkerBridge(opening)
transfers = Transfers(subject.backend, LoopThread(), 1 << 20)
bridge.attach(Opened(transfers, subject.backend, ALONE, subject.storage))

def copy(transfer_id, kind, start):
    copied = Transfer(transfer_id, ids_of([1]), ids_of([1]))
    bridge.bind_connector_metadata(StepPlan(**{kind: (copied,)}))
    start()
    outcomes = ()
    while not outcomes:
        time.sleep(0.001)
        report = bridge.build_connector_worker_meta()
        outcomes = report.outcomes if report is not None else ()
    print("failed:", outcomes[0].failure)

copy(1, "loads", bridge.start_load_kv)
copy(2, "stores_after_forward", bridge.wait_for_save)
bridge.shutdown()
print("alive")
"""


async def test_a_moment_without_device_memory_is_no_reason_to_leave_the_kernel():
    subject = TorchSubject(LAYERS, NUM_SLOTS, CopyPath.KERNEL)
    storage, host = subject.fill(1)
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(0.0)
    try:
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(64 << 20, dtype=torch.uint8, device="cuda:0")
        await subject.copy(Direction.STORE, [1], [2])
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    await subject.copy(Direction.STORE, [5], [9])
    assert subject.backend.paths[0] is CopyPath.KERNEL
    assert subject.backend.num_demotions == 0
    subject.arrive(Direction.STORE, ([1, 5], [2, 9]), storage, host)
    subject.assert_holds(storage, host)
    subject.end()


def test_the_driver_is_held_for_a_part_of_the_time_only_while_memory_is_locked(monkeypatch):
    """Pages are touched before, and each pause is as long as the lock before it."""
    held: list[tuple[float, float]] = []
    lock = Device.lock

    def timed(self: Device, address: int, size_bytes: int) -> None:
        begin_s = time.monotonic()
        lock(self, address, size_bytes)
        held.append((begin_s, time.monotonic()))

    monkeypatch.setattr(Device, "lock", timed)
    row_bytes = 64 << 20
    geometry = make_geometry([Segment(row_bytes, 0, row_bytes)], 1, row_bytes)
    subject = TorchSubject(geometry, 16, slots_per_slab=4)
    total_s = held[-1][1] - held[0][0]
    assert len(held) == 4
    assert sum(end_s - begin_s for begin_s, end_s in held) < 0.6 * total_s
    subject.end()


def run_child(source: str) -> subprocess.CompletedProcess[str]:
    """Run Python of its own, which may crash."""
    command = [sys.executable, "-c", source]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def test_a_kernel_that_goes_astray_fails_every_copy_and_leaves_the_process_alive():
    """The device is lost to the process then (CUDA: cudaErrorIllegalAddress is sticky).

    From then on torch raises wherever the connector asks it for something, vLLM's thread included.
    """
    child = run_child(ILLEGAL_KERNEL)
    assert child.stdout.count("failed: FailureReason.COPY_FAILED") == 2, child.stderr
    assert child.stdout.rstrip().endswith("alive"), child.stderr
    assert child.returncode == 0


def test_shutdown_in_the_middle_of_copies_ends_them_all():
    subject = TorchSubject(LAYERS, NUM_SLOTS)
    transfers = Transfers(subject.backend, LoopThread(), 1 << 20)
    for index in range(200):
        direction = list(Direction)[index % 2]
        transfers.submit(direction, Transfer(index, (index % 20,), (index % NUM_SLOTS,)))
    assert transfers.close(timeout_s=30.0)
    assert len(transfers.drain()) == 200
    assert subject.is_host_memory_free()


async def test_memory_that_the_driver_does_not_lock_is_used_as_it_is(monkeypatch):
    monkeypatch.setattr(Device, "lock", Mock(side_effect=DeviceError("refused by the test")))
    subject = TorchSubject(LAYERS, NUM_SLOTS)
    assert subject.backend.memory.kind is MemoryKind.PAGEABLE
    await subject.check_copy(Direction.STORE, ([1, 5, 6], [2, 9, 10]), seed=1)
    subject.end()
