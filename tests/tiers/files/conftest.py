"""Directories of file tiers, and tiers that are closed in the end."""

import asyncio
import shutil
import tempfile
from pathlib import Path

import pytest

from safe_offload.config.tiers import TierConfig
from safe_offload.tiers.files.tier import FileTier
from tests.tiers.contract import FACTS, PATIENCE_S


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
    tiers: list[FileTier] = []

    def one_more(path: Path = root, kind: type[FileTier] = FileTier, **settings: int) -> FileTier:
        tiers.append(kind(TierConfig.at(f"file://{path}", **settings), 1 << 20, FACTS))
        return tiers[-1]

    yield one_more
    for tier in tiers:
        await asyncio.wait_for(tier.close(), PATIENCE_S)
