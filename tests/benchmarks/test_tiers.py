"""`python -m tests.benchmarks tiers`: what is measured, what is told, and what is refused."""

import json
import os

import pytest

from safe_offload.config.tiers import TierConfig
from safe_offload.errors import SafeOffloadError
from safe_offload.tiers.base import Buffers
from tests.benchmarks import tiers
from tests.benchmarks.__main__ import main
from tests.benchmarks.tiers_limits import SocketLimit, StoreLimit, delete_all

SMALL = ("--object-bytes", "8KiB", "64KiB", "--round-bytes", "256KiB", "--rounds", "2")


def bench(*arguments: str) -> int:
    return main(["tiers", *arguments])


def test_every_way_of_every_size_is_told_and_nothing_is_left(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(tiers, "PROBED_KEYS", 40)
    figures = tmp_path / "figures.json"
    folder = tmp_path / "device"
    folder.mkdir()
    assert bench(str(folder), *SMALL, "--json", str(figures)) == 0
    lines = capsys.readouterr().out.splitlines()
    for size in ("8.00 KiB", "64.00 KiB"):
        told = [line for line in lines if line.startswith(size)]
        ways = ("device writes", "tier writes", "device reads", "tier reads")
        assert all(any(way in line for line in told) for way in ways), lines
    assert any(line.startswith("a probe of 40 keys: ") for line in lines)
    found = json.loads(figures.read_text())
    assert [one["num_objects"] for one in found["sizes"]] == [32, 4]
    assert all(len(samples) == 2 for one in found["sizes"] for samples in one["samples"].values())
    assert list(folder.iterdir()) == []


def make_slots(count: int = 3, size_bytes: int = 300_000) -> list[Buffers]:
    memory = memoryview(bytearray(os.urandom(count * size_bytes)))
    return [(memory[i * size_bytes : (i + 1) * size_bytes],) for i in range(count)]


@pytest.mark.parametrize("is_unix", [True, False], ids=["unix", "tcp"])
def test_the_other_end_of_a_socket_takes_and_sends_every_byte(is_unix):
    slots = make_slots()
    written = [bytes(slot[0]) for slot in slots]
    limit = SocketLimit(slots, 2, is_unix=is_unix)
    try:
        limit.write(0)
        for slot in slots:
            slot[0][:] = bytes(slot[0].nbytes)
        limit.read(0)
        assert [bytes(slot[0]) for slot in slots] == written
    finally:
        limit.close()


def test_a_store_is_written_and_read_by_its_library_alone_and_emptied(tmp_path):
    config = TierConfig.at(f"file://{tmp_path}")
    limit = StoreLimit(config, make_slots())
    limit.write(0)
    limit.write(1)
    limit.read(1)
    found = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(found) == 6
    assert {path.stat().st_size for path in found} == {300_000}
    for path in found:
        path.write_bytes(b"short")
    with pytest.raises(SafeOffloadError, match="read 5 of 300000 bytes"):
        limit.read(1)
    limit.close()
    delete_all(config)
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]
