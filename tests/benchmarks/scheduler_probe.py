"""Looking at the hooks that vLLM's scheduler calls: how long they take, what they execute.

The connector's methods are wrapped where they are looked up, on the instance, in the same way for
every connector. A wrapper that times is never on together with one that counts.
"""

from __future__ import annotations

import gc
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from tests.simulator.peers import PeerEngine

HOOKS = (
    "on_new_request",
    "get_num_new_matched_tokens",
    "get_loaded_kv_cache_group_ids",
    "update_state_after_alloc",
    "get_external_cache_hit_sources",
    "has_pending_block_frees",
    "build_connector_meta",
    "update_connector_output",
    "get_kv_connector_stats",
    "take_events",
    "request_finished",
    "request_finished_all_groups",
    "register_finished_partial_tail",
    "has_pending_push_work",
    "reset_cache",
)
"""Methods of the connector that vLLM's scheduler calls (0.32.0, v1/core/sched/scheduler.py)."""
_CALIBRATION_CALLS = 40_000

Hook = Callable[..., Any]


class Probe(Protocol):
    """What is put on the hooks of a connector while a trace is served."""

    def wrap(self, name: str, hook: Hook) -> Hook:
        """Return what is called instead of the hook."""

    def end_step(self, engine: PeerEngine) -> None:
        """Note that a step has ended."""


def wrap_hooks(connector: Any, wrap: Callable[[str, Hook], Hook]) -> None:
    """Put a wrapper around every hook that vLLM calls on this connector."""
    if connector is None:
        return
    for name in HOOKS:
        # A connector with the other one may call this one from there: it would count twice.
        is_inner = name == "request_finished" and hasattr(connector, "request_finished_all_groups")
        if hasattr(connector, name) and not is_inner:
            setattr(connector, name, wrap(name, getattr(connector, name)))


@contextmanager
def without_gc() -> Iterator[None]:
    """Keep Python's garbage collector out of what is measured."""
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()


class HookTimer:
    """Times every call of every hook; of each call what the wrapper itself takes is taken off."""

    def __init__(self, wrapper_ns: int) -> None:
        self.samples_ns: dict[str, list[int]] = {}  # of each hook, in the order of the calls
        self._wrapper_ns = wrapper_ns

    def wrap(self, name: str, hook: Hook) -> Hook:
        """Return the hook with a clock around it."""
        clock = time.perf_counter_ns
        wrapper_ns = self._wrapper_ns
        note = self.samples_ns.setdefault(name, []).append

        def timed(*args: Any, **kwargs: Any) -> Any:
            start_ns = clock()
            result = hook(*args, **kwargs)
            note(clock() - start_ns - wrapper_ns)
            return result

        return timed

    def end_step(self, engine: PeerEngine) -> None:
        """Nothing: only calls are kept."""


def measure_wrapper_ns() -> int:
    """Time a hook that does nothing through the wrapper; return what a call seems to take."""

    def nothing(request: Any, num_tokens: Any) -> None:
        pass

    timer = HookTimer(0)
    wrapped = timer.wrap("nothing", nothing)
    for _ in range(_CALIBRATION_CALLS):
        wrapped(None, 0)
    return int(statistics.median(timer.samples_ns["nothing"]))


class Watch:
    """Sees what a connector achieves; too slow to be timed beside."""

    def __init__(self) -> None:
        # That were loaded from the host for requests that had not run before.
        self.num_hit_tokens = 0
        # After each step, GPU blocks that are referenced and that no request holds.
        self.kept_blocks: list[int] = []

    def wrap(self, name: str, hook: Hook) -> Hook:
        """Return the hook; the one that is told of a hit is listened to."""
        if name != "update_state_after_alloc":
            return hook

        def watched(request: Any, blocks: Any, num_external_tokens: int) -> Any:
            if request.num_preemptions == 0:
                self.num_hit_tokens += num_external_tokens
            return hook(request, blocks, num_external_tokens)

        return watched

    def end_step(self, engine: PeerEngine) -> None:
        """Count the blocks that are kept."""
        self.kept_blocks.append(num_kept_blocks(engine))


def num_kept_blocks(engine: PeerEngine) -> int:
    """Return how many GPU blocks are referenced that no request holds."""
    manager = engine.scheduler.kv_cache_manager
    held = {
        block.block_id
        for single in manager.coordinator.single_type_managers
        for blocks in single.req_to_blocks.values()
        for block in blocks
    }
    null_id = engine.pool.null_block.block_id
    num_used: int = engine.pool.num_gpu_blocks - 1 - engine.pool.get_num_free_blocks()
    return num_used - len(held - {null_id})


@dataclass(slots=True)
class Counts:
    """What hooks executed."""

    calls: int = 0  # of hooks
    functions: int = 0  # calls of functions inside them, of Python and of C
    instructions: int = 0  # of Python's bytecode

    def __add__(self, other: Counts) -> Counts:
        return Counts(
            self.calls + other.calls,
            self.functions + other.functions,
            self.instructions + other.instructions,
        )


class HookCounter:
    """Counts what every hook executes, which depends on no clock and on no other process."""

    def __init__(self) -> None:
        self.counts: dict[str, Counts] = {}  # of each hook
        self._functions = 0
        self._instructions = 0
        self._own = Counts()
        self._own = self._calibrate()

    @property
    def total(self) -> Counts:
        return sum(self.counts.values(), Counts())

    def wrap(self, name: str, hook: Hook) -> Hook:
        """Return the hook with Python's own hooks for profilers and debuggers around it."""
        counts = self.counts.setdefault(name, Counts())

        def counted(*args: Any, **kwargs: Any) -> Any:
            self._functions = self._instructions = 0
            sys.setprofile(self._profile)
            sys.settrace(self._trace)
            try:
                return hook(*args, **kwargs)
            finally:
                sys.settrace(None)
                sys.setprofile(None)
                counts.calls += 1
                counts.functions += self._functions - self._own.functions
                counts.instructions += self._instructions - self._own.instructions

        return counted

    def end_step(self, engine: PeerEngine) -> None:
        """Nothing: only sums are kept."""

    def _calibrate(self) -> Counts:
        """Return what switching on and off counts as; the call of the hook itself is not of it."""
        self.wrap("empty", lambda: None)()
        empty = self.counts.pop("empty")
        return Counts(0, empty.functions - 1, 0)

    def _profile(self, frame: Any, event: str, argument: Any) -> None:
        if event in ("call", "c_call"):
            self._functions += 1

    def _trace(self, frame: Any, event: str, argument: Any) -> Any:
        frame.f_trace_opcodes = True
        frame.f_trace_lines = False
        return self._trace_instruction

    def _trace_instruction(self, frame: Any, event: str, argument: Any) -> Any:
        if event == "opcode":
            self._instructions += 1
        return self._trace_instruction
