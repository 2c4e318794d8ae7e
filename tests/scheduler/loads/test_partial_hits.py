"""Hits that end inside a block: Mamba hybrids with blocks larger than what requests have hashes of.

vLLM's own cache finds such a prompt up to the last multiple of its hash size, not of its blocks. So
must the host: the state there, and of full attention the block that the prompt ends in.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from tests.scheduler.rig import MakeRig, Rig
from tests.simulator.engine_core import random_prompt
from tests.simulator.peers import SIMPLE, PeerEngine, peer_shape
from tests.simulator.scenes import forget_gpu_cache, watch_matches
from tests.simulator.vllm_setup import NONE

LARGE: dict[str, Any] = {"groups": ("full@16", "mamba@16"), "prefix_match_unit": 4}
"""As in real hybrid models: the blocks of all groups are as large as a state."""
MIXED: dict[str, Any] = {"groups": ("full", "mamba@16")}


@dataclass(frozen=True)
class Return:
    """A prompt that is answered, and another that begins with its first tokens.

    Attributes:
        num_tokens: of the first prompt.
        num_answer: of its answer.
        num_shared: tokens of the first prompt and its answer that the second begins with.
        num_own: tokens of the second prompt behind those.
        hit: tokens that a hit brings.
    """

    num_tokens: int
    num_answer: int
    num_shared: int
    num_own: int
    hit: int

    @property
    def prompts(self) -> tuple[list[int], list[int]]:
        """The first prompt, and the second."""
        first = random_prompt(self.num_tokens, 1)
        return first, first[: self.num_shared] + random_prompt(self.num_own, 2)


RETURNS = {
    "the-same-prompt": Return(45, 1, 45, 0, 44),
    "shorter-than-a-block": Return(13, 1, 13, 0, 12),
    "goes-on": Return(45, 1, 45, 30, 44),
    "the-answer-fills-the-block": Return(45, 30, 45, 10, 44),
    "ends-with-a-block": Return(49, 1, 49, 0, 48),
    "leaves-before-the-end": Return(45, 1, 38, 10, 32),
}
CASES = pytest.mark.parametrize(
    ("layout", "again"),
    [
        *((LARGE, again) for again in RETURNS.values()),
        (MIXED, RETURNS["goes-on"]),
        (MIXED, RETURNS["leaves-before-the-end"]),
    ],
    ids=[*RETURNS, "goes-on-mixed", "leaves-before-the-end-mixed"],
)


def hit_of_peer(connector: str, layout: dict[str, Any], again: Return) -> int:
    """Tokens of the second prompt that vLLM has: of its own cache, or of a connector's."""
    engine = PeerEngine(peer_shape(connector, num_blocks=60, num_slots=90, **layout))
    first, second = again.prompts
    engine.add("first", first, again.num_answer)
    engine.drain()
    if connector == NONE:
        request = engine.add("again", second)
        return int(engine.scheduler.kv_cache_manager.get_computed_blocks(request)[1])
    forget_gpu_cache(engine)
    offered = watch_matches(engine)
    engine.add("again", second)
    engine.drain()
    return offered["again"][0]


def make_first(make_rig: MakeRig, again: Return, **shape: Any) -> Rig:
    """An engine whose host, and whose GPU not, has the first prompt."""
    rig = make_rig(**{"num_blocks": 40, "num_slots": 400, **shape})
    rig.start()
    rig.run_alone("first", again.prompts[0], again.num_answer)
    if rig.planner.options.is_lazy:  # it stores what is about to be evicted
        for number in range(6):
            rig.run_alone(f"filler-{number}", random_prompt(90, 100 + number), 1)
    rig.forget_gpu_cache()
    return rig


@CASES
@pytest.mark.parametrize("connector", [NONE, SIMPLE])
def test_a_hit_of_vllms_own_ends_inside_a_block(connector, layout, again):
    assert hit_of_peer(connector, layout, again) == again.hit


def test_the_block_that_a_prompt_ends_in_is_read_before_it_is_overwritten(make_rig):
    again = RETURNS["shorter-than-a-block"]
    rig = make_rig(num_blocks=14, num_slots=90, **LARGE)
    rig.start()
    rig.hold_copies(True)
    rig.add("first", again.prompts[0], 1)
    rig.run_until_finished("first")
    rig.step()  # a store of its own: together with others it would be watched by theirs
    rig.add("other", random_prompt(110, 3), 1)  # takes its blocks while they are being read
    rig.run_until_finished("other")
    rig.hold_copies(False)
    rig.drain()
    rig.forget_gpu_cache()
    assert rig.run_alone("again", again.prompts[1]) == again.hit
    rig.check_idle()


def test_a_load_that_ends_elsewhere_than_its_state_is_not_made(make_rig):
    """I6: vLLM may take fewer tokens than were offered, and a state is of one position."""
    again = RETURNS["the-same-prompt"]
    rig = make_first(make_rig, again, **LARGE)
    match = rig.connector.get_num_new_matched_tokens

    def match_less(request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        num_tokens, is_async = match(request, num_computed_tokens)
        return (num_tokens - 4 if num_tokens else num_tokens), is_async

    rig.connector.get_num_new_matched_tokens = match_less
    assert rig.run_alone("again", again.prompts[1]) == 0
    assert rig.counts["unusable_hits"] == 1
    rig.check_idle()


def test_what_was_computed_before_a_reset_is_not_stored_after_it(make_rig):
    again = RETURNS["the-same-prompt"]
    rig = make_rig(num_blocks=40, num_slots=90, **LARGE)
    rig.start()
    request = rig.add("first", again.prompts[0], 2)
    rig.step_until(lambda: request.num_output_tokens > 0)
    rig.planner.reset_cache()
    rig.drain()
    assert not rig.planner.hits.directory.kept()


@pytest.mark.parametrize("name", ["the-same-prompt", "shorter-than-a-block"])
def test_one_load_serves_all_who_come_with_the_same_prompt(make_rig, name):
    again = RETURNS[name]
    rig = make_first(make_rig, again, **LARGE, max_batched_tokens=256)
    rig.counts.clear()
    names = [f"r{number}" for number in range(5)]
    for request_id in names:
        rig.add(request_id, again.prompts[1])
    rig.drain()
    assert rig.counts["loaded_tokens"] == again.hit
    for request_id in names:
        rig.check_tokens(request_id, 4)
    rig.check_idle()


def test_nobody_waits_for_a_state_that_vllm_does_not_keep(make_rig):
    """A load that ends inside a block, before the prompt of its request does, leaves none there."""
    again = RETURNS["goes-on"]
    rig = make_first(make_rig, again, **LARGE, max_batched_tokens=256)
    rig.counts.clear()
    for number in range(3):
        rig.add(f"r{number}", [*again.prompts[0], *random_prompt(30, 50 + number)])
    rig.drain()
    assert rig.counts["shared_waits"] == 0
    assert rig.counts["loaded_tokens"] == 3 * again.hit
    for number in range(3):
        rig.check_tokens(f"r{number}", 4)
