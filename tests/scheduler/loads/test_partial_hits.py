"""Hits that end inside a block: Mamba hybrids with blocks larger than what requests have hashes of.

vLLM's own cache finds such a prompt up to the last multiple of its hash size, not of its blocks. So
must the host: the state there, and of full attention the block that the prompt ends in.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.scheduler.rig import MakeRig, Rig
from tests.simulator.engine_core import random_prompt

LARGE: dict[str, Any] = {"groups": ("full@16", "mamba@16"), "prefix_match_unit": 4}
"""As in real hybrid models: the blocks of all groups are as large as a state."""


def make_first(make_rig: MakeRig, prompt: list[int], **shape: Any) -> Rig:
    """An engine whose host, and whose GPU not, has a prompt."""
    rig = make_rig(num_blocks=40, num_slots=400, **LARGE, **shape)
    rig.start()
    rig.run_alone("first", prompt, 1)
    rig.forget_gpu_cache()
    return rig


def test_the_block_that_a_prompt_ends_in_is_read_before_it_is_overwritten(make_rig):
    prompt = random_prompt(13, 1)
    rig = make_rig(num_blocks=14, num_slots=90, **LARGE)
    rig.start()
    rig.hold_copies(True)
    rig.add("first", prompt, 1)
    rig.run_until_finished("first")
    rig.step()  # a store of its own: together with others it would be watched by theirs
    rig.add("other", random_prompt(110, 3), 1)  # takes its blocks while they are being read
    rig.run_until_finished("other")
    rig.hold_copies(False)
    rig.drain()
    rig.forget_gpu_cache()
    assert rig.run_alone("again", prompt) == 12
    rig.check_idle()


def test_a_load_that_ends_elsewhere_than_its_state_is_not_made(make_rig):
    """I6: vLLM may take fewer tokens than were offered, and a state is of one position."""
    prompt = random_prompt(45, 1)
    rig = make_first(make_rig, prompt)
    match = rig.connector.get_num_new_matched_tokens

    def match_less(request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        num_tokens, is_async = match(request, num_computed_tokens)
        return (num_tokens - 4 if num_tokens else num_tokens), is_async

    rig.connector.get_num_new_matched_tokens = match_less
    assert rig.run_alone("again", prompt) == 0
    assert rig.counts["unusable_hits"] == 1
    rig.check_idle()


@pytest.mark.parametrize(("num_tokens", "num_hit"), [(45, 44), (13, 12)])
def test_one_load_serves_all_who_come_with_the_same_prompt(make_rig, num_tokens, num_hit):
    prompt = random_prompt(num_tokens, 1)
    rig = make_first(make_rig, prompt, max_batched_tokens=256)
    rig.counts.clear()
    names = [f"r{number}" for number in range(5)]
    for request_id in names:
        rig.add(request_id, prompt)
    rig.finish(**dict.fromkeys(names, 4))
    assert rig.counts["loaded_tokens"] == num_hit


def test_nobody_waits_for_a_state_that_vllm_does_not_keep(make_rig):
    """A load that ends inside a block, before the prompt of its request does, leaves none there."""
    prompt = random_prompt(45, 1)
    rig = make_first(make_rig, prompt, max_batched_tokens=256)
    rig.counts.clear()
    names = [f"r{number}" for number in range(3)]
    for number, name in enumerate(names):
        rig.add(name, [*prompt, *random_prompt(30, 50 + number)])
    rig.finish(**dict.fromkeys(names, 4))
    assert rig.counts["shared_waits"] == 0
    assert rig.counts["loaded_tokens"] == 3 * 44
