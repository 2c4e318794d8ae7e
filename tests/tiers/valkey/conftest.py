"""What tests of the Valkey tier use."""

from typing import Any

import pytest

from safe_offload.tiers.sealed_tier import SealedTier
from tests.tiers.contract import tier_at
from tests.valkey_server import url_config


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
