"""What `safe-offload bench engine` asks of a real engine before it measures."""

from __future__ import annotations

import json
import math
import shutil

import pytest

from safe_offload.bench.engine_probe import WorkerProbe
from safe_offload.bench.engine_process import EngineOptions
from safe_offload.bench.engine_sizing import Sizes, ask_for_sizes
from safe_offload.bench.tiny_models import HEAD_DIM, NUM_KV_HEADS
from tests.engine.engines import ENVIRONMENT

pytestmark = pytest.mark.engine

BLOCK_SIZE, LONGEST_TOKENS, ANSWER_TOKENS = 32, 1500, 8
BLOCK_BYTES = 2 * BLOCK_SIZE * 2 * NUM_KV_HEADS * HEAD_DIM * 4
"""Layers, tokens, keys and values, heads, numbers of 4 bytes: the tiny llama."""


def test_a_model_tells_the_longest_prompt_and_how_large_its_pools_are(model, tmp_path, monkeypatch):
    folder = shutil.copytree(model("llama"), tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    config["max_position_embeddings"] = LONGEST_TOKENS
    (folder / "config.json").write_text(json.dumps(config))
    arguments = {
        "model": str(folder),
        "dtype": "float32",
        "max_model_len": 20_000,
        "block_size": BLOCK_SIZE,
        "worker_extension_cls": f"{WorkerProbe.__module__}.{WorkerProbe.__qualname__}",
    }
    monkeypatch.setattr("safe_offload.bench.engine_sizing.DEFAULT_CPU_BYTES_MIN", 0)
    sizes = ask_for_sizes(
        EngineOptions(arguments, ENVIRONMENT),
        tmp_path / "sizing.log",
        pool_ratio=1.6,
        num_answer_tokens=ANSWER_TOKENS,
        timeout_s=240.0,
    )
    num_blocks = math.ceil(LONGEST_TOKENS / BLOCK_SIZE)
    assert sizes == Sizes(
        num_prompt_tokens=LONGEST_TOKENS - ANSWER_TOKENS,
        num_gpu_blocks=round(1.6 * num_blocks),
        block_size=BLOCK_SIZE,
        cpu_bytes=4 * num_blocks * BLOCK_BYTES,
    )
