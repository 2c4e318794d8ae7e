"""Lazy stores: what the GPU is about to forget is on the host before it does, and seldom sooner."""

from __future__ import annotations

import random
from typing import Any

import pytest

from safe_offload.scheduler.blocks import block_hash_of, get_block_hash, get_group_id
from safe_offload.scheduler.cache.leases import LeaseKind
from tests.scheduler.rig import MakeRig, Rig

NUM_AHEAD = 14
"""How many free blocks are looked at with the rig's budget of 24 tokens a step."""


class Watch:
    """Counts looks at the free queue, and sees what vLLM forgets that the host does not have."""

    def __init__(self, rig: Rig) -> None:
        self.rig = rig
        self.num_looks = 0
        self.num_stored = 0
        self.num_evicted = 0
        self.evicted: list[tuple[int, bytes]] = []
        self.lost: list[tuple[int, bytes]] = []
        gpu, pool = rig.planner.gpu, rig.pool
        self._free_blocks, self._evict = gpu.free_blocks, pool._maybe_evict_cached_block
        gpu.free_blocks, pool._maybe_evict_cached_block = self.free_blocks, self.evict

    def free_blocks(self, *args: Any) -> Any:
        self.num_looks += 1
        return self._free_blocks(*args)

    def evict(self, block: Any) -> bool:
        hash_object = block_hash_of(block)
        if hash_object is not None:
            self.evicted.append((get_group_id(hash_object), get_block_hash(hash_object)))
        return bool(self._evict(block))

    def step(self) -> None:
        num_plans = len(self.rig.plans)
        self.evicted = []
        self.rig.step()
        self.num_evicted += len(self.evicted)
        for plan in self.rig.plans[num_plans:]:
            for transfer in (*plan.stores_before_forward, *plan.stores_after_forward):
                self.num_stored += len(transfer.slot_ids)
        tables = self.rig.planner.hits.directory.tables
        for group_idx, block_hash in self.evicted:
            is_cached = self.rig.pool.get_cached_block(block_hash, [group_idx])  # once more
            if block_hash not in tables[group_idx] and not is_cached:
                self.lost.append((group_idx, block_hash))

    def drain(self) -> None:
        while self.rig.has_work:
            self.step()


def lazy(make_rig: MakeRig, **shape: Any) -> Rig:
    rig = make_rig(**{"num_slots": 200, **shape}, extra={"lazy_offload": True})
    rig.start()
    return rig


# ---- looking ahead -----------------------------------------------------------------------------


def test_what_is_far_from_eviction_is_not_stored(make_rig):
    rig = lazy(make_rig, num_blocks=60)
    watch = Watch(rig)
    rig.add("a", rig.prompt(41, 1), max_tokens=1)
    watch.drain()
    assert watch.num_stored == 0


def test_what_is_about_to_be_evicted_is_stored_once_and_not_looked_at_again(make_rig):
    rig = lazy(make_rig, num_blocks=40)
    rig.fill_gpu_cache("old", 1)  # 37 of 39 blocks
    watch = Watch(rig)
    rig.add("decodes", rig.prompt(3, 2), max_tokens=45)
    watch.step()
    watch.step()
    num_stored = watch.num_stored
    assert NUM_AHEAD - 3 <= num_stored <= NUM_AHEAD, "the free blocks at the head were empty"
    assert watch.num_looks == 1
    while rig.pool.get_num_free_blocks() > 39 - NUM_AHEAD // 2 + 1:
        watch.step()
        assert watch.num_looks == 1, "nothing has changed but the head of the queue"
        assert watch.num_stored == num_stored
    watch.drain()
    assert watch.num_looks == 2, "half of what was seen was gone"
    assert num_stored < watch.num_stored <= num_stored + NUM_AHEAD // 2 + 1
    assert watch.lost == []
    rig.check_idle()


def test_a_decode_that_allocates_nothing_costs_no_look(make_rig):
    rig = lazy(make_rig, num_blocks=40)
    rig.fill_gpu_cache("old", 1)
    for n in range(3):
        rig.add(f"r{n}", rig.prompt(4 * n + 1, n), max_tokens=3)
    rig.step()
    watch = Watch(rig)
    watch.drain()
    assert watch.num_looks == watch.num_stored == 0


def test_what_a_step_with_hits_evicts_is_on_the_host(make_rig):
    """A prompt that comes back from the GPU's own cache takes blocks out of the queue."""
    rig = lazy(make_rig, num_blocks=40)
    prompts = [rig.prompt(24, n) for n in range(6)]
    for n, prompt in enumerate(prompts):
        rig.run_alone(f"r{n}", prompt, max_tokens=1)
    watch = Watch(rig)
    for n in (0, 2, 1, 5, 3):
        rig.add(f"again-{n}", [*prompts[n], 7, 7, 7], max_tokens=30)
        watch.step()
    for n in range(6, 9):
        rig.add(f"r{n}", rig.prompt(24, n), max_tokens=20)
    watch.drain()
    assert watch.lost == []
    rig.check_idle()


def test_an_idle_engine_stores_nothing(make_rig):
    rig = lazy(make_rig, num_blocks=40)
    rig.fill_gpu_cache("old", 1)
    num_plans = len(rig.plans)
    for _ in range(5):
        rig.step()
    assert len(rig.plans) == num_plans
    rig.check_idle()


# ---- what a step has given away already --------------------------------------------------------


def test_what_a_preempted_request_had_is_stored_before_the_forward_that_overwrites_it(make_rig):
    rig = lazy(make_rig, num_blocks=25, max_batched_tokens=72)
    watch = Watch(rig)
    # Each needs its ninth block in the same step, and has no unfilled one to give away.
    prompts = [rig.prompt(24, n) for n in range(3)]
    for n, prompt in enumerate(prompts):
        rig.add(f"r{n}", prompt, max_tokens=30)
    while rig.has_work and not rig.counts["rescued_blocks"]:
        num_plans = len(rig.plans)
        watch.step()
    assert rig.counts["rescued_blocks"]
    (plan,) = rig.plans[num_plans:]
    (rescue,) = plan.stores_before_forward
    assert len(rescue.block_ids) == rig.counts["rescued_blocks"]
    assert rescue.transfer_id in plan.fences
    assert watch.evicted
    assert watch.lost == []
    watch.drain()
    for n in range(3):
        rig.check_tokens(f"r{n}", 30)
    assert rig.counts["hit_tokens"] > 0, "what was rescued has come back"
    rig.check_idle()


def test_what_a_finished_request_had_is_stored_before_the_forward_that_overwrites_it(make_rig):
    rig = lazy(make_rig, num_blocks=17, max_batched_tokens=24)
    rig.add("long", rig.prompt(33, 1), max_tokens=20)
    rig.step_until(lambda: len(rig.answers.get("long", [])) == 2)
    short = rig.prompt(25, 2)
    rig.add("short", short, max_tokens=1)
    rig.step_until(lambda: "short" not in rig.scheduler.requests)
    watch = Watch(rig)
    rig.add("next", rig.prompt(23, 3), max_tokens=1)
    watch.step()
    plan = rig.plans[-1]
    assert watch.evicted
    assert watch.lost == []
    (rescue,) = plan.stores_before_forward
    assert len(rescue.block_ids) >= len(watch.evicted)
    assert rescue.transfer_id in plan.fences
    watch.drain()
    rig.forget_gpu_cache()
    rig.run_alone("others", rig.prompt(3, 4), max_tokens=1)
    assert rig.run_alone("short-again", short, max_tokens=1) > 0
    rig.check_idle()


def test_no_gpu_block_is_held_for_a_store(make_rig):
    rig = lazy(make_rig, num_blocks=40)
    a = rig.prompt(120, 1)
    rig.run_alone("a", a, max_tokens=1)
    rig.hold_copies(True)
    rig.add("b", rig.prompt(24, 2), max_tokens=1)
    rig.run_until_finished("b")
    assert rig.planner.gauges()["stores_in_flight"] > 0
    rig.check_no_block_is_held()
    rig.hold_copies(False)
    rig.finish()


# ---- full --------------------------------------------------------------------------------------


def test_what_finds_no_slot_is_tried_again(make_rig):
    rig = lazy(make_rig, num_blocks=40, num_slots=NUM_AHEAD + 8)
    rig.fill_gpu_cache("old", 1)
    lease = rig.planner.leases.grant(LeaseKind.STORE, NUM_AHEAD + 4)
    rig.hold_copies(True)
    watch = Watch(rig)
    rig.add("decodes", rig.prompt(2, 2), max_tokens=20)
    for step in range(4):
        watch.step()
        assert watch.num_looks == step + 1, "it tries again in every step"
    assert watch.num_stored == 4
    lease.release()
    watch.step()
    watch.step()
    assert NUM_AHEAD - 3 <= watch.num_stored <= NUM_AHEAD + 2, "two looks, four steps apart"
    assert watch.num_looks == 5, "and then it is content"
    rig.hold_copies(False)
    rig.finish()


def test_after_a_reset_everything_is_looked_at_anew_and_nothing_old_is_stored(make_rig):
    rig = lazy(make_rig, num_blocks=40)
    rig.fill_gpu_cache("old", 1)
    rig.add("decodes", rig.prompt(2, 2), max_tokens=20)
    watch = Watch(rig)
    watch.step()
    num_stored = watch.num_stored
    rig.planner.reset_cache()
    watch.step()
    assert watch.num_looks == 2
    assert watch.num_stored == num_stored
    rig.finish()


def test_what_requests_of_before_a_reset_give_away_is_not_stored(make_rig):
    """A look ahead sees it in vLLM's queue, hashed anew."""
    rig = lazy(make_rig, num_blocks=40)
    rig.fill_gpu_cache("old", 1)
    request = rig.add("decodes", rig.prompt(2, 2), max_tokens=20)
    watch = Watch(rig)
    watch.step()
    num_stored = watch.num_stored
    rig.planner.policy.look_ahead(100, 0)
    rig.planner.gpu.forget_hashes()
    rig.planner.policy.forget_table(rig.planner.book.find(request))
    watch.step()
    assert watch.num_stored == num_stored
    rig.finish()


# ---- nothing is lost ---------------------------------------------------------------------------


def live(rig: Rig, draw: random.Random, prompts: list[list[int]], num_requests: int) -> Watch:
    """Requests come and go, one of these prompts each; how long they run is drawn."""
    watch = Watch(rig)
    for n in range(num_requests):
        prompt = prompts[n] if len(prompts) == num_requests else draw.choice(prompts)
        rig.add(f"r{n}", prompt, max_tokens=draw.randrange(1, 24))
        for _ in range(draw.randrange(8)):
            watch.step()
    watch.drain()
    assert watch.num_evicted > 100, "or it has shown nothing"
    rig.check_idle()
    return watch


@pytest.mark.parametrize("seed", [0, 1, 2, 5])
def test_nothing_is_evicted_that_the_host_does_not_have(make_rig, seed):
    draw = random.Random(seed)
    shape: dict[str, Any] = draw.choice([{}, {"is_async": True}, {"num_draft_tokens": 2}])
    rig = lazy(make_rig, seed=seed, num_blocks=140, num_slots=2000, **shape)
    prompts = [rig.prompt(draw.randrange(5, 60), n) for n in range(40)]
    assert live(rig, draw, prompts, 40).lost == []


@pytest.mark.parametrize("seed", range(3))
def test_nothing_is_evicted_that_the_host_does_not_have_when_prompts_come_again(make_rig, seed):
    draw = random.Random(seed)
    rig = lazy(make_rig, seed=seed, num_blocks=26, num_slots=2000)
    prompts = [rig.prompt(draw.randrange(5, 60), n) for n in range(12)]
    assert live(rig, draw, prompts, 60).lost == []
