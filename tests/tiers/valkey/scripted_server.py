"""A server that answers what a test says, in pieces and when the test says."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import threading
from collections.abc import Callable, Sequence

import pytest

from safe_offload.tiers import base
from safe_offload.tiers.base import Tier
from tests.tiers.contract import name_of
from tests.valkey_server import LOCALHOST, Certificates
from tests.worker.waiting import PATIENCE_S

_GREETING = {
    b"CLIENT": b"+OK\r\n",
    b"AUTH": b"+OK\r\n",
    b"SELECT": b"+OK\r\n",
    b"CLUSTER": b"-ERR This instance has cluster support disabled\r\n",
}


class Peer:
    """One connection, seen from the server."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self._kept = b""

    def command(self) -> list[bytes]:
        """Read one command. Raises ConnectionError if there are no more."""
        return [self._text() for _ in range(int(self._line()[1:]))]

    def begin_command(self) -> list[bytes]:
        """Read the first two words of a command, and leave the rest unread."""
        self._line()
        return [self._text(), self._text()]

    def read_to_the_end(self) -> bytes:
        """Read all that comes."""
        read, self._kept = [self._kept], b""
        with contextlib.suppress(OSError):
            while piece := self.connection.recv(1 << 20):
                read.append(piece)
        return b"".join(read)

    def send(self, data: bytes) -> None:
        self.connection.sendall(data)

    def _line(self) -> bytes:
        while b"\r\n" not in self._kept:
            self._kept += self._piece()
        line, _, self._kept = self._kept.partition(b"\r\n")
        return line

    def _text(self) -> bytes:
        length = int(self._line()[1:])
        while len(self._kept) < length + 2:
            self._kept += self._piece()
        text, self._kept = self._kept[:length], self._kept[length + 2 :]
        return text

    def _piece(self) -> bytes:
        if piece := self.connection.recv(1 << 16):
            return piece
        raise ConnectionError


Script = Callable[[Peer], None]


class ScriptedServer:
    """Runs a script for each connection that has asked something about objects; `with` starts it.

    `script`: is called when a connection has been greeted; the connection ends when it returns;
    `greeting`: what commands of a greeting are answered, if not as by one server alone; `greets`:
    the commands of a greeting that the script does not see.
    """

    def __init__(
        self,
        script: Script,
        *,
        tls: Certificates | None = None,  # with TLS
        greeting: dict[bytes, bytes] | None = None,
        greets: Sequence[bytes] = tuple(_GREETING),
    ) -> None:
        self.num_connections = 0
        self._script = script
        self._context: ssl.SSLContext | None = None
        if tls is not None:
            self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            self._context.load_cert_chain(tls.cert, tls.key)
        self._answers = {word: _GREETING[word] for word in greets} | (greeting or {})
        self._listener = socket.create_server((LOCALHOST, 0))
        self._threads: list[threading.Thread] = []
        self._open: list[socket.socket] = []

    @property
    def port(self) -> int:
        port: int = self._listener.getsockname()[1]
        return port

    def __enter__(self) -> ScriptedServer:
        self._start(self._accept)
        return self

    def __exit__(self, *error: object) -> None:
        for each in (self._listener, *self._open):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()
        for thread in self._threads:
            thread.join(PATIENCE_S)
            assert not thread.is_alive()

    def _start(self, work: Callable[..., None], *args: object) -> None:
        thread = threading.Thread(target=work, args=args, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                connection.settimeout(PATIENCE_S)
                self.num_connections += 1
                self._open.append(connection)
                self._start(self._serve, connection)

    def _serve(self, plain: socket.socket) -> None:
        with contextlib.suppress(OSError, ValueError):
            connection = plain
            if self._context is not None:
                connection = self._context.wrap_socket(plain, server_side=True)
                self._open.append(connection)
            peer = Peer(connection)
            with connection:
                self._script(_Greeted(peer, self._answers))


class _Greeted(Peer):
    """A connection whose greeting is answered without the script."""

    def __init__(self, peer: Peer, answers: dict[bytes, bytes]) -> None:
        super().__init__(peer.connection)
        self._answers = answers

    def command(self) -> list[bytes]:
        while (words := super().command())[0] in self._answers:
            self.send(self._answers[words[0]])
        return words

    def begin_command(self) -> list[bytes]:
        while (words := super().begin_command())[0] in self._answers:
            self.send(self._answers[words[0]])
        return words


async def reason_of(tier: Tier) -> str:
    """Return why a tier cannot be asked."""
    with pytest.raises(OSError) as found:  # noqa: PT011 its text is what matters
        await tier.probe([name_of(1)])
    return base.reason_of(found.value)


async def until(is_so: Callable[[], bool]) -> None:
    """Wait until a thread or a process has made something so."""
    async with asyncio.timeout(PATIENCE_S):
        while not is_so():  # noqa: ASYNC110 it is not of this loop
            await asyncio.sleep(0.001)
