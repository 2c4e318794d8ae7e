"""What tests of the Valkey tier use."""

from typing import Any

import pytest

from safe_offload.tiers.tier import SealedTier
from tests.tiers.contract import tier_at
from tests.valkey_server import Server, url_config


@pytest.fixture(scope="session")
def valkey(tmp_path_factory):
    """A server that no test ends."""
    with Server(tmp_path_factory.mktemp("valkey")) as server:
        yield server


@pytest.fixture
def server(valkey):
    """A server as it is after its start."""
    with valkey.client() as client:
        client.flushall()
        client.config_set("maxmemory", 0)
        yield valkey
        for user in client.acl_users():
            if user != "default":
                client.acl_deluser(user)


@pytest.fixture
async def make():
    """Tiers at urls, closed in the end."""
    tiers: list[SealedTier] = []

    def one_more(url: str, **values: Any) -> SealedTier:
        tiers.append(tier_at(url_config(url, **values)))
        return tiers[-1]

    yield one_more
    for tier in tiers:
        await tier.close()
