"""Bad answers to commands, in the protocol of Valkey and Redis."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from tests.tiers.hostile.answers import (
    EVIL,
    HUGE,
    ODD_NUMBERS,
    End,
    Kind,
    Pause,
    Places,
    Steps,
    disguised,
    drip,
    ended,
    endless,
    noise,
    object_at,
    silent,
    spoilt,
)

HANDSHAKE = {b"HELLO", b"AUTH", b"SELECT", b"CLIENT", b"PING", b"INFO", b"COMMAND", b"READONLY"}
MIB = b"E" * (1 << 20)


@dataclass
class Scene:
    """What one answer can be made of.

    Attributes:
        command: its words, each cut after 64 bytes.
        good: the server's own answer.
        others: good answers to other commands with objects in them.
        held: answers of this connection that were held back.
        heard: words that only a client that logs in says.
    """

    rng: random.Random
    places: Places
    command: list[bytes]
    good: bytes
    others: Sequence[bytes]
    held: list[bytes] = field(default_factory=list)
    heard: Sequence[bytes] = ()


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
    chunk, first = rng.choice(
        (
            (b"x" * 4096, b"$%d\r\n" % (1 << 40)),
            (b"x" * 4096, b"+"),
            (b"x" * 4096, b"-ERR "),
            (b"1", b":"),
            (b"1", b"("),
            (b":1\r\n", b"*%d\r\n" % (1 << 30)),
            (b"$-1\r\n", b"*%d\r\n" % (1 << 30)),
            (b"+a\r\n", b"%%%d\r\n" % (1 << 30)),
            (b"+a\r\n", b"|%d\r\n" % (1 << 20)),
            (b"|1\r\n+a\r\n+b\r\n", b""),
            (b">2\r\n+message\r\n+a\r\n", b""),
            (b"*1\r\n", b""),
            (b";4096\r\n" + b"x" * 4096 + b"\r\n", b"$?\r\n"),
            (b"\r\n", b""),
            (b"+OK\r\n", b""),
            (b"\0", b""),
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
    words = (
        "ERR unknown command",
        "LOADING Redis is loading the dataset in memory",
        "OOM command not allowed when used memory > 'maxmemory'.",
        "NOPERM this user has no permissions",
        "WRONGTYPE Operation against a key holding the wrong kind of value",
        "CLUSTERDOWN The cluster is down",
        "READONLY You can't write against a read only replica.",
        "NOAUTH Authentication required.",
        "WRONGPASS invalid username-password pair",
        "NOSCRIPT No matching script.",
        "MASTERDOWN Link with MASTER is down",
        "BUSY Redis is busy running a script",
        "TRYAGAIN Multiple keys request during rehashing of slot",
        "CROSSSLOT Keys in request don't hash to the same slot",
        "EXECABORT Transaction discarded",
        "MISCONF Redis is configured to save RDB snapshots",
        "NOPROTO unsupported protocol version",
        "max number of clients reached",
        "DENIED",
        "",
    )
    return [b"-" + scene.rng.choice(words).encode() + b"\r\n"]


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
    where = rng.choice(
        (
            f"127.0.0.1:{places.own}",
            f"127.0.0.1:{places.own}",
            f":{places.own}",
            f"127.0.0.1:{places.dead}",
            f"127.0.0.1:{places.trap}",
            "127.0.0.1:0",
            "127.0.0.1:65536",
            "127.0.0.1:-1",
            "127.0.0.1",
            "",
            ":",
            "no such host:1",
            "a..b:1",
            "x" * 300 + ":1",
            "h\x1b[31m\x07:1",
            "[::1]:1",
            "\u2603.invalid:1",
            "../../etc:1",
            "127.0.0.1:\u0661",
        )
    )
    return [f"-{rng.choice(('MOVED', 'ASK'))} {slot} {where}\r\n".encode()]


# ---- other types, other numbers, other orders -------------------------------------------------


def other_type(scene: Scene) -> Steps:
    good, rng = scene.good, scene.rng
    one = rng.choice((1, 5, len(good)))
    return [
        rng.choice(
            (
                b"%1\r\n+a\r\n" + good,
                b"~1\r\n" + good,
                b">1\r\n" + good,
                b">2\r\n+message\r\n+a\r\n",
                b">3\r\n$10\r\ninvalidate\r\n*0\r\n+x\r\n",
                b"*1\r\n" + good,
                b"|1\r\n+key\r\n+value\r\n" + good,
                b"(" + b"9" * 5000 + b"\r\n",
                b"(not a number\r\n",
                b"=15\r\ntxt:Some string\r\n",
                b"=3\r\ntxt\r\n",
                b",1.5e400\r\n",
                b",inf\r\n",
                b"#t\r\n",
                b"#x\r\n",
                b"!5\r\nERR x\r\n",
                b":%d\r\n" % (1 << 70),
                b":%d\r\n" % one,
                b"$?\r\n;4\r\nabcd\r\n;0\r\n",
                b"*?\r\n:1\r\n.\r\n",
                b"%2\r\n*0\r\n+a\r\n%0\r\n+b\r\n",
                b"~2\r\n*1\r\n:1\r\n*1\r\n:1\r\n",
                b".\r\n",
                b"+" + good[:100].replace(b"\r\n", b"") + b"\r\n",
            )
        )
    ]


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
    return [
        scene.rng.choice(
            (
                b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n",
                b"\x15\x03\x01\x00\x02\x02\x28",
                b"SSH-2.0-OpenSSH_9.6\r\n",
                b"220 mail.example ESMTP\r\n",
                b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
            )
        )
    ]


# ---- the start of a connection ----------------------------------------------------------------


def bad_hello(scene: Scene) -> Steps | None:
    if scene.command[0].upper() not in HANDSHAKE:
        return None
    pair = b"$5\r\nproto\r\n:%d\r\n"
    return [
        scene.rng.choice(
            (
                b"%0\r\n",
                b"%1\r\n" + pair % 2,
                b"%1\r\n" + pair % 9,
                b"%1\r\n" + pair % (1 << 70),
                b"%1\r\n$5\r\nproto\r\n$1\r\n3\r\n",
                b"%1\r\n$5\r\nproto\r\n_\r\n",
                b"%100000\r\n" + b"".join(b"+%d\r\n:1\r\n" % n for n in range(100_000)),
                b"*2\r\n" + pair % 3,
                b"+OK\r\n",
                b"_\r\n",
                b"-NOAUTH HELLO must be called with the client already authenticated\r\n",
                b"-ERR unknown command `HELLO`\r\n",
                b"%1\r\n*1\r\n:1\r\n:1\r\n",
            )
        )
    ]


def false_topology(scene: Scene) -> Steps | None:
    """Nodes that are not there, ranges that overlap or are missing, names that are none."""
    if scene.command[0].upper() != b"CLUSTER":
        return None
    rng, places = scene.rng, scene.places

    def slots(start: object, end: object, host: bytes, port: object, num_nodes: int = 1) -> bytes:
        node = b"*3\r\n" + _bulk(host) + f":{port}\r\n".encode() + _bulk(b"a" * 40)
        ends = f":{start}\r\n:{end}\r\n".encode()
        return b"*%d\r\n" % (2 + num_nodes) + ends + node * num_nodes

    here = (b"127.0.0.1", places.own)
    every = slots(0, 16383, *here)
    shapes = (
        [],
        [slots(0, 100, *here)],
        [slots(0, 10_000, *here), slots(5_000, 16383, b"127.0.0.1", places.dead)],
        [slots(0, 16383, b"", places.own)],
        [slots(0, 16383, b"", 0)],
        [slots(0, 16383, b"?", places.own)],
        [slots(0, 16383, b"127.0.0.1", places.dead)],
        [slots(0, 16383, b"127.0.0.1", places.trap)],
        [slots(0, 16383, b"127.0.0.1", 70_000)],
        [slots(0, 16383, b"127.0.0.1", -1)],
        [slots(0, 16383, EVIL, 6379)],
        [slots(0, 16383, b"x" * 100_000, 6379)],
        [slots(-5, 16383, *here)],
        [slots(0, 1 << 40, *here)],
        [slots(0, 1 << 62, *here)],
        [slots(16383, 0, *here)],
        [slots("x", "y", *here)],
        [slots(0, 16383, *here, 1_000)],
        [every] * 1_000,
        [slots(n % 16384, n % 16384, b"h%d" % n, n % 65536) for n in range(20_000)],
        [b":1\r\n"],
        [b"*0\r\n"],
        [b"*2\r\n:0\r\n:16383\r\n"],
        [b"*3\r\n:0\r\n:16383\r\n*0\r\n"],
        [b"*3\r\n:0\r\n:16383\r\n*2\r\n_\r\n_\r\n"],
    )
    chosen = rng.choice(shapes)
    return [b"*%d\r\n" % len(chosen) + b"".join(chosen)]


KINDS: dict[str, Kind[Scene]] = {
    kind.__name__: kind
    for kind in (
        *(huge_length, odd_length, other_length, false_length, no_end_of_bulk, never_ending),
        *(slow_drip, slow_object, late_but_right, wrong_bytes, lying_header, another_object),
        *(cut_off, missing, error, evil_error, big_error, redirect, other_type, deep),
        *(wrong_elements, wrong_bits, too_many, held_back, shifted, noise, another_protocol),
        *(ended, silent, bad_hello, false_topology),
    )
}
WEIGHTS = {
    **{"wrong_bytes": 30, "lying_header": 30, "another_object": 30, "shifted": 20, "error": 20},
    **{"slow_drip": 3, "slow_object": 3, "silent": 3, "never_ending": 5, "held_back": 5},
    **{"redirect": 20, "false_topology": 200, "bad_hello": 60, "deep": 6, "big_error": 6},
}
