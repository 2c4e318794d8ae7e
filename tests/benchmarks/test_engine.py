"""The tiny models of `python -m tests.benchmarks engine`."""

from __future__ import annotations

from safe_offload.commands.bench.engine import OURS, BenchOptions, engine_options
from tests.benchmarks.engine import tiny


def test_the_pool_of_a_tiny_model_with_mla_is_counted_in_the_blocks_that_vllm_makes_of_it(
    tmp_path,
):
    """vLLM's CPU engine takes 16 tokens a block there, whatever is asked for."""
    options = tiny(BenchOptions("deepseek", prompt_tokens=1584, pool_ratio=2.0), tmp_path)
    chosen = engine_options(options)[OURS].arguments
    assert (chosen["block_size"], chosen["num_gpu_blocks_override"]) == (16, 200)
    assert options.model == str(tmp_path / "deepseek")
