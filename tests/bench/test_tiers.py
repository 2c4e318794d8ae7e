"""`safe-offload bench tiers`: what is measured, what is told, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from safe_offload.bench import tiers
from safe_offload.bench.tiers_engine import (
    ALONE,
    BESIDE,
    COLD,
    COMPUTED,
    ON_GPU,
    ON_HOST,
    EngineFound,
    render,
    wait_until_quiet,
)
from safe_offload.cli import main
from safe_offload.errors import SafeOffloadError
from safe_offload.worker.tiers.base import Result

SMALL = ("--object-bytes", "8KiB", "64KiB", "--round-bytes", "256KiB", "--rounds", "2")


def bench(*arguments: str) -> int:
    return main(["bench", "tiers", *arguments])


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


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--rounds", "0"), "--rounds: expected at least 1"),
        (("--threads", "0"), "--threads: expected at least 1"),
        (("--object-bytes", "5000"), "expected a multiple of 4096, found 5000"),
        (("--round-bytes", "60GiB"), "Fix: a smaller --round-bytes"),
    ],
)
def test_what_makes_no_sense_is_refused(tmp_path, capsys, monkeypatch, arguments, said):
    usage = tiers.shutil.disk_usage(tmp_path)._replace(free=1 << 30)
    monkeypatch.setattr(tiers.shutil, "disk_usage", lambda _: usage)
    assert bench(str(tmp_path), *arguments) == 1
    assert said in capsys.readouterr().err


def test_a_folder_that_is_not_there_is_refused(tmp_path, capsys):
    assert bench(str(tmp_path / "none")) == 1
    assert "Fix: create it" in capsys.readouterr().err


def test_an_object_that_does_not_come_ends_it(tmp_path, monkeypatch, capsys):
    """Else the time of a failure would be told as the tier's speed."""

    async def fetch(self: object, names: list[object], slots: object) -> list[Result]:
        return [Result.ABSENT] * len(names)

    monkeypatch.setattr(tiers.FileTier, "fetch", fetch)
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


def test_a_folder_that_is_written_to_is_waited_for(tmp_path: Path, monkeypatch):
    monkeypatch.setattr("safe_offload.bench.tiers_engine.QUIET_S", 0.0)
    monkeypatch.setattr("safe_offload.bench.tiers_engine.SPILLED_TIMEOUT_S", 5.0)
    (tmp_path / "one").touch()
    wait_until_quiet(tmp_path)
    monkeypatch.setattr("safe_offload.bench.tiers_engine.SPILLED_TIMEOUT_S", 0.0)
    with pytest.raises(SafeOffloadError, match="still written to"):
        wait_until_quiet(tmp_path)
