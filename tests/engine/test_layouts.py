"""Layouts of the KV cache: whole blocks where they can be had, silence where they cannot."""

from dataclasses import replace
from typing import Any

import pytest

from examples.tiny_models import ModelKind
from tests.engine.conftest import GetModel
from tests.engine.engines import (
    MLA,
    NUM_MLA_HIT_TOKENS,
    NUM_PROMPT_TOKENS,
    Job,
    connector,
    make_job,
    num_hit_tokens,
    run,
)

BOTH = ("LBHNC", "BLHNC")
NUM_RANGES = {"llama": 2, "gemma3": 2, "deepseek": 2}
"""Layers of the widest KV cache group."""


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


@pytest.mark.nightly
@pytest.mark.parametrize("kind", ["llama", "deepseek", "gemma3"])
def test_where_they_cannot_be_had_nothing_is_said_and_nothing_changes(kind, model, tmp_path):
    """The kernels of CPU_MLA fail at the first request with a layout that it says it reads."""
    settings = MLA if kind == "deepseek" else {}
    jobs = [
        make_job(model(kind), connector(enable_cross_layers_blocks=is_wanted), **settings)
        for is_wanted in (True, False)
    ]
    wanted, usual = run(tmp_path, *jobs)
    assert wanted.tokens == usual.tokens
    hits = [answer.num_host for answer in wanted.answers]
    num_hit = NUM_MLA_HIT_TOKENS if settings else num_hit_tokens(NUM_PROMPT_TOKENS)
    assert hits == [0] * 3 + [num_hit] * 3
    assert warnings_of(wanted.log) == warnings_of(usual.log)
    for report in (wanted, usual):
        assert f"bytes in {NUM_RANGES[kind]} ranges, " in report.log
        report.check_well()


def warnings_of(log: str) -> set[str]:
    """What vLLM and the connector have warned of, without the time and the place."""
    lines = [line for line in log.splitlines() if "WARNING" in line]
    return {line.partition("] ")[2] for line in lines}
