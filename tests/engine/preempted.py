"""Requests that are preempted, for tests with a real engine: what of their tokens comes back.

Many long generations at once in a KV pool for half of them: vLLM preempts, which gives a request's
blocks away, and computes again what is gone when the request runs next. The scheduler is watched in
its own process, so that the counts are exact.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from examples.tiny_models import ModelKind, count_prompt_blocks
from safe_offload.commands.bench.engine import PROMPT_TOKEN_IDS
from safe_offload.commands.bench.engine_process import EngineOptions, generate

NUM_REQUESTS, NUM_TOKENS_MAX = 8, 192
"""At once, and of the longest prompt and of the longest answer."""
POOL_SHARE = 0.5
"""Of what all requests hold together at their ends."""
BLOCK_SIZE = 32
SLIDING_WINDOW = 128


@dataclass(frozen=True, slots=True)
class EngineRun:
    """One engine's run of the workload."""

    num_preemptions: int
    num_host: int  # tokens loaded from the host
    num_again: int  # tokens that were computed once more
    token_ids: tuple[tuple[int, ...], ...]  # of the answers, in the order of the prompts

    @property
    def host_share(self) -> float:
        """Return what came back from the host, of what the GPU's cache did not have."""
        return self.num_host / (self.num_host + self.num_again)


@dataclass(frozen=True, slots=True)
class Workload:
    """All prompts, given to the engine at once."""

    prompts: tuple[tuple[int, ...], ...]
    nums_answer_tokens: tuple[int, ...]


def make_workload() -> Workload:
    """Return prompts with no prefix in common, and lengths from half of the longest on.

    Of equal length the requests would run out of blocks in the same step, and those preempted then
    would only run when all others have ended.
    """
    prompts, nums_answer_tokens = [], []
    for index in range(NUM_REQUESTS):
        generator = random.Random(f"0/{index}")
        num_prompt_tokens = generator.randint(NUM_TOKENS_MAX // 2, NUM_TOKENS_MAX)
        prompts.append(tuple(generator.choices(PROMPT_TOKEN_IDS, k=num_prompt_tokens)))
        nums_answer_tokens.append(generator.randint(NUM_TOKENS_MAX // 2, NUM_TOKENS_MAX))
    return Workload(tuple(prompts), tuple(nums_answer_tokens))


def make_engine_options(
    kind: ModelKind, model: Path, workload: Workload, settings: dict[str, Any]
) -> EngineOptions:
    """Return how to start an engine with our connector and these settings."""
    num_blocks = sum(
        count_prompt_blocks(
            kind,
            len(prompt) + num_answer_tokens,
            block_size=BLOCK_SIZE,
            max_num_batched_tokens=1,  # what a request holds at its end, when it decodes
            sliding_window=SLIDING_WINDOW,
        )
        for prompt, num_answer_tokens in zip(
            workload.prompts, workload.nums_answer_tokens, strict=True
        )
    )
    arguments = {
        "model": str(model),
        "dtype": "float32",
        "enforce_eager": True,
        "max_model_len": 2 * NUM_TOKENS_MAX,
        "max_num_seqs": NUM_REQUESTS,
        "block_size": BLOCK_SIZE,
        "num_gpu_blocks_override": round(POOL_SHARE * num_blocks) + 1,
        "max_num_batched_tokens": 512,
        "enable_prefix_caching": True,
        "enable_chunked_prefill": True,
        "kv_transfer_config": {
            "kv_connector": "SafeCPUOffloadConnector",
            "kv_load_failure_policy": "recompute",
            # The tokens are counted, not the time.
            "kv_connector_extra_config": {
                "cpu_bytes_to_use": "1GiB",
                "min_load_tokens": 0,
                **settings,
            },
        },
    }
    environment = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the scheduler is watched from inside
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",  # the same sums in all engines, whatever cores they are given
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    return EngineOptions(arguments, environment)


# ---- inside of an engine -----------------------------------------------------------------------


def run_watched(engine: Any, workload: Workload) -> EngineRun:
    """Run the workload in the engine's own process, its scheduler watched.

    No prompt has a prefix in common with another, so each token is needed once, and what is loaded
    was lost to a preemption. The last token of an answer is sampled, and nothing is computed of it.
    Source: vllm/v1/core/sched/scheduler.py (0.32.0).
    """
    scheduler = engine.llm_engine.engine_core.engine_core.scheduler
    scheduled, loaded, preempted = [], [], []
    _watch(scheduler, "schedule", lambda out, *_: scheduled.append(out.total_num_scheduled_tokens))
    _watch(scheduler, "_preempt_request", lambda _, request, *__: preempted.append(request))
    _watch(
        scheduler.connector,
        "update_state_after_alloc",
        lambda _, __, ___, num_tokens: loaded.append(num_tokens),
    )
    outputs = generate(engine, workload.prompts, workload.nums_answer_tokens)
    num_once = sum(map(len, workload.prompts)) + sum(workload.nums_answer_tokens)
    return EngineRun(
        num_preemptions=len(preempted),
        num_host=sum(loaded),
        num_again=sum(scheduled) - (num_once - len(workload.prompts)),
        token_ids=tuple(tuple(output.outputs[0].token_ids) for output in outputs),
    )


def _watch(owner: Any, name: str, see: Callable[..., object]) -> None:
    """Have `see` called with the result and the arguments of each call of a method."""
    method = getattr(owner, name)

    def watched(*args: Any, **kwargs: Any) -> Any:
        result = method(*args, **kwargs)
        see(result, *args)
        return result

    setattr(owner, name, watched)
