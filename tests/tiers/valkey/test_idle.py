"""A connection that the server closed while it was idle costs no call; one that fails does."""

import asyncio
import contextlib
import socket
import struct
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from safe_offload.config.tiers import DEFAULT_CONNECTIONS, TierConfig
from safe_offload.tiers.base import Result
from safe_offload.tiers.naming import key_of
from safe_offload.tiers.sealed_tier import SealedTier
from safe_offload.tiers.seals.seal import PLAIN
from safe_offload.tiers.valkey.login import Login
from safe_offload.tiers.valkey.replies import WireError
from safe_offload.tiers.valkey.servers import ConnectionPool, Servers
from safe_offload.tiers.valkey.wire import Wire
from tests.tiers.contract import bytes_of, filled, name_of, slot_of, tier_at
from tests.tiers.valkey.scripted_server import PATIENCE_S, Peer, ScriptedServer
from tests.valkey_server import Certificates, Server

SOURCE = filled((4096,), 1)
VALUE = PLAIN.header(name_of(1), SOURCE) + bytes_of(SOURCE)
GOOD = {
    b"EXISTS": b":1\r\n",
    b"GET": b"$%d\r\n%b\r\n" % (len(VALUE), VALUE),
    b"SET": b"+OK\r\n",
    b"DEL": b":1\r\n",
}


@contextlib.contextmanager
def closed(tier: SealedTier, runner: asyncio.Runner) -> Iterator[SealedTier]:
    try:
        yield tier
    finally:
        runner.run(tier.close())


def reset(peer: Peer) -> None:
    """End a connection as a machine does that has forgotten it."""
    linger = struct.pack("ii", 1, 0)
    peer.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
    peer.connection.close()


async def everything(tier: SealedTier) -> list[object]:
    """Return what comes of each kind of call."""
    slot = slot_of((4096,))
    found: list[object] = [
        await tier.probe([name_of(1)]),
        await tier.fetch([name_of(1)], [slot]),
        await tier.spill([name_of(1)], [SOURCE]),
    ]
    assert bytes_of(slot) == bytes_of(SOURCE)
    return found


WORKED = [[True], [Result.DONE], [Result.PRESENT]]


# ---- a real server ------------------------------------------------------------------------------


def kill_connections(*servers: Server) -> None:
    """Close connections as a server does whose `timeout` is over, while the loop does not run."""
    for server in servers:
        with server.client() as client:
            client.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")


def test_connections_that_a_server_has_closed_are_made_again(runner, server, caplog):
    names, slots = [name_of(number) for number in range(20)], [filled((4096,), 1)] * 20

    async def use() -> None:
        await tier.spill(names, slots)
        kill_connections(server)
        assert await tier.fetch(names, [slot_of((4096,)) for _ in names]) == [Result.DONE] * 20
        kill_connections(server)
        assert await tier.probe(names) == [True] * 20
        kill_connections(server)
        assert await tier.spill(names, slots) == [Result.PRESENT] * 20
        for _ in range(2):  # that the loop sees it before they are needed
            kill_connections(server)
            await asyncio.sleep(0.05)
            assert await tier.fetch(names, [slot_of((4096,)) for _ in names]) == [Result.DONE] * 20

    with closed(tier_at(TierConfig.at(f"redis://{server.host_port}")), runner) as tier:
        runner.run(use())
        with server.client() as client:
            num_connections = sum(c["name"] == "safe-offload" for c in client.client_list())
    assert num_connections <= DEFAULT_CONNECTIONS + 1
    assert not caplog.text


def test_which_servers_there_are_is_asked_again_over_a_new_connection(runner, server):
    async def ask() -> None:
        servers = Servers(Login(TierConfig.at(f"redis://{server.host_port}")), 1)
        await servers.refresh(0)
        kill_connections(server)
        await servers.refresh(1)
        assert servers.version == 2
        servers.close()

    runner.run(ask())


def test_an_idle_connection_is_kept_alive(runner, server):
    """So that a firewall does not forget it, and a machine that is gone is noticed.

    Source: proc_pid_net(5), tcp: of each connection its addresses, its state (1: established), and
    the kind of its timer (2: keep-alive).
    """
    with closed(tier_at(TierConfig.at(f"redis://{server.host_port}")), runner) as tier:
        runner.run(tier.probe([name_of(1)]))
        rows = [line.split() for line in Path("/proc/self/net/tcp").read_text().splitlines()[1:]]
    there = f"0100007F:{server.port:04X}", "01"
    assert [row[5].partition(":")[0] for row in rows if (row[2], row[3]) == there] == ["02"]


# ---- a scripted server --------------------------------------------------------------------------


class Waiting:
    """A server that ends each connection when it has answered, and is asked something again.

    `num_answers`: of each connection; `ends`: how; as a closed socket does if it is not told.
    """

    def __init__(self, num_answers: int, ends: Any = None) -> None:
        self._num_answers = num_answers
        self._ends = ends
        self.asked: list[bytes] = []

    def __call__(self, peer: Peer) -> None:
        for _ in range(self._num_answers):
            word = peer.command()[0]
            self.asked.append(word)
            peer.send(GOOD[word])
        self.asked.append(peer.command()[0])
        if self._ends is not None:
            self._ends(peer)


def tier_on(server: ScriptedServer, tls: Certificates | None = None) -> SealedTier:
    scheme, values = ("redis", {}) if tls is None else ("rediss", {"ca_file": str(tls.ca)})
    return tier_at(TierConfig.at(f"{scheme}://localhost:{server.port}", **values))


@pytest.mark.parametrize("ends", [None, reset], ids=["closed", "reset"])
def test_a_call_goes_on_over_a_new_connection_when_an_idle_one_ends_without_an_answer(
    runner, tls, ends, caplog
):
    script = Waiting(1, ends)
    with ScriptedServer(script, tls=tls) as server, closed(tier_on(server, tls), runner) as tier:
        for _ in range(3):
            assert runner.run(everything(tier)) == WORKED
    assert not caplog.text


def test_a_new_connection_that_ends_without_an_answer_fails_the_call(runner):
    with ScriptedServer(Waiting(0)) as server, closed(tier_on(server), runner) as tier:
        with pytest.raises(WireError):
            runner.run(tier.probe([name_of(1)]))
        assert server.num_connections == 2, "one that was idle after CLUSTER SLOTS, and a new one"
        for call in (tier.fetch, tier.spill):
            num_before = server.num_connections
            assert runner.run(call([name_of(1)], [slot_of((4096,))])) == [Result.FAILED]
            assert server.num_connections == num_before + 1


def test_the_second_time_a_call_uses_no_idle_connection(runner):
    all_are_used = threading.Barrier(DEFAULT_CONNECTIONS)

    def script(peer: Peer) -> None:
        is_old = server.num_connections <= 1 + DEFAULT_CONNECTIONS
        peer.command()
        if is_old:
            all_are_used.wait(PATIENCE_S)
        peer.send(GOOD[b"GET"])
        peer.command()
        if not is_old:
            peer.send(GOOD[b"GET"])

    async def fetch() -> None:
        slots = [slot_of((4096,)) for _ in range(DEFAULT_CONNECTIONS)]
        for found in await asyncio.gather(*(tier.fetch([name_of(1)], [slot]) for slot in slots)):
            assert found == [Result.DONE]
        assert await tier.fetch([name_of(1)], [slot_of((4096,))]) == [Result.DONE]

    with ScriptedServer(script) as server, closed(tier_on(server), runner) as tier:
        runner.run(fetch())


class Transport(asyncio.Transport):
    """Leads nowhere."""

    def abort(self) -> None:
        pass


async def test_a_pool_has_never_more_connections_than_it_may():
    wires: list[Wire] = []

    async def connect() -> Wire:
        wires.append(Wire())
        wires[-1].connection_made(Transport())
        assert sum(not wire.is_closed for wire in wires) == 1
        return wires[-1]

    async def lose(wire: Wire) -> None:
        others.append(asyncio.ensure_future(pool.use(look)))  # it comes before the second time
        await asyncio.sleep(0)
        wire.connection_lost(None)
        await wire.request_lines([], 1)

    async def look(wire: Wire) -> None:
        await asyncio.sleep(0)

    pool, others = ConnectionPool(1, connect), list[asyncio.Future[None]]()
    await pool.use(look)
    with pytest.raises(WireError):
        await pool.use(lose)
    await asyncio.gather(*others)
    assert len(wires) == 4, "the first, that of the others twice, and the new one"


def test_a_connection_that_ends_in_an_answer_fails_the_call(runner):
    num_asked = 0

    def script(peer: Peer) -> None:
        nonlocal num_asked
        assert peer.command()[0] == b"GET"
        peer.send(GOOD[b"GET"])
        assert peer.command()[0] == b"GET"
        num_asked += 1
        peer.send(GOOD[b"GET"][:1000])

    async def fetch() -> None:
        assert await tier.fetch([name_of(1)], [slot_of((4096,))]) == [Result.DONE]
        assert await tier.fetch([name_of(1)], [slot_of((4096,))]) == [Result.FAILED]

    with ScriptedServer(script) as server, closed(tier_on(server), runner) as tier:
        runner.run(fetch())
        assert server.num_connections == 2, "one for CLUSTER SLOTS"
    assert num_asked == 1


def test_an_object_is_not_written_twice(runner):
    """An idle connection is asked about an object first: only that is done again."""
    num_written = 0

    def script(peer: Peer) -> None:
        nonlocal num_written
        while True:
            word, key, *_ = peer.command()
            if word == b"SET" and key == key_of(name_of(2)):
                num_written += 1
                return
            peer.send(b":0\r\n" if word == b"EXISTS" else b"+OK\r\n")

    async def spill() -> None:
        assert await tier.spill([name_of(1)], [SOURCE]) == [Result.DONE]
        assert await tier.spill([name_of(2)], [SOURCE]) == [Result.FAILED]

    with ScriptedServer(script) as server, closed(tier_on(server), runner) as tier:
        runner.run(spill())
    assert num_written == 1
