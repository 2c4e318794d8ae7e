"""Layouts of the KV cache: whole blocks where they can be had, silence where they cannot."""

from dataclasses import replace

from tests.engine.engines import (
    NUM_PROMPT_TOKENS,
    connector,
    make_job,
    num_hit_tokens,
    run,
)

BOTH = ("LBHNC", "BLHNC")


def test_blocks_in_one_piece_come_back_with_the_same_tokens(model, plain_gemma3, tmp_path):
    """A hybrid model, whose three groups lie over one another in a block.

    vLLM's attention on the CPU says that it reads LBHNC only, but its kernels go by strides, and
    answer well with BLHNC.
    """
    job = make_job(model("gemma3"), connector(enable_cross_layers_blocks="true"))
    (ours,) = run(tmp_path, replace(job, options={"layouts": BOTH}))
    assert "Using BLHNC KV cache layout" in ours.log
    assert "bytes in one range, " in ours.log
    assert "Using LBHNC KV cache layout" in plain_gemma3.log
    ours.check_second_round_hits(num_hit_tokens(NUM_PROMPT_TOKENS))
    assert ours.tokens == plain_gemma3.tokens
    ours.check_well()
