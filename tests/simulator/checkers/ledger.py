"""A book of all transfers, kept from what crosses between the two processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from safe_offload.protocol import FailureReason, StepPlan, StepReport, Transfer
from tests.simulator.checkers.taps import tap
from tests.simulator.engine_core import EngineCore


@dataclass(slots=True, eq=False)
class Record:
    """One transfer.

    Attributes:
        request: vLLM's object that waits for it, if it is a load.
        planned_at: the engine's step.
        reported: what became of it, by rank, as the rank itself reported it.
        over_at: the step in which the last rank reported.
        told: ranks whose report has reached the scheduler side.
    """

    transfer: Transfer
    is_store: bool
    request: Any
    planned_at: int
    reported: dict[int, FailureReason | None] = field(default_factory=dict)
    over_at: int | None = None
    told: set[int] = field(default_factory=set)

    @property
    def is_over(self) -> bool:
        """Whether no rank copies it any more."""
        return self.over_at is not None

    @property
    def has_failed(self) -> bool:
        """Whether it failed on some rank."""
        return any(reason is not None for reason in self.reported.values())


class Ledger:
    """All transfers of a run.

    Which request a load belongs to is known from the blocks that vLLM gave to the request right
    before the plan was made.
    """

    def __init__(self, core: EngineCore) -> None:
        self._core = core
        self._records: dict[int, Record] = {}
        self._open: dict[int, Record] = {}
        self._loads: dict[int, list[Record]] = {}
        self._told: list[Record] = []
        self._allocated: dict[str, tuple[Any, set[int]]] = {}
        self.bad_slots: set[int] = set()
        """Slots that some rank has told the scheduler side to use no more."""
        self.dead_ranks: set[int] = set()
        """Ranks that have told the scheduler side that they copy no more."""
        self.on_plan: list[Callable[[StepPlan], None]] = []
        tap(core.connector, "update_state_after_alloc", self._see_allocation)
        tap(core.connector, "build_connector_meta", self._see_plan)
        tap(core.connector, "update_connector_output", self._see_output)
        for worker in core.workers:
            tap(worker.connector, "build_connector_worker_meta", self._see_report)

    def _see_allocation(
        self, original: Callable[..., None], request: Any, blocks: Any, num_tokens: int
    ) -> None:
        original(request, blocks, num_tokens)
        if num_tokens > 0:
            ids = {block.block_id for group in blocks.blocks for block in group}
            self._allocated[request.request_id] = (request, ids)

    def _see_plan(self, original: Callable[..., StepPlan], scheduler_output: Any) -> StepPlan:
        plan = original(scheduler_output)
        for see in self.on_plan:  # before its transfers count as open
            see(plan)
        for transfer in plan.loads:
            self._open_record(transfer, False, self._owner(transfer))
        for transfer in (*plan.stores_before_forward, *plan.stores_after_forward):
            self._open_record(transfer, True, None)
        self._allocated.clear()
        return plan

    def _owner(self, transfer: Transfer) -> Any:
        for request, ids in self._allocated.values():
            if set(transfer.block_ids) <= ids:
                return request
        self._core.findings.add(
            "I3", f"load {transfer.transfer_id} writes blocks of no request that waits for it"
        )
        return None

    def _open_record(self, transfer: Transfer, is_store: bool, request: Any) -> None:
        record = Record(transfer, is_store, request, self._core.num_steps)
        if transfer.transfer_id in self._records:
            self._core.findings.add("I3", f"transfer id {transfer.transfer_id} is used twice")
        self._records[transfer.transfer_id] = record
        self._open[transfer.transfer_id] = record
        if request is not None:
            self._loads.setdefault(id(request), []).append(record)

    def _see_report(self, original: Callable[[], StepReport | None]) -> StepReport | None:
        report = original()
        for outcome in report.outcomes if report is not None else ():
            record = self._records[outcome.transfer_id]
            if outcome.rank in record.reported:
                self._core.findings.add(
                    "I3", f"rank {outcome.rank} reports transfer {outcome.transfer_id} twice"
                )
            record.reported[outcome.rank] = outcome.failure
            if len(record.reported) == self._core.shape.num_ranks:
                record.over_at = self._core.num_steps
                self._open.pop(outcome.transfer_id, None)
        return report

    def _see_output(self, original: Callable[[Any], None], output: Any) -> None:
        original(output)
        report = output.kv_connector_worker_meta
        if not isinstance(report, StepReport):
            return
        for bad in report.bad_slots:
            self.bad_slots.update(bad.slot_ids)
        for outcome in report.outcomes:
            record = self._records[outcome.transfer_id]
            if outcome.failure is FailureReason.NOT_RUNNING:
                self.dead_ranks.add(outcome.rank)
            if not record.is_store:
                record.told.add(outcome.rank)
                if len(record.told) == self._core.shape.num_ranks:
                    self._told.append(record)

    def has_heard_of_load(self, request: Any) -> bool:
        """Whether the scheduler side has heard from all ranks that a request's last load ended."""
        loads = self.loads_of(request)
        is_new = request.request_id in self._allocated
        return not is_new and bool(loads) and len(loads[-1].told) == self._core.shape.num_ranks

    def take_over_loads(self) -> list[Record]:
        """Loads of which the scheduler side has heard from all ranks, since the last call."""
        told, self._told = self._told, []
        return told

    def open_stores(self) -> Iterator[Record]:
        """Stores that some rank has not reported."""
        return (record for record in self._open.values() if record.is_store)

    def open_loads(self) -> Iterator[Record]:
        """Loads that some rank has not reported."""
        return (record for record in self._open.values() if not record.is_store)

    def loads_of(self, request: Any) -> list[Record]:
        """All loads of a request, the last one last."""
        return self._loads.get(id(request), [])

    def records(self) -> Iterator[Record]:
        """All transfers so far."""
        return iter(self._records.values())

    def record(self, transfer_id: int) -> Record:
        """The record of a transfer."""
        return self._records[transfer_id]
