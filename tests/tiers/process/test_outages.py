"""An outage of a tier, as an operator sees it: one line with one cause and one fix."""

import asyncio
import logging

import pytest

from safe_offload.config.tiers import TierConfig
from safe_offload.tiers.breaker import FAILURES_MAX
from safe_offload.tiers.guarded_tier import GuardedTier
from tests.tiers.process.test_process_tier import LENGTHS, Slots, names
from tests.valkey_server import LOCALHOST, free_port


@pytest.fixture
def log(caplog):
    """Lines from INFO on, of the process too."""
    caplog.set_level(logging.DEBUG, "vllm")
    return lambda: [each.getMessage() for each in caplog.records if each.levelno > logging.INFO]


def world_writable(path):
    path.mkdir()
    path.chmod(0o777)
    return TierConfig.at(f"file://{path}")


OUTAGES = {
    "a directory that others may write": (world_writable, "is world-writable", "chmod o-w"),
    "a path that is a file": (
        lambda path: path.touch() or TierConfig.at(f"file://{path}"),
        *("Not a directory", "check its device or mount"),
    ),
    "no server": (
        lambda _: TierConfig.at(f"redis://{LOCALHOST}:{free_port()}"),
        *("cannot connect to", "Check the url"),
    ),
    "no bucket": (
        lambda _: TierConfig.at("s3://kv-cache/prod", endpoint=f"http://{LOCALHOST}:{free_port()}"),
        *("the request failed", "check the tier's endpoint"),
    ),
    "no master": (
        lambda _: TierConfig.at(f"mooncake://{LOCALHOST}:{free_port()}"),
        *("no connection to the master", "Check the url"),
    ),
}


@pytest.mark.parametrize("what", OUTAGES)
@pytest.mark.parametrize("first", ["probe", "spill"])
async def test_an_outage_is_one_line(tmp_path, monkeypatch, log, what, first):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "x")
    make, cause, fix = OUTAGES[what]
    config, slots = make(tmp_path / "tier"), Slots()
    tier = GuardedTier(slots.open(config), config, lambda _: bytes(16), slot_bytes=sum(LENGTHS))
    calls = [tier.probe, lambda names: tier.spill(names, [0, 1])]
    for call in calls if first == "probe" else calls[::-1]:
        for _ in range(FAILURES_MAX):
            await call(names(2))
    await tier.fetch(names(2), [0, 1])
    await tier.close()
    await asyncio.sleep(0)
    assert tier.is_out
    assert tier.is_out_for_writing
    (line,) = log()
    assert cause in line
    assert fix in line
    assert "Errno" not in line
    assert "Error" not in line.replace("GenericError", "")
    assert line.count("Fix: ") <= 1
