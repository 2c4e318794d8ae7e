"""A KV cache whose blocks lie in one piece: what it brings copies, and what it costs the forward.

Copies: the same bytes of 32 layers, in 32 ranges a block and in one, in the same rounds.

Engines: both with the connector, one with `enable_cross_layers_blocks`. Prompts A, B, C, A, B, C go
one by one to each, as in `bench engine`. Of each round and each figure the ratio counts: the one
with blocks in one piece over the other. On the CPU vLLM's attention is told to say that it reads
such blocks, as its kernels do; so the command can be tried without a GPU.
"""

import argparse
import re
import statistics
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

from safe_offload.commands.bench import engine as bench_engine
from safe_offload.commands.bench.engine import OURS, BenchOptions, engine_options
from safe_offload.commands.bench.engine_process import EngineProcess
from safe_offload.commands.bench.engine_report import NUM_PROMPTS
from safe_offload.commands.bench.report import (
    Report,
    describe_machine,
    median_and_spread,
    publish,
    table,
)
from safe_offload.errors import SafeOffloadError
from tests.benchmarks import transfer
from tests.benchmarks.engine_watch import Watched, answer_watched, start_watching
from tests.benchmarks.engines import TIMEOUT_S, ours, sized
from tests.benchmarks.transfer_cases import KIB, Case, Traffic
from tests.benchmarks.transfer_rigs import OURS as OUR_WAY
from tests.gpu import shapes

APART, WHOLE = "layer by layer", "in one piece"
PROBE = "tests.benchmarks.layouts_worker.LayoutProbe"
NUM_LAYERS, RANGE_BYTES = 32, 64 * KIB
RANGES = re.compile(r" bytes in (one range|\d+ ranges), ")
COMPUTED, TOKEN, LOADED = "first token, computed", "each further token", "first token, loaded"
RATES = {"store": "rate of stores", "load": "rate of loads"}

Samples = dict[str, list[dict[str, float]]]
"""By layout: the figures of each round."""


class Found(NamedTuple):
    """What was measured: in how many ranges each layout is copied, and the figures."""

    ranges: dict[str, str]
    samples: Samples


def add_arguments(parser: argparse.ArgumentParser) -> None:
    bench_engine.add_arguments(parser)
    shapes.add_arguments(parser)
    parser.set_defaults(model="llama")
    parser.add_argument("--copies-only", action="store_true", help="start no engines")
    parser.add_argument("--blocks", type=int, default=64, help="of a copy (%(default)s)")
    parser.add_argument("--copy-rounds", type=int, default=31, help="(%(default)s)")
    parser.add_argument("--device", help="of the copies (cuda if torch sees a GPU, else cpu)")


def run_command(arguments: argparse.Namespace) -> int:
    """Run `python -m tests.benchmarks layouts`; return 1 if the engines disagree on a token."""
    machine = describe_machine()
    options = bench_engine.read_options(arguments)
    copies = measure_copies(arguments.device, arguments.blocks, arguments.copy_rounds)
    engines, num_different = Found({}, {}), 0
    if not arguments.copies_only:
        with tempfile.TemporaryDirectory(prefix="safe-offload-shape-") as name:
            options = shapes.take_shape(options, arguments.shape, Path(name))
            engines, num_different = measure_engines(options, arguments.logs)
    publish(make_report(machine, options, copies, engines, num_different), arguments)
    return int(num_different > 0)


# ---- copies --------------------------------------------------------------------------------------


def measure_copies(device: str | None, num_blocks: int, rounds: int) -> Found:
    """Return seconds by layout and traffic, round by round."""
    cases = {
        APART: Case(RANGE_BYTES, num_blocks, NUM_LAYERS),
        WHOLE: Case(NUM_LAYERS * RANGE_BYTES, num_blocks, 1),
    }
    parser = argparse.ArgumentParser()
    transfer.add_arguments(parser)
    written = ["--range-bytes", f"{RANGE_BYTES}", "--blocks", f"{num_blocks}", "--layers", "32"]
    written += ["--device", device] if device else []
    make_rig = transfer.read_options(parser.parse_args(written)).make_rig
    samples: Samples = {name: [] for name in cases}
    with ExitStack() as on:
        rigs = {name: on.enter_context(closing(make_rig(case))) for name, case in cases.items()}
        ranges: dict[str, str] = {}
        for name, rig in rigs.items():
            rig.check()
            (copy,) = rig.case.make_copies(Traffic.STORE)
            ranges[name] = f"{len(rig.ranges(copy))} ranges in all"
        for traffic in cases[APART].traffics:
            ways = {name: rig.ways(traffic)[OUR_WAY] for name, rig in rigs.items()}
            for name, seconds in transfer.time_in_turn(ways, rounds).items():
                samples[name] += [{traffic.value: one_s} for one_s in seconds]
    return Found(ranges, samples)


# ---- engines -------------------------------------------------------------------------------------


def measure_engines(options: BenchOptions, log_folder: Path | None) -> tuple[Found, int]:
    """Return the figures of each round, and how many answers differ."""
    options = replace(options, engine_args=options.engine_args | {"worker_extension_cls": PROBE})
    samples: Samples = {WHOLE: [], APART: []}
    num_different = 0
    with tempfile.TemporaryDirectory(prefix="safe-offload-layouts-") as name, ExitStack() as on:
        logs = log_folder or Path(name)
        logs.mkdir(parents=True, exist_ok=True)
        options = sized(options, Path(name), logs)
        engines: dict[str, EngineProcess] = {}
        ranges: dict[str, str] = {}
        for layout in samples:
            config = ours(
                **options.host_size,
                enable_cross_layers_blocks=layout == WHOLE,
                min_load_tokens=0,
            )
            how = engine_options(replace(options, kv_transfer_config=config))[OURS]
            log = logs / f"{layout.replace(' ', '-')}.log"
            engines[layout] = on.enter_context(EngineProcess(layout, how, log))
            engines[layout].wait_until_started(TIMEOUT_S)
            engines[layout].call(start_watching, None, TIMEOUT_S)
            ranges[layout] = find_ranges(log.read_text(errors="replace"))
            print(f"{layout}: a block is copied in {ranges[layout]}")
            if ranges[WHOLE] != "one range":
                raise SafeOffloadError("this model cannot have its blocks in one piece here")
        order = list(engines)
        for index in range(options.rounds + 1):
            order.reverse()
            questions = [bench_engine.make_question(options, index, i) for i in range(NUM_PROMPTS)]
            answers = {}
            for layout in order:
                asked = [
                    engines[layout].call(answer_watched, one, options.answer_timeout)
                    for one in [*questions, *questions]
                ]
                answers[layout] = [one.answer.token_ids for one in asked]
                if index:
                    samples[layout].append(figures_of(asked))
            num_different += sum(a != b for a, b in zip(*answers.values(), strict=True))
            print(f"round {index} of {options.rounds}")
    return Found(ranges, samples), num_different


def find_ranges(log: str) -> str:
    found = RANGES.search(log)
    return found.group(1) if found else "no copies"


def figures_of(asked: Sequence[Watched]) -> dict[str, float]:
    """Return the figures of one round: seconds, and bytes per second of copies under way."""
    computed, loaded = asked[:NUM_PROMPTS], asked[NUM_PROMPTS:]
    further = [
        (a.total_s - a.ttft_s) / max(len(a.token_ids) - 1, 1) for a in (o.answer for o in computed)
    ]
    figures = {
        COMPUTED: statistics.fmean(one.answer.ttft_s for one in computed),
        TOKEN: statistics.fmean(further),
        LOADED: statistics.fmean(one.answer.ttft_s for one in loaded),
    }
    copies = [copy for one in asked for copy in one.probe["copies"]]
    for direction, name in RATES.items():
        spans = sorted((begin_s, end_s) for way, begin_s, end_s, _ in copies if way == direction)
        if spans:
            size_bytes = sum(size for way, _, _, size in copies if way == direction)
            figures[name] = size_bytes / busy_s(spans)
    return figures


def busy_s(spans: Sequence[tuple[float, float]]) -> float:
    """Return the time in which at least one of some spans is under way; sorted by their begin."""
    total_s, until_s = 0.0, float("-inf")
    for begin_s, end_s in spans:
        total_s += max(0.0, end_s - max(begin_s, until_s))
        until_s = max(until_s, end_s)
    return total_s


# ---- the report ----------------------------------------------------------------------------------


def ratios(samples: Samples) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    for apart, whole in zip(samples.get(APART, ()), samples.get(WHOLE, ()), strict=True):
        for name in apart.keys() & whole.keys():
            found.setdefault(name, []).append(whole[name] / apart[name])
    return found


def make_report(
    machine: dict[str, Any],
    options: BenchOptions,
    copies: Found,
    engines: Found,
    num_different: int,
) -> Report:
    sections = [section(f"Copies of {NUM_LAYERS} layers of {RANGE_BYTES >> 10} KiB", copies)]
    if engines.samples:
        said = f"answers that differ between the engines: {num_different}"
        sections += [section("Engines, a block", engines), said]
    parts = {"copies": copies, "engines": engines}
    figures = {name: part._asdict() for name, part in parts.items()} | {
        "layout_ratios": {name: ratios(part.samples) for name, part in parts.items()},
        "num_different_answers": num_different,
    }
    assert __doc__ is not None
    return Report(__doc__.strip(), sections, figures, asdict(options), machine)


def section(title: str, found: Found) -> str:
    said = ", ".join(f"{layout}: {found.ranges[layout]}" for layout in (APART, WHOLE))
    return f"{title} ({said})\n{render(found.samples)}"


def render(samples: Samples) -> str:
    rows = [["", APART, WHOLE, "ratio (lowest to highest)"]]
    for name, values in sorted(ratios(samples).items()):
        medians = [
            statistics.median(one[name] for one in samples[layout] if name in one)
            for layout in (APART, WHOLE)
        ]
        is_rate = name in RATES.values()
        cells = [f"{m / 1e9:.2f} GB/s" if is_rate else f"{m * 1e3:.2f} ms" for m in medians]
        rows.append([name, *cells, median_and_spread(values, ".3f")])
    return table(rows)
