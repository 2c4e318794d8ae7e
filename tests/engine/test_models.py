"""Prompts come back from host memory, for each kind of attention that is cached in its own way."""

from __future__ import annotations

from pathlib import Path

import pytest

from safe_offload.commands.bench.tiny_models import ModelKind
from tests.engine.conftest import GetModel
from tests.engine.engines import (
    NUM_PROMPT_TOKENS,
    connector,
    make_job,
    num_hit_tokens,
    num_pool_blocks,
    run,
)

pytestmark = [pytest.mark.engine, pytest.mark.timeout(3600)]


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_prompts_come_back_from_the_host_with_the_same_tokens(
    kind: ModelKind, model: GetModel, tmp_path: Path
) -> None:
    """Full attention, and full attention with two sliding-window groups."""
    num_blocks = num_pool_blocks(kind)
    ours, plain = run(
        tmp_path,
        make_job(model(kind), num_blocks=num_blocks, kv_transfer_config=connector()),
        make_job(model(kind), num_blocks=num_blocks),
    )
    ours.check_second_round_hits(num_hit_tokens(NUM_PROMPT_TOKENS))
    assert [answer.num_cached for answer in plain.answers] == [0] * 6
    assert ours.tokens == plain.tokens
    assert len({tuple(tokens) for tokens in plain.tokens}) == 3, "the prompts look alike"
    ours.check_no_trouble()
    ours.check_everything_is_free()


def test_mla_prompts_come_back_from_the_host_with_the_tokens_of_a_gpu_hit(
    model: GetModel, tmp_path: Path
) -> None:
    """Multi-head latent attention, compared with vLLM's own prefix cache.

    On a CPU vLLM computes a prompt from its start with one MLA kernel and the rest of a prompt
    behind a hit with another, and the two round differently. So what follows *any* hit, also one
    of the GPU's own cache, may differ from what follows a prompt computed from its start; that is
    why vLLM switches prefix caching off for MLA there (CpuPlatform.check_and_update_config, without
    AMX), which the child undoes. The engine without connector therefore gets a pool that keeps all
    three prompts: its second round is hits of the GPU's own cache, of as many tokens. Bytes that
    went through host memory have to lead to exactly the same tokens as bytes that never left.
    """
    num_prompt_tokens, block_size = 993, 16
    num_blocks = num_pool_blocks("deepseek", num_prompt_tokens, block_size=block_size)
    settings = {
        "num_prompt_tokens": num_prompt_tokens,
        "block_size": block_size,
        "max_num_batched_tokens": 2048,  # vLLM has no chunked prefill for MLA there
        "force_prefix_caching": True,
    }
    ours, plain = run(
        tmp_path,
        make_job(
            model("deepseek"), num_blocks=num_blocks, kv_transfer_config=connector(), **settings
        ),
        make_job(model("deepseek"), num_blocks=4 * num_blocks, **settings),
    )
    num_hit = num_hit_tokens(num_prompt_tokens, block_size)
    ours.check_second_round_hits(num_hit)
    assert [answer.num_gpu for answer in plain.answers] == [0, 0, 0, num_hit, num_hit, num_hit]
    assert ours.tokens == plain.tokens
    assert len({tuple(tokens) for tokens in plain.tokens[:3]}) == 3, "the prompts look alike"
    ours.check_no_trouble()
    ours.check_everything_is_free()
