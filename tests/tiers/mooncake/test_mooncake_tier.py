"""Mooncake Store as a tier, on a real master: the contract, and what can go wrong."""

from typing import Any

import pytest

from safe_offload.tiers.base import Name
from safe_offload.tiers.choice import open_store
from safe_offload.tiers.naming import key_of
from safe_offload.tiers.store import Store
from tests.mooncake_server import mooncake_tier
from tests.tiers.contract import ENCRYPTION, TierContract


class TestOnMaster(TierContract):
    num_races = 4
    cuts = TierContract.cuts[1:]  # the store keeps no object without bytes

    @pytest.fixture(autouse=True)
    def empty(self, anyone):
        """Each test begins with nothing in the store."""
        anyone.remove_by_regex(".*", True)

    @pytest.fixture
    def make_tier(self, config, anyone):
        self.anyone, self.config = anyone, config
        return lambda: mooncake_tier(config, {"model": "a", "rank": 0}, self.seal)

    def stored(self, make_tier: Any, name: Name) -> bytes:
        return bytes(self.anyone.get(key_of(name).decode()))

    def store(self, make_tier: Any, name: Name, data: bytes) -> None:
        self.delete(make_tier, name)
        assert self.anyone.put(key_of(name).decode(), data) == 0

    def delete(self, make_tier: Any, name: Name) -> None:
        self.anyone.remove(key_of(name).decode(), True)

    def place(self, make_tier: Any) -> Store:
        return open_store(self.config)


class TestEncryptedOnMaster(TestOnMaster):
    seal = ENCRYPTION
