"""What `safe-offload bench engine` asks of a real engine before it measures."""

import json
import math
import shutil
from dataclasses import replace

import pytest

from safe_offload.commands.bench.engine import BenchOptions, ask_for_sizes, scale
from safe_offload.commands.bench.engine_process import EngineOptions
from tests.engine.engines import ENVIRONMENT

pytestmark = pytest.mark.usefixtures("forked_engines")

BLOCK_SIZE, LONGEST_TOKENS, ANSWER_TOKENS = 32, 1500, 8


def test_a_model_tells_the_longest_prompt_and_how_large_its_pools_are(model, tmp_path):
    folder = shutil.copytree(model("llama"), tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    config["max_position_embeddings"] = LONGEST_TOKENS
    (folder / "config.json").write_text(json.dumps(config))
    arguments = {
        "model": str(folder),
        "dtype": "float32",
        "max_model_len": 20_000,
        "block_size": BLOCK_SIZE,
    }
    asked = EngineOptions(arguments, ENVIRONMENT)
    found = ask_for_sizes(asked, tmp_path / "sizing.log", 1000.0)
    num_blocks = math.ceil(LONGEST_TOKENS / BLOCK_SIZE)
    options = BenchOptions(answer_tokens=ANSWER_TOKENS)
    assert scale(options, found) == replace(
        options,
        prompt_tokens=LONGEST_TOKENS - ANSWER_TOKENS,
        num_gpu_blocks=round(1.6 * num_blocks),
        block_size=BLOCK_SIZE,
        num_cpu_blocks=4 * num_blocks,
    )
