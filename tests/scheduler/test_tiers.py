"""Tiers, as vLLM's real scheduler meets them: what they have becomes an ordinary host hit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.scheduler.tier_rig import TierRig
from tests.simulator.groups import BLOCK_TOKENS

MakeTierRig = Callable[..., TierRig]
NUM_BLOCKS = 10
PREFIX_TOKENS = NUM_BLOCKS * BLOCK_TOKENS
WIDE: dict[str, Any] = {"max_seqs": 16, "max_batched_tokens": 512, "num_slots": 200}


@pytest.fixture
def make_tiers() -> Iterator[MakeTierRig]:
    """Engines with a tier; one made with the `tier` of another begins with what that has."""
    rigs: list[TierRig] = []

    def make(**options: Any) -> TierRig:
        rigs.append(TierRig(**{"num_blocks": 60, **WIDE, **options}))
        return rigs[-1]

    yield make
    for rig in rigs:
        rig.close()


def make_warm(make_tiers: MakeTierRig, **options: Any) -> TierRig:
    """An engine that has just been started, on a tier that has the prefix of `prompt`."""
    first = make_tiers(**options)
    first.start()
    first.run_alone("warm", prompt(first, 0), max_tokens=1)
    first.drain()
    assert first.tier.objects
    second = make_tiers(tier=first.tier, **options)
    second.start()
    second.counts.clear()
    return second


def prompt(rig: TierRig, number: int) -> list[int]:
    """The shared prefix and a tail that no other has."""
    return [*rig.prompt(PREFIX_TOKENS, 1), *rig.prompt(3, 100 + number)]


def status(rig: TierRig, name: str) -> str:
    return str(rig.scheduler.requests[name].status.name)


SHAPES: list[dict[str, Any]] = [
    {},
    {"is_async": True},
    {"tensor_ranks": 2},
    {"tensor_ranks": 2, "is_async": True, "has_streams": True, "is_v2": True},
    {"pipeline_ranks": 2},
    {"extra": {"eviction_policy": "slru"}},
    {"num_draft_tokens": 2},
    {"groups": ("mla",)},
    {"is_priority": True},
    {"has_events": True},
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_what_another_engine_has_spilled_is_hit(
    make_tiers: MakeTierRig, shape: dict[str, Any]
) -> None:
    rig = make_warm(make_tiers, **shape)
    assert rig.run_alone("a", prompt(rig, 1)) == PREFIX_TOKENS
    assert rig.counts["fetched_blocks"] == NUM_BLOCKS
    assert rig.counts["tier_lookups"] == 1
    rig.check_idle()
    rig.forget_gpu_cache()
    assert rig.run_alone("b", prompt(rig, 2)) == PREFIX_TOKENS, "from the host"
    assert rig.counts["fetched_blocks"] == NUM_BLOCKS
    rig.check_idle()
