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
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field, fields, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from safe_offload.commands.bench.engine_process import (
    EngineOptions,
    EngineProcess,
    Question,
    Started,
    answer,
)
from safe_offload.commands.bench.engine_report import (
    BASELINE,
    CONNECTOR,
    NUM_PROMPTS,
    EngineFound,
    Observed,
    make_report,
)
from safe_offload.commands.bench.report import add_output_arguments, describe_machine, publish
from safe_offload.config.options import MAX_BYTES_PER_SERVER
from safe_offload.config.settings import size
from safe_offload.errors import ConfigError

OURS = "SafeCPUOffloadConnector"
PROMPT_TOKEN_IDS = range(32, 127)  # in every vocabulary
START_TIMEOUT_S = 900.0
ANSWER_TIMEOUT_S = 300.0
_GPU_SHARE = 0.45  # of each engine: both live on one GPU
DEFAULT_CPU_BYTES = 2 << 30
PROMPTS_ON_HOST = 4  # A, B, C and the rest of the round before

Say = Callable[[str], None]


@dataclass(frozen=True)
class BenchOptions:
    """What to measure; see `add_arguments`."""

    model: str = ""  # vLLM's MODEL
    prompt_tokens: int = 16_000
    answer_tokens: int = 16
    rounds: int = 5
    pool_ratio: float = 1.6
    num_gpu_blocks: int | None = None  # overrides pool_ratio
    block_size: int | None = None  # None: vLLM's choice
    max_num_batched_tokens: int = 2048
    cpu_bytes: str | None = None
    num_cpu_blocks: int | None = None  # those of four prompts; cpu_bytes overrides it
    kv_transfer_config: dict[str, Any] | None = None  # None: this connector with cpu_bytes
    engine_args: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)  # of the engines
    seed: int = 0

    @property
    def connector_config(self) -> dict[str, Any]:
        """vLLM's `kv_transfer_config`."""
        if self.kv_transfer_config is not None:
            return self.kv_transfer_config
        return {"kv_connector": OURS, "kv_connector_extra_config": self.host_size}

    @property
    def host_size(self) -> dict[str, Any]:
        """Our setting for the size of the host pool."""
        if self.num_cpu_blocks is not None and self.cpu_bytes is None:
            return {"num_cpu_blocks": self.num_cpu_blocks}
        return {"cpu_bytes_to_use": self.cpu_bytes or DEFAULT_CPU_BYTES}


def add_arguments(parser: argparse.ArgumentParser) -> None:

    def add(name: str, what: str, **how: Any) -> None:
        default = getattr(BenchOptions, name[2:].replace("-", "_"), None)
        parser.add_argument(name, help=what, **{"default": default, **how})

    add("--model", "vLLM's MODEL; it must fit on the GPU twice")
    add("--prompt-tokens", "tokens per prompt (%(default)s, or the model's maximum)", type=int)
    add("--rounds", "rounds per engine, after a warm-up (%(default)s)", type=int)
    add("--cpu-bytes", "host memory of the connector (enough for four prompts)")
    how = {"type": _read_object, "metavar": "JSON"}
    add("--kv-transfer-config", "measure this connector instead, --cpu-bytes ignored", **how)
    add("--engine-args", "more arguments of vllm.LLM, for both engines", default={}, **how)
    add("--logs", "keep the engines' logs here", type=Path, metavar="FOLDER")
    add_output_arguments(parser)


def _read_object(text: str) -> dict[str, Any]:
    """Return an object of JSON; raise ValueError as argparse expects it."""
    try:
        found = json.loads(text)
    except RecursionError as error:
        raise ValueError(text) from error
    if not isinstance(found, dict):
        raise argparse.ArgumentTypeError("expected an object")
    return found


def run_command(arguments: argparse.Namespace) -> int:
    """Run `safe-offload bench engine`; return 1 if the two engines disagree on a token."""
    options = read_options(arguments)
    _require_vllm()
    found = measure(options, print, arguments.logs)
    publish(make_report(found), arguments)
    return 0 if found.num_different_answers == 0 else 1


def _require_vllm() -> None:
    with suppress(ImportError):
        if find_spec("vllm") is not None:
            return
    raise ConfigError(
        f"`bench engine` needs vLLM, which {sys.executable} does not have. Fix: pip install vllm "
        "there, or run `python -m safe_offload bench engine` with the Python that has it."
    )


def read_options(arguments: argparse.Namespace) -> BenchOptions:
    if not arguments.model:
        raise ConfigError("--model: expected a folder or a model name")
    for name in ("prompt_tokens", "rounds"):
        if getattr(arguments, name) < 1:
            raise ConfigError(f"--{name.replace('_', '-')}: expected at least 1")
    if arguments.cpu_bytes is not None:
        size(MAX_BYTES_PER_SERVER).read("--cpu-bytes", arguments.cpu_bytes)
    config = arguments.kv_transfer_config
    if config is not None and "kv_connector" not in config:
        raise ConfigError("--kv-transfer-config: expected an object with the key kv_connector")
    names = [one.name for one in fields(BenchOptions) if hasattr(arguments, one.name)]
    return BenchOptions(**{name: getattr(arguments, name) for name in names})


def measure(options: BenchOptions, say: Say, log_folder: Path | None = None) -> EngineFound:
    """Start both engines, run the rounds, stop the engines; `say` receives progress."""
    machine = describe_machine()
    with tempfile.TemporaryDirectory(prefix="safe-offload-bench-") as name, ExitStack() as running:
        folder = Path(name)
        log_folder = log_folder or folder
        log_folder.mkdir(parents=True, exist_ok=True)
        options = fit_to_model(options, log_folder, say)
        engines: dict[str, EngineProcess] = {}
        started: list[Started] = []
        for engine, how in engine_options(options).items():
            say(f"starting the engine with {engine} ...")
            log_path = log_folder / f"{engine.replace(' ', '-')}.log"
            engines[engine] = running.enter_context(EngineProcess(engine, how, log_path))
            started.append(engines[engine].wait_until_started(START_TIMEOUT_S))
            say(f"  ready after {started[-1].start_s:.0f} s")
        observed = _run_rounds(options, engines, say)
    connector = options.connector_config["kv_connector"]
    return EngineFound(connector, observed, started[0], asdict(options), machine)


def _run_rounds(
    options: BenchOptions, engines: dict[str, EngineProcess], say: Say
) -> list[Observed]:
    """Run the warm-up, which is round 0 and not kept, and the rounds.

    Each round is A, B, C, A, B, C on one engine and then on the other, with prompts that no engine
    has seen; the engine that goes first changes from round to round, so that a drift of the
    machine's speed hits both alike.
    """
    observed: list[Observed] = []
    names = list(engines)
    for round_index in range(options.rounds + 1):
        names.reverse()
        questions = [make_question(options, round_index, which) for which in range(NUM_PROMPTS)]
        for name in names:
            passes = [*questions, *questions]
            answers = [engines[name].call(answer, one, ANSWER_TIMEOUT_S) for one in passes]
            first_s, second_s = (
                statistics.fmean(one.ttft_s for one in answers[start : start + NUM_PROMPTS])
                for start in (0, NUM_PROMPTS)
            )
            label = f"round {round_index}" if round_index else "warm-up"
            say(f"{label}, {name}: first pass {first_s:.3f} s a prompt, second {second_s:.3f} s")
            engine_name = name if name == BASELINE else CONNECTOR
            for place, one in enumerate(answers if round_index else ()):
                observed.append(Observed(engine_name, round_index, place, one))
    return observed


def make_question(options: BenchOptions, round_index: int, which: int) -> Question:
    generator = random.Random(f"{options.seed}/{round_index}/{which}")
    prompt = generator.choices(PROMPT_TOKEN_IDS, k=options.prompt_tokens)
    return Question(tuple(prompt), options.answer_tokens)


def engine_options(options: BenchOptions) -> dict[str, EngineOptions]:
    """Return how to start each engine: the same but for the connector."""
    arguments: dict[str, Any] = {
        "model": options.model,
        "max_model_len": options.prompt_tokens + options.answer_tokens,
        "block_size": options.block_size,
        "max_num_batched_tokens": options.max_num_batched_tokens,
        "num_gpu_blocks_override": options.num_gpu_blocks,
        "enable_prefix_caching": True,
        "enable_chunked_prefill": True,
        "disable_log_stats": False,  # where a prompt's tokens came from is a statistic
        "gpu_memory_utilization": _GPU_SHARE,
    } | options.engine_args
    # vLLM's CPU engine reserves one more core if a connector is configured (0.32.0,
    # utils/ompmultiprocessing.py), unless that were every core. One binding for both engines
    # keeps the comparison from being one of core counts.
    num_cores = max((os.cpu_count() or 2) - 1, 1)
    binding = os.environ.get("VLLM_CPU_OMP_THREADS_BIND", f"0-{num_cores - 1}")
    environment = {"VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_OMP_THREADS_BIND": binding}
    environment |= options.environment
    config = options.connector_config
    with_connector = arguments | {"kv_transfer_config": config}
    return {
        BASELINE: EngineOptions(arguments, environment),
        config["kv_connector"]: EngineOptions(with_connector, environment),
    }


# ---- the sizes of a model ----------------------------------------------------------------------


def fit_to_model(options: BenchOptions, log_folder: Path, say: Say) -> BenchOptions:
    """Return the options with the sizes that a model needs, if they are not given."""
    if options.num_gpu_blocks is not None:
        return options
    say("starting an engine to see what fits the model ...")
    baseline = engine_options(options)[BASELINE]
    options = scale(options, ask_for_sizes(baseline, log_folder / "sizing.log", START_TIMEOUT_S))
    say(f"  prompts of {options.prompt_tokens:,} tokens, {options.num_gpu_blocks:,} blocks")
    return options


def ask_for_sizes(engine: EngineOptions, log_path: Path, timeout_s: float) -> Started:
    """Start an engine without loading weights, and return its figures.

    The blocks of a prompt depend on the model's attention, which vLLM knows.
    """
    quick = {"load_format": "dummy", "enforce_eager": True, "num_gpu_blocks_override": None}
    asked = EngineOptions(engine.arguments | quick, engine.environment, fits_model_len=True)
    with EngineProcess("sizing", asked, log_path) as process:
        return process.wait_until_started(timeout_s)


def scale(options: BenchOptions, started: Started) -> BenchOptions:
    """Return the sizes of an engine whose pool holds `pool_ratio` of the longest requests."""
    request_blocks = started.num_gpu_blocks / started.max_concurrency
    return replace(
        options,
        prompt_tokens=started.max_model_len - options.answer_tokens,
        num_gpu_blocks=round(options.pool_ratio * request_blocks),
        block_size=started.block_size,
        num_cpu_blocks=round(PROMPTS_ON_HOST * request_blocks),
    )
