"""What a preempted request had computed and not stored is found in the table that it had."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.core.kv_cache_utils import (
    BlockHash,
    KVCacheBlock,
    make_block_hash_with_group_id,
)

from safe_offload.scheduler.stores.policy import Snapshot, SnapshotTaker
from tests.counts import num_failed
from tests.simulator.device import CopyFault
from tests.simulator.groups import BLOCK_TOKENS
from tests.simulator.profiles import PROFILES
from tests.simulator.run import Run
from tests.simulator.workload import make_events


def request_of(num_prompt_tokens: int, num_tokens: int) -> Any:
    return SimpleNamespace(num_prompt_tokens=num_prompt_tokens, num_tokens=num_tokens)


def test_nothing_is_known_of_a_request_that_was_sent_more():
    """A session whose client streams its input (vLLM, _update_request_as_session)."""
    assert Snapshot(0, [], None, 6).num_computed(request_of(20, 20), 4) == 0


def unsaved_ids(snapshot: Snapshot, given_out: set[int]) -> tuple[list[int], list[int]]:
    """Ids of what can only be stored before the forward, and of what may wait."""
    gpu: Any = SimpleNamespace(is_window=lambda group_idx: False)
    lost, waiting = snapshot.unsaved([PREFIX], range(1), given_out, gpu)
    return [b.block_id for b in lost.blocks], [b.block_id for b in waiting.blocks]


PREFIX = b"a prefix of 32 bytes, as they are"


@pytest.mark.parametrize(
    ("group_idx", "is_given_out", "expected"),
    [(0, False, ([], [7])), (1, True, ([7], [])), (1, False, ([], []))],
)
def test_a_block_that_another_group_took_for_the_same_tokens_does_not_wait(
    group_idx, is_given_out, expected
):
    """Its hash is that of the same prefix, its bytes are those of the other group."""
    block = KVCacheBlock(7)
    block.set_block_hash(make_block_hash_with_group_id(BlockHash(PREFIX), group_idx), 4)
    given_out = {7} if is_given_out else set()
    assert unsaved_ids(Snapshot(0, [block], 1, 4), given_out) == expected


@pytest.mark.parametrize("extra", [{}, {"lazy_offload": True}])
@pytest.mark.parametrize("is_async", [False, True])
def test_a_preempted_request_goes_on_in_its_answer_although_vllm_hashes_no_window_there(
    make_rig, extra, is_async
):
    """vLLM's default: of windows it hashes the blocks at the end of a prompt only."""
    rig = make_rig(
        groups=("window:10", "full"),
        num_blocks=40,
        num_slots=400,
        retention_interval=0,
        is_async=is_async,
        extra=extra,
    )
    rig.start()
    hit_ends: list[int] = []
    allocated = rig.planner.update_state_after_alloc

    def watch(request: Any, blocks: Any, num_external_tokens: int) -> None:
        state = rig.planner.book.get(request.request_id)
        hit = state.load.hit
        if num_external_tokens and hit is not None:
            end = hit.num_computed_tokens + num_external_tokens
            hit_ends.append(end - request.num_prompt_tokens)
        allocated(request, blocks, num_external_tokens)

    rig.planner.update_state_after_alloc = watch
    for n in range(5):
        rig.add(f"r{n}", rig.prompt(9, n), max_tokens=50)
    rig.drain()
    for n in range(5):
        rig.check_tokens(f"r{n}", 50)
    assert max(hit_ends) > BLOCK_TOKENS, "hits that end in an answer"
    rig.check_idle()


@pytest.mark.parametrize(("publishable", "num_kept"), [(None, 3), (2, 2), (0, 0)])
def test_blocks_that_vllm_does_not_publish_are_not_rescued(publishable, num_kept):
    """`Request.num_publishable_block_hashes`, which is coming: of three that are computed."""
    geometry: Any = SimpleNamespace(
        group_ids=[0],
        hash_block_size=4,
        group_block_sizes=[4],
        hashes_of=lambda request, _: [PREFIX] * 3,
    )
    gpu: Any = SimpleNamespace(is_window=lambda _: False, is_positional=lambda _: True)
    request = request_of(6, 14)
    if publishable is not None:
        request.num_publishable_block_hashes = publishable
    state: Any = SimpleNamespace(request=request, limits=SimpleNamespace(store_tokens=None))
    snapshot = Snapshot(0, [KVCacheBlock(n) for n in range(3)], None, 6)
    lost, _ = SnapshotTaker(geometry, gpu).unsaved(state, snapshot, 0, {0, 1, 2})
    assert len(lost.blocks) == num_kept


@pytest.mark.parametrize(("is_lazy", "seed"), [(False, 4), (True, 9)])
def test_nothing_is_rescued_from_the_blocks_of_a_load_that_failed(is_lazy, seed):
    """vLLM computes the request again in other blocks, and those of the load have other owners."""
    profile = PROFILES["lazy-priority"]
    shape = replace(profile.shape, num_slots=100, extra={"lazy_offload": is_lazy})
    profile = replace(profile, shape=shape, faults={CopyFault.FAIL: 60})
    current = Run(profile, seed, make_events(profile, seed))
    try:
        current.go()
    finally:
        current.core.close()
    assert num_failed(current.core.counts, "load") > 0
    assert current.core.counts["rescued_blocks"] > 0
