"""An HTTP server of one page, in a thread beside vLLM's scheduler, which it must not delay.

Clients may leave connections open, send byte by byte or endlessly, or find the process out of
descriptors. So connections are few, each has a deadline, and the thread sleeps between small pieces
of work: a thread that only waits for the GIL gets it after 5 ms at the earliest. No HTTP server
among vLLM's dependencies has these bounds.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterable

logger = logging.getLogger(f"vllm.{__name__}")

CONNECTIONS_MAX = 16
"""A further one closes the oldest without a request yet; if all have sent one, it waits."""
DEADLINE_S = 10.0
"""For each connection, which ends with its response."""
REQUEST_BYTES_MAX = 1 << 14
SLICE_S, PAUSE_S = 0.0003, 0.001
ACCEPT_PAUSE_S = 0.01
"""After each connection, also after a failed accept."""
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class PageServer:
    """Responds to each GET with the page. Only its thread changes its state.

    Bound: `CONNECTIONS_MAX` tasks.

    Args:
        make_pieces: makes the page in small pieces; no other Python thread runs during a piece.

    Raises:
        OSError: the port cannot be opened.
        OverflowError: the port number is invalid.
    """

    def __init__(self, port: int, host: str, make_pieces: Callable[[], Iterable[bytes]]) -> None:
        self._make_pieces = make_pieces
        self._listener = _listen(port, host)
        self.port: int = self._listener.getsockname()[1]
        self._tasks: set[asyncio.Task[None]] = set()
        self._silent: dict[asyncio.Task[None], None] = {}
        self._page_lock = asyncio.Lock()
        with contextlib.ExitStack() as undo:
            undo.callback(self._listener.close)
            self._loop = asyncio.new_event_loop()
            undo.pop_all()
        self._is_stopping = False
        self._thread = threading.Thread(target=self._run, name="safe-offload-metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Free the port."""
        with contextlib.suppress(RuntimeError):  # it is closed
            self._loop.call_soon_threadsafe(self._stop)
        self._thread.join()

    def _stop(self) -> None:
        self._is_stopping = True
        for task in self._tasks:
            task.cancel()
        # Makes `sock_accept` fail. If it were cancelled, asyncio might log an error.
        self._listener.shutdown(socket.SHUT_RDWR)

    def _run(self) -> None:
        with self._listener, contextlib.closing(self._loop):
            self._loop.run_until_complete(self._accept())

    async def _accept(self) -> None:
        async with asyncio.TaskGroup() as group:
            while not self._is_stopping:
                await asyncio.sleep(ACCEPT_PAUSE_S)
                while len(self._tasks) >= CONNECTIONS_MAX:
                    for task in list(self._silent)[:1]:
                        task.cancel()
                    await asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED)
                try:
                    connection, _ = await self._loop.sock_accept(self._listener)
                except OSError:  # out of descriptors
                    continue
                task = group.create_task(self._serve(connection))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)

    async def _serve(self, connection: socket.socket) -> None:
        try:
            with connection:
                async with asyncio.timeout(DEADLINE_S):
                    await self._answer(connection)
        except Exception:  # of this connection alone
            logger.debug("A connection to the metrics' port has failed.", exc_info=True)

    async def _answer(self, connection: socket.socket) -> None:
        if await self._read_method(connection) == b"GET":
            status, page = "200 OK", await self._make_page()
        else:
            status, page = "405 Method Not Allowed", b""
        head = (
            f"HTTP/1.1 {status}\r\nContent-Type: {CONTENT_TYPE}\r\nContent-Length: {len(page)}"
            "\r\nAllow: GET\r\nConnection: close\r\n\r\n"
        )
        await self._loop.sock_sendall(connection, head.encode() + page)

    async def _read_method(self, connection: socket.socket) -> bytes:
        """Return the method of a request; ConnectionError if its head is incomplete or too long."""
        task = asyncio.current_task()
        assert task is not None
        self._silent[task] = None
        try:
            head = b""
            while True:
                piece = await self._loop.sock_recv(connection, REQUEST_BYTES_MAX)
                head += piece
                if b"\r\n\r\n" in head:
                    break
                if not piece or len(head) >= REQUEST_BYTES_MAX:
                    raise ConnectionError("incomplete or oversized request")
                await asyncio.sleep(PAUSE_S)
            return head.partition(b" ")[0]
        finally:
            del self._silent[task]

    async def _make_page(self) -> bytes:
        """Return the page; one is made at a time, with pauses between pieces."""
        async with self._page_lock:
            pieces: list[bytes] = []
            end_s = time.perf_counter() + SLICE_S
            for piece in self._make_pieces():
                pieces.append(piece)
                if time.perf_counter() >= end_s:
                    await asyncio.sleep(PAUSE_S)
                    end_s = time.perf_counter() + SLICE_S
            return b"".join(pieces)


def _listen(port: int, host: str) -> socket.socket:
    if not 0 <= port < 1 << 16:
        raise OverflowError(f"port {port} is not one of 0 to 65535")
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    family, kind, _, _, address = found[0]
    listener = socket.socket(family, kind)
    with contextlib.ExitStack() as undo:
        undo.callback(listener.close)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setblocking(False)
        listener.bind(address)
        listener.listen(CONNECTIONS_MAX)
        undo.pop_all()
    return listener
