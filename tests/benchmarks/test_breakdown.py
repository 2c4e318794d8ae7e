"""`breakdown`: the stages of a hit, and what is seen of a worker: its steps, and real copies."""

from typing import Any

import pytest

from safe_offload.protocol import StepPlan, Transfer
from safe_offload.worker.bridge import WorkerBridge
from safe_offload.worker.copies.cpu import CpuBackend
from safe_offload.worker.copies.device import Device
from safe_offload.worker.copies.driver import Driver
from safe_offload.worker.copies.gpu import GpuBackend
from safe_offload.worker.transfers import Transfers
from tests.benchmarks.breakdown import SPANS, SPANS_IN_STEP, Load, Seen, load_of, spans
from tests.benchmarks.engine_watch import MATCHED, PLANNED, SETTLED, WorkerProbe
from tests.worker.test_bridge import SLOT_BYTES, Worker

WATCHED = (
    (Transfers, "submit"),
    (Transfers, "load_now"),
    (CpuBackend, "issue"),
    (CpuBackend, "join"),
    (GpuBackend, "issue"),
    (WorkerBridge, "report_settled"),
    (Driver, "copy_batch"),
    (Driver, "copy_each"),
    (Device, "launch"),
)


def seen(*steps: list[float]) -> Seen:
    probe = {
        "steps": list(steps),
        "submits": [(3.0, "load", 7), (3.0, "store", 8)],
        "copies": [("load", 4.0, 6.0, 1), ("store", 1.0, 30.0, 1)],
        "reports": [(6.5, (7,)), (31.0, (8,))],
        "given": [5.0, 5.5, 33.0],
    }
    moments = [
        *[(MATCHED, 1.5), (PLANNED, 2.0), (PLANNED, 6.1), (SETTLED, 7.0)],
        *[(PLANNED, 8.0), (PLANNED, 11.2), (SETTLED, 40.0)],
    ]
    return Seen(0.0, 1.0, 14.0, 15.0, moments, probe)


def test_the_spans_of_a_hit_add_up_also_where_the_next_step_begins_before_the_token_is_there():
    """With async scheduling, which is what a GPU has: every table was empty there."""
    steps = [2.0, 3.2, 0], [6.2, 6.4, 0], [9.0, 11.0, 5], [11.5, 12.0, 1], [12.0, 16.0, 1]
    found = spans(seen(*steps))
    assert [*found] == [*SPANS]
    assert [*found.values()] == [
        *[1.0, 0.5, 0.5, 1.0, 2.0, 1.0],
        *[0.5, 0.5, 1.0, 1.0, 2.0, 3.0, 1.0],
    ]
    assert sum(found.values()) == 15.0
    assert load_of(seen(*steps)) == Load(size_bytes=1, num_steps=2)


def test_a_load_in_the_step_has_no_report_to_wait_for_and_no_next_step():
    step = [2.5, 11.0, 5]
    found = spans(seen(step))
    assert [*found] == [s for s in SPANS_IN_STEP if s in SPANS]
    assert [*found.values()] == [1.0, 0.5, 0.5, 0.5, 0.5, 2.0, 1.0, 5.0, 3.0, 1.0]
    assert sum(found.values()) == 15.0
    assert load_of(seen(step)) == Load(size_bytes=1, num_steps=0)


# ---- what is seen of a worker -----------------------------------------------------------------


@pytest.fixture
def watched_for_once(monkeypatch):
    """What a recorder wraps is unwrapped when the test has ended."""
    for owner, name in WATCHED:
        monkeypatch.setattr(owner, name, getattr(owner, name))


class WatchedWorker(WorkerProbe):
    """As much of vLLM's worker as is watched."""

    def execute_model(self, scheduler_output: Any) -> None:
        """Do nothing."""

    def sample_tokens(self, grammar_output: Any) -> None:
        """Do nothing."""


@pytest.fixture
def probe(watched_for_once):
    found = WatchedWorker()
    found.start_probe()
    return found


@pytest.fixture
def worker():
    """A registered worker side of the connector."""
    found = Worker().register()
    yield found
    found.bridge.shutdown()


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
