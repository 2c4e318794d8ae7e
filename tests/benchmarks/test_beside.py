"""`beside`, `breakdown`, `link` and `one_memory`: what of them needs no engine."""

import pytest

from safe_offload.worker.bridge import WorkerBridge
from safe_offload.worker.copies.base import CopyPath
from safe_offload.worker.copies.cpu import CpuBackend
from safe_offload.worker.copies.device import Device
from safe_offload.worker.copies.driver import Driver
from safe_offload.worker.copies.gpu import GpuBackend
from safe_offload.worker.copies.ranges import RangeTable
from safe_offload.worker.transfers import Transfers
from tests.benchmarks import stand_in
from tests.benchmarks.__main__ import main
from tests.benchmarks.beside import costs, median_step_s
from tests.benchmarks.breakdown import (
    COPY,
    SPANS,
    Load,
    Seen,
    load_of,
    spans,
)
from tests.benchmarks.engine_watch import MATCHED, PLANNED, SETTLED, Recorder
from tests.benchmarks.fake_gpu_rig import fake_gpu_rigs
from tests.benchmarks.one_memory import measure
from tests.benchmarks.transfer_cases import Case, Traffic

WATCHED = (
    (Transfers, "submit"),
    (CpuBackend, "issue"),
    (GpuBackend, "issue"),
    (WorkerBridge, "report_settled"),
    (RangeTable, "runs"),
    (RangeTable, "ranges"),
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
        "descriptors": [("store", 3.1, 3.2, 9), ("load", 3.5, 3.7, 2), ("load", 3.7, 4.5, 64)],
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
        *[1.0, 0.5, 0.5, 1.0, 0.5, 1.0, 0.5, 1.0],
        *[0.5, 0.5, 1.0, 1.0, 2.0, 3.0, 1.0],
    ]
    assert sum(found.values()) == 15.0
    assert load_of(seen(*steps)) == Load(num_ranges=64, size_bytes=1, num_steps=2)


@pytest.fixture
def watched_for_once(monkeypatch):
    """What a recorder wraps is unwrapped when the test has ended."""
    for owner, name in WATCHED:
        monkeypatch.setattr(owner, name, getattr(owner, name))


def test_a_hit_on_the_stand_in_has_every_span(watched_for_once):
    case = stand_in.Case(2, CopyPath.BATCH, num_blocks=4, block_bytes=128)
    on_host, on_gpu = stand_in.measure(case, rounds=1)
    (found,) = map(spans, on_host)
    assert [*found] == [*SPANS]
    (load,) = map(load_of, on_host)
    assert load.size_bytes == 4 * 128
    assert COPY not in spans(*on_gpu)


def test_copies_of_a_gpu_are_seen(watched_for_once):
    recorder = Recorder()
    recorder.watch_copies()
    with fake_gpu_rigs() as make:
        rig = make(Case(4096, 2, 2))
        rig.copy(rig.case.make_copies(Traffic.LOAD))
        rig.close()
    ((name, begin_s, end_s, size_bytes),) = recorder.take()["copies"]
    assert (name, size_bytes) == ("load", 4 * 4096)
    assert begin_s <= end_s


def test_what_is_computed_in_several_steps_has_no_spans():
    assert spans(seen([9.0, 11.0, 64], [11.0, 13.0, 20])) == {}


def test_a_step_lasts_until_the_next_begins_and_the_first_and_last_do_not_count():
    steps = [[0, 0, 0], [1, 9, 64], [11, 12, 16], [13, 14, 16], [15, 18, 16], [20, 21, 3]]
    assert median_step_s(steps) == 2.0


def test_a_cost_is_of_the_same_round():
    samples = {"nothing": {"decode": [1.0, 2.0]}, "load": {"decode": [1.1, 2.2]}}
    assert costs(samples, "load", "decode") == pytest.approx((0.1, 0.0))


def test_the_link_is_timed_over_both_kinds_of_memory(tmp_path, capsys):
    assert main(["link", "--bytes", "65536", "--seconds", "0"]) == 0
    told = capsys.readouterr().out
    assert told.count("allocated by the driver") == told.count("locked in place  ") == 3


@pytest.mark.nightly
@pytest.mark.usefixtures("forked_engines")
def test_two_processes_copy_over_one_memory():
    rates, right = measure(Case(4096, 4, 2))
    assert len(rates) == len(right) == 5
    assert all(right.values()), right
