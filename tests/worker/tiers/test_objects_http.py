"""What is made of the bytes that an object store answers, whatever they are and however they come.

`feed` stands for the event loop; connections of real ones are in test_objects_requests.py.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import sys
from collections.abc import Iterable, Iterator
from typing import Any

import pytest

from safe_offload.worker.tiers.objects.http import (
    HEAD_BYTES_MAX,
    TEXT_BYTES_MAX,
    Answer,
    Connection,
    Head,
    HttpError,
)

BODY = random.Random(1).randbytes(90_000)
REQUEST = (b"GET / HTTP/1.1\r\n\r\n",)
OK = b"HTTP/1.1 200 OK\r\n"
CHUNKED = b"Transfer-Encoding: chunked\r\n"
SCRATCH_BYTES = 64 << 10


class Transport:
    """Keeps what is written."""

    def __init__(self) -> None:
        self.is_aborted = False
        self.num_unsent = 0
        self.written: list[bytes] = []

    def writelines(self, pieces: Iterable[bytes]) -> None:
        self.written += pieces

    def get_write_buffer_size(self) -> int:
        return self.num_unsent

    def abort(self) -> None:
        self.is_aborted = True


@pytest.fixture
async def transport() -> Transport:
    return Transport()


@pytest.fixture
async def connection(transport: Transport) -> Connection:
    connection = Connection()
    connection.connection_made(transport)  # type: ignore[arg-type]
    return connection


def feed(connection: Connection, data: bytes, size: int = 1 << 30) -> int:
    """Give a connection bytes as an event loop does, at most `size` at a time; return how many."""
    taken = 0
    while taken < len(data) and not connection.is_closed:
        buffer = connection.get_buffer(-1)
        assert len(buffer) > 0
        count = min(len(buffer), len(data) - taken, size)
        buffer[:count] = data[taken : taken + count]
        connection.buffer_updated(count)
        taken += count
    return taken


def memory(*sizes: int) -> tuple[memoryview, ...]:
    return tuple(memoryview(bytearray(size)) for size in sizes)


async def answer_to(connection: Connection, data: bytes, **how: Any) -> Answer:
    """Return what is made of an answer; `eof` says that the connection ends after it."""
    is_at_end, size = how.pop("eof", False), how.pop("size", 1 << 30)
    future = connection.ask(REQUEST, how.pop("into", None), **{"is_head": False, **how})
    feed(connection, data, size)
    if is_at_end:
        connection.eof_received()
    assert future.done(), "the answer is complete, or none"
    return await future


# ---- answers ------------------------------------------------------------------------------------

TEXT = b"<Error><Code>NoSuchKey</Code></Error>"
CHUNKS = b"5;a=b\r\n<Erro\r\n%x\r\n%b\r\n0\r\n\r\n" % (len(TEXT) - 5, TEXT[5:])
NOT_FOUND = b"HTTP/1.1 404 Not Found\r\n"
SIZES = {"whole": 1 << 30, "bytes": 1, "pieces": 700}


@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)
async def test_answers_of_all_kinds_are_read_however_they_are_cut(
    connection: Connection, transport: Transport, size: int
) -> None:
    into = memory(4096, 0, 5904, 80_000)
    data = OK + b"ETag: x\r\ncontent-LENGTH:  90000 \r\n\r\n" + BODY
    assert await answer_to(connection, data, into=into, size=size) == Answer(200, 90_000)
    assert b"".join(into) == BODY
    length = b"Content-Length: %d\r\n\r\n" % len(TEXT)
    for data, answer in (
        (NOT_FOUND + length + TEXT, Answer(404, len(TEXT), TEXT)),
        (NOT_FOUND + CHUNKED + b"\r\n" + CHUNKS, Answer(404, None, TEXT)),
        (b"HTTP/1.1 100 Continue\r\n\r\n" + OK + length + TEXT, Answer(200, len(TEXT), TEXT)),
        (b"HTTP/1.1 204\r\n\r\n", Answer(204, None)),
        (OK + b"Content-Length: 0\r\n\r\n", Answer(200, 0)),
        (NOT_FOUND + b"Connection: close\r\n" + length + TEXT, Answer(404, len(TEXT), TEXT)),
    ):
        assert not connection.is_closed
        assert await answer_to(connection, data, size=size) == answer
    assert connection.is_closed
    assert transport.is_aborted
    assert len(transport.written) == 7


async def test_an_answer_to_head_has_no_body_whatever_it_says(connection: Connection) -> None:
    data = OK + b"Content-Length: 90000\r\n\r\n"
    assert await answer_to(connection, data, is_head=True) == Answer(200, 90_000)
    assert not connection.is_closed


async def test_a_text_without_a_length_ends_with_the_connection(connection: Connection) -> None:
    found = await answer_to(connection, NOT_FOUND + b"\r\n" + TEXT, eof=True)
    assert found == Answer(404, None, TEXT)
    assert connection.is_closed


@pytest.mark.parametrize("length", [0, 1, 89_999, 90_001, 10**18])
async def test_an_object_of_another_length_is_not_read(connection: Connection, length: int) -> None:
    into = memory(90_000)
    head = OK + b"Content-Length: %d\r\n\r\n" % length
    found = await answer_to(connection, head + BODY[:length], into=into)
    assert found == Answer(200, length)
    assert bytes(into[0]) == bytes(90_000)
    assert connection.is_closed == (length > 0)


BAD = {
    "another protocol": b"SSH-2.0-OpenSSH_9.6\r\n\r\n",
    "another version": b"HTTP/2 200 OK\r\n\r\n",
    "no status": b"HTTP/1.1 OK\r\n\r\n",
    "a status of four digits": b"HTTP/1.1 2000 OK\r\n\r\n",
    "an upgrade": b"HTTP/1.1 101 X\r\n\r\n",
    "no colon": OK + b"header\r\n\r\n",
    "a space before the colon": OK + b"Content-Length : 5\r\n\r\nxxxxx",
    "a folded line": OK + b"Content-Length: 5\r\n 0\r\n\r\nxxxxx",
    "a bare line end": OK + b"X: y\nContent-Length: 5\r\n\r\nxxxxx",
    "a zero": OK + b"X: \0\r\n\r\n",
    "two lengths": OK + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\nxxxxx",
    "a list of lengths": OK + b"Content-Length: 5, 5\r\n\r\nxxxxx",
    "length and chunks": OK + b"Content-Length: 5\r\n" + CHUNKED + b"\r\n0\r\n\r\n",
    "another coding": OK + b"Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
    "two codings": OK + CHUNKED + b"Transfer-Encoding: gzip\r\n\r\n0\r\n\r\n",
    "a negative length": OK + b"Content-Length: -1\r\n\r\n",
    "a length with a sign": OK + b"Content-Length: +5\r\n\r\nxxxxx",
    "no length of an object": OK + b"\r\n",
    "chunks of an object": OK + CHUNKED + b"\r\n5\r\nxxxxx\r\n0\r\n\r\n",
    "a chunk that is no number": NOT_FOUND + CHUNKED + b"\r\nzz\r\n",
    "a negative chunk": NOT_FOUND + CHUNKED + b"\r\n-1\r\n",
    "a huge chunk": NOT_FOUND + CHUNKED + b"\r\nffffffffffffffff\r\n",
    "a chunk that goes on": NOT_FOUND + CHUNKED + b"\r\n1\r\nxxx0\r\n\r\n",
}


@pytest.mark.parametrize("data", BAD.values(), ids=BAD)
@pytest.mark.parametrize("size", [1 << 30, 1])
async def test_what_is_no_answer_ends_the_connection(
    connection: Connection, data: bytes, size: int
) -> None:
    with pytest.raises(HttpError):
        await answer_to(connection, data, into=memory(5), size=size)
    assert connection.is_closed


@pytest.mark.parametrize("cut", [0, 5, 40, 100])
async def test_an_answer_that_is_cut_off_fails(connection: Connection, cut: int) -> None:
    data = OK + b"Content-Length: 90000\r\n\r\n" + BODY
    with pytest.raises(HttpError, match="closed the connection"):
        await answer_to(connection, data[:cut], into=memory(90_000), eof=True)


def test_a_head_is_read() -> None:
    def read(data: bytes) -> Head:
        return Head.read(data)

    assert read(b"HTTP/1.1 200") == Head(200, None, False, True)
    assert read(b"HTTP/1.0 200 OK") == Head(200, None, False, False)
    assert read(b"HTTP/1.1 503 X\r\nconnection: Close") == Head(503, None, False, False)
    same = b"HTTP/1.1 200 OK\r\nContent-Length: 7\r\nX: Content-Length: 9\r\nContent-Length:7"
    assert read(same) == Head(200, 7, False, True)
    assert read(b"HTTP/1.1 200 \xff\x1b\r\nTransfer-Encoding:\tCHUNKED") == Head(
        200, None, True, True
    )


# ---- bounds -------------------------------------------------------------------------------------

ENDLESS = {
    "interim answers": (b"", b"HTTP/1.1 103 Early Hints\r\nLink: <x>\r\n\r\n"),
    "a status line": (b"HTTP/1.1 200 ", b"x"),
    "headers": (OK, b"X: y\r\n"),
    "one header": (OK + b"X: ", b"y"),
    "nothing": (b"", b"\r\n"),
    "a text": (NOT_FOUND + b"\r\n", b"x"),
    "a text of a length": (NOT_FOUND + b"Content-Length: 99999999999999\r\n\r\n", b"x"),
    "chunks": (NOT_FOUND + CHUNKED + b"\r\n", b"1\r\nx\r\n"),
    "a chunk": (NOT_FOUND + CHUNKED + b"\r\n7fffffff\r\n", b"x"),
    "extensions of chunks": (NOT_FOUND + CHUNKED + b"\r\n1", b";a=b"),
    "a size of a chunk": (NOT_FOUND + CHUNKED + b"\r\n", b"0"),
    "trailers": (NOT_FOUND + CHUNKED + b"\r\n0\r\n", b"X: y\r\n"),
    "one trailer": (NOT_FOUND + CHUNKED + b"\r\n0\r\nX: ", b"y"),
    "an object": (OK + b"Content-Length: 90000\r\n\r\n", b"x"),
}


@pytest.mark.parametrize("size", [1000, 1 << 30])
@pytest.mark.parametrize(("first", "more"), ENDLESS.values(), ids=ENDLESS)
async def test_nothing_is_read_without_end(
    connection: Connection, first: bytes, more: bytes, size: int
) -> None:
    future = connection.ask(REQUEST, memory(90_000), is_head=False)
    data = first + more * ((1 << 20) // len(more))
    taken = feed(connection, data, size)
    if future.done() and not connection.is_closed:  # a complete answer: the next byte is too much
        taken += feed(connection, b"x")
    assert connection.is_closed
    assert taken <= HEAD_BYTES_MAX + TEXT_BYTES_MAX + SCRATCH_BYTES + 90_000
    if future.exception() is None:
        assert len(future.result().text) <= TEXT_BYTES_MAX


async def test_of_a_long_text_the_beginning_is_kept(connection: Connection) -> None:
    head = NOT_FOUND + b"Content-Length: %d\r\n\r\n" % (1 << 40)
    found = await answer_to(connection, head + TEXT + bytes(1 << 20))
    assert found.text.startswith(TEXT)
    assert len(found.text) == TEXT_BYTES_MAX
    assert connection.is_closed


# ---- in step ------------------------------------------------------------------------------------


async def test_what_was_not_asked_for_ends_the_connection(connection: Connection) -> None:
    data = OK + b"Content-Length: 0\r\n\r\n"
    await answer_to(connection, data)
    assert not connection.is_closed
    feed(connection, data)
    assert connection.is_closed


@pytest.mark.parametrize("into", [None, memory(5)])
async def test_a_second_answer_is_not_taken_for_that_to_the_next_request(
    connection: Connection, into: Any
) -> None:
    data = OK + b"Content-Length: 5\r\n\r\nxxxxx"
    assert (await answer_to(connection, data * 2, into=into)).status == 200
    assert connection.is_closed


async def test_an_answer_before_the_request_was_sent_ends_the_connection(
    connection: Connection, transport: Transport
) -> None:
    """Else the next request would wait for the rest, which nobody wants any more."""
    transport.num_unsent = 1
    found = await answer_to(connection, b"HTTP/1.1 503 X\r\nContent-Length: 0\r\n\r\n")
    assert found.status == 503
    assert transport.is_aborted


@pytest.mark.parametrize("data", [b"noise\r\n\r\n", b"", b"HTTP/1.1 200 OK\r\n"])
async def test_a_connection_that_ends_keeps_no_memory(connection: Connection, data: bytes) -> None:
    """It lives on for a while: the error that ends it and whoever meets that know each other."""
    scratch = connection.get_buffer(-1).obj
    future = connection.ask(REQUEST, memory(100), is_head=False)
    feed(connection, data)
    connection.abort()
    with pytest.raises(HttpError):
        await future
    assert sys.getrefcount(scratch) == 2, "this test and the question have it"


async def test_a_connection_that_was_given_up_hands_out_no_slot(connection: Connection) -> None:
    into = memory(90_000)
    future = connection.ask(REQUEST, into, is_head=False)
    feed(connection, OK + b"Content-Length: 90000\r\n\r\n" + BODY[:50_000])
    assert bytes(into[0][:50_000]) == BODY[:50_000]
    future.cancel()
    connection.abort()
    into[0][:] = bytes(90_000)
    buffer = connection.get_buffer(-1)
    buffer[:] = b"x" * len(buffer)
    connection.buffer_updated(len(buffer))
    assert bytes(into[0]) == bytes(90_000)
    with pytest.raises(HttpError):
        await connection.ask(REQUEST, None, is_head=False)


async def test_random_bytes_do_no_harm() -> None:
    rng = random.Random(7)
    words = (OK, NOT_FOUND, CHUNKED, CHUNKS, TEXT, b"\r\n", b"\r\n\r\n", b"Content-Length: 5", b"0")
    for _ in range(500):
        connection, transport = Connection(), Transport()
        connection.connection_made(transport)  # type: ignore[arg-type]
        into = memory(5) if rng.random() < 0.5 else None
        future = connection.ask(REQUEST, into, is_head=rng.random() < 0.2)
        data = b"".join(itertools.chain.from_iterable(_some(rng, words)))
        feed(connection, data, rng.choice((1, 100, 1 << 30)))
        connection.eof_received()
        await asyncio.wait({future})
        assert connection.is_closed
        assert future.exception() is None or isinstance(future.exception(), HttpError)


def _some(rng: random.Random, words: tuple[bytes, ...]) -> Iterator[tuple[bytes, bytes]]:
    for _ in range(rng.randrange(1, 12)):
        yield rng.choice(words), rng.randbytes(rng.choice((0, 0, 0, 1, 5)))
