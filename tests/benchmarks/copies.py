"""Rate of the copies between KV cache and host memory, against what the hardware gives.

Every size of copy is timed in the same rounds by our backend, as one contiguous copy of the same
bytes, by one call for each range, and on a GPU by vLLM's own copies. Beside that, what a copy costs
apart from its bytes: submission, descriptors, the report of its end; on a GPU, a fence on a store
in progress, and a load beside a forward.
"""

import argparse
import asyncio
import functools
import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from typing import Any

import torch

from safe_offload.commands.bench.report import Report, add_output_arguments, publish
from safe_offload.config.units import format_bytes
from safe_offload.errors import ConfigError
from safe_offload.event_loop import new_event_loop
from safe_offload.worker.copies.base import Copy, CopyPath, Direction
from safe_offload.worker.copies.ranges import Runs
from safe_offload.worker.memory.host_memory import available_host_bytes
from tests.benchmarks.copy_rigs import (
    LIMIT,
    OURS,
    PATIENCE_S,
    Case,
    CpuRig,
    Give,
    GpuRig,
    Rig,
    TimedCopy,
    Traffic,
    make_gpu_rig,
)
from tests.benchmarks.report import describe_machine, table

KIB, MIB = 1 << 10, 1 << 20
Sizes = tuple[Sequence[int], Sequence[int], Sequence[int]]
"""Bytes of one block in one layer, blocks, layers."""
USUAL_SIZES: Sizes = (
    (4 * KIB, 16 * KIB, 64 * KIB, 256 * KIB, 1 * MIB, 4 * MIB),
    (1, 64, 1000, 4096),
    (1, 32, 80),
)
QUICK_SIZES: Sizes = ((4 * KIB, 64 * KIB, 1 * MIB), (1, 64), (1, 32))
SIZE_BYTES_MAX = {"cpu": 512 << 20, "cuda": 4 << 30}
CASE_S_MIN, ROUNDS_FACTOR = 0.2, 10
"""Short copies get more rounds, up to this much time, or this many times as many."""
NUM_COPIES_IN_MEMORY = 4  # KV cache, host pool, and what the check of the bytes takes
VLLM_BATCH, VLLM_KERNEL = "vLLM batch", "vLLM kernel"
SMALL = Case(4 * KIB, 1, 1)
MANY_BLOCKS, MANY_LAYERS, WORD_BYTES = 1000, 32, 16
FENCED_BYTES = 64 << 20
BESIDE_RANGES, BESIDE_LAYERS, BESIDE_BYTES = (16 * KIB, 64 * KIB), 8, 256 << 20


@dataclass(frozen=True, slots=True)
class CopyOptions:
    """What to measure, and on what."""

    cases: tuple[Case, ...]
    rounds: int
    size_bytes_max: int
    make_rig: Callable[[Case], Rig]
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
            "share_of_limit": {way: self.share(way) for way in self.seconds},
            "seconds": self.seconds,
        }


Latencies = dict[str, list[float]]
"""Microseconds, by what was timed."""


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
    """Run `python -m tests.benchmarks copies`."""
    machine = describe_machine()
    options = read_options(arguments)
    ways_of_vllm = VllmWays()
    measurements = measure(options, print, ways_of_vllm)
    latencies = measure_latencies(options)
    report = make_report(options, measurements, latencies, ways_of_vllm.missing, machine)
    publish(report, arguments)
    return 0


def read_options(arguments: argparse.Namespace) -> CopyOptions:
    device = arguments.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda: torch sees no GPU. Fix: run it on a machine with one")
    usual = QUICK_SIZES if arguments.quick else USUAL_SIZES
    chosen = (arguments.range_bytes, arguments.blocks, arguments.layers)
    sizes = (one or usually for one, usually in zip(chosen, usual, strict=True))
    size_bytes_max = arguments.max_bytes or SIZE_BYTES_MAX[device]
    cases = [case for numbers in itertools.product(*sizes)
             if (case := Case(*numbers)).size_bytes <= size_bytes_max]  # fmt: skip
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
    make_rig = make_gpu_rig if device == "cuda" else CpuRig
    name = torch.cuda.get_device_name() if device == "cuda" else str(describe_machine()["cpu"])
    return CopyOptions(tuple(cases), arguments.rounds, size_bytes_max, make_rig, name)


# ---- rates -------------------------------------------------------------------------------------


def measure(
    options: CopyOptions,
    say: Callable[[str], None],
    more_ways: Callable[[Rig, Traffic], dict[str, TimedCopy]],
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


class VllmWays:
    """vLLM's copies over the memory of a rig, on a GPU."""

    def __init__(self) -> None:
        self.missing: dict[str, str] = {}  # ways that do not work here, and why

    def __call__(self, rig: Rig, traffic: Traffic) -> dict[str, TimedCopy]:
        """Return those that work; each is tried once, as there are many reasons not to."""
        if not isinstance(rig, GpuRig):
            return {}
        ways: dict[str, TimedCopy] = {}
        copies = rig.case.make_copies(traffic)
        for way, make in ((VLLM_BATCH, _batches), (VLLM_KERNEL, _kernels)):
            try:
                gives = make(rig, copies)
                if gives:
                    rig.time(gives)
                    ways[way] = functools.partial(rig.time, gives)
            except Exception as error:
                self.missing[way] = f"{type(error).__name__}: {error}"
        return ways


def _batches(rig: GpuRig, copies: Sequence[Copy]) -> dict[Direction, Give]:
    from tests.benchmarks import vllm_copies

    shape = (rig.case.num_layers, rig.case.num_blocks, rig.case.range_bytes)
    sides = (rig.storage, rig.host.tensor)
    caches, hosts = (list(side[: rig.case.size_bytes].view(shape)) for side in sides)
    return {
        copy.direction: vllm_copies.batched_call(copy, (caches, hosts), rig.streams[copy.direction])
        for copy in copies
    }


def _kernels(rig: GpuRig, copies: Sequence[Copy]) -> dict[Direction, Give]:
    from tests.benchmarks import vllm_copies

    if [copy.direction for copy in copies] != [Direction.LOAD]:
        return {}
    if not vllm_copies.has_kernel_for(rig.case.range_bytes, Direction.LOAD):
        return {}
    (copy,) = copies
    # A range for each block of each layer, as vLLM has them, neighbours or not.
    blocks, slots = (ids.astype("uint64") for ids in (copy.block_ids, copy.slot_ids))
    ranges = rig.table.ranges(Runs(copy.direction, blocks, slots, None))
    return {Direction.LOAD: vllm_copies.kernel_launch(ranges, rig.streams[Direction.LOAD])}


# ---- latencies ---------------------------------------------------------------------------------


def measure_latencies(options: CopyOptions) -> Latencies:
    """Time what a copy costs apart from its bytes."""
    num_ranges, rounds = MANY_BLOCKS * MANY_LAYERS, options.rounds
    many_bytes = min(SMALL.range_bytes, _words(options.size_bytes_max // num_ranges))
    fenced_bytes = _words(min(FENCED_BYTES, options.size_bytes_max) // 8)
    latencies: Latencies = {}
    with closing(options.make_rig(Case(many_bytes, MANY_BLOCKS, MANY_LAYERS))) as rig:
        rig.check()
        (store,) = rig.case.make_copies(Traffic.STORE)
        submits = [_time_issue(rig, store) for _ in range(rounds)]
        latencies[f"submit {num_ranges:,} ranges, caller's thread"] = [us for us, _ in submits]
        if isinstance(rig, GpuRig):
            latencies["until the driver has them"] = [us for _, us in submits]
        describe = functools.partial(_describe, rig, store)
        latencies["descriptors of these (target: 20 us)"] = [
            _time_us(describe) for _ in range(rounds)
        ]
    with (
        closing(options.make_rig(SMALL)) as rig,
        asyncio.Runner(loop_factory=new_event_loop) as runner,
    ):
        rig.check()
        (store,) = rig.case.make_copies(Traffic.STORE)
        latencies["copy of 4 KiB, issue() until awaited"] = [
            runner.run(_issue_and_wait(rig, store)) for _ in range(rounds * ROUNDS_FACTOR)
        ]
    with closing(options.make_rig(Case(fenced_bytes, 1, 8))) as rig:
        if isinstance(rig, GpuRig):
            rig.check()
            latencies |= measure_fence(rig, rounds)
    for range_bytes in () if options.make_rig is CpuRig else BESIDE_RANGES:
        size_bytes = min(BESIDE_BYTES, options.size_bytes_max)
        num_blocks = max(1, size_bytes // (range_bytes * BESIDE_LAYERS))
        with closing(options.make_rig(Case(range_bytes, num_blocks, BESIDE_LAYERS))) as rig:
            assert isinstance(rig, GpuRig)
            rig.check()
            latencies |= measure_forward(rig, rounds)
    return latencies


def measure_fence(rig: GpuRig, rounds: int) -> Latencies:
    """Time the fence on a store in progress, and what it replaces: the host waiting for it."""
    (copy,) = rig.case.make_copies(Traffic.STORE)
    size = f"a store of {rig.case.size_bytes >> 20} MiB in progress"
    calls, stalls, waits = f"fence on {size}, engine's thread", "compute stream", "host waits"
    found: Latencies = {calls: [], stalls: [], waits: []}
    for _ in range(rounds):
        completion = rig.backend.issue(copy, rig.backend.mark())
        rig.start_clock()
        found[calls].append(_time_us(lambda it=completion: rig.backend.fence(it, PATIENCE_S)))  # type: ignore[misc]
        found[stalls].append(rig.stop_clock() * 1e6)
        completion.future.result(PATIENCE_S)
        completion = rig.backend.issue(copy, rig.backend.mark())
        completion.given.wait(PATIENCE_S)
        found[waits].append(_time_us(completion.event.synchronize))
        completion.future.result(PATIENCE_S)
    return found


def measure_forward(rig: GpuRig, rounds: int) -> Latencies:
    """Time a forward alone and beside a load by each path, and these loads.

    They say by which path a load should go while others compute: the copy engines, if the forward
    times the requests that wait for it loses more by the kernel than the load gains.
    """
    (load,) = rig.case.make_copies(Traffic.LOAD)
    size = f"{rig.case.size_bytes >> 20} MiB in ranges of {_size(rig.case.range_bytes)}"
    paths = [path for path in (CopyPath.KERNEL, CopyPath.BATCH) if path in rig.backend.paths]
    alone = f"forward without the load of {size}"
    names = {path: (f"beside it by {path.value}, {size}", f"load by {path.value}, {size}")
             for path in paths}  # fmt: skip
    found: Latencies = {name: [] for name in (alone, *itertools.chain(*names.values()))}
    rig.forward()  # the first chooses its kernels
    for _ in range(rounds):
        rig.start_clock()
        rig.forward()
        found[alone].append(rig.stop_clock() * 1e6)
        for path, (beside, loading) in names.items():
            rig.backend.use((path,))
            start_s = time.perf_counter()
            completion = rig.backend.issue(load, rig.backend.mark())
            rig.start_clock()
            rig.forward()
            completion.future.result(PATIENCE_S)
            assert completion.path is path, "another path was timed"
            found[loading].append((time.perf_counter() - start_s) * 1e6)
            found[beside].append(rig.stop_clock() * 1e6)
    return found


def _words(size_bytes: int) -> int:
    return max(WORD_BYTES, size_bytes // WORD_BYTES * WORD_BYTES)


def _describe(rig: Rig, copy: Copy) -> object:
    return rig.table.ranges(rig.table.runs(copy))


async def _issue_and_wait(rig: Rig, copy: Copy) -> float:
    start_s = time.perf_counter()
    await rig.backend.issue(copy, rig.backend.mark()).wait()
    return (time.perf_counter() - start_s) * 1e6


def _time_issue(rig: Rig, copy: Copy) -> tuple[float, float]:
    """Return the time of `issue`, and on a GPU the time until the driver has the copy."""
    mark, start_s = rig.backend.mark(), time.perf_counter()
    completion = rig.backend.issue(copy, mark)
    issued_s = time.perf_counter()
    if isinstance(rig, GpuRig):
        completion.given.wait(PATIENCE_S)
    given_s = time.perf_counter()
    completion.future.result(PATIENCE_S)
    return (issued_s - start_s) * 1e6, (given_s - start_s) * 1e6


def _time_us(work: Callable[[], object]) -> float:
    start_s = time.perf_counter()
    work()
    return (time.perf_counter() - start_s) * 1e6


# ---- the report --------------------------------------------------------------------------------


def make_report(
    options: CopyOptions,
    measurements: list[Measurement],
    latencies: Latencies,
    missing: dict[str, str],
    machine: dict[str, Any],
) -> Report:
    """Return the report; `missing`: ways that do not work here, with the reason."""
    found = dict.fromkeys(way for one in measurements for way in one.seconds)
    ways = [way for way in found if way != LIMIT]
    head = ["range", "blocks", "layers", "bytes", "", "limit", OURS, *(f"{w}/limit" for w in ways)]
    rows = [_row(measurement, ways) for measurement in measurements]
    times = [["us", "median", "lowest", "highest"]]
    for name, samples in latencies.items():
        figures = (statistics.median(samples), min(samples), max(samples))
        times.append([name, *(f"{figure:.1f}" for figure in figures)])
    return Report(
        method=_describe_method(options, measurements),
        sections=[
            table([head, *rows], num_left=0),
            table(times),
            "\n".join(f"not measured: {name} ({reason})" for name, reason in missing.items()),
        ],
        figures={
            "device": options.device,
            "measurements": [one.to_json() for one in measurements],
            "latencies_us": latencies,
            "missing": missing,
        },
        options={"rounds": options.rounds, "max_bytes": options.size_bytes_max},
        machine=machine,
    )


def _row(measurement: Measurement, ways: list[str]) -> list[str]:
    case = measurement.case
    shares = (measurement.share(way) for way in ways)
    return [
        _size(case.range_bytes),
        f"{case.num_blocks:,}",
        f"{case.num_layers:,}",
        _size(measurement.size_bytes),
        measurement.traffic.value,
        f"{measurement.rate_gbps(LIMIT):.1f} GB/s",
        f"{measurement.rate_gbps(OURS):.1f} GB/s",
        *("-" if share is None else f"{share:.2f}" for share in shares),
    ]


def _describe_method(options: CopyOptions, measurements: list[Measurement]) -> str:
    rounds = [len(measurement.seconds[LIMIT]) for measurement in measurements]
    clock = CpuRig.clock if options.make_rig is CpuRig else GpuRig.clock
    return (
        f"Device: {options.device}.\n"
        "Each copy: all blocks of a KV cache, in random order on both sides, to or from a host pool"
        f" as large. The bytes were checked.\nTime: {clock}.\n"
        f"{min(rounds)} to {max(rounds)} rounds after a warm-up, every way once in each,"
        " the order rotating.\nRates are of the median time; a ratio is the median of the rounds'"
        " own ratios.\n"
        f"Limit: the same bytes, of the same memory, in {LIMIT}, by one thread or"
        " stream for each direction.\nLoop: one call for each range. Both: half of the blocks"
        " stored while the others are loaded."
    )


def _size(size_bytes: int) -> str:
    is_large = size_bytes >= MIB
    return f"{size_bytes / MIB:.4g} MiB" if is_large else f"{size_bytes / KIB:.4g} KiB"
