"""What is made of the bytes that a server answers, whatever they are and however they are cut."""

import asyncio
import random
import sys
from collections.abc import Callable
from typing import Any

import pytest

from safe_offload.tiers.base import Buffers
from safe_offload.tiers.naming import HEADER_BYTES
from safe_offload.tiers.valkey.replies import (
    DRAIN_BYTES_MAX,
    ELEMENT_BYTES,
    LINE_BYTES_MAX,
    RECEIPT_BYTES,
    REPLY_BYTES_MAX,
    SMALL_BYTES,
    WORD_BYTES_MAX,
    ErrorReply,
    Misfit,
    OversizeError,
    WireError,
)
from safe_offload.tiers.valkey.wire import Wire
from tests.tiers.contract import bytes_of, filled, slot_of

HEADER = random.Random(2).randbytes(HEADER_BYTES)


class Transport:
    """Keeps what is written."""

    def __init__(self) -> None:
        self.is_aborted = False
        self.written: list[bytes] = []

    def writelines(self, pieces: Any) -> None:
        self.written += [bytes(piece) for piece in pieces]

    def abort(self) -> None:
        self.is_aborted = True


@pytest.fixture
async def wire():
    wire = Wire()
    wire.connection_made(Transport())  # type: ignore[arg-type]
    return wire


def feed(wire: Wire, data: bytes, cut: Callable[[], int] = lambda: 1 << 30) -> None:
    """Give a wire bytes as an event loop does, at most `cut()` at a time."""
    while data:
        buffer = wire.get_buffer(-1)
        assert len(buffer) > 0
        count = min(len(buffer), len(data), cut())
        buffer[:count] = data[:count]
        wire.buffer_updated(count)
        if wire.is_closed:
            return
        data = data[count:]


def value(slot: Buffers, header: bytes = HEADER) -> bytes:
    return b"$%d\r\n" % (HEADER_BYTES + len(bytes_of(slot))) + header + bytes_of(slot) + b"\r\n"


CUTS = {"whole": 1 << 30, "bytes": 1, "pieces": 700}


@pytest.mark.parametrize("size", CUTS.values(), ids=CUTS)
async def test_replies_of_all_kinds_are_read_however_they_are_cut(wire, size):
    rng = random.Random(size)
    source, target, empty = filled((10, 3000, 0, 90), 1), slot_of((3100,)), slot_of((3100,))
    noted = bytearray()
    replies = [
        wire.request_lines([b"1"], 5),
        wire.request_value([b"2"], target, noted.extend),
        wire.request_value([b"3"], empty),
        wire.request_value([b"4"], empty),
        wire.request_tree([b"5"]),
        wire.request_value([b"6"], empty),
        wire.request_lines([b"7"], 1),
    ]
    data = (
        b":1\r\n:0\r\n+OK\r\n-OOM no\r\n:17\r\n" + value(source) + b"$-1\r\n"
        b"-WRONGTYPE Operation\r\n*3\r\n$2\r\nab\r\n*0\r\n*2\r\n:3\r\n$-1\r\n"
        b"$5\r\nabcde\r\n:1\r\n"
    )
    feed(wire, data, lambda: rng.randint(1, size))
    assert [await reply for reply in replies[:2]] == [
        [1, 0, b"OK", ErrorReply("OOM", "no"), 17],
        HEADER,
    ]
    assert bytes_of(target) == noted == bytes_of(source)
    assert [await reply for reply in replies[2:5]] == [
        None,
        ErrorReply("WRONGTYPE", "Operation"),
        [b"ab", [], [3, None]],
    ]
    assert isinstance(await replies[5], Misfit)
    assert await replies[6] == [1]
    assert bytes_of(empty) == bytes(3100), "no slot is touched but the one whose object came"
    assert not wire.is_closed


async def test_the_bytes_of_a_large_object_are_received_into_its_slot(wire):
    source, target = filled((1000, SMALL_BYTES)), slot_of((1000, SMALL_BYTES))
    noted = bytearray()
    wire.request_value([b""], target, noted.extend)
    data = value(source)
    head = data.index(b"\n") + 1 + HEADER_BYTES
    buffer = wire.get_buffer(-1)
    assert len(buffer) == head, "no byte of the object is received elsewhere"
    feed(wire, data[:head])
    for part in target:
        assert wire.get_buffer(-1).nbytes == part.nbytes
        feed(wire, data[head : head + part.nbytes])
        head += part.nbytes
    assert bytes_of(target) == noted == bytes_of(source)


async def test_of_a_large_object_no_more_is_received_than_a_cache_holds(wire):
    source, target = filled((RECEIPT_BYTES + 5,)), slot_of((RECEIPT_BYTES + 5,))
    wire.request_value([b""], target)
    data = value(source)
    head = data.index(b"\n") + 1 + HEADER_BYTES
    feed(wire, data[:head])
    assert wire.get_buffer(-1).nbytes == RECEIPT_BYTES
    feed(wire, data[head : head + RECEIPT_BYTES])
    assert wire.get_buffer(-1).nbytes == 5
    feed(wire, data[head + RECEIPT_BYTES :])
    assert bytes_of(target) == bytes_of(source)


async def test_small_objects_are_received_many_at_a_time(wire):
    sources = [filled((1000, 20_000), seed) for seed in range(7)]
    targets = [slot_of((1000, 20_000)) for _ in sources]
    replies = [wire.request_value([b""], target) for target in targets]
    data = b"".join(map(value, sources))
    assert wire.get_buffer(-1).nbytes >= len(data)
    feed(wire, data)
    assert await asyncio.gather(*replies) == [HEADER] * len(sources)
    assert list(map(bytes_of, targets)) == list(map(bytes_of, sources))


async def test_many_replies_of_one_line_are_read_at_once(wire):
    reply = wire.request_lines([b""], 5600)
    flags = [random.Random(3).randint(0, 1) for _ in range(5600)]
    rng = random.Random(4)
    feed(wire, b"".join(b":%d\r\n" % flag for flag in flags), lambda: rng.randint(1, 5000))
    assert await reply == flags


BAD = {
    "another protocol": b"HTTP/1.1 400 Bad Request\r\n",
    "no kind": b"\r\n",
    "what the server writes": b"secret\r\n",
    "a push of RESP3": b">2\r\n+invalidate\r\n",
    "a boolean of RESP3": b"#t\r\n",
    "no number": b":1x\r\n",
    "a number too long": b":" + b"1" * 40 + b"\r\n",
    "an endless line": b"-ERR " + b"x" * (LINE_BYTES_MAX + 10),
    "an endless line of digits": b":" + b"1" * (LINE_BYTES_MAX + 10),
    "a long word": b"+" + b"x" * (WORD_BYTES_MAX + 1) + b"\r\n",
    "a list": b"*1\r\n:1\r\n",
    "a value": b"$3\r\nabc\r\n",
    "more than was asked for": b":1\r\n:1\r\n",
}
BAD_VALUES = {
    "another kind": b"+OK\r\n",
    "a number": b":1\r\n",
    "length of 2**63": b"$9223372036854775808\r\n",
    "length of 2**64": b"$18446744073709551616\r\n",
    "a negative length": b"$-2\r\n",
    "length without digits": b"$\r\n",
    "a signed length": b"$+5\r\n",
    "too long to drain": b"$%d\r\n" % (DRAIN_BYTES_MAX + 1),
    "a list of lists": b"*1\r\n" * 100,
    "no end": b"$4196\r\n" + HEADER + b"x" * 100 + b"xx",
    "no end of what is drained": b"$5\r\nabcdexx",
}
BAD_TREES = {
    "a long list": b"*%d\r\n" % REPLY_BYTES_MAX,
    "many elements": b"*300000\r\n" + b":1\r\n" * (REPLY_BYTES_MAX // ELEMENT_BYTES + 1),
    "many lists": b"*300000\r\n" + b"*0\r\n" * (REPLY_BYTES_MAX // ELEMENT_BYTES + 1),
    "many texts": b"*2000\r\n" + (b"$1000\r\n" + bytes(1000) + b"\r\n") * 1100,
    "an error in a list": b"*2\r\n-ERR x\r\n",
    "deep lists": b"*1\r\n" * 1000,
    "a negative list": b"*-7\r\n",
    "a long text": b"$2000\r\n",
    "a text without its end": b"$3\r\nabcxx",
    "a map of RESP3": b"%1\r\n",
}


@pytest.mark.parametrize("data", BAD.values(), ids=BAD)
async def test_what_is_no_line_ends_the_connection(wire, data):
    reply = wire.request_lines([b""], 1)
    feed(wire, data)
    assert wire.is_closed
    if data != BAD["more than was asked for"]:
        with pytest.raises(WireError) as found:
            await reply
        assert "secret" not in str(found.value)
    with pytest.raises(WireError):
        await wire.request_lines([b""], 1)


@pytest.mark.parametrize("data", BAD_VALUES.values(), ids=BAD_VALUES)
async def test_what_is_no_value_ends_the_connection(wire, data):
    slot = slot_of((100,))
    replies = wire.request_value([b""], slot), wire.request_value([b""], slot)
    feed(wire, data)
    assert wire.is_closed
    for reply in replies:
        with pytest.raises(WireError) as found:
            await reply
    is_oversize = data == BAD_VALUES["too long to drain"] or b"2233720" in data
    assert isinstance(found.value, OversizeError) == is_oversize
    if data != BAD_VALUES["no end"]:
        assert bytes_of(slot) == bytes(100)


@pytest.mark.parametrize("data", BAD_TREES.values(), ids=BAD_TREES)
async def test_what_is_no_list_ends_the_connection(wire, data):
    reply = wire.request_tree([b""])
    feed(wire, data)
    with pytest.raises(WireError):
        await reply
    assert wire.is_closed


@pytest.mark.parametrize("code", ["ERR", "x" * 5, "A" * 40, "Über", ""])
async def test_only_the_code_of_an_error_is_taken_for_one(wire, code):
    reply = wire.request_lines([b""], 1)
    feed(wire, f"-{code} text\r\n".encode())
    assert await reply == [ErrorReply("ERR", "text")]


async def test_a_lost_connection_fails_all_replies(wire):
    replies = [wire.request_lines([b""], 1), wire.request_value([b""], slot_of((10,)))]
    wire.connection_lost(None)
    for reply in replies:
        with pytest.raises(WireError):
            await reply


@pytest.mark.parametrize("data", [b"$-7\r\n", b"*-5\r\n", b"", b"x" * 2000])
async def test_a_connection_that_ends_keeps_no_memory(wire, data):
    """It lives on for a while: the error that ends it and its traceback know each other."""
    scratch = wire.get_buffer(-1).obj
    reply = wire.request_value([b""], slot_of((100,)))
    feed(wire, data)
    wire.abort()
    with pytest.raises(WireError):
        await reply
    assert sys.getrefcount(scratch) == 2, "this test and the question have it"


async def test_an_aborted_connection_hands_out_no_memory_of_a_slot(wire):
    slot = slot_of((100,))
    reply = wire.request_value([b""], slot)
    feed(wire, value(filled((100,)))[: -(2 + 50)])
    wire.abort()
    feed_into = wire.get_buffer(-1)
    feed_into[:] = b"\xee" * len(feed_into)
    wire.buffer_updated(len(feed_into))
    assert b"\xee" * 4 not in bytes_of(slot)
    assert isinstance(reply, asyncio.Future)
    with pytest.raises(WireError):
        await reply


async def test_a_text_may_be_as_long_as_was_said(wire):
    size = 150_000
    reply = wire.request_tree([b""], text_bytes_max=size)
    feed(wire, b"$%d\r\n%b\r\n" % (size, b"x" * size))
    assert await reply == b"x" * size
    longer = wire.request_tree([b""], text_bytes_max=size)
    feed(wire, b"$%d\r\n" % (size + 1))
    with pytest.raises(WireError, match="too long a text"):
        await longer
