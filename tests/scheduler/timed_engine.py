"""An engine on virtual time, whose steps and copies take what they are told to take.

vLLM's scheduler and the scheduler side of our connector are real. There is no model, no memory and
no worker: a stand-in takes each plan and reports what has ended by then. Its tier takes what is
written, and has nothing.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass, field
from unittest.mock import patch

from safe_offload.protocol import EMPTY_PLAN, Capacity, Outcome, Presence, StepPlan, StepReport
from tests.simulator.stepper import Stepper
from tests.simulator.virtual_loop import Clock
from tests.simulator.vllm_setup import EngineShape, runner_output

STEP_S = 0.005
"""That a step takes which computes next to nothing."""
IDLE_STEP_S = 0.001
"""vLLM sleeps that long between steps without tokens."""
TOKENS_PER_S = 10_000
COPY_BYTES_PER_S = 20e9
LATENCY_S = 0.001
SLOT_BYTES = 2 << 20
TOKEN = 7


@dataclass(slots=True)
class Worker:
    """Stands in for the one worker: copies one after another, and writes to its tier."""

    num_slots: int
    _due: list[tuple[float, int, StepReport]] = field(default_factory=list)
    _num_reports: int = 0
    _free_s: float = 0.0

    def __post_init__(self) -> None:
        self._add(0.0, StepReport(capacities=(Capacity(0, self.num_slots),)))

    def _add(self, due_s: float, report: StepReport) -> None:
        heapq.heappush(self._due, (due_s, self._num_reports, report))
        self._num_reports += 1

    @property
    def next_due_s(self) -> float:
        """Return when something ends next."""
        return self._due[0][0] if self._due else math.inf

    def take(self, plan: StepPlan, now_s: float) -> None:
        """Begin what a plan tells."""
        stores = (*plan.stores_before_forward, *plan.stores_after_forward)
        for transfer in (*plan.loads, *stores, *plan.spills):
            seconds = len(transfer.slot_ids) * SLOT_BYTES / COPY_BYTES_PER_S
            self._free_s = max(self._free_s, now_s) + seconds
            self._add(self._free_s + LATENCY_S, StepReport((Outcome(0, transfer.transfer_id),)))
        for probe in plan.probes:
            nothing = Presence(0, probe.probe_id, bytes(len(probe.keys)))
            self._add(now_s + LATENCY_S, StepReport(presences=(nothing,)))

    def report(self, now_s: float) -> StepReport | None:
        """Return what has ended by now."""
        report: StepReport | None = None
        while self.next_due_s <= now_s:
            _, _, ended = heapq.heappop(self._due)
            report = ended if report is None else report.aggregate(ended)
        return report


class TimedEngine(Stepper):
    """The engine. `last_plan`, `last_report`: what the worker got and told in the last step."""

    def __init__(self, shape: EngineShape) -> None:
        self.clock = Clock()  # virtual
        with patch("safe_offload.connector.monotonic", lambda: self.clock.now_s):
            super().__init__(shape)
        self.worker = Worker(shape.num_slots)
        self.last_plan = EMPTY_PLAN
        self.last_report: StepReport | None = None

    def step(self) -> int:
        """One step of the engine; returns how many tokens it computed."""
        from vllm.v1.outputs import KVConnectorOutput

        scheduled = self.schedule()
        num_tokens: int = scheduled.total_num_scheduled_tokens
        requests = [self.scheduler.requests[name] for name in scheduled.num_scheduled_tokens]
        sampled = [[] if one.is_prefill_chunk else [TOKEN] for one in requests]
        self.last_plan = scheduled.kv_connector_metadata
        self.worker.take(self.last_plan, self.clock.now_s)
        self.clock.advance(STEP_S + num_tokens / TOKENS_PER_S if num_tokens else IDLE_STEP_S)
        self.last_report = self.worker.report(self.clock.now_s)
        output = KVConnectorOutput(
            finished_recving=set(),
            finished_sending=set(),
            kv_connector_worker_meta=self.last_report,
        )
        self.update(scheduled, runner_output([*scheduled.num_scheduled_tokens], sampled, output))
        return num_tokens

    def idle_until(self, end_s: float) -> None:
        """Let time pass without requests; steps that would only wait are left out."""
        while self.has_work and self.clock.now_s < end_s:
            self.clock.now_s = max(self.clock.now_s, min(end_s, self.worker.next_due_s))
            if self.clock.now_s < end_s:
                self.step()
        self.clock.now_s = max(self.clock.now_s, end_s)
