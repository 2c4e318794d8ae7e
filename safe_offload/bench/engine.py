"""Time to first token when a prompt comes back, with the connector and without any.

Prompts A, B, C, A, B, C go one by one to an engine whose KV pool holds 1.6 of them. So on the
second pass the pool has lost most of each: the engine without a connector computes it again, the
other one loads it from host memory. The first pass shows what storing costs.
"""

import argparse
import json
import os
import random
import statistics
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, get_args

from safe_offload.bench.engine_breakdown import (
    FIRST,
    GPU_HIT,
    HOST_HIT,
    Breakdown,
    Observed,
    copies_of,
)
from safe_offload.bench.engine_process import (
    Answer,
    EngineOptions,
    EngineProcess,
    Question,
    Started,
)
from safe_offload.bench.engine_report import (
    NUM_PROMPTS,
    EngineReport,
    Sample,
    draw_plot,
    render_table,
)
from safe_offload.bench.engine_sizing import ask_for_sizes
from safe_offload.bench.engine_watch import (
    PROBE,
    Watched,
    answer_watched,
    start_watching,
    time_memcpy,
)
from safe_offload.bench.machine import describe_machine, require_matplotlib
from safe_offload.bench.output import write_report
from safe_offload.bench.tiny_models import ModelKind, count_prompt_blocks, write_tiny_model
from safe_offload.errors import ConfigError

BASELINE = "no connector"
CONNECTOR = "SafeCPUOffloadConnector"
# Token ids of the prompts: readable bytes of the tiny models, and ordinary tokens of any other.
PROMPT_TOKEN_IDS = range(32, 127)
_START_TIMEOUT_S = 900.0
_TINY_BLOCK_SIZE = 32
_DEFAULT_CPU_BYTES = "2GiB"
_GPU_SHARE = 0.45
"""Both engines live on one GPU. vLLM's `gpu_memory_utilization` of each, for a model not tiny."""
KINDS = (FIRST, HOST_HIT, GPU_HIT)
"""What the requests of a round are, with the connector: three, three and one."""


@dataclass(frozen=True, slots=True)
class BenchOptions:
    """What to measure; the defaults of the command line are in `add_arguments`."""

    model: str  # a kind of tiny model, or what vLLM takes as a model
    num_prompt_tokens: int
    num_answer_tokens: int
    rounds: int
    pool_ratio: float  # how many prompts the KV pool holds
    num_gpu_blocks: int | None  # overrides pool_ratio
    block_size: int | None  # None: vLLM's choice
    max_num_batched_tokens: int
    cpu_bytes: str | int | None
    kv_transfer_config: dict[str, Any] | None  # None: this connector with cpu_bytes
    engine_arguments: dict[str, Any]
    answer_timeout_s: float
    seed: int

    @property
    def is_tiny(self) -> bool:
        """Whether the model is made here, so that its sizes are known."""
        return self.model in get_args(ModelKind)

    @property
    def connector_config(self) -> dict[str, Any]:
        """vLLM's `kv_transfer_config`."""
        if self.kv_transfer_config is not None:
            return self.kv_transfer_config
        extra = {"cpu_bytes_to_use": self.cpu_bytes or _DEFAULT_CPU_BYTES}
        return {"kv_connector": CONNECTOR, "kv_connector_extra_config": extra}


def tiny_options(
    kv_transfer_config: dict[str, Any],
    *,
    num_prompt_tokens: int,
    num_answer_tokens: int,
    pool_ratio: float = 1.6,
    engine_arguments: dict[str, Any] | None = None,
) -> BenchOptions:
    """Return how other benchmarks start an engine of the tiny Llama; they run their own rounds."""
    return BenchOptions(
        model="llama",
        num_prompt_tokens=num_prompt_tokens,
        num_answer_tokens=num_answer_tokens,
        rounds=1,
        pool_ratio=pool_ratio,
        num_gpu_blocks=None,
        block_size=_TINY_BLOCK_SIZE,
        max_num_batched_tokens=2048,
        cpu_bytes=None,
        kv_transfer_config=kv_transfer_config,
        engine_arguments=engine_arguments or {},
        answer_timeout_s=_START_TIMEOUT_S,
        seed=0,
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `safe-offload bench engine`."""
    add = parser.add_argument
    add(
        "--model",
        default="llama",
        help=f"{', '.join(get_args(ModelKind))}: a tiny model made on the spot; "
        "anything else is given to vLLM, and has to fit on a GPU twice (default: %(default)s)",
    )
    add(
        "--prompt-tokens",
        type=int,
        default=16_000,
        help="length of a prompt (%(default)s, or what fits a model that is not tiny)",
    )
    add("--answer-tokens", type=int, default=16, help="tokens compared per answer (%(default)s)")
    add("--rounds", type=int, default=5, help="rounds per engine, after a warm-up (%(default)s)")
    add("--pool-ratio", type=float, default=1.6, help="prompts the KV pool holds (%(default)s)")
    add("--num-gpu-blocks", type=int, help="size of the KV pool, instead of --pool-ratio")
    add("--block-size", type=int, help="tokens in a KV block (32; vLLM's, if not a tiny model)")
    add("--max-num-batched-tokens", type=int, default=2048, help="prefill chunk (%(default)s)")
    add(
        "--cpu-bytes",
        help="host memory of the connector (2GiB, or what four prompts of a model that is not "
        "tiny take, if that is more)",
    )
    add(
        "--kv-transfer-config",
        type=json.loads,
        metavar="JSON",
        help="measure this connector instead; --cpu-bytes then has no effect",
    )
    add(
        "--engine-args",
        type=json.loads,
        default={},
        metavar="JSON",
        help="more keyword arguments of vllm.LLM, for both engines",
    )
    add("--answer-timeout", type=float, default=300.0, metavar="S", help="seconds (%(default)s)")
    add("--seed", type=int, default=0, help="of the prompts and the tiny model (%(default)s)")
    add("--json", type=Path, metavar="FILE", help="write samples, figures and method here")
    add("--plot", type=Path, metavar="FILE.png", help="draw the figures here")
    add("--logs", type=Path, metavar="FOLDER", help="keep the engines' logs here")


def run_command(arguments: argparse.Namespace) -> int:
    """Run `safe-offload bench engine`; return 1 if the two engines disagree on a token."""
    if arguments.plot:
        require_matplotlib()
    options = _read_options(arguments)
    if arguments.logs:
        arguments.logs.mkdir(parents=True, exist_ok=True)
    report = measure(options, print, arguments.logs)
    write_report(report, render_table(report), arguments, draw_plot)
    return 0 if report.num_different_answers == 0 else 1


def measure(
    options: BenchOptions, say: Callable[[str], None], log_folder: Path | None = None
) -> EngineReport:
    """Start both engines, run the rounds, stop the engines.

    Each round is A, B, C, A, B, C on one engine and then on the other, back to back and with
    prompts that no engine has seen; the engine that goes first changes from round to round, so
    that a slow drift of the machine's speed hits both alike. C is asked once more behind it, for
    what a hit in the GPU's own prefix cache takes.

    Args:
        options: what to measure.
        say: takes one line of progress.
        log_folder: keeps the engines' logs.

    Raises:
        SafeOffloadError: an engine did not start, died, or did not answer in time.
    """
    with tempfile.TemporaryDirectory(prefix="safe-offload-bench-") as folder:
        log_folder = log_folder or Path(folder)
        options = _fit_to_model(options, log_folder, say)
        engines = engine_options(options, Path(folder))
        load_before = os.getloadavg()
        processes: dict[str, EngineProcess] = {}
        try:
            starts: dict[str, Started] = {}
            for name, engine in engines.items():
                say(f"starting the engine with {name} ...")
                log_path = log_folder / f"{name.replace(' ', '-')}.log"
                processes[name] = EngineProcess(name, engine, log_path)
                starts[name] = processes[name].wait_until_started(_START_TIMEOUT_S)
                say(f"  ready after {starts[name].start_s:.0f} s")
            samples, breakdown = _run_rounds(options, processes, say)
        finally:
            for process in processes.values():
                process.stop()
        started = starts[BASELINE]
    return EngineReport(
        connector=options.connector_config["kv_connector"],
        baseline=BASELINE,
        samples=samples,
        breakdown=breakdown,
        pool_prompts=started.max_concurrency,
        num_gpu_blocks=started.num_gpu_blocks,
        options=asdict(options),
        machine=describe_machine() | {"load_average_before": list(load_before)},
    )


def _run_rounds(
    options: BenchOptions, processes: dict[str, EngineProcess], say: Callable[[str], None]
) -> tuple[list[Sample], Breakdown]:
    """Run the warm-up, which is round 0 and not kept, and the rounds."""
    samples: list[Sample] = []
    breakdown = Breakdown(BASELINE, [], {"load": [], "store": []})
    for process in processes.values():
        process.call(start_watching, None, options.answer_timeout_s)
    for round_index in range(options.rounds + 1):
        names = list(processes)
        if round_index % 2 == 0:
            names.reverse()
        prompts = [_make_prompt(options, round_index, which) for which in range(NUM_PROMPTS)]
        questions = [Question(prompt, options.num_answer_tokens) for prompt in prompts]
        for name in names:
            passes = [*questions, *questions, questions[-1]]
            timeout_s = options.answer_timeout_s
            watched = [processes[name].call(answer_watched, q, timeout_s) for q in passes]
            first_s, second_s = (
                statistics.fmean(w.answer.ttft_s for w in watched[start : start + NUM_PROMPTS])
                for start in (0, NUM_PROMPTS)
            )
            label = f"round {round_index}" if round_index else "warm-up"
            say(f"{label}, {name}: first pass {first_s:.3f} s a prompt, second {second_s:.3f} s")
            if round_index == 0:
                continue
            engine = name if name == BASELINE else "connector"
            for place, one in enumerate(watched):
                if place < 2 * NUM_PROMPTS:
                    samples.append(_make_sample(engine, round_index, place, one.answer))
                kind = KINDS[place // NUM_PROMPTS]
                breakdown.observed.append(Observed(engine, kind, round_index, one))
            _time_memcpy(processes[name], watched, timeout_s, breakdown)
    return samples, breakdown


def _time_memcpy(
    process: EngineProcess, watched: list[Watched], timeout_s: float, breakdown: Breakdown
) -> None:
    """Time a memcpy as large as the round's last stores and as its last load."""
    for direction, place in (("store", NUM_PROMPTS - 1), ("load", 2 * NUM_PROMPTS - 1)):
        copies = copies_of(watched[place], direction)
        if copies.size_bytes:
            size = (copies.size_bytes, copies.num_pieces)
            breakdown.memcpy_s[direction].append(process.call(time_memcpy, size, timeout_s))


def _make_sample(engine: str, round_index: int, place: int, answer: Answer) -> Sample:
    return Sample(
        engine=engine,
        round_index=round_index,
        place=place,
        ttft_s=answer.ttft_s,
        total_s=answer.total_s,
        num_gpu_tokens=answer.num_gpu_tokens,
        num_host_tokens=answer.num_host_tokens,
        num_computed_tokens=answer.num_computed_tokens,
        token_ids=answer.token_ids,
    )


def _make_prompt(options: BenchOptions, round_index: int, which: int) -> tuple[int, ...]:
    generator = random.Random(f"{options.seed}/{round_index}/{which}")
    return tuple(generator.choices(PROMPT_TOKEN_IDS, k=options.num_prompt_tokens))


def _read_options(arguments: argparse.Namespace) -> BenchOptions:
    is_tiny = arguments.model in get_args(ModelKind)
    if arguments.block_size is None and is_tiny:
        arguments.block_size = _TINY_BLOCK_SIZE
    for name in ("prompt_tokens", "answer_tokens", "rounds", "block_size"):
        value = getattr(arguments, name)
        if value is not None and value < 1:
            raise ConfigError(f"--{name.replace('_', '-')}: expected at least 1")
    kv_transfer_config = arguments.kv_transfer_config
    if kv_transfer_config is not None and "kv_connector" not in kv_transfer_config:
        raise ConfigError("--kv-transfer-config: expected an object with the key kv_connector")
    return BenchOptions(
        model=arguments.model,
        num_prompt_tokens=arguments.prompt_tokens,
        num_answer_tokens=arguments.answer_tokens,
        rounds=arguments.rounds,
        pool_ratio=arguments.pool_ratio,
        num_gpu_blocks=arguments.num_gpu_blocks,
        block_size=arguments.block_size,
        max_num_batched_tokens=arguments.max_num_batched_tokens,
        cpu_bytes=arguments.cpu_bytes,
        kv_transfer_config=kv_transfer_config,
        engine_arguments=arguments.engine_args,
        answer_timeout_s=arguments.answer_timeout,
        seed=arguments.seed,
    )


def _fit_to_model(
    options: BenchOptions, log_folder: Path, say: Callable[[str], None]
) -> BenchOptions:
    """Return the options with the sizes that a model asks for; a tiny one's are known."""
    if options.is_tiny or options.num_gpu_blocks is not None:
        return options
    say("starting an engine to see what fits the model ...")
    sizes = ask_for_sizes(
        engine_options(options, log_folder)[BASELINE],
        log_folder / "sizing.log",
        pool_ratio=options.pool_ratio,
        num_answer_tokens=options.num_answer_tokens,
        timeout_s=_START_TIMEOUT_S,
    )
    say(f"  prompts of {sizes.num_prompt_tokens:,} tokens, {sizes.num_gpu_blocks:,} blocks")
    return replace(
        options,
        num_prompt_tokens=sizes.num_prompt_tokens,
        num_gpu_blocks=sizes.num_gpu_blocks,
        block_size=sizes.block_size,
        cpu_bytes=options.cpu_bytes or sizes.cpu_bytes,
    )


def engine_options(options: BenchOptions, folder: Path) -> dict[str, EngineOptions]:
    """Return how to start each engine: the same but for the connector."""
    max_model_len = options.num_prompt_tokens + options.num_answer_tokens
    arguments: dict[str, Any] = {
        "model": options.model,
        "max_model_len": max_model_len,
        "block_size": options.block_size,
        "max_num_batched_tokens": options.max_num_batched_tokens,
        "num_gpu_blocks_override": options.num_gpu_blocks,
        "enable_prefix_caching": True,
        "enable_chunked_prefill": True,
        "worker_extension_cls": PROBE,
        "disable_log_stats": False,  # where a prompt's tokens came from is a statistic
    }
    environment = {"VLLM_NO_USAGE_STATS": "1"}
    # vLLM's CPU engine keeps one core more to itself where a connector is configured (0.32.0,
    # utils/ompmultiprocessing.py), and none at all where that would be every core. Without one
    # binding for both engines the comparison is one of core counts.
    num_cores = max((os.cpu_count() or 2) - 1, 1)
    binding = os.environ.get("VLLM_CPU_OMP_THREADS_BIND", f"0-{num_cores - 1}")
    environment |= {"VLLM_CPU_OMP_THREADS_BIND": binding}
    if not options.is_tiny:
        arguments |= {"gpu_memory_utilization": _GPU_SHARE}
    else:
        assert options.block_size is not None
        kind: ModelKind = options.model  # type: ignore[assignment]
        blocks = count_prompt_blocks(
            kind,
            max_model_len,
            block_size=options.block_size,
            max_num_batched_tokens=options.max_num_batched_tokens,
        )
        arguments |= {
            "model": str(write_tiny_model(kind, folder / kind, seed=options.seed)),
            "dtype": "float32",
            "enforce_eager": True,
            "num_gpu_blocks_override": options.num_gpu_blocks or round(options.pool_ratio * blocks),
        }
        environment |= {"HF_HUB_OFFLINE": "1"}
        environment |= {"VLLM_CPU_KVCACHE_SPACE": os.environ.get("VLLM_CPU_KVCACHE_SPACE", "1")}
    arguments |= options.engine_arguments
    config = options.connector_config
    with_connector = arguments | {"kv_transfer_config": config}
    return {
        BASELINE: EngineOptions(arguments, environment),
        config["kv_connector"]: EngineOptions(with_connector, environment),
    }
