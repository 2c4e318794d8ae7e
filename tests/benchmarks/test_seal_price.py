"""`python -m tests.benchmarks seal`."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from tests.benchmarks import seal
from tests.benchmarks.__main__ import main


def test_every_way_is_measured_in_every_case(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(seal, "ROUND_BYTES", 1)
    assert main(["seal", "--rounds", "1", "--json", str(tmp_path / "found.json")]) == 0
    found = json.loads((tmp_path / "found.json").read_text())
    assert len(found["measured"]) == len(seal.CASES) * len(seal.ways())
    assert {one["way"] for one in found["measured"]} == set(found["others_run"]) == set(seal.ways())
    assert all(one["times_s"][0] > 0 for one in found["measured"])
    assert found["others_run"][seal.OURS]
    shown = capsys.readouterr().out
    assert all(shown.count(f"\n{way} ") == len(seal.CASES) for way in seal.ways())


def test_what_keeps_the_interpreter_to_itself_is_told_from_what_does_not() -> None:
    with seal.no_switches():
        assert not seal._lets_run(lambda pieces: sum(range(10**5)), memoryview(b""))
        hashed = memoryview(bytes(seal.LOCKED_BYTES))
        assert seal._lets_run(lambda pieces: hashlib.sha256(pieces[0]).digest(), hashed)
