"""How the time of hooks grows with what there is: waiting requests, blocks, pins, tenants, ...

For each scene of `growth_scenes` one step of vLLM's scheduler is timed at four sizes, each twice
the one before: the time inside all hooks, and what vLLM's own code takes in the same step. The
exponent is fitted: 1 says that twice as much takes twice as long. Over 1.15 and over vLLM's own
exponent, which the caches of the processor raise too, is an error. Times are of the thread's CPU,
the best of some rounds.
"""

from __future__ import annotations

import argparse
import logging
import math
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import Any
from unittest import mock

from safe_offload.commands.bench.report import (
    Report,
    add_output_arguments,
    describe_machine,
    publish,
    table,
)
from safe_offload.scheduler.cache import directory
from tests.benchmarks.growth_scenes import SCENES, Scene
from tests.benchmarks.scheduler_probe import HOOKS, HookCounter, without_gc, wrap_hooks
from tests.simulator.peers import PeerEngine

EXPONENT_MAX = 1.15
NUM_DOUBLINGS = 3
ROUNDS = 3


@dataclass(frozen=True, slots=True)
class Step:
    """One step: CPU seconds inside the hooks, and of vLLM's own code; the hook with the most."""

    hooks_s: float
    own_s: float
    hook: str


@dataclass(frozen=True, slots=True)
class Growth:
    """What was measured of one scene, by size."""

    name: str
    sizes: tuple[int, ...]
    steps: tuple[Step, ...]

    @property
    def exponent(self) -> float:
        return fitted(self.sizes, [step.hooks_s for step in self.steps])

    @property
    def own_exponent(self) -> float:
        return fitted(self.sizes, [step.own_s for step in self.steps])

    @property
    def is_good(self) -> bool:
        """Whether hooks grow no faster than what there is, or than vLLM's own code."""
        return self.exponent <= max(EXPONENT_MAX, self.own_exponent)


def fitted(sizes: Sequence[int], times: Sequence[float]) -> float:
    """Return by which power of the size the time grows."""
    return statistics.linear_regression([*map(math.log, sizes)], [*map(math.log, times)]).slope


def time_step(engine: PeerEngine) -> Step:
    """Time the next step of an engine."""
    clock, taken_s, all_s = time.thread_time, dict[str, float](), 0.0

    def timed(name: str, hook: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            start_s = clock()
            try:
                return hook(*args, **kwargs)
            finally:
                taken_s[name] = taken_s.get(name, 0.0) + clock() - start_s

        return call

    def timed_whole(call: Callable[..., Any]) -> Callable[..., Any]:
        def whole(*args: Any) -> Any:
            nonlocal all_s
            start_s = clock()
            try:
                return call(*args)
            finally:
                all_s += clock() - start_s

        return whole

    scheduler = engine.scheduler
    with without_gc(), ExitStack() as unwrapping:
        for wrapped in filter(None, (engine.connector, scheduler)):
            for name in {*HOOKS, "schedule", "update_from_output"}.difference(vars(wrapped)):
                unwrapping.callback(vars(wrapped).pop, name, None)
        wrap_hooks(engine.connector, timed)
        scheduler.schedule = timed_whole(scheduler.schedule)
        scheduler.update_from_output = timed_whole(scheduler.update_from_output)
        engine.step()
    hooks_s = sum(taken_s.values())
    most = max(taken_s, key=taken_s.__getitem__, default="")
    return Step(hooks_s, max(all_s - hooks_s, 1e-6), most)


def measure(scene: Scene, first: int, rounds: int) -> Growth:
    """Time a scene at all sizes."""
    sizes = [first << doubling for doubling in range(NUM_DOUBLINGS + 1)]
    steps = []
    for size in sizes:
        found = []
        for _ in range(rounds):
            with ExitStack() as closing:
                found.append(time_step(scene.make(size, closing)))
        hooks_s, own_s = (min(getattr(step, f) for step in found) for f in ("hooks_s", "own_s"))
        steps.append(Step(hooks_s, own_s, found[0].hook))
    return Growth(scene.name, tuple(sizes), tuple(steps))


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


HEADS = ("", "sizes", "hooks, ms", "vLLM, ms", "exponent", "vLLM's", "most in")


def _row(growth: Growth) -> list[str]:
    last = growth.steps[-1]
    return [
        growth.name,
        f"{growth.sizes[0]:,} to {growth.sizes[-1]:,}",
        " ".join(f"{1e3 * step.hooks_s:.1f}" for step in growth.steps),
        f"{1e3 * last.own_s:.1f}",
        f"{growth.exponent:.2f}",
        f"{growth.own_exponent:.2f}",
        last.hook,
    ]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", default="", help="scenes whose name has this word")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="the best counts (%(default)s)")
    parser.add_argument("--scale", type=float, default=1.0, help="of all sizes (%(default)s)")
    add_output_arguments(parser)


def run_command(arguments: argparse.Namespace) -> int:
    """Run `python -m tests.benchmarks growth`; return 1 if hooks grow too fast."""
    logging.disable(logging.CRITICAL)
    machine = describe_machine()
    found = []
    for scene in SCENES:
        if arguments.only in scene.name:
            first = max(2, int(scene.first * arguments.scale))
            found.append(measure(scene, first, arguments.rounds))
            print(*_row(found[-1]), sep="  ", flush=True)
    sections = [table([HEADS, *map(_row, found)])]
    method = (
        "CPU time of one step of vLLM's scheduler: inside our hooks at four sizes, each twice the "
        "one before, and of vLLM's own code at the last. The exponents are fitted."
    )
    figures = {"growth": [*map(asdict, found)]}
    publish(Report(method, sections, figures, vars(arguments), machine), arguments)
    return 0 if all(growth.is_good for growth in found) else 1
