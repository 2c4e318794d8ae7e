"""The benchmark `agents` without aiperf and vLLM: scaling, aiperf's command line, tables."""

from __future__ import annotations

import gzip
import json
import sys
import threading
from argparse import ArgumentParser
from collections.abc import Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from safe_offload.errors import ConfigError
from tests.benchmarks import agents, agents_traces
from tests.benchmarks.__main__ import main
from tests.benchmarks.agents_report import (
    STATISTICS,
    TIMES,
    TTFT,
    Run,
    late_figures,
    parse_counters,
)

# A prompt of 40 blocks, then one that shares the first 36 of them.
RECORDED = {
    "tool_tokens": 300,
    "system_tokens": 200,
    "requests": [
        [0.0, 0.0, 8.0, 2570, 90, [[1, 40]]],
        [408.0, 400.0, 4.0, 2570, 3, [[1, 36], [100, 4]]],
    ],
}


@pytest.fixture
def traces(tmp_path: Path) -> Path:
    path = tmp_path / "recorded.json.gz"
    path.write_bytes(gzip.compress(json.dumps([RECORDED] * 8).encode()))
    return path


def test_a_scaled_prompt_shares_a_block_if_all_its_blocks_were_shared(traces: Path) -> None:
    conversation = agents_traces.scale(agents_traces.read(traces)[0], 4)
    first, second = conversation.requests
    assert first.block_ids == (4, 8, 12, 16, 20, 24, 28, 32, 36, 40)
    assert second.block_ids == (4, 8, 12, 16, 20, 24, 28, 32, 36, 103)
    assert (first.num_tokens, first.num_answer_tokens, second.num_answer_tokens) == (642, 22, 1)
    assert (second.think_s, second.api_s) == (75.0, 1.0), "nobody thinks longer than 300 s"
    assert conversation.num_system_tokens == 125
    assert agents_traces.scale(conversation, 64).num_system_tokens == 0, "no block is left"
    assert agents_traces.mean_context([conversation]) == 642


def test_what_is_written_is_what_is_read(traces: Path, tmp_path: Path) -> None:
    conversations = agents_traces.read(traces)
    agents_traces.write(conversations, tmp_path / "weka", "0/1")
    assert agents_traces.read(tmp_path / "weka") == conversations
    chosen = agents_traces.choose(conversations, 2, 5000, 1, "0/1")
    assert [len(one.requests) for one in chosen] == [1, 1]
    with pytest.raises(ConfigError, match=r"expected 2 conversations .* found 0"):
        agents_traces.choose(conversations, 2, 2000, 1, "0/1")


# ---- the whole command, with a stand-in for aiperf ----------------------------------------------

FAKE_AIPERF = """#!{python}
import json, pathlib, sys
option = dict(zip(sys.argv[2::2], sys.argv[3::2]))
names = {metrics}
slow = {slow_port} == int(option["--url"].rpartition(":")[2])
num_files = len(list(pathlib.Path(option["--input-file"]).glob("*.json")))
found = {{name: dict(avg=1.0, p50=1.0, p90=2.0, p99=3.0 + slow) for name in names}}
found["request_throughput"] = dict(avg=10.0 * num_files)
found["request_count"] = dict(avg=int(option["--request-count"]))
folder = pathlib.Path(option["--output-artifact-dir"])
(folder / "profile_export_aiperf.json").write_text(json.dumps(found))
"""


class Metrics(BaseHTTPRequestHandler):
    """Counts 100 more tokens whenever it is asked, a quarter of them from the host."""

    num_asked = 0

    def do_GET(self) -> None:
        if self.path == "/v1/models":
            text = '{"data": [{"id": "some model"}]}'
        else:
            Metrics.num_asked += 1
            name = 'vllm:prompt_tokens_by_source_total{engine="0",source='
            shares = {"local_compute": 25, "local_cache_hit": 50, "external_kv_transfer": 25}
            lines = [f'{name}"{key}"}} {n * Metrics.num_asked}' for key, n in shares.items()]
            lines.append(f'vllm:safe_offload_skipped_hits_total{{engine="0"}} {Metrics.num_asked}')
            text = "\n".join(lines)
        self.send_response(200)
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def ports() -> Iterator[list[int]]:
    servers = [ThreadingHTTPServer(("127.0.0.1", 0), Metrics) for _ in range(2)]
    for server in servers:
        threading.Thread(target=partial(server.serve_forever, 0.01), daemon=True).start()
    yield [server.server_port for server in servers]
    for server in servers:
        server.shutdown()
        server.server_close()


def test_the_table_of_running_servers(
    ports: list[int],
    traces: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("safe_offload.commands.bench.engine_process.SPIN_S", 0.0)
    aiperf = tmp_path / "aiperf"
    what = {"python": sys.executable, "metrics": [*TIMES.values()], "slow_port": ports[1]}
    aiperf.write_text(FAKE_AIPERF.format(**what))
    aiperf.chmod(0o755)
    urls = [f"{name}=http://127.0.0.1:{port}" for name, port in zip("ab", ports, strict=True)]
    command = ["agents", "--traces", str(traces), "--users", "2,1", "--rounds", "2", "--url", *urls]
    file = tmp_path / "found.json"
    assert main([*command, "--aiperf", str(aiperf), "--json", str(file)]) == 0
    text = capsys.readouterr().out
    row, *_ = (line for line in text.splitlines() if line.startswith("2 ") and " b " in line)
    throughput, times = "40.00 (40.00 to 40.00)", "1 (1 to 1) 1 (1 to 1) 2 (2 to 2) 4 (4 to 4)"
    assert row.split() == f"2 b {throughput} {times} 50% 25% 25%".split()
    assert "2 users: skipped_hits 1, postponed_hits 0" in text
    late = "later than without by more than the rounds' spread: p99 time to first token"
    assert f"{late} (4 to 4, 3 to 3 ms)" in text
    runs = json.loads(file.read_text())["1"]["b"]
    assert [run["num_requests"] for run in runs] == [12, 12]


def test_aiperf_is_told_what_to_replay(traces: Path, tmp_path: Path, ports: list[int]) -> None:
    parser = ArgumentParser()
    agents.add_arguments(parser)
    url = f"http://127.0.0.1:{ports[0]}"
    command = ["--traces", str(traces), "--turns", "3", "--scale", "32", "--url", f"a={url}"]
    arguments = parser.parse_args([*command, "--tokenizer", "/models/tiny"])
    words = agents.Aiperf(arguments).command(url, 16, traces, tmp_path)
    text = " ".join(words)
    for part in (
        "--custom-dataset-type weka_trace",
        f"--input-file {traces}",
        "--tokenizer /models/tiny",
        "--concurrency 16 --concurrency-ramp-duration 3.5 --request-count 48",
        "--use-think-time-only",
    ):
        assert part in text


def test_only_what_lies_beyond_all_rounds_is_late() -> None:
    def run(ms: float) -> Run:
        return Run(1, 1.0, {name: dict.fromkeys(STATISTICS, ms) for name in TIMES}, {})

    assert late_figures([run(2.0), run(9.0)], [run(1.0), run(2.0)]) == []
    late = late_figures([run(2.1), run(9.0)], [run(1.0), run(2.0)])
    assert len(late) == len(TIMES) * len(STATISTICS)
    assert late[0] == f"mean {TTFT} (2 to 9, 1 to 2 ms)"


def test_counters_of_all_engines_are_added() -> None:
    text = """
vllm:prompt_tokens_by_source_total{engine="0",model_name="tiny",source="local_compute"} 24215.0
vllm:prompt_tokens_by_source_total{engine="1",model_name="tiny",source="local_compute"} 1.0
vllm:prompt_tokens_by_source_created{engine="0",model_name="tiny",source="local_compute"} 1.7e+09
vllm:num_preemptions_total{engine="0",model_name="tiny"} 2.0
vllm:safe_offload_evicted_blocks_total{engine="0",hit="true"} 3.0
vllm:safe_offload_evicted_blocks_total{engine="0",hit="false"} 4.0
"""
    expected = {
        "local_compute": 24216.0,
        "num_preemptions": 2.0,
        "safe_offload_evicted_blocks": 7.0,
    }
    assert parse_counters(text) == expected
