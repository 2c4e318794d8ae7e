"""A Valkey or Redis server, or a cluster of them, as a store: one key for each object.

The value of a key is the header of an object and its bytes. One SET writes it, so it exists whole
or not at all. The server evicts what it has no room for, and deletes what was not used for "ttl".

Operators find our keys with SCAN. Looking at a key is no use of it: CLIENT NO-TOUCH (since 7.2)
says so to the server; older ones report the memory of a key instead of its length, and only a check
of an object counts as a use.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import math
import time
import weakref
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from typing import Any, Final, TypeVar

from safe_offload.config.tiers import ValkeyConfig
from safe_offload.findings import Finding
from safe_offload.tiers.base import Buffers, LoggedError, Name, PlaceError, Result
from safe_offload.tiers.batch import Batch
from safe_offload.tiers.naming import (
    ALL_KEYS,
    DESCRIPTION_BYTES_MAX,
    PREFIX,
    description_key,
    key_of,
    name_of_key,
    namespace_of_key,
)
from safe_offload.tiers.seals.seal import Digest
from safe_offload.tiers.store import LISTED_MAX, PAGE_ITEMS, Item, Store, listed
from safe_offload.tiers.valkey import diagnosis
from safe_offload.tiers.valkey.commands import (
    DEL,
    EXISTS,
    GET,
    GETEX,
    IDLE,
    NO_TOUCH,
    PEXPIRE,
    SET,
    SIZE,
    words_of,
)
from safe_offload.tiers.valkey.login import CLIENT_NAME, Login, LoginError, command, explained
from safe_offload.tiers.valkey.replies import ErrorReply, Line, Misfit, OversizeError, Tree
from safe_offload.tiers.valkey.server_log import ServerLog, refusal
from safe_offload.tiers.valkey.servers import Node, Servers, Silence
from safe_offload.tiers.valkey.wire import StaleError, Wire

WINDOW_BYTES: Final = 4 << 20
"""Requested ahead on one connection, which bounds the output buffer of the server."""
WINDOW_OBJECTS: Final = 64
SPILL_BYTES: Final = 16 << 20
"""Of objects whose presence is queried before the absent ones are written."""
TEXT_BYTES_MAX: Final = DESCRIPTION_BYTES_MAX
"""Of one answer to an operator; received into the scratch memory of a connection."""

T = TypeVar("T")
_NO_TOUCH: Final = (*words_of(NO_TOUCH), b"ON")
_STRANGE: Final = ErrorReply("ERR", "")
"""Stands for an answer of an unexpected type."""


class ValkeyStore(Store):
    """See `Store`. ConfigError: certificates cannot be used."""

    piece_bytes = TEXT_BYTES_MAX
    log: ServerLog

    def __init__(self, config: ValkeyConfig, slot_bytes: int = 0) -> None:
        super().__init__(config, slot_bytes)
        self._config = config
        self._num_connections = config.num_connections
        self._timeout_s = config.timeout_s
        self._ttl = _ttl_words(config.ttl_s)
        self._reads_extend = bool(self._ttl)
        self.log = ServerLog(self.label)
        self._login = Login(config, CLIENT_NAME if slot_bytes else "")
        self._servers = Servers(self._login, config.num_connections)
        self._is_closed = False
        # Of an operator: connections with NO-TOUCH, and whether a look is no use of a key.
        self._no_touch = weakref.WeakSet[Wire]()
        self._keeps_use = True
        if config.location.password and slot_bytes:
            self.log.password_in_url()

    # ---- engines ------------------------------------------------------------------------------

    async def has(self, names: Sequence[Name]) -> list[bool]:
        keys = [key_of(name) for name in names]
        answers = await self._query(keys, [_EXISTS % (len(key), key) for key in keys])
        failures = [answer for answer in answers if isinstance(answer, OSError)]
        if failures and len(failures) == len(answers):
            raise failures[0]
        return [answer == 1 for answer in answers]

    async def get(self, batch: Batch) -> None:
        await self._work_off(_Keyed(batch), self._read)

    async def put(self, batch: Batch) -> None:
        await self._work_off(_Keyed(batch), self._write)

    async def describe(self, namespace: bytes, text: bytes) -> float:
        key = description_key(namespace)
        (answer,) = await self._query([key], [command(*_SET, key, text, *self._ttl)])
        if isinstance(answer, OSError):
            raise answer
        return int(self._ttl[1]) / 1000 if self._ttl else math.inf

    async def close(self) -> None:
        self._is_closed = True
        self._servers.close()

    # ---- many objects -------------------------------------------------------------------------

    async def _work_off(self, keyed: _Keyed, move: _Move) -> None:
        batch = keyed.batch
        for is_last in (False, True):  # the second time those that another server has by now
            left = list(batch.take_left())
            try:
                places = await self._servers.place([keyed.keys[index] for index in left])
            except OSError as error:
                self.log.failure(error)
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
                            lanes.create_task(self._work_lane(keyed, move, node, queue))
            for _, queue in queues:
                batch.settle(queue, Result.FAILED)
            if is_last or not batch.left:
                break
            await self._refresh(version)
        batch.settle(batch.left, Result.FAILED)

    async def _work_lane(self, keyed: _Keyed, move: _Move, node: Node, queue: deque[int]) -> None:
        """Move objects over one connection at a time, until none is left or one is lost."""
        silence = Silence()

        async def use(wire: Wire) -> None:
            silence.begin(wire)
            await move(keyed, queue, node, wire)

        with contextlib.suppress(OSError), self._judging(node, silence):
            while queue and not node.is_paused:
                await node.data.use(use)

    @contextlib.contextmanager
    def _judging(self, node: Node, silence: Silence) -> Iterator[None]:
        """Record whether a server answers while it is used."""
        try:
            yield
        except OSError as error:
            self.log.failure(error)
            self._servers.suspect(node)
            raise
        except asyncio.CancelledError:
            if silence.is_long:
                self._servers.suspect(node)
            raise
        node.succeed()

    async def _flow(
        self,
        keyed: _Keyed,
        queue: deque[int],
        node: Node,
        steps: tuple[Callable[[int], Awaitable[Any]], Callable[[int, Any], Awaitable[Result]]],
    ) -> None:
        """Pipeline the requests of a queue, until it is empty or another call needs the connection.

        The first of `steps` requests an object and returns the future of its reply; the second
        turns the reply into a result.
        """
        ask, judge = steps
        batch = keyed.batch
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
                    size_bytes += keyed.sizes[index]
                if not under_way:
                    return
                index, future = under_way[0]
                reply = await future
                under_way.popleft()
                size_bytes -= keyed.sizes[index]
                batch.results[index] = await judge(index, reply)
        except OversizeError:
            index, _ = under_way.popleft()
            batch.results[index] = Result.CORRUPT
            queue.extendleft(index for index, _ in reversed(under_way))
        except StaleError:
            queue.extendleft(index for index, _ in reversed(under_way))
            raise
        except OSError:
            batch.settle((index for index, _ in under_way), Result.FAILED)
            raise

    # ---- reading ------------------------------------------------------------------------------

    async def _read(self, keyed: _Keyed, queue: deque[int], node: Node, wire: Wire) -> None:
        batch = keyed.batch
        digests: dict[int, Digest | None] = {}

        async def ask(index: int) -> Awaitable[bytes | Misfit | ErrorReply | None]:
            key = keyed.keys[index]
            words = (*_GETEX, key, *self._ttl) if self._reads_extend else (*_GET, key)
            digest = digests[index] = batch.begin_digest()
            note = None if digest is None else digest.update
            return wire.request_value([command(*words)], batch.slots[index], note)

        async def judge(index: int, reply: bytes | Misfit | ErrorReply | None) -> Result:
            if reply is None:
                return Result.ABSENT
            if isinstance(reply, ErrorReply):
                return self._refused(batch, index, reply)
            if isinstance(reply, Misfit):
                return Result.CORRUPT
            return await batch.judge_async(index, reply, digests.pop(index))

        await self._flow(keyed, queue, node, (ask, judge))

    def _refused(
        self, batch: Batch, index: int, problem: ErrorReply, *, is_write: bool = False
    ) -> Result:
        """Return the result of an object for which the server replied with an error."""
        if problem.code == "MOVED":
            batch.left.append(index)
            return Result.CANCELLED  # until another server is queried
        if problem.code == "ASK":  # its slot is on the way to another server
            return Result.ABSENT
        if problem.code == "WRONGTYPE":
            return Result.UNREADABLE
        self.log.refusal(problem)
        if problem.code in ("NOPERM", "READONLY"):
            self._reads_extend = False  # the user may read, but not prolong
        if problem.code == "NOPERM" and is_write:
            return Result.REFUSED
        return Result.FULL if problem.code == "OOM" else Result.FAILED

    # ---- writing ------------------------------------------------------------------------------

    async def _write(self, keyed: _Keyed, queue: deque[int], node: Node, wire: Wire) -> None:
        """Write the first objects of a queue, except those that exist already."""
        batch = keyed.batch
        chunk: list[int] = []
        size_bytes = 0
        while queue and size_bytes < SPILL_BYTES:
            chunk.append(queue.popleft())
            size_bytes += keyed.sizes[chunk[-1]]
        keys = [keyed.keys[index] for index in chunk]
        # Both answer whether the key is there.
        words, until = (_PEXPIRE, self._ttl[1:]) if self._ttl else (words_of(EXISTS), ())
        asking = [command(*words, key, *until) for key in keys]
        try:
            lines = await wire.request_lines([b"".join(asking)], len(keys))
        except StaleError:
            queue.extendleft(reversed(chunk))
            raise
        except OSError:
            batch.settle(chunk, Result.FAILED)
            raise
        absent: deque[int] = deque()
        for index, line in zip(chunk, lines, strict=True):
            if isinstance(line, ErrorReply):
                batch.results[index] = self._refused(batch, index, line, is_write=True)
            elif line == 0 or batch.is_bad(index):
                absent.append(index)
            else:
                batch.results[index] = Result.PRESENT

        async def ask(index: int) -> Awaitable[list[Line]]:
            header, body = await batch.sealed_async(index)
            pieces = self._set_command(keyed.keys[index], header, body)
            return wire.request_lines(pieces, 1)

        async def judge(index: int, reply: list[Line]) -> Result:
            if isinstance(reply[0], ErrorReply):
                return self._refused(batch, index, reply[0], is_write=True)
            return Result.DONE

        try:
            await self._flow(keyed, absent, node, (ask, judge))
        finally:
            queue.extendleft(reversed(absent))

    def _set_command(self, key: bytes, header: bytes, body: Buffers) -> list[bytes | memoryview]:
        length = len(header) + sum(buffer.nbytes for buffer in body)
        words = 3 + len(self._ttl)
        head = b"*%d\r\n$3\r\nSET\r\n$%d\r\n%b\r\n$%d\r\n" % (words, len(key), key, length)
        tail = b"".join(b"\r\n$%d\r\n%b" % (len(word), word) for word in self._ttl) + b"\r\n"
        return [head, header, *(buffer for buffer in body if buffer.nbytes), tail]

    # ---- short queries ------------------------------------------------------------------------

    async def _query(
        self, keys: Sequence[bytes], commands: Sequence[bytes]
    ) -> list[Line | OSError]:
        """Send one command for each key; return for each the answer, or why there is none.

        OSError: no server can be reached at all.
        """
        answers: list[Line | OSError] = [LoginError("the tier is closed")] * len(keys)
        left = list(range(len(keys)))
        if self._is_closed or not keys:
            return answers
        for is_last in (False, True):
            places = await self._servers.place([keys[index] for index in left])
            version = self._servers.version
            async with asyncio.TaskGroup() as nodes:
                for node, positions in places.items():
                    indices = [left[position] for position in positions]
                    nodes.create_task(self._query_node(node, indices, commands, answers))
            left = [
                i for i in left if isinstance(a := answers[i], ErrorReply) and a.code == "MOVED"
            ]
            if is_last or not left:
                break
            await self._refresh(version)
        for index, answer in enumerate(answers):
            if isinstance(answer, ErrorReply) and answer.code != "ASK":
                self.log.refusal(answer)
                answers[index] = LoggedError(errno.EIO, f"the server answers {answer.code}")
        return answers

    async def _query_node(
        self,
        node: Node | None,
        indices: Sequence[int],
        commands: Sequence[bytes],
        answers: list[Line | OSError],
    ) -> None:
        """Send commands to one server, and store its answers."""
        silence = Silence()
        error: OSError = LoginError("no server of the cluster has this key")
        lines: Sequence[Line] = ()

        async def ask(wire: Wire) -> Sequence[Line]:
            silence.begin(wire)
            asked = b"".join([commands[index] for index in indices])
            return await wire.request_lines([asked], len(indices))

        if node is not None and not node.is_paused:
            try:
                with self._judging(node, silence):
                    lines = await node.queries.use(ask)
            except OSError as failure:
                error = failure
        for position, index in enumerate(indices):
            answers[index] = lines[position] if lines else error

    async def _refresh(self, version: int) -> None:
        try:
            await self._servers.refresh(version)
        except OSError as error:
            self.log.failure(error)

    # ---- operators ----------------------------------------------------------------------------

    def key_of(self, name: Name) -> str:
        return key_of(name).decode()

    def description_key(self, namespace: str) -> str:
        return description_key(bytes.fromhex(namespace)).decode()

    async def nodes(self) -> list[Node]:
        """Return all servers that have keys."""
        if not self._servers.version:
            await self._in_time(None, self._servers.refresh(0))
        return self._servers.nodes

    @property
    def is_cluster(self) -> bool:
        """Return whether keys are spread over several servers, once there was an answer."""
        return self._servers.is_cluster

    async def node_of(self, key: str) -> Node:
        """Return the server that has a key."""
        await self.nodes()
        if (owner := self._servers.owner(key.encode())) is None:
            raise PlaceError(
                "it is a cluster without assigned key slots", "Check that all slots have a node"
            )
        return owner

    async def answers(self, node: Node, *commands: Sequence[bytes]) -> list[Tree]:
        """Send commands, and return the answer to each: an `ErrorReply` where it is refused."""

        async def work(wire: Wire) -> list[Tree]:
            await self._set_no_touch(wire)
            asked = [
                wire.request_tree([command(*words)], text_bytes_max=TEXT_BYTES_MAX)
                for words in commands
            ]
            return [await answer for answer in asked]

        return await self._in_time(node, node.data.use(work))

    async def _set_no_touch(self, wire: Wire) -> None:
        """Make looks on a connection no uses, which Valkey and Redis support from 7.2 on."""
        if wire not in self._no_touch:
            if isinstance(await wire.request_tree([command(*_NO_TOUCH)]), ErrorReply):
                self._keeps_use = False
            self._no_touch.add(wire)

    async def _in_time(self, node: Node | None, work: Awaitable[T]) -> T:
        try:
            async with asyncio.timeout(self._timeout_s):
                return await work
        except PlaceError:
            raise
        except OSError as error:
            where = self._login.home if node is None else node.address
            raise explained(error, where, has_tls=self._login.has_tls) from None

    async def namespaces(self) -> list[str]:
        found = set[str]()
        async for _, keys in self._scan(ALL_KEYS):
            found.update(map(namespace_of_key, keys))
            if len(found) > LISTED_MAX:
                break
        return listed(found)

    async def walk(self, namespace: str = "") -> AsyncIterator[list[Item]]:
        async for node, keys in self._scan(f"{PREFIX}{namespace}:*" if namespace else ALL_KEYS):
            yield [item async for item in self._items(node, keys)]

    async def read(self, key: str, start: int, length: int) -> bytes:
        node = await self.node_of(key)
        words = (key.encode(), b"%d" % start, b"%d" % (start + length - 1))
        (found,) = await self.answers(node, (b"GETRANGE", *words))
        if isinstance(found, ErrorReply) and found.code == "WRONGTYPE":
            raise OSError(errno.EINVAL, "it is not a string")
        if not isinstance(found, bytes):
            raise refusal(found if isinstance(found, ErrorReply) else _STRANGE)
        if not found and (await self.answers(node, (b"EXISTS", key.encode()))) == [0]:
            raise FileNotFoundError(errno.ENOENT, "evicted")
        return found

    async def delete(self, keys: Sequence[str]) -> list[bool]:
        """See `Store.delete`; raises the first refusal."""
        encoded = [key.encode() for key in keys]
        if self._login.name:
            found = await self._query(encoded, [command(*_DEL, key) for key in encoded])
            if failures := [answer for answer in found if isinstance(answer, OSError)]:
                raise failures[0]
            return [bool(answer) for answer in found]
        placed: dict[Node, list[int]] = {}
        for index, key in enumerate(keys):
            placed.setdefault(await self.node_of(key), []).append(index)
        was_there = [False] * len(keys)
        for node, indices in placed.items():
            for index, there in zip(
                indices, await self._unlink(node, [encoded[i] for i in indices]), strict=True
            ):
                was_there[index] = there
        return was_there

    async def _unlink(self, node: Node, keys: Sequence[bytes]) -> list[bool]:
        """Delete keys of one server; the user of an engine may have DEL alone."""
        answers = await self.answers(node, *((b"UNLINK", key) for key in keys))
        denied = [a for a in answers if isinstance(a, ErrorReply) and a.code == "NOPERM"]
        if denied:
            answers = await self.answers(node, *((b"DEL", key) for key in keys))
        for answer in answers:
            if isinstance(answer, ErrorReply):
                raise refusal(denied[0] if denied and answer.code == "NOPERM" else answer)
        return [bool(answer) for answer in answers]

    async def diagnose(self) -> list[Finding]:
        return await diagnosis.diagnose(self, self._config)

    async def _scan(self, pattern: str) -> AsyncIterator[tuple[Node, list[bytes]]]:
        """Yield keys of one server at a time; one may come twice."""

        async def work(wire: Wire) -> Tree:
            await self._set_no_touch(wire)
            words = (b"MATCH", pattern.encode(), b"COUNT", b"%d" % PAGE_ITEMS)
            return await wire.request_keys([command(b"SCAN", cursor, *words)])

        for node in await self.nodes():
            cursor = b"0"
            while True:
                match await self._in_time(node, node.data.use(work)):
                    case [bytes(cursor), list(found)]:
                        yield node, [key for key in found if isinstance(key, bytes)]
                    case ErrorReply() as refused:
                        raise refusal(refused)
                    case _:
                        raise refusal(_STRANGE)
                if cursor == b"0":
                    break

    async def _items(self, node: Node, keys: Sequence[bytes]) -> AsyncIterator[Item]:
        found = [(ns, key) for key in keys if (ns := namespace_of_key(key))]
        found = [(ns, key) for ns, key in found if key != description_key(bytes.fromhex(ns))]
        idle, length = words_of(IDLE), (b"STRLEN",) if self._keeps_use else words_of(SIZE)
        asked = [words for _, key in found for words in ((*idle, key), (*length, key))]
        answers: Iterator[Any] = iter(await self.answers(node, *asked))
        now_s = time.time()
        for namespace, key in found:
            idle_s, size_bytes = next(answers), next(answers)
            if isinstance(idle_s, ErrorReply) and idle_s.code == "NOPERM":
                raise refusal(idle_s)  # another error is that of a policy that keeps no times
            if isinstance(size_bytes, ErrorReply) and size_bytes.code != "WRONGTYPE":
                raise refusal(size_bytes)
            if not size_bytes:
                continue  # evicted meanwhile
            used_at_s = now_s - idle_s if isinstance(idle_s, int) else 0.0
            size_bytes = size_bytes if isinstance(size_bytes, int) else 0
            yield Item(namespace, key.decode(), name_of_key(key), size_bytes, used_at_s)


class _Keyed:
    """A batch, with the keys and sizes of its objects.

    Objects that were not requested yet, or have moved to another server, are left of it.
    """

    def __init__(self, batch: Batch) -> None:
        self.batch = batch
        self.keys = [key_of(name) for name in batch.names]
        self.sizes = [batch.size_of(index) for index in range(len(batch.names))]


_Move = Callable[[_Keyed, "deque[int]", Node, Wire], Awaitable[None]]

_GET, _GETEX, _SET, _PEXPIRE, _DEL = map(words_of, (GET, GETEX, SET, PEXPIRE, DEL))
_EXISTS: Final = b"*2\r\n$6\r\nEXISTS\r\n$%d\r\n%b\r\n"


def _ttl_words(ttl_s: float | None) -> tuple[bytes, ...]:
    """Return the words that set a ttl in SET and GETEX; none without one."""
    return () if ttl_s is None else (b"PX", b"%d" % max(1, int(ttl_s * 1000)))
