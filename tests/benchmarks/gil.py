"""What a tier takes of the thread that gives kernels to a GPU: in the engine's process, and apart.

A thread of this process calls C for some microseconds, again and again, and needs the GIL between
the calls, as one does that launches kernels. Meanwhile a tier of the same process, then one in a
process of its own (as engines have), writes and reads slots of several ranges. Of the time that
passes, the thread's CPU time and its wait for a core are taken off (/proc/PID/task/TID/schedstat):
the rest is its wait for the GIL. Servers run on this machine.
"""

import argparse
import asyncio
import os
import statistics
import threading
import time
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from safe_offload.commands.bench.report import table
from safe_offload.config.tiers import TierConfig
from safe_offload.layout import Geometry, HostLayout, Segment
from safe_offload.mapped_files import address_of, find_file, map_new
from safe_offload.tiers.base import Name, Result
from safe_offload.tiers.choice import open_tier
from safe_offload.tiers.process.process_tier import opener
from tests.benchmarks.tier_servers import tier_servers

CALL_BYTES = 20_000
NUM_RANGES = 32
BATCH = 64


class Launcher(threading.Thread):
    """The thread; `waited_s` is its wait for the GIL."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self._is_over = threading.Event()

    def run(self) -> None:
        data = bytes(CALL_BYTES)
        while not self._is_over.is_set():
            zlib.crc32(data)

    def __enter__(self) -> "Launcher":
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._is_over.set()
        self.join()

    def waited_s(self) -> float:
        text = Path(f"/proc/self/task/{self.native_id}/schedstat").read_text()
        on_cpu_ns, runnable_ns, _ = map(int, text.split())
        return time.perf_counter() - (on_cpu_ns + runnable_ns) / 1e9


def measure(url: str, options: argparse.Namespace) -> list[tuple[str, ...]]:
    """Return rows of what writes and reads took."""
    length, count = options.object_bytes // NUM_RANGES, options.objects
    segments = (Segment(options.object_bytes, n * length, length) for n in range(NUM_RANGES))
    layout = HostLayout.in_one_slab(Geometry(tuple(segments), count), count)
    memory = map_new(layout.size_bytes)
    memory[:] = os.urandom(options.object_bytes) * count
    view = memoryview(memory)
    file = find_file(address_of(view))
    assert file is not None
    buffers = [tuple(view[at : at + n] for at, n in layout.ranges_of(s)) for s in range(count)]
    ways = {"engine's": (open_tier, buffers), "its own": (opener(file, layout), range(count))}
    rows: list[tuple[str, ...]] = []
    for process, (open_one, slots) in ways.items():
        tier, namespace_of = open_one(TierConfig.at(url), options.object_bytes, {"by": process})
        took: dict[str, list[tuple[float, float]]] = {"spill": [], "fetch": []}

        async def run(verb: str, names: Sequence[Name], tier: Any, slots: Any) -> None:
            for first in range(0, count, BATCH):
                some = slice(first, first + BATCH)
                found = {*await getattr(tier, verb)(names[some], slots[some])}
                assert found == {Result.DONE}, found

        with asyncio.Runner() as runner, Launcher() as launcher:
            for turn in range(options.rounds + 1):
                names = [Name(namespace_of(f"{turn}"), 0, n.to_bytes(32)) for n in range(count)]
                for verb, found in took.items():
                    begin_s, waited_s = time.perf_counter(), launcher.waited_s()
                    runner.run(run(verb, names, tier, slots))
                    found.append((time.perf_counter() - begin_s, launcher.waited_s() - waited_s))
            runner.run(tier.close())
        for verb, found in took.items():
            seconds, waits_s = (statistics.median(each) for each in zip(*found[1:], strict=True))
            rate = f"{layout.size_bytes / seconds / 1e9:.2f}"
            rows.append((verb, process, rate, f"{waits_s / count * 1e6:.0f}"))
    return rows


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark."""
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--object-bytes", type=int, default=1 << 20)
    parser.add_argument("--objects", type=int, default=128)


def run_command(options: argparse.Namespace) -> int:
    """Print the table."""
    rows: list[Sequence[str]] = [("tier", "", "process", "GB/s", "GIL us an object")]
    size_bytes = 4 * (options.rounds + 1) * options.objects * options.object_bytes
    with tier_servers(size_bytes) as (urls, _):
        for kind, url in urls.items():
            print(kind, flush=True)
            rows += [(kind, *row) for row in measure(url, options)]
    print(table(rows, num_left=3))
    return 0
