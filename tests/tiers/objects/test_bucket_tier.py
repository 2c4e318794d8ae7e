"""The object store tier on a real server: the contract, and what a server can do to it."""

import itertools
from asyncio import DefaultEventLoopPolicy
from typing import Any

import pytest
import uvloop

from safe_offload.config.tiers import TierConfig
from safe_offload.tiers import naming
from safe_offload.tiers.base import Name, Result
from safe_offload.tiers.guarded_tier import GuardedTier
from safe_offload.tiers.naming import namespace_folder, path_of
from safe_offload.tiers.objects.bucket import open_store
from safe_offload.tiers.objects.bucket_store import BucketStore
from safe_offload.tiers.store import Store
from tests.bucket_server import BucketServer
from tests.tiers.contract import (
    ENCRYPTION,
    SPACE,
    TierContract,
    bytes_of,
    fetch_one,
    filled,
    name_of,
    slot_of,
    spill_one,
    tier_at,
)

_numbers = itertools.count()


@pytest.fixture(scope="module")
def server():
    with BucketServer() as server:
        yield server


@pytest.fixture(autouse=True)
def environment(server, monkeypatch):
    for name, value in server.environment().items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def config(server):
    """A tier below a prefix that no other test uses."""
    return TierConfig.at(server.url(f"kv/{next(_numbers)}"), endpoint=server.endpoint)


@pytest.fixture(scope="class")
def event_loop_policy(request):
    """The loop of production for the contract, asyncio's own for the other tests."""
    return uvloop.EventLoopPolicy() if request.cls else DefaultEventLoopPolicy()


def path_in(name: Name) -> str:
    return "/".join((namespace_folder(name.namespace), *path_of(name)))


class TestOnServer(TierContract):
    num_races, num_forged = 4, 20  # SeaweedFS takes half a second for each

    @pytest.fixture
    def make_tier(self, config):
        self.bucket, self.config = open_store(config), config
        return lambda: tier_at(config, seal=self.seal)

    def place(self, make_tier: Any) -> Store:
        return BucketStore(self.config)

    def stored(self, make_tier: Any, name: Name) -> bytes:
        return bytes(self.bucket.get(path_in(name)).bytes())

    def store(self, make_tier: Any, name: Name, data: bytes) -> None:
        self.bucket.put(path_in(name), data, use_multipart=False)

    def delete(self, make_tier: Any, name: Name) -> None:
        self.bucket.delete(path_in(name))


class TestEncryptedOnServer(TestOnServer):
    seal = ENCRYPTION


# ---- what goes wrong ----------------------------------------------------------------------------


def log_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if "Tier s3" in record.getMessage()]


async def test_who_may_only_read_reads(server, config, monkeypatch, caplog):
    name, source, target = name_of(1), filled((4096,)), slot_of((4096,))
    await spill_one(tier_at(config), name, source)
    bad = open_store(config)
    bad.put(path_in(name_of(2)), b"bad")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", server.reader_key)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", server.reader_secret)
    tier = tier_at(config)
    assert await fetch_one(tier, name, target) is Result.DONE
    assert bytes_of(target) == bytes_of(source)
    assert await spill_one(tier, name_of(3), source) is Result.REFUSED
    assert await fetch_one(tier, name_of(2), target) is Result.CORRUPT
    assert await tier.probe([name, name_of(2)]) == [True, False], "it could not be deleted"
    assert bad.head(path_in(name_of(2)))["size"] == 3
    assert any("failed to delete: access denied" in line for line in log_of(caplog))


async def test_a_bucket_that_is_not_there_is_named_as_the_problem(server, caplog):
    tier = tier_at(TierConfig.at("s3://no-such-bucket/kv", endpoint=server.endpoint))
    assert await tier.probe([name_of(1)]) == [False]
    assert await spill_one(tier, name_of(1), filled((4096,))) is Result.FAILED
    assert await fetch_one(tier, name_of(1), slot_of((4096,))) is Result.FAILED
    assert [line for line in log_of(caplog) if "there is no such bucket" in line]
    assert "Fix: create the bucket" in caplog.text


async def test_of_many_generations_the_namespaces_of_the_last_are_remembered(config):
    made = []
    guarded = GuardedTier(
        tier_at(config), config, lambda g: made.append(g) or SPACE, slot_bytes=4096
    )
    generations = [str(number) for number in range(naming.NAMESPACES_MAX)]
    for generation in (*generations, *generations, "next", "next", "0"):
        guarded.namespace(generation)
    assert made == [*generations, "next", "0"]
