"""`python -m tests.benchmarks valkey` runs, and says what it has measured."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.benchmarks.__main__ import main
from tests.benchmarks.valkey import OURS, PROBING, RAW, RAW_CLIENT, SIZES, THEIRS, WRITING


def test_every_client_reads_and_is_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["valkey", "--quick", "--json", str(tmp_path / "found.json")]) == 0
    printed = capsys.readouterr().out
    values = json.loads((tmp_path / "found.json").read_text())["values"]
    assert list(values) == list(SIZES)
    for title, found in values.items():
        assert title in printed
        assert {name: len(each) for name, each in found.items()} == {
            **dict.fromkeys((RAW, RAW_CLIENT, THEIRS, OURS), 2),
            **dict.fromkeys((WRITING, PROBING), 3),
        }
        assert min(min(each) for each in found.values()) > 0
