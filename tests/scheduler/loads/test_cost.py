"""Whether a hit is offered: what was measured, and what follows from it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from safe_offload.scheduler.loads.cost import (
    FAR,
    GAUGES_EVERY_MAX,
    KEPT_SAMPLES,
    PROBE_EVERY,
    REFRESH_EVERY_MAX,
    SAMPLES_MIN,
    WAIT_SLACK_S,
    Costs,
    Curve,
    Offer,
    StepWatch,
    TierCosts,
    pays_in_step,
)
from tests.scheduler.rig import MakeRig, Rig
from tests.simulator.groups import BLOCK_TOKENS

STEP_TOKENS = 2048
STEP_S, TOKEN_S = 0.004, 20e-6
"""A step takes so long, and each token of it."""
LOAD_S, LOADED_TOKEN_S = 0.004, 1e-6


def measured(min_load_tokens: int | None = None, book: Any = None) -> Costs:
    """Costs of an engine whose steps and loads have taken what is above."""
    costs = Costs(min_load_tokens, STEP_TOKENS, book)
    for size in (1, 40, 300, 2048):
        for _ in range(SAMPLES_MIN):
            costs.steps.add(size, STEP_S + size * TOKEN_S)
            costs.loads.add(size, LOAD_S + size * LOADED_TOKEN_S)
    return costs


# ---- the decision ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("copy_s", "num_running", "num_waiting", "steps_s", "pays"),
    [
        pytest.param(9.0, 0, 3, [], True, id="nobody runs"),
        pytest.param(0.0, 1, 0, [0.01, 0.01], False, id="no load was timed"),
        pytest.param(0.001, 1, 0, [], False, id="no step was timed"),
        pytest.param(0.001, 1, 1, [0.01, 0.01], False, id="another waits"),
        pytest.param(0.001, 8, 0, [0.01, 0.01], True, id="it saves more"),
        pytest.param(0.001, 9, 0, [0.01, 0.01], False, id="it saves less"),
        pytest.param(0.001, 18, 0, [0.01, 0.01, 0.01], True, id="it saves two steps"),
        pytest.param(0.001, 8, 0, [9.0, 0.01, 0.004], False, id="one of the last was short"),
    ],
)
def test_a_hit_loads_in_its_step_if_others_wait_less_than_it_saves(
    copy_s, num_running, num_waiting, steps_s, pays
):
    assert pays_in_step(copy_s, num_running, num_waiting, steps_s) is pays


@pytest.mark.parametrize(
    ("num_tokens", "pays"), [(32, False), (128, False), (256, True), (16_000, True)]
)
def test_a_hit_is_offered_from_where_loading_is_faster(num_tokens, pays):
    assert measured().pays(Offer(num_tokens, 20)) == pays


def test_before_anything_was_measured_every_hit_is_offered():
    costs = Costs(None, STEP_TOKENS)
    assert costs.pays(Offer(1, 1))
    for _ in range(SAMPLES_MIN):
        costs.loads.add(16, 1.0)
        assert costs.pays(Offer(1, 1)), "no step was measured"


def test_a_load_under_way_costs_what_is_left_of_it():
    costs = measured()
    assert not costs.pays(Offer(128, 20))
    assert costs.pays(Offer(128, 20, loading_s=0.003))
    assert not costs.pays(Offer(128, 20, loading_s=60.0)), "late, and who knows for how long"


def test_computing_costs_all_requests_and_a_load_only_its_own():
    book = SimpleNamespace(num_live=1)
    costs = measured(book=book)
    offer = Offer(128, 20)
    assert costs.load_s(offer) == pytest.approx(1.6 * costs.compute_s(offer), rel=0.01)
    assert not costs.pays(offer)
    book.num_live, costs.scheduled = 2, {"a": 1}
    assert costs.pays(offer), "a step of the one that runs would be longer"
    answers = [costs.pays(offer) for _ in range(3 * PROBE_EVERY)]
    assert answers.count(False) == 3, "it barely pays"
    book.num_live = 4
    assert all(costs.pays(offer) for _ in range(3 * PROBE_EVERY)), "it pays well"


def test_the_planner_knows_whom_computing_delays(make_rig: MakeRig):
    rig = make_rig(extra={"min_load_tokens": "auto"})
    for name in "abc":
        rig.add(name, rig.prompt(3, ord(name)))
    assert rig.planner.costs.num_delayed == 3
    rig.step()
    assert rig.planner.costs.num_delayed == 3, "those that run too"


def test_what_is_refused_is_tried_now_and_then():
    costs = measured()
    answers = [costs.pays(Offer(32, 20)) for _ in range(3 * PROBE_EVERY)]
    assert sum(answers) == 3


def test_who_waits_for_a_load_is_not_made_to_compute_for_a_measurement():
    costs = measured()
    waits = Offer(256, 20, loading_s=0.0005)
    assert all(costs.pays(waits) for _ in range(3 * PROBE_EVERY))


@pytest.mark.parametrize("was_slow", [True, False])
def test_what_computing_takes_is_learned_again_from_the_hits_that_are_tried(was_slow):
    """Every prompt is a hit, so that nothing else is ever computed; then the machine changes."""
    costs = measured()
    before_s, after_s = (TOKEN_S, TOKEN_S / 4) if was_slow else (TOKEN_S / 4, TOKEN_S)
    answers = [serve_hit(costs, token_s) for token_s in [before_s] * 1000 + [after_s] * 1000]
    assert sum(answers[900:1000]) == pytest.approx(97 if was_slow else 3, abs=1)
    assert sum(answers[1900:]) == pytest.approx(3 if was_slow else 97, abs=1)


def serve_hit(costs: Costs, token_s: float) -> bool:
    """Let a hit of 256 tokens be loaded or computed, and note what that took."""
    if costs.pays(Offer(256, 20)):
        costs.loads.add(256, LOAD_S + 256 * LOADED_TOKEN_S)
        costs.steps.add(20, STEP_S + 20 * token_s)
        return True
    costs.steps.add(276, STEP_S + 276 * token_s)
    return False


def test_what_others_generate_is_computed_in_any_case():
    costs = Costs(None, STEP_TOKENS)
    for _ in range(SAMPLES_MIN):
        for size, seconds in ((16, 0.004), (64, 0.004), (512, 0.04)):
            costs.steps.add(size, seconds)
        costs.loads.add(32, 0.001)
    assert not costs.pays(Offer(32, 1)), "a step of so few tokens takes no longer for them"
    costs.scheduled = dict.fromkeys(map(str, range(60)), 1)
    assert costs.pays(Offer(32, 1))


def test_a_long_hit_is_not_refused_because_only_short_ones_were_loaded():
    costs = Costs(None, STEP_TOKENS)
    for _ in range(SAMPLES_MIN):
        costs.loads.add(32, 0.004)
        costs.steps.add(1, 0.004)
        costs.steps.add(2048, 0.04)
    assert costs.pays(Offer(16_000, 20))


# ---- what hits have saved ----------------------------------------------------------------------


@pytest.mark.parametrize(("num_tokens", "num_left"), [(256, 20), (2000, 20), (9000, 300)])
def test_a_hit_saves_what_computing_it_would_have_added(num_tokens, num_left):
    costs, offer = measured(), Offer(num_tokens, num_left)
    assert costs.saved_s(offer) == pytest.approx(costs.compute_s(offer))


def after_a_warm_restart() -> Costs:
    """Costs of an engine that has loaded all but the tails of long prompts."""
    costs = Costs(None, STEP_TOKENS)
    for _ in range(SAMPLES_MIN):
        for size in (16, 20):
            costs.loads.add(2000, LOAD_S + 2000 * LOADED_TOKEN_S)
            costs.steps.add(size, STEP_S + size * TOKEN_S)
    return costs


def test_what_was_never_computed_is_counted_as_the_largest_step_that_was():
    costs = after_a_warm_restart()
    assert costs.compute_s(Offer(2000, 20)) > 5 * 2000 * TOKEN_S, "decisions take it for dear"
    assert costs.saved_s(Offer(2000, 20)) <= 4 * TOKEN_S
    assert costs.saved_s(Offer(2000, 1)) <= 4 * TOKEN_S, "less than 16 was not computed either"
    costs.steps.add(1000, STEP_S + 1000 * TOKEN_S)
    assert costs.saved_s(Offer(2000, 20)) == pytest.approx(980 * TOKEN_S, rel=0.01)


def test_the_speed_of_steps_much_smaller_than_loads_is_not_shown():
    costs = after_a_warm_restart()
    assert costs.gauges()["compute_tokens_per_second"] == 0
    for _ in range(GAUGES_EVERY_MAX):
        costs.steps.add(2000 // FAR, STEP_S + 2000 // FAR * TOKEN_S)
    assert costs.gauges()["compute_tokens_per_second"] == round(500 / (STEP_S + 500 * TOKEN_S))


def test_what_computing_takes_is_learned_after_a_restart_in_which_every_prompt_is_a_hit():
    """A tier takes four times as long as computing, which has not been measured: once is enough."""
    costs = after_a_warm_restart()
    tiers, offer, num_slots = TierCosts(costs, 1), Offer(1990, 20), 124
    true_s = 1990 * TOKEN_S
    tiers.add_fetch(1, num_slots, 4 * true_s)
    answers = []
    for _ in range(3 * PROBE_EVERY):
        answers.append(tiers.fetch_pays(offer, num_slots, 1))
        if answers[-1] and costs.pays(offer):
            costs.loads.add(1990, LOAD_S + 1990 * LOADED_TOKEN_S)
            costs.steps.add(20, STEP_S + 20 * TOKEN_S)
        else:
            costs.steps.add(2010, STEP_S + 2010 * TOKEN_S)
    assert answers.count(True) <= PROBE_EVERY + REFRESH_EVERY_MAX
    assert costs.compute_s(offer) == pytest.approx(true_s, rel=0.1)


# ---- how long a tier is waited for -------------------------------------------------------------


@pytest.mark.parametrize("loaded_token_s", [LOADED_TOKEN_S, TOKEN_S / 2])
@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.9, 1.0])
@pytest.mark.parametrize("num_tokens", [64, 2000, 16_000])
def test_a_tier_that_stalls_makes_no_request_a_tenth_later(num_tokens, share, loaded_token_s):
    """What has come is loaded, the rest computed, a little faster than was measured before."""
    costs = Costs(None, STEP_TOKENS)
    for size in (1, 40, 300, 2048):
        for _ in range(SAMPLES_MIN):
            costs.steps.add(size, STEP_S + size * TOKEN_S)
            costs.loads.add(size, LOAD_S + size * loaded_token_s)
    offer, num_come = Offer(num_tokens, 20), int(share * num_tokens)
    wait_s = TierCosts(costs, 1).wait_max_s(offer, share)
    assert wait_s is not None
    after_s = 0.0
    if costs.pays(Offer(num_come, 20 + num_tokens - num_come)):
        after_s = costs.load_s(Offer(num_come, 0))
        num_come = num_tokens - num_come
        after_s += costs.compute_s(Offer(num_come, 20))
    else:
        after_s = costs.compute_s(offer)
    assert wait_s + 0.97 * after_s <= 1.1 * 0.97 * costs.compute_s(offer) + WAIT_SLACK_S
    assert wait_s >= 0.05 * costs.compute_s(offer)


@pytest.mark.parametrize("sizes", [(2, 3), (2, 20), (3, 40, 41), (1, 2, 4, 9)])
def test_who_has_computed_only_little_does_not_take_much_for_cheap(sizes):
    """Steps of few tokens take equally long, which says nothing of one of thousands."""
    costs = Costs(None, STEP_TOKENS)
    for size in sizes * SAMPLES_MIN:
        costs.steps.add(size, STEP_S + size * TOKEN_S / 100)
    wait_s = TierCosts(costs, 1).wait_max_s(Offer(16_000, 20), 0.0)
    assert wait_s is not None
    assert wait_s >= WAIT_SLACK_S + 0.05 * (16_000 * TOKEN_S)


# ---- curves ------------------------------------------------------------------------------------


@given(
    st.lists(st.tuples(st.integers(1, 10**6), st.floats(1e-6, 100)), min_size=1, max_size=40),
    st.integers(0, 10**7),
    st.booleans(),
)
def test_a_curve_always_has_an_answer(samples, size, is_cheap):
    curve = Curve(is_cheap_beyond=is_cheap)
    for sample in samples:
        curve.add(*sample)
    assert 0 <= curve.at(size) < float("inf")


def test_more_never_takes_less():
    curve = Curve(is_cheap_beyond=False)
    for size, seconds in ((1, 3.0), (10, 1.0), (100, 2.0), (1000, 9.0)):
        curve.add(size, seconds)
    assert [seconds for _, seconds in curve.points] == [2, 2, 2, 9]


def test_between_two_sizes_it_is_a_line():
    curve = Curve(is_cheap_beyond=False)
    curve.add(100, 1.0)
    assert [curve.at(size) for size in (0, 50, 200)] == [0, 0.5, 2]
    curve.add(300, 2.0)
    assert [curve.at(size) for size in (0, 50, 100, 200, 300, 500)] == [0, 0.75, 1, 1.5, 2, 3]


def test_far_beyond_what_was_measured_dear_grows_with_the_size_and_cheap_does_not():
    for is_cheap, factor in ((False, 100), (True, 1)):
        curve = Curve(is_cheap_beyond=is_cheap)
        for size in (5, 10):
            curve.add(size, 2.0)
        assert curve.at(10 * FAR) == 2.0
        assert curve.at(10 * FAR * 100) == 2.0 * factor


def test_one_slow_step_among_few_does_not_raise_what_larger_ones_take():
    curve = Curve(is_cheap_beyond=False)
    curve.add(10, 5.0)
    for _ in range(KEPT_SAMPLES):
        curve.add(100, 2.0)
    assert dict(curve.points)[100] < 2.2
    curve.add(10, 1.0)
    assert dict(curve.points)[100] == 2.0, "of two, the faster one counts"


# ---- how long a step takes ---------------------------------------------------------------------


def watched(
    num_in_flight: int, *steps: tuple[dict[str, int], float], begins: str = "", waits: bool = False
) -> list[tuple[int, float]]:
    """What is noted of steps, planned at these times; requests named in `begins` are new.

    `waits`: all of them wait for loads.
    """
    noted: list[tuple[int, float]] = []
    costs = Costs(None, STEP_TOKENS)
    costs.steps.add = lambda size, seconds: noted.append((size, round(seconds, 6)))  # type: ignore[method-assign]
    watch = StepWatch(costs, num_in_flight, 1)
    for scheduled, now_s in steps:
        new = [name for name in scheduled if name in begins]
        begins = "".join(name for name in begins if name not in new)
        output: Any = SimpleNamespace(
            num_scheduled_tokens=scheduled,
            total_num_scheduled_tokens=sum(scheduled.values()),
            scheduled_new_reqs=new,
            has_sync_kv_loads=waits,
        )
        watch.planned(output, now_s)
    return noted


A = {"a": 1}
STEPS: dict[str, tuple[int, str, list[Any], list[tuple[int, float]]]] = {
    "a step takes until the next of the same request is planned": (
        *(1, "", [({"a": 100}, 1.0), (A, 1.5), ({"a": 1, "b": 7}, 1.6), ({"b": 1}, 2.0)]),
        [(100, 0.5), (8, 0.4)],  # one that only generates is not timed
    ),
    "a step in which a request begins is timed however few its tokens": (
        *(1, "b", [(A, 1.0), (A, 1.5), ({"a": 1, "b": 1}, 1.6), ({"b": 1}, 2.0)]),
        [(2, 0.4)],
    ),
    "an idle engine says nothing": (
        *(1, "", [({"a": 100}, 1.0), ({"b": 1}, 9.0), ({}, 10.0), ({"c": 1}, 11.0)]),
        [],
    ),
    "with two steps in flight the third is planned when the first has ended": (
        *(2, "", [({"a": 100}, 1.0), (A, 1.001), ({"a": 2}, 1.5), (A, 1.6)]),
        [(100, 0.499)],
    ),
    "and the fourth when the second has": (
        *(2, "", [({"a": 100}, 1.0), (A, 1.001), ({"a": 2}, 1.5), (A, 1.6), (A, 1.7)]),
        [(100, 0.499), (2, 0.1)],
    ),
    "a step that is timed counts if the engine goes on without a pause": (
        *(1, "", [({"a": 100}, 1.0), ({"b": 50}, 1.5), ({"b": 1}, 1.6)]),
        [(50, 0.1)],
    ),
}


@pytest.mark.parametrize("name", STEPS)
def test_what_is_noted_of_steps(name):
    num_in_flight, begins, steps, noted = STEPS[name]
    assert watched(num_in_flight, *steps, begins=begins) == noted
    assert watched(num_in_flight, *steps, begins=begins, waits=True) == []


# ---- on vLLM's real scheduler ------------------------------------------------------------------


def make_stored(make_rig: MakeRig, limit: Any = "auto", **shape: Any) -> Rig:
    """An engine whose host has a prompt that its GPU has not."""
    rig = make_rig(num_blocks=60, extra={"min_load_tokens": limit}, **shape)
    rig.start()
    rig.run_alone("a", rig.prompt(41, 1))
    rig.forget_gpu_cache()
    return rig


def finish_both(rig: Rig) -> None:
    rig.hold_copies(False)
    rig.drain()
    rig.check_tokens("first", 4)
    rig.check_tokens("second", 4)
    rig.check_idle()


def measure(rig: Rig, load_s: float) -> None:
    """Let it believe that a token takes a second, and every load so long."""
    for size in (1, 2, 4, 8, 16, 32, 64):
        for _ in range(KEPT_SAMPLES):
            rig.planner.costs.steps.add(size, 1.0 * size)
            rig.planner.costs.loads.add(size, load_s)


@pytest.mark.parametrize(("load_s", "num_hit_tokens"), [(1000.0, 0), (0.001, 40)])
def test_a_hit_that_does_not_pay_is_computed(make_rig, load_s, num_hit_tokens):
    rig = make_stored(make_rig)
    measure(rig, load_s)
    assert rig.run_alone("again", rig.prompt(41, 1)) == num_hit_tokens
    assert bool(rig.counts["skipped_hits"]) == (num_hit_tokens == 0)
    rig.check_idle()


def test_a_hit_that_does_not_pay_is_refused_once_however_often_vllm_asks(make_rig):
    rig = make_stored(make_rig)
    measure(rig, 1000.0)
    rig.add("again", rig.prompt(41, 1))
    request = rig.scheduler.requests["again"]
    asked = [
        rig.planner.get_num_new_matched_tokens(request, 0, rig.clock.now_s)
        for _ in range(3 * PROBE_EVERY)
    ]
    assert set(asked) == {0}, "it is not for its asking that another is tried"
    rig.drain()
    assert rig.counts["skipped_hits"] == 1
    rig.check_idle()


def test_the_gauges_follow_what_is_measured():
    costs = Costs(None, STEP_TOKENS)
    assert set(costs.gauges().values()) == {0}
    costs.loads.add(100, 0.5)
    assert costs.gauges()["load_latency_seconds"] == 0.5
    for _ in range(4 * GAUGES_EVERY_MAX):
        costs.loads.add(100, 0.25)
        costs.steps.add(100, 0.5)
        costs.gauges()
    assert costs.gauges() == {
        "compute_tokens_per_second": 200,
        "load_tokens_per_second": 400,
        "load_latency_seconds": 0.25,
    }


def test_loads_and_steps_are_measured_while_requests_are_served(make_rig):
    rig = make_stored(make_rig)
    rig.run_alone("again", rig.prompt(41, 1), max_tokens=12)
    costs = rig.planner.costs
    assert costs.loads.num_samples == 1
    assert [round(size) for size, _ in costs.loads.points] == [40]
    assert costs.steps.num_samples == 3, "answers are not timed"


@pytest.mark.parametrize(("limit", "num_hit_tokens"), [(40, 40), (41, 0)])
def test_a_number_of_tokens_decides_alone(make_rig, limit, num_hit_tokens):
    rig = make_stored(make_rig, limit)
    assert rig.run_alone("again", rig.prompt(41, 1)) == num_hit_tokens
    rig.check_idle()


def test_a_load_that_computing_overtakes_is_not_waited_for(make_rig):
    rig = make_stored(make_rig, max_seqs=16)
    rig.hold_copies(True)
    rig.add("first", rig.prompt(41, 1))
    rig.planned_step()
    measure(rig, 1000.0)
    rig.add("second", rig.prompt(41, 1))
    rig.planned_step()
    assert rig.scheduler.requests["second"].status.name == "RUNNING"
    assert rig.counts["shared_waits"] == 0
    finish_both(rig)
    assert rig.counts["loaded_blocks"] == 40 // BLOCK_TOKENS
