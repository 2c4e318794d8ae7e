"""Figures, table and picture of the benchmark `scheduler`, from samples made by hand."""

import pytest

from tests.benchmarks.scheduler_cases import Growth, Hit, Wait
from tests.benchmarks.scheduler_measure import Facts, HookTime, Timing
from tests.benchmarks.scheduler_probe import Counts, WrapperCost
from tests.benchmarks.scheduler_report import (
    SchedulerFound,
    TraceFound,
    make_report,
)

FACTS = Facts(
    num_prompt_tokens=2000,
    num_hit_tokens=500,
    num_computed=1600,
    num_preemptions=3,
    num_stored=400,
    num_loaded=100,
    num_steps=10,
    kept_mean=1.5,
    kept_max=7,
)


def timing(total_ms: float) -> Timing:
    """One run that calls one hook twice."""
    total_ns = round(total_ms * 1e6)
    hook = HookTime.of([total_ns // 4, 3 * total_ns // 4])
    return Timing({"build_connector_meta": hook}, hook, total_ns, 4 * total_ns)


@pytest.fixture
def found() -> SchedulerFound:
    names = ("none", "simple-eager", "offloading", "ours-eager")
    trace = TraceFound(
        facts=dict.fromkeys(names, FACTS),
        timings={
            "none": Timing({}, HookTime.of([0]), 0, 1_000_000),
            "simple-eager": timing(20),
            "offloading": timing(40),
            "ours-eager": timing(10),
        },
    )
    counted = TraceFound(
        facts={"ours-eager": FACTS},
        counts={
            "simple-eager": {"take_events": Counts(2, 8, 100)},
            "ours-eager": {"take_events": Counts(2, 4, 40), "on_new_request": Counts(1, 1, 10)},
        },
    )
    return SchedulerFound(
        traces={"chats plain": trace, "chats hybrid": counted},
        waits={"none": [Wait(50, 0, 1_000_000)], "simple-eager": [Wait(50, 50, 5_000_000)]},
        hits={"plain": {"ours-eager": Hit(5000, 5_000_000, 1_000_000, 500_000, 500_000, 33_000)}},
        growth={"ours-eager": [Growth(2000, 10_000.0, 7_000_000, 0), Growth(20_000, 0.0, 0, 123)]},
        cost=WrapperCost(100, 250),
        options={"copy_steps": 1, "seed": 0, "rounds": 3, "is_counting": False},
    )


def test_a_ratio_is_a_median_of_the_rounds_own_ratios(found: SchedulerFound) -> None:
    trace = found.traces["chats plain"]
    assert trace.ratio("ours-eager", "simple-eager") == 0.5
    assert trace.ratio("ours-eager", "offloading") == 0.25
    assert trace.ratio("ours-lazy", "simple-lazy") is None


def test_counts_are_compared_by_instructions(found: SchedulerFound) -> None:
    trace = found.traces["chats hybrid"]
    assert trace.count_ratio("ours-eager", "simple-eager") == 0.5
    assert trace.total_counts("ours-eager") == Counts(3, 5, 50)


def test_the_table_has_the_method_and_every_figure(found: SchedulerFound) -> None:
    table = make_report(found, {"date": "2026-01-01", "commit": "abc"}).render()
    assert table.startswith("vLLM's scheduler with each connector's scheduler side. 2026-01-01")
    assert "wrapper's own 100 ns a call" in table
    row = next(line for line in table.splitlines() if line.startswith("ours-eager"))
    assert " ".join(row.split()) == (
        "ours-eager 40 ms 10 ms 5,000 us 7,500 us 20,000 us 400 100 25% 1,600 3 1.5 7"
    )
    assert "50 steps, 5.00 ms" in table
    words = " ".join(table.split())
    assert "ours-eager 5,000 1,000 200 100 100 1,400 33,000" in words
    assert "2,000: 10.0 us, 7.0 ms 20,000: 123 calls" in words
    assert "ours-eager/simple-eager 0.50; ours-eager/offloading 0.25" in table
