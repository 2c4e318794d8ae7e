"""Where a request's time goes: spans, sums and tables, from observations made by hand."""

from __future__ import annotations

import json
from typing import Any

import pytest

from safe_offload.bench.engine_breakdown import (
    COPY,
    FIRST,
    FORWARD,
    GPU_HIT,
    HOST_HIT,
    MEMCPY,
    SPANS,
    TO_COPY,
    TO_FORWARD,
    TO_SCHEDULER,
    TO_STEP,
    TO_TOKEN,
    TO_USER,
    TO_WORKER,
    TTFT,
    Breakdown,
    CopySums,
    Observed,
    copies_of,
    first_pass_rows,
    hit_rows,
    render_breakdown,
    spans_of,
)
from safe_offload.bench.engine_process import Answer
from safe_offload.bench.engine_watch import FORWARD as FORWARD_THREAD
from safe_offload.bench.engine_watch import LOOP, ROLES, STORES, ThreadUse, Watched

ARRIVAL_S = 100.0
BASELINE = "no connector"
WAITING, COMPUTING = 0, 32


def make_watched(
    *,
    ttft_s: float = 0.025,
    queued_s: float = 0.002,
    scheduler_token_s: float = 0.024,
    uses: dict[str, ThreadUse] | None = None,
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
        uses=uses if uses is not None else {role: ThreadUse() for role in ROLES},
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
            ("load", after(0.004), after(0.006), 1000, 10),
            ("store", after(0.010), after(0.011), 100, 1),
        ],
        reports=[(after(0.0068), (7,)), (after(0.041), (8,))],
    )


def make_gpu_hit() -> Watched:
    return make_watched(
        steps=[(after(0.004), after(0.018), COMPUTING)], scheduler_token_s=0.019, ttft_s=0.020
    )


def make_first(*, is_stored: bool) -> Watched:
    uses = {role: ThreadUse(0.010, 0.001, 2) for role in ROLES}
    uses[FORWARD_THREAD] = ThreadUse(1.0, 0.060 if is_stored else 0.020, 5)
    if not is_stored:
        uses[LOOP] = uses[STORES] = ThreadUse()
    stores = [
        ("store", after(0.5), after(0.504), 600, 6),
        ("store", after(0.9), after(0.903), 400, 4),
    ]
    return make_watched(
        ttft_s=1.02 if is_stored else 1.0, uses=uses, copies=stores if is_stored else []
    )


def make_breakdown() -> Breakdown:
    """One request of each kind and engine."""
    requests = [
        (BASELINE, FIRST, make_first(is_stored=False)),
        (BASELINE, HOST_HIT, make_first(is_stored=False)),  # it has no host, so it computes
        (BASELINE, GPU_HIT, make_gpu_hit()),
        ("connector", FIRST, make_first(is_stored=True)),
        ("connector", HOST_HIT, make_host_hit()),
        ("connector", GPU_HIT, make_gpu_hit()),
    ]
    observed = [Observed(engine, kind, 1, watched) for engine, kind, watched in requests]
    return Breakdown(BASELINE, observed, {"load": [0.0015], "store": [0.005]})


def test_the_spans_of_a_host_hit_follow_one_another() -> None:
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
    assert {name: 1e3 * time_s for name, time_s in found.items()} == pytest.approx(expected_ms)


@pytest.mark.parametrize("watched", [make_host_hit(), make_gpu_hit()])
def test_the_spans_add_up_to_the_time_to_first_token(watched: Watched) -> None:
    assert sum(spans_of(watched).values()) == pytest.approx(watched.answer.ttft_s)


def test_a_hit_on_the_gpu_has_no_spans_of_a_load() -> None:
    assert set(SPANS) - spans_of(make_gpu_hit()).keys() == {TO_WORKER, TO_COPY, COPY, TO_STEP}


def test_loads_in_several_transfers_are_one_span_from_the_first_to_the_last() -> None:
    hit = make_host_hit()
    hit.probe["submits"].insert(1, (after(0.0033), "load", 9))
    hit.probe["copies"].append(("load", after(0.0062), after(0.0072), 50, 5))
    hit.probe["reports"].insert(1, (after(0.0085), (9, 10)))
    spans = spans_of(hit)
    assert spans[TO_WORKER] == pytest.approx(0.0012)
    assert spans[COPY] == pytest.approx(0.0032)
    assert spans[TO_STEP] == pytest.approx(0.0013)
    assert sum(spans.values()) == pytest.approx(0.025)
    assert copies_of(hit, "load") == CopySums(2, 15, 1050, pytest.approx(0.003))


def test_a_prompt_that_is_computed_in_chunks_is_not_taken_apart() -> None:
    chunks = [(after(0.004), after(0.010), 64), (after(0.011), after(0.018), 36)]
    assert spans_of(make_watched(steps=chunks)) == {}


def test_copies_are_summed_by_direction() -> None:
    assert copies_of(make_first(is_stored=True), "store") == CopySums(
        2, 10, 1000, pytest.approx(0.007)
    )
    assert copies_of(make_first(is_stored=True), "load") == CopySums(0, 0, 0, 0.0)


def test_what_the_medians_of_the_spans_leave_over_is_the_rest() -> None:
    """Two of three hits are 10 ms late, each in another span, so that no span's median knows."""
    breakdown = make_breakdown()
    late_in_forward = make_host_hit(ttft_s=0.035, scheduler_token_s=0.034)
    late_in_forward.probe["steps"][2] = (after(0.009), after(0.033), COMPUTING)
    for late in (late_in_forward, make_host_hit(ttft_s=0.035)):
        breakdown.observed.append(Observed("connector", HOST_HIT, 2, late))
    rows = {row.name: row.values_ms for row in hit_rows(breakdown)}
    assert rows[FORWARD] == pytest.approx((14.0, 14.0, 14.0))
    assert rows[TO_USER] == pytest.approx((1.0, 1.0, 1.0))
    assert rows["rest"] == pytest.approx((10.0, 0.0, 0.0), abs=1e-6)
    assert rows[TTFT] == pytest.approx((35.0, 20.0, 20.0))


def test_the_memcpy_limit_stands_below_the_copy_and_is_in_no_sum() -> None:
    rows = hit_rows(make_breakdown())
    names = [row.name for row in rows]
    assert names.index(MEMCPY) == names.index(COPY) + 1
    by_name = {row.name: row.values_ms for row in rows}
    assert by_name[MEMCPY] == pytest.approx((1.5, None, None))
    assert sum(by_name[span][0] or 0.0 for span in SPANS) == pytest.approx(by_name[TTFT][0])


def test_the_first_pass_says_who_used_more_than_without_a_connector() -> None:
    rows = {row.name: row.values_ms for row in first_pass_rows(make_breakdown())}
    assert rows[TTFT] == pytest.approx((1000.0, 1020.0, 20.0))
    assert rows[f"CPU: {STORES}"] == pytest.approx((0.0, 10.0, 10.0))
    assert rows[f"CPU: {FORWARD_THREAD}"] == pytest.approx((1000.0, 1000.0, 0.0))
    assert rows["the forward's thread waits for its core"] == pytest.approx((20.0, 60.0, 40.0))
    assert rows["copies of the stores, begin to end"] == pytest.approx((None, 7.0, None))
    assert rows[MEMCPY] == pytest.approx((None, 5.0, None))


def test_the_tables_are_printed_with_what_was_moved() -> None:
    text = render_breakdown(make_breakdown())
    assert "(medians of 1): 0.0 MB in 10 pieces, 1 transfers, loaded" in text
    assert "0.0 MB in 10 pieces, 2 transfers, stored" in text
    assert "2 page faults in our copying threads" in text
    (copy,) = (line for line in text.splitlines() if line.startswith("copy "))
    assert copy.split() == ["copy", "2.00"]


def test_nothing_is_printed_of_a_connector_that_cannot_be_watched() -> None:
    breakdown = make_breakdown()
    for observed in breakdown.observed:
        observed.watched.probe["copies"].clear()
    assert render_breakdown(breakdown) == ""
    json.dumps(breakdown.to_json())


def test_the_json_file_holds_rows_and_requests() -> None:
    content = json.loads(json.dumps(make_breakdown().to_json()))
    assert content["hit_ms"]["copy"] == [pytest.approx(2.0), None, None]
    assert content["first_pass_ms"][TTFT] == pytest.approx([1000.0, 1020.0, 20.0])
    assert content["memcpy_s"] == {"load": [0.0015], "store": [0.005]}
    assert len(content["requests"]) == 6
    hit = content["requests"][4]
    assert hit["load"]["size_bytes"] == 1000
    assert hit["spans_s"][FORWARD] == pytest.approx(0.014)
    assert hit["uses"][STORES]["num_page_faults"] == 0
