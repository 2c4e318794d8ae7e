"""The servers of a tier: which one has which key, and the connections to each.

A cluster is detected by its reply to CLUSTER SLOTS; there is no setting for it. Connections are
opened when they are first needed, and again after they were lost.
"""

from __future__ import annotations

import asyncio
import binascii
import bisect
import contextlib
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from itertools import pairwise
from typing import Final, TypeVar

from safe_offload.tiers.valkey.commands import SLOTS, words_of
from safe_offload.tiers.valkey.login import Address, Login, LoginError, command, refused
from safe_offload.tiers.valkey.replies import ErrorReply, Tree
from safe_offload.tiers.valkey.wire import StaleError, Wire

NUM_SLOTS: Final = 16_384
"""Of a cluster; each key belongs to one."""
NODES_MAX: Final = 256
"""Servers of a cluster that are used."""
PAUSE_S, PAUSE_S_MAX = 1.0, 60.0
"""Pause after a failure of a server of a cluster, at first and at most; the others stay in use.
A server by itself has the breakers of its tier for that."""
REFRESH_S: Final = 0.5
"""Least time between queries of the topology after a server has failed."""
QUERY_S: Final = 1.0
"""Deadline of a server for that query; then the next server is queried."""
STALL_S: Final = 0.5
"""A server that was silent for so long before its call was cancelled counts as hung."""

T = TypeVar("T")


class ConnectionPool:
    """At most `size` connections to one server, each lent to one user at a time, in order."""

    def __init__(self, size: int, connect: Callable[[], Awaitable[Wire]]) -> None:
        self._connect = connect
        self._free = asyncio.Semaphore(size)
        self._idle: deque[Wire] = deque()
        self._lent: set[Wire] = set()
        self._num_waiting = 0
        self._is_closed = False

    @property
    def is_wanted(self) -> bool:
        """Return whether somebody waits for a connection."""
        return self._num_waiting > 0

    async def use(self, work: Callable[[Wire], Awaitable[T]]) -> T:
        """Return the result of `work` on a connection, which is closed if the work raises.

        The work is retried once, on a new connection, if the server had closed its connection while
        it was idle (`StaleError`). OSError: there is no connection, or it was lost.
        """
        try:
            return await self._use(work, is_new=False)
        except StaleError:
            return await self._use(work, is_new=True)

    async def _use(self, work: Callable[[Wire], Awaitable[T]], *, is_new: bool) -> T:
        wire = await self._take(is_new=is_new)
        try:
            return await work(wire)
        except BaseException:
            wire.abort()  # replies may be missing
            raise
        finally:
            self._give_back(wire)

    async def _take(self, *, is_new: bool) -> Wire:
        self._num_waiting += 1
        try:
            await self._free.acquire()
        finally:
            self._num_waiting -= 1
        try:
            wire = self._take_idle()
            if wire is not None and is_new:
                wire.abort()  # it makes room for the new one
                wire = None
            wire = wire or await self._connect()
            if self._is_closed:
                wire.abort()
                raise LoginError("the tier is closed")
        except BaseException:
            self._free.release()
            raise
        self._lent.add(wire)
        return wire

    def _give_back(self, wire: Wire) -> None:
        self._lent.discard(wire)
        if not wire.is_closed:
            wire.rest()
            self._idle.append(wire)
        self._free.release()

    def close(self) -> None:
        """Close all connections, including lent ones."""
        self._is_closed = True
        for wire in (*self._idle, *self._lent):
            wire.abort()
        self._idle.clear()

    def _take_idle(self) -> Wire | None:
        while self._idle:
            wire = self._idle.pop()
            if not wire.is_closed:
                return wire
        return None


class Node:
    """One server: connections for objects, and one for short questions."""

    def __init__(self, address: Address, login: Login, num_connections: int) -> None:
        self.address = address
        self._login = login
        self._logging_in = asyncio.Lock()
        self.data = ConnectionPool(num_connections, self._connect)
        self.queries = ConnectionPool(1, self._connect)
        self._pause_s = PAUSE_S
        self._paused_until_s = 0.0

    def __repr__(self) -> str:
        return f"<Node {self.address}>"

    @property
    def is_paused(self) -> bool:
        """Return whether the server is paused after a failure."""
        return asyncio.get_running_loop().time() < self._paused_until_s

    def succeed(self) -> None:
        """Record that it has answered."""
        self._pause_s = PAUSE_S

    def fail(self) -> None:
        """Record that it is unreachable, or did not answer: pause it."""
        if not self.is_paused:
            self._paused_until_s = asyncio.get_running_loop().time() + self._pause_s
            self._pause_s = min(2 * self._pause_s, PAUSE_S_MAX)

    async def _connect(self) -> Wire:
        """Log in, one at a time: an untrusted server costs no more than one login."""
        async with self._logging_in:
            return await self._login.connect(self.address)

    def close(self) -> None:
        """Close its connections."""
        self.data.close()
        self.queries.close()


class Silence:
    """How long the server of a call has been silent."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._begun_s = self._loop.time()
        self._wire: Wire | None = None

    @property
    def is_long(self) -> bool:
        """Return whether it has been longer than STALL_S."""
        heard_at_s = 0.0 if self._wire is None else self._wire.heard_at_s
        return self._loop.time() - max(self._begun_s, heard_at_s) > STALL_S

    def begin(self, wire: Wire) -> None:
        """Watch this connection from now on."""
        self._begun_s, self._wire = self._loop.time(), wire


class Servers:
    """The servers of a tier."""

    def __init__(self, login: Login, num_connections: int) -> None:
        self._login = login
        self._num_connections = num_connections
        self._home = Node(login.home, login, num_connections)
        self._nodes = {login.home: self._home}
        # Of a cluster: first slots of ranges, in order, and their last slots and owners.
        self._owners: tuple[list[int], list[tuple[int, Node]]] | None = None
        self._is_known = False
        self.version = 0
        """How often the topology was learned."""
        self._queried_at_s = 0.0
        self._refreshing = asyncio.Lock()

    @property
    def is_cluster(self) -> bool:
        """Return whether they are a cluster, each with its share of the keys."""
        return self._owners is not None

    @property
    def nodes(self) -> list[Node]:
        """Return the servers that have keys."""
        return list(self._nodes.values())

    async def place(self, keys: Sequence[bytes]) -> dict[Node | None, list[int]]:
        """Return the positions of the keys that each server has; None has those of no server.

        OSError: no server knows.
        """
        if self._owners is None and not self._is_known:
            await self.refresh(self.version)
        elif not self._is_known and self._is_due():
            with contextlib.suppress(OSError):  # the known topology is used
                await self.refresh(self.version)
        if self._owners is None:
            return {self._home: list(range(len(keys)))}
        found: dict[Node | None, list[int]] = {}
        for index, key in enumerate(keys):
            found.setdefault(self.owner(key), []).append(index)
        if None in found:
            self._is_known = False  # next time they may have a server
        return found

    def owner(self, key: bytes) -> Node | None:
        """Return the server that has a key, by the known topology; None for none."""
        if self._owners is None:
            return self._home
        firsts, lasts = self._owners
        slot = slot_of(key)
        position = bisect.bisect_right(firsts, slot) - 1
        return lasts[position][1] if position >= 0 and slot <= lasts[position][0] else None

    def suspect(self, node: Node) -> None:
        """Pause a server of a cluster that does not answer, and query the others."""
        if self.is_cluster:
            node.fail()
            self._is_known = False

    def _is_due(self) -> bool:
        return asyncio.get_running_loop().time() - self._queried_at_s >= REFRESH_S

    async def refresh(self, version: int) -> None:
        """Query the topology, unless it was learned since `version`. OSError: no server answers."""
        async with self._refreshing:
            if version != self.version:
                return
            self._queried_at_s = asyncio.get_running_loop().time()
            others = [node for node in self._nodes.values() if node is not self._home]
            error: OSError | None = None
            for node in [n for n in (self._home, *others) if not n.is_paused] or [self._home]:
                try:
                    async with asyncio.timeout(QUERY_S if self.is_cluster else None):
                        self._learn(node, await _query_slots(node))
                except OSError as failure:
                    error = error or failure
                    self.suspect(node)
                    continue
                self._is_known = True
                self.version += 1
                return
            raise error or LoginError("no server of the cluster can be asked")

    def close(self) -> None:
        """Close all connections."""
        for node in self._nodes.values():
            node.close()
        self._home.close()

    def _learn(self, source: Node, reply: Tree) -> None:
        if isinstance(reply, ErrorReply):  # "cluster support disabled", or CLUSTER is unknown
            if reply.code == "NOAUTH":
                raise refused(reply, source.address)
            if reply.code in ("LOADING", "CLUSTERDOWN"):
                raise LoginError(f"{source.address} is not ready: it answers {reply.code}")
            self._owners = None
            return
        ranges = _ranges(reply, source.address)
        used = {address for _, _, address in ranges}
        if len(used) > NODES_MAX:
            raise LoginError(f"the cluster has more than {NODES_MAX} servers")
        nodes = {
            address: self._nodes.get(address) or Node(address, self._login, self._num_connections)
            for address in used
        }
        for address, node in self._nodes.items():
            if address not in nodes and node is not self._home:
                node.close()
        self._nodes = nodes
        self._owners = (
            [first for first, _, _ in ranges],
            [(last, nodes[address]) for _, last, address in ranges],
        )


def slot_of(key: bytes) -> int:
    """Return the slot of a cluster that a key belongs to; our keys have no hash tag."""
    return binascii.crc_hqx(key, 0) % NUM_SLOTS


async def _query_slots(node: Node) -> Tree:
    async def ask(wire: Wire) -> Tree:
        return await wire.request_tree([command(*words_of(SLOTS))], _KEPT_OF_SLOTS)

    return await node.queries.use(ask)


_KEPT_OF_SLOTS: Final = (NUM_SLOTS, 3, 2, 0)
"""Ranges; of each its first and last slot and its primary; of that its name and port."""


def _ranges(reply: Tree, source: Address) -> list[tuple[int, int, Address]]:
    """Return first and last slot and server of each range of slots, in order.

    Source: https://valkey.io/commands/cluster-slots/: of each range its first and last slot, then
    the primary (name, port, id, …), then its replicas.
    """
    ranges: list[tuple[int, int, Address]] = []
    for found in reply if isinstance(reply, list) else ():
        match found:
            case [int(first), int(last), [name, int(port)]] if (
                0 <= first <= last < NUM_SLOTS and 0 < port < 1 << 16
            ):
                host = name.decode("ascii", "replace") if isinstance(name, bytes) else ""
                if host.isprintable() and host != "?":
                    address = Address(host or source.host or "localhost", port)
                    ranges.append((first, last, address))
            case _:
                raise LoginError(f"{source} does not describe its cluster as a server does")
    ranges.sort(key=lambda found: found[0])
    if any(last >= first for (_, last, _), (first, _, _) in pairwise(ranges)):
        raise LoginError(f"{source} does not describe its cluster as a server does")
    return ranges
