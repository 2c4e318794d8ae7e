"""What nobody wrote reaches no answer: the GPU's blocks are poisoned before they are given out.

Of lfm2 and deepseek the poison is not a number; of others it is a large one, since vLLM's kernel
for a CPU multiplies what is behind the end of a request by 0. On a CPU vLLM 0.32.0 has no sparse
attention without AMX, and no latents of 8 bits.
"""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.children.poisoned import FAILS, IS_CUT, LEAVES_OUT, PREEMPTS
from tests.engine.engines import MLA, Job, Report, connector, make_job, make_prompts, run
from tests.tiny_hybrids import KINDS, write_tiny_hybrid

NUM_TOKENS, NAMES = 500, "ABCDEF"
ROUNDS = ("", "", FAILS, IS_CUT, PREEMPTS, "", LEAVES_OUT)
POOL_BLOCKS = {"gemma3": 140, "gpt_oss": 75, "lfm2": 300, "deepseek": 230}
"""For some of the prompts at a time. vLLM's own answers of the last two change with preemptions."""
SETTINGS: dict[str, dict[str, Any]] = {
    "deepseek": MLA,
    "gemma3 in 8 bits": {"kv_cache_dtype": "fp8"},
}
NOT_A_NUMBER = ("lfm2", "deepseek")
NIGHTLY = pytest.mark.nightly
IN_8_BITS = pytest.mark.skipif(not torch.cpu._is_avx512_supported(), reason="needs AVX-512")
SOME_NIGHTS = [
    ("gemma3", NIGHTLY),
    ("deepseek", NIGHTLY),
    ("gemma3 in 8 bits", [NIGHTLY, IN_8_BITS]),
    ("gpt_oss", NIGHTLY),
]


@pytest.fixture(params=["lfm2", *(pytest.param(k, marks=m) for k, m in SOME_NIGHTS)])
def kind(request):
    return request.param


@pytest.fixture
def folder(kind, model, tmp_path):
    return write_tiny_hybrid(kind, tmp_path / "model") if kind in KINDS else model(kind.split()[0])


def make_poisoned(
    kind: str, folder: Path, num_blocks: int, config: Any = None, **options: Any
) -> Job:
    """All prompts at once, for each round."""
    settings = SETTINGS.get(kind, {}) | {"num_prompt_tokens": NUM_TOKENS}
    job = make_job(folder, config, num_blocks=num_blocks, **settings)
    prompts = make_prompts(NUM_TOKENS, NAMES)
    poison = float("nan") if kind in NOT_A_NUMBER else 1e4
    options = {"rounds": ROUNDS, "poison": poison, **options}
    return dataclasses.replace(job, prompts=prompts, options=options, num_answer_tokens=60)


def is_nonsense(report: Report, kind: str) -> list[bool]:
    """Of each round, whether an answer is not a number, or not that of a first computation."""
    answers = report.data["rounds"]
    if kind not in NOT_A_NUMBER:
        return [found != answers[0] for found in answers]
    return [not finite for finite in report.data["are_finite"]]


def test_no_poison_reaches_an_answer(kind, folder, tmp_path):
    """Blocks of several groups: computed, loaded, of loads that fail halfway, of hits that are cut,
    of requests that were preempted.

    Behind any hit, of the GPU's own cache too, a CPU computes lfm2 and deepseek a bit differently.
    """
    plain, ours = run(
        tmp_path / "run",
        make_poisoned(kind, folder, 1000, rounds=("",), poison=None),
        make_poisoned(kind, folder, POOL_BLOCKS[kind.split()[0]], connector()),
        child="poisoned",
    )
    assert ours.data["rounds"][0] == plain.data["rounds"][0]
    assert is_nonsense(ours, kind) == [each == LEAVES_OUT for each in ROUNDS]
    counts = ours.data["counts"]
    assert counts[FAILS] == ours.count("transfer_failures") > 2
    assert counts[IS_CUT] > 2
    assert counts[PREEMPTS] > 2
    assert ours.count("loaded_tokens") > len(NAMES) * NUM_TOKENS
    assert (counts["zeroed"] > 0) == (kind == "lfm2")
    assert ours.count("contained_errors") == 0
    ours.check_everything_is_free()
