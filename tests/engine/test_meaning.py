"""Real engines over one directory: what another model has computed is served to none."""

from __future__ import annotations

import os
import random
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open

from tests.engine.conftest import GetModel
from tests.engine.engines import Job, Report, connector, make_job, num_hit_tokens, run

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

HASHES = "sha256_cbor"
NUM_TOKENS = 641
LONG_WAIT_S = 60
"""No look-up is cut short where a machine is busy."""
NUM_EDITS = 2


def job(model: Path, tier: Path | None) -> Job:
    """A and B, in a pool that holds both."""
    tiers = [] if tier is None else [{"url": f"file://{tier}", "wait_s": LONG_WAIT_S}]
    return make_job(
        model,
        num_blocks=60,
        num_prompt_tokens=NUM_TOKENS,
        kv_transfer_config=connector(tiers=tiers),
        turns=("A", "B"),
        prefix_caching_hash_algo=HASHES,
    )


def edit_weights(file: Path, seed: int) -> None:
    """Change half of a random tensor by much; size and time of the change stay as they were."""
    before = file.stat()
    rng = random.Random(seed)
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


def test_weights_that_were_edited_in_place_have_answers_of_their_own(
    model: GetModel, tmp_path: Path
) -> None:
    """Each edit is found; between two, a restart has what the last one stored."""
    folder, tier = tmp_path / "model", tmp_path / "tier"
    shutil.copytree(model("llama"), folder)
    all_hit = [num_hit_tokens(NUM_TOKENS)] * 2
    (first,) = run(tmp_path / "first", job(folder, tier))
    assert hits(first) == [0, 0]
    for number in range(NUM_EDITS):
        edit_weights(folder / "model.safetensors", number)
        edited, plain = run(tmp_path / f"edit {number}", job(folder, tier), job(folder, None))
        assert hits(edited) == [0, 0]
        assert edited.tokens == plain.tokens != first.tokens
        (again,) = run(tmp_path / f"again {number}", job(folder, tier))
        assert hits(again) == all_hit
        assert again.tokens == edited.tokens
        first = edited
