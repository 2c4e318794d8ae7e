"""What a server does to a tier of any kind: at worst misses, and afterwards it is used again.

Each kind says how its server is started, killed and stopped. What only one kind does is tested in
its folder, and objects that a server has changed by the contract.
"""

import asyncio
import itertools
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from safe_offload.config.tiers import TierConfig
from safe_offload.tiers.base import Buffers, Name, Result
from safe_offload.tiers.guarded_tier import GuardedTier
from safe_offload.tiers.naming import namespace
from safe_offload.tiers.sealed_tier import SealedTier
from tests.bucket_server import BucketServer
from tests.mooncake_server import Master, Segment, find_master
from tests.tiers.contract import FACTS, PATIENCE_S, bytes_of, filled, slot_of, tier_at
from tests.tiers.valkey.scripted_server import reason_of
from tests.valkey_server import Server

MIB = 1 << 20
WRONG = "wrong-secret"
_spaces = itertools.count()


class ValkeyPlace:
    """A server without room for all objects of these tests, which evicts nothing."""

    denial = ("rejected the user or the password (WRONGPASS)", '"password_file"')
    fullness = "set its maxmemory-policy to allkeys-lru"

    def __init__(self, folder: Path) -> None:
        self.server = Server(folder, {"maxmemory": "64mb", "maxmemory-policy": "noeviction"})
        self.start, self.kill = self.server.start, self.server.kill
        self.suspend, self.resume = self.server.stop, self.server.go_on
        self.environment: dict[str, str] = {}

    def config(self, **values: float) -> TierConfig:
        return TierConfig.at(f"redis://{self.server.host_port}", **values)

    def denied(self, monkeypatch: pytest.MonkeyPatch) -> TierConfig:
        return TierConfig.at(f"redis://kv:{WRONG}@{self.server.host_port}")

    def close(self) -> None:
        self.kill()


class BucketPlace:
    """SeaweedFS, which keeps what it has and is never full."""

    denial = ("access denied", "SignatureDoesNotMatch). Fix: allow reads, writes and deletes")
    fullness = None

    def __init__(self, folder: Path) -> None:
        self.server = BucketServer()
        self.start, self.kill, self.close = self.server.start, self.server.kill, self.server.close
        self.suspend, self.resume = self.server.suspend, self.server.resume
        self.environment = self.server.environment()

    def config(self, **values: float) -> TierConfig:
        return TierConfig.at(self.server.url("kv"), endpoint=self.server.endpoint, **values)

    def denied(self, monkeypatch: pytest.MonkeyPatch) -> TierConfig:
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", WRONG)
        return self.config()


class MooncakePlace:
    """A master and one machine with memory. It knows no credentials."""

    denial = ()
    fullness = ""

    def __init__(self, folder: Path) -> None:
        self.master = Master(folder, client_ttl="3", default_kv_lease_ttl="2000")
        self.segment = Segment(folder, self.master, 64 * MIB)
        self.suspend, self.resume = self.master.suspend, self.master.resume
        self.environment: dict[str, str] = {}

    def start(self) -> None:
        self.master.start()
        self.segment.start()

    def kill(self) -> None:
        self.segment.kill()
        self.master.kill()

    def config(self, **values: float) -> TierConfig:
        return TierConfig.at(self.master.url, **values)

    def denied(self, monkeypatch: pytest.MonkeyPatch) -> TierConfig:
        raise NotImplementedError

    def close(self) -> None:
        self.kill()


Place = ValkeyPlace | BucketPlace | MooncakePlace
KINDS = {
    "valkey": ValkeyPlace,
    "bucket": BucketPlace,
    "mooncake": pytest.param(
        MooncakePlace,
        marks=pytest.mark.skipif(find_master() is None, reason="Mooncake is not installed"),
    ),
}


@pytest.fixture(scope="module", params=KINDS.values(), ids=KINDS)
def server(request, tmp_path_factory) -> Iterator[Place]:
    place = request.param(tmp_path_factory.mktemp("place"))
    try:
        place.start()
        yield place
    finally:
        place.close()


@pytest.fixture
def place(server, monkeypatch):
    for variable, value in server.environment.items():
        monkeypatch.setenv(variable, value)
    return server


@pytest.fixture
async def open_tier():
    """Tiers that are closed in the end."""
    tiers: list[SealedTier] = []

    def one_more(config: TierConfig) -> SealedTier:
        tiers.append(tier_at(config))
        return tiers[-1]

    yield one_more
    for tier in tiers:
        await asyncio.wait_for(tier.close(), PATIENCE_S)


@pytest.fixture
def names():
    """Of objects that no other test knows."""
    space = namespace(FACTS, str(next(_spaces)))
    return [Name(space, 0, number.to_bytes(32, "big")) for number in range(18)]


def guarded(tier: SealedTier, config: TierConfig, names: Sequence[Name]) -> GuardedTier:
    space = names[0].namespace
    return GuardedTier(tier, config, lambda _: space, slot_bytes=MIB, chance=lambda: 0.5)


def sources(names: Sequence[Name], size_bytes: int = MIB) -> list[Buffers]:
    return [filled((size_bytes,), number) for number in range(len(names))]


def targets(names: Sequence[Name], size_bytes: int = MIB) -> list[Buffers]:
    return [slot_of((size_bytes,)) for _ in names]


async def is_used_again(tier: SealedTier, names: Sequence[Name]) -> None:
    """Write and read until all is well."""
    slots, found = sources(names), targets(names)
    async with asyncio.timeout(PATIENCE_S):
        while not {*await tier.spill(names, slots)} <= {Result.DONE, Result.PRESENT}:  # noqa: ASYNC110
            await asyncio.sleep(0.1)
        while {*await tier.fetch(names, found)} != {Result.DONE}:  # noqa: ASYNC110 of a server
            await asyncio.sleep(0.1)
    assert [*map(bytes_of, found)] == [*map(bytes_of, slots)]


async def test_wrong_credentials_are_named_and_never_shown(
    place, open_tier, names, monkeypatch, caplog
):
    if not place.denial:
        pytest.skip("there are none")
    caplog.set_level(logging.DEBUG)
    tier, slots = open_tier(place.denied(monkeypatch)), targets(names, 512)
    assert {*await tier.spill(names, slots)} <= {Result.REFUSED, Result.FAILED}
    assert {*await tier.fetch(names, slots)} == {Result.FAILED}
    reason = await reason_of(tier)
    assert place.denial[0] in reason
    assert place.denial[1] in caplog.text
    lines = [line for line in caplog.messages if place.denial[0] in line]
    assert 1 <= len(lines) <= 3, "one each for writing, reading and asking"
    assert WRONG not in caplog.text + reason + tier.label + repr(tier)


async def test_a_server_that_is_away_is_asked_again_when_it_is_there(place, open_tier, names):
    config = place.config()
    place.kill()
    tier = open_tier(config)
    away = guarded(tier, config, names)
    assert await away.probe(names) is None
    assert {*await tier.fetch(names, targets(names, 512))} == {Result.FAILED}
    assert {*await tier.spill(names, targets(names, 512))} == {Result.FAILED}
    place.start()
    await is_used_again(tier, names)
    assert await away.probe(names) == [True] * len(names)


async def test_a_server_that_is_killed_while_it_sends_gives_no_wrong_byte(place, open_tier, names):
    tier, slots, found = open_tier(place.config()), sources(names), targets(names)
    await is_used_again(tier, names)
    more = [Name(name.namespace, 1, name.block_hash) for name in names]
    calls = [
        asyncio.ensure_future(call)
        for call in (tier.fetch(names, found), tier.spill(more, sources(more)))
    ]
    async with asyncio.timeout(PATIENCE_S):
        while not any(target[0][-1] for target in found):  # noqa: ASYNC110 - until some have come
            await asyncio.sleep(0)
    await asyncio.to_thread(place.kill)
    async with asyncio.timeout(PATIENCE_S):
        read, written = await asyncio.gather(*calls)
    assert {*read, *written} <= {Result.DONE, Result.FAILED}
    for result, source, target in zip(read, slots, found, strict=True):
        assert result is not Result.DONE or bytes_of(target) == bytes_of(source)
    await reason_of(tier)
    await asyncio.to_thread(place.start)
    await is_used_again(tier, names)


async def test_calls_to_a_server_that_is_stopped_end_at_their_deadline(place, open_tier, names):
    """And nothing comes into their slots after that."""
    patient, config = open_tier(place.config(timeout_s=60.0)), place.config(timeout_s=0.5)
    await is_used_again(patient, names)
    short = guarded(open_tier(config), config, names)
    assert {*await short.fetch(names[:1], targets(names[:1]))} == {Result.DONE}
    place.suspend()
    try:
        found = targets(names)
        new = [Name(name.namespace, 2, name.block_hash) for name in names]
        async with asyncio.timeout(PATIENCE_S):
            assert await short.probe(new) is None
            calls = await asyncio.gather(short.fetch(names, found), short.spill(new, found))
            for results in calls:
                assert results is not None
                assert {*results} <= {Result.FAILED, Result.CANCELLED}
        assert short.num_running == 0
    finally:
        place.resume()
    await is_used_again(patient, names)
    assert not any(map(any, map(bytes_of, found)))


async def test_a_full_server_says_so_and_serves_what_it_has(place, open_tier, names, caplog):
    """The last test of a place."""
    if place.fullness is None:
        pytest.skip("it is as large as the disk")
    tier = open_tier(place.config())
    many = [Name(name.namespace, group, name.block_hash) for group in range(6) for name in names]
    slots, results = sources(many), []
    for name, slot in zip(many, slots, strict=True):
        results += await tier.spill([name], [slot])
        await asyncio.sleep(0.02)  # Mooncake evicts only what nobody has used lately
    assert {*results} <= {Result.DONE, Result.FULL}
    assert place.fullness in caplog.text
    there, found = await tier.probe(many), targets(many)
    assert 20 < sum(there) < 64
    read = await tier.fetch(many, found)
    assert {*read} == {Result.DONE, Result.ABSENT}
    for result, slot, target in zip(read, slots, found, strict=True):
        assert result is not Result.DONE or bytes_of(target) == bytes_of(slot)
