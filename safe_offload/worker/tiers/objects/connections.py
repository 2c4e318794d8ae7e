"""The connections to the server of a bucket."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Sequence
from typing import Final
from urllib.parse import urlsplit

from safe_offload.worker.tiers.objects.http import Answer, Connection, HttpError

IDLE_S: Final = 10.0
"""A connection that was not used for longer is closed: the server, or what is between, may have
forgotten it."""


class Connections:
    """The connections to one server, made as they are needed and kept for the next request.

    How many there are is up to how many requests are made at a time.

    Args:
        origin: scheme and host, perhaps a port, of the server: "https://s3.example.com".
        timeout_s: no request takes longer, its connection too.
    """

    def __init__(self, origin: str, timeout_s: float) -> None:
        parts = urlsplit(origin)
        self._host = parts.hostname or ""
        self._port = parts.port or (443 if parts.scheme == "https" else 80)
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._timeout_s = timeout_s
        self._idle: list[Connection] = []
        self._is_closed = False

    def __repr__(self) -> str:
        return f"<Connections to {self._host}:{self._port}, {len(self._idle)} idle>"

    async def ask(
        self,
        request: Sequence[bytes],
        into: Sequence[memoryview] | None = None,
        *,
        is_head: bool = False,
    ) -> Answer:
        """Send a request and return its answer; see `Connection.ask`.

        When this returns or raises, nothing writes to `into` any more.

        Raises:
            OSError: there is no answer.
        """
        async with asyncio.timeout(self._timeout_s):
            connection = self._take() or await self._connect()
            try:
                answer = await connection.ask(request, into, is_head=is_head)
            except BaseException:
                connection.abort()
                raise
        if self._is_closed:
            connection.abort()
        elif not connection.is_closed:
            self._idle.append(connection)
        return answer

    def close(self) -> None:
        """Close what is idle; what is in use is closed when its answer has come."""
        self._is_closed = True
        while self._idle:
            self._idle.pop().abort()

    def _take(self) -> Connection | None:
        """Return the connection that was used last, if one is idle."""
        while self._idle:
            connection = self._idle.pop()
            if connection.is_closed:
                continue
            if asyncio.get_running_loop().time() - connection.used_at_s <= IDLE_S:
                return connection
            connection.abort()
        return None

    async def _connect(self) -> Connection:
        if self._is_closed:
            raise HttpError("the connections are closed")
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(
            Connection, self._host, self._port, ssl=self._tls
        )
        return connection
