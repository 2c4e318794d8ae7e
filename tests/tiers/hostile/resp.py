"""A hostile Valkey server: a real one does the work, its answers are replaced on their way."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator

from tests.tiers.hostile.answers import Choice, End, Places, play
from tests.tiers.hostile.resp_answers import (
    EVIL,
    HANDSHAKE,
    KINDS,
    WEIGHTS,
    Scene,
    endless,
    object_at,
)

NUM_OTHERS = 20
GOOD_GREETINGS_OF_100 = 97
LIMIT_BYTES = 1 << 22
WORD_BYTES = 64


class RespServer:
    """One port of hostile answers before a real server.

    Args:
        upstream: socket file or port of the real server.
    """

    def __init__(self, upstream: str | int) -> None:
        self._upstream = upstream
        self.choice: Choice[Scene] = Choice(KINDS, WEIGHTS)
        self.places = Places(0, 0, 0)
        self._others: deque[bytes] = deque(maxlen=NUM_OTHERS)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer the commands of one connection."""
        async with self._real() as (real_reader, real_writer):
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
                if words[0].upper() in (b"AUTH", b"HELLO"):
                    heard += words[1:]
                if not self.choice.is_hostile:
                    writer.write(good)
                    await writer.drain()
                    continue
                rng = self.choice.next()
                others = tuple(self._others)
                scene = Scene(rng, self.places, words, good, others, held, heard)
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

    @contextlib.asynccontextmanager
    async def _real(self) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
        if isinstance(self._upstream, str):
            opening = asyncio.open_unix_connection(self._upstream, limit=LIMIT_BYTES)
        else:
            opening = asyncio.open_connection("127.0.0.1", self._upstream, limit=LIMIT_BYTES)
        reader, writer = await opening
        try:
            yield reader, writer
        finally:
            writer.close()


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
    sign, number = first[:1], first[1:-2]
    parts = [first]
    if sign in b"$=!" and int(number) >= 0:
        parts.append(await reader.readexactly(int(number) + 2))
    elif sign in b"*~>%|":
        count = max(int(number), 0) * (2 if sign in b"%|" else 1) + (sign == b"|")
        parts += [await _read_reply(reader) for _ in range(count)]
    return b"".join(parts)
