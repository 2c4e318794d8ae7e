"""Pictures of figures, for docs/benchmarks."""

import argparse
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any


def add_plot_argument(parser: argparse.ArgumentParser) -> None:
    """Declare `--plot`."""
    parser.add_argument("--plot", type=_plot_path, metavar="FILE.png", help="draw the figures here")


def save_plot(path: Path | None, draw: Callable[[Any], None], size: tuple[float, float]) -> None:
    """Have `draw` draw into a figure of matplotlib's of this size in inches, and save it."""
    if path is None:
        return
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure = plt.figure(figsize=size, layout="constrained")
    draw(figure)
    for axes in figure.axes:
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)
    plt.close(figure)
    print(f"wrote {path}")


def _plot_path(text: str) -> Path:
    """Refuse before minutes of measuring, not after."""
    if importlib.util.find_spec("matplotlib") is None:
        raise argparse.ArgumentTypeError("needs matplotlib: pip install 'safe-offload[dev]'")
    return Path(text)
