"""What `safe-offload bench transfer` found: figures from samples, as table, JSON and picture."""

import statistics
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from safe_offload.bench.transfer_grid import KIB, MIB, Case, Traffic, Way

WAYS = (Way.OURS, Way.LOOP, Way.VLLM_BATCH, Way.VLLM_KERNEL)
"""What is compared with the limit, in the order of the columns."""
LARGE_BYTES = 16 * MIB
"""Smaller copies are mostly submitting and waiting, and are left out of the summary."""


@dataclass(frozen=True, slots=True)
class Measurement:
    """All samples of one size and direction; every way was timed in every round, in turn."""

    case: Case
    traffic: Traffic
    seconds: dict[Way, list[float]]

    @property
    def size_bytes(self) -> int:
        """Bytes moved."""
        return self.case.moved_bytes(self.traffic)

    def median_s(self, way: Way) -> float:
        """Return the median time of a way."""
        return statistics.median(self.seconds[way])

    def rate_gbps(self, way: Way) -> float:
        """Return 10^9 bytes per second, of the median time."""
        return self.size_bytes / self.median_s(way) / 1e9

    def share(self, way: Way) -> float | None:
        """Return how much of the limit's rate a way reaches: the median over the rounds.

        Each round is compared with itself. On a machine shared with others a whole case can run at
        half the speed from some round on, and then medians of the two times say nothing together.
        """
        if way not in self.seconds:
            return None
        pairs = zip(self.seconds[Way.LIMIT], self.seconds[way], strict=True)
        return statistics.median(limit_s / way_s for limit_s, way_s in pairs)

    def ratio_of_medians(self, way: Way) -> float:
        """Return the same from the two medians."""
        return self.median_s(Way.LIMIT) / self.median_s(way)


@dataclass(frozen=True, slots=True)
class Latency:
    """Samples of something short."""

    name: str
    what: str
    samples_us: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class TransferReport:
    """All samples of a run, and under what conditions they were taken."""

    device: str
    clock: str
    measurements: list[Measurement]
    latencies: list[Latency]
    missing: dict[str, str]  # ways that could not be measured, and why
    machine: dict[str, Any]
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def ways(self) -> list[Way]:
        """Return the ways that were measured anywhere, without the limit."""
        found = {way for measurement in self.measurements for way in measurement.seconds}
        return [way for way in WAYS if way in found]

    def shares_by_range(self, traffic: Traffic, way: Way) -> dict[int, list[float]]:
        """Return the shares of the limit of all large copies, by bytes per range."""
        shares: dict[int, list[float]] = {}
        for measurement in self.measurements:
            share = measurement.share(way)
            is_large = measurement.size_bytes >= LARGE_BYTES
            if measurement.traffic is traffic and is_large and share is not None:
                shares.setdefault(measurement.case.range_bytes, []).append(share)
        return shares

    def to_json(self) -> dict[str, Any]:
        """Return everything, samples included, for a file."""
        return {
            "method": _describe_method(self),
            "device": self.device,
            "machine": self.machine,
            "options": self.options,
            "missing": self.missing,
            "measurements": [
                {
                    "case": asdict(m.case),
                    "traffic": m.traffic.value,
                    "size_bytes": m.size_bytes,
                    "share_of_limit": {way.value: m.share(way) for way in m.seconds},
                    "ratio_of_medians": {way.value: m.ratio_of_medians(way) for way in m.seconds},
                    "seconds": {way.value: samples for way, samples in m.seconds.items()},
                }
                for m in self.measurements
            ],
            "latencies": [
                asdict(latency) | {"median_us": statistics.median(latency.samples_us)}
                for latency in self.latencies
            ],
        }


def render_table(report: TransferReport) -> str:
    """Return the report as text: the method, a line for each copy, the sums, the latencies."""
    lines = [_describe_method(report), "", _render_head(report)]
    lines += [_render_row(report, measurement) for measurement in report.measurements]
    lines += ["", *_render_summary(report)]
    lines += ["", f"{'':18} {'median':>10} {'lowest':>10} {'highest':>10}"]
    for latency in report.latencies:
        samples = latency.samples_us
        figures = (statistics.median(samples), min(samples), max(samples))
        cells = " ".join(f"{figure:7.1f} us" for figure in figures)
        lines.append(f"{latency.name:18} {cells}  {latency.what}")
    lines += [f"not measured: {name} ({reason})" for name, reason in report.missing.items()]
    return "\n".join(lines)


def draw_plot(report: TransferReport, path: Path) -> None:
    """Draw the share of the limit over the bytes per range, median of all large copies."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, panels = plt.subplots(
        1, len(Traffic), figsize=(11, 4), layout="constrained", sharey=True
    )
    for axes, traffic in zip(panels, Traffic, strict=True):
        for way in report.ways:
            shares = sorted(report.shares_by_range(traffic, way).items())
            medians = [statistics.median(values) for _, values in shares]
            axes.plot([size for size, _ in shares], medians, marker="o", label=way.value)
        axes.axhline(1.0, color="#9aa5b1", linestyle="--", linewidth=1)
        sizes = sorted({m.case.range_bytes for m in report.measurements})
        axes.set_xlim(sizes[0] / 2, sizes[-1] * 2)
        axes.set_xscale("log", base=2)
        axes.set_xticks(sizes, [_size(size) for size in sizes], fontsize=8)
        axes.set_title(traffic.value, fontsize=10)
        axes.set_xlabel("bytes per range")
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("share of the rate of one large copy")
    panels[0].set_ylim(bottom=0)
    panels[0].legend(frameon=False)
    figure.suptitle(f"{report.device}, copies of {_size(LARGE_BYTES)} and more", fontsize=10)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def _describe_method(report: TransferReport) -> str:
    rounds = [len(m.seconds[Way.LIMIT]) for m in report.measurements]
    machine = report.machine
    return (
        f"Device: {report.device}. {machine.get('date')}, commit {machine.get('commit')}.\n"
        f"Each copy: all blocks of a KV cache, {_order(report)}, to or from a host pool as large."
        f" The bytes were checked.\nTime: {report.clock}.\n"
        f"{min(rounds)} to {max(rounds)} rounds after a warm-up, every way once in each,"
        " the order rotating.\nRates are of the median time; a ratio is the median of the rounds'"
        " own ratios.\n"
        f"Limit: the same bytes, of the same memory, in {Way.LIMIT.value}, by one thread or"
        " stream for each direction.\nLoop: one call for each range. Both: half of the blocks"
        " stored while the others are loaded."
    )


def _order(report: TransferReport) -> str:
    is_contiguous = any(m.case.is_contiguous for m in report.measurements)
    return "in order" if is_contiguous else "in random order on both sides"


def _render_head(report: TransferReport) -> str:
    ways = " ".join(f"{f'{way.value}/limit':>18}" for way in report.ways)
    return (
        f"{'range':>8} {'blocks':>6} {'layers':>6} {'bytes':>9} {'':5}"
        f" {'limit':>10} {Way.OURS.value:>12} {ways}"
    )


def _render_row(report: TransferReport, measurement: Measurement) -> str:
    case = measurement.case
    shares = (measurement.share(way) for way in report.ways)
    cells = " ".join(f"{'-' if share is None else f'{share:.2f}':>18}" for share in shares)
    return (
        f"{_size(case.range_bytes):>8} {case.num_blocks:6,} {case.num_layers:6,}"
        f" {_size(measurement.size_bytes):>9} {measurement.traffic.value:5}"
        f" {measurement.rate_gbps(Way.LIMIT):5.1f} GB/s {measurement.rate_gbps(Way.OURS):7.1f} GB/s"
        f" {cells}"
    )


def _render_summary(report: TransferReport) -> Iterable[str]:
    yield f"share of the limit, copies of {_size(LARGE_BYTES)} and more: median (lowest)"
    for traffic in Traffic:
        for way in report.ways:
            shares = report.shares_by_range(traffic, way)
            cells = (
                f"{_size(size)} {statistics.median(values):.2f} ({min(values):.2f})"
                for size, values in sorted(shares.items())
            )
            if shares:
                yield f"  {traffic.value:5} {way.value:12} {', '.join(cells)}"


def _size(size_bytes: int) -> str:
    if size_bytes >= MIB:
        return f"{size_bytes / MIB:.4g} MiB"
    return f"{size_bytes / KIB:.4g} KiB"
