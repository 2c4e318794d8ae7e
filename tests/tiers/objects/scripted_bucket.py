"""An object store that speaks HTTP as a test says: it notes each request and answers at will.

What it is asked for without a script it keeps in memory, as S3, Google's and Azure's stores all do.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import NamedTuple

import pytest

from tests.tiers.valkey.scripted_server import Peer

DATE = "Mon, 05 Jan 2026 10:00:00 GMT"
NO_CONTENT = b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"


class Request(NamedTuple):
    """What came: its head, names of headers in lower case, and its body."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes


Script = Callable[[Request], bytes | None]
"""Returns all bytes of an answer; None for no answer."""


def answer(status: str, body: bytes = b"", **headers: str) -> bytes:
    """Return an answer; `headers` are in the place of the usual ones."""
    lines = {"Content-Length": str(len(body)), "Last-Modified": DATE, "ETag": '"e"'}
    lines["Connection"] = "close"
    lines |= {name.replace("_", "-"): value for name, value in headers.items()}
    head = "".join(f"{name}: {value}\r\n" for name, value in lines.items() if value)
    return f"HTTP/1.1 {status}\r\n{head}\r\n".encode() + body


class ScriptedBucket:
    """The server, on a free port, within an `async with` block."""

    def __init__(self, script: Script | None = None) -> None:
        self.requests: list[Request] = []  # that have come
        self.script = script  # says how they are answered; None for a store in memory
        self.objects: dict[str, bytes] = {}  # that the store in memory has, by their paths
        self.num_open = 0  # connections that are open now
        self.may_read = asyncio.Event()  # is waited for before a body is read
        self.may_read.set()
        self._server: asyncio.Server | None = None
        self._handlers: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> ScriptedBucket:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()
        for task in self._handlers:
            task.cancel()
        await asyncio.gather(*self._handlers, return_exceptions=True)

    @property
    def endpoint(self) -> str:
        """Its address."""
        assert self._server is not None
        return f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    def methods(self) -> list[str]:
        """Return the methods of the requests that have come."""
        return [request.method for request in self.requests]

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._handlers.add(task)
        self.num_open += 1
        try:
            with contextlib.suppress(OSError, EOFError, asyncio.CancelledError):
                await self._serve_one(reader, writer)
        finally:
            self.num_open -= 1
            self._handlers.discard(task)
            writer.close()

    async def _serve_one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        method, path, _ = head[0].split(" ", 2)
        lines = (line.partition(":") for line in head[1:] if line)
        headers = {name.lower(): value.strip() for name, _, value in lines}
        number = len(self.requests)
        self.requests.append(Request(method, path, headers, b""))
        await self.may_read.wait()
        body = bytearray()
        while left := int(headers.get("content-length", 0)) - len(body):
            part = await reader.read(left)
            body += part
            self.requests[number] = Request(method, path, headers, bytes(body))
            if not part:
                return
        script = self.script or self._keep
        answered = script(self.requests[number])
        if answered is None:
            await reader.read()  # until the client goes
            return
        writer.write(answered)
        await writer.drain()

    def _keep(self, request: Request) -> bytes:
        path = request.path.partition("?")[0]
        if request.method == "PUT":
            is_new_only = {"if-none-match", "x-goog-if-generation-match"} & set(request.headers)
            if path in self.objects and is_new_only:
                return answer("412 Precondition Failed")
            self.objects[path] = request.body
            return answer("201 Created", x_ms_request_server_encrypted="true")
        if request.method == "DELETE":
            return answer("204 No Content" if self.objects.pop(path, None) else "404 Not Found")
        if path not in self.objects:
            return answer("404 Not Found")
        found = self.objects[path]
        if request.method == "HEAD":
            return answer("200 OK", Content_Length=str(len(found)))
        return answer("200 OK", found)


def known_to_the_tier(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set credentials, no files of the user's, no proxy."""
    for variable in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY"):
        monkeypatch.delenv(variable, raising=False)
        monkeypatch.delenv(variable.lower(), raising=False)
    for variable, value in (
        *(("HOME", "/nowhere"), ("AWS_REGION", "us-east-1")),
        *(("AWS_ACCESS_KEY_ID", "access"), ("AWS_SECRET_ACCESS_KEY", "secret")),
    ):
        monkeypatch.setenv(variable, value)


def head_from(peer: Peer) -> bytes:
    """Return the head of a request; nothing of its body is read."""
    head = b""
    while not head.endswith(b"\r\n\r\n"):
        byte = peer.connection.recv(1)
        if not byte:
            raise ConnectionError
        head += byte
    return head
