"""`python -m tests.benchmarks preemption`: what it counts, without an engine."""

import json

import pytest

from tests.benchmarks.preemption import Ledger, Workload
from tests.benchmarks.preemption_report import (
    BASELINE,
    CaseRuns,
    EngineRun,
    Recovery,
    make_report,
    num_different_answers,
)

LONE = Workload(((1,) * 100,), (2,))
"""One request that computes 101 tokens."""


# ---- the ledger --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("calls", "found"),
    [
        # 32 of the GPU, 64 of the host; four again and one new.
        ([("matched", 32), ("scheduled", 96, 5)], [(100, 32, 64, 4)]),
        # What is lost twice counts once for each time it is computed again.
        (
            [
                ("matched", 0),
                ("scheduled", 0, 60),
                ("preempted", 60),
                ("matched", 0),
                ("scheduled", 0, 101),
            ],
            [(100, 0, 0, 60), (60, 0, 0, 100)],
        ),
        # Blocks for 96 tokens of the host, which never arrive.
        ([("matched", 0), ("matched", 0), ("scheduled", 0, 101)], [(100, 0, 0, 100)]),
    ],
)
def test_what_came_back_is_told_from_what_was_computed_again(calls, found):
    ledger = Ledger()
    for name, *numbers in [("scheduled", 0, 100), ("preempted", 100), *calls]:
        getattr(ledger, name)("a", *numbers)
    assert ledger.recoveries == [Recovery(*numbers) for numbers in found]
    assert ledger.close(LONE) == 101


# ---- the report --------------------------------------------------------------------------------


def make_run(*recoveries: Recovery, answer: int = 7) -> EngineRun:
    num_again = sum(recovery.num_again for recovery in recoveries)
    counters = {"rescued_blocks": 3.0}
    return EngineRun(10, 200 + num_again, 200, recoveries, ((1, 2), (3, answer)), counters)


@pytest.mark.parametrize(("answer", "equality"), [(7, "all 2 equal"), (8, "1 of 2 DIFFER")])
def test_the_table_has_shares_of_what_the_gpu_did_not_have(answer, equality):
    ours = make_run(Recovery(100, 20, 72, 8), Recovery(100, 0, 90, 10), answer=answer)
    baseline = make_run(Recovery(100, 20, 0, 80), Recovery(100, 0, 0, 100))
    cases = [CaseRuns("llama", 9, {BASELINE: baseline, "ours eager": ours})]
    sizes = {"num_requests": 2, "num_prompt_tokens": 100, "num_answer_tokens": 2}
    report = make_report(cases, {**sizes, "pool_ratio": 0.5, "block_size": 32}, {})
    assert ours.host_share == pytest.approx(162 / 180)
    (line,) = (line for line in report.render().splitlines() if line.startswith("ours eager"))
    assert line.split()[2:] == ["2", "200", "20", "162", "18", "90.0%", "90.0%", "3", "0"]
    assert equality in report.render()
    assert num_different_answers(cases) == (answer != 7)
    assert json.loads(json.dumps(report.to_json()))["cases"][0]["num_gpu_blocks"] == 9
