"""What the link gives: one large copy from and to page-locked memory, for some seconds.

Beside memory that the driver has allocated, memory that it has locked in place, as ours is. If the
slowest copies are far from the median, something else is on the bus; what the link carried while
nothing of ours ran is printed too. Without a GPU the copies are those of a device of threads.
"""

import argparse
import re
import statistics
import subprocess
import time
from contextlib import closing
from typing import Any

import torch

from safe_offload.commands.bench.report import (
    Report,
    add_output_arguments,
    describe_machine,
    publish,
    table,
)
from safe_offload.worker.copies.base import Direction
from tests.benchmarks.fake_gpu_rig import gpu_rigs
from tests.benchmarks.transfer_cases import Case, Traffic
from tests.benchmarks.transfer_rigs import LIMIT, GpuRig, TimedCopy

ALLOCATED, IN_PLACE = "allocated by the driver", "locked in place"
LINK_LINES = re.compile(
    r"^ +((?:Tx|Rx) Throughput|Current|Max) +: (\d\S*(?: KB/s)?)$", re.MULTILINE
)
"""Of `nvidia-smi -q`: generation and width of the link, and what it carries."""

Rates = dict[str, dict[str, list[float]]]
"""Bytes a second of each copy, by traffic and kind of memory."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--bytes", type=int, default=1 << 30, help="of a copy (%(default)s)")
    add("--seconds", type=float, default=4.0, help="for each kind and way (%(default)s)")
    add_output_arguments(parser)


def run_command(arguments: argparse.Namespace) -> int:
    """Run `python -m tests.benchmarks link`."""
    machine = describe_machine()
    bus = ask_link()
    rates = measure(arguments.bytes, arguments.seconds)
    options = {"bytes": arguments.bytes, "seconds": arguments.seconds}
    publish(make_report(rates, bus, options, machine), arguments)
    return 0


def measure(size_bytes: int, seconds: float) -> Rates:
    case = Case(size_bytes // 2, 2, 1)
    rates: Rates = {}
    pinned = torch.empty(size_bytes, dtype=torch.uint8, pin_memory=torch.cuda.is_available())
    with gpu_rigs() as make, closing(make(case)) as rig:
        for traffic in Traffic:
            ways = {ALLOCATED: over(rig, pinned, traffic), IN_PLACE: rig.ways(traffic)[LIMIT]}
            found: dict[str, list[float]] = {way: [] for way in ways}
            for copy in ways.values():
                copy()
            end_s = time.monotonic() + len(ways) * seconds
            while not found[IN_PLACE] or time.monotonic() < end_s:
                for way, copy in ways.items():
                    found[way].append(case.moved_bytes(traffic) / copy())
            rates[traffic.value] = found
    return rates


def over(rig: GpuRig, pinned: torch.Tensor, traffic: Traffic) -> TimedCopy:
    """Return one contiguous copy, or two of half the size at once, over other host memory."""
    host, device, gives = pinned.data_ptr(), rig.storage.data_ptr(), {}
    directions = [one.direction for one in rig.case.make_copies(traffic)]
    size_bytes = rig.case.moved_bytes(traffic) // len(directions)
    for offset, direction in zip(range(0, 1 << 62, size_bytes), directions, strict=False):
        target, source = host + offset, device + offset
        if direction is Direction.LOAD:
            target, source = source, target
        gives[direction] = rig.give_one(direction, target, source, size_bytes)
    return lambda: rig.time(gives)


def ask_link() -> str:
    """Return generation, width and traffic of the link, as the driver tells them."""
    try:
        asked = subprocess.run(("nvidia-smi", "-q"), capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.SubprocessError) as error:
        return f"the driver cannot be asked ({error})"
    return ", ".join(f"{name} {value}" for name, value in LINK_LINES.findall(asked.stdout))


def make_report(rates: Rates, bus: str, options: dict[str, Any], machine: dict[str, Any]) -> Report:
    rows = [["GB/s", "", "copies", "median", "lowest", "slowest 1 in 100", "highest"]]
    for traffic, found in rates.items():
        for way, values in found.items():
            low = sorted(values)[len(values) // 100]
            shown = (statistics.median(values), min(values), low, max(values))
            rows.append([traffic, way, str(len(values)), *(f"{v / 1e9:.2f}" for v in shown)])
    sections = [table(rows, num_left=2), f"the link before: {bus}"]
    return Report(__doc__ or "", sections, {"rates": rates, "link": bus}, options, machine)
