"""Hit rates of other sizes, from a sample of blocks, against caches of these sizes."""

from __future__ import annotations

import hashlib
import pickle

import pytest

from safe_offload.scheduler.cache import hit_curve
from safe_offload.scheduler.cache.hit_curve import FACTORS, NUM_SEEN_MAX, HitCurve
from safe_offload.scheduler.eviction.policy import EvictionPolicy
from tests.scheduler.eviction.replay import replay
from tests.scheduler.eviction.traces import Trace, make_trace


def hashed(trace: Trace) -> list[list[bytes]]:
    """Give the keys the look of block hashes, of which the sample is taken."""
    return [[hashlib.sha256(key).digest() for key in prompt] for prompt in trace.prompts]


def curve_of(prompts: list[list[bytes]], num_slots: int) -> HitCurve:
    curve = HitCurve(num_slots)
    for prompt in prompts:
        curve.see(prompt)
    return curve


@pytest.mark.parametrize("name", ["documents", "agents", "mooncake"])
def test_the_estimate_is_within_three_hundredths_of_a_replay(name):
    trace = make_trace(name, 1000)
    num_slots = trace.working_set // 10
    sizes = [*(int(factor * num_slots) for factor in FACTORS.values()), trace.working_set]
    found = curve_of(hashed(trace), num_slots).rates().values()
    for size, rate in zip(sizes, found, strict=True):
        expected = replay(trace, EvictionPolicy, size, 0, num_running=0).hit_rate
        assert rate == pytest.approx(expected, abs=0.03), size


def test_what_never_comes_back_is_never_hit_and_takes_bounded_memory():
    curve, sizes = HitCurve(2000), []
    for number in range(60):
        curve.see([hashlib.sha256(b"%d %d" % (number, i)).digest() for i in range(1000)])
        sizes.append(len(pickle.dumps(curve)))
    assert all(rate < 0.03 for rate in curve.rates().values())
    assert max(sizes) < 60 * (NUM_SEEN_MAX + 8 * 1024 * 2)
    assert max(sizes[30:]) <= 1.2 * max(sizes[:30])


def test_of_a_prompt_that_is_too_long_the_head_is_held():
    keys = [hashlib.sha256(b"%d" % i).digest() for i in range(20)]
    found = curve_of([keys, keys[:10]], 10).rates()
    assert found["estimated_hits_present"] == pytest.approx(10 / 30)
    assert found["estimated_hits_half"] == pytest.approx(5 / 30)


def test_what_was_asked_long_ago_counts_less(monkeypatch):
    monkeypatch.setattr(hit_curve, "NUM_REQUESTED_MAX", 1000)
    again = [hashlib.sha256(b"%d" % i).digest() for i in range(100)]
    once = [[hashlib.sha256(b"%d %d" % (n, i)).digest() for i in range(100)] for n in range(100)]
    assert curve_of([*once, *[again] * 100], 1000).rates()["estimated_hits_present"] > 0.95
    assert curve_of([*[again] * 100, *once], 1000).rates()["estimated_hits_present"] < 0.05


def test_a_planner_that_estimates_tells_it_and_others_do_not(make_rig):
    for estimates in (False, True):
        rig = make_rig(num_blocks=40, num_slots=64, extra={"estimate_hit_rates": estimates})
        rig.run_alone("a", rig.prompt(20, 0), max_tokens=1)
        rig.run_alone("b", rig.prompt(20, 0), max_tokens=1)
        found = rig.planner.gauges().get("estimated_hits_present")
        assert found == (pytest.approx(0.5) if estimates else None)


@pytest.mark.parametrize(
    ("params", "rate"),
    [
        (None, 0.5),
        ({"max_offload_tokens": 0}, 0.0),
        ({"store": "nothing"}, 0.0),
        ({"max_load_tokens": 0}, 1.0),
    ],
)
def test_an_estimate_counts_what_may_be_stored_and_hit(make_rig, params, rate):
    rig = make_rig(num_blocks=40, num_slots=64, extra={"estimate_hit_rates": True})
    rig.kv_transfer_params = params
    rig.run_alone("a", rig.prompt(20, 0), max_tokens=1)
    rig.kv_transfer_params = None
    rig.run_alone("b", rig.prompt(20, 0), max_tokens=1)
    assert rig.planner.gauges()["estimated_hits_present"] == pytest.approx(rate)
