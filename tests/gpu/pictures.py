"""The pictures of docs/benchmarks, from the figures of a campaign.

`lengths.svg`: time to first token by prompt length. `users.svg`: requests a second and mean time to
first token by concurrent users. An engine that did not start is left out, and named under the
picture. The steps of the campaign have the same names.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tests.benchmarks.agents_engine import TOKENS
from tests.benchmarks.connectors import PEERS

COLOURS = {"none": "#7a7a7a", "OC": "#d1801f", "SCO": "#8a4fbf", "ours": "#0b6fb8"}
LABELS = {"none": "no connector", "ours": "safe_offload", **PEERS}
Points = dict[int, dict[str, Any]]
"""By prompt length or number of users: what a benchmark has written."""


def points_of(steps: Mapping[str, Any], name: str) -> Points:
    """Return the parts of a step, by the number that their names end with."""
    parts = {key.removeprefix(f"{name}-"): part for key, part in steps.items()}
    return {int(key): parts[key] for key in sorted(filter(str.isdigit, parts), key=int)}


class Line(NamedTuple):
    numbers: list[int]  # where an engine has samples
    medians: list[float]
    ranges: tuple[list[float], list[float]]  # from the median down to the lowest, up to the highest


def line(points: Points, engine: str, figure: str) -> Line:
    """Return the samples of a figure."""
    samples = {x: part["samples"].get(engine, {}).get(figure) for x, part in points.items()}
    found = {x: values for x, values in samples.items() if values}
    medians = [statistics.median(values) for values in found.values()]
    pairs = [*zip(medians, found.values(), strict=True)]
    below, above = [m - min(v) for m, v in pairs], [max(v) - m for m, v in pairs]
    return Line([*found], medians, (below, above))


def draw_lengths(points: Points, where: str, file: Path) -> None:
    """Draw the time to first token of a prompt whose KV cache the GPU has evicted."""
    figure, (axes,) = _begin(1)
    for engine in COLOURS:
        _draw(axes, engine, line(points, engine, "second pass"))
    axes.plot(*line(points, "ours", "own hit")[:2], color="#7a7a7a", ls=":", label="vLLM's own hit")
    axes.set(xscale="log", yscale="log", xlabel="prompt, tokens", ylabel="time to first token, s")
    title = "A prompt comes back after vLLM has evicted it"
    _end(figure, [axes], points, title, where, file)


def draw_users(points: Points, where: str, file: Path) -> None:
    """Draw requests a second, and the mean time to first token."""
    for part in points.values():
        for engine, values in part["requests_per_s"].items():
            part["samples"][engine]["requests/s"] = values
    figure, both = _begin(2)
    rows = (("requests/s", "requests a second"), ("first token, mean", "mean TTFT, s"))
    for axes, (name, title) in zip(both, rows, strict=True):
        for engine in COLOURS:
            _draw(axes, engine, line(points, engine, name))
        axes.set(xscale="log", ylim=(0, None), xlabel="concurrent users", ylabel=title)
    for x, part in points.items():
        own, other = (part["requests_per_s"].get(engine, []) for engine in ("ours", "none"))
        ratios = [mine / theirs for mine, theirs in zip(own, other, strict=False)]
        if ratios:
            ratio = f"{min(ratios):.1f} to {max(ratios):.1f} x"
            how = {"textcoords": "offset points", "ha": "center", "fontsize": 8}
            both[0].annotate(ratio, (x, max(own + other)), (0, 4), **how)
    last = next(reversed(points.values()))
    given, (one, *_) = last["options"], last["samples"].values()
    num_tokens = sum(sum(one[name]) for name in TOKENS) / sum(one["requests"])
    num_pool_tokens = given["num_gpu_blocks"] * given["block_size"]
    each = f"each user sends {given['turns']} prompts of {num_tokens:,.0f} tokens on average"
    about = f"{each}; the KV pool holds {num_pool_tokens:,} tokens; x: safe_offload / no connector"
    _end(figure, both, points, "Recorded coding agents", where, file, about)


def _begin(number: int) -> tuple[Any, list[Any]]:
    import matplotlib as mpl
    from matplotlib.figure import Figure

    mpl.rcParams |= {"svg.hashsalt": "safe_offload", "svg.fonttype": "none", "axes.grid": True,
                     "grid.color": "#e4e4e4", "axes.spines.top": False,
                     "axes.spines.right": False, "lines.linewidth": 2.0}  # fmt: skip
    figure = Figure(figsize=(4.6 * number + 1.2, 4.0), layout="constrained")
    return figure, [*figure.subplots(1, number, squeeze=False)[0]]


def _draw(axes: Any, engine: str, line: Line) -> None:
    if line.numbers:
        how = {"color": COLOURS[engine], "marker": "o", "ms": 4, "label": LABELS[engine]}
        axes.errorbar(line.numbers, line.medians, line.ranges, capsize=3, **how)


def _end(
    figure: Any,
    every: Sequence[Any],
    points: Points,
    title: str,
    where: str,
    file: Path,
    *about: str,
) -> None:
    for axes in every:
        axes.set_xticks([*points], [f"{x // 1000}k" if x >= 1000 else str(x) for x in points])
        axes.minorticks_off()
        axes.yaxis.set_major_formatter("{x:g}")
    every[0].legend(frameon=False)
    last = next(reversed(points.values()))
    absent = [f"{LABELS[name]} does not start" for name in COLOURS if name not in last["samples"]]
    machine = last["machine"]
    there = f"{where}, load average {machine['load_average_before'][0]:.0f}"
    when = f"{machine['date'][:10]}; median and range of {last['options']['rounds']} rounds"
    figure.suptitle(title, fontsize=12)
    figure.supxlabel("\n".join([f"{there}; {when}", *about, *absent]), fontsize=8)
    figure.savefig(file, metadata={"Date": None})


def draw(steps: Mapping[str, Any], where: str, folder: Path) -> Iterator[Path]:
    """Draw what a campaign has figures of; yield the files. `where`: the machine, in words."""
    for name, picture in {"lengths": draw_lengths, "users": draw_users}.items():
        if points := points_of(steps, name):
            picture(points, where, folder / f"{name}.svg")
            yield folder / f"{name}.svg"
