"""HTTP/1.1 with one server that is not trusted: one request at a time on each connection.

A connection is a `BufferedProtocol`: the event loop receives into the memory that it hands out,
which is that of a slot while the bytes of an object come. Memory is handed out and filled in one
callback of the loop's thread, so from `abort` on nothing writes to a slot.

Everything that is read has a bound: the head, the text of an error, and an object, of which the
size is known before. What goes beyond ends the connection. No redirect is followed, no cookie
kept, nothing unpacked, and nothing is tried a second time.

Source: RFC 9112.
"""

from __future__ import annotations

import asyncio
import re
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, cast

from safe_offload.worker.tiers.base import SINK

HEAD_BYTES_MAX: Final = 16 << 10
"""Of the heads of all answers to one request, interim ones too."""
TEXT_BYTES_MAX: Final = 64 << 10
"""Of a body that is no object. A longer one is cut there, and its connection closed."""

_SCRATCH_BYTES: Final = 64 << 10
_CHUNK_LINE_BYTES_MAX: Final = 256
_HEAD_END: Final = b"\r\n\r\n"
_HEAD: Final = re.compile(
    rb"HTTP/1\.([01]) ([1-5][0-9][0-9])(?: [^\r\n\0]*)?"
    rb"((?:\r\n[!#$%&'*+.^_`|~0-9A-Za-z-]+:[^\r\n\0]*)*)"
)
_FRAMING: Final = re.compile(
    rb"\r\n(content-length|transfer-encoding|connection):[ \t]*([^\r]*)", re.IGNORECASE
)
_LENGTH: Final = re.compile(rb"[0-9]{1,19}")
_CHUNK_SIZE: Final = re.compile(rb"([0-9A-Fa-f]{1,8})[ \t]*(?:;.*)?", re.DOTALL)
_WITHOUT_BODY: Final = (204, 304)


class HttpError(ConnectionError):
    """The connection is lost, or what came is no answer. Its text has nothing from the server."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What a server answered.

    Attributes:
        status: of HTTP.
        length: of the body, as the server says; None where it does not.
        text: of the body, its beginning at least; empty where it was read into a slot or would not
            fit it. It may hold anything, so it is never shown.
    """

    status: int
    length: int | None
    text: bytes = b""


@dataclass(frozen=True, slots=True)
class Head:
    """What the head of an answer says of the connection and the body.

    Attributes:
        length: None if it is not said.
        is_chunked: the body comes in chunks.
        may_go_on: the connection may be used after it.
    """

    status: int
    length: int | None
    is_chunked: bool
    may_go_on: bool

    @classmethod
    def read(cls, data: bytes) -> Head:
        """Return what a head says, without the empty line at its end.

        Raises:
            HttpError: it is none, or it can be understood in two ways.
        """
        match = _HEAD.fullmatch(data)
        if match is None:
            raise HttpError("the server answered something else than HTTP")
        lengths: set[bytes] = set()
        codings: list[bytes] = []
        may_go_on = match[1] == b"1"
        for name, written in _FRAMING.findall(match[3]):
            value = written.strip(b" \t").lower()
            if len(name) == len(b"connection"):
                may_go_on = may_go_on and b"close" not in value
            elif len(name) == len(b"content-length"):
                lengths.add(value)
            else:
                codings.append(value)
        if len(lengths) + len(codings) > 1 or codings not in ([], [b"chunked"]):
            raise HttpError("the server answered with a body of unclear length")
        length = lengths.pop() if lengths else None
        if length is not None and not _LENGTH.fullmatch(length):
            raise HttpError("the server answered with a length that is no number")
        return cls(int(match[2]), None if length is None else int(length), bool(codings), may_go_on)


class Connection(asyncio.BufferedProtocol):
    """One connection. It belongs to the loop's thread."""

    def __init__(self) -> None:
        self.used_at_s = 0.0
        """When the last answer was complete, by the loop's clock."""
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._view = memoryview(bytearray(_SCRATCH_BYTES))
        self._start = self._end = 0
        self._exchange: _Exchange | None = None
        self._error: HttpError | None = None

    def __repr__(self) -> str:
        state = "closed" if self.is_closed else "idle" if self._exchange is None else "asked"
        return f"<Connection, {state}>"

    @property
    def is_closed(self) -> bool:
        """Return whether nothing can be asked any more."""
        return self._error is not None or self._transport is None

    def ask(
        self, request: Sequence[bytes], into: Sequence[memoryview] | None, *, is_head: bool
    ) -> asyncio.Future[Answer]:
        """Send a request.

        Args:
            request: its bytes.
            into: where the body of an answer 200 is read to, if it has just this length.
            is_head: the answer has no body, whatever it says.
        """
        assert self._exchange is None
        exchange = _Exchange(self._loop.create_future(), into, is_head=is_head)
        if self._error is not None or self._transport is None:
            exchange.fail(self._error or HttpError("there is no connection"))
            return exchange.future
        self._exchange = exchange
        self._transport.writelines(request)
        return exchange.future

    def abort(self, error: HttpError | None = None) -> None:
        """End the connection; from now on nothing is written to a slot."""
        if self._error is not None:
            return
        self._error = error or HttpError("the connection was given up")
        self._view = SINK
        exchange, self._exchange = self._exchange, None
        if exchange is not None:
            exchange.fail(self._error)
        if self._transport is not None:
            self._transport.abort()

    # ---- what the event loop calls ------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See `asyncio.BaseProtocol`."""
        self._transport = cast("asyncio.Transport", transport)
        if self._error is not None:
            self._transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """See `asyncio.BaseProtocol`."""
        self.abort(HttpError("the server closed the connection"))

    def eof_received(self) -> bool:
        """See `asyncio.BufferedProtocol`."""
        exchange = self._exchange
        if exchange is not None and exchange.ends_with_connection:
            exchange.finish()
        self.abort(HttpError("the server closed the connection"))
        return False

    def get_buffer(self, sizehint: int) -> memoryview:
        """See `asyncio.BufferedProtocol`."""
        if self._error is not None:
            return self._view
        if self._start == self._end:
            self._start = self._end = 0
            if self._exchange is not None and self._exchange.targets:
                return self._exchange.targets[0]
        elif self._end == _SCRATCH_BYTES:
            kept = self._end - self._start
            self._view[:kept] = bytes(self._view[self._start : self._end])
            self._start, self._end = 0, kept
        return self._view[self._end :]

    def buffer_updated(self, nbytes: int) -> None:
        """See `asyncio.BufferedProtocol`."""
        exchange = self._exchange
        if self._error is not None:
            return
        if exchange is None:
            self.abort(HttpError("the server sent what was not asked for"))
            return
        if exchange.targets and self._start == self._end:
            exchange.took(nbytes)
        else:
            self._end += nbytes
            try:
                self._start += exchange.read(self._view[self._start : self._end])
            except HttpError as error:
                self.abort(error.with_traceback(None))  # whose frames hold the memory
                return
        if exchange.is_done:
            self._go_on(exchange)

    def _go_on(self, exchange: _Exchange) -> None:
        """Be ready for the next request, or close, when an answer is complete."""
        assert self._transport is not None
        self._exchange = None
        self.used_at_s = self._loop.time()
        is_out_of_step = self._start < self._end or self._transport.get_write_buffer_size()
        if not exchange.may_go_on or is_out_of_step:
            self.abort()


class _Exchange:
    """One request, and how much of its answer has come.

    Attributes:
        targets: where the next bytes belong, if not into scratch memory.
        is_done: all has come that is read.
        may_go_on: so says the server, and the body was read to its end.
    """

    def __init__(
        self,
        future: asyncio.Future[Answer],
        into: Sequence[memoryview] | None,
        *,
        is_head: bool,
    ) -> None:
        self.future = future
        self.targets: deque[memoryview] = deque()
        self.is_done = False
        self.may_go_on = False
        self._into = into
        self._is_head = is_head
        self._num_head_bytes = 0
        self._head: Head | None = None
        self._text = bytearray()
        self._raw = bytearray()
        self._raw_at = 0

    @property
    def ends_with_connection(self) -> bool:
        """Return whether the body is as long as the connection."""
        head = self._head
        return head is not None and not self.targets and head.length is None and not head.is_chunked

    def read(self, data: memoryview) -> int:
        """Take what has come; return how many bytes of it were used.

        Raises:
            HttpError: it is no answer.
        """
        used = 0
        while self._head is None:
            taken = self._read_head(bytes(data[used : used + HEAD_BYTES_MAX + 1]))
            if not taken:
                return used
            used += taken
        if self.is_done or used == len(data):
            return used
        if self.targets:
            return used + self._fill(data[used:])
        return used + self._read_text(data[used:])

    def took(self, count: int) -> None:
        """So many bytes have come to where they belong."""
        target = self.targets.popleft()
        if count < target.nbytes:
            self.targets.appendleft(target[count:])
        if not self.targets:
            self.finish()

    def finish(self) -> None:
        """All has come that is read."""
        head = self._head
        assert head is not None
        self.is_done = True
        self.targets.clear()
        if not self.future.done():
            self.future.set_result(Answer(head.status, head.length, bytes(self._text)))

    def fail(self, error: HttpError) -> None:
        """The rest will not come."""
        self.targets.clear()
        if not self.future.done():
            self.future.set_exception(error)
            self.future.exception()  # seen: who was cancelled does not look

    # ---- the parts of an answer ---------------------------------------------------------------

    def _read_head(self, data: bytes) -> int:
        end = data.find(_HEAD_END)
        num_bytes = len(data) if end < 0 else end + len(_HEAD_END)
        if self._num_head_bytes + num_bytes > HEAD_BYTES_MAX:
            raise HttpError("the server answered too long a head")
        if end < 0:
            return 0
        self._num_head_bytes += num_bytes
        head = Head.read(data[:end])
        if head.status == 101:
            raise HttpError("the server answered in another protocol")
        if head.status >= 200:
            self._head = head
            self._begin_body(head)
        return num_bytes

    def _begin_body(self, head: Head) -> None:
        if self._is_head or head.status in _WITHOUT_BODY or head.length == 0:
            self.may_go_on = head.may_go_on
            self.finish()
        elif self._into is not None and head.status == 200:
            if head.length is None:
                raise HttpError("the server did not say how long an object is")
            if head.length != sum(buffer.nbytes for buffer in self._into):
                self.finish()  # and the connection ends
                return
            self.may_go_on = head.may_go_on
            self.targets.extend(buffer for buffer in self._into if buffer.nbytes)
        else:
            is_short = head.length is not None and head.length <= TEXT_BYTES_MAX
            self.may_go_on = head.may_go_on and (is_short or head.is_chunked)

    def _fill(self, data: memoryview) -> int:
        used = 0
        while self.targets and used < len(data):
            target = self.targets[0]
            count = min(len(data) - used, target.nbytes)
            target[:count] = data[used : used + count]
            used += count
            self.took(count)
        return used

    def _read_text(self, data: memoryview) -> int:
        head = self._head
        assert head is not None
        if head.is_chunked:
            return self._read_chunks(data)
        bound = TEXT_BYTES_MAX if head.length is None else min(head.length, TEXT_BYTES_MAX)
        taken = data[: bound - len(self._text)]
        self._text += taken
        if len(self._text) == bound:
            self.finish()
        return len(taken)

    def _read_chunks(self, data: memoryview) -> int:
        """Take chunks up to the last one; trailers are not read, and end the connection."""
        before = len(self._raw)
        self._raw += data[: TEXT_BYTES_MAX - before]
        while not self.is_done and (line_end := self._raw.find(b"\r\n", self._raw_at)) >= 0:
            match = _CHUNK_SIZE.fullmatch(self._raw, self._raw_at, line_end)
            if match is None or line_end - self._raw_at > _CHUNK_LINE_BYTES_MAX:
                raise HttpError("the server answered with a chunk of unclear length")
            size = int(match[1], 16)
            start, end = line_end + 2, line_end + 2 + size
            if len(self._raw) < end + 2:
                break
            is_exact = self._raw[end : end + 2] == b"\r\n"
            if size and not is_exact:
                raise HttpError("a chunk does not end where it should")
            self._text += self._raw[start:end]
            self._raw_at = end + 2
            if not size:
                self.may_go_on = self.may_go_on and is_exact
                self.finish()
                return self._raw_at - before
        if len(self._raw) == TEXT_BYTES_MAX:
            self.may_go_on = False
            self.finish()
        return len(self._raw) - before
