"""By priority vLLM takes a request out of a step again in which it has hashed blocks for it.

No forward computes those, and vLLM's own prefix cache would find them (vllm#59907).
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from tests.scheduler.rig import Rig
from tests.scheduler.tiers.tier_rig import TierRig


def num_hashed(rig: Rig) -> int:
    """Blocks of the request `low` that vLLM has hashed, in all groups."""
    managers = rig.scheduler.kv_cache_manager.coordinator.single_type_managers
    return sum(manager.num_cached_block.get("low", 0) for manager in managers)


def take_out(rig: Rig, prompt: list[int]) -> None:
    """Have vLLM hash blocks of the prompt of `low` and take it out of the same step again.

    In steps of both requests `low` takes the last free blocks, until `high` needs one more.
    """
    low = rig.add("low", prompt, priority=1)
    rig.step_until(lambda: low.num_computed_tokens > 0)
    largest = max(group.block_tokens for group in rig.shape.parsed_groups)
    rig.add("high", rig.prompt(largest - 1, 2), max_tokens=60, priority=0)
    manager, pool = rig.scheduler.kv_cache_manager, rig.pool
    allocate = manager.allocate_slots
    held: list[Any] = []
    nums_new: list[int] = []

    def allocate_all(request: Any, *what: Any, **how: Any) -> Any:
        before = num_hashed(rig)
        blocks = allocate(request, *what, **how)
        if request is low and blocks is not None:
            nums_new.append(num_hashed(rig) - before)
            held.extend(pool.get_new_blocks(pool.get_num_free_blocks()))
        return blocks

    while not low.num_preemptions:
        assert low.num_computed_tokens < len(prompt)
        both_run = rig.scheduler.requests["high"].num_computed_tokens > 0
        manager.allocate_slots = allocate_all if both_run else allocate
        rig.step()
        pool.free_blocks(held)
        held.clear()
    manager.allocate_slots = allocate
    assert nums_new[-1] > 0


CONFIGURATIONS = [
    pytest.param(*options, marks=[] if options[3:] == ((16, 200), False) else pytest.mark.nightly)
    for options in itertools.product(
        (("full",), ("full", "window:10"), ("full@8", "mamba@8"), ("full@16", "window:20@8")),
        (False, True),
        (False, True),
        itertools.product((8, 16, 24), (200, 280)),
        (False, True),
    )
]
"""KV cache groups, lazy stores, a tier, tokens of a chunk and of the prompt, Model Runner V2."""


@pytest.mark.parametrize(("groups", "is_lazy", "has_tier", "tokens", "is_v2"), CONFIGURATIONS)
def test_what_no_step_has_computed_is_found_nowhere(groups, is_lazy, has_tier, tokens, is_v2):
    """Neither on the GPU nor, when its cache is empty, on the host, nor by another engine."""
    chunk_tokens, prompt_tokens = tokens
    options: dict[str, Any] = {
        "groups": groups,
        "num_blocks": 160,
        "num_slots": 1200,
        "is_priority": True,
        "is_v2": is_v2,
        "has_streams": is_v2,
        "max_batched_tokens": 64,
        "max_chunk_tokens": chunk_tokens,
        "extra": {"lazy_offload": is_lazy},
    }
    rig = TierRig(**options) if has_tier else Rig(**options)
    rigs = [rig]
    prompt = rig.prompt(prompt_tokens + 1, 1)
    try:
        rig.start()
        take_out(rig, prompt[:-1])
        rig.add("same", prompt)
        rig.drain()
        for name, num_tokens in {"low": 4, "same": 4, "high": 60}.items():
            rig.check_tokens(name, num_tokens)
        if is_lazy:  # what is evicted is stored
            for n in range(8):
                rig.run_alone(f"other{n}", rig.prompt(200, 10 + n), max_tokens=1)
        rig.forget_gpu_cache()
        assert rig.run_alone("later", prompt) > prompt_tokens // 2
        if isinstance(rig, TierRig):
            rigs.append(TierRig(tier=rig.tier, **options))
            rigs[1].start()
            assert rigs[1].run_alone("elsewhere", prompt) > prompt_tokens // 2
    finally:
        for each in rigs:
            each.close()
