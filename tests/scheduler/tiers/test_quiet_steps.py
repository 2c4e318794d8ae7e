"""What a tier costs where it has nothing to do."""

from tests.benchmarks.scheduler_probe import HookCounter, wrap_hooks
from tests.scheduler.timed_engine import SLOT_BYTES, TimedEngine
from tests.simulator.vllm_setup import OURS, EngineShape

NUM_RUNNING, NUM_STEPS, SHORT_PROMPT = 16, 120, 10


def steps_of(*, has_tier: bool) -> list[tuple[int, bool]]:
    """Instructions of the hooks in each step, and whether it has to do with tiers.

    All prompts are shorter than a block: there is nothing to look up, and what is generated is
    stored, and spilled if there is a tier.
    """
    tiers = {"tiers": [{"url": "file:///nowhere"}]} if has_tier else {}
    shape = EngineShape(
        groups=("full@16",),
        num_blocks=2_000,
        num_slots=6_000,
        max_batched_tokens=2048,
        max_seqs=16,
        max_model_len=16_016,
        extra={"min_load_tokens": "auto", **tiers},
        connector=OURS,
        page_bytes=SLOT_BYTES,
    )
    engine = TimedEngine(shape)
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
    assert bool(spills) == has_tier
    return steps


def test_a_step_without_news_of_tiers_costs_no_more_than_without_tiers():
    pairs = list(zip(steps_of(has_tier=False), steps_of(has_tier=True), strict=True))[1:]
    quiet = [(without, with_tier) for (without, _), (with_tier, has_news) in pairs if not has_news]
    assert len(pairs) > len(quiet) > NUM_STEPS // 2
    num_without, num_with = map(sum, zip(*quiet, strict=True))
    assert num_with <= 1.05 * num_without
