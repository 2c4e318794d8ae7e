"""The benchmark `tenants`: with quotas those that chat keep what they have alone."""

import pytest

from tests.benchmarks.tenants import measure


@pytest.mark.parametrize("is_lazy", [False, True])
def test_a_flood_takes_all_without_quotas_and_less_than_a_twentieth_with_them(is_lazy):
    found = measure(
        {"lazy_offload": is_lazy, "eviction_policy": "lru"}
    )  # others resist by themselves
    alone, flooded, divided = (outcome.hit_rate for outcome in found.values())
    assert alone > 0.7
    assert flooded < 0.1
    assert divided >= 0.95 * alone
