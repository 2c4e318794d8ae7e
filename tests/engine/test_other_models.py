"""Real engines over one directory: what another model has computed is served to none."""

import json
import os
import random
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open

from tests.engine.engines import (
    Job,
    Report,
    connector,
    make_job,
    make_prompts,
    num_hit_tokens,
    run,
    tier_at,
)
from tests.tiny_vision import IMAGE_ID, write_tiny_vision_model

HASHES = "sha256_cbor"
NUM_TOKENS = 641
NUM_IMAGE_PROMPT = 129
OTHER_PIXELS = {"do_normalize": False}
"""As many tokens of an image, and other values."""


def job(model: Path, tier: Path | None, **arguments: Any) -> Job:
    """A and B, in a pool that holds both."""
    tiers = [] if tier is None else [tier_at(tier)]
    return make_job(
        model,
        num_blocks=60,
        num_prompt_tokens=NUM_TOKENS,
        kv_transfer_config=connector(tiers=tiers),
        turns=("A", "B"),
        prefix_caching_hash_algo=HASHES,
        **arguments,
    )


def job_with_images(model: Path, tier: Path | None, **arguments: Any) -> Job:
    """A and B, each with an image in its first block."""
    prompts: dict[str, Any] = {}
    for number, (name, tokens) in enumerate(make_prompts(NUM_IMAGE_PROMPT, "AB").items()):
        prompts[name] = {"tokens": [*tokens[:5], IMAGE_ID, *tokens[6:]], "image": number}
    return replace(job(model, tier, **arguments), prompts=prompts)


def edit_weights(file: Path) -> None:
    """Change half of a random tensor by much; size and time of the change stay as they were."""
    before = file.stat()
    rng = random.Random(0)
    with safe_open(file, "np") as tensors:
        names = [name for name in tensors.keys() if "proj" in name]  # noqa: SIM118 (no mapping)
        values = tensors.get_tensor(rng.choice(names))
    content = bytearray(file.read_bytes())
    at = content.index(values.tobytes())
    changed = values.reshape(-1)[: values.size // 2] * np.float32(-3)
    content[at : at + changed.nbytes] = changed.tobytes()
    with file.open("r+b") as opened:
        opened.write(content)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert file.stat().st_size == before.st_size


def hits(report: Report) -> list[int]:
    report.check_no_trouble()
    return [answer.num_host for answer in report.answers]


def test_weights_that_were_edited_in_place_have_answers_of_their_own(model, tmp_path):
    """The edit is found; a restart after it has what was stored last."""
    folder, tier = tmp_path / "model", tmp_path / "tier"
    shutil.copytree(model("llama"), folder)
    (first,) = run(tmp_path / "first", job(folder, tier))
    assert hits(first) == [0, 0]
    edit_weights(folder / "model.safetensors")
    (edited,) = run(tmp_path / "edit", job(folder, tier))
    assert hits(edited) == [0, 0]
    assert edited.tokens != first.tokens
    (again,) = run(tmp_path / "again", job(folder, tier))
    assert hits(again) == [num_hit_tokens(NUM_TOKENS)] * 2
    assert again.tokens == edited.tokens


@pytest.mark.nightly
def test_images_that_are_processed_otherwise_have_answers_of_their_own(tmp_path):
    """By an argument of the engine, then by a file of the model; vLLM's hash knows neither."""
    folder, tier = write_tiny_vision_model(tmp_path / "model"), tmp_path / "tier"
    (first,) = run(tmp_path / "first", job_with_images(folder, tier))
    (again,) = run(tmp_path / "again", job_with_images(folder, tier))
    assert all(hits(again)), "hashes of content are the same in every process"
    assert again.tokens == first.tokens
    arguments = {"mm_processor_kwargs": OTHER_PIXELS}
    with_tier, plain = run(
        tmp_path / "argument",
        job_with_images(folder, tier, **arguments),
        job_with_images(folder, None, **arguments),
    )
    assert hits(with_tier) == [0, 0]
    assert with_tier.tokens == plain.tokens != first.tokens
    file = folder / "preprocessor_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | OTHER_PIXELS))
    (edited,) = run(tmp_path / "file", job_with_images(folder, tier))
    assert hits(edited) == [0, 0]
    assert edited.tokens == plain.tokens
