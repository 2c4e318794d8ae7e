"""Rate of the copies between KV cache and host memory, against what the hardware gives.

Every size of copy is timed in three ways in the same rounds: by our backend, as one contiguous copy
of the same bytes, and by one call for each range.
"""

import argparse
import functools
import statistics
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import asdict, dataclass
from typing import Any

import torch

from safe_offload.commands.bench.report import (
    Report,
    add_output_arguments,
    describe_machine,
    publish,
    table,
)
from safe_offload.config.units import format_bytes
from safe_offload.errors import ConfigError
from safe_offload.worker.copies.device import Device
from safe_offload.worker.memory.host_memory import HostMemory, available_host_bytes
from tests.benchmarks.transfer_cases import (
    KIB,
    MIB,
    QUICK_SIZES,
    USUAL_SIZES,
    Case,
    Traffic,
    select_cases,
)
from tests.benchmarks.transfer_rigs import LIMIT, OURS, CpuRig, GpuRig, Rig, TimedCopy

SIZE_BYTES_MAX = {"cpu": 512 << 20, "cuda": 4 << 30}
CASE_S_MIN, ROUNDS_FACTOR = 0.2, 10
"""Short copies get more rounds, up to this much time, or this many times as many."""
NUM_COPIES_IN_MEMORY = 4  # KV cache, host pool, and what the check of the bytes takes
LARGE_BYTES = 16 * MIB
"""Smaller copies are mostly submitting and waiting, and are left out of the summary."""

MakeRig = Callable[[Case], Rig]
MoreWays = Callable[[Rig, Traffic], dict[str, TimedCopy]]


@dataclass(frozen=True, slots=True)
class TransferOptions:
    """What to measure, and on what."""

    cases: tuple[Case, ...]
    rounds: int
    size_bytes_max: int
    make_rig: MakeRig
    device: str


@dataclass(frozen=True, slots=True)
class Measurement:
    """All samples of one size and direction; every way was timed in every round, in turn."""

    case: Case
    traffic: Traffic
    seconds: dict[str, list[float]]

    @property
    def size_bytes(self) -> int:
        return self.case.moved_bytes(self.traffic)

    def rate_gbps(self, way: str) -> float:
        return self.size_bytes / statistics.median(self.seconds[way]) / 1e9

    def share(self, way: str) -> float | None:
        """Return how much of the limit's rate a way reaches: the median over the rounds.

        Each round is compared with itself. On a machine shared with others a whole case can run at
        half the speed from some round on, and then medians of the two times say nothing together.
        """
        if way not in self.seconds:
            return None
        pairs = zip(self.seconds[LIMIT], self.seconds[way], strict=True)
        return statistics.median(limit_s / way_s for limit_s, way_s in pairs)

    def to_json(self) -> dict[str, Any]:
        return {
            "case": asdict(self.case),
            "traffic": self.traffic.value,
            "size_bytes": self.size_bytes,
            "share_of_limit": {way: self.share(way) for way in self.seconds},
            "seconds": self.seconds,
        }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--device", choices=SIZE_BYTES_MAX, help="(default: cuda if torch sees a GPU, else cpu)")
    add("--quick", action="store_true", help="fewer sizes")
    for name, what in (
        ("--range-bytes", "bytes of a block in one layer"),
        ("--blocks", "blocks of a copy"),
        ("--layers", "layers"),
    ):
        add(name, type=int, nargs="+", metavar="N", help=f"{what}, instead of the usual ones")
    add("--max-bytes", type=int, help="largest copy (512 MiB on the CPU, 4 GiB on a GPU)")
    add("--rounds", type=int, default=15, help="at least, after a warm-up (%(default)s)")
    add_output_arguments(parser)


def run_command(arguments: argparse.Namespace) -> int:
    """Run `python -m tests.benchmarks transfer`."""
    machine = describe_machine()
    options = read_options(arguments)
    publish(make_report(options, measure(options, print), machine), arguments)
    return 0


def measure(
    options: TransferOptions, say: Callable[[str], None], more_ways: MoreWays = lambda *_: {}
) -> list[Measurement]:
    """Time every size in every way, `more_ways` beside the rig's own; `say` takes progress.

    SafeOffloadError is raised if a copy failed or brought other bytes.
    """
    measurements: list[Measurement] = []
    for index, case in enumerate(options.cases):
        say(f"{index + 1} of {len(options.cases)}: {format_bytes(case.size_bytes)}")
        with closing(options.make_rig(case)) as rig:
            rig.check()
            for traffic in case.traffics:
                ways = rig.ways(traffic) | more_ways(rig, traffic)
                seconds = time_in_turn(ways, options.rounds)
                measurements.append(Measurement(case, traffic, seconds))
    return measurements


def time_in_turn(ways: dict[str, TimedCopy], rounds: int) -> dict[str, list[float]]:
    """Time every way once in each round, the first to go another one each time.

    So a slow drift of the machine's speed, and what a way leaves in the caches, hits all alike.
    """
    warm_up_s = sum(timed() for timed in ways.values())
    wanted = int(CASE_S_MIN / max(warm_up_s, 1e-9))
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    order = list(ways)
    for _ in range(min(max(rounds, wanted), rounds * ROUNDS_FACTOR)):
        for way in order:
            seconds[way].append(ways[way]())
        order.append(order.pop(0))
    return seconds


def read_options(arguments: argparse.Namespace) -> TransferOptions:
    device = arguments.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda: torch sees no GPU. Fix: run it on a machine with one")
    usual = QUICK_SIZES if arguments.quick else USUAL_SIZES
    asked = (arguments.range_bytes, arguments.blocks, arguments.layers)
    ranges, blocks, layers = (one or usually for one, usually in zip(asked, usual, strict=True))
    sizes = (ranges, blocks, layers)
    size_bytes_max = arguments.max_bytes or SIZE_BYTES_MAX[device]
    cases = select_cases(sizes, size_bytes_max)
    if not cases:
        raise ConfigError(
            f"--max-bytes {size_bytes_max}: no size of copy is that small; fix: a larger value"
        )
    needed_bytes = NUM_COPIES_IN_MEMORY * max(case.size_bytes for case in cases)
    available_bytes = available_host_bytes()
    if needed_bytes > available_bytes:
        raise ConfigError(
            f"--max-bytes: {format_bytes(needed_bytes)} of host memory are needed, "
            f"{format_bytes(available_bytes)} are available; "
            f"fix: --max-bytes {available_bytes // NUM_COPIES_IN_MEMORY}"
        )
    make_rig: MakeRig = make_gpu_rig if device == "cuda" else CpuRig
    name = torch.cuda.get_device_name() if device == "cuda" else str(describe_machine()["cpu"])
    return TransferOptions(tuple(cases), arguments.rounds, size_bytes_max, make_rig, name)


def make_gpu_rig(case: Case, host: HostMemory | None = None) -> GpuRig:
    """Return a rig on torch's current GPU."""
    device = torch.device("cuda", torch.cuda.current_device())
    storage = torch.empty(case.size_bytes, dtype=torch.uint8, device=device)
    make_event = functools.partial(torch.cuda.Event, enable_timing=True)
    return GpuRig(case, storage, Device(device), make_event, host)


# ---- the report --------------------------------------------------------------------------------


def make_report(
    options: TransferOptions, measurements: list[Measurement], machine: dict[str, Any]
) -> Report:
    ways = compared_ways(measurements)
    head = ["range", "blocks", "layers", "bytes", "", "limit", OURS, *(f"{w}/limit" for w in ways)]
    rows = [_row(measurement, ways) for measurement in measurements]
    title = f"share of the limit, copies of {format_size(LARGE_BYTES)} and more: median (lowest)"
    return Report(
        method=_describe_method(options, measurements, machine),
        sections=[
            table([head, *rows], num_left=0),
            "\n".join([title, *_summary(measurements, ways)]),
        ],
        figures={"device": options.device, "measurements": [one.to_json() for one in measurements]},
        options={"rounds": options.rounds, "max_bytes": options.size_bytes_max},
        machine=machine,
    )


def shares_by_range(
    measurements: list[Measurement], traffic: Traffic, way: str
) -> dict[int, list[float]]:
    """Return the shares of the limit of all large copies, by bytes per range."""
    shares: dict[int, list[float]] = {}
    for measurement in measurements:
        share = measurement.share(way)
        is_large = measurement.size_bytes >= LARGE_BYTES
        if measurement.traffic is traffic and is_large and share is not None:
            shares.setdefault(measurement.case.range_bytes, []).append(share)
    return dict(sorted(shares.items()))


def compared_ways(measurements: list[Measurement]) -> list[str]:
    """Return the ways that were measured anywhere, without the limit."""
    ways = dict.fromkeys(way for one in measurements for way in one.seconds)
    return [way for way in ways if way != LIMIT]


def _row(measurement: Measurement, ways: list[str]) -> list[str]:
    case = measurement.case
    shares = (measurement.share(way) for way in ways)
    return [
        format_size(case.range_bytes),
        f"{case.num_blocks:,}",
        f"{case.num_layers:,}",
        format_size(measurement.size_bytes),
        measurement.traffic.value,
        f"{measurement.rate_gbps(LIMIT):.1f} GB/s",
        f"{measurement.rate_gbps(OURS):.1f} GB/s",
        *("-" if share is None else f"{share:.2f}" for share in shares),
    ]


def _summary(measurements: list[Measurement], ways: list[str]) -> Iterator[str]:
    for traffic in Traffic:
        for way in ways:
            cells = [
                f"{format_size(size)} {statistics.median(values):.2f} ({min(values):.2f})"
                for size, values in shares_by_range(measurements, traffic, way).items()
            ]
            if cells:
                yield f"  {traffic.value:5} {way:12} {', '.join(cells)}"


def _describe_method(
    options: TransferOptions, measurements: list[Measurement], machine: dict[str, Any]
) -> str:
    rounds = [len(measurement.seconds[LIMIT]) for measurement in measurements]
    clock = CpuRig.clock if options.make_rig is CpuRig else GpuRig.clock
    return (
        f"Device: {options.device}. {machine.get('date')}, commit {machine.get('commit')}.\n"
        "Each copy: all blocks of a KV cache, in random order on both sides, to or from a host pool"
        f" as large. The bytes were checked.\nTime: {clock}.\n"
        f"{min(rounds)} to {max(rounds)} rounds after a warm-up, every way once in each,"
        " the order rotating.\nRates are of the median time; a ratio is the median of the rounds'"
        " own ratios.\n"
        f"Limit: the same bytes, of the same memory, in {LIMIT}, by one thread or"
        " stream for each direction.\nLoop: one call for each range. Both: half of the blocks"
        " stored while the others are loaded."
    )


def format_size(size_bytes: int) -> str:
    is_large = size_bytes >= MIB
    return f"{size_bytes / MIB:.4g} MiB" if is_large else f"{size_bytes / KIB:.4g} KiB"
