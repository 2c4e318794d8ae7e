"""Prompts A, B, A in a KV pool that cannot hold both: A comes back from host memory.

python examples/offline.py          a tiny model made on the spot; or name one that vLLM knows
"""

import os
import sys
import tempfile
from pathlib import Path

from tiny_models import write_tiny_model
from vllm import LLM, SamplingParams

NUM_TOKENS = 8_000
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB; read by vLLM's CPU engine only


def main(folder: Path) -> None:
    """Ask three times and print how long the first token took."""
    llm = LLM(
        sys.argv[1] if sys.argv[1:] else str(write_tiny_model("llama", folder)),
        max_model_len=NUM_TOKENS + 16,
        block_size=32,
        num_gpu_blocks_override=int(1.1 * NUM_TOKENS / 32),
        disable_log_stats=False,
        kv_transfer_config={"kv_connector": "SafeCPUOffloadConnector"},
    )
    for name, first_id in (("A", 65), ("B", 98), ("A", 65)):
        prompt = {"prompt_token_ids": [first_id + place % 7 for place in range(NUM_TOKENS)]}
        (output,) = llm.generate([prompt], SamplingParams(max_tokens=16, temperature=0))
        ttft_s, num_cached = output.metrics.first_token_latency, output.num_cached_tokens
        print(f"{name}: first token after {ttft_s:.3f} s, {num_cached} tokens from a cache")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as model_folder:
        main(Path(model_folder))
