"""What the eviction policies achieve on traces, on a model of the cache."""

from functools import cache

import pytest

from safe_offload.scheduler.eviction.policies import POLICIES
from safe_offload.scheduler.eviction.policy import EvictionPolicy
from tests.scheduler.eviction.replay import HostModel, replay
from tests.scheduler.eviction.traces import GENERATORS, Trace, make_trace

NUM_PROMPTS = 1000
NUM_PROMPTS_MORE = {"uniform": 1500}
"""Where nothing predicts the next prompt, a thousand hits are as many give or take 3 %."""
SIZES = (0.05, 0.1, 0.3, 0.6)


@cache
def trace_of(name: str) -> Trace:
    return make_trace(name, NUM_PROMPTS_MORE.get(name, NUM_PROMPTS))


@cache
def hit_rate(name: str, policy: str, size: float) -> float:
    trace = trace_of(name)
    num_slots = int(size * trace.working_set)
    return replay(trace, POLICIES[policy], num_slots, trace.working_set // 100).hit_rate


# ---- what the policies achieve -----------------------------------------------------------------


def test_one_off_prompts_do_not_push_out_a_shared_prefix():
    assert hit_rate("one-off", "returns", 0.05) >= 1.5 * hit_rate("one-off", "lru", 0.05) > 0


@pytest.mark.nightly
@pytest.mark.parametrize("name", GENERATORS)
def test_no_trace_is_much_worse_than_with_lru(name):
    for size in SIZES:
        assert hit_rate(name, "returns", size) >= 0.9 * hit_rate(name, "lru", size)


def test_with_returns_popular_documents_are_hit_more_often():
    assert hit_rate("documents", "returns", 0.05) >= 1.3 * hit_rate("documents", "lru", 0.05)


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
