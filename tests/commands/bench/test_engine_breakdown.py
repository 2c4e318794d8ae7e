"""Where a request's time goes: spans, sums and tables, from observations made by hand."""

from typing import Any

import pytest

from safe_offload.commands.bench.engine_breakdown import (
    BASELINE,
    CONNECTOR,
    COPY,
    FORWARD,
    SPANS,
    TO_COPY,
    TO_FORWARD,
    TO_SCHEDULER,
    TO_STEP,
    TO_TOKEN,
    TO_USER,
    TO_WORKER,
    TTFT,
    Observed,
    hit_rows,
    render_breakdown,
)
from safe_offload.commands.bench.engine_process import Answer
from safe_offload.commands.bench.engine_watch import Watched

ARRIVAL_S = 100.0
WAITING, COMPUTING = 0, 32
FIRST_PLACE, HOST_HIT_PLACE, GPU_HIT_PLACE = 0, 3, 6


def make_watched(
    *,
    ttft_s: float = 0.025,
    queued_s: float = 0.002,
    scheduler_token_s: float = 0.024,
    **probe: list[Any],
) -> Watched:
    """Times are in s after the request's arrival; those of `probe` are absolute."""
    return Watched(
        answer=Answer(
            ttft_s=ttft_s,
            total_s=ttft_s + 0.1,
            token_ids=(1,),
            num_gpu_tokens=0,
            num_host_tokens=96,
            num_computed_tokens=4,
            arrival_s=ARRIVAL_S,
            queued_s=ARRIVAL_S + queued_s,
            scheduler_token_s=ARRIVAL_S + scheduler_token_s,
        ),
        probe={"steps": [], "submits": [], "copies": [], "reports": []} | probe,
    )


def after(time_s: float) -> float:
    return ARRIVAL_S + time_s


def make_host_hit(**times_s: float) -> Watched:
    """A load between an empty step that begins it and one that collects it, then the forward."""
    return make_watched(
        **times_s,
        steps=[
            (after(0.003), after(0.0035), WAITING),
            (after(0.0065), after(0.007), WAITING),
            (after(0.009), after(0.023), COMPUTING),
            (after(0.040), after(0.041), 1),  # the second token
        ],
        submits=[(after(0.0032), "load", 7), (after(0.0095), "store", 8)],
        copies=[
            ("load", after(0.004), after(0.006), 1000),
            ("store", after(0.010), after(0.011), 100),
        ],
        reports=[(after(0.0068), (7,)), (after(0.041), (8,))],
    )


def make_gpu_hit() -> Watched:
    steps = [(after(0.004), after(0.018), COMPUTING)]
    return make_watched(steps=steps, scheduler_token_s=0.019, ttft_s=0.020)


def make_first(*, is_stored: bool) -> Watched:
    stores = [("store", after(0.5), after(0.504), 600), ("store", after(0.9), after(0.903), 400)]
    return make_watched(ttft_s=1.02 if is_stored else 1.0, copies=stores if is_stored else [])


def make_observed() -> list[Observed]:
    """One request of each kind and engine."""
    requests = [
        (BASELINE, FIRST_PLACE, make_first(is_stored=False)),
        (BASELINE, HOST_HIT_PLACE, make_first(is_stored=False)),  # it has no host, so it computes
        (BASELINE, GPU_HIT_PLACE, make_gpu_hit()),
        (CONNECTOR, FIRST_PLACE, make_first(is_stored=True)),
        (CONNECTOR, HOST_HIT_PLACE, make_host_hit()),
        (CONNECTOR, GPU_HIT_PLACE, make_gpu_hit()),
    ]
    return [Observed(engine, 1, place, watched) for engine, place, watched in requests]


def spans_of(watched: Watched) -> dict[str, float]:
    return Observed(CONNECTOR, 1, HOST_HIT_PLACE, watched).spans()


def test_the_spans_of_a_host_hit_follow_one_another():
    expected_ms = {
        TO_SCHEDULER: 2.0,
        TO_WORKER: 1.2,
        TO_COPY: 0.8,
        COPY: 2.0,
        TO_STEP: 0.8,
        TO_FORWARD: 2.2,
        FORWARD: 14.0,
        TO_TOKEN: 1.0,
        TO_USER: 1.0,
    }
    found = spans_of(make_host_hit())
    assert tuple(found) == SPANS
    assert set(SPANS) - spans_of(make_gpu_hit()).keys() == {TO_WORKER, TO_COPY, COPY, TO_STEP}
    assert {name: 1e3 * time_s for name, time_s in found.items()} == pytest.approx(expected_ms)


@pytest.mark.parametrize("watched", [make_host_hit(), make_gpu_hit()])
def test_the_spans_add_up_to_the_time_to_first_token(watched):
    assert sum(spans_of(watched).values()) == pytest.approx(watched.answer.ttft_s)


def test_loads_in_several_transfers_are_one_span_from_the_first_to_the_last():
    hit = make_host_hit()
    hit.probe["submits"].insert(1, (after(0.0033), "load", 9))
    hit.probe["copies"].append(("load", after(0.0062), after(0.0072), 50))
    hit.probe["reports"].insert(1, (after(0.0085), (9, 10)))
    spans = spans_of(hit)
    assert spans[TO_WORKER] == pytest.approx(0.0012)
    assert spans[COPY] == pytest.approx(0.0032)
    assert spans[TO_STEP] == pytest.approx(0.0013)
    assert sum(spans.values()) == pytest.approx(0.025)
    found = Observed(CONNECTOR, 1, HOST_HIT_PLACE, hit)
    assert found.copied("load") == (2, 1050, pytest.approx(0.003))


def test_a_prompt_that_is_computed_in_chunks_is_not_taken_apart():
    chunks = [(after(0.004), after(0.010), 64), (after(0.011), after(0.018), 36)]
    assert spans_of(make_watched(steps=chunks)) == {}


def test_what_the_medians_of_the_spans_leave_over_is_the_rest():
    """Two of three hits are 10 ms late, each in another span, so that no span's median knows."""
    late_in_forward = make_host_hit(ttft_s=0.035, scheduler_token_s=0.034)
    late_in_forward.probe["steps"][2] = (after(0.009), after(0.033), COMPUTING)
    late = [late_in_forward, make_host_hit(ttft_s=0.035)]
    more = [Observed(CONNECTOR, 2, HOST_HIT_PLACE, watched) for watched in late]
    rows = hit_rows([*make_observed(), *more])
    assert rows[FORWARD] == pytest.approx([14.0, 14.0, 14.0])
    assert rows[TO_USER] == pytest.approx([1.0, 1.0, 1.0])
    assert rows["rest"] == pytest.approx([10.0, 0.0, 0.0], abs=1e-6)
    assert rows[TTFT] == pytest.approx([35.0, 20.0, 20.0])


def test_the_table_is_printed_with_what_was_moved():
    text = render_breakdown(make_observed())
    assert "(medians of 1): 0.0 MB in 1 loads, 2.00 ms from issued to done" in text
    assert "0.0 MB in 2 stores, 7.00 ms from issued to done" in text
    (copy,) = (line for line in text.splitlines() if line.startswith(COPY))
    assert copy.split() == ["copy,", "its", "thread", "woken", "2.00"]


def test_nothing_is_printed_of_a_connector_whose_copies_are_not_seen():
    observed = make_observed()
    for one in observed:
        one.watched.probe["copies"].clear()
    assert render_breakdown(observed) == ""
