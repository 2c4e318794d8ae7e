"""What a connector costs inside vLLM's scheduler, which is one thread for all requests.

vLLM's real scheduler serves fixed traces with each connector's scheduler side: no model, no copies.
Every hook that the scheduler calls is timed, or with --counts what it executes is counted.
"""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

from safe_offload.commands.bench.report import add_output_arguments, describe_machine, publish
from safe_offload.errors import SafeOffloadError
from tests.benchmarks.scheduler_engine import CONTESTANTS
from tests.benchmarks.scheduler_measure import (
    COPY_STEPS,
    Answers,
    Run,
    Timing,
    count_hooks,
    observe,
    time_hooks,
)
from tests.benchmarks.scheduler_probe import WrapperCost, measure_wrapper_cost
from tests.benchmarks.scheduler_report import NOTHING, SchedulerFound, TraceFound, make_report
from tests.benchmarks.scheduler_traces import LAYOUTS, QUICK_SHARE, TRACES, Trace, make_trace


@dataclass(frozen=True, slots=True)
class SchedulerOptions:
    """What to measure."""

    traces: tuple[str, ...]
    connectors: tuple[str, ...]
    rounds: int
    copy_steps: int
    seed: int
    is_quick: bool
    is_counting: bool


Say = Callable[[str], None]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--traces", nargs="+", choices=list(TRACES), default=list(TRACES), metavar="TRACE")
    add("--connectors", nargs="+", choices=CONTESTANTS, default=[*CONTESTANTS], metavar="NAME")
    add("--rounds", type=int, default=5, help="(%(default)s)")
    add("--quick", action="store_true", help="a quarter of the users, prompts and blocks")
    add("--counts", action="store_true", help="count calls and instructions; takes no times")
    add(
        "--copy-steps",
        type=int,
        default=COPY_STEPS,
        metavar="D",
        help="a copy is reported D steps after the one whose plan names it (%(default)s)",
    )
    add("--seed", type=int, default=0, help="of the traces (%(default)s)")
    add_output_arguments(parser)


def run_command(arguments: argparse.Namespace) -> int:
    """Run `python -m tests.benchmarks scheduler`."""
    options = _read_options(arguments)
    machine = describe_machine()
    found = measure(options, print)
    publish(make_report(found, machine), arguments)
    return 0


def measure(options: SchedulerOptions, say: Say) -> SchedulerFound:
    cost = measure_wrapper_cost()
    found = SchedulerFound(cost, asdict(options))
    share = QUICK_SHARE if options.is_quick else 1
    for name in options.traces:
        for layout in LAYOUTS:
            trace = make_trace(name, layout, seed=options.seed, share=share)
            say(f"{trace.name}: {trace.num_requests} requests")
            found.traces[trace.name] = measure_trace(trace, options, cost)
    return found


def measure_trace(trace: Trace, options: SchedulerOptions, cost: WrapperCost) -> TraceFound:
    """Serve one trace with every connector: once to look at what happens, then in rounds."""
    found = TraceFound()
    answers: Answers = {}
    for name in options.connectors:
        found.facts[name], answered = observe(trace, name, options.copy_steps)
        if answers and answered != answers:
            raise SafeOffloadError(f"{trace.name}: other answers with {name}")
        answers = answered
    if options.is_counting:
        for name in _with_hooks(options):
            found.counts[name] = count_hooks(trace, name, options.copy_steps)
        return found
    order = list(options.connectors)
    runs: dict[str, list[Run]] = {name: [] for name in order}
    for _ in range(options.rounds):
        for name in order:
            runs[name].append(time_hooks(trace, name, options.copy_steps, cost))
        order.append(order.pop(0))
    found.timings = {name: Timing.of(runs[name]) for name in options.connectors}
    return found


def _with_hooks(options: SchedulerOptions) -> Sequence[str]:
    return [name for name in options.connectors if name != NOTHING]


def _read_options(arguments: argparse.Namespace) -> SchedulerOptions:
    return SchedulerOptions(
        traces=tuple(arguments.traces),
        connectors=tuple(arguments.connectors),
        rounds=arguments.rounds,
        copy_steps=arguments.copy_steps,
        seed=arguments.seed,
        is_quick=arguments.quick or arguments.counts,
        is_counting=arguments.counts,
    )
