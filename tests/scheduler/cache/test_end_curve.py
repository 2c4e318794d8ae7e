"""Hit rates of other sizes for models with windows or states, against hosts of these sizes."""

from __future__ import annotations

import functools
import hashlib
import random
from typing import Any

import pytest

from safe_offload.scheduler.cache import end_curve
from safe_offload.scheduler.cache.end_curve import EndCurve
from safe_offload.scheduler.cache.hit_curve import FACTORS
from safe_offload.scheduler.features.estimates import Estimates
from tests.scheduler.features import feature_of
from tests.scheduler.timed_engine import SLOT_BYTES, TOKEN, Ask, TimedEngine, replay
from tests.simulator.vllm_setup import OURS, EngineShape

NUM_USERS, NUM_CONVERSATIONS = 12, 3
BLOCK_SIZE = 32
SLOTS = {"gemma3": 600, "mamba": 350}
GROUPS = {"gemma3": ("full@32", *["window:512@32"] * 2), "mamba": ("full@32", "mamba@32")}


def conversations() -> list[list[Ask]]:
    """Return what each user asks: one conversation after another, with one of four heads."""
    draw = random.Random(0)
    users = []
    for user in range(NUM_USERS):
        asks: list[Ask] = []
        for number in range(NUM_CONVERSATIONS):
            prompt = [draw.randrange(100, 104)] * (8 * BLOCK_SIZE)
            for turn in range(draw.randrange(2, 7)):
                word = 1000 + 100 * (NUM_CONVERSATIONS * user + number) + turn
                prompt = prompt + [word] * draw.randrange(60, 600)
                asks.append(Ask(prompt, 40, think_s=8 * draw.random()))
                prompt = prompt + [TOKEN] * 40
                if draw.random() < 0.2:  # it is asked otherwise
                    prompt = prompt[: -draw.randrange(100, 300)]
        users.append(asks)
    return users


@functools.cache
def served(kind: str, num_slots: int) -> tuple[float, dict[str, float]]:
    """Return the part of prompts that vLLM's scheduler and a host of this size hit, and gauges."""
    shape = EngineShape(
        groups=GROUPS[kind],
        num_blocks={"gemma3": 300, "mamba": 140}[kind],
        num_slots=num_slots,
        max_batched_tokens=2048,
        max_seqs=NUM_USERS,
        max_model_len=4000,
        retention_interval=0,
        extra={"min_load_tokens": 0, "eviction_policy": "lru", "estimate_hit_rates": True},
        connector=OURS,
        page_bytes=SLOT_BYTES,
    )
    engine = TimedEngine(shape)
    hit_rate = replay(engine, conversations(), every_s=0.5)
    gauges: dict[str, Any] = engine.connector.scheduler.gauges()
    return hit_rate, gauges


@pytest.mark.parametrize("kind", [pytest.param("gemma3", marks=pytest.mark.nightly), "mamba"])
def test_the_estimate_is_within_three_hundredths_of_hosts_of_other_sizes(kind):
    _, gauges = served(kind, SLOTS[kind])
    factors = {f"estimated_hits_{size}": factor for size, factor in FACTORS.items()}
    found = {factor: gauges[name] for name, factor in factors.items()}
    found[50] = gauges["estimated_hits_everything"]
    for factor, rate in found.items():
        served_rate, _ = served(kind, int(factor * SLOTS[kind]))
        assert rate == pytest.approx(served_rate, abs=0.03), factor
    assert found[50] > found[0.5] + 0.3, "sizes that all hit the same show nothing"


def keys(name: str, count: int) -> list[bytes]:
    return [hashlib.sha256(f"{name} {place}".encode()).digest() for place in range(count)]


def rates_of(curve: EndCurve) -> list[float]:
    return list(curve.rates().values())


def test_a_prompt_is_hit_as_far_as_the_last_end_before_it_parts():
    """Then that is an end, if attention was seen to go on up to there."""
    first, new = keys("first", 100), keys("new", 50)
    curve = EndCurve(1000, 1, [(1, 1)], 1)
    curve.see(first[:60], 59, ())
    curve.see(first, 99, ())  # hits 59
    assert rates_of(curve)[1] == pytest.approx(59 / 160)
    curve.see(first[:80] + new[:20], 99, ())  # hits 60, where prompts parted, and parts at 80
    curve.see(first[:80] + new[20:], 99, ())  # hits 80
    assert rates_of(curve)[1] == pytest.approx((59 + 60 + 80) / 370)


def test_windows_of_one_end_behind_another_take_what_is_new():
    """A state takes its slot each time; a window shares blocks with the one before."""
    prompt = keys("a", 100)
    for needs, num_free in (([(40, 1)], 300 - 100 - 40 - 10), ([(1, 1)], 300 - 100 - 3)):
        curve = EndCurve(300, 1, needs, 1)
        curve.see(prompt[:91], 90, ())
        curve.see(prompt, 100, ())
        assert curve.caches[1].num_free == num_free


def test_what_never_comes_back_takes_bounded_memory(monkeypatch):
    monkeypatch.setattr(end_curve, "NUM_KEPT_MAX", 2000)
    curve = EndCurve(1000, 1, [(8, 1)], 1)
    for number in range(200):
        curve.see(keys(f"{number}", 100), 99, ())
        curve.keep(keys(f"{number}", 102))
    everything = curve.caches[-1]
    assert len(everything.slots) == 2000 == len(everything.blocks) + len(everything.ends)
    assert rates_of(curve) == [0] * 5


def test_a_planner_estimates_hits_where_there_are_windows(make_rig):
    rig = make_rig(
        num_blocks=60,
        num_slots=64,
        groups=("full", "window:10"),
        extra={"estimate_hit_rates": True},
    )
    rig.run_alone("a", rig.prompt(20, 0), max_tokens=1)
    rig.run_alone("b", rig.prompt(20, 0), max_tokens=1)
    assert isinstance(feature_of(rig.planner, Estimates).curve, EndCurve)
    assert rig.planner.gauges()["estimated_hits_present"] == pytest.approx(0.4)
