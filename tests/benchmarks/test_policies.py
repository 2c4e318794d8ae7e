"""The benchmark `policies`: traces, the model of the cache, what the policies achieve."""

import json
from functools import cache

import pytest

from safe_offload.errors import ConfigError
from safe_offload.scheduler.eviction.policies import POLICIES
from safe_offload.scheduler.eviction.policy import EvictionPolicy
from tests.benchmarks import policies
from tests.benchmarks.__main__ import main
from tests.benchmarks.policy_replay import HostModel, Replay, best_possible, replay
from tests.benchmarks.policy_report import Curve, make_report
from tests.benchmarks.policy_traces import GENERATORS, Trace, make_trace, read_trace

NUM_PROMPTS = 1000
NUM_PROMPTS_MORE = {"uniform": 1500}
"""Where nothing predicts the next prompt, a thousand hits are as many give or take 3 %."""
SIZES = (0.05, 0.1, 0.3, 0.6)
OTHERS = ("slru", "returns")
"""Than `lru`; what `adaptive` does is up to its contest."""


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
def test_one_off_prompts_do_not_push_out_a_shared_prefix(policy):
    assert hit_rate("one-off", policy, 0.05) >= 1.5 * hit_rate("one-off", "lru", 0.05) > 0


@pytest.mark.nightly
@pytest.mark.parametrize(("policy", "part"), [("slru", 0.97), ("returns", 0.9)])
@pytest.mark.parametrize("name", GENERATORS)
def test_no_trace_is_much_worse_than_with_lru(name, policy, part):
    for size in SIZES:
        assert hit_rate(name, policy, size) >= part * hit_rate(name, "lru", size)


def test_with_returns_popular_documents_are_hit_more_often():
    assert hit_rate("documents", "returns", 0.05) >= 1.15 * hit_rate("documents", "slru", 0.05)


def test_no_policy_hits_more_than_is_possible():
    trace = trace_of("documents")
    num_slots = trace.working_set // 10
    best = best_possible(trace, num_slots)
    for make in POLICIES.values():
        assert replay(trace, make, num_slots, 0, num_running=0).hit_rate <= best


@pytest.mark.parametrize(("num_slots", "hits"), [(2, 4), (3, 5), (4, 6), (5, 7)])
def test_the_best_possible_keeps_what_is_used_again_the_soonest(num_slots, hits):
    prompts = [list(map(str.encode, prompt)) for prompt in ("abc", "de", "abc", "de", "ab")]
    trace = Trace("mine", "a trace", prompts)
    assert best_possible(trace, num_slots) * trace.num_blocks == pytest.approx(hits)


# ---- the traces and the model ------------------------------------------------------------------


@pytest.mark.parametrize("name", GENERATORS)
def test_a_key_stands_for_all_before_it(name):
    before: dict[bytes, bytes | None] = {}
    trace = trace_of(name)
    assert len(trace.prompts) >= NUM_PROMPTS
    for prompt in trace.prompts:
        previous = None
        assert prompt
        for key in prompt:
            assert before.setdefault(key, previous) == previous
            previous = key


@pytest.mark.parametrize("text", ["", "{}", "[1]", "not JSON", '{"hash_ids": ["a"]}'])
def test_another_format_is_an_error(tmp_path, text):
    path = tmp_path / "trace.jsonl"
    path.write_text(text)
    with pytest.raises(ConfigError, match="expected JSON lines with hash_ids"):
        read_trace(path)


@pytest.mark.parametrize(
    ("num_slots", "num_gpu_blocks", "prompts", "found"),
    [
        (8, 0, "abcd abxd", (0, 2)),  # only an unbroken run is a hit
        (8, 3, "abcde abcdx", (3, 1)),  # behind the run of the GPU
        (3, 0, "abcde abcde abcde", (0, 3)),  # a prompt that is too long keeps its head
        (4, 0, "ab cd ef ab", (0, 2)),  # what running prompts lease is not evicted
        (4, 0, "ab cd ef ef", (0, 0)),
    ],
)
def test_what_a_prompt_hits_after_others(num_slots, num_gpu_blocks, prompts, found):
    model = HostModel(EvictionPolicy, num_slots, num_gpu_blocks)
    told = [model.add([letter.encode() for letter in prompt]) for prompt in prompts.split()]
    assert told[-1] == found


# ---- the command -------------------------------------------------------------------------------


def test_a_hit_where_lru_never_has_one_is_infinitely_better():
    lru, slru = (
        Curve("scan", "a trace", policy, 100, {0.1: Replay(10, hits, 0, 1000)})
        for policy, hits in (("lru", 0), ("slru", 20))
    )
    assert lru.ratios(lru) == {0.1: None}
    assert slru.ratios(lru) == {0.1: float("inf")}
    report = make_report(
        [lru, slru], [], {"seed": 1, "prompts": 10, "gpu_share": 0.01, "running": 4}, {}
    )
    assert "slru/lru inf" in " ".join(report.render().split())
    json.dumps(report.to_json(), allow_nan=False)


def test_the_command_writes_what_it_found(tmp_path, capsys, monkeypatch):
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(policies, "COST_NUM_SLOTS", (100,))
    monkeypatch.setattr(policies, "COST_SLOTS_PER_ROUND", 100)
    monkeypatch.setattr(policies, "COST_BATCHES", (16,))
    trace, found, plot = (tmp_path / name for name in ("mine.jsonl", "found.json", "plot.png"))
    trace.write_text('{"timestamp": 0, "hash_ids": [1, 2]}\n{"hash_ids": [1, 3]}\n')
    command = ["policies", "--traces", "chat", "--prompts", "50", "--sizes", "0.1", "1"]
    command += ["--file", str(trace), "--json", str(found), "--plot", str(plot)]
    assert main(command) == 0
    assert "slru/lru" in capsys.readouterr().out
    rates = json.loads(found.read_text())["hit_rates"]
    assert [(r["trace"], r["policy"]) for r in rates] == [
        (name, policy) for name in ("mine", "chat") for policy in policies.CONTESTANTS
    ]
    assert rates[0]["sizes"][1]["hit_rate"] == 0.25
    assert plot.read_bytes().startswith(b"\x89PNG")
