"""No hit across LoRA adapters, images or salts, on vLLM's scheduler with its own hashes (K9).

Equal tokens have different keys and values under another adapter, image or salt, and in the
simulator's memory too: a hit across them would be found as a wrong word.
"""

from __future__ import annotations

from typing import Any

import pytest
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.sampling_params import SamplingParams
from vllm.v1.request import Request

from tests.scheduler.rig import Rig
from tests.simulator.words import Sequel

NUM_TOKENS = 41
NUM_HIT_TOKENS = 40

IDENTITIES: dict[str, dict[str, Any]] = {
    "plain": {},
    "adapter a": {"lora_request": LoRARequest("a", 1, "/adapters/a")},
    "adapter b": {"lora_request": LoRARequest("b", 2, "/adapters/b")},
    "another adapter under the name a": {"lora_request": LoRARequest("a", 3, "/adapters/new")},
    "image x": {"image": "x"},
    "image y": {"image": "y"},
    "salt s": {"cache_salt": "s"},
    "salt t": {"cache_salt": "t"},
    "adapter a, salt s": {"lora_request": LoRARequest("a", 1, "/adapters/a"), "cache_salt": "s"},
    "image x, salt s": {"image": "x", "cache_salt": "s"},
}


def image(identifier: str) -> MultiModalFeatureSpec:
    """An image that takes the first block and a half of the prompt."""
    return MultiModalFeatureSpec(
        data=None,
        modality="image",
        identifier=identifier,
        mm_position=PlaceholderRange(offset=0, length=6),
    )


def serve(rig: Rig, request_id: str, who: str) -> int:
    """Answer the same tokens as `who`; returns how many came from the host."""
    identity = dict(IDENTITIES[who])
    image_id = identity.pop("image", None)
    prompt = rig.prompt(NUM_TOKENS, 1)
    request = Request(
        request_id,
        list(prompt),
        SamplingParams(max_tokens=4, ignore_eos=True),
        None,
        mm_features=[image(image_id)] if image_id else None,
        block_hasher=rig._hasher,
        **identity,
    )
    # vLLM has hashed the prompt with its image. The simulator's model has no encoder to run.
    request.mm_features = []
    before = rig.counts["hit_tokens"]
    rig.runner.sequels[request_id] = Sequel(prompt, who)
    rig.scheduler.add_request(request)
    rig.drain()
    rig.check_tokens(request_id, 4)
    rig.forget_gpu_cache()
    return rig.counts["hit_tokens"] - before


@pytest.mark.parametrize("groups", [("full",), ("window:10", "full")])
@pytest.mark.parametrize("stored", IDENTITIES)
def test_only_who_is_the_same_hits_what_was_stored(make_rig, stored, groups):
    rig = make_rig(num_blocks=60, num_slots=400, groups=groups)
    assert serve(rig, "first", stored) == 0
    found = {
        who: serve(rig, f"request {number}", who)
        for number, who in enumerate(IDENTITIES)
        if who != stored
    }
    assert not any(found.values()), found
    assert serve(rig, "again", stored) == NUM_HIT_TOKENS
    rig.check_idle()
