"""Requests that are preempted, for tests with a real engine: what of their tokens comes back.

Many long generations at once in a KV pool for half of them: vLLM preempts, which gives a request's
blocks away, and computes again what is gone when the request runs next. The scheduler is watched in
its own process, so that the counts are exact.
"""

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from examples.tiny_models import ModelKind, count_prompt_blocks
from safe_offload.commands.bench.engine import PROMPT_TOKEN_IDS
from safe_offload.commands.bench.engine_process import EngineOptions, generate
from safe_offload.errors import SafeOffloadError

NUM_REQUESTS, NUM_TOKENS_MAX = 8, 192
"""At once, and of the longest prompt and of the longest answer."""
POOL_SHARE = 0.5
"""Of what all requests hold together at their ends."""
BLOCK_SIZE = 32
SLIDING_WINDOW = 128


@dataclass(slots=True)
class Recovery:
    """What became of the tokens that one request had computed when it was preempted."""

    num_computed: int  # tokens whose KV cache it had then
    num_gpu: int = 0  # of them, given back by the GPU's prefix cache when it ran again
    num_host: int = 0  # of them, loaded from the host
    # Tokens computed that had been computed before, until it ended or was preempted once more.
    # What it had not come to by then is lost again and counts for the next.
    num_again: int = 0


@dataclass(frozen=True, slots=True)
class EngineRun:
    """One engine's run of the workload."""

    num_again: int  # tokens that were computed once more
    recoveries: tuple[Recovery, ...]  # one for each preemption
    token_ids: tuple[tuple[int, ...], ...]  # of the answers, in the order of the prompts

    @property
    def host_share(self) -> float:
        """Return what came back from the host, of what the GPU's cache did not have."""
        num_host = sum(recovery.num_host for recovery in self.recoveries)
        return num_host / (num_host + self.num_again)


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


class Ledger:
    """Which tokens were computed, and which of them once more.

    It is told what the scheduler does, in that order, and knows each request by its id.
    `num_prompt_hits`: tokens that requests got from a cache before they were ever preempted.
    """

    def __init__(self) -> None:
        self.num_scheduled = self.num_prompt_hits = 0
        self.recoveries: list[Recovery] = []
        self._reached: dict[str, int] = {}
        self._gpu_hits: dict[str, int] = {}
        self._resuming: dict[str, Recovery] = {}
        self._open: dict[str, Recovery] = {}

    def preempted(self, request_id: str, num_computed: int) -> None:
        """A request loses its blocks; it has this many tokens computed or being computed."""
        self.recoveries.append(Recovery(num_computed))
        self._resuming[request_id] = self._open[request_id] = self.recoveries[-1]

    def matched(self, request_id: str, num_gpu: int) -> None:
        """A request that has no block is given this many tokens of the GPU's prefix cache."""
        self._gpu_hits[request_id] = num_gpu

    def scheduled(self, request_id: str, first: int, num_tokens: int) -> None:
        """A request computes tokens from the `first` on."""
        self.num_scheduled += num_tokens
        reached = self._reached.get(request_id, 0)
        end = first + num_tokens
        resuming = self._resuming.pop(request_id, None)
        if resuming is not None:
            resuming.num_gpu = min(self._gpu_hits[request_id], first)
            resuming.num_host = first - resuming.num_gpu
        elif request_id not in self._reached:
            self.num_prompt_hits += first
        if request_id in self._open:
            self._open[request_id].num_again += max(0, min(reached, end) - first)
        self._reached[request_id] = max(reached, end)

    def close(self, workload: Workload) -> int:
        """Return the tokens that were computed again; raise if what was seen does not add up."""
        num_tokens = sum(map(len, workload.prompts)) + sum(workload.nums_answer_tokens)
        # The last token of an answer is sampled, and nothing is computed from it.
        num_once = num_tokens - len(workload.prompts) - self.num_prompt_hits
        num_again = sum(recovery.num_again for recovery in self.recoveries)
        if num_once + num_again != self.num_scheduled:
            raise SafeOffloadError(
                f"{self.num_scheduled} tokens were scheduled; expected {num_once} that are needed "
                f"once and {num_again} that were seen to be computed again"
            )
        return num_again


def run_watched(engine: Any, workload: Workload) -> EngineRun:
    """Run the workload in the engine's own process, its scheduler watched."""
    ledger = Ledger()
    watch(engine.llm_engine.engine_core.engine_core.scheduler, ledger)
    outputs = generate(engine, workload.prompts, workload.nums_answer_tokens)
    return EngineRun(
        num_again=ledger.close(workload),
        recoveries=tuple(ledger.recoveries),
        token_ids=tuple(tuple(output.outputs[0].token_ids) for output in outputs),
    )


def watch(scheduler: Any, ledger: Ledger) -> None:
    """Tell the ledger what a scheduler does from now on.

    Three methods are replaced on the instances: `Scheduler.schedule`, after which a request's
    `num_computed_tokens` is the end of what it computes in the step; `Scheduler._preempt_request`;
    and `KVCacheManager.allocate_slots`, which is told what the prefix cache has.
    Source: vllm/v1/core/sched/scheduler.py (0.32.0).
    """
    schedule, preempt = scheduler.schedule, scheduler._preempt_request
    allocate = scheduler.kv_cache_manager.allocate_slots

    def watched_schedule(*args: Any, **kwargs: Any) -> Any:
        output = schedule(*args, **kwargs)
        for request_id, num_tokens in output.num_scheduled_tokens.items():
            end = scheduler.requests[request_id].num_computed_tokens
            ledger.scheduled(request_id, end - num_tokens, num_tokens)
        return output

    def watched_preempt(request: Any, *args: Any, **kwargs: Any) -> Any:
        ledger.preempted(request.request_id, request.num_computed_tokens)
        return preempt(request, *args, **kwargs)

    def watched_allocate(request: Any, *args: Any, **kwargs: Any) -> Any:
        is_new = request.num_computed_tokens == 0
        blocks = allocate(request, *args, **kwargs)
        if is_new and blocks is not None:
            ledger.matched(request.request_id, kwargs["num_new_computed_tokens"])
        return blocks

    scheduler.schedule, scheduler._preempt_request = watched_schedule, watched_preempt
    scheduler.kv_cache_manager.allocate_slots = watched_allocate
