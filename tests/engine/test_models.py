"""Prompts come back from host memory, for each kind of attention that is cached in its own way."""

import pytest

from tests.engine.engines import (
    MLA,
    NUM_MLA_HIT_TOKENS,
    NUM_PROMPT_TOKENS,
    connector,
    make_job,
    num_hit_tokens,
    run,
)


@pytest.mark.parametrize(
    "kind", [pytest.param("llama", marks=pytest.mark.nightly), "gemma3", "deepseek"]
)
def test_prompts_come_back_from_the_host_with_the_same_tokens(kind, model, plain, tmp_path):
    """Full attention; the same with two sliding-window groups; multi-head latent attention.

    The tokens of the last one are those of a hit in the GPU's own cache: bytes that went through
    host memory lead to exactly the same tokens as bytes that never left.
    """
    settings = MLA if kind == "deepseek" else {}
    (ours,) = run(tmp_path, make_job(model(kind), connector(), **settings))
    is_mla = kind == "deepseek"
    ours.check_second_round_hits(
        NUM_MLA_HIT_TOKENS if is_mla else num_hit_tokens(NUM_PROMPT_TOKENS)
    )
    assert ours.tokens == plain(kind).tokens
    ours.check_well()
