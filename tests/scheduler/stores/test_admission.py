"""What `returns` does not store, on vLLM's real scheduler."""

from typing import Any

import pytest

from tests.scheduler.rig import Rig

NUM_TOKENS = 65


def converse(make_rig: Any, **extra: Any) -> Rig:
    """A conversation comes back all the time, one-off prompts come between; the host is small."""
    rig: Rig = make_rig(num_blocks=24, num_slots=20, extra={"eviction_policy": "returns", **extra})
    rig.start()
    prompt = rig.prompt(NUM_TOKENS, "conversation")
    for index in range(60):
        rig.clock.advance(10.0)
        rig.run_alone(f"turn {index}", prompt, max_tokens=1)
        rig.forget_gpu_cache()
        rig.clock.advance(5.0)
        rig.run_alone(f"once {index}", rig.prompt(NUM_TOKENS, f"once {index}"), max_tokens=1)
        rig.forget_gpu_cache()
    return rig


def test_prompts_that_never_come_back_are_not_stored_where_others_would_go(make_rig):
    rig = converse(make_rig)
    stored, skipped = rig.counts["stored_blocks"], rig.counts["skipped_blocks"]
    for index in range(3):
        rig.clock.advance(1.0)
        rig.run_alone(f"more {index}", rig.prompt(NUM_TOKENS, f"more {index}"), max_tokens=1)
    rig.forget_gpu_cache()
    assert rig.counts["stored_blocks"] == stored
    assert rig.counts["skipped_blocks"] > skipped
    assert rig.run_alone("again", rig.prompt(NUM_TOKENS, "conversation"), max_tokens=1) > 32


@pytest.mark.parametrize("what", ["pin", "lru"])
def test_what_is_pinned_is_stored_and_so_is_everything_with_another_policy(make_rig, what):
    extra = {"pin_share": 0.9} if what == "pin" else {"eviction_policy": "lru"}
    rig = converse(make_rig, **extra)
    stored = rig.counts["stored_blocks"]
    params = {"pin_s": 600} if what == "pin" else None
    rig.run_alone("new", rig.prompt(NUM_TOKENS, "new"), max_tokens=1, kv_transfer_params=params)
    assert rig.counts["stored_blocks"] > stored
