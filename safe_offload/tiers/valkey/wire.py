"""One connection to a Valkey or Redis server: values are read into slots.

A connection is a `BufferedProtocol`: the event loop receives into the memory that it hands out,
which is that of a slot while the bytes of an object come. Memory is handed out and filled in one
callback of the loop's thread, so from `abort` on nothing writes to a slot.

A server is not trusted: an unexpected, oversized or malformed reply ends the connection.

No library does this: glide and redis-py copy each object (0.65 and 0.5 GB/s for 2 MiB, here 0.9 to
1.6), and their parsers, hiredis too, allocate whatever length a server names.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import cast

from safe_offload.tiers.base import SINK, Buffers
from safe_offload.tiers.naming import KEY_BYTES_MAX
from safe_offload.tiers.valkey.replies import (
    PAGE_BYTES_MAX,
    RECEIPT_BYTES,
    SCRATCH_BYTES,
    TEXT_BYTES_MAX,
    AnyReply,
    ErrorReply,
    Line,
    Lines,
    Misfit,
    PendingReply,
    Tree,
    Value,
    WireError,
)


class StaleError(WireError):
    """The server closed the connection while it was idle: the request had no answer at all."""


class Wire(asyncio.BufferedProtocol):
    """One connection, of the loop's thread. Replies arrive in the order of their requests."""

    def __init__(self) -> None:
        self.heard_at_s = 0.0
        """When bytes last arrived, by the loop's clock."""
        self._transport: asyncio.Transport | None = None
        self._loop = asyncio.get_running_loop()
        self._pending: deque[PendingReply] = deque()
        self._scratch = bytearray(SCRATCH_BYTES)
        self._view = memoryview(self._scratch)
        self._start = self._end = 0
        self._is_rested = False
        self._error: WireError | None = None

    def __repr__(self) -> str:
        state = "closed" if self.is_closed else "open"
        return f"<Wire, {state}, {len(self._pending)} replies to come>"

    @property
    def is_closed(self) -> bool:
        """Return whether it takes no more requests."""
        return self._error is not None or self._transport is None

    def rest(self) -> None:
        """Mark it as idle. If it ends before bytes arrive again, replies are `StaleError`."""
        self._is_rested = True

    # ---- requests -----------------------------------------------------------------------------

    def request_lines(
        self, pieces: Iterable[bytes | memoryview], count: int
    ) -> asyncio.Future[list[Line]]:
        """Send commands with `count` replies of one line each.

        Their pieces are not copied: they are read until the replies have arrived, or the connection
        is aborted.
        """
        reply = Lines(self._loop, count)
        self._request(pieces, reply)
        return reply.future

    def request_value(
        self,
        command: Iterable[bytes],
        slot: Buffers,
        on_piece: Callable[[memoryview], None] | None = None,
    ) -> asyncio.Future[bytes | Misfit | ErrorReply | None]:
        """Send a command whose reply is an object, and read that into a slot; see `Value`.

        The future is the header once the bytes are in the slot; or a misfit, an error, or None if
        there is no such object.
        """
        reply = Value(self._loop, slot, on_piece)
        self._request(command, reply)
        return reply.future

    def request_tree(
        self,
        command: Iterable[bytes],
        keep: Sequence[int] = (),
        text_bytes_max: int = TEXT_BYTES_MAX,
    ) -> asyncio.Future[Tree]:
        """Send a command with a reply of any kind, of limited size; see `AnyReply`."""
        reply = AnyReply(self._loop, keep, text_bytes_max)
        self._request(command, reply)
        return reply.future

    def request_keys(self, command: Iterable[bytes]) -> asyncio.Future[Tree]:
        """Send a command with a page of keys as reply; keys too long to be ours are empty."""
        reply = AnyReply(
            self._loop, text_bytes_max=KEY_BYTES_MAX, skips_texts=True, bytes_max=PAGE_BYTES_MAX
        )
        self._request(command, reply)
        return reply.future

    def abort(self, error: WireError | None = None) -> None:
        """End the connection: from now on no slot is read or written, and all replies fail."""
        if self._error is not None:
            return
        self._error = error or WireError("the connection was given up")
        self._scratch, self._view = bytearray(), SINK
        self._start = self._end = 0
        pending, self._pending = self._pending, deque()
        for reply in pending:
            reply.fail(self._error)
        if self._transport is not None:
            self._transport.abort()

    def _request(self, pieces: Iterable[bytes | memoryview], reply: PendingReply) -> None:
        if self._error is not None or self._transport is None:
            reply.fail(self._error or WireError("there is no connection"))
            return
        self._pending.append(reply)
        self._transport.writelines(pieces)

    # ---- what the event loop calls ------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def connection_lost(self, exc: Exception | None) -> None:
        kind = StaleError if self._is_rested else WireError
        self.abort(kind("the server closed the connection"))

    def eof_received(self) -> bool:
        self.connection_lost(None)
        return False

    def get_buffer(self, sizehint: int) -> memoryview:
        if self._error is not None:
            return self._view
        if self._start == self._end:
            self._start = self._end = 0
        room = 1  # nothing is to come
        if self._pending:
            reply = self._pending[0]
            target = reply.target()
            if target is not None and self._start == self._end:
                return target[:RECEIPT_BYTES]
            room = reply.num_bytes_wanted()
            if reply.is_ending and len(self._pending) > 1:
                room += self._pending[1].num_bytes_wanted()
            room -= self._end - self._start
        if self._end + room > SCRATCH_BYTES:
            kept = self._end - self._start
            self._view[:kept] = bytes(self._view[self._start : self._end])
            self._start, self._end = 0, kept
        return self._view[self._end : self._end + max(room, 1)]

    def buffer_updated(self, nbytes: int) -> None:
        if self._error is not None:
            return
        self.heard_at_s = self._loop.time()
        self._is_rested = False
        if self._pending and self._start == self._end and self._pending[0].target() is not None:
            self._pending[0].advance(nbytes)
            return
        self._end += nbytes
        self._parse()

    def _parse(self) -> None:
        """Give received bytes to the replies that expect them."""
        try:
            while self._pending and self._start < self._end:
                reply = self._pending[0]
                before = self._start
                self._start = reply.read(self._scratch, self._start, self._end)
                if reply.is_done:
                    self._pending.popleft()
                elif self._start == before:
                    break
            if self._start < self._end and not self._pending:
                raise WireError("the server sent what was not asked for")
        except WireError as error:
            self.abort(error.with_traceback(None))  # whose frames hold the scratch memory
