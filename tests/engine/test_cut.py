"""Behind a hit from the host a prompt is computed as behind one of the GPU's own cache, to the bit.

A hit that ends elsewhere cuts the computation elsewhere, which may round otherwise: in bfloat16
another token follows now and then. What vLLM says by itself where it goes on at the same token
tells that from a wrong block.
"""

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from tests.engine.engines import Job, connector, make_job, make_prompts, run
from tests.tiny_hybrids import KINDS, write_tiny_hybrid

NUM_TOKENS, NAMES = 700, "AB"
ENDS = (0, 32, 288, 672)
"""Tokens of a hit."""


pytestmark = pytest.mark.nightly


@pytest.fixture(params=["lfm2", "gemma3"])
def folder(request, model, tmp_path):
    kind = request.param
    return write_tiny_hybrid(kind, tmp_path / kind) if kind in KINDS else model(kind)


def make_cut(folder: Path, config: Any = None, **options: Any) -> Job:
    """Each prompt behind a hit of each length, alone."""
    arguments = {"dtype": "bfloat16", "num_blocks": 600, "num_prompt_tokens": NUM_TOKENS}
    job = make_job(folder, config, **arguments)
    options["cuts"] = [(name, end) for name in NAMES for end in ENDS]
    prompts = make_prompts(NUM_TOKENS, NAMES)
    return dataclasses.replace(job, prompts=prompts, options=options, num_answer_tokens=24)


def test_a_hit_from_the_host_rounds_as_one_of_the_gpu_does(folder, tmp_path):
    plain, ours = run(
        tmp_path / "run",
        make_cut(folder),
        make_cut(folder, connector(verify="load")),
        child="cut",
    )
    assert ours.data["cuts"] == plain.data["cuts"]
    assert ours.count("loaded_tokens") == len(NAMES) * sum(ENDS)
    ours.check_no_trouble()
    if folder.name == "lfm2":  # of others a CPU rounds alike wherever it goes on
        uncut = plain.data["cuts"][:: len(ENDS)]
        assert any(cut not in uncut for cut in plain.data["cuts"])


def test_a_block_in_the_place_of_another_shows_itself(folder, tmp_path):
    """Every load swaps two slots; those have the right checksums."""
    plain, ours = run(
        tmp_path / "run",
        make_cut(folder),
        make_cut(folder, connector(verify="load", self_test="off"), faults={"swap": True}),
        child="cut",
    )
    ours.check_no_trouble()
    pairs = zip(plain.data["cuts"], ours.data["cuts"], strict=True)
    assert [cut == found for cut, found in pairs] == [end == 0 for end in ENDS] * len(NAMES)
