"""A tier whose Python, a tenth of a millisecond or more for each object, runs in another process.

In the engine's it would hold the GIL while the engine's thread gives kernels to the GPU. What goes
over are names and numbers of slots: the process maps the slots.
"""

from __future__ import annotations

import asyncio
import errno
import functools
import itertools
import json
import logging
import os
import pickle
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any, Final

from safe_offload import errors
from safe_offload.config.tiers import TierConfig
from safe_offload.errors import ConfigError
from safe_offload.layout import HostLayout
from safe_offload.mapped_files import MappedFile
from safe_offload.threads import environment
from safe_offload.tiers.base import Name, Result, ToldError
from safe_offload.tiers.choice import Facts, OpenTier, open_tier
from safe_offload.tiers.process.child import Setup, framed, read
from safe_offload.tiers.seal import Seal
from safe_offload.tiers.waiting import outlast

logger = logging.getLogger(f"vllm.{__name__}")

START_S: Final = 60.0
KILL_S: Final = 5.0
"""For which a call that was given up may go on, before its process is killed."""
POLL_S: Final = 0.005
_MAIN: Final = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from safe_offload.tiers.process.child import main; main(*map(int, sys.argv[2:]))"
)


class ProcessTier:
    """See `Tier`; its slots are numbers.

    A process that has ended is started again by the next call. One that holds on to slots is
    killed, and no byte moves after that.

    Args:
        facts: see `SealedTier`; they may grow until the first spill.
        memory: of the slots; it stays mapped.

    Attributes:
        process: that runs, or has ended last.

    Raises:
        ConfigError: as `open_store`, or the process does not start.
    """

    def __init__(self, setup: Setup, facts: Mapping[str, str], memory: MappedFile) -> None:
        self.label = setup.config.location.label
        self.used_bytes = -1
        self.num_evicted = 0
        self._num_evicted_before = 0  # by processes that have ended
        self._setup = framed(pickle.dumps(setup))
        self._facts = facts
        self._memory = memory
        self._is_closed = False
        self._connecting = asyncio.Lock()
        try:
            self.process = self._start()
        except OSError as error:
            raise ConfigError(
                f"the system refuses a process for tier {self.label}: {error}. Fix: raise the "
                "limit on processes (ulimit -u, pids.max of the container)."
            ) from error
        self.process.wait_until_ready(self.label)

    def __repr__(self) -> str:
        return f"<ProcessTier {self.label}, process {self.process.program.pid}>"

    async def probe(self, names: Sequence[Name]) -> list[bool]:
        """See `Tier.probe`."""
        if self._is_closed:
            raise OSError(errno.ESHUTDOWN, "the tier is closed")
        process = await self._connected()
        answer = process.ask("probe", names)
        try:
            return list(map(bool, await asyncio.shield(answer)))
        except asyncio.CancelledError:
            self._give_up(process, answer)
            raise

    async def fetch(self, names: Sequence[Name], slots: Sequence[int]) -> list[Result]:
        """See `Tier.fetch`."""
        return await self._move("fetch", names, slots)

    async def spill(self, names: Sequence[Name], slots: Sequence[int]) -> list[Result]:
        """See `Tier.spill`."""
        return await self._move("spill", names, slots)

    async def close(self) -> None:
        """See `Tier.close`."""
        if self._is_closed:
            return
        self._is_closed = True
        try:
            if not self.process.is_over():
                await (await self._connected()).ask("close")
        finally:
            self.process.kill()
            await self.process.ended()

    async def _move(self, verb: str, names: Sequence[Name], slots: Sequence[int]) -> list[Result]:
        if self._is_closed or not names:
            return [Result.CANCELLED] * len(names)
        try:
            process = await self._connected()
        except asyncio.CancelledError:
            return [Result.CANCELLED] * len(names)
        facts = process.news_of(self._facts) if verb == "spill" else None
        answer = process.ask(verb, names, slots, facts)
        await outlast([answer], lambda: self._give_up(process, answer))
        return list(map(Result, answer.result()))

    def _give_up(self, process: Process, answer: asyncio.Future[list[Any]]) -> None:
        """Cancel a call; kill the process if it does not say in time that the call has ended."""

        def end() -> None:
            if not answer.done():
                logger.warning(
                    "The process of tier %s does not respond and is killed. Check for a hung "
                    "device or mount; it is started again.",
                    self.label,
                )
                process.kill()

        process.give_up(answer)
        asyncio.get_running_loop().call_later(KILL_S, end)

    async def _connected(self) -> Process:
        """Return the process, started if there is none; raise OSError if it is refused."""
        return await asyncio.shield(self._connect())

    async def _connect(self) -> Process:
        async with self._connecting:
            if self.process.is_over():
                await self.process.ended()
                self._num_evicted_before = self.num_evicted
                self.process = self._start()
            await self.process.connect(self._take)
            return self.process

    def _start(self) -> Process:
        return Process(self._setup, self._memory)

    def _take(self, kind: str, *said: Any) -> None:
        """Take what the process says beside answers."""
        if kind == "holds":
            self.used_bytes, num_evicted = said
            self.num_evicted = self._num_evicted_before + num_evicted
        elif kind == "log":
            name, level, text = said
            logging.getLogger(name).log(level, "%s", text)
        elif kind == "refused":
            logger.warning("Tier %s cannot be opened again: %s", self.label, *said)
        elif kind == "ended":
            logger.warning("The process of tier %s has ended (%s).", self.label, *said)


class Process:
    """The process of a tier and the connection to it."""

    def __init__(self, setup: bytes, memory: MappedFile) -> None:
        ours, theirs = socket.socketpair()
        self.socket = ours
        descriptors = theirs.fileno(), *memory.descriptors
        command = [sys.executable, "-c", _MAIN, json.dumps(sys.path), *map(str, descriptors)]
        try:
            self.program = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                env=environment(),
                pass_fds=descriptors,
                process_group=0,  # a Ctrl-C is for the engine, which ends it
            )
        except OSError:
            ours.close()
            raise
        finally:
            theirs.close()
        ours.sendall(setup)
        self._numbers = itertools.count()
        self._answers: dict[int, asyncio.Future[list[Any]]] = {}
        self._facts: dict[str, str] = {}
        self._writer: asyncio.StreamWriter | None = None
        self._listening: asyncio.Task[None] | None = None
        self._is_killed = False

    def wait_until_ready(self, label: str) -> None:
        """Return when it has opened its tier; raise ConfigError if it does not."""
        try:
            with Connection(os.dup(self.socket.fileno())) as connection:  # of the same framing
                if not connection.poll(START_S):
                    raise TimeoutError(errno.ETIMEDOUT, f"no answer in {START_S:g} s")
                said, *why = json.loads(connection.recv_bytes())
        except (OSError, EOFError) as error:
            self.program.kill()
            self.program.wait()
            raise ConfigError(
                f"the process of tier {label} does not start: {error!r}. Fix: see what it has "
                "written to the log before this, and restart the server."
            ) from error
        if said != "ready":
            self.program.wait()
            raise errors.ConfigError(why[0])  # as it was raised there, with its fix

    async def connect(self, take: Callable[..., None]) -> None:
        """Listen to it, from the first time on."""
        if self._writer is None:
            reader, self._writer = await asyncio.open_unix_connection(sock=self.socket)
            self._listening = asyncio.ensure_future(self._listen(reader, take))

    def news_of(self, facts: Mapping[str, str]) -> dict[str, str] | None:
        """Return the facts if they are not those that it knows."""
        if (now := dict(facts)) == self._facts:
            return None
        self._facts = now
        return now

    def ask(
        self,
        verb: str,
        names: Sequence[Name] = (),
        slots: Sequence[int] = (),
        facts: dict[str, str] | None = None,
    ) -> asyncio.Future[list[Any]]:
        """Call a verb of the tier; the future fails with OSError if there is no answer."""
        number = next(self._numbers)
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        answer.add_done_callback(lambda _: self._answers.pop(number, None))
        answer.add_done_callback(lambda it: it.cancelled() or it.exception())  # seen in any case
        told = [(name.namespace, name.group_idx, name.block_hash, name.mark) for name in names]
        self._send(verb, number, told, list(slots), facts)
        return answer

    def give_up(self, answer: asyncio.Future[list[Any]]) -> None:
        """Cancel a call; its answer comes when it has ended."""
        for number, other in self._answers.items():
            if other is answer:
                self._send("cancel", number)

    def kill(self) -> None:
        """Let the kernel end it, which takes as long as it has memory to unmap."""
        self._is_killed = True
        self.program.kill()

    def is_over(self) -> bool:
        """Whether it answers no further call."""
        return self._is_killed or self.program.poll() is not None

    async def ended(self) -> None:
        """Return when it has ended and been listened to."""
        await self._reap()
        if self._listening is None:
            self.socket.close()
        else:
            await asyncio.wait([self._listening])

    async def _reap(self) -> int:
        """Return its exit status when it has ended."""
        while (status := self.program.poll()) is None:  # noqa: ASYNC110 - nothing tells
            await asyncio.sleep(POLL_S)
        return status

    def _send(self, *call: object) -> None:
        assert self._writer is not None
        self._writer.write(framed(pickle.dumps(call)))

    async def _listen(self, reader: asyncio.StreamReader, take: Callable[..., None]) -> None:
        try:
            while True:
                kind, *said = json.loads(await read(reader))
                if kind in ("done", "failed"):
                    self._settle(kind, *said)
                else:
                    take(kind, *said)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        except Exception:
            logger.exception("The process of a tier says what it should not, and is killed")
        finally:
            self.kill()
            status = await self._reap()
            if self._writer is not None:
                self._writer.close()
            if self._answers:
                take("ended", status)
            for number in list(self._answers):
                self._settle("failed", number, f"its process has ended ({status})")

    def _settle(self, kind: str, number: int, found: Any) -> None:
        answer = self._answers.get(number)
        if answer is None or answer.done():
            return
        if kind == "done":
            answer.set_result(found)
        else:
            answer.set_exception(ToldError(errno.EIO, found))


def opener(memory: MappedFile, layout: HostLayout) -> OpenTier:
    """Return what opens tiers as `open_tier` does, in processes that map the slots."""

    def make(config: TierConfig, slot_bytes: int, facts: Facts, seal: Seal) -> ProcessTier:
        level = logging.getLogger("vllm").getEffectiveLevel()
        return ProcessTier(Setup(config, slot_bytes, seal, layout, level), facts, memory)

    return functools.partial(open_tier, make=make)
