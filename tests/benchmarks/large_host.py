"""A host of millions of slots: seconds of start, bytes of Python a slot, and what a step costs.

vLLM's real scheduler serves prompts that never come back, with our real scheduler side and without
workers: no host memory is touched. The host is filled, and then filled again by evicting. Times are
CPU time of the thread, so that others on the machine count less; the garbage collector runs, and
what was there at the start is frozen, as vLLM does (0.32.0, utils/gc_utils.py).
"""

import argparse
import gc
import os
import statistics
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from safe_offload.commands.bench.report import (
    Report,
    add_output_arguments,
    describe_machine,
    publish,
    table,
)
from tests.benchmarks.scheduler_engine import Sizes, make_engine
from tests.benchmarks.scheduler_probe import Hook, wrap_hooks
from tests.benchmarks.scheduler_traces import BLOCK_TOKENS, MAX_BATCHED_TOKENS, PLAIN, VOCABULARY
from tests.simulator.peers import PeerEngine

POOL_PROMPTS = 4
COPY_STEPS = 1
NUM_PARTS = 5
PROMPT_BLOCKS = MAX_BATCHED_TOKENS // BLOCK_TOKENS
"""A step computes one prompt, stores it, and evicts as much."""


@dataclass(frozen=True, slots=True)
class Part:
    """Some steps."""

    what: str
    num_steps: int
    median_ms: float  # of all hooks in a step
    p99_ms: float
    worst_ms: float


@dataclass(frozen=True, slots=True)
class LargeHost:
    """What was found with one number of slots."""

    num_slots: int
    start_s: float  # until the first request was answered
    bytes_per_slot: float  # by which the process has grown since before the start, when all is full
    bytes_per_hash: int  # of these, what the hash itself takes
    parts: list[Part]


class StepTimer:
    """CPU time of all hooks together, by step."""

    def __init__(self) -> None:
        self.steps_ns: list[int] = []
        self._step_ns = 0

    def wrap(self, name: str, hook: Hook) -> Hook:
        """Return the hook with a clock around it."""
        clock = time.thread_time_ns

        def timed(*args: Any, **kwargs: Any) -> Any:
            start_ns = clock()
            try:
                return hook(*args, **kwargs)
            finally:
                self._step_ns += clock() - start_ns

        return timed

    def end_step(self) -> None:
        self.steps_ns.append(self._step_ns)
        self._step_ns = 0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--slots", nargs="+", type=int, default=[100_000, 4_000_000], help="(%(default)s)")
    add("--connector", default="ours-eager", choices=("ours-eager", "ours-lazy", "simple-eager"))
    add_output_arguments(parser)


def run_command(arguments: argparse.Namespace) -> int:
    """Run `python -m tests.benchmarks large_host`."""
    found = [measure(arguments.connector, num_slots) for num_slots in arguments.slots]
    options = {"slots": arguments.slots, "connector": arguments.connector}
    publish(make_report(found, describe_machine(), options), arguments)
    return 0


def measure(connector: str, num_slots: int) -> LargeHost:
    """Start, fill the host, and fill it again."""
    gc.collect()
    size_bytes, start_s = _resident_bytes(), time.thread_time()
    pool = Sizes(PLAIN, POOL_PROMPTS * PROMPT_BLOCKS, num_slots, max_seqs=POOL_PROMPTS)
    engine = make_engine(connector, pool, COPY_STEPS)
    _serve(engine, 0)
    start_s = time.thread_time() - start_s
    gc.collect()
    gc.freeze()
    timer = StepTimer()
    wrap_hooks(engine.connector, timer.wrap)
    num_prompts = -(-num_slots // PROMPT_BLOCKS)
    parts = []
    for what in ("filling", "evicting"):
        for part in range(NUM_PARTS):
            timer.steps_ns.clear()
            first, end = (num_prompts * n // NUM_PARTS for n in (part, part + 1))
            for index in range(first, end):
                _serve(engine, (what == "evicting") * num_prompts + index + 1, timer)
            share = f"{what}, {100 * part // NUM_PARTS} to {100 * (part + 1) // NUM_PARTS} %"
            parts.append(_part(share, timer.steps_ns))
    gc.collect()
    grown = _resident_bytes() - size_bytes
    gc.unfreeze()
    block_hash = bytes(32)
    per_hash = -(-sys.getsizeof(block_hash) // 16) * 16  # Python's allocator rounds up
    return LargeHost(num_slots, start_s, grown / num_slots, per_hash, parts)


def _serve(engine: PeerEngine, index: int, timer: StepTimer | None = None) -> None:
    """Answer one prompt that was never there before."""
    name = f"r{index}"
    differs = (index % VOCABULARY, index // VOCABULARY % VOCABULARY)
    engine.add(name, (*differs, *[1] * (MAX_BATCHED_TOKENS - 2)), 1)
    while engine.has_work:
        engine.step()
        if timer is not None:
            timer.end_step()
    del engine.answers[name]


def _part(what: str, steps_ns: list[int]) -> Part:
    steps_ms = sorted(step_ns / 1e6 for step_ns in steps_ns)
    p99_ms = steps_ms[len(steps_ms) * 99 // 100]
    return Part(what, len(steps_ms), statistics.median(steps_ms), p99_ms, steps_ms[-1])


def _resident_bytes() -> int:
    num_pages = int(Path("/proc/self/statm").read_text().split()[1])
    return num_pages * os.sysconf("SC_PAGESIZE")


def make_report(found: list[LargeHost], machine: dict[str, Any], options: dict[str, Any]) -> Report:
    """Return the tables, and the figures as JSON."""
    sections = []
    head = ["hooks of a step, ms", "steps", "median", "99 %", "worst"]
    for one in found:
        rows = [
            [p.what, str(p.num_steps), *(f"{ms:.2f}" for ms in (p.median_ms, p.p99_ms, p.worst_ms))]
            for p in one.parts
        ]
        sections += [
            f"{one.num_slots} slots: start {one.start_s:.2f} s; {one.bytes_per_slot:.0f} bytes a "
            f"slot, {one.bytes_per_hash} of them the hash",
            table([head, *rows]),
        ]
    figures = {"hosts": [asdict(one) for one in found]}
    return Report(__doc__ or "", sections, figures, options, machine)
