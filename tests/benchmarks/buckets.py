"""Reading from an object store on this machine: by signed urls and our own HTTP, and by obstore.

The servers are SeaweedFS, which keeps files, and a bare one that answers from memory; each is on
the last core, and the client on the first. Both clients are the tier itself, with the check of
every object; they take turns in every round, in an order that changes. "CPU" is what all threads
of the client's process took for an object.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from safe_offload.bench.report import (
    Report,
    add_output_arguments,
    describe_machine,
    median_and_spread,
    publish,
    table,
)
from safe_offload.tier_config import TierConfig
from safe_offload.worker.loop_thread import new_event_loop
from safe_offload.worker.tiers.base import Buffers, Name, Result
from safe_offload.worker.tiers.objects.library import LibraryRequests
from safe_offload.worker.tiers.objects.store import open_store
from safe_offload.worker.tiers.objects.tier import ObjectTier
from tests.bucket_server import BucketServer

SIZES: Final = {"32 KiB": 32 << 10, "256 KiB": 256 << 10, "2 MiB": 2 << 20}
ROUND_BYTES: Final = 64 << 20
NUM_OBJECTS_MAX: Final = 500
CREDENTIALS: Final = {
    "AWS_ACCESS_KEY_ID": "bench",
    "AWS_SECRET_ACCESS_KEY": "bench",
    "AWS_REGION": "us-east-1",
}

LIBRARY, OURS = "obstore", "ours"
BARE, SEAWEED = "bare server", "SeaweedFS"
RATE, CPU = "objects/s", "CPU, us"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `python -m tests.benchmarks buckets`."""
    parser.add_argument("--rounds", type=int, default=11, help="(%(default)s)")
    parser.add_argument("--quick", action="store_true", help="less of everything: does it run?")
    add_output_arguments(parser)


def run_command(arguments: argparse.Namespace) -> int:
    """Run `python -m tests.benchmarks buckets`."""
    machine = describe_machine()
    rounds = 2 if arguments.quick else arguments.rounds
    round_bytes = 4 << 20 if arguments.quick else ROUND_BYTES
    found: dict[str, dict[str, dict[str, list[float]]]] = {}
    for name, serve in ((BARE, bare_server), (SEAWEED, seaweed)):
        with serve() as (url, endpoint):
            for title, size_bytes in SIZES.items():
                number = min(NUM_OBJECTS_MAX, round_bytes // size_bytes)
                config = TierConfig.at(f"{url}/{size_bytes}", endpoint=endpoint, timeout_s=60.0)
                loop = new_event_loop()
                measured = measure(config, size_bytes, number, rounds)
                try:
                    found[f"{name}, {title}"] = loop.run_until_complete(measured)
                finally:
                    loop.close()
    publish(make_report(found, machine), arguments)
    return 0


async def measure(
    config: TierConfig, size_bytes: int, number: int, rounds: int
) -> dict[str, dict[str, list[float]]]:
    """Return objects a second, and microseconds of CPU for each, of both clients by round."""
    memory = memoryview(bytearray(random.Random(0).randbytes(1 << 16) * (size_bytes // 1024)))
    slots: list[Buffers] = [(memory[start : start + size_bytes],) for start in range(number)]
    names = [Name(bytes(16), 0, index.to_bytes(32, "big")) for index in range(number)]
    tiers = {
        OURS: ObjectTier(config),
        LIBRARY: ObjectTier(config, requests=LibraryRequests(open_store(config))),
    }
    results = await tiers[OURS].spill(names, slots)
    assert set(results) == {Result.DONE}, set(results)
    targets: list[Buffers] = [(memoryview(bytearray(size_bytes)),) for _ in names]
    found: dict[str, dict[str, list[float]]] = {name: {RATE: [], CPU: []} for name in tiers}
    for index in range(rounds + 1):
        gc.collect()
        for name in random.Random(index).sample(list(tiers), len(tiers)):
            begin_s, begin_cpu_s = time.perf_counter(), time.process_time()
            results = await tiers[name].fetch(names, targets)
            seconds, cpu_s = time.perf_counter() - begin_s, time.process_time() - begin_cpu_s
            assert set(results) == {Result.DONE}, set(results)
            assert [slot[0] for slot in targets] == [slot[0] for slot in slots]
            if index:
                found[name][RATE].append(number / seconds)
                found[name][CPU].append(cpu_s / number * 1e6)
    for tier in tiers.values():
        await tier.close()
    return found


def make_report(found: dict[str, dict[str, dict[str, list[float]]]], machine: Any) -> Report:
    """Return what was measured as one table."""
    rows = [["", "objects/s", "best", "GB/s", "CPU, us", "of obstore's objects/s"]]
    for title, values in found.items():
        size_bytes = SIZES[title.rpartition(", ")[2]]
        for name in (LIBRARY, OURS):
            rates = values[name][RATE]
            pairs = zip(rates, values[LIBRARY][RATE], strict=True)
            rows.append(
                [
                    f"{title}, {name}",
                    f"{statistics.median(rates):,.0f}",
                    f"{max(rates):,.0f}",
                    f"{statistics.median(rates) * size_bytes / 1e9:.2f}",
                    f"{statistics.median(values[name][CPU]):.0f}",
                    median_and_spread([a / b for a, b in pairs], ".2f") if name == OURS else "",
                ]
            )
    assert __doc__ is not None
    return Report(__doc__.strip(), [table(rows)], {"values": found}, {}, machine)


# ---- servers ------------------------------------------------------------------------------------


@contextlib.contextmanager
def _cores() -> Iterator[set[int]]:
    """Have what is started run on the last core until the set is applied to the client."""
    cpus = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, cpus[-1:])
    try:
        yield set(cpus[:1])
    finally:
        os.sched_setaffinity(0, cpus)


@contextlib.contextmanager
def _credentials(values: dict[str, str]) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(values)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


@contextlib.contextmanager
def seaweed() -> Iterator[tuple[str, str]]:
    """Run SeaweedFS; yield a url of a bucket and the endpoint."""
    with _cores() as mine, BucketServer() as server, _credentials(server.environment()):
        os.sched_setaffinity(0, mine)
        yield server.url("kv"), server.endpoint


@contextlib.contextmanager
def bare_server() -> Iterator[tuple[str, str]]:
    """Run the server that answers from memory; yield as `seaweed` does."""
    program = [sys.executable, "-m", "tests.benchmarks.buckets"]
    with (
        _cores() as mine,
        _credentials(CREDENTIALS),
        subprocess.Popen(program, cwd=Path(__file__).parents[2], stdout=subprocess.PIPE) as process,
    ):
        assert process.stdout is not None
        try:
            port = int(process.stdout.readline())
            os.sched_setaffinity(0, mine)
            yield "s3://bucket/kv", f"http://127.0.0.1:{port}"
        finally:
            process.kill()


class _Bare(asyncio.Protocol):
    """A connection of the bare server; it believes all that it is told."""

    objects: Final[dict[bytes, bytes]] = {}

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        self._come = bytearray()

    def data_received(self, data: bytes) -> None:
        self._come += data
        while (end := self._come.find(b"\r\n\r\n")) >= 0:
            head = bytes(self._come[:end])
            told = head.lower().partition(b"\r\ncontent-length:")[2].partition(b"\r")[0]
            length = int(told or 0)
            if len(self._come) < end + 4 + length:
                return
            body = bytes(self._come[end + 4 : end + 4 + length])
            del self._come[: end + 4 + length]
            method, target, _ = head.split(b" ", 2)
            self._answer(method, target.partition(b"?")[0], body)

    def _answer(self, method: bytes, path: bytes, body: bytes) -> None:
        if method == b"PUT":
            self.objects[path] = body
        found = b"" if method == b"PUT" else self.objects[path]
        head = b"HTTP/1.1 200 OK\r\nETag: x\r\nLast-Modified: Mon, 05 Jan 2026 10:00:00 GMT\r\n"
        head += b"Content-Length: %d\r\n\r\n" % len(found)
        self._transport.writelines((head, found))


async def _serve() -> None:
    """Be the bare server."""
    server = await asyncio.get_running_loop().create_server(_Bare, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    new_event_loop().run_until_complete(_serve())
