"""Figures, table and picture of `safe-offload bench engine`, from samples made by hand."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from safe_offload.bench.engine_breakdown import FIRST, Breakdown
from safe_offload.bench.engine_report import (
    NUM_PROMPTS,
    EngineReport,
    Sample,
    draw_plot,
    render_table,
)
from safe_offload.bench.engine_watch import FORWARD, ThreadUse
from tests.bench.test_engine_breakdown import make_breakdown

BASELINE = "no connector"


def make_sample(engine: str, round_index: int, place: int, ttft_s: float) -> Sample:
    is_hit = engine == "connector" and place >= NUM_PROMPTS
    return Sample(
        engine=engine,
        round_index=round_index,
        place=place,
        ttft_s=ttft_s,
        total_s=ttft_s + 0.1,
        num_gpu_tokens=0,
        num_host_tokens=96 if is_hit else 0,
        num_computed_tokens=4 if is_hit else 100,
        token_ids=(round_index, place),
    )


def make_report(
    *,
    num_rounds: int = 3,
    baseline_slowed: float = 1.0,
    hit_slowed: float = 1.0,
    waited_s: dict[str, float] | None = None,
) -> EngineReport:
    """Return a report in which storing costs 2 % and a hit is 20 times faster.

    Args:
        num_rounds: of them the first one is disturbed, if any is.
        baseline_slowed: how many times slower the disturbed baseline computes.
        hit_slowed: how many times slower the disturbed hits are.
        waited_s: how long the forward of a first pass waited for its core, by engine.
    """
    samples = []
    for round_index in range(1, num_rounds + 1):
        for place in range(2 * NUM_PROMPTS):
            speed = float(round_index)  # rounds differ, their ratios do not
            connector_s = 1.02 * speed if place < NUM_PROMPTS else speed / 20
            if round_index == 1:
                connector_s *= hit_slowed if place >= NUM_PROMPTS else 1.0
                speed *= baseline_slowed if place < NUM_PROMPTS else 1.0
            samples.append(make_sample(BASELINE, round_index, place, speed))
            samples.append(make_sample("connector", round_index, place, connector_s))
    return EngineReport(
        connector="SafeCPUOffloadConnector",
        baseline=BASELINE,
        samples=samples,
        breakdown=_waiting(make_breakdown(), waited_s or {}),
        pool_prompts=1.6,
        num_gpu_blocks=160,
        options={
            "model": "llama",
            "num_prompt_tokens": 100,
            "num_answer_tokens": 2,
            "block_size": 32,
        },
        machine={},
    )


def _waiting(breakdown: Breakdown, waited_s: dict[str, float]) -> Breakdown:
    """The same, where the forwards of first passes have waited so long; a request takes 1 s."""
    observed = []
    for one in breakdown.observed:
        watched = one.watched
        if one.kind == FIRST:
            forward = ThreadUse(waited_s=waited_s.get(one.engine, 0.0))
            watched = replace(
                watched,
                answer=replace(watched.answer, total_s=1.0),
                uses=watched.uses | {FORWARD: forward},
            )
        observed.append(replace(one, watched=watched))
    return replace(breakdown, observed=observed)


def test_ratios_are_taken_within_a_round() -> None:
    report = make_report()
    assert report.hit_speedup == pytest.approx(20)
    assert report.first_pass_overhead == pytest.approx(0.02)


def test_a_hit_found_more_on_the_host_than_it_computed() -> None:
    assert make_report(num_rounds=2).num_host_hits == 2 * NUM_PROMPTS


def test_a_different_token_is_counted_and_shown() -> None:
    report = make_report(num_rounds=1)
    wrong = make_sample("connector", 1, 5, 0.05)
    report.samples[-1] = Sample(
        **{name: getattr(wrong, name) for name in Sample.__slots__} | {"token_ids": (9, 9)}
    )
    assert report.num_different_answers == 1
    assert "1 of 6 DIFFER" in render_table(report)


def test_the_table_has_a_line_for_each_request_and_the_sums() -> None:
    table = render_table(make_report())
    assert [line[:8] for line in table.splitlines() if " first " in line[:9]] == [
        "A first ",
        "B first ",
        "C first ",
    ]
    assert "20.0 times faster with the connector (20.0 to 20.0); 9 of 9 requests" in table
    assert "+2.0% time to first token" in table
    assert "all 18 equal" in table
    assert "memcpy of as many bytes" in table


def test_the_range_over_the_rounds_stands_beside_the_median() -> None:
    table = render_table(make_report(baseline_slowed=1.05, hit_slowed=2.0))
    assert "+2.0% time to first token with the connector (-2.9% to +2.0%)" in table
    assert "20.0 times faster with the connector (10.0 to 20.0)" in table


def test_rounds_that_agree_and_threads_that_have_their_cores_give_no_doubts() -> None:
    report = make_report(
        baseline_slowed=1.09, hit_slowed=1.4, waited_s={BASELINE: 0.04, "connector": 0.04}
    )
    assert report.doubts == []
    assert "DISTURBED" not in render_table(report)


@pytest.mark.parametrize(
    ("disturbed", "expected"),
    [
        ({"baseline_slowed": 1.5}, "the rounds of the first pass disagree: -32.0% to +2.0%"),
        ({"hit_slowed": 2.0}, "the rounds of the second pass disagree: 10.0 to 20.0 times"),
        (
            {"waited_s": {BASELINE: 0.3}},
            "with no connector, the forward's thread waited for its core for up to 30%",
        ),
        (
            {"waited_s": {"connector": 0.3}},
            "with SafeCPUOffloadConnector, the forward's thread waited for its core for up to 30%",
        ),
    ],
)
def test_a_disturbed_run_says_so(disturbed: dict[str, Any], expected: str) -> None:
    report = make_report(**disturbed)
    (doubt,) = report.doubts
    assert doubt.startswith(expected)
    assert "DISTURBED, repeat it on an idle machine:\n  " + expected in render_table(report)
    assert report.to_json()["summary"]["doubts"] == [doubt]


def test_the_json_file_holds_method_summary_and_samples() -> None:
    content = json.loads(json.dumps(make_report().to_json()))
    assert content["summary"]["num_host_hits"] == 9
    assert content["summary"]["hit_speedup_by_round"] == pytest.approx([20, 20, 20])
    assert len(content["samples"]) == 36
    assert "3 rounds" in content["method"]
    assert len(content["breakdown"]["requests"]) == 6


def test_the_plot_is_a_png(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    draw_plot(make_report(), tmp_path / "bench.png")
    assert (tmp_path / "bench.png").read_bytes().startswith(b"\x89PNG")
