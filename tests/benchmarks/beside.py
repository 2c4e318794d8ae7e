"""What copies cost the forward: a step of prefill, and one of decode, beside loads and stores.

One engine without a connector. In its worker our own copies run without end meanwhile, by kernel
or by copy engines, between memory of their own: scattered blocks of 32 layers. Each way is run once
in each round, in an order that changes. A step lasts until the next one begins. Of each round the
median step counts, as a multiple of the one beside nothing; what is printed is the mean over the
rounds, with its standard error. "nothing" is there twice: the second says what a figure is worth.
Without a GPU the copies are those of a device of threads: to try the command.
"""

import argparse
import random
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import pairwise
from typing import Any

from safe_offload.commands.bench import engine as bench_engine
from safe_offload.commands.bench.engine import BenchOptions, engine_options
from safe_offload.commands.bench.engine_process import EngineProcess, generate
from safe_offload.commands.bench.engine_report import BASELINE
from safe_offload.commands.bench.report import Report, describe_machine, publish, table
from safe_offload.errors import SafeOffloadError
from tests.benchmarks.engines import TIMEOUT_S, random_prompt, with_model
from tests.benchmarks.transfer_cases import KIB
from tests.gpu import shapes

PROBE = "tests.benchmarks.beside_worker.BesideProbe"
NOTHING, CONTROL = "nothing", "nothing again"
PHASES = ("prefill", "decode")
NUM_LAYERS, RANGE_BYTES = 32, 64 * KIB
USERS, ANSWER_TOKENS = 16, 96

Prompts = list[tuple[int, ...]]
Asked = tuple[str, Prompts, int]  # path and traffic, prompts, tokens of each answer
Samples = dict[str, dict[str, list[float]]]
"""By way: in each round the seconds of a step by phase, and the bytes copied a second."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    bench_engine.add_arguments(parser)
    shapes.add_arguments(parser)
    parser.set_defaults(model="llama", rounds=20)
    parser.add_argument("--blocks", type=int, default=128, help="of a copy (%(default)s)")


def run_command(arguments: argparse.Namespace) -> int:
    """Run `python -m tests.benchmarks beside`."""
    machine = describe_machine()
    options = bench_engine.read_options(arguments)
    args = {"worker_extension_cls": PROBE, "enable_prefix_caching": False, "max_num_seqs": USERS}
    with with_model(options, arguments, **args) as (options, folder):
        chosen = engine_options(options)[BASELINE]
        with EngineProcess("beside", chosen, folder / "beside.log") as engine:
            engine.wait_until_started(TIMEOUT_S)
            samples = measure(engine, options, arguments.blocks)
    publish(make_report(samples, options, machine), arguments)
    return 0


def measure(engine: EngineProcess, options: BenchOptions, num_blocks: int) -> Samples:
    paths = engine.call(prepare, (RANGE_BYTES, num_blocks, NUM_LAYERS), TIMEOUT_S)
    ways = [NOTHING, CONTROL]
    ways += [f"{path} {traffic}" for traffic in ("store", "load") for path in paths]
    samples: Samples = {way: {} for way in ways}
    for index in range(options.rounds + 1):
        print(f"round {index} of {options.rounds}", flush=True)
        for way in ways:
            for phase, asked in requests(way, options, f"{index}/{way}"):
                step_s, rate = engine.call(ask, asked, TIMEOUT_S)
                if index:
                    samples[way].setdefault(phase, []).append(step_s)
                    samples[way].setdefault(f"bytes a second, {phase}", []).append(rate)
        ways.append(ways.pop(0))
    return samples


def requests(way: str, options: BenchOptions, seed: str) -> Iterator[tuple[str, Asked]]:
    """Yield the prompts of each phase: one long one, or short ones of many users."""
    generator = random.Random(f"{options.seed}/beside/{seed}")
    how = "" if way in (NOTHING, CONTROL) else way
    num_tokens = min(ANSWER_TOKENS, options.prompt_tokens // USERS)
    yield PHASES[0], (how, [random_prompt(generator, options.prompt_tokens)], 1)
    short = [random_prompt(generator, num_tokens) for _ in range(USERS)]
    yield PHASES[1], (how, short, num_tokens)


def prepare(engine: Any, sizes: tuple[int, int, int]) -> list[str]:
    (paths,) = engine.collective_rpc("make_beside", args=sizes)
    return [path for path in paths if path != "each"]


def ask(engine: Any, asked: Asked) -> tuple[float, float]:
    """Return the seconds of a step, from its begin to that of the next, and the rate of copies."""
    way, prompts, num_tokens = asked
    path, _, traffic = way.partition(" ")
    engine.collective_rpc("begin_beside", args=(path, traffic))
    generate(engine, prompts, [num_tokens] * len(prompts))
    ((steps, rate),) = engine.collective_rpc("end_beside")
    return median_step_s(steps), rate


def median_step_s(steps: Sequence[Sequence[float]]) -> float:
    """Return the median of the steps as large as most: neither the first nor the last of many."""
    steps = [step for step in steps if step[2]]
    usual = statistics.mode(step[2] for step in steps)
    lasted_s = [b[0] - a[0] for a, b in pairwise(steps) if a[2] == usual]
    if not lasted_s:
        raise SafeOffloadError(f"too few steps to time: {steps}; fix: a larger --prompt-tokens")
    return statistics.median(lasted_s)


# ---- the report ----------------------------------------------------------------------------------


def costs(samples: Samples, way: str, phase: str) -> tuple[float, float]:
    """Return by what share a step is longer than beside nothing, and the standard error."""
    pairs = zip(samples[way][phase], samples[NOTHING][phase], strict=True)
    ratios = [own_s / alone_s - 1 for own_s, alone_s in pairs]
    error = statistics.stdev(ratios) / len(ratios) ** 0.5 if len(ratios) > 1 else 0.0
    return statistics.fmean(ratios), error


def make_report(samples: Samples, options: BenchOptions, machine: dict[str, Any]) -> Report:
    rows = [["beside", *(f"{phase} step" for phase in PHASES), *(f"{p} GB/s" for p in PHASES)]]
    for way, figures in samples.items():
        cells = [f"{1e3 * statistics.median(figures[phase]):.3f} ms" for phase in PHASES]
        if way != NOTHING:
            found = (costs(samples, way, phase) for phase in PHASES)
            cells = [f"{cost:+.2%} (se {error:.2%})" for cost, error in found]
        rates = (statistics.median(figures[f"bytes a second, {phase}"]) for phase in PHASES)
        rows.append([way, *cells, *(f"{rate / 1e9:.1f}" for rate in rates)])
    assert __doc__ is not None
    by_way = {way: {p: costs(samples, way, p) for p in PHASES} for way in samples}
    told = {"costs": by_way, "rounds": samples}
    return Report(__doc__.strip(), [table(rows)], told, asdict(options), machine)
