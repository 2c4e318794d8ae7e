"""The benchmark `serve` without servers: vLLM's command line, its figures, virtual time."""

import json
import logging
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import Any

import pytest
from vllm.benchmarks.datasets import CustomDataset

from safe_offload.errors import SafeOffloadError
from tests.benchmarks import serve
from tests.benchmarks.__main__ import main
from tests.benchmarks.agents_report import TTFT

SMALL = ["--prefixes", "4", "--prefix-tokens", "640", "--prompts", "16", "--at-once", "2"]


def arguments(*words: str) -> Namespace:
    parser = ArgumentParser()
    serve.add_arguments(parser)
    return parser.parse_args(words)


def test_vllm_is_told_what_to_ask(tmp_path):
    small, file = arguments(*SMALL), tmp_path / "turns-2.jsonl"
    words = serve.command("http://a", "prefix_repetition", small, file, tmp_path / "found.json")
    text = " ".join(words)
    assert "--max-concurrency 2" in text
    assert "--prefix-repetition-num-prefixes 4" in text
    assert "--seed 2" in text
    assert "--disable-shuffle" not in text
    text = " ".join(serve.command("http://a", "turns", small, file, tmp_path / "found.json"))
    assert f"--dataset-name custom --dataset-path {file}" in text
    assert "--disable-shuffle" in text


def test_vllms_client_reads_the_turns(tmp_path):
    """It wants pandas for that, which vLLM itself does not bring."""
    (file := tmp_path / "turns-0.jsonl").write_text('{"prompt": "a"}\n{"prompt": "b"}\n')
    prompts = CustomDataset(dataset_path=str(file), disable_shuffle=True).data
    assert [each["prompt"] for each in prompts] == ["a", "b"]


def test_what_vllm_has_measured():
    figures: dict[str, Any] = {"num_prompts": 4, "completed": 4, "request_throughput": 2.0}
    for metric in serve.METRICS.values():
        figures |= {f"{key}_{metric}_ms": 7.0 for key in serve.STATISTICS.values()}
    run = serve.read_result(figures, {"local_compute": 1.0}, {"local_compute": 3.0})
    assert (run.throughput, run.times_ms[TTFT]["p90"]) == (2.0, 7.0)
    assert run.counters == {"local_compute": 2.0}
    with pytest.raises(SafeOffloadError, match="3 prompts were answered"):
        serve.read_result(figures | {"completed": 3}, {}, {})


def test_on_virtual_time_nothing_is_computed_that_the_host_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hits were computed while loads of others held the blocks: a quarter more than the limit."""
    monkeypatch.setattr(logging, "disable", lambda _: None)
    file = tmp_path / "found.json"
    command = ["serve", "--virtual", "--rounds", "1", "--models", "gemma3", "--datasets", "turns"]
    assert main([*command, "--json", str(file)]) == 0
    runs = [run for (run,) in json.loads(file.read_text())["gemma3, turns"]["6"].values()]
    none, ours, limit, ideal = (run["counters"]["local_compute"] for run in runs)
    assert none > ours == limit > ideal > 0.98 * limit
    none, ours, limit, ideal = (run["times_ms"][TTFT]["median"] for run in runs)
    assert none > 1.5 * ours, "not as late"
    assert 1.5 * ideal > ours > ideal > 5 * limit, "what is left is the wait for the pool"
