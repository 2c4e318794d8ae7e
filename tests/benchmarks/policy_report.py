"""What `python -m tests.benchmarks policies` found, as table, JSON and picture."""

import statistics
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tests.benchmarks.policy_replay import NUM_RUNNING, Replay

BASELINE = "lru"


@dataclass(frozen=True, slots=True)
class Curve:
    """Hit rates of one policy on one trace.

    Attributes:
        replays: by size of the host cache, a share of the working set.
    """

    trace: str
    what: str
    policy: str
    working_set: int
    replays: dict[float, Replay]


@dataclass(frozen=True, slots=True)
class Cost:
    """Time of a policy for each slot, a sample for each round.

    Attributes:
        new_ns: to evict it and to release it.
        hit_ns: to lease it and to release it.
    """

    policy: str
    num_slots: int
    batch: int
    new_ns: list[float]
    hit_ns: list[float]


@dataclass(frozen=True, slots=True)
class PolicyReport:
    """All figures of a run."""

    curves: list[Curve]
    costs: list[Cost]
    machine: dict[str, Any]
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def traces(self) -> list[str]:
        """Names, each once."""
        return list(dict.fromkeys(curve.trace for curve in self.curves))

    def curves_of(self, trace: str) -> list[Curve]:
        """Return the curves of a trace, one for each policy."""
        return [curve for curve in self.curves if curve.trace == trace]

    def ratios(self, curve: Curve) -> dict[float, float | None]:
        """Return hit rate by hit rate of LRU, for each size; None where both are 0.

        A policy that hits where LRU never does has an infinite ratio.
        """
        (baseline,) = (c for c in self.curves_of(curve.trace) if c.policy == BASELINE)
        return {
            size: _ratio(found.hit_rate, baseline.replays[size].hit_rate)
            for size, found in curve.replays.items()
        }

    def to_json(self) -> dict[str, Any]:
        """Return everything, for a file."""
        return {
            "method": _describe_method(self),
            "machine": self.machine,
            "options": self.options,
            "hit_rates": [
                {
                    "trace": curve.trace,
                    "what": curve.what,
                    "policy": curve.policy,
                    "working_set_blocks": curve.working_set,
                    "sizes": [
                        {
                            "share_of_working_set": size,
                            "hit_rate": found.hit_rate,
                            "ratio_to_lru": _finite(self.ratios(curve)[size]),
                        }
                        | asdict(found)
                        for size, found in curve.replays.items()
                    ],
                }
                for curve in self.curves
            ],
            "costs": [asdict(cost) for cost in self.costs],
        }


def render_table(report: PolicyReport) -> str:
    """Return the report as text: the method, hit rates and ratios, costs."""
    lines = [_describe_method(report)]
    sizes = list(report.curves[0].replays)
    head = " ".join(f"{f'{size:.0%}':>6}" for size in sizes)
    for trace in report.traces:
        lines += ["", *_render_trace(report, trace, head)]
    lines += [
        "",
        "cost per slot: median (lowest) of the rounds",
        f"{'':6} {'slots':>8} {'batch':>6} {'evict and release':>18} {'lease and release':>18}",
    ]
    lines += [
        f"{cost.policy:6} {cost.num_slots:8,} {cost.batch:6,}"
        f" {_nanoseconds(cost.new_ns):>18} {_nanoseconds(cost.hit_ns):>18}"
        for cost in report.costs
    ]
    return "\n".join(lines)


def _render_trace(report: PolicyReport, trace: str, head: str) -> Iterator[str]:
    curves = report.curves_of(trace)
    yield f"{trace}: {curves[0].what}"
    yield f"{f'{curves[0].working_set:,} blocks':>18} {head}"
    for curve in curves:
        rates = " ".join(f"{found.hit_rate:6.3f}" for found in curve.replays.values())
        yield f"{curve.policy:>18} {rates}"
    for curve in curves:
        if curve.policy != BASELINE:
            ratios = report.ratios(curve).values()
            cells = " ".join(f"{'-' if ratio is None else f'{ratio:.2f}':>6}" for ratio in ratios)
            yield f"{f'{curve.policy}/{BASELINE}':>18} {cells}"


def draw_plot(report: PolicyReport, path: Path) -> None:
    """Draw the hit rate over the size of the host cache, a panel for each trace."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    traces = report.traces
    num_columns = min(4, len(traces))
    num_rows = -(-len(traces) // num_columns)
    figure, grid = plt.subplots(
        num_rows,
        num_columns,
        figsize=(2.75 * num_columns, 2.4 * num_rows),
        layout="constrained",
        squeeze=False,
    )
    panels = list(grid.flat)
    for axes, trace in zip(panels, traces, strict=False):
        for curve in report.curves_of(trace):
            rates = [found.hit_rate for found in curve.replays.values()]
            axes.plot([size * 100 for size in curve.replays], rates, marker=".", label=curve.policy)
        axes.set_title(trace, fontsize=10)
        axes.set_xlim(0, 104)
        axes.set_ylim(bottom=0)
        axes.spines[["top", "right"]].set_visible(False)
    for axes in panels[len(traces) :]:
        axes.set_visible(False)
    panels[0].legend(frameon=False)
    figure.supxlabel("slots, % of the working set", fontsize=9)
    figure.supylabel("hit rate of the host", fontsize=9)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def _nanoseconds(samples: list[float]) -> str:
    return f"{statistics.median(samples):.0f} ({min(samples):.0f}) ns"


def _ratio(rate: float, baseline: float) -> float | None:
    if baseline:
        return rate / baseline
    return float("inf") if rate else None


def _finite(ratio: float | None) -> float | None:
    """JSON knows no infinity."""
    return None if ratio == float("inf") else ratio


def _describe_method(report: PolicyReport) -> str:
    options, machine = report.options, report.machine
    return (
        f"{machine.get('date')}, commit {machine.get('commit')}. Seed {options.get('seed')},"
        f" {options.get('prompts'):,} prompts (uniform: 12 times as many).\n"
        "Hit rate: tokens that the host delivers, of all prompt tokens. The GPU's prefix cache, LRU"
        f" of {options.get('gpu_share'):.0%} of the\nworking set, goes first; {NUM_RUNNING} prompts"
        " at a time hold leases. Columns: slots, as a share of the working set, which is all\n"
        "different blocks of the trace."
    )
