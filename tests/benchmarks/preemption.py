"""Tokens computed again after preemptions, with the connector and without any.

Many long generations at once in a KV pool for half of them: vLLM preempts, which gives a request's
blocks away, and computes again what is gone when the request runs next. The connector brings it
back from host memory. vLLM's real CPU engine runs tiny models, a step at a time; its scheduler is
watched in its own process, so that the counts are exact.
"""

import argparse
import random
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from examples.tiny_models import ModelKind, count_prompt_blocks, write_tiny_model
from safe_offload.commands.bench.engine import PROMPT_TOKEN_IDS
from safe_offload.commands.bench.engine_process import EngineOptions, EngineProcess, generate
from safe_offload.commands.bench.report import add_output_arguments, describe_machine, publish
from safe_offload.errors import SafeOffloadError
from tests.benchmarks.preemption_report import (
    BASELINE,
    CaseRuns,
    EngineRun,
    Recovery,
    make_report,
    num_different_answers,
)


@dataclass(frozen=True, slots=True)
class Case:
    """A tiny model, and arguments of `vllm.LLM` for all engines that run it."""

    model: ModelKind
    arguments: dict[str, Any] = field(default_factory=dict)


CASES = {
    "llama": Case("llama"),
    "gemma3": Case("gemma3"),
    # vLLM's default, 0, hashes of a sliding window's blocks only those at the end of a prompt. So
    # nothing that its own cache can hit ends inside of an answer.
    # Source: `CacheConfig.prefix_cache_retention_interval`, vllm/config/cache.py (0.32.0).
    "gemma3-dense": Case("gemma3", {"prefix_cache_retention_interval": None}),
}
ENGINES = {BASELINE: None, "ours eager": {}, "ours lazy": {"lazy_offload": True}}
"""Our settings beside the size of the host pool; None for no connector."""
SLIDING_WINDOW = 128
_START_TIMEOUT_S = 900.0
_COUNTER_PREFIX = "vllm:safe_offload_"


@dataclass(frozen=True, slots=True)
class PreemptionOptions:
    """What to run; the defaults of the command line are in `add_arguments`."""

    cases: tuple[str, ...]
    num_requests: int
    num_prompt_tokens: int
    num_answer_tokens: int
    pool_ratio: float  # of what all requests hold together at their ends
    block_size: int
    max_num_batched_tokens: int
    cpu_bytes: str
    timeout_s: float
    seed: int


@dataclass(frozen=True, slots=True)
class Workload:
    """All prompts, given to the engine at once."""

    prompts: tuple[tuple[int, ...], ...]
    nums_answer_tokens: tuple[int, ...]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--cases", nargs="+", choices=list(CASES), default=list(CASES), help="(default: all)")
    add("--requests", type=int, default=16, help="at once (%(default)s)")
    add("--prompt-tokens", type=int, default=256, help="of the longest prompt (%(default)s)")
    add("--answer-tokens", type=int, default=768, help="of the longest answer (%(default)s)")
    add(
        "--pool-ratio",
        type=float,
        default=0.5,
        help="KV pool, as a share of what all requests hold at their ends (%(default)s)",
    )
    add("--block-size", type=int, default=32, help="tokens in a KV block (%(default)s)")
    add("--max-num-batched-tokens", type=int, default=512, help="of a step (%(default)s)")
    add("--cpu-bytes", default="1GiB", help="host memory of the connector (%(default)s)")
    add("--timeout", type=float, default=600.0, metavar="S", help="of one run (%(default)s)")
    add("--seed", type=int, default=0, help="of the prompts and the tiny models (%(default)s)")
    add_output_arguments(parser)


def run_command(arguments: argparse.Namespace) -> int:
    """Run `python -m tests.benchmarks preemption`; return 1 if the engines disagree on a token."""
    machine = describe_machine()
    options = read_options(arguments)
    cases = measure(options, print)
    publish(make_report(cases, asdict(options), machine), arguments)
    return 0 if num_different_answers(cases) == 0 else 1


def read_options(arguments: argparse.Namespace) -> PreemptionOptions:
    return PreemptionOptions(
        cases=tuple(arguments.cases),
        num_requests=arguments.requests,
        num_prompt_tokens=arguments.prompt_tokens,
        num_answer_tokens=arguments.answer_tokens,
        pool_ratio=arguments.pool_ratio,
        block_size=arguments.block_size,
        max_num_batched_tokens=arguments.max_num_batched_tokens,
        cpu_bytes=arguments.cpu_bytes,
        timeout_s=arguments.timeout,
        seed=arguments.seed,
    )


# ---- the engines -------------------------------------------------------------------------------


def measure(options: PreemptionOptions, say: Callable[[str], None]) -> list[CaseRuns]:
    workload = make_workload(options)
    cases = []
    with tempfile.TemporaryDirectory(prefix="safe-offload-bench-") as folder:
        for name in options.cases:
            case = CASES[name]
            model = write_tiny_model(
                case.model, Path(folder) / name, sliding_window=SLIDING_WINDOW, seed=options.seed
            )
            num_gpu_blocks = count_pool_blocks(options, case.model, workload)
            runs = {}
            for engine, settings in ENGINES.items():
                say(f"{name}, {engine} ...")
                engine_options = make_engine_options(options, model, num_gpu_blocks, settings)
                engine_options.arguments.update(case.arguments)
                with EngineProcess(engine, engine_options, Path(folder) / "log") as process:
                    process.wait_until_started(_START_TIMEOUT_S)
                    runs[engine] = process.call(run_watched, workload, options.timeout_s)
            cases.append(CaseRuns(name, num_gpu_blocks, runs))
    return cases


def make_workload(options: PreemptionOptions) -> Workload:
    """Return prompts with no prefix in common, and lengths from half of the longest on.

    All of it follows from the seed. Of equal length the requests would run out of blocks in the
    same step, and those preempted then would only run when all others have ended.
    """
    prompts, nums_answer_tokens = [], []
    for index in range(options.num_requests):
        generator = random.Random(f"{options.seed}/{index}")
        num_prompt_tokens = _draw_length(generator, options.num_prompt_tokens)
        prompts.append(tuple(generator.choices(PROMPT_TOKEN_IDS, k=num_prompt_tokens)))
        nums_answer_tokens.append(_draw_length(generator, options.num_answer_tokens))
    return Workload(tuple(prompts), tuple(nums_answer_tokens))


def _draw_length(generator: random.Random, longest: int) -> int:
    return generator.randint((longest + 1) // 2, longest)


def count_pool_blocks(options: PreemptionOptions, kind: ModelKind, workload: Workload) -> int:
    """Return the size of the KV pool, vLLM's null block included."""
    num_blocks = sum(
        count_prompt_blocks(
            kind,
            len(prompt) + num_answer_tokens,
            block_size=options.block_size,
            max_num_batched_tokens=1,  # what a request holds at its end, when it decodes
            sliding_window=SLIDING_WINDOW,
        )
        for prompt, num_answer_tokens in zip(
            workload.prompts, workload.nums_answer_tokens, strict=True
        )
    )
    return round(options.pool_ratio * num_blocks) + 1


def make_engine_options(
    options: PreemptionOptions, model: Path, num_gpu_blocks: int, settings: dict[str, Any] | None
) -> EngineOptions:
    """Return how to start an engine, which is the same for all but for the connector."""
    arguments: dict[str, Any] = {
        "model": str(model),
        "dtype": "float32",
        "enforce_eager": True,
        "max_model_len": options.num_prompt_tokens + options.num_answer_tokens,
        "max_num_seqs": options.num_requests,
        "block_size": options.block_size,
        "num_gpu_blocks_override": num_gpu_blocks,
        "max_num_batched_tokens": options.max_num_batched_tokens,
        "enable_prefix_caching": True,
        "enable_chunked_prefill": True,
        "disable_log_stats": False,  # the connector's counters are statistics
    }
    if settings is not None:
        arguments["kv_transfer_config"] = {
            "kv_connector": "SafeCPUOffloadConnector",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {
                "cpu_bytes_to_use": options.cpu_bytes,
                "min_load_tokens": 0,  # the tokens are counted, not the time
                **settings,
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
        self.num_steps = self.num_scheduled = self.num_prompt_hits = 0
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
        """Return the tokens that are needed once; raise if what was counted does not add up."""
        num_tokens = sum(map(len, workload.prompts)) + sum(workload.nums_answer_tokens)
        # The last token of an answer is sampled, and nothing is computed from it.
        num_once = num_tokens - len(workload.prompts) - self.num_prompt_hits
        num_again = sum(recovery.num_again for recovery in self.recoveries)
        if num_once + num_again != self.num_scheduled:
            raise SafeOffloadError(
                f"{self.num_scheduled} tokens were scheduled; expected {num_once} that are needed "
                f"once and {num_again} that were seen to be computed again"
            )
        return num_once


def run_watched(engine: Any, workload: Workload) -> EngineRun:
    """Run the workload in the engine's own process, its scheduler watched."""
    ledger = Ledger()
    watch(engine.llm_engine.engine_core.engine_core.scheduler, ledger)
    outputs = generate(engine, workload.prompts, workload.nums_answer_tokens)
    counters = {
        metric.name.removeprefix(_COUNTER_PREFIX): metric.value
        for metric in engine.get_metrics()
        if metric.name.startswith(_COUNTER_PREFIX) and hasattr(metric, "value")
    }
    return EngineRun(
        num_steps=ledger.num_steps,
        num_scheduled=ledger.num_scheduled,
        num_once=ledger.close(workload),
        recoveries=tuple(ledger.recoveries),
        token_ids=tuple(tuple(output.outputs[0].token_ids) for output in outputs),
        counters=counters,
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
        ledger.num_steps += bool(output.num_scheduled_tokens)
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
