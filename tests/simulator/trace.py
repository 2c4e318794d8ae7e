"""What happened in a run, line by line, the same in every process.

Beside the lines, which are for readers, a digest covers the same as numbers, request ids and a word
for each kind of event. No name of a class, an enum or a field is in it, so that renaming something
leaves it as it is.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

from safe_offload.protocol import FailureReason, StepPlan, StepReport, Transfer
from tests.simulator.checkers.taps import tap
from tests.simulator.remote import split

if TYPE_CHECKING:
    from tests.simulator.engine_core import EngineCore
    from tests.simulator.model_runner import Batch


ID_SETS = ("finished_recving", "finished_sending", "failed_recving")
NUMBER_OF = {reason: number for number, reason in enumerate(FailureReason, start=1)}


class Trace:
    """Writes a run down.

    `core`: the engine that runs; `lines`: of all engines that are driven together; an attribute
    too; `label`: that each line of this one begins with.
    """

    def __init__(self, core: EngineCore, lines: list[str], label: str = "") -> None:
        self._core = core
        self.lines = lines
        self._label = label
        self._digest = hashlib.sha256()
        tap(core.connector, "update_connector_output", self._see_output)
        tap(core, "abort", self._see_abort)

    @property
    def digest(self) -> str:
        return self._digest.hexdigest()

    def note(self, line: str, kind: str, *facts: object) -> None:
        """Write a line.

        `line`: for readers; not in the digest; `kind`: of what has happened, a word that stays;
        `facts`: numbers, request ids, and tuples of them: what the line says.
        """
        step = self._core.num_steps
        self.lines.append(f"{self._label}{step:4} {line}")
        self._digest.update(repr((step, kind, facts)).encode())

    def step(self, batch: Batch | None) -> None:
        if batch is None:
            return
        scheduled = batch.scheduled
        works = tuple(
            (work.request_id, work.start, scheduled.num_scheduled_tokens[work.request_id])
            for work in batch.works
        )
        preempted = tuple(sorted(scheduled.preempted_req_ids or ()))
        said = ", ".join(f"{request_id} {start}+{count}" for request_id, start, count in works)
        line = f"step {batch.number}: {said or 'nothing to compute'}"
        if preempted:
            line += f"; preempted {' '.join(preempted)}"
        if batch.zeroed:
            line += f"; zeroed {_ids(batch.zeroed)}"
        if batch.copies:
            line += f"; copied {batch.copies}"
        zeroed, copies = tuple(batch.zeroed), tuple(batch.copies)
        self.note(line, "step", batch.number, works, preempted, zeroed, copies)
        plan, remote_plan = split(scheduled.kv_connector_metadata)
        self._plan(plan)
        for what in ("received", "kept") if remote_plan is not None else ():
            for move in getattr(remote_plan, what):
                ids = tuple(tuple(block.block_id for block in table) for table in move.tables)
                line = f"  {what} {move.request_id} {move.start}+{move.end - move.start}: {ids}"
                self.note(line, what, move.request_id, move.start, move.end, ids)

    def _plan(self, plan: StepPlan) -> None:
        for what, transfers in (
            ("store before", plan.stores_before_forward),
            ("store", plan.stores_after_forward),
            ("load", plan.loads),
            ("load in step", plan.loads_in_step),
        ):
            for transfer in transfers:
                self.note(
                    f"  {what} {_transfer(transfer, what.startswith('load'))}",
                    what,
                    transfer.transfer_id,
                    tuple(transfer.block_ids),
                    tuple(transfer.slot_ids),
                )
        for probe in plan.probes:
            facts = (probe.probe_id, tuple(probe.keys.group_ids), len(set(probe.keys.hashes)))
            self.note(f"  probe {probe.probe_id}: {len(probe.keys)} keys", "probe", *facts)
        for what, tier_transfers in (("fetch", plan.fetches), ("spill", plan.spills)):
            for tier_transfer in tier_transfers:
                transfer_id, slots = tier_transfer.transfer_id, tuple(tier_transfer.slot_ids)
                line = f"  {what} {transfer_id}: slots {_ids(slots)}"
                self.note(line, what, transfer_id, tuple(tier_transfer.keys.group_ids), slots)
        if plan.fences:
            self.note(f"  fence {_ids(plan.fences)}", "fence", tuple(plan.fences))
        if plan.failures:
            ids = tuple(plan.failures)
            self.note(f"  announce failed loads of {' '.join(ids)}", "announce", ids)

    def _see_abort(self, original: Any, request_id: str) -> None:
        self.note(f"abort {request_id}", "abort", request_id)
        original(request_id)

    def _see_output(self, original: Any, output: Any) -> None:
        report = output.kv_connector_worker_meta
        if isinstance(report, StepReport) and report.outcomes:
            self.note(
                "  reported "
                + ", ".join(
                    f"{o.transfer_id}@{o.rank} {o.failure.value if o.failure else 'done'}"
                    for o in report.outcomes
                ),
                "reported",
                tuple(
                    (o.transfer_id, o.rank, NUMBER_OF[o.failure] if o.failure else 0)
                    for o in report.outcomes
                ),
            )
            missing = {(o.transfer_id, o.rank): o.missing for o in report.outcomes if o.missing}
            for (transfer_id, rank), places in missing.items():
                line = f"  of {transfer_id}@{rank} places {_ids(places)} are missing"
                self.note(line, "missing", transfer_id, rank, places)
        for presence in report.presences if isinstance(report, StepReport) else ():
            line = f"  probe {presence.probe_id}@{presence.rank}: {_ids(presence.tiers)}"
            self.note(line, "present", presence.probe_id, presence.rank, tuple(presence.tiers))
        before = _id_sets(output)
        original(output)
        after = _id_sets(output)
        if any(before) or any(after):
            line = f"  ids {_said(before) or 'none'} -> {_said(after) or 'none'}"
            self.note(line, "ids", before, after)


def _id_sets(output: Any) -> tuple[tuple[str, ...], ...]:
    return tuple(tuple(sorted(getattr(output, name) or ())) for name in ID_SETS)


def _said(sets: tuple[tuple[str, ...], ...]) -> str:
    named = zip(ID_SETS, sets, strict=True)
    return ", ".join(f"{name} {' '.join(ids)}" for name, ids in named if ids)


def _transfer(transfer: Transfer, is_load: bool) -> str:
    arrow = "<-" if is_load else "->"
    pairs = zip(transfer.block_ids, transfer.slot_ids, strict=True)
    return f"{transfer.transfer_id}: " + " ".join(f"{b}{arrow}{s}" for b, s in pairs)


def _ids(ids: Any) -> str:
    return " ".join(map(str, ids))
