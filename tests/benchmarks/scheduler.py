"""What a connector costs inside vLLM's scheduler, which is one thread for all requests.

vLLM's real scheduler serves fixed traces with each connector's scheduler side: no model, no copies.
A stand-in for the workers reports a copy one step after the one whose plan names it. All have the
same requests, GPU blocks and host slots.

Every hook that the scheduler calls is timed, the wrapper's own time taken off, every connector once
in each round, the order rotating, the garbage collector off. Every round makes the same calls:
figures are of the least of the rounds, call by call, for others on the machine can only add to it.
With --counts bytecode instructions and calls of functions inside the hooks are counted instead.

Hits: tokens loaded for requests that first run, of all prompt tokens. Kept: GPU blocks referenced
that no request holds, mean and most over the steps. These are of an untimed run.
"""

import argparse
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field

from safe_offload.commands.bench.report import Report, add_output_arguments, publish
from safe_offload.errors import SafeOffloadError
from tests.benchmarks.report import describe_machine, table
from tests.benchmarks.scheduler_engine import CONTESTANTS
from tests.benchmarks.scheduler_measure import (
    COPY_STEPS,
    Answers,
    Calls,
    Facts,
    count_hooks,
    least_ns,
    observe,
    time_hooks,
)
from tests.benchmarks.scheduler_probe import Counts, measure_wrapper_ns
from tests.benchmarks.scheduler_traces import LAYOUTS, QUICK_SHARE, TRACES, Trace, make_trace


@dataclass(frozen=True, slots=True)
class SchedulerOptions:
    """What to measure."""

    traces: tuple[str, ...]
    connectors: tuple[str, ...]
    rounds: int
    seed: int
    is_quick: bool
    is_counting: bool


Say = Callable[[str], None]
RIVALS = {"ours-eager": "simple-eager", "ours-lazy": "simple-lazy"}
"""Which of the others does the same as ours."""
OTHER = "offloading"
NOTHING = "none"


@dataclass(slots=True)
class TraceFound:
    """All connectors on one trace."""

    facts: dict[str, Facts] = field(default_factory=dict)  # by connector
    times_ns: dict[str, int] = field(default_factory=dict)  # of all hooks, by connector
    counts: dict[str, dict[str, Counts]] = field(default_factory=dict)  # by connector and hook

    def ratio(self, name: str, other: str) -> float | None:
        """Return how many times the hook time of another."""
        if name not in self.times_ns or other not in self.times_ns:
            return None
        return self.times_ns[name] / self.times_ns[other]

    def total_counts(self, name: str) -> Counts:
        return sum(self.counts[name].values(), Counts())

    def count_ratio(self, name: str, other: str) -> float | None:
        if name not in self.counts or other not in self.counts:
            return None
        return self.total_counts(name).instructions / self.total_counts(other).instructions


Traces = dict[str, TraceFound]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--traces", nargs="+", choices=list(TRACES), default=list(TRACES), metavar="TRACE")
    add("--connectors", nargs="+", choices=CONTESTANTS, default=[*CONTESTANTS], metavar="NAME")
    add("--rounds", type=int, default=5, help="(%(default)s)")
    add("--quick", action="store_true", help="a quarter of the users, prompts and blocks")
    add("--counts", action="store_true", help="count calls and instructions; takes no times")
    add("--seed", type=int, default=0, help="of the traces (%(default)s)")
    add_output_arguments(parser)


def run_command(arguments: argparse.Namespace) -> int:
    """Run `python -m tests.benchmarks scheduler`."""
    options = _read_options(arguments)
    machine = describe_machine()
    traces = measure(options, print)
    assert __doc__ is not None
    figures = {
        name: asdict(trace) | {"ratios": {mine: _ratios(trace, mine) for mine in RIVALS}}
        for name, trace in traces.items()
    }
    sections = [*_sections(traces), _ratio_lines(traces)]
    report = Report(__doc__.strip(), sections, {"traces": figures}, asdict(options), machine)
    publish(report, arguments)
    return 0


def measure(options: SchedulerOptions, say: Say) -> Traces:
    wrapper_ns = measure_wrapper_ns()
    found: Traces = {}
    share = QUICK_SHARE if options.is_quick else 1
    for name in options.traces:
        for layout in LAYOUTS:
            trace = make_trace(name, layout, seed=options.seed, share=share)
            say(f"{trace.name}: {trace.num_requests} requests")
            found[trace.name] = measure_trace(trace, options, wrapper_ns)
    return found


def measure_trace(trace: Trace, options: SchedulerOptions, wrapper_ns: int) -> TraceFound:
    """Serve one trace with every connector: once to look at what happens, then in rounds."""
    found = TraceFound()
    answers: Answers = {}
    for name in options.connectors:
        found.facts[name], answered = observe(trace, name, COPY_STEPS)
        if answers and answered != answers:
            raise SafeOffloadError(f"{trace.name}: other answers with {name}")
        answers = answered
    if options.is_counting:
        for name in (name for name in options.connectors if name != NOTHING):
            found.counts[name] = count_hooks(trace, name, COPY_STEPS)
        return found
    order = list(options.connectors)
    runs: dict[str, list[Calls]] = {name: [] for name in order}
    for _ in range(options.rounds):
        for name in order:
            runs[name].append(time_hooks(trace, name, COPY_STEPS, wrapper_ns))
        order.append(order.pop(0))
    found.times_ns = {name: least_ns(runs[name]) for name in options.connectors}
    return found


def _read_options(arguments: argparse.Namespace) -> SchedulerOptions:
    return SchedulerOptions(
        traces=tuple(arguments.traces),
        connectors=tuple(arguments.connectors),
        rounds=arguments.rounds,
        seed=arguments.seed,
        is_quick=arguments.quick or arguments.counts,
        is_counting=arguments.counts,
    )


# ---- the report ----------------------------------------------------------------------------------


def _ratios(trace: TraceFound, name: str) -> dict[str, float | None]:
    return {
        f"{what} of {other}": ratio(name, other)
        for what, ratio in (("time", trace.ratio), ("instructions", trace.count_ratio))
        for other in (RIVALS[name], OTHER)
    }


def _sections(traces: Traces) -> Iterator[str]:
    for name, trace in traces.items():
        yield f"== {name}\n" + _facts_table(trace)
        if trace.counts:
            yield "bytecode instructions (calls of functions)\n" + _counts_table(trace)


def _facts_table(trace: TraceFound) -> str:
    head = ["stored", "loaded", "hits", "computed", "preempted", "kept", ""]
    if trace.times_ns:
        head = ["hooks", "per 1,000 blocks", *head]
    rows = [["", *head]]
    for name, facts in trace.facts.items():
        times = _time_cells(trace.times_ns[name], facts.num_moved) if trace.times_ns else []
        rows.append(
            [
                name,
                *times,
                f"{facts.num_stored:,}",
                f"{facts.num_loaded:,}",
                f"{facts.hit_rate:.0%}",
                f"{facts.num_computed:,}",
                f"{facts.num_preemptions:,}",
                f"{facts.kept_mean:.1f}",
                f"{facts.kept_max:,}",
            ]
        )
    return table(rows)


def _time_cells(time_ns: int, num_moved: int) -> list[str]:
    per_block = f"{time_ns / num_moved:,.0f} us" if num_moved else "-"
    return [f"{time_ns / 1e6:,.0f} ms", per_block]


def _counts_table(trace: TraceFound) -> str:
    names = list(trace.counts)
    hooks = sorted({hook for counts in trace.counts.values() for hook in counts})
    rows = [(hook, [trace.counts[name].get(hook) for name in names]) for hook in hooks]
    rows.append(("all", [trace.total_counts(name) for name in names]))
    cells = [
        [hook, *(f"{c.instructions:,} ({c.functions:,})" if c else "-" for c in row)]
        for hook, row in rows
    ]
    return table([["", *names], *cells])


def _ratio_lines(traces: Traces) -> str:
    lines = ["== ours as a multiple of the others: time of all hooks, bytecode instructions"]
    for name, trace in traces.items():
        cells = []
        for mine, rival in RIVALS.items():
            for other in (rival, OTHER):
                ratios = (trace.ratio(mine, other), trace.count_ratio(mine, other))
                shown = ", ".join(f"{ratio:.2f}" for ratio in ratios if ratio is not None)
                if shown:
                    cells.append(f"{mine}/{other} {shown}")
        lines.append(f"{name:16} " + "; ".join(cells))
    return "\n".join(lines)
