"""No way to copy is used that has not proven itself on the memory that it will copy."""

import ctypes
import itertools
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from safe_offload.layout import Geometry, HostLayout
from safe_offload.worker import self_test
from safe_offload.worker.copies import cpu
from safe_offload.worker.copies.base import Copy, CopyPath, Direction
from safe_offload.worker.copies.cpu import CpuBackend
from safe_offload.worker.copies.gpu import GpuBackend
from safe_offload.worker.copies.rows import Bytes, Rows
from safe_offload.worker.copies.threads import DirectionThreads
from safe_offload.worker.memory.host_memory import HostMemory
from safe_offload.worker.self_test import IdleTiming, SelfTest
from safe_offload.worker.transfers import Copied, Transfers
from tests.worker.copies.contract import GEOMETRIES, NUM_SLOTS, _layers_outermost
from tests.worker.copies.fake_device import CALLS, FakeGpu, FakeRows
from tests.worker.driven import DrivenTransfers
from tests.worker.waiting import PATIENCE_S

LAYERS = GEOMETRIES["layers outermost"]


@dataclass
class Bench:
    """A backend, its transfers, and the test of it."""

    backend: Any
    transfers: Transfers
    storage: torch.Tensor
    test: SelfTest


def make_storage(geometry: Geometry) -> torch.Tensor:
    """A KV cache of noise, at an address that every way to copy takes."""
    size_bytes = max(segment.end_bytes(geometry.num_blocks) for segment in geometry.segments)
    return torch.from_numpy(np.random.default_rng(7).integers(0, 256, size_bytes, np.uint8))


def join_self_tests() -> None:
    """Wait until those that were given up have ended too."""
    for thread in threading.enumerate():
        if thread.name == "safe-offload-self-test":
            thread.join(PATIENCE_S)
            assert not thread.is_alive()


@pytest.fixture
def make(gpu):
    """The GPU is closed last, whether the benches use it or not."""
    benches: list[Bench] = []

    def make(
        gpu: FakeGpu | None = None,
        geometry: Geometry = LAYERS,
        num_slots: int = NUM_SLOTS,
        verify_every: int = 0,
        path: CopyPath | None = CopyPath.KERNEL,
    ) -> Bench:
        storage = make_storage(geometry)
        cpu = torch.device("cpu")
        rows: Any = Rows(storage.untyped_storage(), cpu, geometry)
        backend: Any
        layout = HostLayout(geometry, num_slots, num_slots)
        host = HostMemory.allocate(layout.size_bytes)
        if gpu is None:
            backend = CpuBackend(storage.data_ptr(), layout, host, DirectionThreads("safe-offload"))
        else:
            device = gpu.open()
            backend = GpuBackend(device, storage.data_ptr(), layout, host, path)
            rows = FakeRows(gpu, device, rows)
        transfers = DrivenTransfers(backend, 1 << 30, verify_every=verify_every)
        test = SelfTest(transfers, backend, rows, host.tensor.numpy(), layout)
        benches.append(Bench(backend, transfers, storage, test))
        return benches[-1]

    yield make
    join_self_tests()
    for bench in benches:
        assert bench.transfers.close(PATIENCE_S)


def test_every_way_of_a_sound_device_passes_and_one_line_says_how_long_it_took(make, gpu, caplog):
    bench = make(gpu)
    before = bench.storage.clone()
    with caplog.at_level("INFO"):
        assert bench.test.run()
    assert bench.backend.paths == tuple(CopyPath)
    assert caplog.text.count("The self-test of the copies took") == 1
    assert "Passed: kernel, batch, each." in caplog.text
    gpu.compute.synchronize()
    assert torch.equal(bench.storage, before), "the blocks have got back what was in them"


def test_without_a_slot_that_is_ready_nothing_passes(make, gpu, monkeypatch, caplog):
    """The first slab was not page-locked in time."""
    bench = make(gpu)
    monkeypatch.setattr(type(bench.backend), "num_usable_slots", 0)
    assert not bench.test.run()
    assert "No host memory was ready in time" in caplog.text


@pytest.mark.parametrize("direction", Direction)
@pytest.mark.parametrize("path", CopyPath)
def test_a_way_that_corrupts_one_word_in_one_direction_is_left_out_and_no_other(
    make, gpu, caplog, path, direction
):
    gpu.corrupted = {(CALLS[path], direction is Direction.STORE)}
    bench = make(gpu)
    assert bench.test.run()
    assert bench.backend.paths == tuple(other for other in CopyPath if other is not path)
    assert f'Copy path "{path.value}" failed the self-test' in caplog.text
    assert f"COPY_FAILED: {direction.value}: " in caplog.text


def test_with_all_ways_corrupt_there_is_none(make, gpu, caplog):
    gpu.corrupted = {(call, True) for call in CALLS.values()}
    bench = make(gpu)
    assert not bench.test.run()
    assert "No copy path passed the self-test" in caplog.text


def test_a_call_that_is_refused_leaves_its_way_out(make, gpu):
    gpu.refused["launch"] = 1
    bench = make(gpu)
    assert bench.test.run()
    assert bench.backend.paths == (CopyPath.BATCH, CopyPath.EACH)
    assert bench.backend.num_demotions == 0


def test_fences_that_order_nothing_are_found(make, gpu, monkeypatch, caplog):
    bench = make(gpu)
    prepare = FakeRows.prepare

    def prepare_and_hold(rows: FakeRows, block_ids: Sequence[int], content: Bytes) -> Any:
        """Let the stores that are submitted from here on wait for the write."""
        written = threading.Event()
        bench.backend.lanes[Direction.STORE].stream.enqueue(lambda: written.wait(PATIENCE_S))
        write = prepare(rows, block_ids, content)
        return lambda: (write(), gpu.compute.enqueue(written.set))

    monkeypatch.setattr(FakeRows, "prepare", prepare_and_hold)
    monkeypatch.setattr(GpuBackend, "fence", lambda self, completion, timeout_s: True)
    assert not bench.test.run()
    assert caplog.text.count("fenced store: ") == len(CopyPath)


def test_a_device_that_hangs_fails_the_test_and_does_not_hang_the_start(make, gpu):
    bench = make(gpu)
    released = threading.Event()
    bench.backend.lanes[Direction.STORE].stream.enqueue(lambda: released.wait(PATIENCE_S))
    assert not bench.test.run(timeout_s=0.3)
    assert not released.is_set()
    released.set()


@pytest.mark.parametrize("num_reads", [0, 1])
def test_a_test_that_was_given_up_touches_nothing_when_the_device_goes_on(
    make, gpu, monkeypatch, num_reads
):
    """Blocks and slots are vLLM's by then, or have been freed."""
    bench = make(gpu)
    host = bench.backend.host.tensor
    released, numbers, read = threading.Event(), itertools.count(), FakeRows.read

    def read_or_hang(rows: FakeRows, block_ids: Sequence[int]) -> Bytes:
        if next(numbers) == num_reads:
            assert released.wait(PATIENCE_S)
        return read(rows, block_ids)

    monkeypatch.setattr(FakeRows, "read", read_or_hang)
    assert not bench.test.run(timeout_s=0.3)
    gpu.synchronize()
    storage, slots, calls = bench.storage.clone(), host.clone(), list(gpu.calls)
    problems, paths = dict(bench.test.problems), bench.backend.paths
    released.set()
    join_self_tests()
    gpu.synchronize()
    assert torch.equal(bench.storage, storage)
    assert torch.equal(host, slots)
    assert gpu.calls == calls
    assert (bench.test.problems, bench.backend.paths) == (problems, paths)


def test_nothing_is_used_beside_a_copy_that_has_not_ended(make, gpu, caplog, monkeypatch):
    """The kernel has passed, but what it copies would wait behind the copy that hangs."""
    bench = make(gpu)
    use, released = bench.backend.use, threading.Event()
    late_s = 0.0

    def use_and_hang(paths: tuple[CopyPath, ...], timed: Sequence[Any] = ()) -> None:
        nonlocal late_s
        if paths == (CopyPath.BATCH,):
            stream = bench.backend.lanes[Direction.STORE].stream
            stream.enqueue(lambda: released.wait(PATIENCE_S))
            late_s = 2 * PATIENCE_S
        use(paths)

    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + late_s, sleep=time.sleep)
    monkeypatch.setattr(self_test, "time", clock)
    monkeypatch.setattr(bench.backend, "use", use_and_hang)
    assert not bench.test.run(timeout_s=PATIENCE_S)
    released.set()
    assert 'Copy path "batch" failed the self-test and is not used. TIMED_OUT' in caplog.text
    assert caplog.text.count("failed the self-test") == 1, "the third was not tried"


def test_nothing_is_used_beside_a_timed_copy_that_has_not_ended(make, gpu, caplog, monkeypatch):
    """It may still write to blocks, which are vLLM's when the test is over."""
    bench = make(gpu, path=None)
    use, released, has_passed = bench.backend.use, threading.Event(), threading.Event()
    submit, late_s = bench.transfers.submit, 0.0

    def use_and_hang(paths: tuple[CopyPath, ...], timed: Sequence[Any] = ()) -> None:
        if len(paths) == len(CopyPath):
            has_passed.set()
            for lane in bench.backend.lanes.values():
                lane.stream.enqueue(lambda: released.wait(PATIENCE_S))
        use(paths, timed)

    def submit_and_pass_deadline(*copy: Any) -> None:
        nonlocal late_s
        submit(*copy)
        if has_passed.is_set():
            late_s = 2 * PATIENCE_S

    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + late_s, sleep=time.sleep)
    monkeypatch.setattr(self_test, "time", clock)
    monkeypatch.setattr(self_test, "TIMING_S", 10 * PATIENCE_S)
    monkeypatch.setattr(bench.backend, "use", use_and_hang)
    monkeypatch.setattr(bench.transfers, "submit", submit_and_pass_deadline)
    with caplog.at_level("INFO"):
        assert not bench.test.run(timeout_s=PATIENCE_S)
    released.set()
    assert "are chosen without timing: TIMED_OUT: the copy did not end" in caplog.text


@pytest.mark.parametrize(("num_blocks", "num_slots"), [(1, 1), (2, 1), (2, 2), (3, 40), (40, 3)])
def test_pools_of_a_few_blocks_are_tested_too(make, gpu, num_blocks, num_slots):
    for device in (None, gpu):
        bench = make(device, _layers_outermost(num_blocks, 64, 64), num_slots)
        before = bench.storage.clone()
        assert bench.test.run()
        gpu.compute.synchronize()
        assert torch.equal(bench.storage, before)


def test_checksums_of_host_memory_agree_with_the_test(make, gpu, caplog):
    for device in (None, gpu):
        assert make(device, verify_every=1).test.run()
    assert "failed the self-test" not in caplog.text
    assert "has changed" not in caplog.text


@pytest.mark.parametrize("geometry", GEOMETRIES.values(), ids=GEOMETRIES)
def test_every_layout_passes(make, gpu, geometry):
    for device in (None, gpu):
        assert make(device, geometry).test.run()


def test_the_compiled_loop_is_left_for_the_interpreted_one_if_it_is_wrong(
    make, caplog, monkeypatch
):
    move = cpu.find_move()

    def spoil(ranges: Any) -> None:
        move(ranges)
        ctypes.c_uint8.from_address(int(ranges.targets[-1])).value ^= 1

    monkeypatch.setattr(cpu, "find_move", lambda: spoil)
    bench = make()
    assert bench.test.run()
    assert bench.backend.paths == (CopyPath.EACH,)
    assert 'Copy path "batch" failed the self-test' in caplog.text


# ---- which way is faster here ------------------------------------------------------------------


def path_of(bench: Bench, direction: Direction, blocks: Sequence[int]) -> CopyPath:
    """The way that a copy takes."""
    ids = np.array(blocks), np.arange(len(blocks))
    completion = bench.backend.issue(Copy(direction, *ids), bench.backend.mark())
    completion.future.result(PATIENCE_S)
    return completion.path


SLOW_S = 0.05
SLOWER_S = 10_000.0
"""Of a way that is slow: busy machines take longer than SLOW_S for a copy now and then."""
MANY = list(range(1, 21, 2))


@pytest.mark.parametrize("direction", Direction)
@pytest.mark.parametrize(
    ("slow", "fast"), [(CopyPath.KERNEL, CopyPath.BATCH), (CopyPath.BATCH, CopyPath.KERNEL)]
)
def test_the_way_that_is_faster_on_this_machine_is_taken(
    make, gpu, caplog, monkeypatch, slow, fast, direction
):
    monkeypatch.setattr(self_test, "TIMING_S", PATIENCE_S)
    bench = make(gpu, path=None)
    before = bench.storage.clone()
    gpu.call_delays_s[CALLS[slow]] = SLOW_S
    take_copied, taken = bench.transfers.take_copied, []

    def take_slower() -> list[Copied]:
        if bench.backend.paths != (slow,):
            return take_copied()
        taken.extend(take_copied())
        return [replace(taken[-1], copying_s=taken[-1].copying_s + SLOWER_S)]

    monkeypatch.setattr(bench.transfers, "take_copied", take_slower)
    with caplog.at_level("INFO"):
        assert bench.test.run()
    gpu.compute.synchronize()
    assert torch.equal(bench.storage, before), "the blocks hold what was in them"
    assert any(copied.copying_s + copied.queued_s >= SLOW_S for copied in taken)
    assert f"{direction.value} by {slow.value} " in caplog.text
    assert path_of(bench, direction, MANY) is fast


def test_ways_that_were_timed_beside_others_are_timed_again_when_nothing_runs(
    make, gpu, caplog, monkeypatch
):
    """Other engines page-locked as this one started: noise had chosen the way."""
    monkeypatch.setattr(self_test, "TIMING_S", PATIENCE_S)
    bench = make(gpu, path=None)
    take_copied, is_disturbed = bench.transfers.take_copied, True

    def take_disturbed() -> list[Copied]:
        copied = take_copied()[-1]
        slower_s = SLOWER_S * is_disturbed * (bench.backend.paths == (CopyPath.BATCH,))
        # Of what the stand-in takes by itself nothing is left: only batches have a time.
        fixed_s = 1e-6 if bench.backend.paths == (CopyPath.BATCH,) else SLOW_S
        return [replace(copied, queued_s=0.0, copying_s=fixed_s + slower_s)]

    monkeypatch.setattr(bench.transfers, "take_copied", take_disturbed)
    assert bench.test.run()
    assert path_of(bench, Direction.LOAD, MANY) is CopyPath.KERNEL
    disturbed_s, is_disturbed = bench.backend.load_block_s, False
    with caplog.at_level("INFO"):
        bench.test.time_again()
    assert path_of(bench, Direction.LOAD, MANY) is CopyPath.BATCH
    assert 0 < bench.backend.load_block_s < disturbed_s, "as its slowest way"
    assert "again while idle" in caplog.text
    is_disturbed = True
    bench.test.time_again()
    assert path_of(bench, Direction.LOAD, MANY) is CopyPath.BATCH, "the shortest time counts"
    assert bench.backend.paths == tuple(CopyPath)


def test_timing_in_idle_time_ends_at_once_when_a_step_comes(make, gpu, monkeypatch):
    monkeypatch.setattr(self_test, "TIMING_S", PATIENCE_S)
    monkeypatch.setattr(self_test, "IDLE_PAUSES_S", (0.0,) * 1000)
    bench = make(gpu, path=None)
    assert bench.test.run()
    before, submit, has_begun = bench.storage.clone(), bench.transfers.submit, threading.Event()

    def submit_and_tell(*what: Any) -> None:
        has_begun.set()
        submit(*what)

    monkeypatch.setattr(bench.transfers, "submit", submit_and_tell)
    timing = IdleTiming(bench.test)
    timing.start()
    assert has_begun.wait(PATIENCE_S)
    assert timing.stop()
    has_begun.clear()
    assert bench.backend.paths == tuple(CopyPath)
    gpu.compute.synchronize()
    assert torch.equal(bench.storage, before), "each block holds what was in it"
    assert not has_begun.is_set(), "no copy comes after it"
    assert IdleTiming(bench.test).stop(), "it was never begun"


def test_nothing_is_timed_where_there_is_no_choice(make, gpu, caplog):
    for device, path in ((None, None), (gpu, CopyPath.KERNEL), (gpu, CopyPath.BATCH)):
        bench = make(device, path=path)
        with caplog.at_level("INFO"):
            assert bench.test.run()
        assert bench.backend.load_block_s == 0
    assert "Measured copies" not in caplog.text


@pytest.mark.parametrize("trouble", ["no time", "one block", "refused"])
def test_without_all_times_the_figures_of_another_machine_count(
    make, gpu, caplog, monkeypatch, trouble
):
    if trouble == "no time":
        monkeypatch.setattr(self_test, "TIMING_S", -1.0)
    num_slots = 1 if trouble == "one block" else NUM_SLOTS
    bench = make(gpu, LAYERS, num_slots, path=None)
    use, has_passed = bench.backend.use, threading.Event()

    def use_and_refuse(paths: tuple[CopyPath, ...], timed: Sequence[Any] = ()) -> None:
        if len(paths) == len(CopyPath):
            has_passed.set()
        elif trouble == "refused" and has_passed.is_set() and paths == (CopyPath.BATCH,):
            gpu.refused["copy_batch"] = 1
        use(paths, timed)

    monkeypatch.setattr(bench.backend, "use", use_and_refuse)
    before = bench.storage.clone()
    gpu.call_delays_s["launch"] = SLOW_S
    with caplog.at_level("INFO"):
        assert bench.test.run()
    gpu.refused.clear()
    assert "Measured copies" not in caplog.text
    assert bench.backend.paths == tuple(CopyPath)
    gpu.compute.synchronize()
    assert torch.equal(bench.storage, before)
    if num_slots > 1:
        assert path_of(bench, Direction.LOAD, MANY) is CopyPath.KERNEL
        assert path_of(bench, Direction.STORE, MANY) is CopyPath.BATCH


def test_slots_beside_those_that_may_be_written_keep_what_is_in_them(make):
    bench = make()
    kept = bench.backend.host.tensor.numpy()
    kept[:] = 77
    allowed = range(10, 14)
    assert bench.test.run(slots=allowed)
    layout = HostLayout(LAYERS, NUM_SLOTS, NUM_SLOTS)
    for slot in range(NUM_SLOTS):
        rows = [kept[offset : offset + length] for offset, length in layout.ranges_of(slot)]
        assert all((row == 77).all() for row in rows) is (slot not in allowed)
