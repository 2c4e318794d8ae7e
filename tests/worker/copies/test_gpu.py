"""The GPU backend over a device of threads: the contract on every copy path, locking, failures."""

import asyncio
import contextlib
import gc
import itertools
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from safe_offload.errors import TransferError
from safe_offload.layout import PAGE_BYTES, Geometry, HostLayout, Segment, make_geometry
from safe_offload.protocol import FailureReason, MemoryFacts, MemoryKind, Transfer, ids_of
from safe_offload.worker.copies import gpu as gpu_backend
from safe_offload.worker.copies import lane as lane_module
from safe_offload.worker.copies import row_kernel
from safe_offload.worker.copies.base import Copy, CopyPath, Direction
from safe_offload.worker.copies.device import Device
from safe_offload.worker.copies.gpu import GpuBackend
from safe_offload.worker.memory import page_lock, placement
from safe_offload.worker.memory.host_memory import HostMemory
from tests.worker.copies import lane_storm
from tests.worker.copies.contract import (
    GEOMETRIES,
    NUM_BLOCKS,
    NUM_SLOTS,
    PATIENCE_S,
    BackendContract,
    Bytes,
    Subject,
    _layers_outermost,
)
from tests.worker.copies.fake_device import CALLS, FakeGpu
from tests.worker.driven import DrivenTransfers, drained
from tests.worker.memory.pools import is_closed
from tests.worker.watched_loop import HandClock

SLOTS_PER_SLAB = 7


class FakeGpuSubject(Subject):
    """The GPU backend over a device of threads."""

    def __init__(
        self,
        geometry: Geometry,
        num_slots: int,
        *,
        path: CopyPath | None = None,
        gpu: FakeGpu | None = None,
        slots_per_slab: int = SLOTS_PER_SLAB,
    ) -> None:
        size_bytes = max(segment.end_bytes(geometry.num_blocks) for segment in geometry.segments)
        self.layout = HostLayout(geometry, num_slots, min(slots_per_slab, num_slots))
        self.gpu = gpu or FakeGpu()
        self.host = HostMemory.allocate(self.layout.size_bytes)
        self._memory = np.zeros(size_bytes + 64 + 16, np.uint8)
        self.storage = self._memory[-self._memory.ctypes.data % 16 :][: size_bytes + 64]
        self.device = self.gpu.open()
        self.backend = GpuBackend(
            self.device, self.storage.ctypes.data, self.layout, self.host, path
        )
        self._releases: list[threading.Event] = []

    def wait_until_locked(self) -> None:
        """Wait until every slab that can be locked is."""
        self.wait_until(
            lambda: (
                self.backend.num_usable_slots >= self.layout.num_slots
                or len(self.gpu.locked) >= self.gpu.num_lockable
            )
        )

    @staticmethod
    def wait_until(is_met: Callable[[], bool]) -> None:
        end_s = time.monotonic() + PATIENCE_S
        while not is_met() and time.monotonic() < end_s:
            time.sleep(0.001)

    def read_storage(self) -> Bytes:
        self.gpu.compute.synchronize()
        return self.storage.copy()

    def write_storage(self, content: Bytes) -> None:
        self.gpu.compute.enqueue(lambda: np.copyto(self.storage, content))

    def hold(self, direction: Direction) -> Callable[[], None]:
        released = threading.Event()
        self._releases.append(released)
        self.backend.lanes[direction].stream.enqueue(lambda: released.wait(PATIENCE_S))
        return released.set

    def is_host_memory_free(self) -> bool:
        return is_closed(self.host) and not self.gpu.locked

    def end(self) -> None:
        self.gpu.may_lock.set()
        for released in self._releases:
            released.set()
        self.backend.close()
        self.gpu.close()
        assert self.gpu.violations == []


@pytest.fixture(autouse=True)
def _quick_locking(monkeypatch, request):
    """Small slabs are many, and the system takes long to say where they lie."""
    monkeypatch.setattr(page_lock, "PAUSE_S", 0.0)
    if "is_logged" not in request.node.name:
        pages = placement.Pages(99, {1: 100})
        monkeypatch.setattr(placement, "pages_of", lambda *_: pages)


@pytest.fixture
def make_gpu():
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
def subject(make_gpu):
    return make_gpu()


@pytest.mark.parametrize("path", CopyPath)
class TestDuringCapture(BackendContract):
    """vLLM captures graphs while memory is locked, and may capture again later.

    What is right there is right without a capture too, which refuses nothing.
    """

    @pytest.fixture
    def make_subject(self, make_gpu, path):
        gpus: list[FakeGpu] = []
        with contextlib.ExitStack() as captures:

            def make(geometry: Geometry, count: int) -> FakeGpuSubject:
                gpus.append(FakeGpu())
                captures.enter_context(gpus[-1].capturing())
                return make_gpu(geometry, count, path=path, gpu=gpus[-1])

            yield make
            for gpu in gpus:
                assert gpu.capture is not None
                assert gpu.capture.invalidated_by == ""


# ---- which way ---------------------------------------------------------------------------------


def calls_of(subject: FakeGpuSubject, direction: Direction, blocks: list[int]) -> set[str]:
    """What the driver is asked to do for one copy, apart from the upload of ids."""
    subject.gpu.calls.clear()
    asyncio.run(subject.copy(direction, blocks, list(range(len(blocks)))))
    calls = subject.gpu.calls
    return set(calls[1:] if "launch" in calls else calls)


MANY = list(range(0, 20, 2))


@pytest.mark.parametrize(
    ("path", "calls"),
    [(CopyPath.BATCH, {"copy_batch"}), (CopyPath.EACH, {"copy"}), (CopyPath.KERNEL, {"launch"})],
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
    long = make_geometry([Segment(1 << 17, 0, 1 << 17)], NUM_BLOCKS, NUM_BLOCKS << 17)
    assert calls_of(make_gpu(long), Direction.LOAD, list(range(0, 22, 1))[::-1]) == {"copy_batch"}


def test_a_driver_without_the_batched_call_copies_one_by_one(make_gpu):
    subject = make_gpu(gpu=FakeGpu("cuMemcpyBatchAsync"))
    assert calls_of(subject, Direction.STORE, MANY) == {"copy"}


@pytest.mark.parametrize(("has_cupy", "offset"), [(False, 0), (True, 1 << 40)])
def test_without_a_kernel_or_an_address_for_it_everything_is_batched(make_gpu, has_cupy, offset):
    for path in (None, CopyPath.KERNEL):
        gpu = FakeGpu(has_cupy=has_cupy)
        gpu.device_offset = offset
        assert calls_of(make_gpu(gpu=gpu, path=path), Direction.LOAD, MANY) == {"copy_batch"}


@pytest.mark.parametrize(
    ("installed", "fix"),
    [
        ({}, "pip install 'safe-offload[cuda13]' (cupy is not installed, and torch is"),
        ({"cupy-cuda13x": "14.2.0"}, "python -c 'import cupy; cupy.show_config()' shows"),
    ],
)
def test_without_a_kernel_the_log_says_which_cupy_to_install(
    make_gpu, caplog, monkeypatch, installed, fix
):
    """Which it is in other cases: test_row_kernel.py."""
    monkeypatch.setattr(row_kernel, "installed_cupy", lambda: installed)
    make_gpu(gpu=FakeGpu(has_cupy=False), path=CopyPath.KERNEL)
    (line,) = (line for line in caplog.messages if "without the copy kernel" in line)
    assert f"(ImportError: No module named 'cupy'). Fix: {fix}" in line


# ---- locking -----------------------------------------------------------------------------------


@pytest.fixture
def locking(make_gpu):
    """Only the first slab is locked, until `may_lock` is set."""
    gpu = FakeGpu()
    gpu.may_lock.clear()
    return make_gpu(gpu=gpu, path=CopyPath.EACH, waits=False)  # nothing is compiled meanwhile


def test_the_first_slab_is_locked_at_once_and_the_others_one_by_one(locking):
    backend, gpu = locking.backend, locking.gpu
    first = backend.memory
    assert (backend.num_usable_slots, backend.num_slots) == (SLOTS_PER_SLAB, NUM_SLOTS)
    assert first is backend.memory
    assert first.kind is MemoryKind.LOCKING
    gpu.may_lock.set()
    locking.wait_until_locked()
    assert backend.num_usable_slots == NUM_SLOTS
    assert len(gpu.locked) == locking.layout.num_slabs == 5
    assert set(gpu.locked.values()) == {locking.layout.slab_bytes}
    locking.wait_until(lambda: backend.memory is not first)
    assert backend.memory == MemoryFacts(MemoryKind.PAGE_LOCKED, "99 %", (1,))


def test_no_slab_is_locked_while_the_backend_is_undisturbed(locking):
    """A driver that locks lets copies wait: the self-test took seconds beside it."""
    with locking.backend.undisturbed():
        locking.gpu.may_lock.set()  # the slab that is under way ends
        time.sleep(0.05)
        assert len(locking.gpu.locked) <= 2
    locking.wait_until_locked()
    assert locking.backend.num_usable_slots == NUM_SLOTS


def test_a_slab_whose_pause_ends_while_the_backend_is_undisturbed_is_not_begun(
    make_gpu, monkeypatch
):
    turn = threading.Event()

    class Event(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            if timeout != page_lock.PAUSE_S:
                return super().wait(timeout)
            return turn.wait(PATIENCE_S) and self.is_set()

    monkeypatch.setattr(page_lock, "PAUSE_S", 30.0)
    stand_in = SimpleNamespace(Event=Event, Thread=threading.Thread)
    monkeypatch.setattr(page_lock, "threading", stand_in)
    locking = make_gpu(path=CopyPath.EACH, waits=False)
    with locking.backend.undisturbed():
        turn.set()
        time.sleep(0.05)
        assert len(locking.gpu.locked) == 1
    locking.wait_until_locked()


def test_a_backend_that_is_closed_while_undisturbed_ends(locking):
    with locking.backend.undisturbed():
        locking.gpu.may_lock.set()
        locking.backend.close()
    assert not locking.gpu.locked


def test_locking_in_the_background_does_not_invalidate_a_capture(locking):
    with locking.gpu.capturing() as capture:
        locking.gpu.may_lock.set()
        locking.wait_until_locked()
    assert capture.invalidated_by == ""
    assert locking.backend.num_usable_slots == NUM_SLOTS


def test_a_slab_that_is_refused_because_of_a_capture_is_tried_again(locking, monkeypatch, caplog):
    monkeypatch.setattr(page_lock, "RETRY_S", 0.001)
    locking.gpu.refused["lock"] = 900
    locking.gpu.may_lock.set()
    time.sleep(0.05)
    assert locking.backend.num_usable_slots == SLOTS_PER_SLAB
    del locking.gpu.refused["lock"]
    locking.wait_until_locked()
    assert locking.backend.num_usable_slots == NUM_SLOTS
    assert not [record for record in caplog.records if record.levelname == "WARNING"]


def test_what_was_locked_and_how_it_lies_is_logged(make_gpu, caplog):
    with caplog.at_level("INFO"):
        make_gpu(num_slots=SLOTS_PER_SLAB).backend.close()
    assert "Page-locked" in caplog.text
    assert "in huge pages" in caplog.text


async def test_memory_that_is_not_locked_is_used_as_it_is(make_gpu, caplog):
    gpu = FakeGpu()
    gpu.num_lockable = 0
    subject = make_gpu(gpu=gpu)
    assert subject.backend.num_usable_slots == NUM_SLOTS
    assert "Fix: raise the limit for locked memory" in caplog.text
    assert subject.backend.memory.kind is MemoryKind.PAGEABLE
    storage, host = subject.fill(1)
    await subject.copy(Direction.STORE, [3], [30])
    assert set(gpu.calls[-3:]) == {"copy"}, "the copy engines cannot reach it by batch"
    subject.arrive(Direction.STORE, ([3], [30]), storage, host)
    subject.assert_holds(storage, host)


def test_a_driver_that_stops_locking_leaves_a_smaller_pool(make_gpu, caplog):
    gpu = FakeGpu()
    gpu.num_lockable = 2
    subject = make_gpu(gpu=gpu)
    subject.wait_until(lambda: "and then refused" in caplog.text)
    subject.backend.close()
    assert "and then refused (cudaHostRegister: CUDA_ERROR_FAKE (2))" in caplog.text
    assert subject.is_host_memory_free()


def test_a_machine_whose_memory_runs_short_has_a_smaller_pool(make_gpu, monkeypatch, caplog):
    """Else the kernel ends the server."""
    looks = iter([1 << 40, 0, 0])
    monkeypatch.setattr(page_lock, "available_host_bytes", lambda: next(looks))
    subject = make_gpu(waits=False)
    subject.wait_until(lambda: subject.backend.memory.kind is MemoryKind.PAGE_LOCKED)
    assert subject.backend.num_usable_slots == 2 * SLOTS_PER_SLAB
    assert "for the whole pool" in caplog.text


def test_the_driver_is_left_alone_for_as_long_as_it_was_held(make_gpu, monkeypatch):
    """Captures of graphs and the first requests wait for it meanwhile."""
    held: list[tuple[float, float]] = []
    gpu, real_lock = FakeGpu(), Device.lock
    gpu.lock_delay_s = 0.03

    def lock(device: Any, address: int, size_bytes: int) -> None:
        begin_s = time.monotonic()
        real_lock(device, address, size_bytes)
        held.append((begin_s, time.monotonic()))

    monkeypatch.setattr(Device, "lock", lock)
    make_gpu(gpu=gpu)
    assert len(held) == 5
    for (begin_s, end_s), (next_s, _) in itertools.pairwise(held):
        assert next_s - end_s >= end_s - begin_s


def test_256_gib_are_planned_by_what_was_measured_and_not_waited_for(monkeypatch, caplog):
    """The memory is never touched: a driver that does nothing, and addresses that nothing has."""
    gpu = FakeGpu()
    gpu.lock_delay_s = 0.05
    monkeypatch.setattr(page_lock, "touch", lambda *place: None)
    monkeypatch.setattr(page_lock, "available_host_bytes", lambda: 1 << 40)
    geometry = make_geometry([Segment(1 << 20, 0, 1 << 20)], 1000, 1000 << 20)
    layout = HostLayout.in_slabs(geometry, 256 << 10, page_lock.SLAB_BYTES)
    with caplog.at_level("INFO"):
        lock = page_lock.PageLock(gpu.open(), 1 << 44, layout)
    assert (layout.num_slabs, layout.size_bytes) == (512, 256 << 30)
    assert 0 < lock.num_usable_slots < 256 << 10
    (told,) = [record for record in caplog.records if "in the background" in record.message]
    size, gb_per_s, seconds = told.args
    assert size == "256.00 GiB"
    assert gb_per_s < 512 * 2**20 / 1e9 / 0.1, "the pause as long as the lock is counted"
    assert seconds == pytest.approx((256 << 30) * 511 / 512 / 1e9 / gb_per_s)
    assert lock.close(), "it stops in the middle"
    assert not gpu.locked
    gpu.close()


def test_pages_are_touched_before_the_driver_locks_them(make_gpu, monkeypatch):
    touched: list[tuple[int, int]] = []
    monkeypatch.setattr(page_lock, "touch", lambda *place: touched.append(place))
    subject = make_gpu()
    assert touched == list(subject.gpu.locked.items())


def test_touching_gives_every_page_and_changes_none():
    size_bytes = 3 * page_lock.TOUCH_BYTES + PAGE_BYTES
    host = HostMemory.allocate(size_bytes)
    memory = host.tensor.numpy()
    memory[7 * PAGE_BYTES] = 5
    page_lock.touch(memory.ctypes.data, size_bytes)
    smaps = Path("/proc/self/smaps").read_text().split("VmFlags")
    (mapped,) = [part for part in smaps if f"{memory.ctypes.data:x}-" in part]
    resident_kib = int(mapped.partition("Rss:")[2].split()[0])
    assert resident_kib << 10 >= size_bytes
    assert memory[7 * PAGE_BYTES] == 5
    del memory
    host.close()


def test_memory_that_the_driver_does_not_let_go_of_is_not_unmapped(make_gpu, caplog):
    """It may still be written to."""
    subject = make_gpu()
    subject.gpu.refused["unlock"] = 1
    subject.backend.close()
    assert "stays page-locked until exit" in caplog.text
    assert not is_closed(subject.host)
    del subject.gpu.refused["unlock"]
    subject.gpu.locked.clear()


def close_elsewhere(subject: FakeGpuSubject) -> threading.Thread:
    """Close the backend on another thread."""
    closing = threading.Thread(target=subject.backend.close, daemon=True)
    closing.start()
    return closing


def test_closing_ends_the_locking(locking):
    closing = close_elsewhere(locking)
    locking.gpu.may_lock.set()
    closing.join(PATIENCE_S)
    assert not closing.is_alive()
    assert locking.is_host_memory_free()


def test_a_thread_that_never_used_the_device_can_close(make_gpu):
    """Otherwise memory would be unmapped while it is still registered."""
    subject = make_gpu()
    subject.gpu.violations.clear()
    close_elsewhere(subject).join(PATIENCE_S)
    assert subject.is_host_memory_free()
    assert subject.gpu.violations == []


def test_slow_unlocking_is_not_taken_for_a_copy_that_hangs(make_gpu):
    subject = make_gpu()
    transfers = DrivenTransfers(subject.backend, 1 << 20)
    subject.gpu.may_unlock.clear()
    join = transfers.loop.join

    def unlock_and_join(timeout_s: float) -> None:
        """Unlocking ends only once the copies are known to have ended."""
        subject.gpu.may_unlock.set()
        join(timeout_s)

    transfers.loop.join = unlock_and_join
    assert transfers.close(PATIENCE_S)
    assert subject.is_host_memory_free()


# ---- order -------------------------------------------------------------------------------------


@pytest.mark.parametrize("direction", Direction)
async def test_a_copy_waits_for_the_compute_stream_as_it_was_when_it_was_submitted(
    subject, direction
):
    released = threading.Event()
    subject.gpu.compute.enqueue(lambda: released.wait(PATIENCE_S))
    behind = subject.issue(direction, [1], [1])
    done = asyncio.ensure_future(behind.wait())
    assert behind.given.wait(PATIENCE_S)
    assert not behind.event.point.wait(0.05)
    released.set()
    await asyncio.wait_for(done, PATIENCE_S)


async def test_what_the_compute_stream_is_given_later_does_not_hold_up_a_copy(subject):
    released = threading.Event()
    mark = subject.backend.mark()
    subject.gpu.compute.enqueue(lambda: released.wait(PATIENCE_S))
    copy = Copy(Direction.STORE, np.array([1]), np.array([1]))
    await asyncio.wait_for(subject.backend.issue(copy, mark).wait(), PATIENCE_S)
    released.set()


@pytest.mark.parametrize("is_fenced", [True, False])
async def test_a_fence_holds_the_compute_stream_and_not_the_host(subject, is_fenced):
    storage, host = subject.fill(2)
    release = subject.hold(Direction.STORE)
    completion = subject.issue(Direction.STORE, [5], [5])
    if is_fenced:
        assert subject.backend.fence(completion, PATIENCE_S)
    overwritten = threading.Event()
    subject.write_storage(storage ^ 0xFF)
    subject.gpu.compute.enqueue(overwritten.set)
    if not is_fenced:
        assert overwritten.wait(PATIENCE_S)
    assert overwritten.is_set() is not is_fenced
    release()
    await asyncio.wait_for(completion.wait(), PATIENCE_S)
    subject.arrive(Direction.STORE, ([5], [5]), storage, host)
    assert np.array_equal(subject.read_host(), host) is is_fenced


@pytest.mark.parametrize("is_joined", [True, False])
def test_a_forward_overtakes_a_load_unless_it_is_joined_and_the_host_waits_for_neither(
    subject, is_joined
):
    storage, host = subject.fill(2)
    release = subject.hold(Direction.LOAD)
    completion = subject.issue(Direction.LOAD, [5], [5])
    if is_joined:
        assert subject.backend.join(completion)
    read: list[Bytes] = []
    subject.gpu.compute.enqueue(lambda: read.append(subject.storage.copy()))
    if not is_joined:
        subject.gpu.compute.synchronize()
    assert bool(read) is not is_joined
    release()
    assert outcome_of(completion) is None
    subject.gpu.compute.synchronize()
    before = storage.copy()
    subject.arrive(Direction.LOAD, ([5], [5]), storage, host)
    assert np.array_equal(read[0], storage if is_joined else before)


@pytest.mark.parametrize("call", [CALLS[CopyPath.EACH], "record"])
def test_a_load_that_fails_is_waited_for_all_the_same_and_said_to_have_failed(make_gpu, call):
    """Its blocks are computed anew."""
    subject = make_gpu(path=CopyPath.EACH)
    mark = subject.backend.mark()
    release = subject.hold(Direction.LOAD)
    copy = Copy(Direction.LOAD, np.array([5]), np.array([5]))
    subject.gpu.refused[call] = 1
    completion = subject.backend.issue(copy, mark)
    assert completion.given.wait(PATIENCE_S)
    subject.gpu.refused.clear()
    is_over: list[bool] = []

    def end() -> None:
        is_over.append(True)
        release()

    threading.Timer(0.05, end).start()
    assert not subject.backend.join(completion)
    seen: list[bool] = []
    subject.gpu.compute.enqueue(lambda: seen.append(bool(is_over)))
    subject.gpu.compute.synchronize()
    assert seen == [True]
    assert outcome_of(completion) is FailureReason.COPY_FAILED


def test_a_load_in_a_step_goes_by_the_next_path_when_one_fails(make_gpu):
    subject = make_gpu(path=CopyPath.BATCH)
    transfers = DrivenTransfers(subject.backend, 1 << 30)
    storage, host = subject.fill(3)
    subject.gpu.refused["copy_batch"] = 1
    transfer = Transfer(1, ids_of([5, 6]), ids_of([5, 6]))
    assert transfers.load_now(transfer, subject.backend.mark())
    subject.arrive(Direction.LOAD, ([5, 6], [5, 6]), storage, host)
    subject.assert_holds(storage, host)
    assert transfers.close(PATIENCE_S)
    assert transfers.drain() == [(1, None)]
    assert subject.backend.paths == (CopyPath.EACH,)


async def test_a_long_prompt_is_copied_by_several_launches(make_gpu, monkeypatch):
    """A launch keeps its multiprocessors from the forward until it ends."""
    subject = make_gpu(path=CopyPath.KERNEL)
    monkeypatch.setattr(gpu_backend.row_kernel, "LAUNCH_BYTES", 4 * subject.backend.slot_bytes)
    pairs = list(range(1, 12)), list(range(20, 9, -1))
    await subject.check_copy(Direction.STORE, pairs, seed=5)
    assert subject.gpu.calls.count("launch") == 3


# ---- who gives copies to the driver ------------------------------------------------------------


class HeldDriver:
    """Holds up each call that gives a copy to the lane of a direction, until it is let through."""

    def __init__(self, subject: FakeGpuSubject, *directions: Direction) -> None:
        self._streams = [subject.backend.lanes[direction].stream for direction in directions]
        self._come, self._may_go = threading.Semaphore(0), threading.Semaphore(0)
        subject.gpu.on_give = self._hold

    def wait_for_call(self) -> None:
        """Wait until a call is held up."""
        assert self._come.acquire(timeout=PATIENCE_S), "nothing is given to the driver"

    def let_through(self, num_calls: int) -> None:
        """Let calls go on, now or when they come."""
        self._may_go.release(num_calls)

    def _hold(self, stream: object) -> None:
        if stream in self._streams:
            self._come.release()
            assert self._may_go.acquire(timeout=PATIENCE_S)


ALL_CALLS = 1 << 20
MANY_BLOCKS = 3000
SCATTERED = list(range(0, MANY_BLOCKS, 2))
"""Of two layers: 3,000 ranges, which the driver is given in three pieces or more."""


@pytest.fixture
def large(make_gpu):
    """A GPU with room for copies of many ranges."""
    geometry = _layers_outermost(MANY_BLOCKS, 8, 8)
    return make_gpu(geometry, MANY_BLOCKS, slots_per_slab=MANY_BLOCKS, path=CopyPath.BATCH)


def issue_held(subject: FakeGpuSubject, driver: HeldDriver, direction: Direction) -> Any:
    """Issue a copy of several pieces, the first of which the driver is about to take."""
    completion = subject.issue(direction, SCATTERED, SCATTERED)
    driver.wait_for_call()
    return completion


def outcome_of(completion: Any) -> FailureReason | None:
    """How a copy ends."""
    try:
        completion.future.result(PATIENCE_S)
    except TransferError as error:
        return error.reason
    return None


@pytest.mark.parametrize("direction", Direction)
def test_the_first_piece_is_short_so_that_a_copy_starts_soon(large, monkeypatch, direction):
    pieces: list[int] = []
    driver = large.device.driver
    give = driver.copy_batch

    def see(ranges: Any, *how: Any) -> None:
        pieces.append(len(ranges))
        give(ranges, *how)

    monkeypatch.setattr(driver, "copy_batch", see)
    assert outcome_of(large.issue(direction, SCATTERED, SCATTERED)) is None
    assert pieces[0] == lane_module.FIRST_PIECE_RANGES < max(pieces)
    assert sum(pieces) == 2 * len(SCATTERED)


@pytest.mark.parametrize("held", Direction)
def test_what_the_driver_takes_long_for_holds_up_neither_caller_nor_other_direction(large, held):
    other = Direction.STORE if held is Direction.LOAD else Direction.LOAD
    driver = HeldDriver(large, held)
    first = issue_held(large, driver, held)
    assert outcome_of(large.issue(other, [1], [1])) is None
    assert not first.future.done()
    driver.let_through(ALL_CALLS)
    assert outcome_of(first) is None
    assert large.gpu.calls.count("copy_batch") >= 3 + 1


def test_a_fence_waits_for_a_piece_of_another_store_and_not_for_all_of_it(large):
    driver = HeldDriver(large, Direction.STORE)
    first = issue_held(large, driver, Direction.STORE)
    second = large.issue(Direction.STORE, [1], [1])

    def fence() -> None:
        large.device.bind_thread()
        large.backend.fence(second, PATIENCE_S)

    fencing = threading.Thread(target=fence, daemon=True)
    fencing.start()
    large.wait_until(lambda: second.is_urgent)
    driver.let_through(2)
    fencing.join(PATIENCE_S)
    assert not fencing.is_alive()
    assert outcome_of(second) is None
    driver.wait_for_call()
    assert not first.future.done()
    driver.let_through(ALL_CALLS)
    assert outcome_of(first) is None


@pytest.mark.parametrize("direction", Direction)
def test_a_copy_that_is_given_up_half_way_ends_when_what_was_given_has_ended(large, direction):
    """Its blocks and slots are given to others then."""
    release = large.hold(direction)
    driver = HeldDriver(large, direction)
    first = issue_held(large, driver, direction)
    assert not first.cancel()
    driver.let_through(ALL_CALLS)
    assert first.given.wait(PATIENCE_S)
    assert large.backend.fence(first, 0.0)
    with pytest.raises(TimeoutError):
        first.future.result(0.2)
    release()
    assert outcome_of(first) is FailureReason.CANCELLED
    assert large.gpu.calls.count("copy_batch") == 1
    assert outcome_of(large.issue(direction, SCATTERED, SCATTERED)) is None


def test_a_copy_of_which_nothing_was_given_is_taken_back_at_once(large):
    driver = HeldDriver(large, Direction.STORE)
    first = issue_held(large, driver, Direction.STORE)
    second = large.issue(Direction.STORE, [1], [1])
    assert second.cancel()
    assert outcome_of(second) is FailureReason.CANCELLED
    assert large.backend.fence(second, 0.0), "there is nothing to wait for"
    driver.let_through(ALL_CALLS)
    assert outcome_of(first) is None


def test_a_store_that_is_not_given_in_time_for_its_fence_is_given_up(large):
    driver = HeldDriver(large, Direction.STORE)
    first = issue_held(large, driver, Direction.STORE)
    assert not large.backend.fence(first, 0.0)
    driver.let_through(ALL_CALLS)
    assert outcome_of(first) is FailureReason.CANCELLED
    assert large.gpu.calls.count("copy_batch") == 1


def test_a_load_that_is_overdue_half_way_is_not_gone_on_with(large):
    clock = HandClock()
    transfers = DrivenTransfers(large.backend, 1 << 30, make_event_loop=clock.new_event_loop)
    driver = HeldDriver(large, Direction.LOAD)
    transfers.submit(Direction.LOAD, Transfer(1, ids_of(SCATTERED), ids_of(SCATTERED)))
    driver.wait_for_call()
    clock.advance(transfers.loop, 31.0)
    assert drained(transfers) == [], "the piece may still write"
    driver.let_through(ALL_CALLS)
    transfers.wait_for_news(PATIENCE_S)
    assert transfers.drain() == [(1, FailureReason.CANCELLED)]
    assert large.gpu.calls.count("copy_batch") == 1
    assert transfers.close(PATIENCE_S)


def test_what_is_refused_in_the_middle_is_not_gone_on_with(large):
    driver = HeldDriver(large, Direction.LOAD)
    copy = issue_held(large, driver, Direction.LOAD)
    large.gpu.refused["copy_batch"] = 700
    driver.let_through(ALL_CALLS)
    assert outcome_of(copy) is FailureReason.COPY_FAILED
    assert large.gpu.calls.count("copy_batch") == 1


def test_loads_go_before_stores_that_are_not_fenced(large, monkeypatch):
    monkeypatch.setattr(lane_module, "PIECE_S", PATIENCE_S)
    loads = HeldDriver(large, Direction.LOAD)
    load = issue_held(large, loads, Direction.LOAD)
    store = large.issue(Direction.STORE, SCATTERED, SCATTERED)
    assert not store.given.wait(0.05)
    assert not store.has_begun
    fenced = large.issue(Direction.STORE, [1], [1])
    assert large.backend.fence(fenced, PATIENCE_S)
    assert not store.has_begun
    assert not load.future.done()
    loads.let_through(ALL_CALLS)
    assert outcome_of(load) is outcome_of(store) is None


@pytest.mark.parametrize("path", CopyPath)
def test_copies_of_every_size_keep_to_their_own_bytes_when_some_are_given_up(make_gpu, path):
    num_slots = lane_storm.NUM_BLOCKS
    subject = make_gpu(lane_storm.geometry(), num_slots, slots_per_slab=num_slots, path=path)
    counts = lane_storm.run_storm(subject, seed=1, num_rounds=4)
    assert counts[True] >= 4 * 4


def test_a_driver_that_is_slow_is_given_shorter_pieces(large):
    lane = large.backend.lanes[Direction.STORE]
    lane.keep_pace(1024, 4 * lane_module.PIECE_S)
    assert lane.num_ranges == 256
    lane.keep_pace(1, 9.0)
    assert lane.num_ranges == lane_module.PIECE_RANGES_MIN
    lane.keep_pace(1, 0.0)
    assert lane.num_ranges == lane_module.PIECE_RANGES


def test_a_path_that_fails_in_both_directions_at_once_is_left_once(large):
    driver = HeldDriver(large, *Direction)
    copies = [large.issue(direction, [1], [1]) for direction in Direction]
    for _ in copies:
        driver.wait_for_call()
    large.gpu.refused["copy_batch"] = 1
    driver.let_through(ALL_CALLS)
    assert {outcome_of(copy) for copy in copies} == {FailureReason.COPY_FAILED}
    assert large.backend.num_demotions == 1
    assert large.backend.paths == (CopyPath.EACH,)


def test_a_copy_whose_end_the_device_refuses_to_tell_fails_when_it_has_ended(large):
    mark = large.backend.mark()
    release = large.hold(Direction.STORE)
    large.gpu.refused["record"] = 1
    completion = large.backend.issue(Copy(Direction.STORE, np.array([1]), np.array([1])), mark)
    assert completion.given.wait(PATIENCE_S)
    assert not completion.future.done()
    release()
    assert outcome_of(completion) is FailureReason.COPY_FAILED


# ---- failures ----------------------------------------------------------------------------------


@pytest.mark.parametrize("path", CopyPath)
async def test_a_copy_that_is_refused_has_failed_when_nothing_of_it_runs(make_gpu, path):
    subject = make_gpu(path=path)
    release = subject.hold(Direction.STORE)
    subject.gpu.refused[CALLS[path]] = 1
    completion = subject.issue(Direction.STORE, [1], [1])
    assert completion.given.wait(PATIENCE_S)
    assert not completion.future.done()
    release()
    with pytest.raises(TransferError, match=path.value) as caught:
        await asyncio.wait_for(completion.wait(), PATIENCE_S)
    assert caught.value.reason is FailureReason.COPY_FAILED
    subject.gpu.refused.clear()
    await subject.copy(Direction.STORE, [1], [1])


async def test_the_ids_of_a_launch_that_is_refused_stay_until_their_upload_is_over(make_gpu):
    subject = make_gpu(path=CopyPath.KERNEL)
    release = subject.hold(Direction.LOAD)
    subject.gpu.refused["launch"] = 1
    completion = subject.issue(Direction.LOAD, [1], [1])
    assert completion.given.wait(PATIENCE_S)
    gc.collect()
    release()
    with pytest.raises(TransferError):
        await asyncio.wait_for(completion.wait(), PATIENCE_S)
    assert subject.gpu.violations == []


async def test_ids_lie_in_memory_of_the_stream_that_uses_them(make_gpu):
    subject = make_gpu(path=CopyPath.KERNEL)
    for direction in Direction:
        await subject.copy(direction, [1, 2], [3, 4])
    assert subject.gpu.violations == []


async def test_a_path_that_fails_is_left_for_the_next_and_the_last_one_is_kept(make_gpu, caplog):
    subject = make_gpu(path=CopyPath.KERNEL)
    left = list(CopyPath)
    for path in CopyPath:
        assert subject.backend.paths == tuple(left)
        subject.gpu.refused[CALLS[path]] = 1
        with pytest.raises(TransferError, match=path.value):
            await subject.copy(Direction.LOAD, [1], [1])
        left.remove(path)
    assert subject.backend.paths == (CopyPath.EACH,)
    assert subject.backend.num_demotions == 2
    assert caplog.text.count(", which may be slower") == 2
    assert (
        'Copy path "kernel" failed (CUDA error 1 in launch). Falling back to "batch"' in caplog.text
    )
    subject.gpu.refused.clear()
    await subject.copy(Direction.LOAD, [1], [1])


async def test_a_moment_without_device_memory_is_no_reason_to_leave_the_kernel(make_gpu):
    subject = make_gpu(path=CopyPath.KERNEL)
    subject.gpu.refused["empty"] = 2
    subject.gpu.calls.clear()
    await subject.copy(Direction.LOAD, [1], [1])
    assert set(subject.gpu.calls) == {"copy_batch"}
    del subject.gpu.refused["empty"]
    subject.gpu.calls.clear()
    await subject.copy(Direction.LOAD, [1], [1])
    assert "launch" in subject.gpu.calls
    assert subject.backend.num_demotions == 0
    assert subject.backend.paths == tuple(CopyPath)


async def test_without_a_home_the_kernel_is_compiled_in_memory(make_gpu, caplog, monkeypatch):
    monkeypatch.delenv("CUPY_CACHE_IN_MEMORY", raising=False)
    gpu = FakeGpu()
    gpu.has_read_only_home = True
    with caplog.at_level("INFO"):
        subject = make_gpu(gpu=gpu, path=CopyPath.KERNEL)
    assert "cupy cannot cache compiled kernels" in caplog.text
    assert "CUPY_CACHE_IN_MEMORY" not in os.environ
    assert subject.backend.paths == tuple(CopyPath)
    await subject.copy(Direction.LOAD, [1], [1])
    assert "launch" in gpu.calls


async def test_a_copy_that_is_refused_because_of_a_capture_leaves_its_path_in_use(make_gpu):
    subject = make_gpu(path=CopyPath.BATCH)
    subject.gpu.refused["copy_batch"] = 900
    with pytest.raises(TransferError, match="900"):
        await subject.copy(Direction.LOAD, [1], [1])
    assert subject.backend.paths == (CopyPath.BATCH, CopyPath.EACH)
    assert subject.backend.num_demotions == 0


async def test_an_error_of_the_device_fails_the_copy_and_not_the_thread(subject):
    subject.gpu.is_broken = True
    for _ in range(3):
        with pytest.raises(TransferError, match="illegal memory access") as caught:
            await subject.copy(Direction.LOAD, [1], [1])
        assert caught.value.reason is FailureReason.COPY_FAILED
    subject.gpu.is_broken = False
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
    closing = close_elsewhere(subject)
    assert not stored
    release()
    closing.join(PATIENCE_S)
    for i, completion in enumerate(issued):
        await asyncio.wait_for(completion.wait(), PATIENCE_S)
        for in_storage, in_host in subject.ranges(i, i):
            np.testing.assert_array_equal(stored[0][in_host], storage[in_storage])
