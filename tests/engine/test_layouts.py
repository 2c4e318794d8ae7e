"""Layouts of the KV cache: whole blocks where they can be had, silence where they cannot."""

from dataclasses import replace
from typing import Any

import pytest

from examples.tiny_models import ModelKind
from tests.engine.conftest import GetModel
from tests.engine.engines import (
    NUM_PROMPT_TOKENS,
    Job,
    connector,
    make_job,
    num_hit_tokens,
    run,
)

BOTH = ("LBHNC", "BLHNC")


def job(model: GetModel, kind: ModelKind, *layouts: str, **more: Any) -> Job:
    """An engine; vLLM's attention on the CPU says that it reads these layouts.

    It says that it reads LBHNC only, but its kernels go by strides, and answer well with BLHNC.
    """
    made = make_job(model(kind), **more)
    return replace(made, options={"layouts": layouts} if layouts else {})


@pytest.mark.parametrize("kind", [pytest.param("llama", marks=pytest.mark.nightly), "gemma3"])
def test_blocks_in_one_piece_come_back_with_the_same_tokens(kind, model, plain, tmp_path):
    """Full attention, and a hybrid model, whose three groups lie over one another in a block."""
    wish = connector(enable_cross_layers_blocks="true")
    (ours,) = run(tmp_path, job(model, kind, *BOTH, kv_transfer_config=wish))
    assert "Using BLHNC KV cache layout" in ours.log
    assert "bytes in one range, " in ours.log
    assert "Using LBHNC KV cache layout" in plain(kind).log
    ours.check_second_round_hits(num_hit_tokens(NUM_PROMPT_TOKENS))
    assert ours.tokens == plain(kind).tokens
    ours.check_well()
