"""What the benchmark sees of a worker: steps, copies of a real backend, threads, memcpy."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from safe_offload.bench import engine_probe
from safe_offload.bench.engine_probe import WorkerProbe
from safe_offload.bench.engine_watch import (
    FIRST_TOUCH,
    LOADS,
    LOOP,
    OTHERS,
    STORES,
    ThreadUse,
    read_thread,
    role_of,
)
from safe_offload.protocol import StepPlan, Transfer
from tests.worker.test_bridge import SLOT_BYTES, Worker


class WatchedWorker(WorkerProbe):
    """As much of vLLM's worker as a step needs."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def execute_model(self, scheduler_output: Any) -> str:
        self.calls.append("execute_model")
        return "nothing yet"

    def sample_tokens(self, grammar_output: None) -> str:
        self.calls.append("sample_tokens")
        return "tokens"


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> Iterator[Worker]:
    """A registered worker side of the connector, which the probe finds."""
    found = Worker().register()
    monkeypatch.setattr(engine_probe, "_find_bridge", lambda: found.bridge)
    yield found
    found.bridge.shutdown()


def test_a_step_reaches_from_its_forward_to_its_sampling(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_probe, "_find_bridge", lambda: None)
    clock = iter(range(10, 100))
    monkeypatch.setattr(engine_probe.time, "monotonic", lambda: float(next(clock)))
    worker = WatchedWorker()
    worker.start_probe()
    assert worker.execute_model(SimpleNamespace(total_num_scheduled_tokens=32)) == "nothing yet"
    assert worker.sample_tokens(None) == "tokens"
    worker.execute_model(SimpleNamespace(total_num_scheduled_tokens=0))
    assert worker.calls == ["execute_model", "sample_tokens", "execute_model"]
    taken = worker.take_probe()
    assert taken["steps"] == [[10.0, 13.0, 32], [14.0, 15.0, 0]]
    assert taken["copies"] == []
    assert worker.take_probe()["steps"] == [], "what was taken is not told again"


def test_a_copy_is_seen_from_its_submission_to_its_report(worker: Worker) -> None:
    probe = WatchedWorker()
    probe.start_probe()
    worker.step(StepPlan(stores_after_forward=(Transfer(3, (1, 4), (0, 1)),)))
    while not any(outcome.transfer_id == 3 for r in worker.reports for outcome in r.outcomes):
        worker.step(StepPlan())
    taken = probe.take_probe()
    ((submitted_s, direction, transfer_id),) = taken["submits"]
    assert (direction, transfer_id) == ("store", 3)
    ((name, begin_s, end_s, size_bytes, num_pieces),) = taken["copies"]
    assert (name, size_bytes) == ("store", 2 * SLOT_BYTES)
    assert num_pieces >= 1
    (reported_s,) = (at_s for at_s, ids in taken["reports"] if 3 in ids)
    assert submitted_s <= begin_s <= end_s <= reported_s


def test_threads_are_told_by_name_with_the_process_they_are_of(worker: Worker) -> None:
    probe = WatchedWorker()
    probe.start_probe()
    taken = probe.take_probe()
    assert (taken["pid"], taken["parent_pid"]) == (os.getpid(), os.getppid())
    roles = {role_of(name) for name in taken["thread_names"].values()}
    assert {LOOP, STORES, LOADS, FIRST_TOUCH, OTHERS} <= roles
    assert taken["thread_names"][str(threading.get_native_id())] == "MainThread"


@pytest.mark.parametrize(("size_bytes", "num_pieces"), [(1 << 20, 1), (1 << 20, 7), (1000, 1000)])
def test_a_memcpy_takes_its_time(
    size_bytes: int, num_pieces: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_probe, "MEMCPY_BUFFER_BYTES_MIN", 1 << 21)
    moved = []
    monkeypatch.setattr(engine_probe, "find_move", lambda: moved.append)
    assert WatchedWorker().time_memcpy(size_bytes, num_pieces) >= 0
    source, target = engine_probe._buffers(-(-(1 << 21) // size_bytes) * size_bytes)
    assert len(moved) == engine_probe.NUM_MEMCPY_ROUNDS
    for ranges in moved:
        assert ranges.lengths.tolist() == [size_bytes // num_pieces] * num_pieces
        for array, begins in ((source, ranges.sources), (target, ranges.targets)):
            offsets = begins - array.ctypes.data
            assert offsets.min() >= 0
            assert int(offsets.max()) + size_bytes // num_pieces <= len(array)
    assert moved[0].sources.tolist() != moved[1].sources.tolist(), "the cache still holds it"


def test_a_thread_is_read_from_the_kernel_s_files(tmp_path: Path) -> None:
    (tmp_path / "schedstat").write_text("2500000000 1500000 77\n")
    (tmp_path / "stat").write_text("12 (VLLM :: (odd) name) S 1 2 3 4 5 6 88 0 9 0 1 2\n")
    assert read_thread(tmp_path) == ThreadUse(2.5, 0.0015, 88)
    assert read_thread(tmp_path / "gone") == ThreadUse()
    assert read_thread(Path(f"/proc/self/task/{threading.get_native_id()}")).cpu_s > 0


def test_uses_are_added_and_subtracted_by_field() -> None:
    both = ThreadUse(1.0, 2.0, 3) + ThreadUse(10.0, 20.0, 30)
    assert both == ThreadUse(11.0, 22.0, 33)
    assert both.since(ThreadUse(1.0, 2.0, 3)) == ThreadUse(10.0, 20.0, 30)
