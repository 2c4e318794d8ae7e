"""What the figures of several steps say together: where a peer is ahead, and two pictures."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tests.benchmarks.plots import save_plot
from tests.gpu.steps import FIGURES

OURS, PEERS = "ours", ("SCO", "OC")
PASSES = ("first pass", "second pass", "own hit")
SCENARIOS = ("return", "ranks")
AHEAD = 0.98
"""A peer's median below this share of ours is ahead; what is closer is noise."""

Steps = Mapping[str, Any]
"""The figures of each step that has some; of a part of it under its name and that of the part."""


def files_of(step: str, folder: Path) -> list[Path]:
    """Return the files with figures of a step: of the whole, and of its parts."""
    stem, _, ending = FIGURES.partition(".")
    return sorted(folder.glob(f"{step}/{stem}*.{ending}"), key=lambda file: file.stem)


def read(folder: Path) -> Steps:
    stem, _, _ = FIGURES.partition(".")
    files = files_of("*", folder)
    return {f"{f.parent.name}{f.stem.removeprefix(stem)}": json.loads(f.read_text()) for f in files}


def peers_ahead(steps: Steps) -> Iterator[str]:
    """Yield every row of seconds in which a peer is ahead of us, with both medians."""
    for step, figures in steps.items():
        samples = figures.get("samples", ())
        if not isinstance(samples, dict) or OURS not in samples:
            continue
        for name, own in samples[OURS].items():
            if all(value == int(value) for value in own):
                continue  # a count
            for peer in PEERS:
                theirs = samples.get(peer, {}).get(name)
                if theirs and statistics.median(theirs) < AHEAD * statistics.median(own):
                    medians = (
                        f"{statistics.median(theirs):.4f} s, ours {statistics.median(own):.4f} s"
                    )
                    yield f"{step}, {name}: {peer} {medians}"


def draw_all(folder: Path) -> list[Path]:
    """Draw what there is to draw; return the pictures. None without matplotlib."""
    try:
        import matplotlib as mpl  # noqa: F401
    except ImportError:
        return []
    steps, drawn = read(folder), []
    returns = {
        n: f["samples"] for n, f in steps.items() if f.get("scenario") in ("return", "ranks")
    }
    if returns:
        drawn.append(folder / "returns.png")
        save_plot(
            drawn[-1], lambda figure: draw_returns(figure, returns), (2 + 2.4 * len(returns), 4)
        )
    return drawn


def draw_returns(figure: Any, returns: Steps) -> None:
    """Time to first token of both passes and of the GPU's own hit, by model and connector."""
    panels = figure.subplots(1, len(returns), squeeze=False)[0]
    for axes, (step, samples) in zip(panels, returns.items(), strict=True):
        for place, (engine, figures) in enumerate(samples.items()):
            medians = [statistics.median(figures[name]) for name in PASSES]
            at = [index + place / (len(samples) + 1) for index in range(len(PASSES))]
            axes.bar(at, medians, 1 / (len(samples) + 1), align="edge", label=engine)
        axes.set_xticks([index + 0.4 for index in range(len(PASSES))], PASSES, fontsize=7)
        axes.set_title(step, fontsize=9)
    panels[0].set_ylabel("time to first token, s")
    panels[0].legend(frameon=False, fontsize=8)
