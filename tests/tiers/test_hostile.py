"""What a hostile Valkey server answers, drawn by hypothesis: nothing but misses may come of it.

A server in the test's own loop knows some objects and answers well, but for the answers that an
example has: any bytes, or good ones that are cut, spoilt, mixed up or held back.
"""

import asyncio
import contextlib
import gc
import logging
import os
import socket
import struct
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from safe_offload.config.tiers import TierConfig
from safe_offload.tiers.base import Buffers, Result
from safe_offload.tiers.naming import key_of
from safe_offload.tiers.seals.seal import PLAIN, Seal
from safe_offload.tiers.valkey import servers as valkey_servers
from safe_offload.tiers.valkey.login import Login
from tests.tiers.contract import (
    ENCRYPTION,
    bytes_of,
    fetch_one,
    filled,
    name_of,
    put,
    sealed_by,
    slot_of,
    spill_one,
    tier_at,
)
from tests.tiers.valkey.replies import EVIL, HUGE, MARK, ODD_NUMBERS, PASSWORD, UNITS

LENGTHS = (4096, 13, 70_001)
NUM_OBJECTS = 4
GIVE_UP_S = 0.3
"""After which calls that go on are cancelled: a server may say nothing for ever."""
PATIENCE_S = 60.0
RECOVERY_ROUNDS = 20
LOG_LENGTH_MAX = 2000
RIGHT = [filled(LENGTHS, number) for number in range(2 * NUM_OBJECTS)]
NAMES = [name_of(number) for number in range(2 * NUM_OBJECTS)]
SEALS = {"plain": PLAIN, "encrypted": ENCRYPTION}
STORED: Final = {
    seal: {key_of(n): sealed_by(seal, n, slot) for n, slot in zip(NAMES, RIGHT, strict=True)}
    for seal in SEALS.values()
}
UNTOUCHED = b"\xa5" * sum(LENGTHS)

ERRORS = (
    *("ERR unknown command", "LOADING Redis is loading", "OOM command not allowed", "NOPERM no"),
    *("WRONGTYPE Operation", "CLUSTERDOWN The cluster is down", "READONLY You can't write"),
    *("NOAUTH Authentication required.", "WRONGPASS invalid", "MASTERDOWN Link is down", "DENIED"),
    *("TRYAGAIN Multiple keys", "MISCONF Redis is configured", "max number of clients reached"),
)
ADDRESSES = (
    *("127.0.0.1:{port}", ":{port}", "127.0.0.1:1", "127.0.0.1:0", "127.0.0.1:65536", "", ":"),
    *("127.0.0.1:-1", "127.0.0.1:\u0661", "127.0.0.1", "a..b:1", "h\x1b[31m\x07:1", "../../etc:1"),
    "x" * 300 + ":1",
)


# ---- what is answered -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Answer:
    """How one command is answered.

    Attributes:
        make: of the good answer and of one with another object, what is sent.
        end: what becomes of the connection: "go on", "close", "reset", "half close", "silence".
        num_pieces: that are sent one after the other.
    """

    make: Callable[[bytes, bytes, int], bytes]
    end: str = "go on"
    num_pieces: int = 1


def bulk(data: bytes) -> bytes:
    return b"$%d\r\n%b\r\n" % (len(data), data)


def spoilt(share: float, xor: int) -> Callable[[bytes, bytes, int], bytes]:
    """Another byte somewhere: in the length, the header, the bytes or the end of an object."""

    def make(good: bytes, _other: bytes, _port: int) -> bytes:
        at = int(share * len(good)) if share > 0.3 else int(share * min(len(good), 200))
        return good[:at] + bytes([good[at] ^ xor]) + good[at + 1 :]

    return make


def cut(share: float) -> Callable[[bytes, bytes, int], bytes]:
    return lambda good, _other, _port: good[: int(share * len(good))]


def other_length(num_bytes: int) -> Callable[[bytes, bytes, int], bytes]:
    """An object that is longer or shorter, and says so."""

    def make(good: bytes, _other: bytes, _port: int) -> bytes:
        data = good.partition(b"\r\n")[2][:-2]
        return bulk(data + bytes(num_bytes) if num_bytes > 0 else data[:num_bytes])

    return make


def topology(first: Any, last: Any, host: bytes, port: int | None) -> Callable[..., bytes]:
    def make(_good: bytes, _other: bytes, own: int) -> bytes:
        node = b"*3\r\n%b:%d\r\n%b" % (bulk(host), own if port is None else port, bulk(b"a" * 40))
        return b"*1\r\n*3\r\n" + f":{first}\r\n:{last}\r\n".encode() + node

    return make


def redirect(word: str, slot: Any, where: str) -> Callable[[bytes, bytes, int], bytes]:
    return lambda _good, _other, port: f"-{word} {slot} {where.format(port=port)}\r\n".encode()


def sent(data: bytes) -> Callable[[bytes, bytes, int], bytes]:
    return lambda _good, _other, _port: data


NUMBERS = st.sampled_from([*map(str, HUGE), *ODD_NUMBERS]) | st.integers(-2, 70_000).map(str)
LINES = st.builds("{}{}\r\n".format, st.sampled_from("+-:$*%~!=|>(,#_;"), NUMBERS).map(str.encode)
EVILS = st.sampled_from((EVIL, PASSWORD.encode(), bytes(range(128, 256)), b"E" * (1 << 20)))
ATOMS = st.one_of(
    st.sampled_from((*UNITS, b"HTTP/1.1 400 Bad Request\r\n", b"\x15\x03\x01\x00\x02\x02\x28")),
    LINES,
    st.binary(max_size=100),
    st.sampled_from(ERRORS).map(lambda text: f"-{text}\r\n".encode()),
    EVILS.map(lambda text: b"-ERR " + text + b"\r\n"),
)
TEXTS = st.lists(ATOMS, max_size=6).map(b"".join) | st.builds(
    lambda atom, count: atom[:100] * count, ATOMS, st.sampled_from((300, 20_000))
)
PLACES = st.sampled_from((-5, 0, 100, 16_383, 16_384, 1 << 62, "x"))
MAKES = st.one_of(
    TEXTS.map(sent),
    st.builds(spoilt, st.floats(0, 0.999), st.integers(1, 255)),
    st.floats(0, 0.999).map(cut),
    st.sampled_from((-4096, -1, 1, 511, 4096, 1 << 20)).map(other_length),
    st.just(lambda _good, other, _port: other),  # another object
    st.just(lambda good, other, _port: other + good),  # so that later ones are those before
    st.just(lambda good, _other, _port: good + good),
    TEXTS.map(lambda text: lambda good, _other, _port: text + good),
    st.builds(redirect, st.sampled_from(("MOVED", "ASK")), PLACES, st.sampled_from(ADDRESSES)),
    st.builds(
        *(topology, PLACES, PLACES),
        st.sampled_from((b"127.0.0.1", b"", b"?", EVIL, b"x" * 100_000)),
        st.sampled_from((None, 1, 0, -1, 70_000)),
    ),
)
ENDS = st.sampled_from(("go on",) * 6 + ("close", "reset", "half close", "silence"))
GOOD = Answer(lambda good, _other, _port: good)
BAD = st.builds(Answer, MAKES, ENDS, st.sampled_from((1, 1, 1, 7)))
EXAMPLES = st.tuples(
    st.booleans(),  # a cluster
    st.sampled_from((0, 0, 4, 4, 4, 8)),  # good answers ahead: most logins go well
    st.lists(st.just(GOOD) | BAD | BAD, min_size=1, max_size=8),
)


class Server:
    """Answers the commands of a tier; the n-th answer is that of the example.

    Attributes:
        answers: to the next commands; those after them are answered well.
    """

    def __init__(self, stored: dict[bytes, bytes], *, is_cluster: bool = False) -> None:
        self.stored = dict(list(stored.items())[:NUM_OBJECTS])
        self._other = bulk(stored[key_of(NAMES[-1])])
        self.answers: list[Answer] = []
        self._is_cluster = is_cluster
        self._writers: set[asyncio.StreamWriter] = set()
        self.port = 0

    def good(self, words: Sequence[bytes]) -> bytes:
        """Return what a good server answers."""
        match words:
            case [b"GET", key]:
                found = self.stored.get(key)
                return b"$-1\r\n" if found is None else bulk(found)
            case [b"EXISTS" | b"DEL", key]:
                is_there = key in self.stored
                if words[0] == b"DEL":
                    self.stored.pop(key, None)
                return b":%d\r\n" % is_there
            case [b"SET", key, value]:
                self.stored[key] = value
            case [b"CLUSTER", *_]:
                if not self._is_cluster:
                    return b"-ERR This instance has cluster support disabled\r\n"
                return topology(0, 16_383, b"127.0.0.1", None)(b"", b"", self.port)
        return b"+OK\r\n"

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        with contextlib.suppress(OSError, asyncio.IncompleteReadError, ValueError):
            while True:
                good = self.good(await read_command(reader))
                answer = self.answers.pop(0) if self.answers else GOOD
                data = answer.make(good, self._other, self.port)
                size = max(1, -(-len(data) // answer.num_pieces))
                for start in range(0, len(data), size):
                    writer.write(data[start : start + size])
                    await writer.drain()
                    await asyncio.sleep(0)
                if answer.end == "reset":
                    found = writer.get_extra_info("socket")
                    found.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                if answer.end == "half close":
                    writer.write_eof()
                if answer.end in ("half close", "silence"):
                    await reader.read()
                if answer.end != "go on":
                    break
        self._writers.discard(writer)
        writer.close()
        with contextlib.suppress(OSError):  # whose future complains if nobody looks
            await writer.wait_closed()

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[TierConfig]:
        """Listen; yield the settings of a tier."""
        async with await asyncio.start_server(self.serve, "127.0.0.1", 0, limit=1 << 22) as server:
            self.port = server.sockets[0].getsockname()[1]
            try:
                yield TierConfig.at(
                    f"redis://:{PASSWORD}@127.0.0.1:{self.port}", timeout_s=GIVE_UP_S
                )
            finally:
                for writer in self._writers:
                    writer.close()


async def read_command(reader: asyncio.StreamReader) -> list[bytes]:
    words = []
    for _ in range(int((await reader.readuntil(b"\r\n"))[1:])):
        length = int((await reader.readuntil(b"\r\n"))[1:])
        words.append((await reader.readexactly(length + 2))[:-2])
    return words


# ---- what must hold ---------------------------------------------------------------------------


class LogWatch(logging.Handler):
    """Judges every line of the log that an operator would see."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.problems: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        message, text = record.getMessage(), logging.Formatter().format(record)
        is_forged = any(line.startswith((MARK, f"ERROR {MARK}")) for line in text.split("\n"))
        if not message.isprintable() or is_forged:
            self.problems.append(f"forged: {text[:300]!r}")
        if PASSWORD in text or len(text) > LOG_LENGTH_MAX or record.name == "asyncio":
            self.problems.append(f"must not be logged: {text[-400:]!r}")


@contextlib.contextmanager
def watched_log():
    watch, loggers = LogWatch(), [logging.getLogger(), logging.getLogger("vllm")]
    heard = [each for each in loggers if each.parent is None or not each.propagate]
    for each in heard:
        each.addHandler(watch)
    gc.freeze()  # so that the objects of vLLM are not looked at again for each example
    try:
        yield
        gc.collect()  # what a task that nobody waits for has raised is logged when it goes
    finally:
        gc.unfreeze()
        for each in heard:
            each.removeHandler(watch)
    assert not watch.problems


async def ended(call: Any) -> Any:
    """Return what a call returns or raises, cancelled if it goes on for long."""
    task = asyncio.ensure_future(call)
    await asyncio.wait([task], timeout=GIVE_UP_S)
    task.cancel()
    await asyncio.wait([task], timeout=PATIENCE_S)
    assert task.done(), "a call hangs"
    return task.exception() if not task.cancelled() and task.exception() else task


def judge(found: Any, num_names: int) -> list[Result]:
    assert isinstance(found, asyncio.Task), f"a call raises {found!r}"
    results: list[Result] = found.result()
    assert len(results) == num_names
    assert all(isinstance(result, Result) for result in results)
    return results


def right(results: Sequence[Result], slots: Sequence[Buffers]) -> int:
    """Return how many objects have come; no other bytes may have."""
    for result, slot, expected in zip(results, slots, RIGHT, strict=False):
        is_right = result is not Result.DONE or bytes_of(slot) == bytes_of(expected)
        assert is_right, "wrong bytes"  # of bytes, pytest makes a diff with CI set, for minutes
    return results.count(Result.DONE)


async def bear(is_cluster: bool, num_good: int, answers: Sequence[Answer], seal: Seal) -> None:
    """Use a server that answers so, and then well again."""
    server = Server(STORED[seal], is_cluster=is_cluster)
    num_tasks, num_files = len(asyncio.all_tasks()), len(os.listdir("/proc/self/fd"))
    async with server.running() as config:
        tier = tier_at(config, seal=seal)
        server.answers = [GOOD] * num_good + list(answers)
        targets = [slot_of(LENGTHS) for _ in range(NUM_OBJECTS)]
        sources = RIGHT[NUM_OBJECTS:]
        fetched, spilled, probed = await asyncio.gather(
            ended(tier.fetch(NAMES[:NUM_OBJECTS], targets)),
            ended(tier.spill(NAMES[NUM_OBJECTS:], sources)),
            ended(tier.probe(NAMES)),
        )
        right(judge(fetched, NUM_OBJECTS), targets)
        judge(spilled, NUM_OBJECTS)
        if isinstance(probed, asyncio.Task):
            assert probed.cancelled() or all(isinstance(each, bool) for each in probed.result())
        else:
            assert isinstance(probed, OSError)
        for slot in targets:
            put(slot, UNTOUCHED)
        server.answers = []
        for _ in range(RECOVERY_ROUNDS):
            slots = [slot_of(LENGTHS) for _ in NAMES]
            await tier.spill(NAMES, RIGHT)
            if right(await tier.fetch(NAMES, slots), slots) == len(NAMES):
                break
            await asyncio.sleep(0.02)
        else:
            raise AssertionError("a server that is good again is not used")
        assert await tier.probe(NAMES) == [True] * len(NAMES)
        assert all(bytes_of(slot) == UNTOUCHED for slot in targets), "written to after the call"
        await tier.close()
    for _ in range(50):
        if len(asyncio.all_tasks()) <= num_tasks:
            break
        await asyncio.sleep(0.02)
    assert len(asyncio.all_tasks()) <= num_tasks, "tasks are left"
    assert len(os.listdir("/proc/self/fd")) <= num_files, "files are left"


def run(example: tuple[bool, int, Sequence[Answer]], seal: Seal) -> None:
    pauses = patch.multiple(valkey_servers, PAUSE_S=0.01, PAUSE_S_MAX=0.01, REFRESH_S=0.0)
    with watched_log(), pauses:
        asyncio.run(bear(*example, seal))


@pytest.mark.parametrize("seal", SEALS.values(), ids=SEALS)
@given(example=EXAMPLES)
@settings(max_examples=60)
def test_nothing_but_misses_comes_of_a_hostile_server(example, seal):
    run(example, seal)


@pytest.mark.nightly
@pytest.mark.parametrize("seal", SEALS.values(), ids=SEALS)
@given(example=EXAMPLES)
@settings(max_examples=5000)
def test_nothing_but_misses_comes_of_a_hostile_server_all_night(example, seal):
    run(example, seal)


# ---- some servers by themselves ---------------------------------------------------------------


@contextlib.asynccontextmanager
async def scripted(answer: Callable[[list[bytes]], bytes]) -> AsyncIterator[TierConfig]:
    """A server that answers each command so, and the settings of a tier on it."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            while True:
                writer.write(answer(await read_command(reader)))
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        yield TierConfig.at(f"redis://:{PASSWORD}@127.0.0.1:{port}/1")


async def test_a_connection_that_is_given_up_while_it_logs_in_is_given_up_at_once():
    """At whatever step of logging in that is."""
    async with scripted(lambda words: b"+OK\r\n") as config:
        login = Login(config)
        for num_steps in range(100):
            connecting = asyncio.ensure_future(login.connect(login.home))
            for _ in range(num_steps):
                await asyncio.sleep(0)
            was_done = connecting.done()
            connecting.cancel()
            await asyncio.wait({connecting})
            assert was_done or connecting.cancelled(), num_steps
            if was_done:
                connecting.result().abort()
        (await login.connect(login.home)).abort()


async def test_keys_that_had_no_server_of_a_cluster_are_asked_for_again(monkeypatch):
    monkeypatch.setattr(valkey_servers, "REFRESH_S", 0.0)
    replies = [b"*0\r\n"]

    def answer(words: list[bytes]) -> bytes:
        if words[0] == b"CLUSTER":
            return replies[-1]
        return b":1\r\n" if words[0] == b"EXISTS" else b"+OK\r\n"

    async with scripted(answer) as config:
        tier = tier_at(config)
        with pytest.raises(OSError, match="no server of the cluster"):
            await tier.probe([name_of(1)])
        node = b"*3\r\n$9\r\n127.0.0.1\r\n:%d\r\n$1\r\na\r\n" % config.location.port
        replies.append(b"*1\r\n*3\r\n:0\r\n:16383\r\n" + node)
        assert await tier.probe([name_of(1)]) == [True]
        await tier.close()


async def test_an_object_that_could_not_be_deleted_is_written_over():
    slot = filled((4096,))
    good = PLAIN.header(name_of(1), slot) + bytes_of(slot)
    stored = [good[:-1] + bytes([good[-1] ^ 1])]

    def answer(words: list[bytes]) -> bytes:
        match words[0]:
            case b"GET":
                return b"$%d\r\n%b\r\n" % (len(stored[-1]), stored[-1])
            case b"SET":
                stored.append(good)
            case b"EXISTS":
                return b":1\r\n"
            case b"DEL" | b"CLUSTER":
                return b"-ERR no\r\n"
        return b"+OK\r\n"

    async with scripted(answer) as config:
        tier = tier_at(config)
        assert await fetch_one(tier, name_of(1), slot_of((4096,))) is Result.CORRUPT
        assert await tier.probe([name_of(1)]) == [False]
        assert await spill_one(tier, name_of(1), slot) is Result.DONE
        assert await tier.probe([name_of(1)]) == [True]
        assert await fetch_one(tier, name_of(1), slot_of((4096,))) is Result.DONE
        await tier.close()
