"""Where every benchmark's figures go: the terminal, and the files that were asked for."""

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol, TypeVar


class Report(Protocol):
    """What a benchmark has found."""

    def to_json(self) -> dict[str, Any]:
        """Return samples, figures and method."""


AnyReport = TypeVar("AnyReport", bound=Report)


def write_report(
    report: AnyReport,
    table: str,
    arguments: argparse.Namespace,
    draw_plot: Callable[[AnyReport, Path], None] | None = None,
) -> None:
    """Print the table; write the files of `--json` and `--plot`.

    Args:
        report: what was found.
        table: the same as text.
        arguments: of the command line.
        draw_plot: draws it; None for a benchmark without `--plot`.
    """
    print(f"\n{table}")
    if arguments.json:
        arguments.json.write_text(json.dumps(report.to_json(), indent=1) + "\n", encoding="utf-8")
        print(f"\nwrote {arguments.json}")
    if draw_plot is not None and arguments.plot:
        draw_plot(report, arguments.plot)
        print(f"wrote {arguments.plot}")
