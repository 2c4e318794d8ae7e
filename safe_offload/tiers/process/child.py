"""The process of a tier, for `ProcessTier`.

Over one connection, calls arrive as pickles, as only the engine writes to it; answers and log lines
leave as JSON, as the engine must not trust a process that has read from a network. Each message is
preceded by its length, four bytes. When the connection ends, this process ends at once, with all
that it has started: the slots are the engine's.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import pickle
import signal
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from safe_offload.config.tiers import TierConfig
from safe_offload.errors import ConfigError, ProtocolError
from safe_offload.event_loop import new_event_loop
from safe_offload.layout import HostLayout
from safe_offload.mapped_files import map_file
from safe_offload.threads import set_title
from safe_offload.tiers.base import Name, reason_of
from safe_offload.tiers.choice import open_store
from safe_offload.tiers.sealed_tier import SealedTier
from safe_offload.tiers.seals.seal import Seal

logger = logging.getLogger(f"vllm.{__name__}")

LENGTH_BYTES: Final = 4
LOOK_S: Final = 1.0


@dataclass(frozen=True, slots=True)
class Setup:
    """The first message to a process."""

    config: TierConfig
    slot_bytes: int
    seal: Seal
    layout: HostLayout
    log_level: int


async def read(reader: asyncio.StreamReader, bytes_max: int = 1 << 32) -> bytes:
    """Return the next message; asyncio.IncompleteReadError at the end."""
    return await reader.readexactly(length_of(await reader.readexactly(LENGTH_BYTES), bytes_max))


def length_of(head: bytes, bytes_max: int) -> int:
    """Return how long a message is; ProtocolError if it is too long."""
    if (length := int.from_bytes(head, "big")) > bytes_max:
        raise ProtocolError(f"a message of {length} bytes; at most {bytes_max} were expected")
    return length


def framed(message: bytes) -> bytes:
    """Return a message with its length before it."""
    return len(message).to_bytes(LENGTH_BYTES, "big") + message


class _Child:
    def __init__(self, descriptor: int, *guards: int) -> None:
        self._memory = memoryview(map_file(descriptor, *guards))
        os.close(descriptor)
        self._facts: dict[str, str] = {}
        self._reported = -1, 0
        self._tasks: dict[int, asyncio.Task[None]] = {}

    async def serve(self, descriptor: int) -> None:
        connection = socket.socket(fileno=descriptor)
        reader, self._writer = await asyncio.open_unix_connection(sock=connection)
        try:
            self._set_up(pickle.loads(await read(reader)))
            self._send("ready")
        except ConfigError as error:
            self._send("refused", str(error))
            await self._writer.drain()
            return
        looking = asyncio.ensure_future(self._look_around())
        try:
            while True:
                self._take(*pickle.loads(await read(reader)))
        except (asyncio.IncompleteReadError, ConnectionError):
            looking.cancel()
            _end()

    def _set_up(self, setup: Setup) -> None:
        set_title(f"safe-offload tier {setup.config.location.label}")
        logger = logging.getLogger("vllm")
        logger.setLevel(setup.log_level)
        logger.addHandler(_Forward(asyncio.get_running_loop(), self._send))
        self._layout = setup.layout
        self._tier = SealedTier(open_store(setup.config, setup.slot_bytes), self._facts, setup.seal)

    def _take(self, verb: str, number: int, *arguments: Any) -> None:
        if verb == "cancel":
            if (task := self._tasks.get(number)) is not None:
                task.cancel()
            return
        task = self._tasks[number] = asyncio.ensure_future(self._answer(verb, number, *arguments))
        task.add_done_callback(lambda _: self._tasks.pop(number))

    async def _answer(
        self,
        verb: str,
        number: int,
        names: Sequence[tuple[bytes, int, bytes, int]] = (),
        slot_ids: Sequence[int] = (),
        facts: dict[str, str] | None = None,
    ) -> None:
        if facts is not None:
            self._facts |= facts
        try:
            if verb == "close":
                await self._tier.close()
                self._send("done", number, [])
                return
            named = [Name(*name) for name in names]
            if verb == "probe":
                found: list[Any] = list(map(bool, await self._tier.probe(named)))
            else:
                slots = [self._buffers(slot_id) for slot_id in slot_ids]
                move = self._tier.fetch if verb == "fetch" else self._tier.spill
                found = [result.value for result in await move(named, slots)]
        except (Exception, asyncio.CancelledError) as error:  # a probe may be cancelled
            if isinstance(error, Exception) and not isinstance(error, OSError):
                logger.exception(
                    "Unexpected error in tier %s, which stays in use", self._tier.label
                )
            self._send("failed", number, reason_of(error))
        else:
            self._report_holdings()
            self._send("done", number, found)

    def _buffers(self, slot_id: int) -> tuple[memoryview, ...]:
        ranges = self._layout.ranges_of(slot_id)
        return tuple(self._memory[at : at + length] for at, length in ranges)

    async def _look_around(self) -> None:
        """Report what the tier holds when that changes without a call, and end with the engine.

        Another child of the engine may have inherited the other end of the connection.
        """
        engine = os.getppid()
        while os.getppid() == engine:
            await asyncio.sleep(LOOK_S)
            self._report_holdings()
        _end()

    def _report_holdings(self) -> None:
        holds = self._tier.used_bytes, self._tier.num_evicted
        if holds != self._reported:
            self._reported = holds
            self._send("holds", *holds)

    def _send(self, *message: object) -> None:
        self._writer.write(framed(json.dumps(message).encode()))


class _Forward(logging.Handler):
    """Forwards log lines to the engine; any thread may log."""

    def __init__(self, loop: asyncio.AbstractEventLoop, send: Any) -> None:
        super().__init__()
        self._loop = loop
        self._send = send

    def emit(self, record: logging.LogRecord) -> None:
        line = "log", record.name, record.levelno, self.format(record)
        self._loop.call_soon_threadsafe(self._send, *line)


def _end() -> None:
    """End this process and those that it has started, whatever their threads do."""
    os.killpg(os.getpid(), signal.SIGKILL)


def main(descriptor: int, *memory: int) -> None:
    """Serve an engine until it closes its end of a connection; see `MappedFile.descriptors`."""
    for each in (descriptor, *memory):
        os.set_inheritable(each, False)
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        runner.run(_Child(*memory).serve(descriptor))
