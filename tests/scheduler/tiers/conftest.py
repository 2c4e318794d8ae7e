"""Engines with a tier."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.scheduler.tiers.tier_rig import WIDE, TierRig


@pytest.fixture
def make_tiers() -> Iterator[Callable[..., TierRig]]:
    """Make started engines with a tier; with the `tier` of another one, they have what that has."""
    rigs: list[TierRig] = []

    def make(**options: Any) -> TierRig:
        rigs.append(TierRig(**{"num_blocks": 60, **WIDE, **options}))
        rigs[-1].start()
        return rigs[-1]

    yield make
    for rig in rigs:
        rig.close()
