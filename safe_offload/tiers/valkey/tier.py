"""A Valkey or Redis server, or a cluster of them, as a tier: one key for each object.

The value of a key is the header of an object and its bytes. One SET writes it, so it is there whole
or not at all. The server evicts what it has no room for, and deletes what was not used for the time
that "ttl" says.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from typing import Any, Final

from safe_offload.config.tiers import TierConfig
from safe_offload.tiers import naming
from safe_offload.tiers.base import Buffers, Name, Result
from safe_offload.tiers.batch import BadNames, Batch, Calls
from safe_offload.tiers.naming import HEADER_BYTES
from safe_offload.tiers.seal import PLAIN, Digest, Seal
from safe_offload.tiers.valkey.commands import DEL, EXISTS, GET, GETEX, PEXPIRE, SET, words_of
from safe_offload.tiers.valkey.log import ServerLog
from safe_offload.tiers.valkey.login import Login, LoginError, command
from safe_offload.tiers.valkey.names import description_key, key_of
from safe_offload.tiers.valkey.replies import ErrorReply, Line, Misfit, OversizeError
from safe_offload.tiers.valkey.servers import Node, Servers, Silence
from safe_offload.tiers.valkey.wire import StaleError, Wire

logger = logging.getLogger(f"vllm.{__name__}")

WINDOW_BYTES: Final = 4 << 20
"""What is asked for ahead on one connection, so that what the server has to keep stays small."""
WINDOW_OBJECTS: Final = 64
SPILL_BYTES: Final = 16 << 20
"""Of objects that are asked about before those that are not there are written."""


class ValkeyTier:
    """See `Tier`. It belongs to the loop's thread.

    Args:
        config: of the tier; nothing is asked of its server before it is first used.

    Raises:
        ConfigError: certificates cannot be used.
    """

    def __init__(
        self,
        config: TierConfig,
        facts: Mapping[str, object] | None = None,
        seal: Seal = PLAIN,
    ) -> None:
        self.label = config.location.label
        self.used_bytes = -1
        self.num_evicted = 0
        self._facts = {} if facts is None else facts
        self._seal = seal
        self._num_connections = config.num_connections
        self._ttl = _ttl_words(config.ttl_s)
        self._reads_extend = bool(self._ttl)
        self._log = ServerLog(self.label)
        self._servers = Servers(Login(config), config.num_connections)
        self._describe_at_s: dict[bytes, float] = {}
        self._bad_names = BadNames()
        self._calls = Calls()
        if config.location.password:
            self._log.password_in_url()

    # ---- the protocol -------------------------------------------------------------------------

    async def probe(self, names: Sequence[Name]) -> list[bool]:
        keys = [key_of(name) for name in names]
        answers = await self._ask(keys, [_EXISTS % (len(key), key) for key in keys])
        failures = [answer for answer in answers if isinstance(answer, OSError)]
        if failures and len(failures) == len(answers):
            raise failures[0]
        if not self._bad_names:
            return [answer == 1 for answer in answers]
        return [a == 1 and n not in self._bad_names for a, n in zip(answers, names, strict=True)]

    async def fetch(self, names: Sequence[Name], slots: Sequence[Buffers]) -> list[Result]:
        return await self._run(_Batch(names, slots), self._read)

    async def spill(self, names: Sequence[Name], slots: Sequence[Buffers]) -> list[Result]:
        return await self._run(_Batch(names, slots), self._write)

    async def close(self) -> None:
        await self._calls.close()
        self._servers.close()

    # ---- many objects -------------------------------------------------------------------------

    async def _run(self, batch: _Batch, move: _Move) -> list[Result]:
        """Move the objects of a batch; when this returns, no connection touches its slots."""
        if self._calls.is_closed or not batch.names:
            return batch.results
        call = asyncio.get_running_loop().create_task(self._work_off(batch, move))
        await self._calls.outlast([call], call.cancel)
        if not call.cancelled():
            call.result()
        return batch.results

    async def _work_off(self, batch: _Batch, move: _Move) -> None:
        for is_last in (False, True):  # the second time those that another server has by now
            left = list(batch.take_left())
            try:
                places = await self._servers.place([batch.keys[index] for index in left])
            except OSError as error:
                self._log.failure(error)
                batch.settle(left, Result.FAILED)
                return
            version = self._servers.version
            queues = [
                (node, deque(left[position] for position in positions))
                for node, positions in places.items()
            ]
            async with asyncio.TaskGroup() as lanes:
                for node, queue in queues:
                    if node is not None:
                        for _ in range(min(self._num_connections, len(queue))):
                            lanes.create_task(self._work_lane(batch, move, node, queue))
            for _, queue in queues:
                batch.settle(queue, Result.FAILED)
            if is_last or not batch.left:
                break
            await self._refresh(version)
        batch.settle(batch.left, Result.FAILED)
        try:
            if batch.bad:
                await self._delete(batch)
            if move == self._write and Result.DONE in batch.results:
                await self._describe({name.namespace for name in batch.names})
        except OSError as error:
            self._log.failure(error)

    async def _work_lane(self, batch: _Batch, move: _Move, node: Node, queue: deque[int]) -> None:
        """Move objects over one connection at a time, until none is left or one is lost."""
        silence = Silence()

        async def use(wire: Wire) -> None:
            silence.begin(wire)
            await move(batch, queue, node, wire)

        try:
            with contextlib.suppress(OSError), self._judging(node, silence):
                while queue and not node.is_paused:
                    await node.data.use(use)
        except Exception:
            logger.exception("Unexpected error in tier %s, which stays in use", self.label)

    @contextlib.contextmanager
    def _judging(self, node: Node, silence: Silence) -> Iterator[None]:
        """Note whether a server answers while it is used."""
        try:
            yield
        except OSError as error:
            self._log.failure(error)
            self._servers.suspect(node)
            raise
        except asyncio.CancelledError:
            if silence.is_long:
                self._servers.suspect(node)
            raise
        node.succeed()

    async def _flow(
        self,
        batch: _Batch,
        queue: deque[int],
        node: Node,
        steps: tuple[Callable[[int], Awaitable[Any]], Callable[[int, Any], Awaitable[Result]]],
    ) -> None:
        """Ask ahead for objects of a queue, until it is empty or another call wants the connection.

        Args:
            steps: what asks for an object and returns the future of its reply, and what makes a
                result of the reply.
        """
        ask, judge = steps
        under_way: deque[tuple[int, asyncio.Future[Any]]] = deque()
        is_begun = False
        size_bytes = 0
        try:
            while True:
                while queue and size_bytes < WINDOW_BYTES and len(under_way) < WINDOW_OBJECTS:
                    if is_begun and node.data.is_wanted:
                        break
                    is_begun = True
                    index = queue.popleft()
                    under_way.append((index, await ask(index)))
                    size_bytes += batch.sizes[index]
                if not under_way:
                    return
                index, future = under_way[0]
                reply = await future
                under_way.popleft()
                size_bytes -= batch.sizes[index]
                batch.results[index] = await judge(index, reply)
        except OversizeError:
            index, _ = under_way.popleft()
            batch.results[index] = batch.spoil(index, Result.CORRUPT)
            queue.extendleft(index for index, _ in reversed(under_way))
        except StaleError:
            queue.extendleft(index for index, _ in reversed(under_way))
            raise
        except OSError:
            batch.settle((index for index, _ in under_way), Result.FAILED)
            raise

    # ---- reading ------------------------------------------------------------------------------

    async def _read(self, batch: _Batch, queue: deque[int], node: Node, wire: Wire) -> None:
        digests: dict[int, Digest | None] = {}

        async def ask(index: int) -> Awaitable[bytes | Misfit | ErrorReply | None]:
            key = batch.keys[index]
            words = (*_GETEX, key, *self._ttl) if self._reads_extend else (*_GET, key)
            digest = digests[index] = self._seal.begin_digest()
            note = None if digest is None else digest.update
            return wire.ask_value([command(*words)], batch.slots[index], note)

        async def judge(index: int, reply: bytes | Misfit | ErrorReply | None) -> Result:
            if reply is None:
                return Result.ABSENT
            if isinstance(reply, ErrorReply):
                return self._refused(batch, index, reply)
            if isinstance(reply, Misfit):
                return batch.spoil(index, Result.CORRUPT)
            name, slot = batch.names[index], batch.slots[index]
            result = await self._seal.judge_async(reply, name, slot, digests.pop(index))
            return result if result is Result.DONE else batch.spoil(index, result)

        await self._flow(batch, queue, node, (ask, judge))

    def _refused(self, batch: _Batch, index: int, problem: ErrorReply) -> Result:
        """Return what becomes of an object for which the server answered an error."""
        if problem.code == "MOVED":
            batch.left.append(index)
            return Result.CANCELLED  # until it is asked for elsewhere
        if problem.code == "ASK":  # its slot is on the way to another server
            return Result.ABSENT
        if problem.code == "WRONGTYPE":
            self._log.bad_object(Result.UNREADABLE, batch.keys[index].decode())
            self._bad_names.add(batch.names[index])
            return Result.UNREADABLE
        self._log.refusal(problem.code)
        if problem.code in ("NOPERM", "READONLY"):
            self._reads_extend = False  # the user may read, but not prolong
        return Result.FULL if problem.code == "OOM" else Result.FAILED

    async def _delete(self, batch: _Batch) -> None:
        """Delete what is not what it should be; what cannot be deleted is not offered again."""
        keys = [batch.keys[index] for index in batch.bad]
        answers = await self._ask(keys, [command(*_DEL, key) for key in keys])
        for index, answer in zip(batch.bad, answers, strict=True):
            self._log.bad_object(batch.results[index], batch.keys[index].decode())
            if not isinstance(answer, int):
                self._bad_names.add(batch.names[index])

    # ---- writing ------------------------------------------------------------------------------

    async def _write(self, batch: _Batch, queue: deque[int], node: Node, wire: Wire) -> None:
        """Write the first objects of a queue, but for those that are there."""
        chunk: list[int] = []
        size_bytes = 0
        while queue and size_bytes < SPILL_BYTES:
            chunk.append(queue.popleft())
            size_bytes += batch.sizes[chunk[-1]]
        keys = [batch.keys[index] for index in chunk]
        # Both answer whether the key is there.
        words, until = (_PEXPIRE, self._ttl[1:]) if self._ttl else (words_of(EXISTS), ())
        asking = [command(*words, key, *until) for key in keys]
        try:
            lines = await wire.ask_lines([b"".join(asking)], len(keys))
        except StaleError:
            queue.extendleft(reversed(chunk))
            raise
        except OSError:
            batch.settle(chunk, Result.FAILED)
            raise
        absent: deque[int] = deque()
        for index, line in zip(chunk, lines, strict=True):
            if isinstance(line, ErrorReply):
                batch.results[index] = self._refused(batch, index, line)
            elif line == 0 or batch.names[index] in self._bad_names:
                absent.append(index)
            else:
                batch.results[index] = Result.PRESENT

        async def ask(index: int) -> Awaitable[list[Line]]:
            name, slot = batch.names[index], batch.slots[index]
            header = await self._seal.header_async(name, slot)
            return wire.ask_lines(self._set_command(batch.keys[index], header, slot), 1)

        async def judge(index: int, reply: list[Line]) -> Result:
            if isinstance(reply[0], ErrorReply):
                return self._refused(batch, index, reply[0])
            self._bad_names.discard(batch.names[index])
            return Result.DONE

        try:
            await self._flow(batch, absent, node, (ask, judge))
        finally:
            queue.extendleft(reversed(absent))

    def _set_command(self, key: bytes, header: bytes, slot: Buffers) -> list[bytes | memoryview]:
        length = len(header) + sum(buffer.nbytes for buffer in slot)
        words = 3 + len(self._ttl)
        head = b"*%d\r\n$3\r\nSET\r\n$%d\r\n%b\r\n$%d\r\n" % (words, len(key), key, length)
        tail = b"".join(b"\r\n$%d\r\n%b" % (len(word), word) for word in self._ttl) + b"\r\n"
        return [head, header, *(buffer for buffer in slot if buffer.nbytes), tail]

    async def _describe(self, namespaces: set[bytes]) -> None:
        """Write down what namespaces are, once, or before the server deletes that."""
        now_s = asyncio.get_running_loop().time()
        due = [each for each in namespaces if self._describe_at_s.get(each, 0.0) <= now_s]
        keys = [description_key(each) for each in due]
        answers = await self._ask(
            keys,
            [
                command(*_SET, key, naming.description(each, self._facts), *self._ttl)
                for key, each in zip(keys, due, strict=True)
            ],
        )
        again_s = int(self._ttl[1]) / 2000 if self._ttl else float("inf")
        if len(self._describe_at_s) >= naming.NAMESPACES_MAX:
            self._describe_at_s.clear()
        for each, answer in zip(due, answers, strict=True):
            if isinstance(answer, bytes):
                self._describe_at_s[each] = now_s + again_s

    # ---- short questions, and which server they go to -----------------------------------------

    async def _ask(self, keys: Sequence[bytes], commands: Sequence[bytes]) -> list[Line | OSError]:
        """Send one command for each key; return for each the answer, or why there is none.

        Raises:
            OSError: no server can be asked at all.
        """
        answers: list[Line | OSError] = [LoginError("the tier is closed")] * len(keys)
        left = list(range(len(keys)))
        if self._calls.is_closed or not keys:
            return answers
        for is_last in (False, True):
            places = await self._servers.place([keys[index] for index in left])
            version = self._servers.version
            async with asyncio.TaskGroup() as nodes:
                for node, positions in places.items():
                    indices = [left[position] for position in positions]
                    nodes.create_task(self._ask_node(node, indices, commands, answers))
            left = [
                i for i in left if isinstance(a := answers[i], ErrorReply) and a.code == "MOVED"
            ]
            if is_last or not left:
                break
            await self._refresh(version)
        for index, answer in enumerate(answers):
            if isinstance(answer, ErrorReply) and answer.code != "ASK":
                self._log.refusal(answer.code)
                answers[index] = LoginError(f"the server answers {answer.code}")
        return answers

    async def _ask_node(
        self,
        node: Node | None,
        indices: Sequence[int],
        commands: Sequence[bytes],
        answers: list[Line | OSError],
    ) -> None:
        """Send commands to one server, and note its answers."""
        silence = Silence()
        error: OSError = LoginError("no server of the cluster has this key")
        lines: Sequence[Line] = ()

        async def ask(wire: Wire) -> Sequence[Line]:
            silence.begin(wire)
            asked = b"".join([commands[index] for index in indices])
            return await wire.ask_lines([asked], len(indices))

        if node is not None and not node.is_paused:
            try:
                with self._judging(node, silence):
                    lines = await node.asks.use(ask)
            except OSError as failure:
                error = failure
        for position, index in enumerate(indices):
            answers[index] = lines[position] if lines else error

    async def _refresh(self, version: int) -> None:
        try:
            await self._servers.refresh(version)
        except OSError as error:
            self._log.failure(error)


class _Batch(Batch):
    """Objects of servers.

    Attributes:
        left: what no server was asked for yet, or is on another server than was thought.
        sizes: in bytes, with their headers.
        bad: what is to be deleted.
    """

    def __init__(self, names: Sequence[Name], slots: Sequence[Buffers]) -> None:
        super().__init__(names, slots)
        self.keys = [key_of(name) for name in names]
        self.bad: list[int] = []
        self.sizes = [HEADER_BYTES + sum(buffer.nbytes for buffer in slot) for slot in slots]

    def spoil(self, index: int, result: Result) -> Result:
        """Note that an object is to be deleted; return what it is."""
        self.bad.append(index)
        return result


_Move = Callable[[_Batch, "deque[int]", Node, Wire], Awaitable[None]]

_GET, _GETEX, _SET, _PEXPIRE, _DEL = map(words_of, (GET, GETEX, SET, PEXPIRE, DEL))
_EXISTS: Final = b"*2\r\n$6\r\nEXISTS\r\n$%d\r\n%b\r\n"


def _ttl_words(ttl_s: float | None) -> tuple[bytes, ...]:
    """Return what is added to SET and GETEX; nothing without a limit."""
    return () if ttl_s is None else (b"PX", b"%d" % max(1, int(ttl_s * 1000)))
