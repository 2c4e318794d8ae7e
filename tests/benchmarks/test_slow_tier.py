"""The benchmark `slow_tier`: its bound holds, its clock is right, a quiet step costs nothing."""

import json
from functools import cache

import pytest

from tests.benchmarks.__main__ import main
from tests.benchmarks.scheduler_probe import HookCounter, wrap_hooks
from tests.benchmarks.slow_tier import Case, Sample, make_engine, make_prompts, serve
from tests.simulator.vllm_setup import NONE

SPEED = 5_000
FAST, SLOW = "2 GB/s", "50 MB/s"
DEAD = "stalls from the start"
COMPUTED = Case(FAST, SPEED, "plain")


@cache
def computed(number: int, layout: str) -> list[Sample]:
    return serve(make_engine(Case(None, SPEED, layout), NONE), make_prompts(number, 1))


@cache
def samples_of(tier: str, number: int, layout: str = "plain") -> list[Sample]:
    """What the benchmark finds, in this process."""
    found = serve(make_engine(Case(tier, SPEED, layout)), make_prompts(number, 1))
    pairs = zip(found, computed(number, layout), strict=True)
    return [one.beside(other) for one, other in pairs]


@pytest.mark.parametrize("tier", [SLOW, DEAD, "one piece in 20 does not come", "never answers"])
def test_no_request_is_later_than_allowed_but_the_first(tier):
    samples = samples_of(tier, 40)
    late = [one for one in samples[1:] if one.ratio > 1]
    assert not late
    assert any(one.is_cut for one in samples)


def test_of_a_hybrid_model_neither():
    assert not [one for one in samples_of(DEAD, 15, "hybrid")[1:] if one.ratio > 1]


def test_what_a_fast_tier_has_is_fetched_and_a_slow_one_is_left_alone():
    def num_fetched(tier: str) -> int:
        return sum(one.num_fetched > 0 for one in samples_of(tier, 40)[20:])

    assert num_fetched(FAST) >= 10
    assert num_fetched(SLOW) <= 1


def test_a_run_writes_every_sample_and_fails_where_one_is_late(tmp_path, monkeypatch):
    late = Sample(200, 1.0, 9.0, 1.0, 0, is_cut=True)
    path = tmp_path / "samples.json"
    arguments = ["slow_tier", "--requests", "11", "--tiers", FAST, "--json", str(path)]
    for samples, status in (([late] * 11, 1), ([late] * 10 + samples_of(FAST, 1), 0)):
        monkeypatch.setattr(
            "tests.benchmarks.slow_tier.compare", lambda *_, samples=samples: {COMPUTED: samples}
        )
        assert main(arguments) == status
    (case,) = json.loads(path.read_text())["cases"]
    assert len(case["samples"]) == 11


# ---- what a tier costs where it has nothing to do ----------------------------------------------

NUM_RUNNING, NUM_STEPS, SHORT_PROMPT = 16, 120, 10


def steps_of(*, has_tier: bool) -> list[tuple[int, bool]]:
    """Instructions of the hooks in each step, and whether it has to do with tiers.

    All prompts are shorter than a block: there is nothing to look up, and what is generated is
    stored, and spilled if there is a tier.
    """
    engine = make_engine(Case(FAST if has_tier else None, SPEED, "plain"))
    engine.idle_until(1.0)
    engine.send("first", [1] * SHORT_PROMPT, 3)
    while "first" in engine.scheduler.requests:
        engine.step()
    engine.idle_until(2.0)
    counter = HookCounter()
    wrap_hooks(engine.connector, counter.wrap)
    for number in range(NUM_RUNNING):
        engine.send(str(number), [number] * SHORT_PROMPT, NUM_STEPS + 1)
    steps = []
    spills: set[int] = set()
    for _ in range(NUM_STEPS):
        before = counter.total.instructions
        engine.step()
        plan, report = engine.last_plan, engine.last_report
        spills.update(spill.transfer_id for spill in plan.spills)
        has_news = bool(plan.probes or plan.fetches or plan.spills) or (
            report is not None and any(o.transfer_id in spills for o in report.outcomes)
        )
        steps.append((counter.total.instructions - before, has_news))
    return steps


def test_a_step_without_news_of_tiers_costs_no_more_than_without_tiers():
    pairs = list(zip(steps_of(has_tier=False), steps_of(has_tier=True), strict=True))[1:]
    quiet = [(without, with_tier) for (without, _), (with_tier, has_news) in pairs if not has_news]
    assert len(pairs) > len(quiet) > NUM_STEPS // 2
    num_without, num_with = map(sum, zip(*quiet, strict=True))
    assert num_with <= 1.05 * num_without
