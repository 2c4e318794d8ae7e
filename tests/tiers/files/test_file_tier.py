"""The file tier, on disk and on tmpfs: the contract, and all that a directory can do to it."""

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from safe_offload.config.tiers import TierConfig
from safe_offload.tiers.base import Name
from safe_offload.tiers.choice import open_store
from safe_offload.tiers.store import Store
from tests.tiers.contract import ENCRYPTION, TierContract, tier_at
from tests.tiers.files.paths import path_in

SLOT_BYTES = 1 << 20


class FilesContract(TierContract):
    @pytest.fixture
    def make_tier(self, root):
        self.root = root
        return lambda: tier_at(TierConfig.at(f"file://{root}"), seal=self.seal)

    def stored(self, make_tier: Any, name: Name) -> bytes:
        return path_in(self.root, name).read_bytes()

    def store(self, make_tier: Any, name: Name, data: bytes) -> None:
        path_in(self.root, name).write_bytes(data)

    def delete(self, make_tier: Any, name: Name) -> None:
        path_in(self.root, name).unlink(missing_ok=True)

    def place(self, make_tier: Any) -> Store:
        return open_store(TierConfig.at(f"file://{self.root}"))

    @pytest.mark.parametrize("shift", [512, 16])
    async def test_what_is_aligned_in_another_way_comes_back(self, make, shift):
        """What direct I/O takes as it is, and what it does not."""
        await self.test_what_was_spilled_comes_back(make, shift)


class TestOnDisk(FilesContract):
    pass


class TestEncryptedOnDisk(FilesContract):
    seal = ENCRYPTION


class TestOnTmpfs(FilesContract):
    @pytest.fixture
    def root(self, tmp_path):
        root = Path("/dev/shm", f"safe-offload-test-{os.getpid()}")
        yield root
        shutil.rmtree(root, ignore_errors=True)
