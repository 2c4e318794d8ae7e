"""Where the tokens of a hit come from, as vLLM's `prompt_tokens_cached_by_source` tells it."""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import Any

import pytest

from safe_offload.config.tier_url import Location
from safe_offload.config.tiers import TierConfig
from tests.scheduler.tiers.test_tiers import (
    HYBRIDS,
    NUM_BLOCKS,
    PREFIX_TOKENS,
    make_warm,
    prompt,
)
from tests.scheduler.tiers.tier_rig import WAIT_S, TierRig
from tests.simulator.groups import BLOCK_TOKENS

pytest.importorskip(
    "vllm.v1.metrics.cache_hit_source", reason="vLLM 0.31 does not tell the tiers of a hit apart"
)


@pytest.fixture
def make_tiers(make_tiers):
    return partial(make_tiers, num_blocks=150)


class Sources(Counter[str]):
    """What the connector tells vLLM, summed up; vLLM's own check of each sum is done too."""

    def __init__(self, rig: TierRig) -> None:
        super().__init__()
        ask = rig.connector.get_external_cache_hit_sources

        def told(request: Any, num_tokens: int) -> Any:
            sources = ask(request, num_tokens)
            assert sum(sources.values()) == num_tokens > 0
            assert all(sources.values()), "only what is not zero"
            self.update({source.value: number for source, number in sources.items()})
            return sources

        rig.connector.get_external_cache_hit_sources = told


def test_what_a_tier_brought_for_a_request_is_its_own_and_later_the_hosts(make_tiers):
    rig = make_warm(make_tiers)
    sources = Sources(rig)
    assert rig.run_alone("a", prompt(rig, 1)) == PREFIX_TOKENS
    assert sources == {"disk": PREFIX_TOKENS}
    rig.forget_gpu_cache()
    assert rig.run_alone("b", prompt(rig, 2)) == PREFIX_TOKENS
    assert sources == {"disk": PREFIX_TOKENS, "host": PREFIX_TOKENS}


@pytest.mark.parametrize("num_on_host", [1, 4, NUM_BLOCKS - 1])
def test_of_a_hit_that_is_on_both_each_part_has_its_source(make_tiers, num_on_host):
    rig = make_warm(make_tiers)
    held = num_on_host * BLOCK_TOKENS
    rig.tier.objects, objects = {}, rig.tier.objects
    rig.run_alone("head", prompt(rig, 1)[: held + 1], max_tokens=1)
    rig.drain()
    rig.forget_gpu_cache()
    rig.tier.objects |= objects
    sources = Sources(rig)
    assert rig.run_alone("a", prompt(rig, 2)) == PREFIX_TOKENS
    assert sources == {"host": held, "disk": PREFIX_TOKENS - held}


@pytest.mark.parametrize("groups", HYBRIDS, ids=str)
def test_of_a_hybrid_model_the_farthest_block_that_covers_a_token_counts(make_tiers, groups):
    rig = make_warm(make_tiers, groups=groups)
    sources = Sources(rig)
    num_tokens = rig.run_alone("a", prompt(rig, 1))
    assert sources.total() == num_tokens
    assert sources["disk"] > 0
    if "full" in groups:
        assert sources == {"disk": num_tokens}, "each token has a block that only the tier had"
    rig.forget_gpu_cache()
    sources.clear()
    assert sources == {"host": rig.run_alone("b", prompt(rig, 2))}


@pytest.mark.parametrize(
    ("schemes", "number", "expected"),
    [
        (("redis",), 1, "external_unspecified"),
        (("s3",), 1, "external_unspecified"),
        (("redis", "file"), 1, "external_unspecified"),
        (("redis", "file"), 2, "disk"),
    ],
)
def test_the_source_is_the_kind_of_the_tier_that_has_it(make_tiers, schemes, number, expected):
    tiers = tuple(TierConfig(Location(s, "/x", "kv"), wait_s=WAIT_S) for s in schemes)
    rig = make_warm(make_tiers, tiers=tiers)
    rig.tier.number = number
    sources = Sources(rig)
    assert rig.run_alone("a", prompt(rig, 1)) == PREFIX_TOKENS
    assert sources == {expected: PREFIX_TOKENS}


def test_of_a_request_that_nobody_knows_it_is_the_host(make_tiers):
    rig = make_warm(make_tiers)
    sources = rig.connector.get_external_cache_hit_sources(None, 7)
    assert {source.value: number for source, number in sources.items()} == {"host": 7}
    assert rig.connector.get_external_cache_hit_sources(None, 0) == {}, "nothing is not told"
