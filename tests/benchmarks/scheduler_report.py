"""What `python -m tests.benchmarks scheduler` found, and its report."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from safe_offload.commands.bench.report import Report, table
from tests.benchmarks.scheduler_measure import Facts, Timing
from tests.benchmarks.scheduler_probe import Counts, WrapperCost

RIVALS = {"ours-eager": "simple-eager", "ours-lazy": "simple-lazy"}
"""Which of the others does the same as ours."""
OTHER = "offloading"
NOTHING = "none"


@dataclass(slots=True)
class TraceFound:
    """All connectors on one trace."""

    facts: dict[str, Facts] = field(default_factory=dict)  # by connector
    timings: dict[str, Timing] = field(default_factory=dict)  # by connector
    counts: dict[str, dict[str, Counts]] = field(default_factory=dict)  # by connector and hook

    def hooks(self) -> list[str]:
        totals: dict[str, int] = {}
        for timing in self.timings.values():
            for hook, time in timing.hooks.items():
                totals[hook] = totals.get(hook, 0) + time.total_ns
        return sorted(totals, key=lambda hook: -totals[hook])

    def ratio(self, name: str, other: str) -> float | None:
        """Return how many times the hook time of another."""
        if name not in self.timings or other not in self.timings:
            return None
        return self.timings[name].total_ns / self.timings[other].total_ns

    def total_counts(self, name: str) -> Counts:
        return sum(self.counts[name].values(), Counts())

    def count_ratio(self, name: str, other: str) -> float | None:
        if name not in self.counts or other not in self.counts:
            return None
        return self.total_counts(name).instructions / self.total_counts(other).instructions


@dataclass(slots=True)
class SchedulerFound:
    """All that was measured, and how."""

    cost: WrapperCost
    options: dict[str, Any]
    traces: dict[str, TraceFound] = field(default_factory=dict)


def make_report(found: SchedulerFound, machine: dict[str, Any]) -> Report:
    return Report(
        method=_describe_method(found, machine),
        sections=[*_sections(found), _ratio_lines(found)],
        figures={
            "wrapper": asdict(found.cost),
            "traces": {
                name: asdict(trace) | {"ratios": {mine: _ratios(trace, mine) for mine in RIVALS}}
                for name, trace in found.traces.items()
            },
        },
        options=found.options,
        machine=machine,
    )


def _ratios(trace: TraceFound, name: str) -> dict[str, float | None]:
    return {
        f"{what} of {other}": ratio(name, other)
        for what, ratio in (("time", trace.ratio), ("instructions", trace.count_ratio))
        for other in (RIVALS[name], OTHER)
    }


def _describe_method(found: SchedulerFound, machine: dict[str, Any]) -> str:
    options = found.options
    probe = (
        "Counted with Python's own hooks for debuggers and profilers: bytecode instructions, and"
        " calls of\nPython and C functions, inside the hooks that the scheduler calls.\n"
    )
    if not options["is_counting"]:
        probe = (
            f"{options['rounds']} rounds in one process, every connector once in each, the order"
            " rotating, the garbage collector off.\nEvery hook that the scheduler calls is wrapped;"
            f" the wrapper's own {found.cost.inside_ns} ns a call (and {found.cost.outside_ns} ns"
            " in the scheduler's\ntime) are taken off. Every round makes the same calls: figures"
            " are of the least of the rounds, call\nby call, for others on the machine can only add"
            " to it.\nScheduler: add_request, has_requests, schedule, update_from_output, hooks"
            " included; hashing prompts is not.\n"
        )
    return (
        f"vLLM's scheduler with each connector's scheduler side. {machine.get('date')}, commit"
        f" {machine.get('commit')}.\nNo model and no copies: a stand-in for the workers reports a"
        f" copy {options['copy_steps']} step(s) after\nthe one whose plan names it; one step in"
        " flight. Same requests, GPU blocks and host slots for all;"
        f" seed {options['seed']}.\n{probe}"
        "Hits: tokens loaded for requests that first run, of all prompt tokens. Kept: GPU blocks"
        " referenced that no\nrequest holds, mean and most over the steps. These and the computed"
        " tokens are of an untimed run."
    )


def _sections(found: SchedulerFound) -> Iterator[str]:
    for name, trace in found.traces.items():
        yield f"== {name}\n" + _facts_table(trace)
        if trace.timings:
            yield "total ms, median us, p99 us of a call, calls\n" + _hooks_table(trace)
        if trace.counts:
            yield "bytecode instructions (calls of functions)\n" + _counts_table(trace)


def _facts_table(trace: TraceFound) -> str:
    head = ["stored", "loaded", "hits", "computed", "preempted", "kept", ""]
    if trace.timings:
        head = ["scheduler", "hooks", "step", "p99", "per 1,000 blocks", *head]
    rows = [["", *head]]
    for name, facts in trace.facts.items():
        times = _time_cells(trace.timings[name], facts.num_moved) if trace.timings else []
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


def _time_cells(timing: Timing, num_moved: int) -> list[str]:
    return [
        f"{timing.scheduler_ns / 1e6:,.0f} ms",
        f"{timing.total_ns / 1e6:,.0f} ms",
        f"{timing.steps.median_ns / 1e3:,.0f} us",
        f"{timing.steps.p99_ns / 1e3:,.0f} us",
        f"{timing.total_ns / num_moved:,.0f} us" if num_moved else "-",
    ]


def _hooks_table(trace: TraceFound) -> str:
    names = [name for name in trace.timings if name != NOTHING]
    rows = [["", *names]]
    for hook in trace.hooks():
        times = [trace.timings[name].hooks.get(hook) for name in names]
        rows.append(
            [
                hook,
                *(
                    f"{t.total_ns / 1e6:.1f} {t.median_ns / 1e3:6.1f} {t.p99_ns / 1e3:7.1f}"
                    f" {t.calls:5,}"
                    if t
                    else "-"
                    for t in times
                ),
            ]
        )
    return table(rows)


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


def _ratio_lines(found: SchedulerFound) -> str:
    lines = ["== ours as a multiple of the others: time of all hooks, bytecode instructions"]
    for name, trace in found.traces.items():
        cells = []
        for mine, rival in RIVALS.items():
            for other in (rival, OTHER):
                ratios = (trace.ratio(mine, other), trace.count_ratio(mine, other))
                shown = ", ".join(f"{ratio:.2f}" for ratio in ratios if ratio is not None)
                if shown:
                    cells.append(f"{mine}/{other} {shown}")
        lines.append(f"{name:16} " + "; ".join(cells))
    return "\n".join(lines)
