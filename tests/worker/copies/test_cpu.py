"""The backend for a KV cache in host memory: the contract, and what only it does."""

import asyncio
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from safe_offload.errors import ConfigError, TransferError
from safe_offload.layout import Geometry, HostLayout, Segment, make_geometry
from safe_offload.protocol import FailureReason
from safe_offload.worker.copies import cpu
from safe_offload.worker.copies.base import Direction
from safe_offload.worker.copies.cpu import CpuBackend
from safe_offload.worker.copies.ranges import Ranges
from safe_offload.worker.copies.threads import DirectionThreads
from safe_offload.worker.memory.host_memory import HostMemory
from tests.worker.copies.contract import (
    GEOMETRIES,
    NUM_SLOTS,
    PATIENCE_S,
    BackendContract,
    Bytes,
    Subject,
)
from tests.worker.memory.pools import is_closed

NEEDS_COMPILED = pytest.mark.skipif(
    cpu.find_move() is cpu.move_each, reason="the loop was not compiled when this was installed"
)


class HeldThreads:
    """See `DirectionThreads`; the test keeps what they run from beginning."""

    def __init__(self, name: str, num_threads: int = 1) -> None:
        self._threads = DirectionThreads(name, num_threads)
        self._releases: list[threading.Event] = []
        self._held: dict[Direction, threading.Event] = {}
        self.started = {direction: threading.Semaphore(0) for direction in Direction}
        self.close = self._threads.close

    def submit(
        self, direction: Direction, function: Callable[..., None], *args: object
    ) -> Future[None]:
        return self._threads.submit(direction, self._run, direction, function, *args)

    def _run(self, direction: Direction, function: Callable[..., None], *args: object) -> None:
        if released := self._held.get(direction):
            self.started[direction].release()
            assert released.wait(PATIENCE_S)
        function(*args)

    def hold(self, direction: Direction) -> Callable[[], None]:
        """Hold what begins from now on; returns what lets it go."""
        self._held[direction] = threading.Event()
        self._releases.append(self._held[direction])
        return self._held[direction].set

    def release_all(self) -> None:
        for released in self._releases:
            released.set()


class CpuSubject(Subject):
    """The CPU backend over two tensors."""

    def __init__(self, geometry: Geometry, num_slots: int, num_threads: int = 1) -> None:
        size_bytes = max(segment.end_bytes(geometry.num_blocks) for segment in geometry.segments)
        self.layout = HostLayout.in_one_slab(geometry, num_slots)
        self.storage = torch.zeros(size_bytes + 64, dtype=torch.uint8)
        self.host = HostMemory.allocate(self.layout.size_bytes)
        self.threads = HeldThreads("safe-offload", num_threads)
        self.backend = CpuBackend(self.storage.data_ptr(), self.layout, self.host, self.threads)

    def read_storage(self) -> Bytes:
        return self.storage.numpy().copy()

    def write_storage(self, content: Bytes) -> None:
        self.storage.numpy()[:] = content

    def hold(self, direction: Direction) -> Callable[[], None]:
        return self.threads.hold(direction)

    def is_host_memory_free(self) -> bool:
        return is_closed(self.host)

    def wait_until_started(self, direction: Direction) -> None:
        """Wait until a thread has taken a held copy."""
        assert self.threads.started[direction].acquire(timeout=PATIENCE_S)

    def end(self) -> None:
        self.threads.release_all()
        self.backend.close()


@pytest.fixture
def make_cpu_subject():
    subjects: list[CpuSubject] = []

    def make(geometry: Geometry, num_slots: int, num_threads: int = 1) -> CpuSubject:
        subjects.append(CpuSubject(geometry, num_slots, num_threads))
        return subjects[-1]

    yield make
    for subject in subjects:
        subject.end()


@pytest.fixture
def subject(make_cpu_subject):
    return make_cpu_subject(GEOMETRIES["layers outermost"], NUM_SLOTS)


@NEEDS_COMPILED
class TestCompiledLoop(BackendContract):
    @pytest.fixture
    def make_subject(self, make_cpu_subject):
        return make_cpu_subject


class TestInterpretedLoop(BackendContract):
    @pytest.fixture
    def make_subject(self, make_cpu_subject, monkeypatch):
        monkeypatch.setattr(cpu, "find_move", lambda: cpu.move_each)
        return make_cpu_subject


class TestSeveralThreads(BackendContract):
    @pytest.fixture
    def make_subject(self, make_cpu_subject):
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
    with pytest.raises(TransferError, match="withdrawn"):
        await asyncio.wait_for(queued.wait(), PATIENCE_S)
    release()
    await asyncio.wait_for(running.wait(), PATIENCE_S)


# ---- the loop over ranges ----------------------------------------------------------------------


async def test_runs_are_joined(make_cpu_subject, monkeypatch):
    moved: list[int] = []
    monkeypatch.setattr(cpu, "find_move", lambda: lambda ranges: moved.extend(ranges.lengths))
    subject = make_cpu_subject(make_geometry([Segment(64, 0, 64)], 10, 640), 10)
    await subject.copy(Direction.STORE, [0, 1, 2, 5], [0, 1, 2, 9])
    assert moved == [3 * 64, 64]


@pytest.mark.parametrize("name", ["safe_offload.worker.copies._missing", "math"])
def test_what_was_not_compiled_is_interpreted_and_the_log_names_the_fix(monkeypatch, caplog, name):
    monkeypatch.setattr(cpu, "MOVE_MODULE", name)
    assert cpu.find_move.__wrapped__() is cpu.move_each
    assert "Fix: install a C compiler" in caplog.text


@NEEDS_COMPILED
def test_the_compiled_loop_lets_other_threads_run():
    size_bytes, count = 1 << 16, 100_000  # a turn may take a tenth of a millisecond
    source, target = np.ones(size_bytes, np.uint8), np.zeros(size_bytes, np.uint8)
    words = [np.full(count, n, np.uint64) for n in (target.ctypes.data, source.ctypes.data)]
    ranges = Ranges(*words, np.full(count, size_bytes, np.uint64))
    mover = threading.Thread(target=cpu.find_move(), args=(ranges,))
    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(PATIENCE_S)  # from here on a thread runs only if another lets it
    try:
        mover.start()
        turns = 0
        while mover.is_alive():
            time.sleep(0)
            turns += 1
    finally:
        sys.setswitchinterval(interval_s)
    assert turns > 10, "it lets none run: there is one turn at most"
    assert target.all()


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


def test_a_fence_on_a_copy_that_failed_is_kept(make_cpu_subject, monkeypatch):
    fail = Mock(side_effect=TransferError(FailureReason.COPY_FAILED, "told to"))
    monkeypatch.setattr(cpu, "find_move", lambda: fail)
    subject = make_cpu_subject(GEOMETRIES["layers outermost"], NUM_SLOTS)
    completion = subject.issue(Direction.STORE, [0], [0])
    assert subject.backend.fence(completion, PATIENCE_S)
    assert not subject.backend.join(subject.issue(Direction.LOAD, [0], [0]))


async def test_a_join_runs_a_copy_that_no_thread_has_taken(subject):
    _, host = subject.fill(3)
    release = subject.hold(Direction.LOAD)
    subject.issue(Direction.LOAD, [0], [0])
    subject.wait_until_started(Direction.LOAD)
    completion = subject.issue(Direction.LOAD, [5], [6])
    assert subject.backend.join(completion)
    await asyncio.wait_for(completion.wait(), PATIENCE_S)
    for in_storage, in_host in subject.ranges(5, 6):
        np.testing.assert_array_equal(subject.read_storage()[in_storage], host[in_host])
    release()


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


def test_a_system_that_refuses_threads_is_a_config_error_at_start(subject, monkeypatch):
    refuse = Mock(side_effect=RuntimeError("can't start new thread"))
    monkeypatch.setattr(threading.Thread, "start", refuse)
    before = threading.active_count()
    with pytest.raises(ConfigError, match=r"refused .* thread.*ulimit -u"):
        CpuSubject(GEOMETRIES["layers outermost"], NUM_SLOTS, num_threads=2)
    assert threading.active_count() == before
