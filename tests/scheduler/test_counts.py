"""What an operator reads off the counters: evictions, resets, slots."""

import logging

import pytest

from safe_offload.scheduler.planner import START_STEPS_MAX
from tests.scheduler.rig import Rig

NUM_TOKENS = 41
NUM_BLOCKS = 10


def serve(rig: Rig, prompts: list[int], pause_s: float = 30.0) -> list[int]:
    """Send prompts one after another, none of which the GPU remembers; return their hits."""
    hits = []
    for number, seed in enumerate(prompts):
        hits.append(rig.run_alone(f"{number}-{seed}", rig.prompt(NUM_TOKENS, seed), max_tokens=1))
        rig.forget_gpu_cache()
        rig.clock.advance(pause_s)
    return hits


def evicted(rig: Rig) -> dict[str, int]:
    """Blocks evicted, by whether they had been hit, and the age of a block on average."""
    hit = rig.counts['evicted_blocks{hit="true"}']
    unhit = rig.counts['evicted_blocks{hit="false"}']
    age_s = rig.counts["evicted_age_seconds"] // max(hit + unhit, 1)
    return {"hit": hit, "unhit": unhit, "age_s": age_s}


# ---- evictions: why there are no hits ----------------------------------------------------------


def test_a_pool_too_small_evicts_young_blocks(make_rig):
    rig = make_rig(num_blocks=40, num_slots=NUM_BLOCKS, extra={"eviction_policy": "lru"})
    assert serve(rig, [1, 2, 1, 2, 3, 1]) == [0] * 6
    seen = evicted(rig)
    assert (seen["hit"], seen["unhit"]) == (0, 5 * NUM_BLOCKS)
    assert 30 <= seen["age_s"] < 60, "each prompt is gone before the next but one comes"


def test_what_was_hit_once_is_told_apart(make_rig):
    rig = make_rig(num_blocks=40, num_slots=2 * NUM_BLOCKS)
    serve(rig, [1, 1, 2, 3, 4])
    seen = evicted(rig)
    assert (seen["hit"], seen["unhit"]) == (NUM_BLOCKS, NUM_BLOCKS)
    serve(rig, [5, 6], pause_s=1.0)
    assert evicted(rig)["hit"] == NUM_BLOCKS, "what a slot holds now was not hit"


# ---- resets ------------------------------------------------------------------------------------


def test_a_reset_of_the_host_cache_is_counted_and_logged_in_one_line(make_rig, package_log):
    rig = make_rig(num_blocks=40, num_slots=60)
    serve(rig, [1])
    package_log.clear()
    rig.scheduler.reset_prefix_cache()
    assert not package_log, "the GPU's alone is none of ours"
    rig.scheduler.reset_prefix_cache(reset_connector=True)
    (record,) = package_log
    assert record.levelno == logging.INFO
    assert "host cache was reset" in record.getMessage()
    assert f"{NUM_BLOCKS} slots" in record.getMessage()
    serve(rig, [2])
    assert rig.counts["resets"] == 1


# ---- slots, from the start ---------------------------------------------------------------------


@pytest.mark.parametrize("shape", [{}, {"tensor_ranks": 2}, {"is_async": True}])
def test_an_engine_without_requests_learns_how_many_slots_there_are(make_rig, shape):
    rig = make_rig(num_slots=60, num_missing_slots=4, **shape)
    assert rig.connector.has_pending_push_work()
    num_steps = rig.drain()
    num_ranks = rig.shape.num_ranks
    assert rig.planner.gauges()["slots"] == 60 - 4 * (num_ranks - 1)
    assert num_steps < 10
    rig.check_idle()


def test_an_engine_goes_idle_although_no_rank_tells_its_slots(make_rig):
    rig = make_rig(num_slots=60)
    for worker in rig.workers:
        worker.device.num_usable_slots = 0
    assert rig.drain(START_STEPS_MAX + 10) <= START_STEPS_MAX + 2
    assert rig.planner.gauges()["slots"] == 0
    assert not rig.connector.has_pending_push_work()
