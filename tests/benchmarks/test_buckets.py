"""`python -m tests.benchmarks buckets` runs, and says what it has measured."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.benchmarks.__main__ import main
from tests.benchmarks.buckets import BARE, CPU, LIBRARY, OURS, RATE, SEAWEED, SIZES


def test_both_clients_read_from_both_servers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["buckets", "--quick", "--json", str(tmp_path / "found.json")]) == 0
    printed = capsys.readouterr().out
    values = json.loads((tmp_path / "found.json").read_text())["values"]
    assert list(values) == [f"{server}, {size}" for server in (BARE, SEAWEED) for size in SIZES]
    for title, found in values.items():
        assert f"{title}, {OURS}" in printed
        for name in (LIBRARY, OURS):
            assert len(found[name][RATE]) == len(found[name][CPU]) == 2
            assert min(found[name][RATE]) > 0
