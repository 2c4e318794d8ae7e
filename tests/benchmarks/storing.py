"""What storing costs requests that never come back.

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
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from safe_offload.bench.engine_process import generate
from safe_offload.bench.report import (
    Report,
    add_output_arguments,
    describe_machine,
    median_and_spread,
    publish,
    table,
)
from tests.benchmarks.engines import TIMEOUT_S, make_tiny_engine, ours, random_prompt

NUM_USERS = 8
PROMPT_TOKENS = 3000
NUM_PROMPTS = 24
"""Of a round; a token takes 1 KiB."""
USED_BYTES = "48MiB"
"""Less than a round stores, so that it is full after the warm-up."""

NOTHING = "no connector"
CONFIGS: dict[str, dict[str, Any] | None] = {
    NOTHING: None,
    "a connector that does nothing": {
        "kv_connector": "NothingConnector",
        "kv_connector_module_path": "tests.benchmarks.nothing",
        "kv_role": "kv_both",
    },
    "ours, one block": ours(num_cpu_blocks=1),
    "ours, first use": ours(cpu_bytes_to_use="3GiB"),
    "ours, used before": ours(cpu_bytes_to_use=USED_BYTES),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `python -m tests.benchmarks storing`."""
    parser.add_argument("--rounds", type=int, default=15, help="(%(default)s)")
    parser.add_argument("--engines", type=int, nargs="*", help="indices; the first is always in")
    add_output_arguments(parser)


def run_command(arguments: argparse.Namespace) -> int:
    """Run `python -m tests.benchmarks storing`."""
    machine = describe_machine()
    names = list(CONFIGS)
    if arguments.engines is not None:
        names = [names[index] for index in sorted({0, *arguments.engines})]
    publish(make_report(measure(names, arguments.rounds), machine), arguments)
    return 0


def measure(names: Sequence[str], rounds: int) -> dict[str, list[float]]:
    """Return the seconds of each round by engine, after one round that warms up."""
    took_s: dict[str, list[float]] = {name: [] for name in names}
    with tempfile.TemporaryDirectory(prefix="safe-offload-storing-") as folder, ExitStack() as on:
        engines = {
            name: on.enter_context(
                make_tiny_engine(
                    name,
                    CONFIGS[name],
                    Path(folder),
                    prompt_tokens=PROMPT_TOKENS,
                    answer_tokens=1,
                    pool_ratio=NUM_USERS + 1,
                    engine_args={"max_num_seqs": NUM_USERS},
                )
            )
            for name in names
        }
        for engine in engines.values():
            engine.wait_until_started(TIMEOUT_S)
        for index in range(rounds + 1):
            generator = random.Random(f"storing/{index}")
            prompts = [random_prompt(generator, PROMPT_TOKENS) for _ in range(NUM_PROMPTS)]
            for name in generator.sample(names, len(names)):
                seconds = engines[name].call(serve, prompts, TIMEOUT_S)
                if index:
                    took_s[name].append(seconds)
    return took_s


def serve(engine: Any, prompts: list[tuple[int, ...]]) -> float:
    """Run in the engine's process: answer all prompts; return the seconds that it took."""
    start_s = time.perf_counter()
    generate(engine, prompts, [1] * len(prompts))
    return time.perf_counter() - start_s


def make_report(took_s: dict[str, list[float]], machine: dict[str, Any]) -> Report:
    """Return each engine's time, and as a multiple of the time without a connector."""
    rows = [["", "median", "of the time without a connector"]]
    for name, seconds in took_s.items():
        ratios = [a / b for a, b in zip(seconds, took_s[NOTHING], strict=True)]
        median_s = statistics.median(seconds)
        rows.append([name, f"{median_s:.3f} s", median_and_spread(ratios, ".3f")])
    return Report(__doc__.strip(), [table(rows)], {"seconds": took_s}, {}, machine)
