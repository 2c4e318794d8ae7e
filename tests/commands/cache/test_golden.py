"""Objects that an earlier version has written, one zip for each kind of tier, are read bit for bit.

A zip has the names of files, keys or objects, and their bytes; in each a namespace without a key
and one that is sealed. A cache outlives the process: to change what is in them is to raise a
version of the format, and the files of `tests/tiers/golden` stay as they are.
"""

import asyncio
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from safe_offload.commands.cache.place import config_of
from safe_offload.config.tiers import TierConfig
from safe_offload.tiers.base import Name, Result
from safe_offload.tiers.choice import open_tier
from tests.commands.cache.calls import KEY, read
from tests.commands.cache.conftest import Bucket, Folder, Keys, Rig
from tests.tiers.contract import bytes_of, filled, slot_of

GOLDEN = Path(__file__).parents[2] / "tiers" / "golden"
FACTS = {"model": "golden", "rank": "0"}
SHAPE = (100, 412)
BLOCKS = [(0, bytes(range(32))), (3, bytes(range(64)))]
"""Group and hash."""


class BelowGolden(Bucket):
    """Where SeaweedFS may keep empty folders."""

    url = "s3://kv-cache/golden"


def zip_of(rig: Rig) -> Path:
    kinds = {Folder: "folder.zip", Keys: "keys.zip", BelowGolden: "bucket.zip"}
    return GOLDEN / kinds[type(rig)]


def hold(rig: Rig) -> dict[str, bytes]:
    """Put what the zip has in a place of its kind, and return it."""
    found: dict[str, bytes] = {}
    with zipfile.ZipFile(zip_of(rig)) as golden:
        for name in golden.namelist():
            found[name] = golden.read(name)
            rig.write(name, found[name])
    return found


@pytest.fixture
def key_file(tmp_path):
    path = tmp_path / "hmac.key"
    path.write_text(KEY.hex())
    path.chmod(0o400)
    return str(path)


@pytest.fixture
def place(rig, tmp_path, bucket_server):
    """A place of each kind with nothing in it, and its tier."""
    endpoint = None
    if isinstance(rig, Folder):
        (tmp_path / "golden").mkdir(mode=0o700)
        rig = Folder(tmp_path / "golden")
    elif isinstance(rig, Keys):
        rig.client.flushall()
    else:
        endpoint = bucket_server.endpoint
        rig = BelowGolden(bucket_server)
    config = config_of(rig.url, {"endpoint": endpoint})
    return rig, replace(config, timeout_s=60.0)


async def fetch_all(config: TierConfig) -> list[tuple[Result, bytes]]:
    tier, namespace_of = open_tier(config, sum(SHAPE), dict(FACTS))
    names = [Name(namespace_of(""), group, block_hash) for group, block_hash in BLOCKS]
    slots = [slot_of(SHAPE) for _ in names]
    assert await tier.probe(names) == [True, True]
    results = await tier.fetch(names, slots)
    await tier.close()
    return list(zip(results, map(bytes_of, slots), strict=True))


async def spill_all(config: TierConfig) -> list[Result]:
    tier, namespace_of = open_tier(config, sum(SHAPE), dict(FACTS))
    names = [Name(namespace_of(""), group, block_hash) for group, block_hash in BLOCKS]
    results = await tier.spill(names, [filled(SHAPE, seed) for seed in range(len(names))])
    await tier.close()
    return results


def test_objects_of_an_earlier_version_are_read_and_listed(call, place, key_file):
    rig, config = place
    hold(rig)
    for each in (config, replace(config, hmac_key_file=key_file)):
        expected = [(Result.DONE, bytes_of(filled(SHAPE, seed))) for seed in range(len(BLOCKS))]
        assert asyncio.run(fetch_all(each)) == expected
    listed = read(call, "ls", rig.url)[1]["namespaces"]
    assert [each["facts"]["model"] for each in listed] == ["golden"] * 2
    assert [each["num_objects"] for each in listed] == [2, 2]
    status, found = read(call, "verify", rig.url, "--hmac-key-file", key_file)
    assert (status, found["num_objects"], found["num_sealed"], found["bad"]) == (0, 4, 0, [])


def test_what_is_written_is_what_an_earlier_version_wrote(place, key_file):
    rig, config = place
    for each in (config, replace(config, hmac_key_file=key_file)):
        assert asyncio.run(spill_all(each)) == [Result.DONE] * 2
    written = set(rig.names())
    with zipfile.ZipFile(zip_of(rig)) as golden:
        assert written == set(golden.namelist())
        assert {name: rig.read(name) for name in written} == {
            name: golden.read(name) for name in written
        }
