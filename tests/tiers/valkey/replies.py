"""Replies of a hostile Valkey server, and what they cost: bytes kept, steps without a pause.

Time would say what the machine does besides. A step is a call of a function, in Python or C, as
`sys.setprofile` sees it; between two callbacks of the event loop nothing else is done.
"""

from __future__ import annotations

import asyncio
import random
import sys
import tracemalloc
from collections.abc import Sequence
from types import FrameType, TracebackType

PASSWORD = "pass-5f1c-word"
MARK = "FORGED"
EVIL = f"\x1b[31m{MARK}\nERROR {MARK} line \x00\x07\x9b\u202e".encode()
"""What must not reach a log as it is."""
HUGE = (1 << 63, (1 << 63) - 1, 1 << 64, (1 << 64) - 1, 1 << 40, 1 << 31, (1 << 32) - 1, 10**30)
ODD_NUMBERS = (
    *("-2", "-1", "00012", "+5", "1e3", "", " 7", "0x10", "1_000", "\u0661", "NaN", "-0", "5 "),
)
NUM_UNITS_MAX = 70_000
REPLY_BYTES_MAX = 6 << 20
UNITS = (
    *(b":1\r\n", b":0\r\n", b"+\r\n", b"+OK\r\n", b"-\r\n", b"-MOVED 1 a:1\r\n", b"$-1\r\n"),
    *(b"$0\r\n\r\n", b"$2\r\nab\r\n", b"$1024\r\n" + bytes(1024) + b"\r\n", b"*0\r\n", b"*-1\r\n"),
    *(b"*1\r\n*0\r\n", b"*2\r\n*0\r\n*0\r\n", b"*1\r\n"),
    b"*3\r\n:0\r\n:1\r\n*2\r\n$1\r\na\r\n:1\r\n",
    *(b"*3\r\n:0\r\n:16383\r\n*2\r\n$0\r\n\r\n:1\r\n", b"+" + b"x" * 1000 + b"\r\n"),
    *(b"-ERR " + b"x" * 1000 + b"\r\n", b"*4\r\n:1\r\n:2\r\n" + 2 * b"*2\r\n$2\r\nab\r\n:1\r\n"),
)


class CostWatch:
    """Watches what happens in the loop's thread while it is entered; the loop is asyncio's own.

    `peak_bytes`: held by Python above what it was before, at most; `steps_max`: of one callback of
    the loop.
    """

    def __init__(self) -> None:
        self.peak_bytes = self.steps_max = self._num_steps = 0
        self._run = asyncio.Handle._run

    def __enter__(self) -> CostWatch:
        def run(handle: asyncio.Handle) -> None:
            self._num_steps = 0
            self._run(handle)
            self.steps_max = max(self.steps_max, self._num_steps)

        asyncio.Handle._run = run  # type: ignore[method-assign]
        tracemalloc.start()
        sys.setprofile(self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: object, trace: TracebackType | None
    ) -> None:
        sys.setprofile(None)
        self.peak_bytes = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        asyncio.Handle._run = self._run  # type: ignore[method-assign]

    def _note(self, frame: FrameType, event: str, argument: object) -> None:
        self._num_steps += event in ("call", "c_call")


def replies(seed: int, count: int) -> Sequence[bytes]:
    """Return what costs much to read: long, deep, wide, or next to what a server may answer."""
    rng = random.Random(seed)
    return [_reply(rng) for _ in range(count)]


def _reply(rng: random.Random) -> bytes:
    num_units = rng.choice((1, 10, 1000, NUM_UNITS_MAX))
    units = rng.choices(UNITS, k=rng.randrange(1, 4))
    body = b"".join(units)
    body *= min(num_units // len(units), REPLY_BYTES_MAX // len(body))
    says = rng.choice((len(units) * num_units, num_units, rng.randrange(NUM_UNITS_MAX)))
    first = rng.choice(
        (
            *(b"*%d\r\n" % says,) * 6,
            b"*1\r\n" * rng.randrange(1, 10) + b"*%d\r\n" % says,
            b"",
            f"{rng.choice('$*')}{rng.choice((*HUGE, *ODD_NUMBERS))}\r\n".encode(),
        )
    )
    reply = (first + body)[:REPLY_BYTES_MAX]
    return reply[: rng.choice((len(reply), len(reply) // 2))] or EVIL
