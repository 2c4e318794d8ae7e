"""What reports of benchmarks share: tables, and the commit that was measured."""

from __future__ import annotations

import statistics
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from safe_offload.commands.bench import report

COMMIT_FILE = ".commit"
"""In a checkout that was packed without git; see tests/gpu/pack."""


def describe_machine() -> dict[str, Any]:
    """Return what `bench engine` says of the machine, and the commit."""
    return report.describe_machine() | {"commit": commit_of()}


def commit_of(root: Path = Path(__file__).parents[2]) -> str:
    """Return the commit of a checkout, with a + if files differ from it.

    A checkout packed without git has the commit in a file.
    """
    packed = root / COMMIT_FILE
    if packed.is_file():
        return packed.read_text(encoding="utf-8").strip()
    command = ["git", "-C", str(root), "describe", "--always", "--dirty=+"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return done.stdout.strip()


def table(rows: Sequence[Sequence[str]], *, num_left: int = 1) -> str:
    """Return rows with aligned columns, the first `num_left` of them to the left."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = (
        "  ".join(
            f"{cell:{'<' if place < num_left else '>'}{width}}"
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    )
    return "\n".join(line.rstrip() for line in lines)


def median_and_spread(values: Sequence[float], form: str) -> str:
    """Return the median, and the lowest and the highest in brackets."""
    return f"{statistics.median(values):{form}} ({report.spread(values, form)})"
