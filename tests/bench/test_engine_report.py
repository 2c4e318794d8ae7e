"""Figures, table and picture of `safe-offload bench engine`, from samples made by hand."""

import json
from pathlib import Path

import pytest

from safe_offload.bench.engine_report import (
    NUM_PROMPTS,
    EngineReport,
    Sample,
    draw_plot,
    render_table,
)
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


def make_report(*, num_rounds: int = 3) -> EngineReport:
    """Return a report in which storing costs 2 % and a hit is 20 times faster."""
    samples = []
    for round_index in range(1, num_rounds + 1):
        for place in range(2 * NUM_PROMPTS):
            speed = float(round_index)  # rounds differ, their ratios do not
            connector_s = 1.02 * speed if place < NUM_PROMPTS else speed / 20
            samples.append(make_sample(BASELINE, round_index, place, speed))
            samples.append(make_sample("connector", round_index, place, connector_s))
    return EngineReport(
        connector="SafeCPUOffloadConnector",
        baseline=BASELINE,
        samples=samples,
        breakdown=make_breakdown(),
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
    assert "20.0 times faster with the connector; 9 of 9 requests were host hits" in table
    assert "+2.0% time to first token" in table
    assert "all 18 equal" in table
    assert "memcpy of as many bytes" in table


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
