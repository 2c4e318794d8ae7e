"""How long prompts of a model can be, and how large its pools: an engine of the model is asked.

How many blocks a prompt takes depends on the model's attention (sliding windows, latents, states),
and vLLM knows. So for a model that is not tiny one more engine is started, with weights that are
not loaded, and its own figures are scaled.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safe_offload.bench.engine_process import EngineOptions, EngineProcess, Started

PROMPTS_ON_HOST = 4
"""A, B and C have to fit, and what is left of a round before them is evicted block by block."""
DEFAULT_CPU_BYTES_MIN = 2 << 30


@dataclass(frozen=True, slots=True)
class Sizes:
    """What fits a model."""

    num_prompt_tokens: int
    num_gpu_blocks: int
    block_size: int
    cpu_bytes: int


def ask_for_sizes(
    engine: EngineOptions,
    log_path: Path,
    *,
    pool_ratio: float,
    num_answer_tokens: int,
    timeout_s: float,
) -> Sizes:
    """Start an engine of the model, and scale what it says of its pool.

    Args:
        engine: as it will be measured, but for the sizes.
        log_path: of the engine.
        pool_ratio: how many prompts the KV pool is to hold.
        num_answer_tokens: of each prompt.
        timeout_s: for the start.

    Raises:
        SafeOffloadError: it does not start.
    """
    quick = {"load_format": "dummy", "enforce_eager": True, "num_gpu_blocks_override": None}
    asked = EngineOptions(engine.arguments | quick, engine.environment, fits_model_len=True)
    with EngineProcess("sizing", asked, log_path) as process:
        started = process.wait_until_started(timeout_s)
        pool_bytes = process.call(ask_for_kv_cache_bytes, None, timeout_s)
    return scale(started, pool_bytes, pool_ratio=pool_ratio, num_answer_tokens=num_answer_tokens)


def scale(started: Started, pool_bytes: int, *, pool_ratio: float, num_answer_tokens: int) -> Sizes:
    """Return sizes for an engine whose pool holds another number of requests.

    Args:
        started: an engine whose longest request is a prompt and its answer.
        pool_bytes: of its KV pool, all ranks together.
        pool_ratio: how many requests the new pool is to hold.
        num_answer_tokens: of a request.
    """
    request_blocks = started.num_gpu_blocks / started.max_concurrency
    request_bytes = pool_bytes / started.max_concurrency
    return Sizes(
        num_prompt_tokens=started.max_model_len - num_answer_tokens,
        num_gpu_blocks=round(pool_ratio * request_blocks),
        block_size=started.block_size,
        cpu_bytes=max(DEFAULT_CPU_BYTES_MIN, round(PROMPTS_ON_HOST * request_bytes)),
    )


def ask_for_kv_cache_bytes(engine: Any, _: None) -> int:
    """Return the bytes of the KV pool of all workers; see `WorkerProbe.kv_cache_bytes`."""
    return sum(engine.collective_rpc("kv_cache_bytes"))
