"""A real language model reads a hit from anywhere as it reads vLLM's own, to the bit.

Random weights may answer alike whatever they read; SmolLM2 says of a real page how likely each
token is, and one wrong block changes that. An engine here computes with one thread on any core
(`ENVIRONMENT`): left to itself, vLLM binds one with a connector to other cores than one without.
"""

import dataclasses
from collections.abc import Callable
from pydoc_data.topics import topics
from typing import Any

import pytest

from tests.engine.children.cut import ANSWERS, STORES
from tests.engine.engines import CHUNK_TOKENS, Job, Report, connector, make_job, run, tier_at
from tests.engine.test_node import HASHES

NUM_TOKENS, NUM_ANSWER_TOKENS, BLOCK_TOKENS = 1100, 16, 32
ENDS = (0, CHUNK_TOKENS - BLOCK_TOKENS, CHUNK_TOKENS, CHUNK_TOKENS + BLOCK_TOKENS, 1088)
"""Tokens of a hit: nothing, around the end of a chunk, all."""
NUM_POOL_BLOCKS = -(-(NUM_TOKENS + 64) // BLOCK_TOKENS)
"""What vLLM asks for at least."""

MakeJob = Callable[..., Job]


@pytest.fixture(scope="module")
def make(small_model) -> MakeJob:
    """A page behind a hit of each length, alone."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(small_model / "tokenizer.json"))
    token_ids = tokenizer.encode(topics["specialnames"]).ids

    def make(
        config: Any = None,
        *,
        num_blocks: int = 600,
        num_filler_tokens: int = 0,
        num_answer_tokens: int = NUM_ANSWER_TOKENS,
        ends: tuple[int, ...] = ENDS,
        **options: Any,
    ) -> Job:
        job = make_job(
            small_model,
            config,
            num_blocks=num_blocks,
            num_prompt_tokens=NUM_TOKENS,
            dtype="bfloat16",
            prefix_caching_hash_algo=HASHES,
            async_scheduling="preempt_at" not in options,
        )
        prompts = {"page": token_ids[:NUM_TOKENS]}
        if num_filler_tokens:
            prompts["filler"] = token_ids[-num_filler_tokens:]
        options["cuts"] = [("page", end) for end in ends]
        return dataclasses.replace(
            job, prompts=prompts, options=options, num_answer_tokens=num_answer_tokens
        )

    return make


@pytest.fixture(scope="module")
def own(make, tmp_path_factory) -> Any:
    """Text and probabilities behind hits of vLLM's own prefix cache."""
    (report,) = run(tmp_path_factory.mktemp("own") / "run", make(), child="cut")
    return report.data["cuts"]


def check_same(report: Report, own: Any) -> None:
    """Every answer came behind a hit from the host, and is vLLM's own."""
    assert report.data["cuts"] == own
    assert report.count("loaded_tokens") == sum(ENDS)
    report.check_no_trouble()


@pytest.mark.parametrize(("verify", "in_step"), [("load", "false"), ("off", "true")])
def test_a_hit_from_the_host_is_read_as_vllms_own(verify, in_step, make, own, tmp_path):
    """Its load goes ahead of the step that needs it, or in that step."""
    (report,) = run(tmp_path / "run", make(connector(verify=verify)), child="cut")
    check_same(report, own)
    assert report.data["loads"][in_step] == len(ENDS) - 1


def test_one_wrong_slot_changes_every_answer(make, own, tmp_path):
    """Every load reads its first slot in place of its last, whose checksum is right."""
    job = make(connector(verify="load", self_test="off"), faults={"wrong": True})
    (report,) = run(tmp_path / "run", job, child="cut")
    report.check_no_trouble()
    pairs = zip(own, report.data["cuts"], strict=True)
    likeliest = [cut["likeliest"] == found["likeliest"] for cut, found in pairs]
    assert likeliest == [end == 0 for end in ENDS]


@pytest.mark.nightly
def test_a_hit_in_lazy_mode_is_read_as_vllms_own(make, own, tmp_path):
    """Another prompt takes the whole pool."""
    job = make(
        connector(verify="load", lazy_offload=True),
        num_blocks=1 + NUM_POOL_BLOCKS,
        num_filler_tokens=(NUM_POOL_BLOCKS - 1) * BLOCK_TOKENS + 1,
    )
    (report,) = run(tmp_path / "run", job, child="cut")
    check_same(report, own)


@pytest.mark.nightly
@pytest.mark.parametrize("place", ["directory", "shared pool"])
def test_a_hit_from_what_another_engine_stored_is_read_as_vllms_own(
    place, make, own, tmp_path, pools
):
    extra = {"share": "node"} if place == "shared pool" else {"tiers": [tier_at(tmp_path / "tier")]}
    config = connector(verify="load", **extra)
    (first,) = run(tmp_path / "first", make(config, only=STORES), child="cut")
    pools.of(first.log)
    (second,) = run(tmp_path / "second", make(config, only=ANSWERS), child="cut")
    first.check_no_trouble()
    check_same(second, own)


@pytest.mark.nightly
def test_a_preempted_request_goes_on_as_behind_vllms_own_hit(make, tmp_path):
    """Prompt and answer fill 35 blocks when it loses them."""
    few: dict[str, Any] = {"ends": (0,), "preempt_at": 40, "num_answer_tokens": 56}
    plain, ours = run(
        tmp_path / "run", make(**few), make(connector(verify="load"), **few), child="cut"
    )
    assert ours.data["cuts"] == plain.data["cuts"]
    assert ours.count("loaded_tokens") == 35 * BLOCK_TOKENS
    ours.check_no_trouble()
