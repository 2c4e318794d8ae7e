"""Directories of file tiers, and tiers that are closed in the end."""

import asyncio
import shutil
import tempfile
from pathlib import Path

import pytest

from safe_offload.config.tiers import TierConfig
from safe_offload.tiers.sealed_tier import SealedTier
from tests.tiers.contract import PATIENCE_S, tier_at


@pytest.fixture
def root(tmp_path):
    return tmp_path / "tier"


@pytest.fixture
def base():
    """A directory that every user may enter, and only we may write."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
async def make(root):
    tiers: list[SealedTier] = []

    def one_more(path: Path = root, **settings: int) -> SealedTier:
        tiers.append(tier_at(TierConfig.at(f"file://{path}", **settings)))
        return tiers[-1]

    yield one_more
    for tier in tiers:
        await asyncio.wait_for(tier.close(), PATIENCE_S)
