"""What a Valkey server that is not trusted can cost: bytes, and steps that hold the loop."""

import asyncio
import itertools
import threading
import time

import pytest

from safe_offload.tiers.base import Result
from safe_offload.tiers.sealed_tier import SealedTier
from safe_offload.tiers.valkey.login import Login
from safe_offload.tiers.valkey.replies import REPLY_BYTES_MAX, SCRATCH_BYTES
from tests.tiers.contract import name_of, slot_of, tier_at
from tests.tiers.valkey.replies import CostWatch, replies
from tests.tiers.valkey.scripted_server import Peer, ScriptedServer
from tests.valkey_server import url_config

LOGIN_BYTES_MAX = 64 << 10
SLACK_BYTES = 256 << 10
"""Of the event loop, its sockets and the tier."""
STEPS_MAX = 100_000
NUM_CONNECTIONS = 8
MANY_TEXTS = b"*65536\r\n" + (b"$1024\r\n" + bytes(1024) + b"\r\n") * 65536
"""68 MiB, which were kept once."""
MANY_RANGES = b"*10922\r\n" + b"*3\r\n:0\r\n:16383\r\n*2\r\n$1\r\na\r\n:1\r\n" * 10922
"""354 KB, of which each range says that its server has all slots."""
WORDS = (b"AUTH", b"SELECT", b"CLIENT")


def tier_on(server: ScriptedServer, num_connections: int = 1) -> SealedTier:
    url = f"redis://kv:password@127.0.0.1:{server.port}/1"
    return tier_at(url_config(url, timeout_s=30.0, num_connections=num_connections))


def never(peer: Peer) -> None:
    raise AssertionError(peer.command())


@pytest.mark.parametrize("word", WORDS)
async def test_a_login_costs_no_more_than_its_budget(word):
    with ScriptedServer(never, greeting={word: MANY_TEXTS}) as server:
        login = Login(url_config(f"redis://kv:password@127.0.0.1:{server.port}/1", timeout_s=30.0))
        with CostWatch() as watch, pytest.raises(OSError):  # noqa: PT011 whatever it says
            await login.connect(login.home)
    assert watch.peak_bytes <= SCRATCH_BYTES + LOGIN_BYTES_MAX + SLACK_BYTES
    assert watch.steps_max <= STEPS_MAX


async def test_logins_of_all_connections_cost_no_more_than_one():
    connections = itertools.count()

    def script(peer: Peer) -> None:
        is_first = next(connections) == 0  # it asks whether there is a cluster
        while words := peer.command():
            is_good = is_first or words[0] != b"AUTH"
            peer.send((b"-ERR no\r\n" if words[0] == b"CLUSTER" else b"+OK\r\n") * is_good)
            if not is_good:
                peer.send(MANY_TEXTS)

    with ScriptedServer(script, greets=()) as server:
        tier = tier_on(server, NUM_CONNECTIONS)
        names = [name_of(number) for number in range(2 * NUM_CONNECTIONS)]
        slots = [slot_of((512,)) for _ in names]
        with CostWatch() as watch:
            assert set(await tier.fetch(names, slots)) == {Result.FAILED}
        await tier.close()
    assert server.num_connections == 1 + NUM_CONNECTIONS
    assert watch.peak_bytes <= 2 * SCRATCH_BYTES + LOGIN_BYTES_MAX + SLACK_BYTES


async def test_connections_to_a_server_are_logged_in_one_at_a_time():
    lock, num_now, num_max = threading.Lock(), 0, 0

    def script(peer: Peer) -> None:
        nonlocal num_now, num_max
        while words := peer.command():
            if words[0] == b"AUTH":
                with lock:
                    num_now += 1
                    num_max = max(num_max, num_now)
                time.sleep(0.02)  # for others that come
                with lock:
                    num_now -= 1
            peer.send(b"$-1\r\n" if words[0] == b"GET" else b"+OK\r\n")

    with ScriptedServer(script, greets=(b"CLUSTER",)) as server:
        tier = tier_on(server, NUM_CONNECTIONS)
        names = [name_of(number) for number in range(1000)]
        assert Result.ABSENT in await tier.fetch(names, [slot_of((512,)) for _ in names])
        await tier.close()
    assert num_max == 1


async def test_a_cluster_costs_no_more_than_its_budget():
    with ScriptedServer(never, greeting={b"CLUSTER": MANY_RANGES}) as server:
        tier = tier_on(server)
        with CostWatch() as watch, pytest.raises(OSError):  # noqa: PT011 whatever it says
            await tier.probe([name_of(1)])
        await tier.close()
    assert watch.steps_max <= STEPS_MAX
    assert watch.peak_bytes <= SCRATCH_BYTES + 2 * REPLY_BYTES_MAX + SLACK_BYTES


async def test_a_cluster_of_many_ranges_is_used():
    """As one is whose slots were moved a few at a time; each range has a replica."""
    ranges = 1000
    node = b"*4\r\n$9\r\n127.0.0.1\r\n:%d\r\n$40\r\n" + b"a" * 40 + b"\r\n*2\r\n$8\r\nhostname\r\n"
    node += b"$4\r\nkv-1\r\n"

    def script(peer: Peer) -> None:
        while words := peer.command():
            parts = [
                b"*4\r\n:%d\r\n:%d\r\n" % (16384 * at // ranges, 16384 * (at + 1) // ranges - 1)
                + 2 * (node % server.port)
                for at in reversed(range(ranges))
            ]
            is_asked = words[0] == b"CLUSTER"
            peer.send(b"*%d\r\n" % ranges + b"".join(parts) if is_asked else b":1\r\n")

    with ScriptedServer(script, greets=WORDS) as server:
        tier = tier_on(server)
        assert await tier.probe([name_of(number) for number in range(100)]) == [True] * 100
        await tier.close()


@pytest.mark.parametrize(
    "seed", [1, *(pytest.param(seed, marks=pytest.mark.nightly) for seed in (0, 2, 3))]
)
async def test_no_reply_costs_more_than_was_asked_for(seed):
    """Random ones, to each command of a tier."""
    chosen = itertools.cycle(replies(seed, 40))
    wanted = b""

    def script(peer: Peer) -> None:
        while words := peer.command():
            good = b"-ERR no\r\n" if words[0] == b"CLUSTER" else b"+OK\r\n"
            peer.send(reply if words[0] == wanted else good)
            if words[0] == wanted:
                return

    with ScriptedServer(script, greets=()) as server:
        for wanted in (b"AUTH", b"CLUSTER", b"EXISTS", b"GET") * 10:
            reply = next(chosen)
            tier = tier_on(server)
            with CostWatch() as watch:
                calls = tier.probe([name_of(1)]), tier.fetch([name_of(1)], [slot_of((512,))])
                await asyncio.gather(*calls, return_exceptions=True)
            await tier.close()
            kept = 2 * REPLY_BYTES_MAX if wanted == b"CLUSTER" else LOGIN_BYTES_MAX
            # Each of the two calls may have a connection that ends, and the one that follows it.
            assert watch.peak_bytes <= 4 * SCRATCH_BYTES + kept + SLACK_BYTES, reply[:100]
            assert watch.steps_max <= STEPS_MAX, reply[:100]
