"""An engine with real tiers, whose steps take what a model would take.

vLLM's scheduler, both sides of our connector, its copies, its tiers with their breakers, and the
clock are real. Only the model is a stand-in: a forward checks every word of KV cache that attention
reads, and then waits until computing would have ended. So what is measured is not how busy this
machine is, and a wrong byte from a tier is found.
"""

import contextlib
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from safe_offload.commands.bench.engine_process import EngineOptions
from safe_offload.layout import Geometry, HostLayout
from safe_offload.observe.counters import Count
from safe_offload.tiers.choice import open_tier
from safe_offload.tiers.guarded_tier import GuardedTier
from safe_offload.worker.copies.base import Backend
from safe_offload.worker.copies.cpu import CpuBackend
from safe_offload.worker.copies.threads import DirectionThreads
from safe_offload.worker.memory.host_memory import HostMemory
from safe_offload.worker.memory.shared_memory import ALONE
from safe_offload.worker.opening import Opened
from safe_offload.worker.tier_runner import HostSlots, TierRunner
from safe_offload.worker.transfers import Transfers
from tests.benchmarks.slow_tier import ALLOWED_S, ALLOWED_SHARE
from tests.simulator.findings import Finding
from tests.simulator.model_runner import Batch, ModelRunner
from tests.simulator.vllm_setup import EngineShape
from tests.worker.machines import make_storage
from tests.worker.tensor_core import RunningLoop, TensorCore, TensorDevice, geometry_of

STEP_S = 0.005
"""That a step takes which computes next to nothing."""
IDLE_STEP_S = 0.001
"""vLLM sleeps that long between steps without tokens."""
STEP_TOKENS = 2048
BLOCK_TOKENS = 16
TOKENS_PER_S = 10_000
LONGEST = 4_000
NUM_SLOTS = 1_200
"""Of host memory: some of the conversations, the others are in the tier alone."""
ANSWER_TOKENS = 3
PAUSE_S = 0.02
"""Between an answer and the next request."""
ANSWER_TIMEOUT_S = 600.0


@dataclass(frozen=True, slots=True)
class Sample:
    """A request, and what became of it."""

    num_tokens: int  # of its prompt
    begin_s: float  # when it came, by `time.monotonic`
    first_s: float  # until its first token
    starved_s: float  # of that, what it was late because threads of the engine had no core
    is_right: bool  # its tokens are those that its prompt leads to
    num_hit: int  # tokens that came from the host or a tier
    is_cut: bool  # it waited for the tier as long as it may
    problem: str = ""  # why there is no answer, or none that can be right; empty if there is none

    @property
    def computing_s(self) -> float:
        num_steps = -(-self.num_tokens // STEP_TOKENS)
        return num_steps * STEP_S + self.num_tokens / TOKENS_PER_S

    @property
    def ratio(self) -> float:
        """Return its time to first token, had it had a core, in terms of what it may take."""
        allowed_s = ALLOWED_SHARE * self.computing_s + ALLOWED_S
        return (self.first_s - self.starved_s) / allowed_s


class RealClock:
    """See `tests.simulator.virtual_loop.Clock`: the time there is."""

    @property
    def now_s(self) -> float:
        return time.monotonic()

    def advance(self, seconds: float) -> None:
        """Let an idle engine poll."""
        time.sleep(IDLE_STEP_S)


class HostMachine:
    """See `tests.worker.tensor_core.Machine`: what it computes is there when it returns."""

    def __init__(self, shape: EngineShape, geometry: Geometry, num_slots: int) -> None:
        import torch

        self._tensor = torch.tensor
        self.storage = make_storage(shape)
        self.layout = HostLayout.in_one_slab(geometry, num_slots)
        self.host = HostMemory.allocate(self.layout.size_bytes)
        threads = DirectionThreads("safe-offload")
        self.copies = CpuBackend(self.storage.data_ptr(), self.layout, self.host, threads)
        self.backend: Backend = self.copies

    def enqueue(self, operation: Any) -> Any:
        operation()
        return lambda: None

    def delay(self, where: Any, amount: float) -> None:
        """See `Machine.delay`; nothing is held up."""

    def to_device(self, numbers: list[int]) -> Any:
        return self._tensor(numbers)

    def close(self) -> None:
        """See `Machine.close`."""


class TimedRunner(ModelRunner):
    """A model runner whose forward takes what a model's would."""

    starved_s = 0.0  # how long this engine was late because its threads had no core
    _begin_s = _starved_before_s = _all_starved_before_s = 0.0
    _has_computed = False

    def begin_step(self) -> None:
        """What the stand-in does from here on is part of what computing takes."""
        self._has_computed = False
        self._starved_before_s, self._all_starved_before_s = _starved_s(), _all_starved_s()
        self._begin_s = time.monotonic()

    def end_step(self) -> None:
        """Count what was not made up for by waiting less.

        A step that computes waits for this thread alone. One that does not waits for the threads
        that copy, and ask the tier.
        """
        if self._has_computed:
            self.starved_s += _starved_s() - self._starved_before_s
        else:
            starved_s = _all_starved_s() - self._all_starved_before_s
            self.starved_s += min(time.monotonic() - self._begin_s, starved_s)

    def compute(self, batch: Batch, device: Any) -> None:
        super().compute(batch, device)
        num_tokens = batch.scheduled.total_num_scheduled_tokens
        if num_tokens:
            self._has_computed = True
            end_s = self._begin_s + STEP_S + num_tokens / TOKENS_PER_S
            time.sleep(max(0.0, end_s - time.monotonic()))
            starved_s = _starved_s()
            late_s = max(0.0, time.monotonic() - end_s)
            self.starved_s += min(late_s, starved_s - self._starved_before_s)
            self._starved_before_s = starved_s


class FleetCore(TensorCore):
    """The engine. `tiers`: as `tiers` in a configuration has them."""

    guarded_tiers: tuple[GuardedTier, ...] = ()

    def __init__(self, tiers: Sequence[dict[str, Any]]) -> None:
        shape = EngineShape(
            groups=(f"full@{BLOCK_TOKENS}",),
            num_blocks=2 * LONGEST // BLOCK_TOKENS,
            num_slots=NUM_SLOTS,
            max_batched_tokens=STEP_TOKENS,
            max_model_len=LONGEST + 10 * BLOCK_TOKENS,
            extra={"min_load_tokens": "auto", "tiers": list(tiers)},
        )
        super().__init__(shape, 1, HostMachine)
        self.clock = RealClock()
        self.opened_s: dict[str, float] = {}
        self.timed = TimedRunner(shape, self.scheduler, self.chance, self.findings)
        self.runner = self.timed

    def _open(self, rank: int, copy_ticks_max: int) -> Any:
        machine = HostMachine(self.shape, geometry_of(self.shape), NUM_SLOTS)
        self.machines.append(machine)
        slot_bytes = machine.layout.geometry.slot_bytes
        guarded_tiers = []
        for config in self.config.tiers:
            tier, namespace_of = open_tier(config, slot_bytes, {"benchmark": "fleet"})
            guarded_tiers.append(GuardedTier(tier, config, namespace_of, slot_bytes=slot_bytes))
        self.guarded_tiers = tuple(guarded_tiers)
        loop, tiers = RunningLoop(), None
        if guarded_tiers:
            slots = HostSlots(machine.host, machine.layout, machine.backend)
            tiers = TierRunner(rank, guarded_tiers, slots, loop)
        transfers = Transfers(machine.backend, loop, self.config.max_inflight_bytes, tiers=tiers)
        opened = Opened(transfers, machine.copies, ALONE, None, tiers)
        return TensorDevice(rank, machine), loop, opened

    def step(self) -> Any:
        self.timed.begin_step()
        batch = super().step()
        self.timed.end_step()
        for guarded in self.guarded_tiers:
            if guarded.is_out:
                self.opened_s.setdefault("read", time.monotonic())
            if guarded.is_out_for_writing:
                self.opened_s.setdefault("write", time.monotonic())
        return batch

    def serve(self, name: str, prompt: list[int]) -> Sample:
        pause_end_s = time.monotonic() + PAUSE_S
        while self.has_work and time.monotonic() < pause_end_s:
            self.step()
        time.sleep(max(0.0, pause_end_s - time.monotonic()))
        self.scheduler.reset_prefix_cache()
        num_hit, num_cut = self.counts[Count.HIT_TOKENS], self.counts[Count.TIER_WAITS_CUT]
        starved_s, first_s, problem = self.timed.starved_s, 0.0, ""
        begin_s = time.monotonic()
        self.add(name, prompt, ANSWER_TOKENS)
        try:
            while name not in self.finish_reasons:
                self.step()
                if not first_s and self.answers.get(name):
                    first_s = time.monotonic() - begin_s
                    starved_s = self.timed.starved_s - starved_s
                if time.monotonic() - begin_s > ANSWER_TIMEOUT_S:
                    problem = f"no answer after {ANSWER_TIMEOUT_S:g} s"
                    self.abort(name)
                    break
        except Finding as finding:
            problem = f"wrong bytes: {finding}"
        expected = self.runner.sequels.pop(name).answer(ANSWER_TOKENS)
        is_right = not problem and self.answers.get(name) == expected
        return Sample(
            len(prompt),
            begin_s,
            first_s,
            starved_s,
            is_right,
            self.counts[Count.HIT_TOKENS] - num_hit,
            self.counts[Count.TIER_WAITS_CUT] > num_cut,
            problem,
        )


def _starved_s() -> float:
    """Return how long this thread was ready to run and had no core, so far.

    Source: Linux kernel, Documentation/scheduler/sched-stats.rst (/proc/<pid>/schedstat).
    """
    return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9


def _all_starved_s() -> float:
    """Return the same of all threads of this process together."""
    waited_ns = 0
    for folder in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # it has ended meanwhile
            waited_ns += int((folder / "schedstat").read_text().split()[1])
    return waited_ns / 1e9


# ---- what runs in the engine's process ---------------------------------------------------------

_core: FleetCore | None = None


def open_engine(_: None, tiers: Sequence[dict[str, Any]]) -> float:
    """Begin with nothing in host memory and these tiers; return the time."""
    global _core
    from vllm.utils.gc_utils import freeze_gc_heap

    now_s = time.monotonic()
    _core = FleetCore(tiers)
    freeze_gc_heap()  # as vLLM's own engine: else now and then a request waits 0.4 s for it
    return now_s


def serve_all(_: None, prompts: Sequence[tuple[str, list[int]]]) -> list[Sample]:
    """Answer requests, each with its name, one by one."""
    assert _core is not None
    return [_core.serve(name, prompt) for name, prompt in prompts]


def close_engine(_: None, __: None) -> dict[str, float]:
    """End it; return when its tier was first left alone, for reading and for writing."""
    global _core
    assert _core is not None
    _core.close()
    opened_s, _core = _core.opened_s, None
    return opened_s


def run_engine(connection: Connection, options: EngineOptions) -> None:
    """Run in a process of its own: call the functions above."""
    connection.send((False, None))
    while (told := connection.recv()) is not None:
        function, question = told
        connection.send((False, function(None, question)))
