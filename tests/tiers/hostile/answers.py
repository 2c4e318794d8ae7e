"""What a hostile Valkey server sends: the kinds of its answers, and how the next one is chosen."""

import asyncio
import enum
import random
import socket
import struct
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

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
    *("-2", "-1", "00012", "+5", "1e3", "", " 7", "0x10", "1_000", "\u0661", "NaN", "-0", "5 "),
)
HANDSHAKE = {b"AUTH", b"SELECT", b"CLIENT"}
MIB = b"E" * (1 << 20)


ERRORS = """
ERR unknown command
LOADING Redis is loading the dataset in memory
OOM command not allowed when used memory > 'maxmemory'.
NOPERM this user has no permissions
WRONGTYPE Operation against a key holding the wrong kind of value
CLUSTERDOWN The cluster is down
READONLY You can't write against a read only replica.
NOAUTH Authentication required.
WRONGPASS invalid username-password pair
MASTERDOWN Link with MASTER is down
BUSY Redis is busy running a script
TRYAGAIN Multiple keys request during rehashing of slot
CROSSSLOT Keys in request don't hash to the same slot
MISCONF Redis is configured to save RDB snapshots
max number of clients reached
DENIED
""".splitlines()
ADDRESSES = (
    *("127.0.0.1:{own}", "127.0.0.1:{own}", ":{own}", "127.0.0.1:{dead}", "127.0.0.1:{trap}"),
    *("127.0.0.1:0", "127.0.0.1:65536", "127.0.0.1:-1", "127.0.0.1:\u0661", "127.0.0.1", ":", ""),
    *("no such host:1", "a..b:1", "h\x1b[31m\x07:1", "[::1]:1", "\u2603.invalid:1", "../../etc:1"),
    "x" * 300 + ":1",
)
"""That an answer names; the first are of this machine (`Places`)."""


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
    """Ports of this machine that answers may name."""

    own: int  # of the server itself
    dead: int  # nothing listens there
    trap: int  # counts who comes and what they bring


@dataclass
class Scene:
    """What one answer can be made of."""

    rng: random.Random
    places: Places
    command: list[bytes]  # its words, each cut after 64 bytes
    good: bytes  # the server's own answer
    others: Sequence[bytes]  # good answers to other commands with objects in them
    # Answers of this connection that were held back.
    held: list[bytes] = field(default_factory=list)
    heard: Sequence[bytes] = ()  # words that only a client that logs in says


def _bulk(data: bytes) -> bytes:
    return b"$%d\r\n%s\r\n" % (len(data), data)


def _found(scene: Scene) -> bytes | None:
    """The object in the good answer, if it is one."""
    place = object_at(scene.good)
    return scene.good[slice(*place)] if place else None


def _with(scene: Scene, data: bytes) -> Steps:
    place = object_at(scene.good)
    assert place is not None
    found = scene.good[slice(*place)]
    if len(found) == len(data):
        return [scene.good.replace(found, data)]
    return [_bulk(data)]


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


# ---- any bytes --------------------------------------------------------------------------------


def noise(scene: Scene) -> Steps:
    rng = scene.rng
    count = rng.choice((1, 2, 7, 100, 5000, 100_000))
    data = rng.choice((rng.randbytes(count), bytes(count), b"\xff" * count, b"\r\n" * count))
    return [data, rng.choice((Pause(0.0), Pause(0.0), End.CLOSE))]


def ended(scene: Scene) -> Steps:
    return [scene.rng.choice((End.CLOSE, End.RESET, End.HALF_CLOSE))]


def silent(scene: Scene) -> Steps:
    return [End.SILENCE]


# ---- lengths ----------------------------------------------------------------------------------


def huge_length(scene: Scene) -> Steps:
    rng, body = scene.rng, scene.good[:100_000]
    sign = rng.choice("$$$$*%~!=|>(")
    first = f"{sign}{rng.choice(HUGE)}\r\n".encode()
    return [first + body, rng.choice((Pause(0.01), End.CLOSE, End.SILENCE))]


def odd_length(scene: Scene) -> Steps:
    sign = scene.rng.choice("$$$$*%~!=|>:,#_(")
    number = scene.rng.choice(ODD_NUMBERS).encode()
    return [sign.encode() + number + b"\r\n" + scene.good[:100]]


def other_length(scene: Scene) -> Steps | None:
    """An object that is shorter or longer than asked for, and says so."""
    data = _found(scene)
    if data is None:
        return None
    many = scene.rng.choice((1, 2, 511, 512, 4096, 8192, len(data) - 4096, 1 << 20))
    longer = scene.rng.random() < 0.5
    return [_bulk(data + bytes(many) if longer else data[:-many])]


def false_length(scene: Scene) -> Steps | None:
    """A length that is not that of what follows."""
    data = _found(scene) or b"x" * 30
    rng = scene.rng
    many = rng.choice((1, 2, 3, 4096))
    if rng.random() < 0.5:
        return [b"$%d\r\n%s\r\n" % (len(data), data + bytes(many))]
    end = rng.choice((End.CLOSE, End.SILENCE, End.RESET, Pause(0.0)))
    return [b"$%d\r\n%s\r\n" % (len(data), data[:-many]), end]


def no_end_of_bulk(scene: Scene) -> Steps | None:
    data = _found(scene) or b"OK"
    return [b"$%d\r\n%s" % (len(data), data) + scene.rng.choice((b"\n\r", b"xx", b"\r\r", b"\n"))]


# ---- pace -------------------------------------------------------------------------------------


def never_ending(scene: Scene) -> Steps:
    rng = scene.rng
    text = b"x" * 4096
    chunk, first = rng.choice(
        (
            *((text, b"$%d\r\n" % (1 << 40)), (text, b"+"), (text, b"-ERR "), (b"1", b":")),
            *((b":1\r\n", b"*%d\r\n" % (1 << 30)), (b"$-1\r\n", b"*%d\r\n" % (1 << 30))),
            *((b"+a\r\n", b"%%%d\r\n" % (1 << 30)), (b";4096\r\n" + text + b"\r\n", b"$?\r\n")),
            *((b"*1\r\n", b""), (b"\r\n", b""), (b"+OK\r\n", b""), (b"\0", b"")),
        )
    )
    return endless(chunk, first)


def slow_drip(scene: Scene) -> Steps:
    return drip(scene.good[: scene.rng.choice((20, 200))])


def slow_object(scene: Scene) -> Steps | None:
    """All but the last bytes at once, those one by one."""
    data = _found(scene)
    return None if data is None else (step for part in _late(scene.good) for step in part)


def _late(good: bytes) -> Iterator[Steps]:
    yield [good[:-40]]
    yield drip(good[-40:])


def late_but_right(scene: Scene) -> Steps:
    cut = scene.rng.randrange(len(scene.good))
    return [scene.good[:cut], Pause(0.03), scene.good[cut:]]


# ---- objects ----------------------------------------------------------------------------------


def wrong_bytes(scene: Scene) -> Steps | None:
    data = _found(scene)
    return None if data is None else _with(scene, spoilt(data, scene.rng))


def lying_header(scene: Scene) -> Steps | None:
    data = _found(scene)
    return None if data is None else _with(scene, disguised(data, scene.rng))


def another_object(scene: Scene) -> Steps | None:
    if _found(scene) is None or not scene.others:
        return None
    return [scene.rng.choice(scene.others)]


def cut_off(scene: Scene) -> Steps:
    good, rng = scene.good, scene.rng
    cut = rng.choice((1, 3, 8, 4096, 4103, len(good) - 1, len(good) - 2, rng.randrange(len(good))))
    return [good[: min(cut, len(good) - 1)], rng.choice((End.CLOSE, End.RESET, End.HALF_CLOSE))]


def missing(scene: Scene) -> Steps:
    return [scene.rng.choice((b"$-1\r\n", b"_\r\n", b"*-1\r\n", b"$0\r\n\r\n", b"*0\r\n"))]


# ---- errors -----------------------------------------------------------------------------------


def error(scene: Scene) -> Steps:
    return [b"-" + scene.rng.choice(ERRORS).encode() + b"\r\n"]


def evil_error(scene: Scene) -> Steps:
    said = b" ".join(scene.heard)
    rng = scene.rng
    word = rng.choice((b"ERR ", b"", b"OOM ", b"NOPERM ", b"WRONGPASS ", b"CLUSTERDOWN "))
    return [b"-" + word + rng.choice((EVIL, said, said + EVIL, bytes(range(128, 256)))) + b"\r\n"]


def big_error(scene: Scene) -> Steps:
    first = scene.rng.choice((b"-ERR ", b"-", b"-MOVED ", b"+", b":", b"!%d\r\n" % len(MIB)))
    after = scene.rng.choice((b"", b"\r\n"))
    return [first + MIB + after, scene.rng.choice((End.CLOSE, End.SILENCE, Pause(0.0)))]


def redirect(scene: Scene) -> Steps:
    places, rng = scene.places, scene.rng
    slot = rng.choice((0, 1, 16383, 16384, -1, 10**20, "x", 7000))
    where = rng.choice(ADDRESSES).format(own=places.own, dead=places.dead, trap=places.trap)
    return [f"-{rng.choice(('MOVED', 'ASK'))} {slot} {where}\r\n".encode()]


# ---- other types, other numbers, other orders -------------------------------------------------


def other_type(scene: Scene) -> Steps:
    good, rng = scene.good, scene.rng
    answers = (
        *(b"*1\r\n" + good, b"+" + good[:100].replace(b"\r\n", b"") + b"\r\n"),
        *(b":%d\r\n" % (1 << 70), b":%d\r\n" % rng.choice((1, 5, len(good)))),
        # Of RESP3, which was not asked for.
        *(b"%1\r\n+a\r\n" + good, b"~1\r\n" + good, b">1\r\n" + good, b">2\r\n+message\r\n+a\r\n"),
        *(b"|1\r\n+key\r\n+value\r\n" + good, b"(" + b"9" * 5000 + b"\r\n", b"=3\r\ntxt\r\n"),
        *(b",1.5e400\r\n", b"#t\r\n", b"!5\r\nERR x\r\n", b"$?\r\n;4\r\nabcd\r\n;0\r\n", b".\r\n"),
    )
    return [rng.choice(answers)]


def deep(scene: Scene) -> Steps:
    rng = scene.rng
    level = rng.choice((b"*1\r\n", b"%1\r\n+k\r\n", b"~1\r\n", b"|1\r\n+k\r\n", b">1\r\n"))
    return [level * rng.choice((1_000, 10_000, 300_000)) + scene.good[:100]]


def wrong_elements(scene: Scene) -> Steps | None:
    """A list of the right or another length with other things in it."""
    if scene.good[:1] not in b"*~$":
        return None
    first = scene.good.partition(b"\r\n")[0][1:]
    count = int(first) if first.isdigit() and scene.good[:1] != b"$" else 10
    rng = scene.rng
    count = max(rng.choice((count, count, count, count - 1, count + 1, 2 * count)), 0)
    one = rng.choice(
        (
            *(b":1\r\n", b":0\r\n", b":-1\r\n", b":2\r\n", b":%d\r\n" % (1 << 70), b"$1\r\n1\r\n"),
            *(b"$-1\r\n", b"_\r\n", b"#t\r\n", b"*0\r\n", b"-ERR one of them\r\n", b",0.5\r\n"),
            *(b"$2\r\nOK\r\n", b"*1\r\n:1\r\n", b"%0\r\n"),
        )
    )
    return [b"*%d\r\n" % count + one * count]


def wrong_bits(scene: Scene) -> Steps | None:
    """A string of another length or with other bits."""
    if scene.good[:1] != b"$" or _found(scene) is not None:
        return None
    rng = scene.rng
    count = rng.choice((0, 1, 2, 700, 5600, 1 << 20))
    return [_bulk(rng.choice((b"\xff", b"1", b"0", b"\0", b"a")) * count)]


def too_many(scene: Scene) -> Steps:
    more = scene.rng.choice((scene.good, b"+OK\r\n", b":1\r\n", *list(scene.others)[:3]))
    return [scene.good + more * scene.rng.choice((1, 2, 5))]


def held_back(scene: Scene) -> Steps:
    """Nothing now; it comes with a later answer, in either order."""
    scene.held.append(scene.good)
    return []


def shifted(scene: Scene) -> Steps | None:
    """Another object's answer first, so that every later one is that of the one before."""
    if not scene.others:
        return None
    return [scene.rng.choice(scene.others) + scene.good]


def another_protocol(scene: Scene) -> Steps:
    http = b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n"
    return [scene.rng.choice((http, b"\x15\x03\x01\x00\x02\x02\x28", b"SSH-2.0-OpenSSH_9.6\r\n"))]


# ---- what a client asks when it comes ---------------------------------------------------------


def bad_greeting(scene: Scene) -> Steps | None:
    if scene.command[0].upper() not in HANDSHAKE:
        return None
    many = b"%100000\r\n" + b"+a\r\n:1\r\n" * 100_000
    return [scene.rng.choice((b"%0\r\n", many, b"*2\r\n+OK\r\n+OK\r\n", b"_\r\n", b"+NO\r\n"))]


def false_topology(scene: Scene) -> Steps | None:
    """Nodes that are not there, ranges that overlap or are missing, names that are none."""
    if scene.command[0].upper() != b"CLUSTER":
        return None
    rng, places = scene.rng, scene.places

    def slots(start: object, end: object, host: bytes, port: object, num_nodes: int = 1) -> bytes:
        node = b"*3\r\n" + _bulk(host) + f":{port}\r\n".encode() + _bulk(b"a" * 40)
        ends = f":{start}\r\n:{end}\r\n".encode()
        return b"*%d\r\n" % (2 + num_nodes) + ends + node * num_nodes

    every, own = (0, 16383), (b"127.0.0.1", places.own)
    hosts = (
        *((b"", places.own), (b"", 0), (b"?", places.own), (EVIL, 6379), (b"x" * 100_000, 6379)),
        *((b"127.0.0.1", port) for port in (places.dead, places.trap, 70_000, -1)),
    )
    ranges = ((-5, 16383), (0, 1 << 40), (0, 1 << 62), (16383, 0), ("x", "y"), (0, 100))
    overlap = slots(0, 10_000, *own) + slots(5_000, 16383, b"127.0.0.1", places.dead)
    shapes = (
        *([], [overlap], [slots(*every, *own, 1_000)], [slots(*every, *own)] * 1_000),
        *([slots(*every, *host)] for host in hosts),
        *([slots(*ends, *own)] for ends in ranges),
        [slots(n % 16384, n % 16384, b"h%d" % n, n % 65536) for n in range(20_000)],
        *([b":1\r\n"], [b"*0\r\n"], [b"*2\r\n:0\r\n:16383\r\n"]),
        *([b"*3\r\n:0\r\n:16383\r\n" + node] for node in (b"*0\r\n", b"*2\r\n_\r\n_\r\n")),
    )
    chosen = rng.choice(shapes)
    num_ranges = 2 if chosen == [overlap] else len(chosen)
    return [b"*%d\r\n" % num_ranges + b"".join(chosen)]


Kind = Callable[[Scene], "Steps | None"]
"""An answer in a scene; None where it makes no sense."""

KINDS: dict[str, Kind] = {
    kind.__name__: kind
    for kind in (
        *(huge_length, odd_length, other_length, false_length, no_end_of_bulk, never_ending),
        *(slow_drip, slow_object, late_but_right, wrong_bytes, lying_header, another_object),
        *(cut_off, missing, error, evil_error, big_error, redirect, other_type, deep),
        *(wrong_elements, wrong_bits, too_many, held_back, shifted, noise, another_protocol),
        *(ended, silent, bad_greeting, false_topology),
    )
}
WEIGHTS = {
    **{"wrong_bytes": 30, "lying_header": 30, "another_object": 30, "shifted": 20, "error": 20},
    **{"slow_drip": 3, "slow_object": 3, "silent": 3, "never_ending": 5, "held_back": 5},
    **{"redirect": 20, "false_topology": 200, "bad_greeting": 60, "deep": 6, "big_error": 6},
}


# ---- choosing ---------------------------------------------------------------------------------


@dataclass
class Choice:
    """Which answer comes next."""

    seed: int = 0  # the n-th answer follows from it and n
    only: Sequence[str] = ()  # these kinds, or all
    num_good_of_100: int = 40  # how many answers are as they should be
    num_good_at_start_of_100: int = 96  # the same, of the first words of a connection
    is_hostile: bool = False  # else every answer is as it should be, and none is counted
    counts: Counter[str] = field(default_factory=Counter)
    num_chances: int = 0

    def next(self) -> random.Random:
        """Return the chance of the next answer."""
        self.num_chances += 1
        return random.Random(self.seed * 1_000_003 + self.num_chances)

    def choose(
        self, rng: random.Random, scene: Scene, *, is_start: bool = False, is_small: bool = False
    ) -> Steps | None:
        """Return a bad answer, or None for the good one; which it was is counted.

        The start of a connection goes well for the most part, and so do small answers, of which a
        call needs many; of these only the bad ones are counted.
        """
        num_good = self.num_good_at_start_of_100 if is_start else self.num_good_of_100
        if is_small:
            num_good = max(num_good, 100 - (100 - num_good) // SMALL_FACTOR)
        if rng.randrange(100) >= num_good:
            names = list(self.only or KINDS)
            weights = [WEIGHTS.get(name, 10) for name in names]
            for _ in range(20):
                name = rng.choices(names, weights)[0]
                steps = KINDS[name](scene)
                if steps is not None:
                    self.counts[name] += 1
                    return steps
        if not (is_start or is_small):
            self.counts[GOOD] += 1
        return None
