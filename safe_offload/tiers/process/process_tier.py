"""A tier in a process of its own, because its Python takes a tenth of a millisecond per object.

In the engine's process, it would hold the GIL while the engine's thread launches kernels. Only
names and numbers of slots are sent: the process maps the slots.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import itertools
import json
import logging
import os
import pickle
import re
import select
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Pipe
from typing import Any, Final

from safe_offload import errors
from safe_offload.config.printing import printable
from safe_offload.config.tiers import TierConfig
from safe_offload.errors import ConfigError, ProtocolError
from safe_offload.layout import HostLayout
from safe_offload.mapped_files import MappedFile
from safe_offload.tiers.base import LoggedError, Name, Result
from safe_offload.tiers.choice import Facts, OpenTier, open_tier
from safe_offload.tiers.process.child import LENGTH_BYTES, Setup, framed, length_of, read
from safe_offload.tiers.process.child_process import ChildProcess
from safe_offload.tiers.seals.seal import Seal
from safe_offload.tiers.waiting import outlast

logger = logging.getLogger(f"vllm.{__name__}")

START_S: Final = 60.0
KILL_S: Final = 5.0
"""How long a cancelled call may go on, before its process is killed."""
POLL_S: Final = 0.005
MESSAGE_BYTES_MAX: Final = 16 << 20
"""Of a message from the process: an answer has a word for each name."""
LINES_MAX: Final = 100
LINE_LENGTH_MAX: Final = 1000
LOGGERS_MAX: Final = 64
_LOGGER: Final = re.compile(r"vllm(\.\w{1,50}){1,8}", re.ASCII)
_TOO_FEW_FILES: Final = (errno.ENFILE, errno.EMFILE)
_MAIN: Final = """
import json, sys
sys.path[:] = json.loads(sys.argv[1])
try:
    from safe_offload.tiers.process.child import main
    main(*map(int, sys.argv[2:]))
except Exception as error:
    while error and getattr(error, "errno", 0) not in (12, 23, 24):  # see Process.wait_until_ready
        error = error.__context__
    if error is None:
        raise
    sys.exit(error.errno)
"""


class ProcessTier:
    """See `Tier`; its slots are numbers. ConfigError: as `open_store`, or it does not start.

    The next call restarts a process that has ended. A process that holds on to slots is killed. A
    call ends when the process answers it, or when the process and all that it has started are dead:
    no byte moves after that.

    Args:
        facts: see `SealedTier`; they may grow until the first spill.
        memory: of the slots; it stays mapped.
    """

    def __init__(self, setup: Setup, facts: Mapping[str, str], memory: MappedFile) -> None:
        self.label = setup.config.location.label
        self.used_bytes = -1
        self.num_evicted = 0
        self.num_restarts = 0
        self._num_evicted_before = 0  # by processes that have ended
        self._setup = framed(pickle.dumps(setup))
        self._facts = facts
        self._memory = memory
        self._loggers: set[str] = set()
        self._is_closed = False
        self._connecting = asyncio.Lock()
        problem = f"the system refuses a process for tier {self.label}"
        try:
            self.process = self._start()
            problem = f"the process of tier {self.label} does not start"
            why = self.process.wait_until_ready()
        except (OSError, ValueError, TypeError) as error:
            raise ConfigError(f"{problem}: {error}. Fix: {_fix_of(error)}.") from error
        if why:
            raise errors.ConfigError(why)  # as it was raised there, with its fix

    def __repr__(self) -> str:
        return f"<ProcessTier {self.label}, process {self.process.program.pid}>"

    async def probe(self, names: Sequence[Name]) -> list[bool]:
        if self._is_closed:
            raise OSError(errno.ESHUTDOWN, "the tier is closed")
        process = await self._connected()
        answer = process.ask("probe", names)
        try:
            return await asyncio.shield(answer)
        except asyncio.CancelledError:
            self._give_up(process, answer)
            raise

    async def fetch(self, names: Sequence[Name], slots: Sequence[int]) -> list[Result]:
        return await self._move("fetch", names, slots)

    async def spill(self, names: Sequence[Name], slots: Sequence[int]) -> list[Result]:
        return await self._move("spill", names, slots)

    async def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        try:
            async with self._connecting:  # to one that is being started
                self.process.is_wanted = False
            if not self.process.is_over():
                await asyncio.shield((await self._connected()).ask("close"))
        finally:
            self.process.is_wanted = False
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
        return answer.result()

    def _give_up(self, process: Process, answer: asyncio.Future[list[Any]]) -> None:
        """Cancel a call; kill the process if it does not answer in time that the call has ended."""

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
        """Return the process, started if there is none; raise OSError if the system refuses it."""
        return await asyncio.shield(self._connect())

    async def _connect(self) -> Process:
        async with self._connecting:
            if self.process.is_over():
                await self.process.ended()
                if self._is_closed:
                    raise OSError(errno.ESHUTDOWN, "the tier is closed")
                self._num_evicted_before = self.num_evicted
                self.process = await asyncio.to_thread(self._start)  # it takes the loop's time
                self.num_restarts += 1
                logger.info("Tier %s is open again, in process %d.", self.label, self.process.pid)
                if self._is_closed:
                    self.process.is_wanted = False
                    self.process.kill()
            await self.process.connect(self._take)
            return self.process

    def _start(self) -> Process:
        return Process(self._setup, self._memory, self.label)

    def _take(self, kind: str, *said: Any) -> None:
        """Handle a message that is no answer; raise ProtocolError if it is not valid."""
        if kind == "holds":
            used_bytes, num_evicted = said
            before = self._num_evicted_before
            num_evicted = before + _number(num_evicted, self.num_evicted - before)
            self.used_bytes, self.num_evicted = _number(used_bytes, -1), num_evicted
        elif kind == "log":
            name, level, text = said
            self._logger_of(name).log(_number(level, 1, logging.CRITICAL), "%s", _text(text))
        elif kind == "refused":
            (why,) = said
            logger.warning("Tier %s cannot be opened again: %s", self.label, _text(why))
        elif kind != "ready" or said:
            raise ProtocolError("a message of an unknown kind")

    def _logger_of(self, name: object) -> logging.Logger:
        if not isinstance(name, str) or not _LOGGER.fullmatch(name):
            raise ProtocolError("a log line of no logger of vLLM's")
        self._loggers.add(name)
        if len(self._loggers) > LOGGERS_MAX:
            raise ProtocolError(f"more than {LOGGERS_MAX} loggers")
        return logging.getLogger(name)


class Process:
    """The process of a tier, which leads its process group, and the connection to it.

    Its end is logged while it `is_wanted`.
    """

    def __init__(self, setup: bytes, memory: MappedFile, label: str = "") -> None:
        self._setup = setup
        self._label = label
        self.is_wanted = True
        # Of sys.path, what an import would look at, and not the working directory.
        known: list[Any] = sys.path
        paths = [each for each in known if isinstance(each, str) and os.path.isabs(each)]
        with contextlib.ExitStack() as theirs, contextlib.ExitStack() as ours:
            self.socket, connection = socket.socketpair()
            ours.enter_context(self.socket)
            theirs.enter_context(connection)
            # Whoever maps the slots has the other end of a pipe, which nobody writes to.
            self._mappers, mapper = Pipe(duplex=False)
            ours.enter_context(self._mappers)
            theirs.enter_context(mapper)
            descriptors = connection.fileno(), *memory.descriptors, mapper.fileno()
            main = ("-c", _MAIN, json.dumps(paths))
            self.program = ChildProcess(main, descriptors, leads_group=True)
            ours.pop_all()
        self.pid: Final = self.program.pid
        self._end_of_mappers = select.poll()
        self._end_of_mappers.register(self._mappers, 0)
        self._numbers = itertools.count()
        self._answers: dict[int, tuple[str, int, asyncio.Future[list[Any]]]] = {}
        self._facts: dict[str, str] = {}
        self._writer: asyncio.StreamWriter | None = None
        self._listening: asyncio.Task[None] | None = None
        self._is_killed = False

    def wait_until_ready(self) -> str:
        """Wait until it has opened its tier; return why it refuses to, or an empty text.

        OSError: it does not start; the error that ended it, if known.
        """
        try:
            self.socket.settimeout(START_S)
            self.socket.sendall(self._setup)
            self._setup = b""
            kind, *why = json.loads(self._receive_first(time.monotonic() + START_S))
            if [kind, *why] == ["ready"]:
                return ""
            if kind != "refused":
                raise ProtocolError("its first word is neither yes nor no")
            refusal = _text(*why)
            self.program.end()
            return refusal
        except Exception as error:
            if isinstance(error, EOFError | ConnectionError):  # it is about to end
                self.program.wait(KILL_S)
            if (status := self.program.end()) in (*_TOO_FEW_FILES, errno.ENOMEM):
                raise OSError(status, os.strerror(status)) from error
            raise OSError(errno.EIO, f"{error!r} (it ended with {_name_of(status)})") from error

    def _receive_first(self, end_s: float) -> bytes:
        """Return its first message; this blocks, as no event loop runs yet."""

        def receive(count: int) -> bytes:
            found = b""
            while len(found) < count:
                self.socket.settimeout(max(end_s - time.monotonic(), POLL_S))
                if not (part := self.socket.recv(count - len(found))):
                    raise EOFError
                found += part
            return found

        return receive(length_of(receive(LENGTH_BYTES), MESSAGE_BYTES_MAX))

    async def connect(self, take: Callable[..., None]) -> None:
        """Begin to read its messages, once."""
        if self._writer is None:
            reader, self._writer = await asyncio.open_unix_connection(sock=self.socket)
            self._writer.write(self._setup)
            self._listening = asyncio.ensure_future(self._listen(reader, take))

    def news_of(self, facts: Mapping[str, str]) -> dict[str, str] | None:
        """Return the facts unless it has received the same."""
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
        """Call a verb of the tier; the future, or this, fails with OSError if no answer comes."""
        assert self._writer is not None
        if self._is_killed or self._writer.is_closing():
            raise LoggedError(errno.EIO, "its process has ended")
        number = next(self._numbers)
        answer: asyncio.Future[list[Any]] = asyncio.get_running_loop().create_future()
        self._answers[number] = verb, len(names), answer
        answer.add_done_callback(lambda _: self._answers.pop(number, None))
        answer.add_done_callback(lambda it: it.cancelled() or it.exception())  # seen in any case
        sent = [(name.namespace, name.group_idx, name.block_hash, name.mark) for name in names]
        self._send(verb, number, sent, list(slots), facts)
        return answer

    def give_up(self, answer: asyncio.Future[list[Any]]) -> None:
        """Cancel a call; it is answered when it has ended."""
        for number, (_, _, other) in self._answers.items():
            if other is answer:
                self._send("cancel", number)

    def kill(self) -> None:
        """Kill it; it answers no further call."""
        self._is_killed = True
        self.program.kill()

    def is_over(self) -> bool:
        """Return whether it answers no further call."""
        return self._is_killed or self.program.poll() is not None

    async def ended(self) -> None:
        """Return when it has ended, its messages are read, and it maps no slots any more."""
        if self._listening is None:
            self._report(await self._reap())
            self.socket.close()
        else:
            await asyncio.wait([self._listening])

    async def _reap(self) -> int:
        """Return its exit status when it has ended, and so has everything that maps the slots."""
        mappers = self._end_of_mappers
        while (status := self.program.poll()) is None or not mappers.poll(0):  # noqa: ASYNC110
            await asyncio.sleep(POLL_S)
        return status

    def _report(self, status: int) -> None:
        if self.is_wanted:
            logger.warning(
                "The process of tier %s, %d, has ended (%s).",
                *(self._label, self.pid, _name_of(status)),
            )

    def _send(self, *call: object) -> None:
        assert self._writer is not None
        if not self._writer.is_closing():
            self._writer.write(framed(pickle.dumps(call)))

    async def _listen(self, reader: asyncio.StreamReader, take: Callable[..., None]) -> None:
        try:
            while True:
                kind, *said = json.loads(await read(reader, MESSAGE_BYTES_MAX))
                if kind in ("done", "failed"):
                    self._settle(kind, *said)
                else:
                    take(kind, *said)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        except Exception as error:
            logger.warning(
                "The process of tier %s sent an invalid message, and is killed: %s",
                *(self._label, printable(repr(error), LINE_LENGTH_MAX)),
            )
        finally:
            self.kill()
            status = await self._reap()
            if self._writer is not None:
                self._writer.close()
            self._report(status)
            for _, _, answer in list(self._answers.values()):
                if not answer.done():
                    problem = f"its process has ended ({_name_of(status)})"
                    answer.set_exception(LoggedError(errno.EIO, problem))

    def _settle(self, kind: str, number: object, found: object) -> None:
        """Settle a call; raise if there is no such call, or the answer is not valid for it."""
        verb, count, answer = self._answers[_number(number, 0)]
        if kind == "failed":
            answer.set_exception(LoggedError(errno.EIO, _text(found)))
            return
        if not isinstance(found, list) or len(found) != count:
            raise ProtocolError(f"not one result for each of {count} objects")
        answer.set_result(list(map(_flag if verb == "probe" else Result, found)))


def _number(value: object, low: int, high: int = (1 << 63) - 1) -> int:
    if type(value) is not int or not low <= value <= high:
        raise ProtocolError(f"no number from {low} to {high}")
    return value


def _flag(value: object) -> bool:
    if not isinstance(value, bool):
        raise ProtocolError("neither true nor false")
    return value


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise ProtocolError("no text")
    lines = value.split("\n", LINES_MAX)[:LINES_MAX]
    return "\n".join(printable(line, LINE_LENGTH_MAX) for line in lines)


def _name_of(status: int) -> str:
    """Return the name of the signal, or the status, that a process ended with."""
    try:
        return signal.Signals(-status).name
    except ValueError:
        return f"status {status}"


def _fix_of(error: Exception) -> str:
    number = error.errno if isinstance(error, OSError) else None
    if number in _TOO_FEW_FILES:
        return "raise the limit on open files (ulimit -n, LimitNOFILE of the service)"
    if number in (errno.EAGAIN, errno.ENOMEM):
        return "raise the limit on processes (ulimit -u, pids.max of the container), or free memory"
    if number == errno.EIO:
        return "see what it has written to the log before this, and restart the server"
    return f"let this user run {sys.executable}"


def opener(memory: MappedFile, layout: HostLayout) -> OpenTier:
    """Return a function that opens tiers as `open_tier`, in processes that map the slots."""

    def make(config: TierConfig, slot_bytes: int, facts: Facts, seal: Seal) -> ProcessTier:
        level = logging.getLogger("vllm").getEffectiveLevel()
        return ProcessTier(Setup(config, slot_bytes, seal, layout, level), facts, memory)

    return functools.partial(open_tier, make=make)
