"""`python -m tests.benchmarks serve` with real servers, very small."""

import json

from safe_offload.commands.bench.engine import OURS
from safe_offload.commands.bench.engine_report import BASELINE
from tests.benchmarks import serve
from tests.benchmarks.__main__ import main
from tests.benchmarks.serve_workload import GROWING, ONE_OFF

SIZES = "--users 3 --turns 2 --context-tokens 400 --turn-tokens 100 --answer-tokens 4 --rounds 1"
CONFIG = {
    "kv_connector": OURS,
    "kv_connector_extra_config": {"cpu_bytes_to_use": "64MiB", "min_load_tokens": 0},
}


def test_servers_with_and_without_the_connector_give_the_same_tokens(tmp_path, capsys, monkeypatch):
    options_of = serve.server_options

    def without_limit(*args):
        options = options_of(*args)
        return {name: options[name] for name in (BASELINE, OURS)}

    monkeypatch.setattr(serve, "server_options", without_limit)  # a third server takes ten seconds
    options = ["--kv-transfer-config", json.dumps(CONFIG), "--json", str(tmp_path / "found.json")]
    assert main(["serve", *SIZES.split(), *options]) == 0
    text = capsys.readouterr().out
    assert text.count("answers: all 6 equal, 4 greedy tokens each") == 2
    samples = json.loads((tmp_path / "found.json").read_text())["samples"]
    computed = {
        (workload, name): one["num_computed_tokens"] / one["num_prompt_tokens"]
        for workload, servers in samples.items()
        for name, (one,) in servers.items()
    }
    assert computed[ONE_OFF, BASELINE] == computed[ONE_OFF, OURS] == 1
    assert computed[GROWING, OURS] < 0.7 < computed[GROWING, BASELINE], "the host has the contexts"
