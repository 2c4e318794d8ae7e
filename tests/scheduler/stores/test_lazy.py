"""Lazy stores: what the GPU is about to forget is on the host before it does, and seldom sooner."""

from __future__ import annotations

import random
from typing import Any

import pytest
from vllm.v1.core.kv_cache_utils import make_block_hash_with_group_id

from safe_offload.scheduler.blocks import block_hash_of, get_block_hash, get_group_id
from safe_offload.scheduler.cache.leases import LeaseKind
from tests.counts import num_failed
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


def test_what_requests_of_before_a_reset_give_away_is_not_stored(make_rig):
    """They may have been given it, and have hashed it, in the same step."""
    rig = lazy(make_rig, num_blocks=40)
    rig.fill_gpu_cache("old", 1)
    request = rig.add("decodes", rig.prompt(2, 2), max_tokens=20)
    watch = Watch(rig)
    watch.step()
    num_stored = watch.num_stored
    rig.pool.free_blocks(rig.pool.get_new_blocks(30))
    rig.planner.policy.forget_table(rig.planner.book.find(request))
    watch.step()
    assert watch.num_stored == num_stored
    rig.finish()


def test_a_block_given_away_twice_in_one_step_held_only_what_it_had_at_first(make_rig):
    """What was hashed in between, for a request that is preempted again, was never there."""
    rig = lazy(make_rig, num_blocks=40)
    rig.fill_gpu_cache("old", 1)
    request = rig.add("preempted", rig.prompt(2, 2), max_tokens=20)
    rig.step()
    blocks = rig.pool.get_new_blocks(38)
    for block in blocks:
        block.set_block_hash(make_block_hash_with_group_id(b"%d" % block.block_id, 0))
    rig.pool.free_blocks(blocks)
    rig.pool.free_blocks(rig.pool.get_new_blocks(38))
    rig.planner.policy.forget_uncomputed(rig.planner.book.find(request))
    watch = Watch(rig)
    watch.step()
    table = rig.planner.hits.directory.tables[0]
    assert watch.num_stored == 38 - NUM_AHEAD, "the others were stored ahead"
    assert not any(b"%d" % block.block_id in table for block in blocks)
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


@pytest.mark.parametrize(
    ("seed", "shape"),
    [
        (0, {}),
        (1, {"is_async": True}),
        (2, {"num_draft_tokens": 2}),
        (3, {"num_blocks": 62, "max_batched_tokens": 512}),
        (4, {"num_blocks": 62, "max_batched_tokens": 512, "is_async": True}),
        (5, {"groups": ("full", "window:10"), "max_batched_tokens": 512}),
        (6, {"groups": ("full", "mamba"), "max_batched_tokens": 512}),
    ],
)
def test_nothing_is_evicted_that_the_host_does_not_have(make_rig, seed, shape):
    draw = random.Random(seed)
    rig = lazy(make_rig, seed=seed, **{"num_blocks": 140, "num_slots": 4000, **shape})
    prompts = [rig.prompt(draw.randrange(5, 60), n) for n in range(40)]
    assert live(rig, draw, prompts, 40).lost == []


@pytest.mark.parametrize("num_blocks", [80, 100, 120, 140])
@pytest.mark.parametrize("num_step_tokens", [64, 512])
def test_one_prompt_after_the_other_comes_back_whole(make_rig, num_blocks, num_step_tokens):
    """The next one takes blocks of the one that has ended, in one step, or after idle ones."""
    rig = lazy(make_rig, num_blocks=num_blocks, max_batched_tokens=num_step_tokens)
    take_turns(rig, is_idle_between=(True, False))


def test_what_v2_writes_early_was_stored_in_an_idle_step_before(make_rig):
    """It zeroes new blocks ahead of every copy of the step."""
    rig = lazy(
        make_rig,
        num_blocks=90,
        num_slots=4000,
        groups=("full", "mamba"),
        is_v2=True,
        has_streams=True,
        max_batched_tokens=512,
    )
    take_turns(rig, is_idle_between=(True,))
    assert not num_failed(rig.counts, "store")


def take_turns(rig: Rig, is_idle_between: tuple[bool, ...]) -> None:
    """Prompts one after the other, twice; all of each is hit the second time."""
    prompts = [rig.prompt(250, n) for n in range(3)]
    for turn in range(2):
        for n, prompt in enumerate(prompts):
            request = rig.add(f"r{turn}.{n}", prompt, max_tokens=8)
            stats = request.prefill_stats
            rig.run_until_finished(request.request_id)
            assert stats.num_cached_tokens == (248 if turn else 0)
            if is_idle_between[n % len(is_idle_between)]:
                rig.drain()
    rig.finish()
