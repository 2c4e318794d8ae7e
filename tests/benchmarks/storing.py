"""What storing costs requests that never come back.

Eight users send new prompts of 3,000 tokens to vLLM's real CPU engine:
without a connector, with one that does nothing, and with ours, whose host memory is one block, is
used for the first time, or has been used before (a small pool, filled by the warm-up). All engines
live at the same time and take turns in an order that changes; each waits until the one before has
stopped spinning. What is printed for each is the median over the rounds of its time as a
multiple of the time without a connector in the same round, with the lowest and the highest.

A second table has what other work on the machine changes least: steps of the worker, transfers,
and the CPU time that each process and each kind of thread uses for a request, with its page faults.
The floor is what one thread takes to copy as many bytes as are stored, in as many pieces.
"""

import argparse
import ctypes
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from safe_offload.commands.bench.engine_process import generate
from safe_offload.commands.bench.report import (
    Report,
    add_output_arguments,
    describe_machine,
    median_and_spread,
    publish,
    table,
)
from tests.benchmarks.engine_watch import start_watching
from tests.benchmarks.engines import TIMEOUT_S, make_tiny_engine, ours, random_prompt
from tests.benchmarks.thread_uses import PROBE, ROLES, ThreadUse, read_uses

NUM_USERS = 8
PROMPT_TOKENS = 3000
NUM_PROMPTS = 24
"""Of a round."""
TOKEN_BYTES = 1024
BLOCK_SIZE = 32
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


@dataclass(frozen=True)
class Round:
    """What an engine has used for the prompts of a round."""

    seconds: float
    num_steps: int
    num_transfers: int
    uses: dict[str, ThreadUse]


def measure(names: Sequence[str], rounds: int) -> dict[str, list[Round]]:
    found: dict[str, list[Round]] = {name: [] for name in names}
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
                    block_size=BLOCK_SIZE,
                    engine_args={"max_num_seqs": NUM_USERS, "worker_extension_cls": PROBE},
                )
            )
            for name in names
        }
        for engine in engines.values():
            engine.wait_until_started(TIMEOUT_S)
            engine.call(start_watching, None, TIMEOUT_S)
        for index in range(rounds + 1):
            generator = random.Random(f"storing/{index}")
            prompts = [random_prompt(generator, PROMPT_TOKENS) for _ in range(NUM_PROMPTS)]
            for name in generator.sample(names, len(names)):
                one = engines[name].call(serve, prompts, TIMEOUT_S)
                if index:
                    found[name].append(one)
    return found


def serve(engine: Any, prompts: list[tuple[int, ...]]) -> Round:
    (names,) = engine.collective_rpc("thread_names")
    engine.collective_rpc("take_probe")
    uses = read_uses(names)
    start_s = time.perf_counter()
    generate(engine, prompts, [1] * len(prompts))
    seconds = time.perf_counter() - start_s
    nothing = ThreadUse()
    after = read_uses(names)
    used = {role: use.plus(uses.get(role, nothing), -1) for role, use in after.items()}
    (probe,) = engine.collective_rpc("take_probe")
    return Round(seconds, len(probe["steps"]), len(probe["submits"]), used)


def copy_floor_s() -> float:
    """Return the CPU time of copying what a prompt stores, in pieces of a block.

    Neither source nor target is in the caches: as much again is written in between.
    """
    size_bytes = PROMPT_TOKENS // BLOCK_SIZE * BLOCK_SIZE * TOKEN_BYTES
    piece_bytes = BLOCK_SIZE * TOKEN_BYTES
    areas = [bytearray(b"1" * (NUM_PROMPTS * size_bytes)) for _ in range(2)]
    target, source = (ctypes.addressof(ctypes.c_char.from_buffer(area)) for area in areas)
    start_s = time.thread_time()
    for offset in range(0, NUM_PROMPTS * size_bytes, piece_bytes):
        ctypes.memmove(target + offset, source + offset, piece_bytes)
    return (time.thread_time() - start_s) / NUM_PROMPTS


def make_report(found: dict[str, list[Round]], machine: dict[str, Any]) -> Report:
    took_s = {name: [one.seconds for one in rounds] for name, rounds in found.items()}
    rows = [["", "median", "of the time without a connector"]]
    for name, seconds in took_s.items():
        ratios = [a / b for a, b in zip(seconds, took_s[NOTHING], strict=True)]
        median_s = statistics.median(seconds)
        rows.append([name, f"{median_s:.3f} s", median_and_spread(ratios, ".3f")])
    floor_s = copy_floor_s()
    sections = [table(rows), table(use_rows(found)), f"floor: {1e3 * floor_s:.2f} ms a request"]
    rounds = {name: [asdict(one) for one in several] for name, several in found.items()}
    figures = {"rounds": rounds, "copy_floor_s": floor_s}
    return Report(__doc__.strip(), sections, figures, {}, machine)


def use_rows(found: dict[str, list[Round]]) -> list[list[str]]:
    """Return medians over the rounds, a column for each engine."""

    def row(title: str, value: Callable[[Round], float], form: str) -> list[str]:
        medians = (statistics.median(map(value, rounds)) for rounds in found.values())
        return [title, *(f"{median:{form}}" for median in medians)]

    def cpu_ms(role: str) -> Callable[[Round], float]:
        return lambda one: 1e3 * one.uses.get(role, ThreadUse()).cpu_s / NUM_PROMPTS

    def page_faults(role: str) -> Callable[[Round], float]:
        return lambda one: one.uses.get(role, ThreadUse()).num_page_faults / NUM_PROMPTS

    return [
        ["of a request", *found],
        row("steps of the worker", lambda one: one.num_steps / NUM_PROMPTS, ".2f"),
        row("transfers", lambda one: one.num_transfers / NUM_PROMPTS, ".2f"),
        *(row(f"CPU ms: {role}", cpu_ms(role), ".2f") for role in ROLES),
        *(row(f"page faults: {role}", page_faults(role), ".1f") for role in ROLES),
    ]
