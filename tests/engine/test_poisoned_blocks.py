"""What nobody wrote reaches no answer: the GPU's blocks are poisoned before they are given out.

Of models whose blocks vLLM zeroes the poison is not a number; of others it is a large one, since
vLLM's kernel for a CPU multiplies what is behind the end of a request by 0.
"""

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from tests.engine.children.poisoned import FAILS, IS_CUT, LEAVES_OUT, PREEMPTS
from tests.engine.engines import Job, Report, connector, make_job, make_prompts, run
from tests.tiny_hybrids import KINDS, write_tiny_hybrid

NUM_TOKENS, NAMES = 500, "ABCDEF"
ROUNDS = ("", "", FAILS, IS_CUT, PREEMPTS, "", LEAVES_OUT)
POOL_BLOCKS = {"gemma3": 140, "gpt_oss": 75, "lfm2": 300}
"""For some of the prompts at a time. vLLM's own answers of lfm2 change with preemptions."""


@pytest.fixture(params=["gemma3", "lfm2", pytest.param("gpt_oss", marks=pytest.mark.nightly)])
def kind(request):
    return request.param


@pytest.fixture
def folder(kind, model, tmp_path):
    return write_tiny_hybrid(kind, tmp_path / "model") if kind in KINDS else model(kind)


def make_poisoned(folder: Path, num_blocks: int, config: Any = None, **options: Any) -> Job:
    """All prompts at once, for each round."""
    job = make_job(folder, config, num_blocks=num_blocks, num_prompt_tokens=NUM_TOKENS)
    prompts = make_prompts(NUM_TOKENS, NAMES)
    options = {"rounds": ROUNDS, "is_poisoned": True, **options}
    return dataclasses.replace(job, prompts=prompts, options=options, num_answer_tokens=60)


def is_nonsense(report: Report, kind: str) -> list[bool]:
    """Of each round, whether an answer is not a number, or not that of a first computation."""
    answers = report.data["rounds"]
    if kind != "lfm2":
        return [found != answers[0] for found in answers]
    return [not finite for finite in report.data["are_finite"]]


def test_no_poison_reaches_an_answer(kind, folder, tmp_path):
    """Blocks of several groups: computed, loaded, of loads that fail halfway, of hits that are cut,
    of requests that were preempted.

    Behind any hit, of the GPU's own cache too, vLLM computes lfm2 a bit differently on a CPU.
    """
    plain, ours = run(
        tmp_path / "run",
        make_poisoned(folder, 1000, rounds=("",), is_poisoned=False),
        make_poisoned(folder, POOL_BLOCKS[kind], connector()),
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
