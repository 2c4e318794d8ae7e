"""What `python -m tests.benchmarks policies` found, and its report."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from safe_offload.commands.bench.report import Report, table
from tests.benchmarks.policy_replay import Replay

BASELINE = "lru"


@dataclass(frozen=True, slots=True)
class Curve:
    """Hit rates of one policy on one trace."""

    trace: str
    what: str
    policy: str
    working_set: int
    replays: dict[float, Replay]  # by size of the host cache, a share of the working set

    def ratios(self, baseline: Curve) -> dict[float, float | None]:
        """Return hit rate by hit rate of another, for each size; None where both are 0.

        A policy that hits where the other never does has an infinite ratio.
        """
        return {
            size: _ratio(found.hit_rate, baseline.replays[size].hit_rate)
            for size, found in self.replays.items()
        }


@dataclass(frozen=True, slots=True)
class Cost:
    """Time of a policy for each slot, a sample for each round."""

    policy: str
    num_slots: int
    batch: int
    new_ns: list[float]  # to evict it and to release it
    hit_ns: list[float]  # to lease it and to release it


def make_report(
    curves: Sequence[Curve], costs: Sequence[Cost], options: dict[str, Any], machine: dict[str, Any]
) -> Report:
    cost_rows = [["", "slots", "batch", "evict and release", "lease and release"]]
    cost_rows += [
        [
            c.policy,
            f"{c.num_slots:,}",
            f"{c.batch:,}",
            _nanoseconds(c.new_ns),
            _nanoseconds(c.hit_ns),
        ]
        for c in costs
    ]
    return Report(
        method=(
            f"{machine.get('date')}, commit {machine.get('commit')}. Seed {options['seed']},"
            f" {options['prompts']:,} prompts (uniform: 12 times as many).\n"
            "Hit rate: tokens that the host delivers, of all prompt tokens. The GPU's prefix cache,"
            f" LRU of {options['gpu_share']:.0%} of the\nworking set, goes first; "
            f"{options['running']} prompts at a time hold leases. Columns: slots,"
            " as a share of the working set, which is all\ndifferent blocks of the trace."
        ),
        sections=[
            *(_trace_table(by_policy) for by_policy in by_trace(curves)),
            "cost per slot: median (lowest) of the rounds\n" + table(cost_rows),
        ],
        figures={
            "hit_rates": [
                _curve_json(curve, by_policy[BASELINE])
                for by_policy in by_trace(curves)
                for curve in by_policy.values()
            ],
            "costs": [asdict(cost) for cost in costs],
        },
        options=options,
        machine=machine,
    )


def by_trace(curves: Sequence[Curve]) -> list[dict[str, Curve]]:
    """Return the curves of each trace by policy."""
    found: dict[str, dict[str, Curve]] = {}
    for curve in curves:
        found.setdefault(curve.trace, {})[curve.policy] = curve
    return list(found.values())


def draw(figure: Any, curves: Sequence[Curve]) -> None:
    traces = by_trace(curves)
    num_columns = min(4, len(traces))
    panels = list(figure.subplots(-(-len(traces) // num_columns), num_columns, squeeze=False).flat)
    for axes, by_policy in zip(panels, traces, strict=False):
        for policy, curve in by_policy.items():
            rates = [found.hit_rate for found in curve.replays.values()]
            axes.plot([size * 100 for size in curve.replays], rates, marker=".", label=policy)
        axes.set_title(curve.trace, fontsize=10)
        axes.set_xlim(0, 104)
        axes.set_ylim(bottom=0)
    for axes in panels[len(traces) :]:
        axes.set_visible(False)
    panels[0].legend(frameon=False)
    figure.supxlabel("slots, % of the working set", fontsize=9)
    figure.supylabel("hit rate of the host", fontsize=9)


def _trace_table(by_policy: dict[str, Curve]) -> str:
    baseline = by_policy[BASELINE]
    rows = [[f"{baseline.working_set:,} blocks", *(f"{size:.0%}" for size in baseline.replays)]]
    for policy, curve in by_policy.items():
        rows.append([policy, *(f"{found.hit_rate:.3f}" for found in curve.replays.values())])
    for policy, curve in by_policy.items():
        if curve is not baseline:
            ratios = curve.ratios(baseline).values()
            cells = ("-" if ratio is None else f"{ratio:.2f}" for ratio in ratios)
            rows.append([f"{policy}/{BASELINE}", *cells])
    return f"{baseline.trace}: {baseline.what}\n" + table(rows, num_left=0)


def _curve_json(curve: Curve, baseline: Curve) -> dict[str, Any]:
    ratios = curve.ratios(baseline)
    return {
        "trace": curve.trace,
        "what": curve.what,
        "policy": curve.policy,
        "working_set_blocks": curve.working_set,
        "sizes": [
            {
                "share_of_working_set": size,
                "hit_rate": found.hit_rate,
                # JSON knows no infinity.
                "ratio_to_lru": None if ratios[size] == float("inf") else ratios[size],
            }
            | asdict(found)
            for size, found in curve.replays.items()
        ],
    }


def _nanoseconds(samples: list[float]) -> str:
    return f"{statistics.median(samples):.0f} ({min(samples):.0f}) ns"


def _ratio(rate: float, baseline: float) -> float | None:
    if baseline:
        return rate / baseline
    return float("inf") if rate else None
