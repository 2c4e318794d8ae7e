"""A book of all transfers, kept from what crosses between the two processes."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from safe_offload.protocol import (
    FailureReason,
    Keys,
    Outcome,
    StepPlan,
    StepReport,
    TierTransfer,
    Transfer,
)
from tests.simulator.checkers.taps import tap
from tests.simulator.engine_core import EngineCore


def writes_of(plan: StepPlan) -> Iterator[tuple[str, Sequence[int]]]:
    """What writes host slots, by name, and which."""
    for store in (*plan.stores_before_forward, *plan.stores_after_forward):
        yield f"store {store.transfer_id}", store.slot_ids
    for fetch in plan.fetches:
        yield f"fetch {fetch.transfer_id}", fetch.slot_ids


def loads_in(plan: StepPlan) -> tuple[Transfer, ...]:
    """What reads host slots to fill GPU blocks."""
    return (*plan.loads, *plan.loads_in_step)


@dataclass(slots=True, eq=False)
class Record:
    """One transfer."""

    transfer: Transfer
    is_store: bool
    request: Any  # vLLM's object that waits for it, if it is a load
    is_in_step: bool  # a load that nothing waits for but the forward of its step
    # What became of it, by rank, as the rank itself reported it.
    reported: dict[int, FailureReason | None] = field(default_factory=dict)
    over_at: int | None = None  # the step in which the last rank reported
    told: set[int] = field(default_factory=set)  # ranks whose report has reached the scheduler side

    @property
    def is_over(self) -> bool:
        return self.over_at is not None

    @property
    def has_failed(self) -> bool:
        return any(reason is not None for reason in self.reported.values())


@dataclass(slots=True, eq=False)
class TierRecord:
    """One fetch, spill or probe."""

    keys: Keys  # what it is about
    slot_ids: tuple[int, ...]  # what it writes or reads; none of a probe
    is_fetch: bool
    # What became of it, by rank, as the rank itself reported it; None of a probe.
    reported: dict[int, Outcome | None] = field(default_factory=dict)
    told: set[int] = field(default_factory=set)  # ranks whose report has reached the scheduler side

    @property
    def num_good(self) -> int:
        """How many of its objects are in place on every rank that has reported."""
        outcomes = [outcome for outcome in self.reported.values() if outcome is not None]
        if any(outcome.failure for outcome in outcomes):
            return 0
        return len(self.keys) - len({place for one in outcomes for place in one.missing})


class Ledger:
    """All transfers of a run, and all questions to tiers.

    Which request a load belongs to is known from the blocks that vLLM gave to the request right
    before the plan was made.
    """

    def __init__(self, core: EngineCore) -> None:
        self._core = core
        self._records: dict[int, Record] = {}
        self._open: dict[int, Record] = {}
        self._loads: dict[int, list[Record]] = {}
        self._told: list[Record] = []
        self.fetches: dict[int, TierRecord] = {}
        self.spills: dict[int, TierRecord] = {}
        self.probes: dict[int, TierRecord] = {}
        self._open_probes: dict[int, TierRecord] = {}
        self._tier_news_s = 0.0
        """When a fetch or a spill was planned, or the last rank's report of one came."""
        self._were_tiers_silent = False
        self._tier_timeout_s = max((tier.timeout_s for tier in core.config.tiers), default=0.0)
        self._open_tiers: dict[int, TierRecord] = {}
        """What the scheduler side has not heard of from all ranks."""
        self._allocated: dict[str, tuple[Any, set[int]]] = {}
        self.bad_slots: set[int] = set()
        """Slots that some rank has told the scheduler side to use no more."""
        self.dead_ranks: set[int] = set()
        """Ranks that have told the scheduler side that they copy no more."""
        self.on_plan: list[Callable[[StepPlan], None]] = []
        if core.node is not None:
            core.node.ledgers.append(self)
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
        if self._core.node is not None:
            for _, slots in writes_of(plan):
                self._core.node.written(self._core, slots)
        for see in self.on_plan:  # before its transfers count as open
            see(plan)
        for transfer in loads_in(plan):
            is_in_step = transfer in plan.loads_in_step
            self._open_record(transfer, False, self._owner(transfer), is_in_step=is_in_step)
        for transfer in (*plan.stores_before_forward, *plan.stores_after_forward):
            self._open_record(transfer, True, None)
        for probe in plan.probes:
            if probe.probe_id in self.probes:
                self._core.findings.add("I3", f"probe id {probe.probe_id} is used twice")
            record = self.probes[probe.probe_id] = TierRecord(probe.keys, (), is_fetch=False)
            self._open_probes[probe.probe_id] = record
        for fetch in plan.fetches:
            self._open_tier_transfer(fetch, is_fetch=True)
        for spill in plan.spills:
            self._open_tier_transfer(spill, is_fetch=False)
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

    def _open_record(
        self, transfer: Transfer, is_store: bool, request: Any, *, is_in_step: bool = False
    ) -> None:
        record = Record(transfer, is_store, request, is_in_step)
        if transfer.transfer_id in self._records:
            self._core.findings.add("I3", f"transfer id {transfer.transfer_id} is used twice")
        self._records[transfer.transfer_id] = record
        self._open[transfer.transfer_id] = record
        if request is not None:
            self._loads.setdefault(id(request), []).append(record)

    def _open_tier_transfer(self, transfer: TierTransfer, *, is_fetch: bool) -> None:
        transfer_id = transfer.transfer_id
        record = TierRecord(transfer.keys, tuple(transfer.slot_ids), is_fetch)
        if transfer_id in self._records or transfer_id in self.fetches | self.spills:
            self._core.findings.add("I3", f"transfer id {transfer_id} is used twice")
        (self.fetches if is_fetch else self.spills)[transfer_id] = record
        self._note_tier_news()
        self._open_tiers[transfer_id] = record

    def _see_report(self, original: Callable[[], StepReport | None]) -> StepReport | None:
        report = original()
        for presence in report.presences if report is not None else ():
            self._see_tier_report(self.probes[presence.probe_id], presence.rank, None)
        for outcome in report.outcomes if report is not None else ():
            tier_record = self._tier_record(outcome.transfer_id)
            if tier_record is not None:
                self._see_tier_report(tier_record, outcome.rank, outcome)
                continue
            record = self._records[outcome.transfer_id]
            if outcome.rank in record.reported:
                self._core.findings.add(
                    "I3", f"rank {outcome.rank} reports transfer {outcome.transfer_id} twice"
                )
            record.reported[outcome.rank] = outcome.failure
            if len(record.reported) == self._core.shape.num_ranks:
                record.over_at = self._core.num_steps
                self._open.pop(outcome.transfer_id, None)
        if report is not None and report.later is not None:
            later: Any = partial(self._see_report, report.later)
            report = replace(report, later=later)
        return report

    def _see_output(self, original: Callable[[Any], None], output: Any) -> None:
        original(output)
        report = output.kv_connector_worker_meta
        if not isinstance(report, StepReport):
            return
        for bad in report.bad_slots:
            self.bad_slots.update(bad.slot_ids)
        for presence in report.presences:
            self._tell(self._open_probes, presence.probe_id, presence.rank)
        for outcome in report.outcomes:
            if outcome.failure is FailureReason.NOT_RUNNING:
                self.dead_ranks.add(outcome.rank)
            if self._tier_record(outcome.transfer_id) is not None:
                self._tell(self._open_tiers, outcome.transfer_id, outcome.rank)
                continue
            record = self._records[outcome.transfer_id]
            if not record.is_store:
                record.told.add(outcome.rank)
                if len(record.told) == self._core.shape.num_ranks:
                    self._told.append(record)

    def _tier_record(self, transfer_id: int) -> TierRecord | None:
        return self.fetches.get(transfer_id) or self.spills.get(transfer_id)

    def _see_tier_report(self, record: TierRecord, rank: int, outcome: Outcome | None) -> None:
        if rank in record.reported:
            self._core.findings.add("I3", f"rank {rank} reports twice to tiers: {outcome}")
        record.reported[rank] = outcome

    def _tell(self, open_records: dict[int, TierRecord], number: int, rank: int) -> None:
        record = open_records.get(number)
        if record is not None:
            record.told.add(rank)
            if len(record.told) == self._core.shape.num_ranks:
                del open_records[number]
                self._note_tier_news()

    def _note_tier_news(self) -> None:
        now_s = self._core.clock.now_s
        self._were_tiers_silent |= now_s - self._tier_news_s > self._tier_timeout_s
        self._tier_news_s = now_s

    def have_tiers_been_silent(self) -> bool:
        """Whether for longer than they may take nothing was heard of a fetch or a spill."""
        silent_s = self._core.clock.now_s - self._tier_news_s
        return self._were_tiers_silent or silent_s > self._tier_timeout_s

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
        return (record for record in self._open.values() if record.is_store)

    def open_loads(self) -> Iterator[Record]:
        return (record for record in self._open.values() if not record.is_store)

    def open_tier_transfers(self) -> Iterator[tuple[int, TierRecord]]:
        """Fetches and spills of which the scheduler side has not heard from all ranks."""
        return iter(self._open_tiers.items())

    def asks_tiers_for(self, hashes: set[bytes]) -> bool:
        """Whether an answer of a rank to a probe or a fetch of one of these is still to come.

        Blocks that are larger than those of the hashes are known by several, joined: the last one
        says where they end.
        """
        fetches = (record for record in self._open_tiers.values() if record.is_fetch)
        records = (*self._open_probes.values(), *fetches)
        return any(block_hash[-32:] in hashes for r in records for block_hash in r.keys.hashes)

    def loads_of(self, request: Any) -> list[Record]:
        return self._loads.get(id(request), [])

    def records(self) -> Iterator[Record]:
        return iter(self._records.values())

    def record(self, transfer_id: int) -> Record:
        return self._records[transfer_id]
