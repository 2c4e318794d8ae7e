"""What it costs to authenticate objects of tiers (`hmac_key_file`), beside other ways to do it.

One thread reads objects that lie in memory; its time of the CPU counts. All ways take turns, so
that other work on the machine meets all of them alike. What is printed is the median over the
rounds of the rate, and of its share of the rate of XXH3, which is what objects have without a key,
in the same round.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import hmac
import random
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from blake3 import blake3

from safe_offload.commands.bench.report import (
    Report,
    add_output_arguments,
    describe_machine,
    publish,
    table,
)
from safe_offload.config.units import format_bytes
from safe_offload.tiers.base import Name
from safe_offload.tiers.seal import PLAIN, Seal

KEY: Final = bytes(range(32))
NAME: Final = Name(bytes(16), 0, bytes(32))
CASES: Final = ((256 << 10, 256 << 10), (2 << 20, 2 << 20), (2 << 20, 64 << 10), (2 << 20, 8 << 10))
"""Bytes of an object, and of each of the pieces that it lies in."""
ROUND_BYTES: Final = 16 << 20
LOCKED_BYTES: Final = 64 << 20
NUM_TRIES: Final = 20
BASE, OURS = "XXH3 (no key)", "the seal (BLAKE3, HMAC-SHA256 of the header)"

Pieces = Sequence[memoryview]
Way = Callable[[Pieces], object]


@dataclass(frozen=True, slots=True)
class Measured:
    """Times of one way and one case; one of each round.

    Attributes:
        way: its name.
        object_bytes: of an object.
        piece_bytes: of each of its pieces.
        times_s: of the CPU, for one object.
        shares: of the rate of XXH3 in the same round.
    """

    way: str
    object_bytes: int
    piece_bytes: int
    times_s: tuple[float, ...]
    shares: tuple[float, ...]

    @property
    def rate(self) -> float:
        """Return the bytes in a second, the median."""
        return self.object_bytes / statistics.median(self.times_s)


def ways() -> dict[str, Way]:
    """Return what reads an object, by name; GMAC only where `cryptography` is installed."""
    sealed = Seal(KEY)
    found: dict[str, Way] = {
        BASE: lambda pieces: PLAIN.header(NAME, pieces),
        OURS: lambda pieces: sealed.header(NAME, pieces),
        "BLAKE3 with a key": lambda pieces: _update(blake3(key=KEY), pieces),
        "HMAC-SHA256": lambda pieces: _update(hmac.new(KEY, digestmod="sha256"), pieces),
        "BLAKE2b with a key": lambda pieces: _update(hashlib.blake2b(key=KEY), pieces),
    }
    try:
        from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
    except ImportError:
        return found

    def gmac(pieces: Pieces) -> object:
        state = Cipher(algorithms.AES(KEY), modes.GCM(bytes(12))).encryptor()
        for piece in pieces:
            state.authenticate_additional_data(piece)
        state.finalize()
        return state.tag

    return found | {"AES-GMAC": gmac}


def _update(state: Any, pieces: Pieces) -> object:
    for piece in pieces:
        state.update(piece)
    return state.digest()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `python -m tests.benchmarks seal`."""
    parser.add_argument("--rounds", type=int, default=15, help="(%(default)s)")
    add_output_arguments(parser)


def run_command(arguments: argparse.Namespace) -> int:
    """Run `python -m tests.benchmarks seal`."""
    machine = describe_machine()
    found = measure(arguments.rounds)
    publish(make_report(found, lets_others_run(), machine, arguments.rounds), arguments)
    return 0


def measure(num_rounds: int, round_bytes: int = ROUND_BYTES) -> list[Measured]:
    """Return the times of all ways and cases."""
    measured = []
    for object_bytes, piece_bytes in CASES:
        data = memoryview(bytearray(random.Random(0).randbytes(object_bytes)))
        pieces = [data[at : at + piece_bytes] for at in range(0, object_bytes, piece_bytes)]
        times: dict[str, list[float]] = {name: [] for name in ways()}
        for _ in range(num_rounds):
            for name, way in ways().items():
                times[name].append(_time_of(way, pieces, max(1, round_bytes // object_bytes)))
        measured += [
            Measured(
                *(name, object_bytes, piece_bytes, tuple(its)),
                tuple(base / time_s for base, time_s in zip(times[BASE], its, strict=True)),
            )
            for name, its in times.items()
        ]
    return measured


def _time_of(way: Way, pieces: Pieces, times: int) -> float:
    way(pieces)
    start_s = time.thread_time()
    for _ in range(times):
        way(pieces)
    return (time.thread_time() - start_s) / times


def lets_others_run() -> dict[str, bool]:
    """Return of each way whether other threads of Python run while it reads a long piece."""
    piece = memoryview(bytearray(LOCKED_BYTES))
    with no_switches():
        return {name: _lets_run(way, piece) for name, way in ways().items()}


@contextlib.contextmanager
def no_switches() -> Iterator[None]:
    """No thread is asked to let go of the interpreter meanwhile."""
    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(60)
    try:
        yield
    finally:
        sys.setswitchinterval(interval_s)


def _lets_run(way: Way, piece: memoryview) -> bool:
    """Return whether this thread runs before another one has read the piece, in any of some tries.

    The other one is not asked to let go of the interpreter. This one may come too late all the
    same, if the system has no core for it.
    """
    return any(_runs_beside(way, piece) for _ in range(NUM_TRIES))


def _runs_beside(way: Way, piece: memoryview) -> bool:
    has_begun, is_over = threading.Event(), threading.Event()

    def read() -> None:
        has_begun.set()
        way([piece])
        is_over.set()

    thread = threading.Thread(target=read)
    thread.start()
    has_begun.wait()
    was_beside = not is_over.is_set()
    thread.join()
    return was_beside


def make_report(
    measured: Sequence[Measured], beside: dict[str, bool], machine: dict[str, Any], num_rounds: int
) -> Report:
    """Return a table for each case."""
    sections = []
    for case in CASES:
        rows = [["", "rate", "share of XXH3", "for one object", "others run meanwhile"]]
        for one in measured:
            if (one.object_bytes, one.piece_bytes) == case:
                time_us = statistics.median(one.times_s) * 1e6
                cells = f"{one.rate / 1e9:.2f} GB/s", f"{statistics.median(one.shares):.3f}"
                lets = "yes" if beside[one.way] else "no"
                rows.append([one.way, *cells, f"{time_us:.0f} us", lets])
        title = f"objects of {format_bytes(case[0])} in pieces of {format_bytes(case[1])}"
        sections.append(f"{title}\n{table(rows)}")
    figures = {"measured": [asdict(one) for one in measured], "others_run": beside}
    return Report(str(__doc__).strip(), sections, figures, {"rounds": num_rounds}, machine)
