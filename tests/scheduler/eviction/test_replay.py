"""What the eviction policies achieve on traces, on a model of the cache."""

from functools import cache

import pytest

from safe_offload.scheduler.eviction.policies import POLICIES
from tests.scheduler.eviction.replay import HostModel
from tests.scheduler.eviction.traces import GENERATORS, Prompt, make_trace

NUM_PROMPTS = 1000
SIZES = (0.05, 0.1, 0.3, 0.6)


@cache
def trace_of(name: str) -> list[Prompt]:
    return make_trace(name, NUM_PROMPTS)


@cache
def hit_rate(name: str, policy: str, size: float) -> float:
    """Blocks that the host delivers, of all; `size`: of the host, of the different blocks."""
    prompts = trace_of(name)
    num_different = len({key for prompt in prompts for key in prompt})
    model = HostModel(POLICIES[policy], int(size * num_different), num_different // 100)
    num_hit = sum(model.add(prompt, now_s) for now_s, prompt in enumerate(prompts))
    return num_hit / sum(map(len, prompts))


def test_one_off_prompts_do_not_push_out_a_shared_prefix():
    assert hit_rate("one-off", "returns", 0.05) >= 1.5 * hit_rate("one-off", "lru", 0.05) > 0


@pytest.mark.nightly
@pytest.mark.parametrize("name", GENERATORS)
def test_no_trace_is_much_worse_than_with_lru(name):
    for size in SIZES:
        assert hit_rate(name, "returns", size) >= 0.9 * hit_rate(name, "lru", size)


def test_with_returns_popular_documents_are_hit_more_often():
    assert hit_rate("documents", "returns", 0.05) >= 1.3 * hit_rate("documents", "lru", 0.05)
