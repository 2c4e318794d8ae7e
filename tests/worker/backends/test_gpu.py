"""The GPU backend over a device of threads: the contract on every copy path, locking, failures."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from safe_offload.errors import TransferError
from safe_offload.layout import Geometry, HostLayout, Segment, make_geometry
from safe_offload.protocol import FailureReason
from safe_offload.worker.backends import gpu
from safe_offload.worker.backends.base import Direction
from safe_offload.worker.backends.gpu import CopyPath, GpuBackend
from safe_offload.worker.host_memory import HostMemory
from tests.worker.backends.contract import (
    GEOMETRIES,
    NUM_BLOCKS,
    NUM_SLOTS,
    PATIENCE_S,
    BackendContract,
    Bytes,
    MakeSubject,
    Subject,
)
from tests.worker.backends.fake_device import FakeDevice

SLOTS_PER_SLAB = 7


class FakeGpuSubject(Subject):
    """The GPU backend over a device of threads."""

    def __init__(
        self,
        geometry: Geometry,
        num_slots: int,
        *,
        path: CopyPath | None = None,
        device: FakeDevice | None = None,
        slots_per_slab: int = SLOTS_PER_SLAB,
    ) -> None:
        size_bytes = max(segment.end_bytes(geometry.num_blocks) for segment in geometry.segments)
        self.layout = HostLayout(geometry, num_slots, min(slots_per_slab, num_slots))
        self.device = device or FakeDevice()
        self.host = HostMemory.allocate(self.layout.size_bytes)
        self._memory = np.zeros(size_bytes + 64 + 16, np.uint8)
        self.storage = self._memory[-self._memory.ctypes.data % 16 :][: size_bytes + 64]
        self.backend = GpuBackend(
            self.device, self.storage.ctypes.data, self.layout, self.host, path
        )
        self._releases: list[threading.Event] = []

    def wait_until_locked(self) -> None:
        """Wait until every slab that can be locked is."""
        self.backend._lock._thread.join(PATIENCE_S)

    def read_storage(self) -> Bytes:
        self.device.compute.synchronize()
        return self.storage.copy()

    def write_storage(self, content: Bytes) -> None:
        self.device.compute.enqueue(lambda: np.copyto(self.storage, content))

    def read_host(self) -> Bytes:
        return self.host.tensor.numpy().copy()

    def write_host(self, content: Bytes) -> None:
        self.host.tensor.numpy()[:] = content

    def hold(self, direction: Direction) -> Callable[[], None]:
        released = threading.Event()
        self._releases.append(released)
        self.backend._lanes[direction].stream.enqueue(lambda: released.wait(PATIENCE_S))
        return released.set

    def is_host_memory_free(self) -> bool:
        return self.host.is_closed and not self.device.driver.locked

    def end(self) -> None:
        self.device.driver.may_lock.set()
        for released in self._releases:
            released.set()
        self.backend.close()
        self.device.close()


MakeGpu = Callable[..., FakeGpuSubject]


@pytest.fixture
def make_gpu() -> Iterator[MakeGpu]:
    subjects: list[FakeGpuSubject] = []

    def make(
        geometry: Geometry = GEOMETRIES["layers outermost"],
        num_slots: int = NUM_SLOTS,
        *,
        waits: bool = True,
        **options: object,
    ) -> FakeGpuSubject:
        subjects.append(FakeGpuSubject(geometry, num_slots, **options))
        if waits:
            subjects[-1].wait_until_locked()
        return subjects[-1]

    yield make
    for subject in subjects:
        subject.end()


@pytest.fixture
def subject(make_gpu: MakeGpu) -> FakeGpuSubject:
    return make_gpu()


class TestBatchedCopies(BackendContract):
    @pytest.fixture
    def make_subject(self, make_gpu: MakeGpu) -> MakeSubject:
        return lambda geometry, count: make_gpu(geometry, count, path=CopyPath.BATCH)


class TestCopiesOneByOne(BackendContract):
    @pytest.fixture
    def make_subject(self, make_gpu: MakeGpu) -> MakeSubject:
        return lambda geometry, count: make_gpu(geometry, count, path=CopyPath.EACH)


class TestRowKernel(BackendContract):
    @pytest.fixture
    def make_subject(self, make_gpu: MakeGpu) -> MakeSubject:
        return lambda geometry, count: make_gpu(geometry, count, path=CopyPath.KERNEL)


class TestChosenByLength(BackendContract):
    @pytest.fixture
    def make_subject(self, make_gpu: MakeGpu) -> MakeSubject:
        return make_gpu


# ---- which way ---------------------------------------------------------------------------------


def calls_of(subject: FakeGpuSubject, direction: Direction, blocks: list[int]) -> set[str]:
    """What the driver is asked to do for one copy, apart from the upload of ids."""
    subject.device.driver.calls.clear()
    asyncio.run(subject.copy(direction, blocks, list(range(len(blocks)))))
    calls = subject.device.driver.calls
    return set(calls[1:] if "launch" in calls else calls)


MANY = list(range(0, 20, 2))


@pytest.mark.parametrize(
    ("path", "calls"),
    [
        (CopyPath.BATCH, {"copy_batch"}),
        (CopyPath.EACH, {"copy"}),
        (CopyPath.KERNEL, {"launch"}),
    ],
)
@pytest.mark.parametrize("direction", Direction)
def test_the_path_can_be_prescribed(make_gpu, path, calls, direction):
    assert calls_of(make_gpu(path=path), direction, MANY) == calls


def test_the_kernel_takes_many_short_loads_and_the_copy_engine_the_rest(make_gpu):
    subject = make_gpu(slots_per_slab=NUM_SLOTS)
    assert calls_of(subject, Direction.LOAD, MANY) == {"launch"}
    assert calls_of(subject, Direction.STORE, MANY) == {"copy_batch"}
    assert calls_of(subject, Direction.LOAD, [3, 9]) == {"copy_batch"}, "six ranges are few"
    assert calls_of(subject, Direction.LOAD, list(range(20))) == {"copy_batch"}, "one run"
    long = make_geometry([Segment(40_000, 0, 40_000)], NUM_BLOCKS, NUM_BLOCKS * 40_000)
    assert calls_of(make_gpu(long), Direction.LOAD, list(range(0, 22, 1))[::-1]) == {"copy_batch"}


def test_a_driver_without_the_batched_call_copies_one_by_one(make_gpu):
    subject = make_gpu(device=FakeDevice(has_batch=False))
    assert calls_of(subject, Direction.STORE, MANY) == {"copy"}


def test_without_a_kernel_everything_is_batched(make_gpu):
    for path in (None, CopyPath.KERNEL):
        subject = make_gpu(device=FakeDevice(has_kernel=False), path=path)
        assert calls_of(subject, Direction.LOAD, MANY) == {"copy_batch"}


def test_no_kernel_where_host_memory_has_another_address(make_gpu):
    subject = make_gpu(path=CopyPath.KERNEL)
    subject.device.driver.device_offset = 1 << 40
    assert calls_of(subject, Direction.LOAD, MANY) == {"copy_batch"}


# ---- locking -----------------------------------------------------------------------------------


def test_slots_become_usable_slab_by_slab(make_gpu):
    device = FakeDevice()
    device.driver.may_lock.clear()
    subject = make_gpu(device=device, waits=False)
    assert subject.backend.num_usable_slots == 0
    assert subject.backend.num_slots == NUM_SLOTS
    device.driver.may_lock.set()
    subject.wait_until_locked()
    assert subject.backend.num_usable_slots == NUM_SLOTS
    assert len(device.driver.locked) == subject.layout.num_slabs == 5
    assert set(device.driver.locked.values()) == {subject.layout.slab_bytes}


async def test_memory_that_is_not_locked_is_used_as_it_is(make_gpu, caplog):
    device = FakeDevice()
    device.driver.num_lockable = 0
    subject = make_gpu(device=device)
    assert subject.backend.num_usable_slots == NUM_SLOTS
    assert "Fix: raise the limit for locked memory" in caplog.text
    storage, host = subject.fill(1)
    await subject.copy(Direction.STORE, [3], [30])
    assert set(device.driver.calls[-3:]) == {"copy"}, "the copy engines cannot reach it by batch"
    for in_storage, in_host in subject.ranges(3, 30):
        host[in_host] = storage[in_storage]
    np.testing.assert_array_equal(subject.read_host(), host)


def test_a_driver_that_stops_locking_leaves_a_smaller_pool(make_gpu, caplog):
    device = FakeDevice()
    device.driver.num_lockable = 2
    subject = make_gpu(device=device)
    assert subject.backend.num_usable_slots == 2 * SLOTS_PER_SLAB
    assert "and then refused (cuMemHostRegister_v2: CUDA_ERROR_OUT_OF_MEMORY (2))" in caplog.text
    subject.backend.close()
    assert subject.is_host_memory_free()


def test_closing_ends_the_locking(make_gpu):
    device = FakeDevice()
    device.driver.may_lock.clear()
    subject = make_gpu(device=device, waits=False)
    closing = threading.Thread(target=subject.backend.close, daemon=True)
    closing.start()
    device.driver.may_lock.set()
    closing.join(PATIENCE_S)
    assert not closing.is_alive()
    assert subject.is_host_memory_free()


# ---- order -------------------------------------------------------------------------------------


@pytest.mark.parametrize("direction", Direction)
async def test_a_copy_waits_for_the_compute_stream_as_it_was_when_it_was_submitted(
    subject, direction
):
    released = threading.Event()
    subject.device.compute.enqueue(lambda: released.wait(PATIENCE_S))
    behind = subject.issue(direction, [1], [1])
    done = asyncio.ensure_future(behind.wait())
    await asyncio.sleep(0)
    assert not behind.future.done()
    released.set()
    await asyncio.wait_for(done, PATIENCE_S)


async def test_what_the_compute_stream_is_given_later_does_not_hold_up_a_copy(subject):
    released = threading.Event()
    mark = subject.backend.mark()
    subject.device.compute.enqueue(lambda: released.wait(PATIENCE_S))
    copy = gpu.Copy(Direction.STORE, np.array([1]), np.array([1]))
    await asyncio.wait_for(subject.backend.issue(copy, mark).wait(), PATIENCE_S)
    released.set()


@pytest.mark.parametrize("is_fenced", [True, False])
async def test_a_fence_holds_the_compute_stream_and_not_the_host(subject, is_fenced):
    storage, host = subject.fill(2)
    release = subject.hold(Direction.STORE)
    completion = subject.issue(Direction.STORE, [5], [5])
    if is_fenced:
        assert subject.backend.fence(completion, 0.0)
    overwritten = threading.Event()
    subject.write_storage(storage ^ 0xFF)
    subject.device.compute.enqueue(overwritten.set)
    if not is_fenced:
        assert overwritten.wait(PATIENCE_S)
    assert overwritten.is_set() is not is_fenced
    release()
    await asyncio.wait_for(completion.wait(), PATIENCE_S)
    for in_storage, in_host in subject.ranges(5, 5):
        host[in_host] = storage[in_storage]
    assert np.array_equal(subject.read_host(), host) is is_fenced


async def test_events_and_buffers_are_used_again(make_gpu):
    subject = make_gpu(path=CopyPath.KERNEL)
    made = [0, 0]
    make_event, make_buffer = subject.device.make_event, subject.device.make_buffer

    def count_event():
        made[0] += 1
        return make_event()

    def count_buffer(num_words):
        made[1] += 1
        return make_buffer(num_words)

    subject.device.make_event, subject.device.make_buffer = count_event, count_buffer
    for _ in range(20):
        await subject.copy(Direction.LOAD, [1, 2], [1, 2])
        await subject.copy(Direction.STORE, [1, 2], [1, 2])
    assert made[0] <= 4
    assert made[1] == 2


# ---- failures ----------------------------------------------------------------------------------


async def test_a_copy_that_the_driver_refuses_has_failed_when_nothing_of_it_runs(make_gpu):
    subject = make_gpu(path=CopyPath.BATCH)
    release = subject.hold(Direction.STORE)
    subject.device.driver.refuses_copies = True
    completion = subject.issue(Direction.STORE, [1], [1])
    assert not completion.future.done()
    release()
    with pytest.raises(TransferError, match="CUDA_ERROR_INVALID_VALUE") as caught:
        await asyncio.wait_for(completion.wait(), PATIENCE_S)
    assert caught.value.reason is FailureReason.COPY_FAILED
    subject.device.driver.refuses_copies = False
    await subject.copy(Direction.STORE, [1], [1])


async def test_an_error_of_the_device_fails_the_copy_and_not_the_thread(subject):
    subject.device.is_broken = True
    for _ in range(3):
        with pytest.raises(TransferError, match="illegal memory access") as caught:
            await subject.copy(Direction.LOAD, [1], [1])
        assert caught.value.reason is FailureReason.COPY_FAILED
    subject.device.is_broken = False
    await subject.copy(Direction.LOAD, [1], [1])


async def test_closing_waits_for_what_has_been_issued(subject):
    storage, _ = subject.fill(3)
    release = subject.hold(Direction.STORE)
    issued = [subject.issue(Direction.STORE, [i], [i]) for i in range(4)]
    stored: list[Bytes] = []
    close_host = subject.host.close

    def look_and_close() -> None:
        if not stored:
            stored.append(subject.read_host())
        close_host()

    subject.host.close = look_and_close
    closing = threading.Thread(target=subject.backend.close, daemon=True)
    closing.start()
    assert not stored
    release()
    closing.join(PATIENCE_S)
    for i, completion in enumerate(issued):
        await asyncio.wait_for(completion.wait(), PATIENCE_S)
        for in_storage, in_host in subject.ranges(i, i):
            np.testing.assert_array_equal(stored[0][in_host], storage[in_storage])


def test_no_thread_is_left_behind(make_gpu):
    before = set(threading.enumerate())
    subject = make_gpu()
    subject.end()
    assert set(threading.enumerate()) <= before
