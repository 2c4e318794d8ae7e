"""`transfer`, with vLLM's own copies and what a copy costs beside its bytes.

The latter is the time of submitting, of describing the ranges, and of being told of the end; on a
GPU, of a fence on a store under way.
"""

import argparse
import asyncio
import functools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

from safe_offload.commands.bench.report import Report, describe_machine, publish, table
from safe_offload.event_loop import new_event_loop
from safe_offload.worker.copies.base import Copy, Direction
from safe_offload.worker.copies.lane import GpuCompletion
from safe_offload.worker.copies.ranges import Runs
from tests.benchmarks import transfer
from tests.benchmarks.transfer import (
    LARGE_BYTES,
    ROUNDS_FACTOR,
    Measurement,
    TransferOptions,
    compared_ways,
    format_size,
    make_report,
    measure,
    shares_by_range,
)
from tests.benchmarks.transfer_cases import Case, Traffic
from tests.benchmarks.transfer_rigs import PATIENCE_S, Give, GpuRig, Rig, TimedCopy

VLLM_BATCH, VLLM_KERNEL = "vLLM batch", "vLLM kernel"
WORD_BYTES = 16
MANY_RANGE_BYTES = 4096
NUM_BLOCKS, NUM_LAYERS = 1000, 32
FENCED_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class Latency:
    """Samples of something short."""

    name: str
    what: str
    samples_us: tuple[float, ...]

    @property
    def median_us(self) -> float:
        return statistics.median(self.samples_us)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    transfer.add_arguments(parser)


def run_command(arguments: argparse.Namespace) -> int:
    """Run `python -m tests.benchmarks copies`."""
    machine = describe_machine()
    options = transfer.read_options(arguments)
    ways_of_vllm = VllmWays()
    measurements = measure(options, print, ways_of_vllm)
    print("latencies")
    report = make_report(options, measurements, machine)
    publish(with_more(report, measure_latencies(options), ways_of_vllm.missing), arguments)
    return 0


def with_more(report: Report, latencies: Sequence[Latency], missing: dict[str, str]) -> Report:
    """Return the report of `transfer` with latencies, and the ways that do not work."""
    lines = [f"not measured: {name} ({reason})" for name, reason in missing.items()]
    more = {
        "latencies": [asdict(one) | {"median_us": one.median_us} for one in latencies],
        "missing": missing,
    }
    return replace(
        report,
        sections=[*report.sections, _latency_table(latencies), "\n".join(lines)],
        figures=report.figures | more,
    )


def _latency_table(latencies: Sequence[Latency]) -> str:
    rows = [["", "median", "lowest", "highest"]]
    for one in latencies:
        figures = (one.median_us, min(one.samples_us), max(one.samples_us))
        rows.append([one.name, *(f"{figure:.1f} us" for figure in figures)])
    whats = ["", *(one.what for one in latencies)]
    lines = zip(table(rows).splitlines(), whats, strict=True)
    return "\n".join(f"{line}  {what}".rstrip() for line, what in lines)


# ---- vLLM's copies -----------------------------------------------------------------------------


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


def case_of_many(size_bytes_max: int) -> Case:
    """Return 1,000 scattered blocks of 32 layers, ranges of 4 KiB if they fit."""
    fitting = size_bytes_max // (NUM_BLOCKS * NUM_LAYERS) // WORD_BYTES * WORD_BYTES
    return Case(min(MANY_RANGE_BYTES, max(WORD_BYTES, fitting)), NUM_BLOCKS, NUM_LAYERS)


def case_of_fence(size_bytes_max: int) -> Case:
    """Return a store that takes long enough to be waited for."""
    layer_bytes = min(FENCED_BYTES, size_bytes_max) // 8
    return Case(max(WORD_BYTES, layer_bytes // WORD_BYTES * WORD_BYTES), 1, 8)


def measure_latencies(options: TransferOptions) -> list[Latency]:
    """Time what a copy costs beside its bytes."""
    latencies: list[Latency] = []
    with closing(options.make_rig(case_of_many(options.size_bytes_max))) as rig:
        rig.check()
        latencies += measure_submits(rig, options.rounds)
        if isinstance(rig, GpuRig):
            latencies += measure_queue(rig, options.rounds)
    with closing(options.make_rig(Case(MANY_RANGE_BYTES, 1, 1))) as rig:
        rig.check()
        latencies += measure_awaits(rig, options.rounds * ROUNDS_FACTOR)
    with closing(options.make_rig(case_of_fence(options.size_bytes_max))) as rig:
        if isinstance(rig, GpuRig):
            rig.check()
            latencies += measure_fence(rig, options.rounds)
    return latencies


def measure_submits(rig: Rig, rounds: int) -> list[Latency]:
    """Time `issue` on the caller's thread, and the descriptors alone."""
    what = f"{rig.case.num_blocks:,} scattered blocks x {rig.case.num_layers} layers"
    latencies = []
    for traffic in (Traffic.STORE, Traffic.LOAD):
        (copy,) = rig.case.make_copies(traffic)
        samples = tuple(_time_issue(rig, copy) for _ in range(rounds))
        latencies.append(Latency(f"submit a {traffic.value}", f"issue() of {what}", samples))
    (copy,) = rig.case.make_copies(Traffic.STORE)
    samples = tuple(_time_us(lambda: rig.table.ranges(rig.table.runs(copy))) for _ in range(rounds))
    return [*latencies, Latency("descriptors", f"RangeTable of {what}; aim: 20 us", samples)]


def measure_queue(rig: GpuRig, rounds: int) -> list[Latency]:
    """Time what comes right behind a store that the driver takes long for."""
    (store,) = rig.case.make_copies(Traffic.STORE)
    small = {way: Copy(way, store.block_ids[:1], store.slot_ids[:1]) for way in Direction}
    given, fences, loads = [], [], []
    for _ in range(rounds):
        with _behind(rig, store) as first:
            given.append(_time_us(functools.partial(first.given.wait, PATIENCE_S)))
        with _behind(rig, store):
            second = rig.backend.issue(small[Direction.STORE], rig.backend.mark())
            fences.append(_time_us(functools.partial(rig.backend.fence, second, PATIENCE_S)))
        with _behind(rig, store):
            load = rig.backend.issue(small[Direction.LOAD], rig.backend.mark())
            loads.append(_time_us(functools.partial(load.future.result, PATIENCE_S)))
    behind = f"of one block, behind a store of {rig.case.num_blocks:,} blocks"
    return [
        Latency("store given", "issue() until the driver has all of the store", tuple(given)),
        Latency("fence behind it", f"fence() of a store {behind}", tuple(fences)),
        Latency("load behind it", f"issue() until the end of a load {behind}", tuple(loads)),
    ]


@contextmanager
def _behind(rig: GpuRig, store: Copy) -> Iterator[GpuCompletion]:
    """Issue a store; wait for its end when what comes behind it has been timed."""
    first = rig.backend.issue(store, rig.backend.mark())
    yield first
    first.future.result(PATIENCE_S)


def measure_awaits(rig: Rig, rounds: int) -> list[Latency]:
    """Time a tiny copy from `issue` to awaited, and from its end to awaited."""
    (copy,) = rig.case.make_copies(Traffic.STORE)
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        pairs = [runner.run(_issue_and_wait(rig, copy)) for _ in range(rounds)]
    whole, after = zip(*pairs, strict=True)
    size = f"a copy of {rig.case.size_bytes} bytes"
    return [
        Latency("issue to awaited", f"{size}: issue() until await wait() has returned", whole),
        Latency(
            "done to awaited",
            f"{size}: its thread has said done until await wait() has returned",
            after,
        ),
    ]


def measure_fence(rig: GpuRig, rounds: int) -> list[Latency]:
    """Time the fence on a store under way, and what it replaces: the host waiting for it."""
    (copy,) = rig.case.make_copies(Traffic.STORE)
    calls, stalls, waits = [], [], []
    for _ in range(rounds):
        completion = rig.backend.issue(copy, rig.backend.mark())
        rig.start_clock()
        calls.append(_time_us(functools.partial(rig.backend.fence, completion, PATIENCE_S)))
        stalls.append(rig.stop_clock() * 1e6)
        completion.future.result(PATIENCE_S)
        completion = rig.backend.issue(copy, rig.backend.mark())
        completion.given.wait(PATIENCE_S)
        waits.append(_time_us(completion.event.synchronize))
        completion.future.result(PATIENCE_S)
    size = f"a store of {rig.case.size_bytes >> 20} MiB under way"
    return [
        Latency("fence, host", f"{size}: fence() on the engine's thread", tuple(calls)),
        Latency("fence, device", f"{size}: the compute stream waits", tuple(stalls)),
        Latency("host wait", f"{size}: event.synchronize() instead", tuple(waits)),
    ]


async def _issue_and_wait(rig: Rig, copy: Copy) -> tuple[float, float]:
    """Return microseconds from issue, and from the end of the copy, to awaited."""
    ends_s: list[float] = []

    def note_end(_future: Future[None]) -> None:  # on the thread that sets it, before the loop
        ends_s.append(time.perf_counter())

    start_s = time.perf_counter()
    completion = rig.backend.issue(copy, rig.backend.mark())
    completion.future.add_done_callback(note_end)
    await completion.wait()
    awaited_s = time.perf_counter()
    return (awaited_s - start_s) * 1e6, (awaited_s - ends_s[0]) * 1e6


def _time_issue(rig: Rig, copy: Copy) -> float:
    issued: list[Any] = []
    mark = rig.backend.mark()
    elapsed_us = _time_us(lambda: issued.append(rig.backend.issue(copy, mark)))
    issued[0].future.result(PATIENCE_S)
    return elapsed_us


def _time_us(work: Callable[[], object]) -> float:
    start_s = time.perf_counter()
    work()
    return (time.perf_counter() - start_s) * 1e6
