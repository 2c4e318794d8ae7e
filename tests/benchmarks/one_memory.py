"""Two processes that page-lock one host memory, as ranks of a model do that hold the same KV cache.

Each has a GPU's memory of its own and our copies. Printed is how long the first and the second take
to page-lock the memory, and both at once; and what each loads alone, and both at once. What one
has stored the other loads, and every byte is compared: with both there, after one has unlocked the
memory, and after one was killed. Without a GPU each has a device of threads.
"""

import argparse
import contextlib
import multiprocessing as mp
import secrets
import time
from collections.abc import Iterator
from dataclasses import asdict
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import torch

from safe_offload.commands.bench.report import (
    Report,
    add_output_arguments,
    describe_machine,
    publish,
    table,
)
from safe_offload.errors import SafeOffloadError
from safe_offload.worker.memory.shared_memory import Share, share_memory
from tests.benchmarks.fake_gpu_rig import gpu_rigs
from tests.benchmarks.transfer_cases import KIB, Case, Traffic
from tests.benchmarks.transfer_rigs import GpuRig

PATIENCE_S = 300.0
NUM_LAYERS, RANGE_BYTES = 32, 64 * KIB
NUM_LOADS = 5


class Told(NamedTuple):
    """What a process did: how long it took, and whether it found the right bytes."""

    seconds: float
    is_right: bool = True


class Rank:
    """One process; told "open", "store", "load", "close" or "end"."""

    def __init__(self, share: Share, case: Case, secret: bytes) -> None:
        context = mp.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self.process = context.Process(target=serve, args=(theirs, share, case, secret))
        self.process.start()

    def tell(self, what: str, argument: int = 0) -> None:
        self._connection.send((what, argument))

    def hear(self) -> Told:
        if not self._connection.poll(PATIENCE_S):
            raise SafeOffloadError(f"a process was silent for {PATIENCE_S:.0f} s")
        told: Told = self._connection.recv()
        return told

    def ask(self, what: str, argument: int = 0) -> Told:
        self.tell(what, argument)
        return self.hear()


def serve(connection: Connection, share: Share, case: Case, secret: bytes) -> None:
    """Run in each process."""
    with gpu_rigs() as make:
        host = share_memory(share, case.make_layout(), secret, lambda: None)
        rigs: list[GpuRig] = []
        make(Case(RANGE_BYTES, 1, 1)).close()  # so that kernels are compiled
        while (told := connection.recv())[0] != "end":
            begin_s = time.perf_counter()
            if told[0] == "open":
                rigs.append(make(case, host))
            elif told[0] == "close":
                rigs.pop().close()
            else:
                connection.send(copy(rigs[0], Traffic(told[0]), told[1]))
                continue
            connection.send(Told(time.perf_counter() - begin_s))
        for rig in rigs:
            rig.close()


def copy(rig: GpuRig, traffic: Traffic, number: int) -> Told:
    """Store words that begin with a number; or load several times and compare with such."""
    words = rig.storage.view(torch.int32)
    pattern = torch.arange(number, number + len(words), dtype=torch.int32, device=words.device)
    if traffic is Traffic.STORE:
        words.copy_(pattern)
    copies, begin_s = rig.case.make_copies(traffic), time.perf_counter()
    for _ in range(NUM_LOADS if traffic is Traffic.LOAD else 1):
        rig.copy(copies)
    seconds = time.perf_counter() - begin_s
    return Told(seconds, bool(torch.equal(words, pattern)))


@contextlib.contextmanager
def two(case: Case) -> Iterator[list[Rank]]:
    """Start two processes with one memory, which nothing has touched yet."""
    secret = secrets.token_bytes(16)
    ranks = [Rank(Share(index, 2), case, secret) for index in range(2)]
    try:
        yield ranks
        for rank in ranks:
            with contextlib.suppress(OSError):
                rank.tell("end")
            rank.process.join(PATIENCE_S)
    finally:
        for rank in ranks:
            rank.process.kill()
            rank.process.join()


def measure(case: Case) -> tuple[dict[str, float], dict[str, bool]]:
    """Return gigabytes a second by what was done, and whether the bytes were right."""
    rates: dict[str, float] = {}
    right: dict[str, bool] = {}
    size = case.size_bytes / 1e9
    with two(case) as (first, second):
        rates["page-locked by the first"] = size / first.ask("open").seconds
        rates["by the second, then"] = size / second.ask("open").seconds
        first.ask("store", 1)
        told = second.ask("load", 1)
        right["the second loads what the first has stored"] = told.is_right
        rates["loaded by one alone"] = NUM_LOADS * size / told.seconds
        second.ask("store", 5)
        right["and the other way round"] = first.ask("load", 5).is_right
        for rank in (first, second):
            rank.tell("load", 5)
        both = [rank.hear() for rank in (first, second)]
        rates["by both at once, in sum"] = 2 * NUM_LOADS * size / max(one.seconds for one in both)
        right["both at once"] = all(one.is_right for one in both)
        first.ask("store", 7)
        first.process.kill()
        first.process.join()
        right["after the first was killed"] = second.ask("load", 7).is_right
    with two(case) as (first, second):
        begin_s = time.perf_counter()
        for rank in (first, second):
            rank.tell("open")
        for rank in (first, second):
            rank.hear()
        rates["page-locked by both at once, each"] = size / (time.perf_counter() - begin_s)
        first.ask("store", 9)
        first.ask("close")
        right["after the first has unlocked it"] = second.ask("load", 9).is_right
    return rates, right


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--blocks", type=int, default=4096, help="of 2 MiB (%(default)s)")
    add_output_arguments(parser)


def run_command(arguments: argparse.Namespace) -> int:
    """Run `python -m tests.benchmarks one_memory`; return 1 if a byte was wrong."""
    machine = describe_machine()
    case = Case(RANGE_BYTES, arguments.blocks, NUM_LAYERS)
    rates, right = measure(case)
    publish(make_report(rates, right, asdict(case), machine), arguments)
    return int(not all(right.values()))


def make_report(
    rates: dict[str, float],
    right: dict[str, bool],
    options: dict[str, Any],
    machine: dict[str, Any],
) -> Report:
    fast = [["", "GB/s"], *([name, f"{rate:.2f}"] for name, rate in rates.items())]
    told = [["", "bytes"], *([name, "right" if ok else "WRONG"] for name, ok in right.items())]
    figures = {"rates": rates, "right": right}
    return Report(__doc__ or "", [table(fast), table(told)], figures, options, machine)
