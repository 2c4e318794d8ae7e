"""What `python -m tests.benchmarks scheduler` found: ratios, tables, JSON and picture."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tests.benchmarks.scheduler_cases import Growth, Hit, Wait
from tests.benchmarks.scheduler_measure import Facts, HookTime, Timing
from tests.benchmarks.scheduler_probe import Counts, WrapperCost

RIVALS = {"ours-eager": "simple-eager", "ours-lazy": "simple-lazy"}
"""Which of the others does the same as ours."""
OTHER = "offloading"
NOTHING = "none"


@dataclass(slots=True)
class TraceReport:
    """All connectors on one trace.

    Attributes:
        facts: by connector.
        timings: by connector.
        counts: by connector and hook.
    """

    facts: dict[str, Facts] = field(default_factory=dict)
    timings: dict[str, Timing] = field(default_factory=dict)
    counts: dict[str, dict[str, Counts]] = field(default_factory=dict)

    def total_ms(self, name: str) -> float:
        """Return the time of all hooks."""
        return self.timings[name].total_ns / 1e6

    def scheduler_ms(self, name: str) -> float:
        """Return the time inside the scheduler, hooks included."""
        return self.timings[name].scheduler_ns / 1e6

    def step_us(self, name: str) -> tuple[float, float]:
        """Return median and 99th percentile of a step's hooks."""
        steps = self.timings[name].steps
        return steps.median_ns / 1e3, steps.p99_ns / 1e3

    def hook(self, name: str, hook: str) -> HookTime | None:
        """Return one hook's figures; None if it is never called."""
        return self.timings[name].hooks.get(hook)

    def hooks(self) -> list[str]:
        """Return the hooks that any connector has, the most expensive first."""
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
        """Return what all hooks executed."""
        return sum(self.counts[name].values(), Counts())

    def count_ratio(self, name: str, other: str) -> float | None:
        """Return how many times the bytecode instructions of another."""
        if name not in self.counts or other not in self.counts:
            return None
        return self.total_counts(name).instructions / self.total_counts(other).instructions


@dataclass(slots=True)
class SchedulerReport:
    """All that was measured, and how."""

    traces: dict[str, TraceReport]
    waits: dict[str, list[Wait]]
    hits: dict[str, dict[str, Hit]]
    growth: dict[str, list[Growth]]
    cost: WrapperCost
    options: dict[str, Any]
    machine: dict[str, Any]

    def to_json(self) -> dict[str, Any]:
        """Return everything, for a file."""
        return {
            "method": describe_method(self),
            "machine": self.machine,
            "options": self.options,
            "wrapper": asdict(self.cost),
            "traces": {
                name: asdict(trace) | {"ratios": {mine: _ratios(trace, mine) for mine in RIVALS}}
                for name, trace in self.traces.items()
            },
            "back_to_back": _as_dicts(self.waits),
            "hits": {
                layout: {name: asdict(hit) for name, hit in hits.items()}
                for layout, hits in self.hits.items()
            },
            "growth": _as_dicts(self.growth),
        }


def _as_dicts(rows: dict[str, list[Any]]) -> dict[str, list[dict[str, Any]]]:
    return {name: [asdict(row) for row in found] for name, found in rows.items()}


def _ratios(trace: TraceReport, name: str) -> dict[str, float | None]:
    return {
        f"{what} of {other}": ratio(name, other)
        for what, ratio in (("time", trace.ratio), ("instructions", trace.count_ratio))
        for other in (RIVALS[name], OTHER)
    }


def describe_method(report: SchedulerReport) -> str:
    """Return in words what was measured and how."""
    options, machine = report.options, report.machine
    return (
        f"vLLM's scheduler with each connector's scheduler side. {machine.get('date')}, commit"
        f" {machine.get('commit')}.\nNo model and no copies: a stand-in for the workers reports a"
        f" copy {options['copy_steps']} step(s) after\nthe one whose plan names it; one step in"
        " flight. Same requests, GPU blocks and host slots for all;"
        f" seed {options['seed']}.\n{_describe_probe(report)}"
        "Hits: tokens loaded for requests that first run, of all prompt tokens. Kept: GPU blocks"
        " referenced that no\nrequest holds, mean and most over the steps. These and the computed"
        " tokens are of an untimed run."
    )


def _describe_probe(report: SchedulerReport) -> str:
    if report.options["is_counting"]:
        return (
            "Counted with Python's own hooks for debuggers and profilers: bytecode instructions,"
            " and calls of\nPython and C functions, inside the hooks that the scheduler calls.\n"
        )
    return (
        f"{report.options['rounds']} rounds in one process, every connector once in each, the order"
        " rotating, the garbage collector off.\nEvery hook that the scheduler calls is wrapped; the"
        f" wrapper's own {report.cost.inside_ns} ns a call (and {report.cost.outside_ns} ns in the"
        " scheduler's\ntime) are taken off. Every round makes the same calls: figures are of the"
        " least of the rounds, call\nby call, for others on the machine can only add to it.\n"
        "Scheduler: add_request, has_requests, schedule, update_from_output, hooks included;"
        " hashing prompts is not.\n"
    )


def render_table(report: SchedulerReport) -> str:
    """Return the report as text."""
    lines = [describe_method(report)]
    for name, trace in report.traces.items():
        lines += ["", f"== {name}", *_render_facts(trace)]
        if trace.timings:
            lines += ["", *_render_hooks(trace)]
        if trace.counts:
            lines += ["", *_render_counts(trace)]
    lines += _render_waits(report)
    lines += _render_hits(report)
    lines += _render_growth(report)
    lines += ["", *_render_ratios(report)]
    return "\n".join(lines)


def _render_facts(trace: TraceReport) -> Iterator[str]:
    times = (
        f" {'scheduler':>10} {'hooks':>9} {'step':>8} {'p99':>9} {'per 1,000 blocks':>16}"
        if trace.timings
        else ""
    )
    yield (
        f"{'':13}{times} {'stored':>7} {'loaded':>7} {'hits':>5} {'computed':>9} {'preempted':>9}"
        f" {'kept':>10}"
    )
    for name, facts in trace.facts.items():
        times = _render_times(trace, name) if trace.timings else ""
        yield (
            f"{name:13}{times} {facts.num_stored:7,} {facts.num_loaded:7,} {facts.hit_rate:5.0%}"
            f" {facts.num_computed:9,} {facts.num_preemptions:9,}"
            f" {facts.kept_mean:5.1f} {facts.kept_max:4,}"
        )


def _render_times(trace: TraceReport, name: str) -> str:
    num_moved = trace.facts[name].num_moved
    step_us, p99_us = trace.step_us(name)
    hooks_ms = trace.total_ms(name)
    per_blocks = f"{1e6 * hooks_ms / num_moved:,.0f} us" if num_moved else "-"
    return (
        f" {trace.scheduler_ms(name):7,.0f} ms {hooks_ms:6,.0f} ms {step_us:5,.0f} us"
        f" {p99_us:6,.0f} us {per_blocks:>16}"
    )


def _render_hooks(trace: TraceReport) -> Iterator[str]:
    names = [name for name in trace.timings if name != NOTHING]
    yield "total ms, median us, p99 us of a call, calls"
    yield f"{'':30}" + "".join(f" {name:>28}" for name in names)
    for hook in trace.hooks():
        cells = []
        for name in names:
            time = trace.hook(name, hook)
            cells.append(
                f"{time.total_ns / 1e6:7.1f} {time.median_ns / 1e3:6.1f} {time.p99_ns / 1e3:7.1f}"
                f" {time.calls:5,}"
                if time
                else "-"
            )
        yield f"{hook:30}" + "".join(f" {cell:>28}" for cell in cells)


def _render_counts(trace: TraceReport) -> Iterator[str]:
    names = list(trace.counts)
    yield "bytecode instructions (calls of functions)"
    yield f"{'':30}" + "".join(f" {name:>24}" for name in names)
    hooks = sorted({hook for counts in trace.counts.values() for hook in counts})
    rows = [(hook, [trace.counts[name].get(hook) for name in names]) for hook in hooks]
    rows.append(("all", [trace.total_counts(name) for name in names]))
    for hook, row in rows:
        cells = (f"{c.instructions:,} ({c.functions:,})" if c else "-" for c in row)
        yield f"{hook:30}" + "".join(f" {cell:>24}" for cell in cells)


def _render_waits(report: SchedulerReport) -> Iterator[str]:
    if not report.waits:
        return
    yield "\n== back to back: each of two requests takes 62 % of the GPU's blocks; the second waits"
    held = [wait.held_steps for wait in next(iter(report.waits.values()))]
    yield f"{'a copy takes':13}" + "".join(f" {f'{steps} steps':>20}" for steps in held)
    for name, waits in report.waits.items():
        cells = (f"{wait.num_steps} steps, {wait.scheduler_ns / 1e6:.2f} ms" for wait in waits)
        yield f"{name:13}" + "".join(f" {cell:>20}" for cell in cells)


def _render_hits(report: SchedulerReport) -> Iterator[str]:
    for layout, hits in report.hits.items():
        yield f"\n== a hit of 90,000 tokens, {layout}: us per 1,000 blocks"
        yield (
            f"{'':13} {'blocks':>7} {'match':>8} {'alloc':>8} {'plan':>8} {'pickle':>8} {'sum':>8}"
            f" {'bytes of the plan':>18}"
        )
        for name, hit in hits.items():
            parts = (hit.match_ns, hit.alloc_ns, hit.plan_ns, hit.pickle_ns, hit.total_ns)
            cells = " ".join(f"{part / hit.num_blocks:8,.0f}" for part in parts)
            yield f"{name:13} {hit.num_blocks:7,} {cells} {hit.pickle_bytes:18,}"


def _render_growth(report: SchedulerReport) -> Iterator[str]:
    if not report.growth:
        return
    yield "\n== the same small load behind more stored blocks: hooks in a step, in all, calls"
    for name, found in report.growth.items():
        cells = (
            f"{growth.num_stored:,}: {growth.step_ns / 1e3:.1f} us, {growth.total_ns / 1e6:.1f} ms"
            if growth.total_ns
            else f"{growth.num_stored:,}: {growth.functions:,} calls"
            for growth in found
        )
        yield f"{name:13} " + "; ".join(cells)


def _render_ratios(report: SchedulerReport) -> Iterator[str]:
    yield "== ours as a multiple of the others: time of all hooks, bytecode instructions"
    for name, trace in report.traces.items():
        cells = []
        for mine, rival in RIVALS.items():
            for other in (rival, OTHER):
                ratios = (trace.ratio(mine, other), trace.count_ratio(mine, other))
                shown = ", ".join(f"{ratio:.2f}" for ratio in ratios if ratio is not None)
                if shown:
                    cells.append(f"{mine}/{other} {shown}")
        yield f"{name:16} " + "; ".join(cells)


def draw_plot(report: SchedulerReport, path: Path) -> None:
    """Draw the hooks' time as bars, for each trace and connector."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    traces = {name: trace for name, trace in report.traces.items() if trace.timings}
    names = [name for name in next(iter(traces.values())).timings if name != NOTHING]
    figure, axes = plt.subplots(figsize=(11, 4.5), layout="constrained")
    width = 0.8 / len(names)
    for index, name in enumerate(names):
        positions = [place + (index - len(names) / 2) * width for place in range(len(traces))]
        values = [trace.total_ms(name) for trace in traces.values()]
        colour = f"C{0 if name.startswith('ours') else index + 1}"
        hatch = "//" if name.endswith("lazy") else None
        axes.bar(positions, values, width, label=name, color=colour, hatch=hatch, align="edge")
    axes.set_xticks(range(len(traces)), [name.replace(" ", "\n") for name in traces])
    axes.set_ylabel("all hooks [ms]")
    axes.set_yscale("log")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8, ncols=len(names))
    figure.savefig(path, dpi=150)
    plt.close(figure)
