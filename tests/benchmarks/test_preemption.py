"""`python -m tests.benchmarks preemption`: its workload, and what it counts, without an engine."""

from __future__ import annotations

import argparse
from types import SimpleNamespace
from typing import Any

import pytest

from safe_offload.errors import SafeOffloadError
from tests.benchmarks import preemption
from tests.benchmarks.preemption import Ledger, Workload, watch
from tests.benchmarks.preemption_report import (
    BASELINE,
    CaseRuns,
    EngineRun,
    Recovery,
    make_report,
    num_different_answers,
)


def read_options(*arguments: str) -> preemption.PreemptionOptions:
    parser = argparse.ArgumentParser()
    preemption.add_arguments(parser)
    return preemption.read_options(parser.parse_args(arguments))


def as_tuple(recovery: Recovery) -> tuple[int, int, int, int]:
    return recovery.num_computed, recovery.num_gpu, recovery.num_host, recovery.num_again


# ---- the workload ------------------------------------------------------------------------------


def test_the_pool_is_a_share_of_what_all_requests_hold() -> None:
    options = read_options("--pool-ratio", "0.5")
    workload = Workload(((1,) * 100, (2,) * 20), (28, 76))  # 4 and 3 blocks of 32
    assert preemption.count_pool_blocks(options, "llama", workload) == round(3.5) + 1


# ---- the ledger --------------------------------------------------------------------------------


def test_what_came_back_is_told_from_what_was_computed_again() -> None:
    ledger = Ledger()
    ledger.scheduled("a", 0, 100)
    ledger.preempted("a", 100)
    ledger.matched("a", 32)
    ledger.scheduled("a", 96, 5)  # 32 of the GPU, 64 of the host; four again and one new
    assert [as_tuple(recovery) for recovery in ledger.recoveries] == [(100, 32, 64, 4)]
    assert ledger.close(Workload(((1,) * 100,), (2,))) == 101


def test_what_is_lost_twice_counts_once_for_each_time_it_is_computed_again() -> None:
    ledger = Ledger()
    ledger.scheduled("a", 0, 100)
    ledger.preempted("a", 100)
    ledger.matched("a", 0)
    ledger.scheduled("a", 0, 60)
    ledger.preempted("a", 60)
    ledger.matched("a", 0)
    ledger.scheduled("a", 0, 101)
    assert [as_tuple(recovery) for recovery in ledger.recoveries] == [
        (100, 0, 0, 60),
        (60, 0, 0, 100),
    ]
    assert ledger.close(Workload(((1,) * 100,), (2,))) == 101


def test_a_load_that_failed_did_not_come_back() -> None:
    ledger = Ledger()
    ledger.scheduled("a", 0, 100)
    ledger.preempted("a", 100)
    ledger.matched("a", 0)  # blocks for 96 tokens of the host, which never arrive
    ledger.matched("a", 0)
    ledger.scheduled("a", 0, 101)
    assert [as_tuple(recovery) for recovery in ledger.recoveries] == [(100, 0, 0, 100)]


def test_counts_that_do_not_add_up_are_an_error() -> None:
    ledger = Ledger()
    ledger.scheduled("a", 0, 99)
    with pytest.raises(SafeOffloadError, match="99 tokens were scheduled; expected 101"):
        ledger.close(Workload(((1,) * 100,), (2,)))


class FakeScheduler:
    """Has the three methods that are watched; a step preempts request a and runs request b."""

    def __init__(self) -> None:
        self.requests = {
            name: SimpleNamespace(request_id=name, num_computed_tokens=number)
            for name, number in (("a", 50), ("b", 0))
        }
        self.kv_cache_manager: Any = SimpleNamespace(allocate_slots=lambda *_, **__: object())

    def schedule(self) -> Any:
        self._preempt_request(self.requests["a"], 0.0)
        request = self.requests["b"]
        self.kv_cache_manager.allocate_slots(request, 8, num_new_computed_tokens=32)
        request.num_computed_tokens = 40
        return SimpleNamespace(num_scheduled_tokens={"b": 8})

    def _preempt_request(self, request: Any, timestamp: float) -> None:
        request.num_computed_tokens = 0


def test_the_ledger_is_told_what_the_scheduler_does() -> None:
    scheduler, ledger = FakeScheduler(), Ledger()
    watch(scheduler, ledger)
    scheduler.schedule()
    assert (ledger.num_steps, ledger.num_scheduled, ledger.num_prompt_hits) == (1, 8, 32)
    assert [as_tuple(recovery) for recovery in ledger.recoveries] == [(50, 0, 0, 0)]


# ---- the report --------------------------------------------------------------------------------


def make_run(*recoveries: Recovery, answer: int = 7) -> EngineRun:
    num_again = sum(recovery.num_again for recovery in recoveries)
    return EngineRun(
        num_steps=10,
        num_scheduled=200 + num_again,
        num_once=200,
        recoveries=recoveries,
        token_ids=((1, 2), (3, answer)),
        counters={"rescued_blocks": 3.0},
    )


OPTIONS = {
    "num_requests": 2,
    "num_prompt_tokens": 100,
    "num_answer_tokens": 2,
    "pool_ratio": 0.5,
    "block_size": 32,
}


def make_runs(answer: int = 7) -> CaseRuns:
    runs = {
        BASELINE: make_run(Recovery(100, 20, 0, 80), Recovery(100, 0, 0, 100)),
        "ours eager": make_run(Recovery(100, 20, 72, 8), Recovery(100, 0, 90, 10), answer=answer),
    }
    return CaseRuns("llama", 9, runs)


def test_shares_are_of_what_the_gpu_did_not_have_and_of_the_baseline() -> None:
    runs = make_runs()
    assert runs.runs["ours eager"].host_share == pytest.approx(162 / 180)
    assert runs.saved_share("ours eager") == pytest.approx(0.9)


def test_the_table_has_a_line_for_each_engine() -> None:
    table = make_report([make_runs()], OPTIONS, {}).render()
    (line,) = (line for line in table.splitlines() if line.startswith("ours eager"))
    assert line.split()[2:] == ["2", "200", "20", "162", "18", "90.0%", "90.0%", "3", "0"]
    assert "all 2 equal" in table


def test_a_different_answer_is_counted_and_shown() -> None:
    cases = [make_runs(answer=8)]
    assert num_different_answers(cases) == 1
    assert "1 of 2 DIFFER" in make_report(cases, OPTIONS, {}).render()
