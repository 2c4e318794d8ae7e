"""What no tier is asked for or given: blocks whose hashes do not say what they hold."""

from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.sampling_params import SamplingParams
from vllm.v1.request import Request

from safe_offload.config.tier_url import Location
from safe_offload.config.tiers import TierConfig
from safe_offload.protocol import StepReport
from safe_offload.scheduler.features.private_blocks import PrivateBlocks
from safe_offload.scheduler.requests import RequestState
from tests.scheduler.tiers.tier_rig import WAIT_S, WIDE, TierRig
from tests.simulator.groups import BLOCK_TOKENS
from tests.simulator.words import Sequel

NUM_TOKENS = 41
NUM_HIT_TOKENS = 40
CONTENT_ID = "5e" * 32
CHOSEN: dict[str, dict[str, Any]] = {
    "a uuid": {"image": "logo"},
    "a uuid that looks like a hash": {"image": f"chosen:{CONTENT_ID}"},
    "an adapter": {"lora_request": LoRARequest("a", 1, "/adapters/a")},
    "an image for an adapter": {
        "image": f"a:{CONTENT_ID}",
        "lora_request": LoRARequest("a", 1, "/adapters/a"),
    },
    "embeddings": {"prompt_embeds": torch.ones(NUM_TOKENS, 2)},
}
TIER = TierConfig(Location("file", "/nowhere"), wait_s=WAIT_S)
EVICTED_ONLY = replace(TIER, store="evicted")


@pytest.fixture(autouse=True)
def _ids_are_told():
    """Requests come from processes that tell ids of content from others."""
    with mock.patch("safe_offload.compat.media_ids.tells_media_ids", return_value=True):
        yield


def serve(
    rig: TierRig, name: str, who: dict[str, Any], content: str = "", *, num_answer_tokens: int = 4
) -> int:
    """Answer the prompt of all tests as `who`; returns how many tokens the host had.

    `who`: fields of vLLM's request, and the id of an image, and its place; `content`: what the
    prompt means; what is computed of it is other words.
    """
    fields = dict(who)
    image_id, offset = fields.pop("image", None), fields.pop("at", 0)
    where = PlaceholderRange(offset=offset, length=6)
    features = [MultiModalFeatureSpec(None, "image", image_id, where)] if image_id else []
    embeds = fields.get("prompt_embeds")
    prompt = rig.prompt(NUM_TOKENS, 1)
    request = Request(
        name,
        list(prompt),
        SamplingParams(max_tokens=num_answer_tokens, ignore_eos=True),
        None,
        mm_features=features,
        block_hasher=rig._hasher,
        **fields,
    )
    # The simulator's model has no encoder: of this, only hashes and the connector are told.
    tell = rig.connector.on_new_request

    def tell_all(request: Request) -> None:
        request.mm_features, request.prompt_embeds = features, embeds
        tell(request)
        request.mm_features, request.prompt_embeds = [], None

    request.mm_features, request.prompt_embeds = [], None
    before = rig.counts["hit_tokens"]
    rig.runner.sequels[name] = Sequel(prompt, content)
    with mock.patch.object(rig.connector, "on_new_request", tell_all):
        rig.scheduler.add_request(request)
    rig.drain()
    rig.check_tokens(name, num_answer_tokens)
    rig.forget_gpu_cache()
    return rig.counts["hit_tokens"] - before


@pytest.mark.parametrize("who", CHOSEN)
def test_what_one_engine_means_by_a_name_is_nothing_to_another(make_tiers, who):
    """The second engine computes other words under the same hashes, and sees none of the first's.

    The simulator's model finds each word that is another's.
    """
    first = make_tiers()
    assert serve(first, "a", CHOSEN[who], "of the one") == 0
    assert serve(first, "b", CHOSEN[who], "of the one") == NUM_HIT_TOKENS, "its own host has it"
    second = make_tiers(tier=first.tier)
    assert serve(second, "c", CHOSEN[who], "of the other") == 0
    assert not first.tier.objects
    assert not second.probes
    first.check_idle()
    second.check_idle()


@pytest.mark.parametrize("who", [{}, {"image": CONTENT_ID}, {"cache_salt": "s"}], ids=str)
def test_what_hashes_tell_is_shared(make_tiers, who):
    """Also by an engine that others ask things of which they do not."""
    first = make_tiers()
    for number, name in enumerate(CHOSEN):
        assert serve(first, f"other {number}", CHOSEN[name], name) == 0
    assert serve(first, "a", who) == 0
    second = make_tiers(tier=first.tier)
    assert serve(second, "b", who) == NUM_HIT_TOKENS
    second.check_idle()


def test_an_operator_may_vouch_for_adapters_and_not_for_what_clients_choose(make_tiers):
    vouched = {"tiers": (replace(TIER, model_version="1"),)}
    first = make_tiers(**vouched)
    for number, name in enumerate(CHOSEN):
        assert serve(first, f"{number}", CHOSEN[name], name) == 0
    second = make_tiers(tier=first.tier, **vouched)
    hits = {name: serve(second, name, CHOSEN[name], name) for name in CHOSEN}
    assert [name for name, num_hit in hits.items() if num_hit] == ["an adapter"]


def test_what_comes_before_such_an_image_is_shared(make_tiers):
    logo = {"image": "logo", "at": NUM_TOKENS // 2}
    num_before = NUM_TOKENS // 2 // BLOCK_TOKENS * BLOCK_TOKENS
    first = make_tiers()
    serve(first, "a", logo)
    second = make_tiers(tier=first.tier)
    assert serve(second, "b", logo) == num_before
    assert len(second.tier.objects) == num_before // BLOCK_TOKENS
    second.check_idle()


def test_ids_of_images_are_trusted_only_where_they_are_told(make_tiers):
    with mock.patch("safe_offload.compat.media_ids.tells_media_ids", return_value=False):
        rig = make_tiers()
    serve(rig, "a", {"image": CONTENT_ID})
    assert not rig.tier.objects


@pytest.mark.parametrize("groups", [("full",), ("window:10", "full"), ("window:10@8", "full")])
@pytest.mark.parametrize(
    "shape",
    [
        {"extra": {"lazy_offload": True}},
        {"tiers": (EVICTED_ONLY,)},
        {"extra": {"lazy_offload": True}, "tiers": (EVICTED_ONLY,)},
        {"is_async": True},
    ],
    ids=str,
)
def test_nothing_of_it_is_spilled_late(make_tiers, shape, groups):
    """Not when vLLM is about to evict it, nor the host, long after its request has ended."""
    rig = make_tiers(**{**WIDE, "num_blocks": 40, "num_slots": 45, "groups": groups, **shape})
    with mock.patch.object(TierRig, "forget_gpu_cache"):
        for number in range(3):
            serve(rig, f"private {number}", {"lora_request": LoRARequest(f"{number}", 1, "/a")})
    private = set(rig.planner.hits.directory.private)
    for number in range(6):
        rig.run_alone(f"filler {number}", rig.prompt(NUM_TOKENS, 50 + number))
    stored = {place[3] for place in rig.tier.objects}
    assert stored
    assert private
    assert not stored & private


@pytest.mark.parametrize(
    "shape", [{}, {"tiers": (EVICTED_ONLY,)}, {"extra": {"lazy_offload": True}}], ids=str
)
def test_hashes_that_nobody_has_any_more_are_forgotten(make_tiers, monkeypatch, shape):
    """And none that the GPU or the host still has: none of it is ever spilled."""
    monkeypatch.setattr("safe_offload.scheduler.features.private_blocks.SWEEP_MIN", 16)
    rig = make_tiers(num_blocks=40, num_slots=45, **shape)
    private = rig.planner.hits.directory.private
    sizes = []
    with mock.patch.object(TierRig, "forget_gpu_cache"):
        for number in range(40):
            adapter = LoRARequest(f"{number}", 1, "/adapters/a")
            serve(rig, f"{number}", {"lora_request": adapter}, f"{number}")
            sizes.append(len(private))
    assert max(sizes) <= 2 * (45 + 40) + 16
    assert not rig.tier.objects


@pytest.mark.parametrize("shape", [{}, {"num_draft_tokens": 4}, {"is_async": True}], ids=str)
def test_what_such_a_request_generates_is_not_spilled(make_tiers, shape):
    """Not while it runs, nor what its last step has completed."""
    rig = make_tiers(**shape)
    for number in range(30, 38):
        adapter = LoRARequest(f"{number}", 1, "/adapters/a")
        serve(rig, f"{number}", {"lora_request": adapter}, num_answer_tokens=number)
    assert rig.counts["stored_blocks"] > 8 * NUM_HIT_TOKENS // BLOCK_TOKENS
    assert not rig.tier.objects


def test_a_session_is_private_from_the_first_chosen_id_on(make_tiers):
    """vLLM gives the same request more tokens, and media, while it lives."""
    rig = make_tiers()
    private = PrivateBlocks(
        rig.planner.book, rig.planner.hits, rig.planner.gpu, tells_media_ids=True
    )
    params = SamplingParams(max_tokens=4)
    request = Request("a", [1] * 8, params, None, block_hasher=rig._hasher, resumable=True)
    private.on_new_request(RequestState(request))
    private.on_report(StepReport())
    assert not rig.planner.hits.directory.private
    where = PlaceholderRange(offset=9, length=2)
    request.mm_features = [MultiModalFeatureSpec(None, "image", "logo", where)]
    request.append_output_token_ids([2] * 8)
    private.on_report(StepReport())
    assert rig.planner.hits.directory.private == set(request.block_hashes[2:])
