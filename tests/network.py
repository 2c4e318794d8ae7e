"""Bad networks for tests: a TCP proxy with latency, little bandwidth, losses and stalls.

The proxy runs in a process of its own and is told over a pipe what to do from now on. A loss is
what TCP makes of one for an application: a segment of 64 KiB comes later by a retransmission
time-out, which doubles each time it is lost again, and all behind it waits; a segment that was lost
`RETRANSMISSIONS_MAX` times in a row resets the connection. `tc netem` would do it in the kernel,
where its module exists.

Two engines are on two machines where they are in two network namespaces (`Machines`), which takes
root; addresses of the loopback interface, 127.0.0.2 and so on, are the next best.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import multiprocessing
import os
import random
import secrets
import socket
import ssl
import struct
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

SEGMENT_BYTES = 64 << 10
RETRANSMISSION_S = 0.2
"""Linux waits no shorter: TCP_RTO_MIN in include/net/tcp.h."""
RETRANSMISSIONS_MAX = 5
SEGMENTS_HELD = 64
"""In each direction of a connection; then the sender has to wait."""
TIMEOUT_S = 250.0


@dataclass(frozen=True, slots=True)
class Weather:
    """How a network fares, in each direction."""

    latency_s: float = 0.0  # of every segment
    bytes_per_s: float = 0.0  # of all connections together; 0 for no limit
    loss: float = 0.0  # how likely a segment is lost
    retransmission_s: float = RETRANSMISSION_S  # the first time-out
    is_stalled: bool = False  # connections are accepted, and nothing comes through
    # Files of a certificate and its key, for TLS; new connections have it.
    certificate: tuple[str, str] | None = None


FAIR = Weather()
CUT = "cut"
"""Told instead of a weather: end all connections now, in the middle of whatever is sent."""


class Proxy:
    """A proxy to one address; use it as a context manager, which ends its process."""

    def __init__(
        self,
        target: tuple[str, int],  # host and port that it connects to
        weather: Weather = FAIR,  # at first
        *,
        host: str = "127.0.0.1",  # address to listen on
        seed: int = 1,  # of the losses
    ) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, other_end = context.Pipe()
        self.host = host
        self._process = context.Process(
            target=_run, args=(other_end, host, target, weather, seed), daemon=True
        )
        self._process.start()
        other_end.close()
        self.port: int = self._receive()  # it listens on

    def __enter__(self) -> Proxy:
        return self

    def __exit__(self, *_: object) -> None:
        self._pipe.close()
        self._process.kill()
        self._process.join()

    def become(self, weather: Weather) -> None:
        """Have another weather, for what comes through from now on."""
        self._pipe.send(weather)
        self._receive()

    def cut(self) -> None:
        """End all connections now."""
        self._pipe.send(CUT)
        self._receive()

    def _receive(self) -> Any:
        assert self._pipe.poll(TIMEOUT_S), "the proxy does not answer"
        return self._pipe.recv()


def _run(pipe: Connection, host: str, target: tuple[str, int], weather: Weather, seed: int) -> None:
    with contextlib.suppress(EOFError, KeyboardInterrupt):
        asyncio.run(_Forwarder(pipe, target, weather, seed).serve(host))


class _Forwarder:
    """What runs in the proxy's process."""

    def __init__(
        self, pipe: Connection, target: tuple[str, int], weather: Weather, seed: int
    ) -> None:
        self._pipe, self._target = pipe, target
        self._weather = weather
        self._chance = random.Random(seed)
        self._blows = asyncio.Event()  # set unless it is stalled
        self._free_s = [0.0, 0.0]  # when the last segment of each direction has been sent
        self._sockets: set[asyncio.StreamWriter] = set()
        self._has_ended = asyncio.Event()
        self._is_tls = weather.certificate is not None

    async def serve(self, host: str) -> None:
        """Forward connections until the other end of the pipe is gone."""
        loop = asyncio.get_running_loop()
        self._loop = loop
        self._tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER) if self._is_tls else None
        self._become(self._weather)
        server = await asyncio.start_server(
            self._accept, host, 0, ssl=self._tls, limit=SEGMENT_BYTES
        )
        loop.add_reader(self._pipe.fileno(), self._obey)
        self._pipe.send(server.sockets[0].getsockname()[1])
        await self._has_ended.wait()

    def _obey(self) -> None:
        try:
            told = self._pipe.recv()
        except EOFError:
            self._loop.remove_reader(self._pipe.fileno())
            self._has_ended.set()
            return
        if told == CUT:
            for writer in self._sockets:
                _reset(writer)
        else:
            self._become(told)
        self._pipe.send(None)

    def _become(self, weather: Weather) -> None:
        self._weather = weather
        if self._tls is not None and weather.certificate is not None:
            self._tls.load_cert_chain(*weather.certificate)
        (self._blows.clear if weather.is_stalled else self._blows.set)()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._sockets.add(writer)
        try:
            await self._blows.wait()
            other_reader, other_writer = await asyncio.open_connection(
                *self._target, limit=SEGMENT_BYTES
            )
        except OSError:
            self._forget(writer)
            return
        self._sockets.add(other_writer)
        ways = [(reader, other_writer, 0), (other_reader, writer, 1)]
        tasks = [asyncio.ensure_future(self._forward(*way)) for way in ways]
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._forget(writer)
        self._forget(other_writer)

    def _forget(self, writer: asyncio.StreamWriter) -> None:
        self._sockets.discard(writer)
        writer.close()

    async def _forward(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, way: int
    ) -> None:
        """Bring one direction of a connection from one end to the other, until either ends."""
        held: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(SEGMENTS_HELD)

        async def deliver() -> None:
            while True:
                due_s, segment = await held.get()
                await asyncio.sleep(due_s - self._loop.time())
                await self._lose(writer)
                await self._blows.wait()
                writer.write(segment)
                await writer.drain()
                held.task_done()

        delivering, emptied = asyncio.ensure_future(deliver()), None
        try:
            while segment := await reader.read(SEGMENT_BYTES):
                await held.put((self._due_s(len(segment), way), segment))
            emptied = asyncio.ensure_future(held.join())
            await asyncio.wait({delivering, emptied}, return_when=asyncio.FIRST_COMPLETED)
        except OSError:
            pass
        finally:
            if emptied is not None:
                emptied.cancel()
            delivering.cancel()
            with contextlib.suppress(asyncio.CancelledError, OSError):
                await delivering

    def _due_s(self, size_bytes: int, way: int) -> float:
        weather, now_s = self._weather, self._loop.time()
        if weather.bytes_per_s:
            self._free_s[way] = max(self._free_s[way], now_s) + size_bytes / weather.bytes_per_s
            now_s = self._free_s[way]
        return now_s + weather.latency_s

    async def _lose(self, writer: asyncio.StreamWriter) -> None:
        """Wait as long as a segment takes that may be lost some times."""
        wait_s = self._weather.retransmission_s
        for _ in range(RETRANSMISSIONS_MAX):
            if self._chance.random() >= self._weather.loss:
                return
            await asyncio.sleep(wait_s)
            wait_s *= 2
        _reset(writer)
        raise ConnectionResetError


def _reset(writer: asyncio.StreamWriter) -> None:
    """End a connection with RST, so that what has been sent is lost."""
    found = writer.get_extra_info("socket")
    if found is not None:
        with contextlib.suppress(OSError):
            found.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


# ---- machines ----------------------------------------------------------------------------------

_CLONE_NEWNET = 0x40000000
_FOLDER = Path("/run/netns")


class Machines:
    """Network namespaces, each with one address, joined by a bridge that this process is on too.

    Use it as a context manager, which takes them away. `count`: of them.
    """

    def __init__(self, count: int) -> None:
        self._word = secrets.token_hex(3)
        self._bridge = f"sob{self._word}"
        self.names = [f"sob{self._word}n{index}" for index in range(count)]  # of the namespaces
        net = f"10.{random.randrange(200, 250)}.{random.randrange(256)}"
        # Of the namespaces, and then that of this process.
        self.addresses = [f"{net}.{index + 2}" for index in range(count)] + [f"{net}.1"]

    @staticmethod
    def problem() -> str:
        """Return why there can be none on this machine, or nothing."""
        if os.geteuid():
            return "network namespaces take root"
        try:
            with Machines(1):
                return ""
        except (OSError, subprocess.SubprocessError) as error:
            return f"no network namespaces here: {error}"

    def __enter__(self) -> Machines:
        try:
            self._make()
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._remove()

    def _make(self) -> None:
        _ip("link", "add", self._bridge, "type", "bridge")
        _ip("addr", "add", f"{self.addresses[-1]}/24", "dev", self._bridge)
        _ip("link", "set", self._bridge, "up")
        for index, (name, address) in enumerate(zip(self.names, self.addresses, strict=False)):
            ours, theirs = f"so{self._word}{index}a", f"so{self._word}{index}b"
            _ip("netns", "add", name)
            _ip("link", "add", ours, "type", "veth", "peer", "name", theirs, "netns", name)
            _ip("link", "set", ours, "master", self._bridge, "up")
            _ip("-n", name, "addr", "add", f"{address}/24", "dev", theirs)
            _ip("-n", name, "link", "set", theirs, "up")
            _ip("-n", name, "link", "set", "lo", "up")

    def _remove(self) -> None:
        for what in (
            *(("netns", "del", name) for name in self.names),
            ("link", "del", self._bridge),
        ):
            with contextlib.suppress(OSError, subprocess.SubprocessError):
                _ip(*what)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, timeout=TIMEOUT_S)


def enter(name: str) -> None:
    """Have sockets that this thread makes from now on, and processes it starts, in a namespace."""
    with (_FOLDER / name).open() as there:
        _set_namespace(there.fileno())


@contextlib.contextmanager
def inside(name: str) -> Iterator[None]:
    """Have sockets that this thread makes meanwhile, and processes it starts, in a namespace."""
    with Path("/proc/thread-self/ns/net").open() as here:
        enter(name)
        try:
            yield
        finally:
            _set_namespace(here.fileno())


def _set_namespace(file: int) -> None:
    if ctypes.CDLL(None, use_errno=True).setns(file, _CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "setns")
