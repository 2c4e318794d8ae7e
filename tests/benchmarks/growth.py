"""How the instructions of hooks grow with what there is: requests, blocks, pins, tenants, ...

The exponent over three doublings of a scene's size: 1 says that twice as much takes twice as many.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any
from unittest import mock

from safe_offload.scheduler.cache import directory
from tests.benchmarks.growth_scenes import Scene
from tests.benchmarks.scheduler_probe import HookCounter, wrap_hooks

EXPONENT_MAX = 1.15
NUM_DOUBLINGS = 3


def fitted(sizes: Sequence[int], values: Sequence[float]) -> float:
    """Return by which power of the size a value grows."""
    return statistics.linear_regression([*map(math.log, sizes)], [*map(math.log, values)]).slope


class Looks(dict[bytes, int]):
    """A table of the directory; each look is some instructions, where one of a dict's is none."""

    def get(self, block_hash: bytes, default: Any = None) -> Any:
        return super().get(block_hash, default)


def count_step(scene: Scene, size: int) -> int:
    """Return how many instructions of bytecode the hooks of a scene's step execute."""
    with ExitStack() as closing:
        closing.enter_context(mock.patch.object(directory, "dict", Looks, create=True))
        engine = scene.make(size, closing)
        counter = HookCounter()
        wrap_hooks(engine.connector, counter.wrap)
        engine.step()
    return counter.total.instructions


def counted_exponent(scene: Scene) -> float:
    """Return by which power of the size the instructions grow, over three doublings."""
    count_step(scene, scene.counted)  # caches that live as long as the process
    least, most = (count_step(scene, scene.counted << n) for n in (0, NUM_DOUBLINGS))
    return math.log2(most / least) / NUM_DOUBLINGS
