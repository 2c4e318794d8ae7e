"""What the eviction policies achieve on traces, on a model of the cache."""

from functools import cache

import pytest

from safe_offload.scheduler.eviction.policies import POLICIES
from tests.scheduler.eviction.replay import replay
from tests.scheduler.eviction.traces import GENERATORS, Trace, make_trace

NUM_PROMPTS = 1000
SIZES = (0.05, 0.1, 0.3, 0.6)


@cache
def trace_of(name: str) -> Trace:
    return make_trace(name, NUM_PROMPTS)


@cache
def hit_rate(name: str, policy: str, size: float) -> float:
    trace = trace_of(name)
    num_slots = int(size * trace.working_set)
    return replay(trace, POLICIES[policy], num_slots, trace.working_set // 100).hit_rate


def test_one_off_prompts_do_not_push_out_a_shared_prefix():
    assert hit_rate("one-off", "returns", 0.05) >= 1.5 * hit_rate("one-off", "lru", 0.05) > 0


@pytest.mark.nightly
@pytest.mark.parametrize("name", GENERATORS)
def test_no_trace_is_much_worse_than_with_lru(name):
    for size in SIZES:
        assert hit_rate(name, "returns", size) >= 0.9 * hit_rate(name, "lru", size)


def test_with_returns_popular_documents_are_hit_more_often():
    assert hit_rate("documents", "returns", 0.05) >= 1.3 * hit_rate("documents", "lru", 0.05)
