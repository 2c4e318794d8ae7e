"""A write that is refused does not empty the cache, whichever process has the room."""

import asyncio
import errno
import itertools
import os
import resource
from pathlib import Path

import pytest

from safe_offload.config.tiers import TierConfig
from safe_offload.tiers.base import Result
from safe_offload.tiers.files import file_store, object_file
from safe_offload.tiers.files.capacity import LOCK_FILE
from safe_offload.tiers.sealed_tier import SealedTier
from tests.tiers.contract import (
    FACTS,
    PATIENCE_S,
    fetch_one,
    filled,
    name_of,
    slot_of,
    spill_one,
)
from tests.tiers.files.mounts import mounted
from tests.tiers.files.paths import files_below, said

NUM_OBJECTS = 200
OBJECT_BYTES = 28 << 10
FILE_BYTES = OBJECT_BYTES + 4096
SOURCE = filled((OBJECT_BYTES,))
NAMES = [name_of(number) for number in range(NUM_OBJECTS)]


class Tier(SealedTier):
    """Of a directory; `settle` waits until it has evicted what it is about to evict."""

    def __init__(self, path: Path) -> None:
        store = FileStore(TierConfig.at(f"file://{path}", num_threads=1), OBJECT_BYTES)
        super().__init__(store, FACTS)
        self.settle = store.settle


class FileStore(file_store.FileStore):
    async def settle(self) -> None:
        await asyncio.wrap_future(self._keeper.submit(lambda: None))


@pytest.fixture
async def make():
    tiers: list[Tier] = []

    def one_more(path: Path) -> Tier:
        tiers.append(Tier(path))
        return tiers[-1]

    yield one_more
    for tier in tiers:
        await asyncio.wait_for(tier.close(), PATIENCE_S)


class Glutton:
    """A program that takes all room of a file system, whenever there is some."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.folder.mkdir()
        self._numbers = itertools.count()

    def eat(self, size_bytes: int) -> None:
        """Write files, the last of them as small as can be, until there is no room for one."""
        while True:
            try:
                with (self.folder / str(next(self._numbers))).open("wb", buffering=0) as file:
                    while size_bytes:
                        file.write(bytes(size_bytes))
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise
                return


async def written(tier: Tier, glutton: Glutton | None = None, size_bytes: int = 0) -> list[Result]:
    """Try forty writes."""
    results = []
    for number in range(1000, 1040):
        if glutton is not None:
            glutton.eat(size_bytes)
        results.append(await spill_one(tier, name_of(number), SOURCE))
        await tier.settle()
    return results


@pytest.mark.parametrize("what", ["bytes", "inodes"])
async def test_room_that_others_take_is_made_once(make, tmp_path, what, package_log):
    inodes = NUM_OBJECTS + 260 + 40 if what == "inodes" else 0
    size_bytes = NUM_OBJECTS * FILE_BYTES + (2 << 20)
    with mounted(tmp_path / "mnt", "tmpfs", size_bytes, inodes) as folder:
        tier, glutton = make(folder / "kv"), Glutton(folder / "others")
        assert set(await tier.spill(NAMES, [SOURCE] * NUM_OBJECTS)) == {Result.DONE}
        meal_bytes = 4096 if what == "bytes" else 0
        results = await written(tier, glutton, meal_bytes)
        assert sum(await tier.probe(NAMES)) == 0.9 * NUM_OBJECTS
        assert tier.num_evicted == 0.1 * NUM_OBJECTS
        assert results[0] is Result.FULL
        assert set(results[1:]) == {Result.STILL_FULL}
        assert await fetch_one(tier, NAMES[-1], slot_of((OBJECT_BYTES,))) is Result.DONE
        lines = said(package_log)
        assert len(lines) == 2
        assert "is full" in lines[0]
        assert "freed no space" in lines[1]

        again = make(folder / "kv")  # a restart, or another engine: it is written down
        await written(again, glutton, meal_bytes)
        assert again.num_evicted == 0

        for file in glutton.folder.iterdir():
            file.unlink()
        assert await spill_one(tier, name_of(2000), SOURCE) is Result.DONE
        assert await tier.probe([name_of(2000)]) == [True]


async def test_after_an_hour_one_object_goes_to_see_whether_others_leave_room(make, tmp_path):
    """Else a cache on a disk that others have filled once would stay as it is for ever."""
    with mounted(tmp_path / "mnt", "tmpfs", NUM_OBJECTS * FILE_BYTES + (2 << 20)) as folder:
        glutton = Glutton(folder / "others")
        await make(folder / "kv").spill(NAMES, [SOURCE] * NUM_OBJECTS)
        await written(make(folder / "kv"), glutton, 4096)
        at_ns = (folder / "kv" / LOCK_FILE).stat().st_mtime_ns - 3601 * 10**9
        os.utime(folder / "kv" / LOCK_FILE, ns=(at_ns, at_ns))
        tier = make(folder / "kv")
        results = await written(tier)
        assert Result.DONE in results[:4], "one was evicted, and gave its room"
        assert results.count(Result.DONE) > 30, "so more are"
        assert sum(await tier.probe([name_of(n) for n in range(1000, 1040)])) > 30


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
async def test_a_refusal_that_evicting_does_not_heal_evicts_once(
    make, tmp_path, number, monkeypatch
):
    """As a quota of something else does; and a write that works now and then heals nothing."""
    tier, real_write = make(tmp_path / "kv"), os.pwritev
    await tier.spill(NAMES, [SOURCE] * NUM_OBJECTS)
    calls = itertools.count(1)

    def refuse(file_fd: int, buffers: list[memoryview], offset: int) -> int:
        if next(calls) % 10 == 0:
            return real_write(file_fd, buffers, offset)
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(object_file.os, "pwritev", refuse)
    results = await written(tier)
    assert results.count(Result.DONE) == 4
    assert results.count(Result.STILL_FULL) > 20
    assert sum(await tier.probe(NAMES)) == 0.9 * NUM_OBJECTS


async def test_a_file_that_may_not_grow_so_large_evicts_nothing(make, tmp_path, package_log):
    tier = make(tmp_path / "kv")
    await tier.spill(NAMES, [SOURCE] * NUM_OBJECTS)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (OBJECT_BYTES, limits[1]))
    try:
        assert set(await written(tier)) == {Result.FAILED}
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert sum(await tier.probe(NAMES)) == NUM_OBJECTS
    assert tier.num_evicted == 0
    assert any("File too large" in line for line in said(package_log))
    assert not [file for file in files_below(tmp_path) if "tmp-" in file]
