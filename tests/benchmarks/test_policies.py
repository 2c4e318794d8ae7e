"""The benchmark `policies`: traces, the model of the cache, what the policies achieve."""

import json
from functools import cache
from pathlib import Path

import pytest

from safe_offload.errors import ConfigError
from safe_offload.scheduler.cache.eviction import POLICIES, EvictionPolicy
from tests.benchmarks import policies
from tests.benchmarks.__main__ import main
from tests.benchmarks.plots import save_plot
from tests.benchmarks.policy_replay import HostModel, Replay, replay
from tests.benchmarks.policy_report import Cost, Curve, draw, make_report
from tests.benchmarks.policy_traces import GENERATORS, Trace, make_trace, read_trace

NUM_PROMPTS = 1000
NUM_PROMPTS_MORE = {"uniform": 3000}
"""Where nothing predicts the next prompt, a thousand hits are as many give or take 3 %."""
SIZES = (0.05, 0.1, 0.3, 0.6)
OTHERS = [name for name in POLICIES if name != "lru"]


def keys_of(text: str) -> list[bytes]:
    """One block for each letter."""
    return [letter.encode() for letter in text]


@cache
def trace_of(name: str) -> Trace:
    return make_trace(name, NUM_PROMPTS_MORE.get(name, NUM_PROMPTS))


@cache
def hit_rate(name: str, policy: str, size: float) -> float:
    trace = trace_of(name)
    num_slots = int(size * trace.working_set)
    return replay(trace, POLICIES[policy], num_slots, trace.working_set // 100).hit_rate


# ---- what the policies achieve -----------------------------------------------------------------


@pytest.mark.parametrize("policy", OTHERS)
def test_one_off_prompts_do_not_push_out_a_shared_prefix(policy: str) -> None:
    assert hit_rate("one-off", policy, 0.05) >= 1.5 * hit_rate("one-off", "lru", 0.05) > 0


@pytest.mark.parametrize("policy", OTHERS)
@pytest.mark.parametrize("name", GENERATORS)
def test_no_trace_is_much_worse_than_with_lru(name: str, policy: str) -> None:
    for size in SIZES:
        assert hit_rate(name, policy, size) >= 0.97 * hit_rate(name, "lru", size)


def test_hit_rates_do_not_depend_on_the_run() -> None:
    trace = make_trace("chat", 100)
    assert make_trace("chat", 100) == trace
    assert make_trace("chat", 100, seed=2) != trace
    replays = {replay(trace, make, 100, 10) for make in [POLICIES["slru"]] * 2}
    assert len(replays) == 1


# ---- the traces --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", GENERATORS)
def test_a_key_stands_for_all_before_it(name: str) -> None:
    before: dict[bytes, bytes | None] = {}
    trace = trace_of(name)
    assert len(trace.prompts) >= NUM_PROMPTS
    for prompt in trace.prompts:
        previous = None
        assert prompt
        for key in prompt:
            assert before.setdefault(key, previous) == previous
            previous = key


@pytest.mark.parametrize("name", GENERATORS)
def test_a_cache_of_the_working_set_misses_each_block_once(name: str) -> None:
    trace = trace_of(name)
    found = replay(trace, EvictionPolicy, trace.working_set, 0)
    assert found.num_hit_blocks == trace.num_blocks - trace.working_set


def test_mooncakes_format_is_read(tmp_path: Path) -> None:
    path = tmp_path / "some_trace.jsonl"
    path.write_text('{"timestamp": 0, "hash_ids": [0, 7]}\n{"hash_ids": [0]}\n')
    trace = read_trace(path)
    assert trace.name == "some_trace"
    assert [len(prompt) for prompt in trace.prompts] == [2, 1]
    assert trace.prompts[0][0] == trace.prompts[1][0]


@pytest.mark.parametrize("text", ["", "{}", "[1]", "not JSON", '{"hash_ids": ["a"]}'])
def test_another_format_is_an_error(tmp_path: Path, text: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(text)
    with pytest.raises(ConfigError, match="expected JSON lines with hash_ids"):
        read_trace(path)


# ---- the model ---------------------------------------------------------------------------------


def test_only_an_unbroken_run_is_a_hit() -> None:
    model = HostModel(EvictionPolicy, num_slots=8, num_gpu_blocks=0)
    assert model.add(keys_of("abcd")) == (0, 0)
    assert model.add(keys_of("abxd")) == (0, 2)


def test_the_host_delivers_what_is_behind_the_run_of_the_gpu() -> None:
    model = HostModel(EvictionPolicy, num_slots=8, num_gpu_blocks=3)
    model.add(keys_of("abcde"))
    assert model.add(keys_of("abcdx")) == (3, 1)


def test_a_prompt_that_is_too_long_keeps_its_head() -> None:
    model = HostModel(EvictionPolicy, num_slots=3, num_gpu_blocks=0)
    model.add(keys_of("abcde"))
    for _ in range(5):
        assert model.add(keys_of("abcde")) == (0, 3)


def test_what_running_prompts_lease_is_not_evicted() -> None:
    model = HostModel(EvictionPolicy, num_slots=4, num_gpu_blocks=0)
    model.add(keys_of("ab"))
    model.add(keys_of("cd"))
    model.add(keys_of("ef"))  # finds no slot
    assert model.add(keys_of("ab")) == (0, 2)
    assert model.add(keys_of("ef")) == (0, 0)


# ---- the command -------------------------------------------------------------------------------


CURVES = [
    Curve("scan", "a trace", policy, 100, {0.1: Replay(10, hits, 0, 1000), 1.0: full})
    for policy, hits in (("lru", 0), ("slru", 20))
    for full in [Replay(100, 500, 0, 1000)]
]
COSTS = [Cost("lru", 1000, 16, [80.0, 90.0, 130.0], [50.0, 60.0, 70.0])]
REPORT = make_report(CURVES, COSTS, {"seed": 1, "prompts": 10, "gpu_share": 0.01}, {})


def test_a_hit_where_lru_never_has_one_is_infinitely_better() -> None:
    lru, slru = CURVES
    assert lru.ratios(lru) == {0.1: None, 1.0: 1.0}
    assert slru.ratios(lru) == {0.1: float("inf"), 1.0: 1.0}
    json.loads(json.dumps(REPORT.to_json(), allow_nan=False))


def test_the_table_has_rates_ratios_and_costs() -> None:
    words = " ".join(REPORT.render().split())
    assert "lru 0.000 0.500" in words
    assert "slru/lru inf 1.00" in words
    assert "90 (80) ns" in words


def test_the_picture_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    save_plot(tmp_path / "plot.png", lambda figure: draw(figure, CURVES), (11, 4.8))
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_the_command_writes_what_it_found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(policies, "COST_NUM_SLOTS", (100,))
    monkeypatch.setattr(policies, "COST_SLOTS_PER_ROUND", 100)
    monkeypatch.setattr(policies, "COST_BATCHES", (16,))
    trace = tmp_path / "mine.jsonl"
    trace.write_text('{"hash_ids": [1, 2]}\n{"hash_ids": [1, 3]}\n')
    found = tmp_path / "found.json"
    command = ["policies", "--traces", "chat", "--prompts", "50", "--sizes", "0.1", "1"]
    assert main([*command, "--file", str(trace), "--json", str(found)]) == 0
    assert "slru/lru" in capsys.readouterr().out
    rates = json.loads(found.read_text())["hit_rates"]
    assert [(r["trace"], r["policy"]) for r in rates] == [
        ("mine", "lru"),
        ("mine", "slru"),
        ("chat", "lru"),
        ("chat", "slru"),
    ]
    assert rates[0]["sizes"][1]["hit_rate"] == 0.25


def test_a_size_above_the_working_set_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["policies", "--sizes", "5"]) == 1
    assert "--sizes: expected shares" in capsys.readouterr().err
