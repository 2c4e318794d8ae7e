"""Rate of the copies between KV cache and host memory, against what the hardware gives.

Every size of copy is timed in several ways in the same rounds: by our backend, as one contiguous
copy of the same bytes, by one call for each range, and on a GPU by vLLM's own copies.
"""

import argparse
import os
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import torch

from safe_offload.bench import transfer_grid as grid
from safe_offload.bench import transfer_latency as latency
from safe_offload.bench.machine import describe_machine, require_matplotlib
from safe_offload.bench.output import write_report
from safe_offload.bench.transfer_grid import Case, Way, select_cases
from safe_offload.bench.transfer_report import (
    Latency,
    Measurement,
    TransferReport,
    draw_plot,
    render_table,
)
from safe_offload.bench.transfer_rigs import CpuRig, CudaStopwatch, GpuRig, Rig, TimedCopy
from safe_offload.errors import ConfigError
from safe_offload.units import format_bytes
from safe_offload.worker.backends.device import Device
from safe_offload.worker.host_memory import available_host_bytes

DEVICES = ("cpu", "cuda")
SIZE_BYTES_MAX = {"cpu": 512 << 20, "cuda": 4 << 30}
RANGE_STEP_BYTES = 8
CASE_S_MIN = 0.2
"""Short copies get more rounds, up to this much time, or `ROUNDS_FACTOR` times as many."""
ROUNDS_FACTOR = 10
NUM_COPIES_IN_MEMORY = 4
"""KV cache, host pool, and what the check of the bytes takes beside them."""

MakeRig = Callable[[Case], Rig]


@dataclass(frozen=True, slots=True)
class TransferOptions:
    """What to measure."""

    cases: tuple[Case, ...]
    rounds: int
    size_bytes_max: int


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `safe-offload bench transfer`."""
    add = parser.add_argument
    add("--device", choices=DEVICES, help="(default: cuda if torch sees a GPU, else cpu)")
    add("--quick", action="store_true", help="fewer sizes")
    for name, what in (
        ("--range-bytes", "bytes of a block in one layer"),
        ("--blocks", "blocks of a copy"),
        ("--layers", "layers"),
    ):
        add(name, type=int, nargs="+", metavar="N", help=f"{what}, instead of the usual ones")
    add("--contiguous", action="store_true", help="blocks in order; otherwise scattered")
    add("--max-bytes", type=int, help="largest copy (512 MiB on the CPU, 4 GiB on a GPU)")
    add("--rounds", type=int, default=15, help="at least, after a warm-up (%(default)s)")
    add("--json", type=Path, metavar="FILE", help="write samples, figures and method here")
    add("--plot", type=Path, metavar="FILE.png", help="draw the figures here")


def run_command(arguments: argparse.Namespace) -> int:
    """Run `safe-offload bench transfer`."""
    if arguments.plot:
        require_matplotlib()
    device = arguments.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda: torch sees no GPU. Fix: run it on a machine with one")
    options = _read_options(arguments, device)
    machine = describe_machine() | {"load_average_before": list(os.getloadavg())}
    make_rig = CpuRig if device == "cpu" else _make_gpu_rig
    name = f"{machine['cpu']}, {machine['cores']} cores" if device == "cpu" else _gpu_name()
    report = measure(options, make_rig, name, print)
    report.machine.update(machine)
    write_report(report, render_table(report), arguments, draw_plot)
    return 0


def measure(
    options: TransferOptions, make_rig: MakeRig, device: str, say: Callable[[str], None]
) -> TransferReport:
    """Time every size in every way.

    Args:
        options: what to measure.
        make_rig: makes the memory and the backend for one size.
        device: what the figures are of, for people.
        say: takes one line of progress.

    Raises:
        SafeOffloadError: a copy failed or brought other bytes.
    """
    measurements: list[Measurement] = []
    missing: dict[str, str] = {}
    clock = ""
    for index, case in enumerate(options.cases):
        say(f"{index + 1} of {len(options.cases)}: {format_bytes(case.size_bytes)}")
        with closing(make_rig(case)) as rig:
            rig.check()
            for traffic in case.traffics:
                seconds = time_in_turn(rig.ways(traffic), options.rounds)
                measurements.append(Measurement(case, traffic, seconds))
            missing |= {way.value: reason for way, reason in rig.missing.items()}
            clock = rig.clock
    say("latencies")
    latencies = _measure_latencies(options, make_rig)
    recorded = {
        "rounds": options.rounds,
        "max_bytes": options.size_bytes_max,
        "num_cases": len(options.cases),
    }
    return TransferReport(device, clock, measurements, latencies, missing, {}, recorded)


def time_in_turn(ways: dict[Way, TimedCopy], rounds: int) -> dict[Way, list[float]]:
    """Time every way once in each round, the first to go another one each time.

    So a slow drift of the machine's speed, and what a way leaves in the caches, hits all alike.
    """
    warm_up_s = sum(timed() for timed in ways.values())
    wanted = int(CASE_S_MIN / max(warm_up_s, 1e-9))
    seconds: dict[Way, list[float]] = {way: [] for way in ways}
    order = list(ways)
    for _ in range(min(max(rounds, wanted), rounds * ROUNDS_FACTOR)):
        for way in order:
            seconds[way].append(ways[way]())
        order.append(order.pop(0))
    return seconds


def _measure_latencies(options: TransferOptions, make_rig: MakeRig) -> list[Latency]:
    latencies: list[Latency] = []
    rounds = options.rounds * ROUNDS_FACTOR
    with closing(make_rig(latency.case_of_many(options.size_bytes_max))) as rig:
        rig.check()
        latencies += latency.measure_submits(rig, options.rounds)
    with closing(make_rig(latency.case_of_one())) as rig:
        rig.check()
        latencies += latency.measure_awaits(rig, rounds)
    with closing(make_rig(latency.case_of_fence(options.size_bytes_max))) as rig:
        if isinstance(rig, GpuRig):
            rig.check()
            latencies += latency.measure_fence(rig, options.rounds)
    return latencies


def _read_options(arguments: argparse.Namespace, device: str) -> TransferOptions:
    is_quick = arguments.quick
    sizes = (
        arguments.range_bytes or (grid.QUICK_RANGE_BYTES if is_quick else grid.RANGE_BYTES),
        arguments.blocks or (grid.QUICK_NUM_BLOCKS if is_quick else grid.NUM_BLOCKS),
        arguments.layers or (grid.QUICK_NUM_LAYERS if is_quick else grid.NUM_LAYERS),
    )
    if arguments.rounds < 1 or any(number < 1 for numbers in sizes for number in numbers):
        raise ConfigError("--rounds, --range-bytes, --blocks, --layers: expected at least 1")
    if any(number % RANGE_STEP_BYTES for number in sizes[0]):
        raise ConfigError(f"--range-bytes: expected multiples of {RANGE_STEP_BYTES}")
    size_bytes_max = arguments.max_bytes or SIZE_BYTES_MAX[device]
    cases = select_cases(sizes, size_bytes_max=size_bytes_max, is_contiguous=arguments.contiguous)
    if not cases:
        raise ConfigError(
            f"--max-bytes {size_bytes_max}: no size of copy is that small; fix: a larger value"
        )
    largest_bytes = max(case.size_bytes for case in cases)
    available_bytes = available_host_bytes()
    if largest_bytes * NUM_COPIES_IN_MEMORY > available_bytes:
        raise ConfigError(
            f"--max-bytes: copies of {format_bytes(largest_bytes)} take "
            f"{format_bytes(largest_bytes * NUM_COPIES_IN_MEMORY)} of host memory, "
            f"{format_bytes(available_bytes)} are available; "
            f"fix: --max-bytes {available_bytes // NUM_COPIES_IN_MEMORY}"
        )
    return TransferOptions(tuple(cases), arguments.rounds, size_bytes_max)


def _make_gpu_rig(case: Case) -> Rig:
    device = torch.device("cuda", torch.cuda.current_device())
    try:
        storage = torch.empty(case.size_bytes, dtype=torch.uint8, device=device)
    except torch.cuda.OutOfMemoryError as error:
        raise ConfigError(f"{case}: {error}. Fix: a smaller --max-bytes") from error
    return GpuRig(case, storage, Device(device), CudaStopwatch())


def _gpu_name() -> str:
    name = torch.cuda.get_device_name()
    if torch.version.hip:
        return f"{name}, HIP {torch.version.hip}"
    version = torch._C._cuda_getDriverVersion()
    driver = f"{version // 1000}.{version % 1000 // 10}"
    return f"{name}, driver for CUDA {driver}, torch for CUDA {torch.version.cuda}"
