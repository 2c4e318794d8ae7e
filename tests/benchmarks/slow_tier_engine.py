"""An engine on virtual time, whose steps, copies and tier take what they are told to take.

vLLM's scheduler and the scheduler side of our connector are real. There is no model, no memory and
no worker: a stand-in takes each plan and reports what has ended by then.
"""

import heapq
import math
from dataclasses import dataclass, field
from unittest.mock import patch

from safe_offload.protocol import (
    EMPTY_PLAN,
    Capacity,
    FailureReason,
    Outcome,
    Presence,
    StepPlan,
    StepReport,
    TierTransfer,
)
from tests.simulator.stepper import Stepper
from tests.simulator.virtual_loop import Clock
from tests.simulator.vllm_setup import OURS, EngineShape, runner_output

STEP_S = 0.005
"""That a step takes which computes next to nothing."""
IDLE_STEP_S = 0.001
"""vLLM sleeps that long between steps without tokens."""
COPY_BYTES_PER_S = 20e9
COPY_LATENCY_S = 0.001
BLOCK_TOKENS = 16
SLOT_BYTES = 2 << 20
"""128 KiB for each token."""
TIMEOUT_S = 5.0
"""The default of a tier: the workers answer a probe then."""
NEVER = math.inf
TOKEN = 7


@dataclass(frozen=True, slots=True)
class TierSpeed:
    """How a tier fares.

    There is no circuit breaker in front of it, as a real worker has: what it spoils it spoils for
    every request.
    """

    bytes_per_s: float = 2e9  # of fetches, one after another
    latency_s: float = 0.002  # of a probe and of each piece of a fetch
    probe_s: float | None = None  # of a probe, if it is not the latency
    # Pieces that come; the next stalls, and all that is asked for from then.
    num_fetched_max: float = NEVER
    fails_every: int = 0  # every such piece does not come; it is given up after `TIMEOUT_S`
    delivers: bool = True  # what it says it has comes
    # From when to when nothing is answered; what is asked for then fails after `TIMEOUT_S`.
    dead_s: tuple[float, float] = (NEVER, NEVER)


@dataclass(slots=True)
class _Lane:
    """What is done one after another."""

    free_s: float = 0.0

    def take(self, now_s: float, seconds: float) -> float:
        """Return when something has ended that begins as soon as all before it have."""
        self.free_s = max(self.free_s, now_s) + seconds
        return self.free_s


@dataclass(slots=True)
class Worker:
    """Stands in for the one worker."""

    speed: TierSpeed | None  # of its tier; None for none
    num_slots: int  # of host memory
    objects: set[bytes] = field(default_factory=set)  # hashes of what the tier has
    num_fetched: int = 0  # pieces that have been read
    num_planned: int = 0  # blocks that plans named to be fetched
    _due: list[tuple[float, int, StepReport, tuple[bytes, ...]]] = field(default_factory=list)
    _num_reports: int = 0
    _copies: _Lane = field(default_factory=_Lane)
    _reads: _Lane = field(default_factory=_Lane)
    _writes: _Lane = field(default_factory=_Lane)

    def __post_init__(self) -> None:
        self._add(0.0, StepReport(capacities=(Capacity(0, self.num_slots),)))

    def _add(self, due_s: float, report: StepReport, written: tuple[bytes, ...] = ()) -> None:
        if due_s < NEVER:
            heapq.heappush(self._due, (due_s, self._num_reports, report, written))
            self._num_reports += 1

    @property
    def next_due_s(self) -> float:
        """Return when something ends next."""
        return self._due[0][0] if self._due else NEVER

    def take(self, plan: StepPlan, now_s: float) -> None:
        """Begin what a plan tells."""
        stores = (*plan.stores_before_forward, *plan.stores_after_forward)
        for transfer in (*plan.loads, *stores):
            seconds = len(transfer.slot_ids) * SLOT_BYTES / COPY_BYTES_PER_S
            due_s = self._copies.take(now_s, seconds) + COPY_LATENCY_S
            self._add(due_s, StepReport((Outcome(0, transfer.transfer_id),)))
        if plan.probes or plan.fetches or plan.spills:
            assert self.speed is not None
            self._ask(plan, self.speed, now_s)

    def _ask(self, plan: StepPlan, speed: TierSpeed, now_s: float) -> None:
        begin_s, end_s = speed.dead_s
        if begin_s <= now_s < end_s:
            self._fail(plan, now_s + TIMEOUT_S)
            return
        for probe in plan.probes:
            tiers = bytes(block_hash in self.objects for block_hash in probe.keys.hashes)
            seconds = speed.latency_s if speed.probe_s is None else speed.probe_s
            answer = Presence(0, probe.probe_id, tiers)
            self._add(now_s + seconds, StepReport(presences=(answer,)))
        for fetch in plan.fetches:
            self._fetch(fetch, speed, now_s)
        for spill in plan.spills:
            seconds = len(spill.slot_ids) * SLOT_BYTES / speed.bytes_per_s
            due_s = self._writes.take(now_s, seconds) + speed.latency_s
            report = StepReport((Outcome(0, spill.transfer_id),))
            self._add(due_s, report, spill.keys.hashes)

    def _fail(self, plan: StepPlan, due_s: float) -> None:
        nothing = (Presence(0, p.probe_id, bytes(len(p.keys))) for p in plan.probes)
        failed = (
            Outcome(0, one.transfer_id, FailureReason.TIMED_OUT)
            for one in (*plan.fetches, *plan.spills)
        )
        self._add(due_s, StepReport(tuple(failed), presences=tuple(nothing)))

    def _fetch(self, fetch: TierTransfer, speed: TierSpeed, now_s: float) -> None:
        self.num_planned += len(fetch.keys)
        if self.num_fetched >= speed.num_fetched_max:
            return
        self.num_fetched += 1
        if speed.fails_every and self.num_fetched % speed.fails_every == 0:
            failed = Outcome(0, fetch.transfer_id, FailureReason.TIMED_OUT)
            self._add(now_s + TIMEOUT_S, StepReport((failed,)))
            return
        missing = () if speed.delivers else tuple(range(len(fetch.keys)))
        seconds = (len(fetch.keys) - len(missing)) * SLOT_BYTES / speed.bytes_per_s
        due_s = self._reads.take(now_s, seconds) + speed.latency_s
        outcome = Outcome(0, fetch.transfer_id, None, missing)
        self._add(due_s, StepReport((outcome,)))

    def report(self, now_s: float) -> StepReport | None:
        """Return what has ended by now."""
        report: StepReport | None = None
        while self.next_due_s <= now_s:
            _, _, ended, written = heapq.heappop(self._due)
            self.objects.update(written)
            report = ended if report is None else report.aggregate(ended)
        return report


class TimedEngine(Stepper):
    """The engine.

    `shape`: of the scheduler and the connector; `tokens_per_s`: that a step computes, beyond
    `STEP_S`; `speed`: of its tier; None for none. `last_plan`, `last_report`: what went to the
    worker and came from it in the last step.
    """

    def __init__(self, shape: EngineShape, tokens_per_s: float, speed: TierSpeed | None) -> None:
        self.clock = Clock()  # virtual
        with patch("safe_offload.connector.monotonic", lambda: self.clock.now_s):
            super().__init__(shape)
        self.worker = Worker(speed, shape.num_slots)  # the stand-in
        self.first_token_s: dict[str, float] = {}  # when each request had its first token
        self.last_plan = EMPTY_PLAN
        self.last_report: StepReport | None = None
        self._has_worker = shape.connector == OURS
        self._tokens_per_s = tokens_per_s

    def step(self) -> int:
        """One step of the engine; returns how many tokens it computed."""
        from vllm.v1.outputs import KVConnectorOutput

        scheduled = self.schedule()
        num_tokens: int = scheduled.total_num_scheduled_tokens
        requests = [self.scheduler.requests[name] for name in scheduled.num_scheduled_tokens]
        sampled = [[] if one.is_prefill_chunk else [TOKEN] for one in requests]
        if self._has_worker:
            self.last_plan = scheduled.kv_connector_metadata
            self.worker.take(self.last_plan, self.clock.now_s)
        self.clock.advance(STEP_S + num_tokens / self._tokens_per_s if num_tokens else IDLE_STEP_S)
        if self._has_worker:
            self.last_report = self.worker.report(self.clock.now_s)
        output = KVConnectorOutput(
            finished_recving=set(),
            finished_sending=set(),
            kv_connector_worker_meta=self.last_report,
        )
        for request, tokens in zip(requests, sampled, strict=True):
            if tokens:
                self.first_token_s.setdefault(request.request_id, self.clock.now_s)
        self.update(scheduled, runner_output([*scheduled.num_scheduled_tokens], sampled, output))
        return num_tokens

    def idle_until(self, end_s: float) -> None:
        """Let time pass without requests; steps that would only wait are left out."""
        while self.has_work and self.clock.now_s < end_s:
            self.clock.now_s = max(self.clock.now_s, min(end_s, self.worker.next_due_s))
            if self.clock.now_s < end_s:
                self.step()
        self.clock.now_s = max(self.clock.now_s, end_s)

    def forget_gpu_cache(self) -> None:
        """vLLM forgets its own prefix cache."""
        assert self.scheduler.reset_prefix_cache()
