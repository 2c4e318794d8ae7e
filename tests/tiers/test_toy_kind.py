"""A kind of place that is one class and one line of a table does all that tiers and commands do."""

import asyncio
from typing import Any

import pytest

from safe_offload.commands.cli import main
from safe_offload.commands.doctor.tiers import check_tier
from safe_offload.config.tiers import KINDS, Scheme, TierConfig
from safe_offload.findings import Severity
from safe_offload.tiers.base import Name, Result
from safe_offload.tiers.store import Store
from tests.tiers.contract import SPACE, TierContract, filled, name_of, spill_one, tier_at
from tests.tiers.toy_kind import PLACES, MemoryStore

URL = "memory://toy/kv"


@pytest.fixture(autouse=True)
def _line_in_the_table(monkeypatch):
    row = Scheme("memory://NAME", "tests.tiers.toy_kind:MemoryStore")
    monkeypatch.setitem(KINDS, "memory", row)
    PLACES.clear()


class TestToy(TierContract):
    @pytest.fixture
    def make_tier(self):
        return lambda: tier_at(TierConfig.at(URL))

    def stored(self, make_tier: Any, name: Name) -> bytes:
        return PLACES[URL][self.key_of(name)]

    def store(self, make_tier: Any, name: Name, data: bytes) -> None:
        PLACES[URL][self.key_of(name)] = data

    def delete(self, make_tier: Any, name: Name) -> None:
        PLACES[URL].pop(self.key_of(name), None)

    def place(self, make_tier: Any) -> Store:
        return MemoryStore(TierConfig.at(URL))

    def key_of(self, name: Name) -> str:
        return Store.key_of(MemoryStore(TierConfig.at(URL)), name)


def test_commands_use_its_verbs(capsys):
    async def spill() -> None:
        tier = tier_at(TierConfig.at(URL))
        assert [await spill_one(tier, name_of(n), filled((4096,), n)) for n in range(3)] == [
            Result.DONE
        ] * 3

    asyncio.run(spill())
    assert main(["cache", "ls", URL]) == 0
    assert f"3 objects, 24.00 KiB in {URL}" in capsys.readouterr().out
    assert main(["cache", "verify", URL]) == 0
    assert "3 objects, 24.00 KiB checked: 0 bad." in capsys.readouterr().out
    before = dict(PLACES[URL])
    found = {each.id: each.severity for each in check_tier(TierConfig.at(URL))}
    assert found.pop("tiers.key") is Severity.WARNING
    assert found == {
        "tiers.place": Severity.OK,
        "tiers.access": Severity.OK,
        "tiers.rate": Severity.INFO,
    }
    assert PLACES[URL] == before, "doctor leaves nothing behind"
    assert main(["cache", "rm", URL, SPACE.hex()]) == 0
    assert PLACES[URL] == {}
