"""Writes and reads of the Mooncake tier beside those of `mooncake.store` itself, in turns.

Both move the same slots to and from the same master and segment, with 4 KiB of header for each. The
tier also asks what is there, computes checksums, and talks to its process; `mooncake.store` runs in
this process, with one call for all objects.
"""

import argparse
import asyncio
import itertools
import mmap
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from safe_offload.commands.bench.report import table
from safe_offload.config.tiers import TierConfig
from safe_offload.mapped_files import address_of, map_new
from safe_offload.tiers.base import Buffers, Name, Result
from safe_offload.tiers.naming import HEADER_BYTES, namespace
from tests.mooncake_server import Master, Segment, mooncake_tier, open_client

FACTS = {"model": "benchmark", "rank": 0}


class Raw:
    """`mooncake.store` itself."""

    def __init__(self, address: str, memory: mmap.mmap, slots: Sequence[Buffers]) -> None:
        self.store = open_client(address)
        self._headers = mmap.mmap(-1, HEADER_BYTES * len(slots))
        view = memoryview(self._headers)
        for whole in (memoryview(memory), view):
            assert self.store.register_buffer(address_of(whole), whole.nbytes) == 0
        headers = [view[HEADER_BYTES * n :][:HEADER_BYTES] for n in range(len(slots))]
        objects = [(header, *slot) for header, slot in zip(headers, slots, strict=True)]
        self._places = (
            [[address_of(buffer) for buffer in each] for each in objects],
            [[buffer.nbytes for buffer in each] for each in objects],
        )

    def write(self, keys: list[str]) -> None:
        assert min(self.store.batch_put_from_multi_buffers(keys, *self._places)) == 0

    def read(self, keys: list[str]) -> None:
        assert min(self.store.batch_get_into_multi_buffers(keys, *self._places)) > 0


def run_all(
    runner: asyncio.Runner,
    call: Callable[[Sequence[Name], Sequence[Buffers]], Coroutine[Any, Any, list[Result]]],
    names: Sequence[Name],
    slots: Sequence[Buffers],
) -> None:
    """Write or read all slots."""
    assert set(runner.run(call(names, slots))) == {Result.DONE}


def measure(
    object_bytes: int, num_ranges: int, num_objects: int, rounds: int
) -> list[tuple[Any, ...]]:
    """Return a row for writes and one for reads: GB/s of both, and their share."""
    memory = map_new(object_bytes * num_objects)
    memory[:] = os.urandom(object_bytes) * num_objects
    view = memoryview(memory)
    length = object_bytes // num_ranges  # of a range; those of a layer lie together
    rows_of_layers = [view[at : at + length] for at in range(0, len(view), length)]
    slots: list[Buffers] = [tuple(rows_of_layers[n::num_objects]) for n in range(num_objects)]
    seconds: dict[str, list[float]] = {}

    def timed(way: str, work: Callable[[], None]) -> None:
        begin_s = time.perf_counter()
        work()
        seconds.setdefault(way, []).append(time.perf_counter() - begin_s)

    with tempfile.TemporaryDirectory() as folder, asyncio.Runner() as runner:
        size_bytes = 4 * len(memory)
        with Master(Path(folder)) as master, Segment(Path(folder), master, size_bytes):
            raw = Raw(master.address, memory, slots)
            tier = mooncake_tier(TierConfig.at(master.url), FACTS)
            for turn in range(rounds + 1):
                keys = [f"raw-{turn}-{n}" for n in range(num_objects)]
                names = [Name(namespace(FACTS), turn, n.to_bytes(32)) for n in range(num_objects)]
                ways: list[tuple[str, Callable[[], None]]] = [
                    ("raw write", partial(raw.write, keys)),
                    ("tier write", partial(run_all, runner, tier.spill, names, slots)),
                    ("raw read", partial(raw.read, keys)),
                    ("tier read", partial(run_all, runner, tier.fetch, names, slots)),
                ]
                for pair in (ways[:2], ways[2:]):
                    for way, work in pair if turn % 2 else reversed(pair):
                        timed(way, work)
                raw.store.remove_by_regex(".*", True)
            runner.run(tier.close())
            raw.store.close()
    rows = []
    for way in ("write", "read"):
        ours, theirs = (seconds[f"{who} {way}"][1:] for who in ("tier", "raw"))  # but the first
        rates = [len(memory) / statistics.median(each) / 1e9 for each in (theirs, ours)]
        shares = [their_s / our_s for their_s, our_s in zip(theirs, ours, strict=True)]
        best = min(theirs) / min(ours)
        rows.append((object_bytes, num_ranges, way, *rates, statistics.median(shares), best))
    return rows


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark."""
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--object-bytes", type=int, nargs="+", default=[2 << 20, 256 << 10])
    parser.add_argument("--ranges", type=int, nargs="+", default=[1, 32])
    parser.add_argument("--round-bytes", type=int, default=128 << 20)


def run_command(options: argparse.Namespace) -> int:
    """Print the table."""
    os.environ["MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER"] = "65535"  # ranges; 1,024 by default
    rows: list[Sequence[str]] = [
        ("bytes", "ranges", "way", "mooncake.store GB/s", "tier GB/s", "share", "of the best")
    ]
    for size, ranges in itertools.product(options.object_bytes, options.ranges):
        for row in measure(size, ranges, options.round_bytes // size, options.rounds):
            rows.append([f"{cell:.2f}" if isinstance(cell, float) else str(cell) for cell in row])
    print(table(rows, num_left=3))
    return 0
