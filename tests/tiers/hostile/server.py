"""The process of a hostile Valkey server, and the handle that starts and steers it.

A real server does the work, its answers are replaced on their way. The process listens on a free
port of 127.0.0.1, reads commands from its standard input, each one line of JSON, answers each with
one, and ends with its input.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import select
import socket
import subprocess
import sys
import tempfile
from collections import Counter, deque
from pathlib import Path
from typing import Any

from redis import Redis

from tests.tiers.hostile.answers import (
    EVIL,
    HANDSHAKE,
    PASSWORD,
    Choice,
    End,
    Places,
    Scene,
    endless,
    object_at,
    play,
)
from tests.valkey_server import Server, free_port, wait_for

ROOT = Path(__file__).parents[3]
PATIENCE_S = 250.0
PROTOCOLS = RESP, CLUSTER = "resp", "cluster"
NUM_OTHERS = 20
GOOD_GREETINGS_OF_100 = 97
LIMIT_BYTES = 1 << 22
WORD_BYTES = 64


# ---- the handle -------------------------------------------------------------------------------


class HostileServer:
    """A hostile server in a process of its own; as a context it ends with it.

    `protocol`: one of PROTOCOLS; `folder`: for the real server behind it.
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
        """Return how many answers of each kind there were, and what came to the trap."""
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


# ---- the connections --------------------------------------------------------------------------


class RespServer:
    """One port of hostile answers before a real server.

    `upstream`: socket file of the real server.
    """

    def __init__(self, upstream: str) -> None:
        self._upstream = upstream
        self.choice = Choice()
        self.places = Places(0, 0, 0)
        self._others: deque[bytes] = deque(maxlen=NUM_OTHERS)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer the commands of one connection."""
        real_reader, real_writer = await asyncio.open_unix_connection(
            self._upstream, limit=LIMIT_BYTES
        )
        try:
            await self._serve(reader, writer, real_reader, real_writer)
        finally:
            real_writer.close()

    async def _serve(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        real_reader: asyncio.StreamReader,
        real_writer: asyncio.StreamWriter,
    ) -> None:
        if not await self._greet(reader, writer):
            return
        held: list[bytes] = []
        heard: list[bytes] = []
        while (command := await read_command(reader)) is not None:
            words, raw = command
            real_writer.write(raw)
            good = await _read_reply(real_reader)
            has_object = object_at(good) is not None
            if has_object:
                self._others.append(good)
            if words[0].upper() == b"AUTH":
                heard += words[1:]
            if not self.choice.is_hostile:
                writer.write(good)
                await writer.drain()
                continue
            rng = self.choice.next()
            scene = Scene(rng, self.places, words, good, tuple(self._others), held, heard)
            is_start = words[0].upper() in HANDSHAKE
            steps = self.choice.choose(rng, scene, is_start=is_start, is_small=not has_object)
            if steps is None:
                steps = [good]
                if held and rng.random() < 0.5:
                    steps = [good, *held] if rng.random() < 0.5 else [*held, good]
                    held.clear()
            if not await play(steps, reader, writer):
                return

    async def _greet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Do what is bad before anything was asked; return whether the connection goes on."""
        if not self.choice.is_hostile or self.choice.only:
            return True
        rng = self.choice.next()
        if rng.randrange(100) < GOOD_GREETINGS_OF_100:
            return True
        self.choice.counts["greeting"] += 1
        greetings = ([b"+OK\r\n"], [EVIL], endless(b"hello "), [End.SILENCE], [End.RESET])
        return await play(rng.choice(greetings), reader, writer)


async def read_command(reader: asyncio.StreamReader) -> tuple[list[bytes], bytes] | None:
    """Return the words of a command, each cut, and all of its bytes; None at the end."""
    try:
        first = await reader.readline()
        if first[:1] != b"*" or not first.endswith(b"\r\n"):
            return None
        parts, words = [first], []
        for _ in range(int(first[1:])):
            length = await reader.readline()
            word = await reader.readexactly(int(length[1:]) + 2)
            parts += (length, word)
            words.append(word[:-2][:WORD_BYTES])
    except (asyncio.IncompleteReadError, ValueError):
        return None
    return words, b"".join(parts)


async def _read_reply(reader: asyncio.StreamReader) -> bytes:
    """Return one whole reply of the real server."""
    first = await reader.readuntil(b"\r\n")
    parts, number = [first], first[1:-2]
    if first[:1] == b"$" and int(number) >= 0:
        parts.append(await reader.readexactly(int(number) + 2))
    elif first[:1] == b"*":
        parts += [await _read_reply(reader) for _ in range(int(number))]
    return b"".join(parts)


class Trap:
    """A port that only a server's answer can have named, and what was brought there."""

    def __init__(self) -> None:
        self.num_connections = 0
        self.proofs: Counter[str] = Counter()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Count a connection and the passwords that come with it."""
        self.num_connections += 1
        said = await reader.read(1 << 16)
        if b"AUTH" in said.upper():
            self.proofs["AUTH"] += 1
        await play([b"-ERR this is a trap\r\n"], reader, writer)


# ---- the process ------------------------------------------------------------------------------


def _real_server(folder: Path, own_port: int, *, is_cluster: bool) -> Server:
    """Return the real server; of a cluster, it tells clients to come to `own_port`."""
    options = {"requirepass": PASSWORD, "maxmemory": "64mb", "maxmemory-policy": "allkeys-lru"}
    if is_cluster:
        options |= {"cluster-enabled": "yes", "cluster-port": str(free_port())}
        options |= {"cluster-announce-ip": "127.0.0.1", "cluster-announce-port": str(own_port)}
    server = Server(folder, options)
    server.start()
    if is_cluster:
        with Redis(unix_socket_path=str(server.socket), password=PASSWORD) as client:
            client.execute_command("CLUSTER", "ADDSLOTSRANGE", 0, 16383)
            wait_for(lambda: client.cluster("INFO")["cluster_state"] == "ok", "the cluster")
    return server


def _contained(serve: Any, serving: set[Any]) -> Any:
    """Return a handler of connections that ends with them, whatever happens."""

    async def serve_one(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        serving.add(asyncio.current_task())  # nothing else keeps it
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
        real = _real_server(folder, own_port, is_cluster=protocol == CLUSTER)
        server, trap, serving = RespServer(str(real.socket)), Trap(), set[Any]()
        try:
            trapping = await asyncio.start_server(_contained(trap.serve, serving), "127.0.0.1", 0)
            trap_port = trapping.sockets[0].getsockname()[1]
            server.places = Places(own_port, reserved.getsockname()[1], trap_port)
            await asyncio.start_server(
                _contained(server.serve, serving), sock=listening, limit=LIMIT_BYTES
            )
            await _obey(server, trap, own_port)
        finally:
            real.kill()


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
