"""`python -m tests.benchmarks tiers`: what is measured, what is told, and what is refused."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, cast

import pytest

from safe_offload.commands.bench.engine_process import EngineProcess, answer
from safe_offload.config.tiers import TierConfig
from safe_offload.errors import SafeOffloadError
from safe_offload.tiers.base import Buffers, Result
from safe_offload.tiers.files.tier import FileTier
from tests.benchmarks import tiers, tiers_engine
from tests.benchmarks.__main__ import main
from tests.benchmarks.tiers_engine import (
    ALONE,
    BESIDE,
    COLD,
    COMPUTED,
    ON_GPU,
    ON_HOST,
    EngineFound,
    render,
    wait_until_spilled,
)
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


def test_an_object_that_does_not_come_ends_it(tmp_path, monkeypatch, capsys):
    """Else the time of a failure would be told as the tier's speed."""

    async def fetch(self: object, names: list[object], slots: object) -> list[Result]:
        return [Result.ABSENT] * len(names)

    monkeypatch.setattr(FileTier, "fetch", fetch)
    assert bench(str(tmp_path), *SMALL) == 1
    assert "the tier says absent of objects that it has" in capsys.readouterr().err


def test_the_table_of_engines():
    times = {COMPUTED: [1.0, 2.0, 3.0], ALONE: [1.0, 1.0, 2.0], ON_GPU: [0.02], ON_HOST: [0.04]}
    times |= {BESIDE: [0.1], COLD: [0.2]}
    lines = render(EngineFound(times, 0, 26, 16_000)).splitlines()
    assert lines[0] == "prompts of 16,000 tokens; 26 answers, all equal"
    assert lines[-2].split()[-1] == "10.0"
    assert lines[-1] == "writing to the tier: first pass +50.0 (+0.0 to +100.0) % later"
    assert "2 DIFFER" in render(EngineFound(times, 2, 26, 16_000))


NAMES = ("stored_blocks", "spilled_blocks", "spills_in_flight", "dropped_spill_blocks")


class Counting:
    """Stands for an engine whose counts are told, each time it is asked."""

    def __init__(self, counts: Iterable[tuple[int, int, int, int]]) -> None:
        self.counts = iter(counts)
        self.num_asked = 0

    def call(self, function: Callable[..., Any], question: object, timeout_s: float) -> Any:
        self.num_asked += function is answer
        return None if function is answer else dict(zip(NAMES, next(self.counts), strict=True))


@pytest.fixture
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiers_engine, "QUIET_S", 0.0)
    monkeypatch.setattr(tiers_engine, "POLL_S", 0.0)


@pytest.mark.usefixtures("no_waiting")
def test_an_engine_is_waited_for_until_nothing_is_spilled_any_more():
    counts = [(1, 0, 0), (2, 0, 1), (2, 1, 1), (2, 1, 1), (2, 2, 0), (2, 2, 0)]
    engine = Counting((*each, 0) for each in counts)
    wait_until_spilled(cast(EngineProcess, engine))
    assert engine.num_asked == len(counts)


@pytest.mark.usefixtures("no_waiting")
def test_a_tier_that_does_not_take_everything_ends_it():
    """Else what it lacks would be told as computed by the engine beside."""
    engine = Counting([(2, 1, 0, 1)] * 2)
    with pytest.raises(SafeOffloadError, match="would not take 1 blocks"):
        wait_until_spilled(cast(EngineProcess, engine))


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


def test_a_store_is_written_and_read_by_its_library_alone_and_emptied(tmp_path: Path):
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
