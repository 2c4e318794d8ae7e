"""What tests of several folders use."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tests.scheduler.rig import MakeRig, Rig


@pytest.fixture
def make_rig() -> Iterator[MakeRig]:
    """Engines of the simulator to step by hand; see `tests.scheduler.rig`."""
    from tests.scheduler.rig import Rig

    rigs: list[Rig] = []

    def make(**options: Any) -> Rig:
        rigs.append(Rig(**options))
        return rigs[-1]

    yield make
    for rig in rigs:
        rig.close()
