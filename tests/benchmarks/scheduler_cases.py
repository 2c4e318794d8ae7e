"""Three questions that a whole trace does not answer.

How long does a long request wait for blocks that a connector keeps? What does one hit of 90,000
tokens cost? Does a step cost more when much is stored?
"""

import pickle
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

from safe_offload.errors import SafeOffloadError
from tests.benchmarks.scheduler_engine import SchedulerClock, Sizes, make_engine
from tests.benchmarks.scheduler_probe import (
    HookCounter,
    HookTimer,
    Probe,
    WrapperCost,
    without_gc,
    wrap_hooks,
)
from tests.benchmarks.scheduler_traces import (
    BLOCK_TOKENS,
    LAYOUTS,
    MAX_BATCHED_TOKENS,
    PLAIN,
    prompt_of,
)
from tests.simulator.peers import PeerEngine

HELD_STEPS = (0, 5, 50)
BACK_TO_BACK_BLOCKS = 1000
POOL_SHARE = 0.62
"""Of the pool, that each of two requests takes: the second one needs blocks of the first."""
WAIT_STEPS_MAX = 500
PICKLE_PROTOCOL = 5

HIT_TOKENS = 90_000
STORED_FACTORS = (1, 10, 100)
GROWTH_POOL_BLOCKS = 1000
GROWTH_STEP_BLOCKS = 2000
"""Blocks that the host holds at the factor 1."""
GROWTH_REQUESTS = 24
GROWTH_TOKENS = 640
GROWTH_ANSWER_TOKENS = 16


@dataclass(frozen=True, slots=True)
class Wait:
    """How long the second long request waited."""

    held_steps: int  # how long a copy takes
    num_steps: int  # from its arrival until it was scheduled; 0 in the next step
    scheduler_ns: int  # inside the scheduler meanwhile, the step that schedules it included


@dataclass(frozen=True, slots=True)
class Hit:
    """One hit of 90,000 tokens, from its match to the bytes of the plan."""

    num_blocks: int  # that were loaded
    match_ns: int  # get_num_new_matched_tokens
    alloc_ns: int  # update_state_after_alloc
    plan_ns: int  # build_connector_meta
    pickle_ns: int  # of the plan, as vLLM sends it to another process
    pickle_bytes: int  # of it

    @property
    def total_ns(self) -> int:
        """Return the sum."""
        return self.match_ns + self.alloc_ns + self.plan_ns + self.pickle_ns


@dataclass(frozen=True, slots=True)
class Growth:
    """The same small load with little and with much on the host."""

    num_stored: int  # blocks that were stored before it
    step_ns: float  # median of all hooks together in a step
    total_ns: int  # of all steps
    functions: int  # calls of functions inside the hooks; 0 where not counted


def wait_back_to_back(name: str, held_steps: int) -> Wait:
    """S0 takes 62 % of the GPU's blocks; S1, as long, arrives when S0 has finished."""
    num_tokens = int(BACK_TO_BACK_BLOCKS * POOL_SHARE) * BLOCK_TOKENS
    sizes = Sizes(PLAIN, BACK_TO_BACK_BLOCKS + 1, 4 * BACK_TO_BACK_BLOCKS)
    engine = make_engine(name, sizes, held_steps)
    clock = SchedulerClock(engine.scheduler)
    engine.add("s0", prompt_of("s0", num_tokens), 1)
    _step_until(engine, lambda finished: "s0" in finished)
    prompt = prompt_of("s1", num_tokens)
    with without_gc():
        request = engine.add("s1", prompt, 1)
        start_ns = clock.total_ns
        num_steps = _step_until(engine, lambda _: request.num_computed_tokens > 0)
        waited_ns = clock.total_ns - start_ns
    engine.drain()
    if len(engine.answers["s1"]) != 1:
        raise SafeOffloadError(f"{name}: the second request was not answered")
    return Wait(held_steps, num_steps - 1, waited_ns)


def _step_until(engine: PeerEngine, is_reached: Callable[[list[str]], bool]) -> int:
    """Step until something is so; return the number of steps."""
    for count in range(1, WAIT_STEPS_MAX + 1):
        if is_reached(engine.step()):
            return count
    raise SafeOffloadError(f"expected an end of the wait, found none in {WAIT_STEPS_MAX} steps")


def measure_hits(
    name: str, layout: str, copy_steps: int, cost: WrapperCost, num_tokens: int = HIT_TOKENS
) -> list[Hit]:
    """Serve A, B, C, A, B, C in a pool of 1.6 prompts; return what the last three cost."""
    groups = LAYOUTS[layout]
    num_blocks = num_tokens // BLOCK_TOKENS
    sizes = Sizes(groups, num_blocks * 16 // 10, num_blocks * 4 * len(groups))
    hits = []
    engine = make_engine(name, sizes, copy_steps)
    timer = HookTimer(cost)
    wrap_hooks(engine.connector, timer.wrap)
    prompts = [prompt_of(which, num_tokens) for which in "ABC"]
    with without_gc():
        for index in range(6):
            timer.forget()
            engine.add(f"{index}", prompts[index % 3], 1)
            if index >= 3:
                hits += _time_hit(engine, timer)
            engine.drain()
    return hits


def _time_hit(engine: PeerEngine, timer: HookTimer) -> list[Hit]:
    """Run the step that plans the load; return nothing if there is none."""
    before = engine.worker.num_loaded
    engine.step()
    plan = engine.last_plan
    num_loaded = engine.worker.num_loaded - before
    if not num_loaded:
        return []
    start_ns = time.perf_counter_ns()
    data = pickle.dumps(plan, protocol=PICKLE_PROTOCOL)
    pickle_ns = time.perf_counter_ns() - start_ns
    match_ns, alloc_ns, plan_ns = (
        sum(timer.samples_ns[hook])
        for hook in (
            "get_num_new_matched_tokens",
            "update_state_after_alloc",
            "build_connector_meta",
        )
    )
    return [Hit(num_loaded, match_ns, alloc_ns, plan_ns, pickle_ns, len(data))]


def median_hit(hits: list[Hit]) -> Hit:
    """Return the medians of what several hits cost."""
    return Hit(
        *(round(statistics.median(getattr(hit, field) for hit in hits)) for field in Hit.__slots__)
    )


@dataclass(frozen=True, slots=True)
class GrowthCase:
    """How much is stored, and how large the load behind it is."""

    factor: int  # how many times `GROWTH_STEP_BLOCKS` the host holds
    num_requests: int = GROWTH_REQUESTS  # of the load; every other one was stored long ago


def measure_growth(name: str, case: GrowthCase, copy_steps: int, cost: WrapperCost) -> Growth:
    timer = HookTimer(cost)
    num_stored = _serve_behind(name, case, copy_steps, timer)
    return Growth(num_stored, statistics.median(timer.steps_ns), sum(timer.steps_ns), 0)


def count_growth(name: str, case: GrowthCase, copy_steps: int) -> Growth:
    counter = HookCounter()
    num_stored = _serve_behind(name, case, copy_steps, counter)
    return Growth(num_stored, 0.0, 0, counter.total.functions)


def _serve_behind(name: str, case: GrowthCase, copy_steps: int, probe: Probe) -> int:
    """Fill the host, then serve requests one after the other, the probe on the hooks.

    The GPU's pool and the host are as large for every factor, and the pool is full of other blocks
    when the load begins.
    """
    sizes = Sizes(PLAIN, GROWTH_POOL_BLOCKS, 2 * GROWTH_STEP_BLOCKS * max(STORED_FACTORS))
    engine = make_engine(name, sizes, copy_steps)
    old = [f"old{index}" for index in range(case.num_requests // 2)]
    for which in old:
        engine.add(which, prompt_of(which, GROWTH_TOKENS), 1)
        engine.drain()
    index = 0
    while engine.worker.num_stored < case.factor * GROWTH_STEP_BLOCKS:
        engine.add(f"filler{index}", prompt_of(f"filler{index}", MAX_BATCHED_TOKENS // 2), 1)
        engine.drain()
        index += 1
    num_stored = engine.worker.num_stored
    wrap_hooks(engine.connector, probe.wrap)
    with without_gc():
        for index in range(case.num_requests):
            which = old[index // 2] if index % 2 else f"new{index}"
            prompt = prompt_of(which, GROWTH_TOKENS)
            engine.add(f"small{index}", prompt, GROWTH_ANSWER_TOKENS)
            while engine.has_work:
                engine.step()
                probe.end_step(engine)
    return num_stored
