"""One trace with one connector: what it achieves, how long its hooks take, what they execute."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from tests.benchmarks.scheduler_engine import Sizes, make_engine, serve
from tests.benchmarks.scheduler_probe import (
    Counts,
    HookCounter,
    HookTimer,
    Watch,
    without_gc,
)
from tests.benchmarks.scheduler_traces import Trace

COPY_STEPS = 1
"""A copy of some thousand blocks takes about as long as the forward that computes them."""


def percentile(values: Sequence[float], percent: int) -> float:
    """Return the smallest value that is not below a percentage of the values."""
    return sorted(values)[max(0, -(-len(values) * percent // 100) - 1)]


@dataclass(frozen=True, slots=True)
class Facts:
    """What a connector achieves; none of it depends on time."""

    num_prompt_tokens: int  # of all requests
    num_hit_tokens: int  # of those, loaded from the host when the request first ran
    num_computed: int  # tokens scheduled, answers and what was computed again included
    num_preemptions: int  # of requests
    num_stored: int  # blocks that plans named to be stored
    num_loaded: int  # blocks that plans named to be loaded
    num_steps: int  # until the engine was idle
    kept_mean: float  # GPU blocks referenced that no request holds, mean over the steps
    kept_max: int  # the most of them

    @property
    def hit_rate(self) -> float:
        return self.num_hit_tokens / self.num_prompt_tokens

    @property
    def num_moved(self) -> int:
        return self.num_stored + self.num_loaded


Calls = dict[str, list[int]]
"""Of one run: by hook, the nanoseconds of each call."""


def least_ns(runs: Sequence[Calls]) -> int:
    """Return the time of all hooks, of each call the least of the rounds.

    A trace makes the same calls in every round, and what others do on the machine can only add to a
    call.
    """
    return sum(
        min(same) for hook in runs[0] for same in zip(*(run[hook] for run in runs), strict=True)
    )


Answers = dict[str, list[int]]


def observe(trace: Trace, name: str, copy_steps: int) -> tuple[Facts, Answers]:
    """Serve a trace untimed; return what the connector achieves, and the answers."""
    watch = Watch()
    engine = make_engine(name, Sizes.of(trace), copy_steps)
    serve(engine, trace, watch)
    facts = Facts(
        engine.num_prompt_tokens,
        watch.num_hit_tokens,
        engine.num_computed,
        engine.num_preemptions,
        engine.worker.num_stored,
        engine.worker.num_loaded,
        engine.num_steps,
        statistics.fmean(watch.kept_blocks),
        max(watch.kept_blocks),
    )
    return facts, engine.answers


def time_hooks(trace: Trace, name: str, copy_steps: int, wrapper_ns: int) -> Calls:
    timer = HookTimer(wrapper_ns)
    engine = make_engine(name, Sizes.of(trace), copy_steps)
    with without_gc():
        serve(engine, trace, timer)
    return timer.samples_ns


def count_hooks(trace: Trace, name: str, copy_steps: int) -> dict[str, Counts]:
    """Serve a trace and count what every hook executes.

    The first request with a connector fills caches that live as long as the process, so a trace
    has to have been served before.
    """
    counter = HookCounter()
    serve(make_engine(name, Sizes.of(trace), copy_steps), trace, counter)
    return {hook: counts for hook, counts in counter.counts.items() if counts.calls}
