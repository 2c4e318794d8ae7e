"""Many requests at once with one prefix that only the host has: is it loaded once, or for each?

vLLM's real scheduler serves them with each connector's real scheduler side: no model, no copies.
Figures are steps, preemptions and blocks, and are the same on every machine and every time.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from safe_offload.bench.output import write_report
from safe_offload.errors import ConfigError, SafeOffloadError
from tests.benchmarks.scheduler_engine import CONTESTANTS, LightEngine, Sizes
from tests.benchmarks.scheduler_traces import BLOCK_TOKENS, PLAIN, prompt_of
from tests.benchmarks.shared_engine import EngineSeconds, measure_engine

COPY_STEPS = 2
TAIL_TOKENS = 16
"""Of each prompt, behind the prefix."""
SLOTS_PER_BLOCK = 8
STEPS_MAX = 5000
WINDOW = (*PLAIN, f"window:256@{BLOCK_TOKENS}")


@dataclass(frozen=True, slots=True)
class Case:
    """Requests that come in one step.

    Attributes:
        num_requests: with one prefix and a tail of their own.
        num_blocks: of the GPU, for each KV cache group.
        prefix_blocks: what they share.
        num_answer_tokens: of each.
    """

    num_requests: int
    num_blocks: int
    prefix_blocks: int
    num_answer_tokens: int


CASES = (Case(8, 200, 60, 60), Case(16, 300, 60, 40), Case(32, 400, 80, 40))
LAYOUTS = {"full attention": PLAIN, "full attention and a sliding window": WINDOW}


@dataclass(frozen=True, slots=True)
class Served:
    """What it took to answer all.

    Attributes:
        num_steps: until the last was answered.
        num_preemptions: meanwhile.
        loaded_prefixes: blocks that were loaded, as a multiple of the prefix's in one group.
    """

    num_steps: int
    num_preemptions: int
    loaded_prefixes: float

    def __str__(self) -> str:
        """A cell of the table."""
        return f"{self.num_steps} ({self.num_preemptions}), {self.loaded_prefixes:.2f}"


@dataclass(slots=True)
class SharedReport:
    """What was found, by layout, case and connector; and in a real engine, if that was asked."""

    served: dict[str, dict[Case, dict[str, Served]]]
    copy_steps: int
    in_engine: EngineSeconds | None = None

    def to_json(self) -> dict[str, Any]:
        """Return figures and method."""
        rows = [
            {"layout": layout, **asdict(case), "connector": name, **asdict(served)}
            for layout, cases in self.served.items()
            for case, by_name in cases.items()
            for name, served in by_name.items()
        ]
        found = {"copy_steps": self.copy_steps, "tail_tokens": TAIL_TOKENS, "rows": rows}
        return found | ({"engine": self.in_engine.to_json()} if self.in_engine else {})


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `python -m tests.benchmarks shared`."""
    add = parser.add_argument
    add("--connectors", nargs="+", choices=CONTESTANTS, default=[*CONTESTANTS], metavar="NAME")
    add(
        "--copy-steps",
        type=int,
        default=COPY_STEPS,
        metavar="D",
        help="a copy is reported D steps after the one whose plan names it (%(default)s)",
    )
    add("--engine", action="store_true", help="time it in a real engine too")
    add("--rounds", type=int, default=7, help="in the real engine (%(default)s)")
    add("--json", type=Path, metavar="FILE", help="write figures and method here")


def run_command(arguments: argparse.Namespace) -> int:
    """Run `python -m tests.benchmarks shared`."""
    if arguments.copy_steps < 0:
        raise ConfigError("--copy-steps: expected at least 0")
    if arguments.rounds < 1:
        raise ConfigError("--rounds: expected at least 1")
    report = measure(arguments.connectors, CASES, arguments.copy_steps)
    if arguments.engine:
        report.in_engine = measure_engine(arguments.rounds)
    write_report(report, render_table(report), arguments)
    return 0


def measure(names: Sequence[str], cases: Sequence[Case], copy_steps: int) -> SharedReport:
    """Serve every case with every connector, with each layout of the KV cache."""
    served = {
        layout: {
            case: {name: serve(name, groups, case, copy_steps) for name in names} for case in cases
        }
        for layout, groups in LAYOUTS.items()
    }
    return SharedReport(served, copy_steps)


def serve(name: str, groups: tuple[str, ...], case: Case, copy_steps: int) -> Served:
    """Serve one case: store the prefix, let the GPU forget it, send all requests at once.

    Args:
        name: one of `CONTESTANTS`.
        groups: see `EngineShape`; the pool grows with their number.
        case: what is asked.
        copy_steps: see `LightEngine`.

    Raises:
        SafeOffloadError: it does not end.
    """
    num_blocks = case.num_blocks * len(groups) + 1
    sizes = Sizes(groups, num_blocks, num_blocks * SLOTS_PER_BLOCK, max_seqs=2 * case.num_requests)
    prefix = prompt_of("prefix", case.prefix_blocks * BLOCK_TOKENS)
    with LightEngine(name, sizes, copy_steps) as engine:
        engine.add("start", prompt_of("start", 1), 1)  # until then no rank has told its capacity
        engine.drain()
        engine.add("store", (*prefix, *prompt_of("store", TAIL_TOKENS)), 1)
        engine.drain()
        # In its steps a lazy connector stores what might be evicted in the next ones.
        engine.add("other", prompt_of("other", BLOCK_TOKENS), BLOCK_TOKENS)
        engine.drain()
        if not engine.scheduler.reset_prefix_cache():
            raise SafeOffloadError(f"{name}: expected vLLM to forget its prefix cache, it did not")
        before = engine.num_steps, engine.num_preemptions, engine.worker.num_loaded
        for index in range(case.num_requests):
            tail = prompt_of(f"tail{index}", TAIL_TOKENS)
            engine.add(f"r{index}", (*prefix, *tail), case.num_answer_tokens)
        num_left = case.num_requests
        while num_left:
            num_left -= len(engine.step())
            if engine.num_steps > STEPS_MAX:
                raise SafeOffloadError(f"{name}: not answered after {STEPS_MAX} steps")
        num_loaded = engine.worker.num_loaded - before[2]
        return Served(
            engine.num_steps - before[0],
            engine.num_preemptions - before[1],
            num_loaded / case.prefix_blocks,
        )


def render_table(report: SharedReport) -> str:
    """Return the report as text."""
    lines = [
        "steps until all are answered (preemptions), loaded tokens as a multiple of the prefix",
        f"copies are reported {report.copy_steps} steps later",
    ]
    for layout, cases in report.served.items():
        names = list(next(iter(cases.values())))
        lines += ["", layout]
        lines.append(f"{'requests, pool, prefix, answer':32}" + "".join(f"{n:>18}" for n in names))
        for case, by_name in cases.items():
            sizes = (
                f"{case.num_requests}, {case.num_blocks}, {case.prefix_blocks}, "
                f"{case.num_answer_tokens}"
            )
            lines.append(f"{sizes:32}" + "".join(f"{by_name[n]!s:>18}" for n in names))
    if report.in_engine is not None:
        lines += ["", str(report.in_engine)]
    return "\n".join(lines)
