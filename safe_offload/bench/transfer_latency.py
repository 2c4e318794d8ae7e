"""What a copy costs the host beside its bytes: submitting, describing, being told of the end."""

import asyncio
import functools
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from safe_offload.bench.transfer_grid import Case, Traffic
from safe_offload.bench.transfer_report import Latency
from safe_offload.bench.transfer_rigs import PATIENCE_S, GpuRig, Rig, make_copies
from safe_offload.worker.backends.base import Copy
from safe_offload.worker.loop_thread import new_event_loop

WORD_BYTES = 16
MANY_RANGE_BYTES = 4096
NUM_BLOCKS, NUM_LAYERS = 1000, 32
FENCED_BYTES = 64 << 20


def case_of_many(size_bytes_max: int) -> Case:
    """Return 1,000 scattered blocks of 32 layers, ranges of 4 KiB if they fit."""
    fitting = size_bytes_max // (NUM_BLOCKS * NUM_LAYERS) // WORD_BYTES * WORD_BYTES
    return Case(min(MANY_RANGE_BYTES, max(WORD_BYTES, fitting)), NUM_BLOCKS, NUM_LAYERS)


def case_of_one() -> Case:
    """Return the smallest copy: one block of one layer."""
    return Case(MANY_RANGE_BYTES, 1, 1)


def case_of_fence(size_bytes_max: int) -> Case:
    """Return a store that takes long enough to be waited for."""
    layer_bytes = min(FENCED_BYTES, size_bytes_max) // 8
    return Case(max(WORD_BYTES, layer_bytes // WORD_BYTES * WORD_BYTES), 1, 8)


def measure_submits(rig: Rig, rounds: int) -> list[Latency]:
    """Time `issue` on the caller's thread, and the descriptors alone."""
    what = f"{rig.case.num_blocks:,} scattered blocks x {rig.case.num_layers} layers"
    latencies = []
    for traffic in (Traffic.STORE, Traffic.LOAD):
        (copy,) = make_copies(rig.case, traffic)
        samples = tuple(_time_issue(rig, copy) for _ in range(rounds))
        latencies.append(Latency(f"submit a {traffic.value}", f"issue() of {what}", samples))
    (copy,) = make_copies(rig.case, Traffic.STORE)
    samples = tuple(_time_us(lambda: rig.table.ranges(rig.table.runs(copy))) for _ in range(rounds))
    return [*latencies, Latency("descriptors", f"RangeTable of {what}; aim: 20 us", samples)]


def measure_awaits(rig: Rig, rounds: int) -> list[Latency]:
    """Time a tiny copy from `issue` to awaited, and from its end to awaited."""
    (copy,) = make_copies(rig.case, Traffic.STORE)
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        pairs = [runner.run(_issue_and_wait(rig, copy)) for _ in range(rounds)]
    whole, behind = zip(*pairs, strict=True)
    size = f"a copy of {rig.case.size_bytes} bytes"
    return [
        Latency("issue to awaited", f"{size}: issue() until await wait() has returned", whole),
        Latency(
            "done to awaited",
            f"{size}: its thread has said done until await wait() has returned",
            behind,
        ),
    ]


def measure_fence(rig: GpuRig, rounds: int) -> list[Latency]:
    """Time the fence on a store under way, and what it replaces: the host waiting for it."""
    (copy,) = make_copies(rig.case, Traffic.STORE)
    compute = rig.device.compute_stream()
    calls, stalls, waits = [], [], []
    for _ in range(rounds):
        completion = rig.backend.issue(copy, rig.backend.mark())
        rig.stopwatch.start(compute)
        calls.append(_time_us(functools.partial(rig.backend.fence, completion, PATIENCE_S)))
        rig.stopwatch.stop(compute)
        stalls.append(rig.stopwatch.elapsed_s() * 1e6)
        completion.future.result(PATIENCE_S)
        completion = rig.backend.issue(copy, rig.backend.mark())
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

    def note_end(_future: Future[None]) -> None:  # in the thread that says it, ahead of the loop
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
