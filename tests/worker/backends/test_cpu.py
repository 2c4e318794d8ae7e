"""The backend for a KV cache in host memory: the contract, and what only it does."""

from __future__ import annotations

import asyncio
import ctypes
import errno
import threading
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch

from safe_offload.errors import ConfigError, TransferError
from safe_offload.layout import Geometry, HostLayout, Segment, make_geometry
from safe_offload.protocol import FailureReason
from safe_offload.worker.backends import cpu
from safe_offload.worker.backends.base import Direction
from safe_offload.worker.backends.cpu import CpuBackend
from safe_offload.worker.backends.ranges import Ranges, RangeTable
from safe_offload.worker.host_memory import HostMemory
from tests.worker.backends.contract import (
    GEOMETRIES,
    NUM_SLOTS,
    PATIENCE_S,
    BackendContract,
    Bytes,
    MakeSubject,
    Subject,
)

HAS_READV = cpu._find_gather() is not cpu._move_each


class CpuSubject(Subject):
    """The CPU backend over two tensors."""

    def __init__(self, geometry: Geometry, num_slots: int, num_threads: int = 1) -> None:
        size_bytes = max(segment.end_bytes(geometry.num_blocks) for segment in geometry.segments)
        self.layout = HostLayout.in_one_slab(geometry, num_slots)
        self.storage = torch.zeros(size_bytes + 64, dtype=torch.uint8)
        self.host = HostMemory.allocate(self.layout.size_bytes)
        self.backend = CpuBackend(self.storage.data_ptr(), self.layout, self.host, num_threads)
        self.started = {direction: threading.Semaphore(0) for direction in Direction}
        self._releases: list[threading.Event] = []
        self._run = self.backend._run

    def read_storage(self) -> Bytes:
        return self.storage.numpy().copy()

    def write_storage(self, content: Bytes) -> None:
        self.storage.numpy()[:] = content

    def read_host(self) -> Bytes:
        return self.host.tensor.numpy().copy()

    def write_host(self, content: Bytes) -> None:
        self.host.tensor.numpy()[:] = content

    def hold(self, direction: Direction) -> Callable[[], None]:
        released = threading.Event()
        self._releases.append(released)
        run = self.backend._run

        def held_run(copy: cpu.Copy) -> None:
            if copy.direction is direction:
                self.started[direction].release()
                assert released.wait(PATIENCE_S)
            run(copy)

        self.backend._run = held_run
        return released.set

    def is_host_memory_free(self) -> bool:
        return self.host.is_closed

    def wait_until_started(self, direction: Direction) -> None:
        """Wait until a thread has taken a held copy."""
        assert self.started[direction].acquire(timeout=PATIENCE_S)

    def end(self) -> None:
        for released in self._releases:
            released.set()
        self.backend.close()


@pytest.fixture
def make_cpu_subject() -> Iterator[Callable[..., CpuSubject]]:
    subjects: list[CpuSubject] = []

    def make(geometry: Geometry, num_slots: int, num_threads: int = 1) -> CpuSubject:
        subjects.append(CpuSubject(geometry, num_slots, num_threads))
        return subjects[-1]

    yield make
    for subject in subjects:
        subject.end()


@pytest.fixture
def subject(make_cpu_subject: Callable[..., CpuSubject]) -> CpuSubject:
    return make_cpu_subject(GEOMETRIES["layers outermost"], NUM_SLOTS)


@pytest.mark.skipif(not HAS_READV, reason="process_vm_readv is not allowed here")
class TestGatheringBySystemCall(BackendContract):
    @pytest.fixture
    def make_subject(self, make_cpu_subject: Callable[..., CpuSubject]) -> MakeSubject:
        return make_cpu_subject


class TestMovingOneByOne(BackendContract):
    @pytest.fixture
    def make_subject(
        self, make_cpu_subject: Callable[..., CpuSubject], monkeypatch: pytest.MonkeyPatch
    ) -> MakeSubject:
        monkeypatch.setattr(cpu, "_find_gather", lambda: cpu._move_each)
        return make_cpu_subject


class TestSeveralThreads(BackendContract):
    @pytest.fixture
    def make_subject(self, make_cpu_subject: Callable[..., CpuSubject]) -> MakeSubject:
        return lambda geometry, num_slots: make_cpu_subject(geometry, num_slots, num_threads=3)


# ---- taking copies back ------------------------------------------------------------------------


async def test_a_copy_that_no_thread_has_taken_is_taken_back(subject):
    release = subject.hold(Direction.LOAD)
    running = subject.issue(Direction.LOAD, [0], [0])
    subject.wait_until_started(Direction.LOAD)
    queued = subject.issue(Direction.LOAD, [1], [1])
    assert queued.cancel()
    assert queued.cancel()
    assert not running.cancel()
    with pytest.raises(TransferError, match="taken back"):
        await asyncio.wait_for(queued.wait(), PATIENCE_S)
    release()
    await asyncio.wait_for(running.wait(), PATIENCE_S)


# ---- long and short runs -------------------------------------------------------------------------


def spy(subject: CpuSubject, monkeypatch: pytest.MonkeyPatch) -> tuple[list[int], list[int]]:
    """Lengths of what is gathered, and of what is moved one by one."""
    gathered: list[int] = []
    moved: list[int] = []
    gather, move = subject.backend._gather, cpu._move_each

    def spy_gather(ranges):
        gathered.extend(map(int, ranges.lengths))
        gather(ranges)

    def spy_move(ranges):
        moved.extend(map(int, ranges.lengths))
        move(ranges)

    subject.backend._gather = spy_gather
    monkeypatch.setattr(cpu, "_move_each", spy_move)
    return gathered, moved


async def test_long_runs_are_moved_and_short_ones_gathered(make_cpu_subject, monkeypatch):
    row = cpu.LONG_RUN_BYTES // 2
    geometry = make_geometry([Segment(row, 0, row)], 10, 10 * row)
    subject = make_cpu_subject(geometry, 10)
    gathered, moved = spy(subject, monkeypatch)
    storage, _ = subject.fill(1)
    await subject.copy(Direction.STORE, [0, 1, 2, 5], [0, 1, 2, 9])
    assert moved == [3 * row]
    assert gathered == [row]
    stored = subject.read_host()
    assert np.array_equal(stored[: 3 * row], storage[: 3 * row])
    assert np.array_equal(stored[9 * row :], storage[5 * row : 6 * row])


# ---- the system call ---------------------------------------------------------------------------


class FakeReadv:
    """Stands for `process_vm_readv`: copies nothing, answers what it is told."""

    def __init__(self, answers: Callable[[int], int], error: int = 0) -> None:
        self.counts: list[int] = []
        self._answers = answers
        self._error = error

    def __call__(self, pid, local, num_local, remote, num_remote, flags) -> int:
        assert num_local == num_remote
        assert flags == 0
        self.counts.append(num_local)
        lengths = (ctypes.c_uint64 * (2 * num_local)).from_address(local)[1::2]
        ctypes.set_errno(self._error)
        return self._answers(sum(lengths))


@pytest.fixture
def fake_libc(monkeypatch: pytest.MonkeyPatch) -> Callable[[object], None]:
    def set_libc(readv: object) -> None:
        class Libc:
            def __init__(self, *args: object, **kwargs: object) -> None:
                if readv is not None:
                    self.process_vm_readv = readv

        monkeypatch.setattr(cpu.ctypes, "CDLL", Libc)

    return set_libc


def test_a_system_without_the_call_moves_one_by_one(fake_libc):
    fake_libc(None)
    assert cpu._find_gather() is cpu._move_each


def test_a_container_that_refuses_the_call_moves_one_by_one(fake_libc):
    fake_libc(FakeReadv(lambda expected: -1, errno.EPERM))
    assert cpu._find_gather() is cpu._move_each


def test_a_call_that_says_it_copied_and_did_not_is_not_trusted(fake_libc):
    fake_libc(FakeReadv(lambda expected: expected))
    assert cpu._find_gather() is cpu._move_each


@pytest.mark.parametrize(
    ("answer", "detail"),
    [(lambda expected: -1, "Bad address"), (lambda expected: expected - 8, "160 bytes")],
)
async def test_a_call_that_copies_too_little_fails_the_copy(fake_libc, answer, detail):
    working = FakeReadv(lambda expected: 8)

    def readv(pid, local, num_local, remote, num_remote, flags):
        if not working.counts:  # the probe: 8 bytes
            working.counts.append(1)
            ctypes.memmove(*(ctypes.c_uint64.from_address(at).value for at in (local, remote)), 8)
            return 8
        ctypes.set_errno(errno.EFAULT)
        return answer(168)

    fake_libc(readv)
    subject = CpuSubject(make_geometry([Segment(168, 0, 168)], 4, 4 * 168), 4)
    with pytest.raises(TransferError, match=detail) as caught:
        await subject.copy(Direction.STORE, [0], [0])
    assert caught.value.reason is FailureReason.COPY_FAILED
    subject.end()


@pytest.mark.skipif(not HAS_READV, reason="process_vm_readv is not allowed here")
async def test_an_address_that_is_not_mapped_fails_the_copy_and_not_the_process(make_cpu_subject):
    geometry = make_geometry([Segment(64, 0, 64)], 8, 512)
    subject = make_cpu_subject(geometry, 8)
    subject.backend._table = RangeTable(0, subject.host.tensor.data_ptr(), subject.layout)
    with pytest.raises(TransferError) as caught:
        await subject.copy(Direction.STORE, [1, 3], [1, 3])
    assert caught.value.reason is FailureReason.COPY_FAILED


def test_no_call_has_more_ranges_than_the_kernel_takes():
    lengths = np.full(2 * cpu.IOV_MAX + 5, 4, np.uint64)
    source = np.arange(len(lengths), dtype=np.uint32)
    target = np.zeros_like(source)
    steps = np.arange(len(lengths), dtype=np.uint64) * np.uint64(4)
    gather = cpu._find_gather()
    order = np.random.default_rng(1).permutation(len(lengths))
    gather(
        Ranges(
            np.uint64(target.ctypes.data) + steps,
            np.uint64(source.ctypes.data) + steps[order],
            lengths,
        )
    )
    np.testing.assert_array_equal(target, source[order])


# ---- waiting -----------------------------------------------------------------------------------


async def test_a_fence_waits_until_the_copy_has_read(subject):
    release = subject.hold(Direction.STORE)
    completion = subject.issue(Direction.STORE, [0], [0])
    subject.wait_until_started(Direction.STORE)
    answers: list[bool] = []
    fenced = threading.Thread(
        target=lambda: answers.append(subject.backend.fence(completion, PATIENCE_S)), daemon=True
    )
    fenced.start()
    fenced.join(0.02)
    assert fenced.is_alive()
    release()
    fenced.join(PATIENCE_S)
    assert answers == [True]


def test_a_fence_says_no_when_the_copy_is_held_back(subject):
    release = subject.hold(Direction.STORE)
    completion = subject.issue(Direction.STORE, [0], [0])
    subject.wait_until_started(Direction.STORE)
    assert not subject.backend.fence(completion, 0.01)
    release()
    assert subject.backend.fence(completion, PATIENCE_S)


def test_a_fence_on_a_copy_that_failed_is_kept(subject):
    def fail(copy):
        raise TransferError(FailureReason.COPY_FAILED, "told to")

    subject.backend._run = fail
    completion = subject.issue(Direction.STORE, [0], [0])
    assert subject.backend.fence(completion, PATIENCE_S)


# ---- closing -----------------------------------------------------------------------------------


async def test_closing_waits_for_copies_that_run_and_fails_those_that_do_not(subject):
    storage, _ = subject.fill(3)
    release = subject.hold(Direction.STORE)
    running = subject.issue(Direction.STORE, [5], [6])
    subject.wait_until_started(Direction.STORE)
    queued = [subject.issue(Direction.STORE, [i], [i]) for i in range(3)]
    stored: list[Bytes] = []
    close_host = subject.host.close

    def close_and_look() -> None:
        if not stored:
            stored.append(subject.read_host())
        close_host()

    subject.host.close = close_and_look
    closing = threading.Thread(target=subject.backend.close, daemon=True)
    closing.start()
    for completion in queued:
        with pytest.raises(TransferError) as caught:
            await asyncio.wait_for(completion.wait(), PATIENCE_S)
        assert caught.value.reason is FailureReason.CANCELLED
        assert subject.backend.fence(completion, PATIENCE_S), "nothing reads its source any more"
    assert closing.is_alive()
    assert not stored, "the memory went while a copy was running"
    release()
    closing.join(PATIENCE_S)
    assert not closing.is_alive()
    await asyncio.wait_for(running.wait(), PATIENCE_S)
    for in_storage, in_host in subject.ranges(5, 6):
        np.testing.assert_array_equal(stored[0][in_host], storage[in_storage])


@pytest.mark.parametrize("running", Direction)
def test_closing_starts_no_copy_of_one_direction_while_it_waits_for_the_other(subject, running):
    """While `close` waits for a copy of one direction, the other's queue must not go on."""
    other = Direction.LOAD if running is Direction.STORE else Direction.STORE
    release_running, release_other = subject.hold(running), subject.hold(other)
    subject.issue(running, [0], [0])
    subject.wait_until_started(running)
    subject.issue(other, [1], [1])
    subject.wait_until_started(other)
    queued = subject.issue(other, [2], [2])
    closing = threading.Thread(target=subject.backend.close, daemon=True)
    closing.start()
    assert subject.backend.fence(queued, PATIENCE_S)
    assert queued.future.cancelled()
    release_other()
    release_running()
    closing.join(PATIENCE_S)
    assert not closing.is_alive()


async def test_a_waiter_that_is_cancelled_is_told_so_while_the_copy_goes_on(subject):
    release = subject.hold(Direction.STORE)
    completion = subject.issue(Direction.STORE, [0], [0])
    subject.wait_until_started(Direction.STORE)
    waiter = asyncio.ensure_future(completion.wait())
    await asyncio.sleep(0)
    waiter.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiter
    assert not completion.future.done()
    release()
    assert subject.backend.fence(completion, PATIENCE_S)


def test_no_thread_is_left_after_close(make_cpu_subject):
    before = set(threading.enumerate())
    subject = make_cpu_subject(GEOMETRIES["one layer"], NUM_SLOTS, num_threads=3)
    for direction in Direction:
        completions = [subject.issue(direction, [i], [i]) for i in range(6)]
        assert all(subject.backend.fence(c, PATIENCE_S) for c in completions)
    subject.backend.close()
    assert set(threading.enumerate()) <= before


# ---- threads -----------------------------------------------------------------------------------


def refuse_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)


@pytest.mark.parametrize("num_threads", [1, 3])
async def test_no_thread_has_to_be_started_for_a_copy(make_cpu_subject, monkeypatch, num_threads):
    """A pool that cannot start one raises, and runs the copy all the same when it can again."""
    subject = make_cpu_subject(GEOMETRIES["layers outermost"], NUM_SLOTS, num_threads)
    before = threading.active_count()
    refuse_threads(monkeypatch)
    for block in range(8):
        await subject.copy(Direction.STORE, [block], [block])
        await subject.copy(Direction.LOAD, [block], [block])
    assert threading.active_count() == before


def test_a_system_that_refuses_threads_is_a_config_error_at_start(subject, monkeypatch):
    refuse_threads(monkeypatch)
    before = threading.active_count()
    with pytest.raises(ConfigError, match=r"refused .* thread.*ulimit -u"):
        CpuSubject(GEOMETRIES["layers outermost"], NUM_SLOTS, num_threads=2)
    assert threading.active_count() == before
