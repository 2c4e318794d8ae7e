"""What storing costs requests that never come back: `python -m tests.benchmarks storing`.

Eight users send prompts of 3,000 tokens that nobody has sent before, to vLLM's real CPU engine:
without a connector, with one that does nothing, and with ours, whose host memory is one block, is
used for the first time, or has been used before (a small pool, filled by the warm-up). All engines
live at the same time and take turns in an order that changes; each waits until the one before has
stopped spinning. What is printed for each is the median over the rounds of its time as a
multiple of the time without a connector in the same round, with the lowest and the highest.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from safe_offload.bench.engine import (
    BASELINE,
    CONNECTOR,
    PROMPT_TOKEN_IDS,
    engine_options,
    tiny_options,
)
from safe_offload.bench.engine_process import EngineOptions, EngineProcess, generate

NUM_USERS = 8
PROMPT_TOKENS = 3000
NUM_PROMPTS = 24
"""Of a round; a token takes 1 KiB."""
POOL_RATIO = NUM_USERS + 1
USED_BYTES = "48MiB"
"""Less than a round stores, so that it is full after the warm-up."""
TIMEOUT_S = 600.0


def _ours(**extra: Any) -> dict[str, Any]:
    return {"kv_connector": CONNECTOR, "kv_connector_extra_config": extra}


CONFIGS: dict[str, dict[str, Any] | None] = {
    BASELINE: None,
    "a connector that does nothing": {
        "kv_connector": "NothingConnector",
        "kv_connector_module_path": "tests.benchmarks.nothing",
        "kv_role": "kv_both",
    },
    "ours, one block": _ours(num_cpu_blocks=1),
    "ours, first use": _ours(cpu_bytes_to_use="3GiB"),
    "ours, used before": _ours(cpu_bytes_to_use=USED_BYTES),
}


def serve(engine: Any, prompts: list[list[int]]) -> float:
    """Run in the engine's process: answer all prompts; return the seconds that it took."""
    start_s = time.perf_counter()
    generate(engine, prompts, [1] * len(prompts))
    return time.perf_counter() - start_s


def random_prompt(generator: random.Random) -> list[int]:
    """Return a prompt that no other begins like."""
    return generator.choices(PROMPT_TOKEN_IDS, k=PROMPT_TOKENS)


def start(name: str, folder: Path) -> EngineProcess:
    """Start one engine."""
    config = CONFIGS[name]
    options = tiny_options(
        config or _ours(),
        num_prompt_tokens=PROMPT_TOKENS,
        num_answer_tokens=1,
        pool_ratio=POOL_RATIO,
        engine_arguments={"max_num_seqs": NUM_USERS},
    )
    engines: dict[str, EngineOptions] = engine_options(options, folder)
    engine = engines[BASELINE if config is None else config["kv_connector"]]
    return EngineProcess(name, engine, folder / f"{name}.log")


def measure(names: list[str], rounds: int) -> dict[str, list[float]]:
    """Return the seconds of each round by engine, after one round that warms up."""
    took_s: dict[str, list[float]] = {name: [] for name in names}
    engines: dict[str, EngineProcess] = {}
    with tempfile.TemporaryDirectory(prefix="safe-offload-storing-") as folder:
        try:
            for name in names:
                engines[name] = start(name, Path(folder))
            for engine in engines.values():
                engine.wait_until_started(TIMEOUT_S)
            for index in range(rounds + 1):
                generator = random.Random(f"storing/{index}")
                prompts = [random_prompt(generator) for _ in range(NUM_PROMPTS)]
                for name in generator.sample(names, len(names)):
                    seconds = engines[name].call(serve, prompts, TIMEOUT_S)
                    if index:
                        took_s[name].append(seconds)
        finally:
            for engine in engines.values():
                engine.stop()
    return took_s


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `python -m tests.benchmarks storing`."""
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--engines", type=int, nargs="*", help="indices; the first is always in")


def run_command(arguments: argparse.Namespace) -> int:
    """Run `python -m tests.benchmarks storing`."""
    names = list(CONFIGS)
    if arguments.engines is not None:
        names = [names[index] for index in sorted({0, *arguments.engines})]
    took_s = measure(names, arguments.rounds)
    for name in names:
        ratios = [a / b for a, b in zip(took_s[name], took_s[BASELINE], strict=True)]
        print(
            f"{name:30} {statistics.median(took_s[name]):.3f} s, "
            f"{statistics.median(ratios):.3f} times no connector "
            f"({min(ratios):.3f} to {max(ratios):.3f})"
        )
    return 0
