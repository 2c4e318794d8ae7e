"""Engines for the faults that were reported."""

from typing import Any

import pytest

from tests.simulator.engine_core import EngineCore
from tests.simulator.scenes import run_alone
from tests.simulator.vllm_setup import EngineShape


@pytest.fixture
def make_engine():
    """Make engines that have served a request, and whose connector checks itself in every step."""
    made: list[EngineCore] = []

    def make(*, copy_ticks_max: int = 0, **shape: Any) -> EngineCore:
        extra = {"check_invariants": True, **shape.pop("extra", {})}
        made.append(EngineCore(EngineShape(extra=extra, **shape), copy_ticks_max=copy_ticks_max))
        run_alone(made[-1], "warm-up", [0, 1, 2])  # until then no rank has told its capacity
        made[-1].counts.clear()
        return made[-1]

    yield make
    for engine in made:
        engine.close()
