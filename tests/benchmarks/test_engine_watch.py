"""What the benchmark sees of a worker: its steps, and the copies of a real backend."""

from types import SimpleNamespace
from typing import Any

import pytest

from safe_offload.protocol import StepPlan, Transfer
from tests.benchmarks import engine_watch
from tests.benchmarks.engine_watch import WorkerProbe
from tests.benchmarks.test_beside import WATCHED
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
def probe(monkeypatch):
    """A probe that has started; what it has wrapped is unwrapped when the test has ended."""
    for owner, name in WATCHED:
        monkeypatch.setattr(owner, name, getattr(owner, name))
    found = WatchedWorker()
    found.start_probe()
    return found


@pytest.fixture
def worker():
    """A registered worker side of the connector."""
    found = Worker().register()
    yield found
    found.bridge.shutdown()


def test_a_step_reaches_from_its_forward_to_its_sampling(probe, monkeypatch):
    clock = iter(range(10, 100))
    monkeypatch.setattr(engine_watch.time, "monotonic", lambda: float(next(clock)))
    assert probe.execute_model(SimpleNamespace(total_num_scheduled_tokens=32)) == "nothing yet"
    assert probe.sample_tokens(None) == "tokens"
    probe.execute_model(SimpleNamespace(total_num_scheduled_tokens=0))
    assert probe.calls == ["execute_model", "sample_tokens", "execute_model"]
    taken = probe.take_probe()
    assert taken["steps"] == [[10.0, 13.0, 32], [14.0, 15.0, 0]]
    assert taken["copies"] == []
    assert probe.take_probe()["steps"] == [], "what was taken is not told again"


def test_a_copy_is_seen_from_its_submission_to_its_report(worker, probe):
    worker.step(StepPlan(stores_after_forward=(Transfer(3, (1, 4), (0, 1)),)))
    while not any(outcome.transfer_id == 3 for r in worker.reports for outcome in r.outcomes):
        worker.step(StepPlan())
    taken = probe.take_probe()
    ((submitted_s, direction, transfer_id),) = taken["submits"]
    assert (direction, transfer_id) == ("store", 3)
    ((name, begin_s, end_s, size_bytes),) = taken["copies"]
    assert (name, size_bytes) == ("store", 2 * SLOT_BYTES)
    (reported_s,) = (at_s for at_s, ids in taken["reports"] if 3 in ids)
    assert submitted_s <= begin_s <= end_s <= reported_s
