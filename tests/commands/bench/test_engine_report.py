"""Figures and table of `safe-offload bench engine`, from samples made by hand."""

import json
from dataclasses import replace

import pytest

from safe_offload.commands.bench.engine_process import Answer, Started
from safe_offload.commands.bench.engine_report import (
    BASELINE,
    CONNECTOR,
    NUM_PROMPTS,
    EngineFound,
    Observed,
    make_report,
)


def make_request(engine: str, round_index: int, place: int, ttft_s: float) -> Observed:
    is_hit = engine == CONNECTOR and place >= NUM_PROMPTS
    answer = Answer(
        ttft_s=ttft_s,
        total_s=ttft_s + 0.1,
        token_ids=(round_index, place),
        num_gpu_tokens=0,
        num_host_tokens=96 if is_hit else 0,
        num_computed_tokens=4 if is_hit else 100,
    )
    return Observed(engine, round_index, place, answer)


def make_found(*, num_rounds: int = 3) -> EngineFound:
    """Return a run in which storing costs 2 % and a hit is 20 times faster."""
    observed = []
    for round_index in range(1, num_rounds + 1):
        for place in range(2 * NUM_PROMPTS):
            speed = float(round_index)  # rounds differ, their ratios do not
            connector_s = 1.02 * speed if place < NUM_PROMPTS else speed / 20
            observed.append(make_request(BASELINE, round_index, place, speed))
            observed.append(make_request(CONNECTOR, round_index, place, connector_s))
    return EngineFound(
        connector="SafeCPUOffloadConnector",
        observed=observed,
        started=Started(1.0, 160, 1.6, 102, 32),
        options={"model": "llama", "prompt_tokens": 100, "answer_tokens": 2},
        machine={},
    )


def test_a_different_token_is_counted_and_shown():
    found = make_found(num_rounds=1)
    wrong = found.observed[-1]
    assert (wrong.engine, wrong.place) == (CONNECTOR, 5)
    answer = replace(wrong.answer, token_ids=(9, 9))
    found.observed[-1] = replace(wrong, answer=answer)
    assert found.num_different_answers == 1
    assert "1 of 6 DIFFER" in make_report(found).render()


def test_the_text_and_the_file():
    report = make_report(make_found())
    text = report.render()
    assert "room for 1.60 requests" in text
    assert "first pass:  2.000 s, with SafeCPUOffloadConnector 2.040 s: +2.0% (+2.0%" in text
    assert "second pass: 2.000 s, with SafeCPUOffloadConnector 0.100 s: 20.0 times" in text
    assert "20.0 times faster (20.0 to 20.0), 9 of 9 requests were host hits" in text
    assert "all 18 equal" in text
    content = json.loads(json.dumps(report.to_json()))
    assert content["summary"]["hit_speedup_by_round"] == pytest.approx([20, 20, 20])
    assert content["samples"][-1]["kind"] == "second pass"
