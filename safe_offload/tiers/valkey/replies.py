"""Replies of Valkey and Redis servers (RESP2), parsed piece by piece as they arrive.

A server is not trusted: an oversized or malformed reply is an error.

Source: https://redis.io/docs/latest/develop/reference/protocol-spec/, RESP2.
"""

from __future__ import annotations

import asyncio
import re
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from safe_offload.tiers.base import Buffers
from safe_offload.tiers.naming import HEADER_BYTES

LINE_BYTES_MAX: Final = 1024
"""Of a reply of one line, including errors."""
TEXT_BYTES_MAX: Final = 1024
"""Of a string that is not an object."""
REPLY_BYTES_MAX: Final = 1 << 20
"""Of a list: of its bytes, and ELEMENT_BYTES for each element that is kept."""
PAGE_BYTES_MAX: Final = 4 << 20
"""Of a page of keys, counted in the same way."""
ELEMENT_BYTES: Final = 64
PIECE_BYTES: Final = 16 << 10
"""Of a list, received and parsed at once: the loop does other work in between."""
WORD_BYTES_MAX: Final = 64
"""Of a word, such as OK, and of the part of an error's text that is kept."""
DEPTH_MAX: Final = 6
"""Of nested lists, such as the reply to CLUSTER SLOTS."""
DRAIN_BYTES_MAX: Final = 1 << 20
"""A value of an unexpected length is skipped up to this; a longer one ends the connection."""

SCRATCH_BYTES: Final = 256 << 10
"""Received and not parsed yet, except large objects."""
SMALL_BYTES: Final = 64 << 10
"""Objects up to this size are received into scratch memory, many at a time, and copied: a receipt
of its own costs the event loop more than that, all the more while another thread computes."""
RECEIPT_BYTES: Final = 256 << 10
"""Of a larger object, received at once: they are still in the processor's cache when they are added
to its digest."""
_END: Final = b"\r\n"
_ELEMENT_BYTES_MIN: Final = 3
_DIGITS_MAX: Final = 19  # of a number of 64 bits


class WireError(ConnectionError):
    """The connection is lost, or a reply is malformed. Its text has nothing from the server."""


class OversizeError(WireError):
    """A value is too long to be skipped; the reply that fails first is that value."""


@dataclass(frozen=True, slots=True)
class ErrorReply:
    """An error reply of the server.

    Attributes:
        code: its first word, such as MOVED.
        text: the beginning of the rest. It may contain anything, even a password: never shown.
        command: denied to the user, by its name in an ACL, if the rest names one: any word.
    """

    code: str
    text: str
    command: str = ""


class Misfit:
    """Stands for a value of an unexpected length."""


MISFIT: Final = Misfit()

Line = int | bytes | ErrorReply | None
"""A reply of one line: a number, a word, an error, or None (there is no such value)."""
Tree = Line | list["Tree"]
"""Any reply."""


class PendingReply:
    """An expected reply, and its future."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.future: asyncio.Future[Any] = loop.create_future()
        self.is_done = False
        self.is_ending = False
        """Only its last two bytes are missing."""

    def num_bytes_wanted(self) -> int:
        """Return how many bytes to receive before the place of the next ones is known."""
        return SCRATCH_BYTES

    def target(self) -> memoryview | None:
        """Return the memory for the next bytes, if that is not the scratch memory."""
        return None

    def advance(self, count: int) -> None:
        """Take `count` bytes that were received into `target`."""
        raise AssertionError("it has no memory of its own")

    def read(self, data: bytearray, start: int, end: int) -> int:
        """Parse as much as possible of `data[start:end]`; return where the rest starts."""
        raise NotImplementedError

    def fail(self, error: WireError) -> None:
        """Fail, as it will not arrive."""
        if not self.future.done():
            self.future.set_exception(error)
            self.future.exception()  # seen: who was cancelled does not look

    def finish(self, result: object) -> None:
        """Complete it."""
        self.is_done = True
        if not self.future.done():
            self.future.set_result(result)


class Lines(PendingReply):
    """Replies of one line each."""

    def __init__(self, loop: asyncio.AbstractEventLoop, count: int) -> None:
        super().__init__(loop)
        self._lines: list[Line] = []
        self._count = count
        if count == 0:
            self.finish(self._lines)

    def num_bytes_wanted(self) -> int:
        return min((self._count - len(self._lines)) * (LINE_BYTES_MAX + 2), SCRATCH_BYTES)

    def read(self, data: bytearray, start: int, end: int) -> int:
        last = data.rfind(_END, start, end)
        if last < 0:
            _line_end(data, start, end)
            return start
        for line in bytes(data[start:last]).split(_END, self._count - len(self._lines)):
            if len(self._lines) == self._count:
                break
            value = _FLAGS.get(line)
            self._lines.append(_read_line(line) if value is None else value)
            start += len(line) + 2
        if len(self._lines) == self._count:
            self.finish(self._lines)
        return start


class Value(PendingReply):
    """An object: a line with its length, its header, its bytes, and an end of line.

    `on_piece` is called with each piece of the slot that has been filled, in order.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        slot: Buffers,
        on_piece: Callable[[memoryview], None] | None = None,
    ) -> None:
        super().__init__(loop)
        self._on_piece = on_piece
        self._slot = deque(buffer for buffer in slot if buffer.nbytes)
        self._length = HEADER_BYTES + sum(buffer.nbytes for buffer in slot)
        self._line_bytes = len(b"$%d\r\n" % self._length)
        self._header: bytes | None = None
        self._is_begun = False
        self._to_drain = 0

    def num_bytes_wanted(self) -> int:
        if self._length <= SMALL_BYTES:
            return SCRATCH_BYTES
        if not self._is_begun:
            return self._line_bytes + HEADER_BYTES
        if self._to_drain:
            return min(self._to_drain, SCRATCH_BYTES)
        return HEADER_BYTES if self._header is None else 2

    def target(self) -> memoryview | None:
        if self._header is None or not self._slot or self._length <= SMALL_BYTES:
            return None
        return self._slot[0]

    def advance(self, count: int) -> None:
        buffer = self._slot.popleft()
        if self._on_piece is not None:
            self._on_piece(buffer[:count])
        if count < buffer.nbytes:
            self._slot.appendleft(buffer[count:])
        self.is_ending = not self._slot

    def fail(self, error: WireError) -> None:
        self._slot.clear()
        super().fail(error)

    def read(self, data: bytearray, start: int, end: int) -> int:
        if not self._is_begun:
            return self._read_length(data, start, end)
        if self._to_drain:
            return self._drain(data, start, end)
        if self._header is None:
            if end - start < HEADER_BYTES:
                return start
            self._header = bytes(data[start : start + HEADER_BYTES])
            self.is_ending = not self._slot
            return start + HEADER_BYTES
        if self._slot:
            count = min(end - start, self._slot[0].nbytes)
            self._slot[0][:count] = data[start : start + count]
            self.advance(count)
            return start + count
        if end - start < 2:
            return start
        _require_end(data, start)
        self.finish(self._header)
        return start + 2

    def _read_length(self, data: bytearray, start: int, end: int) -> int:
        line_end = _line_end(data, start, end)
        if line_end < 0:
            return start
        line = bytes(data[start:line_end])
        if line[:1] != b"$" or line == b"$-1":
            reply = _read_line(line)
            if reply is not None and not isinstance(reply, ErrorReply):
                raise WireError("the server answered something else than a value")
            self.finish(reply)
        else:
            self._is_begun = True
            length = _number(line[1:])
            if length < 0:
                raise WireError("the server named a negative length")
            if length != self._length:
                self._slot.clear()
                if length > DRAIN_BYTES_MAX:
                    raise OversizeError("a value is longer than was asked for")
                self._to_drain = length + 2
        return line_end + 2

    def _drain(self, data: bytearray, start: int, end: int) -> int:
        if self._to_drain > 2:
            count = min(end - start, self._to_drain - 2)
            self._to_drain -= count
            return start + count
        if end - start < 2:
            return start
        _require_end(data, start)
        self.finish(MISFIT)
        return start + 2


class AnyReply(PendingReply):
    """A reply of any kind; lists may lie in lists.

    Args:
        keep: number of elements to keep of a list, by its depth; of deeper lists, all.
        text_bytes_max: of each string; strings are received into scratch memory.
        skips_texts: longer strings are skipped, and empty; else they end the connection.
        bytes_max: see `REPLY_BYTES_MAX`.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        keep: Sequence[int] = (),
        text_bytes_max: int = TEXT_BYTES_MAX,
        *,
        skips_texts: bool = False,
        bytes_max: int = REPLY_BYTES_MAX,
    ) -> None:
        super().__init__(loop)
        self._skips_texts = skips_texts
        self._skipped_bytes = 0  # of the text that comes next
        self._keep = keep
        self._text_bytes_max = text_bytes_max
        self._open: list[_OpenList] = []
        self._left_bytes = bytes_max
        self._text_bytes = -1

    def num_bytes_wanted(self) -> int:
        return max(PIECE_BYTES, self._text_bytes + 2)

    def read(self, data: bytearray, start: int, end: int) -> int:
        if self._skipped_bytes:
            count = min(end - start, self._skipped_bytes)
            self._skipped_bytes -= count
            return start + count
        if self._text_bytes >= 0:
            return self._read_text(data, start, end)
        line_end = _line_end(data, start, end)
        if line_end < 0:
            return start
        line = bytes(data[start:line_end])
        self._charge(line_end + 2 - start)
        if line[:1] == b"*" and line != b"*-1":
            self._begin_list(_number(line[1:]))
        elif line[:1] == b"$" and line != b"$-1":
            self._text_bytes = _number(line[1:])
            if self._skips_texts and self._text_bytes > self._text_bytes_max:
                self._skipped_bytes, self._text_bytes = self._text_bytes, 0
            if not 0 <= self._text_bytes <= self._text_bytes_max:
                raise WireError("the server answered too long a text")
        elif line[:1] == b"-" and self._open:
            raise WireError("the server answered an error in a list")
        else:
            self._add(None if line == b"*-1" else _read_line(line))
        return line_end + 2

    def _begin_list(self, count: int) -> None:
        if not 0 <= count <= self._left_bytes // _ELEMENT_BYTES_MIN:
            raise WireError("the server answered too long a list")
        if len(self._open) >= DEPTH_MAX:
            raise WireError("the server answered too deep a list")
        depth = len(self._open)
        kept = self._keep[depth] if depth < len(self._keep) else count
        self._open.append(_OpenList(count, kept))
        self._fold()

    def _charge(self, num_bytes: int) -> None:
        self._left_bytes -= num_bytes
        if self._left_bytes < 0:
            raise WireError("the server answered too much")

    def _read_text(self, data: bytearray, start: int, end: int) -> int:
        text_end = start + self._text_bytes
        if end < text_end + 2:
            return start
        _require_end(data, text_end)
        self._charge(self._text_bytes + 2)
        self._text_bytes = -1
        self._add(bytes(data[start:text_end]))
        return text_end + 2

    def _add(self, reply: Tree) -> None:
        if not self._open:
            self.finish(reply)
            return
        around = self._open[-1]
        around.num_missing -= 1
        if len(around.elements) < around.num_kept:
            self._charge(ELEMENT_BYTES)
            around.elements.append(reply)
        self._fold()

    def _fold(self) -> None:
        """Close complete lists."""
        if self._open[-1].num_missing == 0:
            self._add(self._open.pop().elements)


@dataclass(slots=True)
class _OpenList:
    """An incomplete list: how many elements are missing, and those that are kept."""

    num_missing: int
    num_kept: int
    elements: list[Tree] = field(default_factory=list)


_REFUSED: Final = re.compile(r"to run the '([a-z|-]{1,32})' command", re.ASCII)
_FLAGS: Final[dict[bytes, Line]] = {b":0": 0, b":1": 1}


def _read_line(line: bytes) -> Line:
    if len(line) > LINE_BYTES_MAX:
        raise WireError("the server answered too long a line")
    kind, rest = line[:1], line[1:]
    if kind == b":":
        return _number(rest)
    if kind == b"+" and len(rest) <= WORD_BYTES_MAX:
        return rest
    if kind == b"-":
        code, _, text = rest.decode("ascii", "replace").partition(" ")
        is_code = code.isascii() and code.isalpha() and code.isupper() and len(code) <= 32
        named = _REFUSED.search(text)
        command = named[1] if named else ""
        return ErrorReply(code if is_code else "ERR", text[:WORD_BYTES_MAX], command)
    if line == b"$-1":
        return None
    raise WireError("the server answered in another protocol")


def _number(digits: bytes) -> int:
    is_negative = digits[:1] == b"-"
    if not digits[is_negative:].isdigit() or len(digits) - is_negative > _DIGITS_MAX:
        raise WireError("the server answered no number where one belongs")
    return int(digits)


def _line_end(data: bytearray, start: int, end: int) -> int:
    """Return the end of the line that begins at `start`; -1 if it is incomplete."""
    line_end = data.find(_END, start, min(end, start + LINE_BYTES_MAX + 2))
    if line_end < 0 and end - start > LINE_BYTES_MAX:
        raise WireError("the server answered too long a line")
    return line_end


def _require_end(data: bytearray, start: int) -> None:
    if data[start : start + 2] != _END:
        raise WireError("a value does not end where it should")
