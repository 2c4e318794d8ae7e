"""What a hostile server sends: steps, the places that it names, and how one answer is chosen."""

from __future__ import annotations

import asyncio
import enum
import random
import socket
import struct
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from safe_offload.tiers import naming
from safe_offload.tiers.naming import HEADER_BYTES, Header

GOOD = "good"
SILENCE_S_MAX = 20.0
DRIP_S = 0.05
SMALL_FACTOR = 5
CHUNK = 1 << 16
PASSWORD = "pass-5f1c-word"
MARK = "FORGED"
EVIL = f"\x1b[31m{MARK}\nERROR {MARK} line \x00\x07\x9b\u202e".encode()
"""What must not reach a log as it is."""
HUGE = (1 << 63, (1 << 63) - 1, 1 << 64, (1 << 64) - 1, 1 << 40, 1 << 31, (1 << 32) - 1, 10**30)
ODD_NUMBERS = (
    "-2",
    "-1",
    "00012",
    "+5",
    "1e3",
    "",
    " 7",
    "0x10",
    "1_000",
    "\u0661",
    "NaN",
    "-0",
    "5 ",
)


class End(enum.Enum):
    """How the connection goes on when nothing more is sent."""

    CLOSE = "close"
    RESET = "reset"
    HALF_CLOSE = "half close"
    SILENCE = "silence"


@dataclass(frozen=True, slots=True)
class Pause:
    """Nothing is sent for so long."""

    seconds: float


Step = bytes | Pause | End
Steps = Iterable[Step]


async def play(steps: Steps, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
    """Send an answer; return whether the connection goes on."""
    for step in steps:
        if isinstance(step, bytes):
            writer.write(step)
            await writer.drain()
        elif isinstance(step, Pause):
            await asyncio.sleep(step.seconds)
        else:
            await _end(step, reader, writer)
            return False
        if writer.is_closing() or (reader.at_eof() and not isinstance(step, bytes)):
            return False
    return True


async def _end(end: End, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    if end is End.RESET:
        opened: socket.socket = writer.get_extra_info("socket")
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    if end is End.HALF_CLOSE:
        writer.write_eof()
    if end in (End.HALF_CLOSE, End.SILENCE):
        try:
            async with asyncio.timeout(SILENCE_S_MAX):
                while await reader.read(CHUNK):
                    pass
        except TimeoutError:
            pass


def drip(data: bytes) -> Iterator[Step]:
    """Send one byte every 50 ms."""
    for byte in data:
        yield bytes((byte,))
        yield Pause(DRIP_S)


def endless(chunk: bytes, first: bytes = b"") -> Iterator[Step]:
    """Send for as long as the other side takes it."""
    yield first
    many = chunk * max(CHUNK // len(chunk), 1)
    while True:
        yield many


@dataclass(frozen=True, slots=True)
class Places:
    """Ports of this machine that answers may name.

    Attributes:
        own: of the server itself.
        dead: nothing listens there.
        trap: counts who comes and what they bring.
    """

    own: int
    dead: int
    trap: int


# ---- sealed objects ---------------------------------------------------------------------------


def object_at(answer: bytes) -> tuple[int, int] | None:
    """Return where an object begins and ends in an answer; None if there is none."""
    start = answer.find(b"SafeKV\r\n")
    read = Header.read(answer[start : start + HEADER_BYTES]) if start >= 0 else None
    if read is None or len(answer) < start + HEADER_BYTES + read.length_bytes:
        return None
    return start, start + HEADER_BYTES + read.length_bytes


def disguised(data: bytes, rng: random.Random) -> bytes:
    """Return an object whose header lies, or whose bytes are not those of its header."""
    read = Header.read(data[:HEADER_BYTES])
    assert read is not None
    name, length, digest = read.name, read.length_bytes, read.digest
    body = bytearray(data[HEADER_BYTES:])
    fake = naming.Name
    made: Sequence[Callable[[], bytes]] = (
        lambda: naming.header(name, rng.choice((0, 1, length - 1, length + 1, 1 << 63)), digest),
        lambda: naming.header(name, length, digest ^ 1 << rng.randrange(64)),
        lambda: naming.header(fake(bytes(16), name.group_idx, name.block_hash), length, digest),
        lambda: naming.header(fake(name.namespace, 9, name.block_hash), length, digest),
        lambda: naming.header(fake(name.namespace, 0, name.block_hash[::-1]), length, digest),
        lambda: naming.header(fake(name.namespace, 0, b""), length, digest),
        lambda: data[:8] + struct.pack("<H", rng.choice((0, 2, 65535))) + data[10:HEADER_BYTES],
        lambda: data[:8] + rng.randbytes(40) + data[48:HEADER_BYTES],
        lambda: bytes(HEADER_BYTES),
    )
    return rng.choice(made)() + bytes(body)


def spoilt(data: bytes, rng: random.Random) -> bytes:
    """Return an object of the same length and header with other bytes."""
    body = bytearray(data)
    how = rng.randrange(4)
    if how == 0:
        at = rng.randrange(HEADER_BYTES, len(body))
        body[at] ^= 1 << rng.randrange(8)
    elif how == 1:
        body[HEADER_BYTES:] = rng.randbytes(len(body) - HEADER_BYTES)
    elif how == 2:
        body[HEADER_BYTES:] = bytes(len(body) - HEADER_BYTES)
    else:
        body[HEADER_BYTES:-1] = body[HEADER_BYTES + 1 :]
    return bytes(body)


# ---- answers in any protocol ------------------------------------------------------------------


class Chance(Protocol):
    """A scene of any protocol."""

    rng: random.Random


def noise(scene: Chance) -> Steps:
    """Send bytes that mean nothing."""
    rng = scene.rng
    count = rng.choice((1, 2, 7, 100, 5000, 100_000))
    data = rng.choice((rng.randbytes(count), bytes(count), b"\xff" * count, b"\r\n" * count))
    return [data, rng.choice((Pause(0.0), Pause(0.0), End.CLOSE))]


def ended(scene: Chance) -> Steps:
    """End the connection without an answer."""
    return [scene.rng.choice((End.CLOSE, End.RESET, End.HALF_CLOSE))]


def silent(scene: Chance) -> Steps:
    """Answer nothing."""
    return [End.SILENCE]


# ---- choosing ---------------------------------------------------------------------------------

S = TypeVar("S")
Kind = Callable[[S], "Steps | None"]
"""An answer in a scene; None where it makes no sense."""


@dataclass
class Choice(Generic[S]):
    """Which answer comes next.

    Attributes:
        kinds: by name.
        weights: by name; 1 where none is given.
        seed: the n-th answer follows from it and n.
        only: these kinds, or all.
        num_good_of_100: how many answers are as they should be.
        num_good_at_start_of_100: the same, of the first words of a connection.
        is_hostile: else every answer is as it should be, and none is counted.
    """

    kinds: Mapping[str, Kind[S]]
    weights: Mapping[str, int] = field(default_factory=dict)
    seed: int = 0
    only: Sequence[str] = ()
    num_good_of_100: int = 40
    num_good_at_start_of_100: int = 96
    is_hostile: bool = False
    counts: Counter[str] = field(default_factory=Counter)
    num_chances: int = 0

    def next(self) -> random.Random:
        """Return the chance of the next answer."""
        self.num_chances += 1
        return random.Random(self.seed * 1_000_003 + self.num_chances)

    def choose(
        self, rng: random.Random, scene: S, *, is_start: bool = False, is_small: bool = False
    ) -> Steps | None:
        """Return a bad answer, or None for the good one; which it was is counted.

        The start of a connection goes well for the most part, and so do small answers, of which a
        call needs many; of these only the bad ones are counted.
        """
        num_good = self.num_good_at_start_of_100 if is_start else self.num_good_of_100
        if is_small:
            num_good = max(num_good, 100 - (100 - num_good) // SMALL_FACTOR)
        if rng.randrange(100) >= num_good:
            names = list(self.only or self.kinds)
            weights = [self.weights.get(name, 10) for name in names]
            for _ in range(20):
                name = rng.choices(names, weights)[0]
                steps = self.kinds[name](scene)
                if steps is not None:
                    self.counts[name] += 1
                    return steps
        if not (is_start or is_small):
            self.counts[GOOD] += 1
        return None
