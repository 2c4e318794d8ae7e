"""Hosts of millions of slots: the benchmark, with few."""

import json

from tests.benchmarks import large_host
from tests.benchmarks.__main__ import main


def test_a_host_is_filled_twice_and_every_step_is_timed(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(large_host, "NUM_PARTS", 2)
    file = tmp_path / "figures.json"
    assert main(["large_host", "--slots", "6144", "--json", str(file)]) == 0
    (found,) = json.loads(file.read_text())["hosts"]
    assert [part["what"] for part in found["parts"]] == [
        "filling, 0 to 50 %",
        "filling, 50 to 100 %",
        "evicting, 0 to 50 %",
        "evicting, 50 to 100 %",
    ]
    assert {part["num_steps"] for part in found["parts"]} == {6144 // 512 // 2 * 2}
    assert all(0 < part["median_ms"] <= part["worst_ms"] for part in found["parts"])
    assert "6144 slots: start" in capsys.readouterr().out
