"""What happened in a run, line by line, the same in every process."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from safe_offload.protocol import StepPlan, StepReport, Transfer
from safe_offload.sim.checkers.taps import tap

if TYPE_CHECKING:
    from safe_offload.sim.engine_core import EngineCore
    from safe_offload.sim.model_runner import Batch


class Trace:
    """Writes a run down."""

    def __init__(self, core: EngineCore) -> None:
        self._core = core
        self.lines: list[str] = []
        tap(core.connector, "update_connector_output", self._see_output)
        tap(core, "abort", self._see_abort)

    def note(self, line: str) -> None:
        """Write a line."""
        self.lines.append(f"{self._core.num_steps:4} {line}")

    def step(self, batch: Batch | None) -> None:
        """A step has been scheduled."""
        if batch is None:
            return
        scheduled = batch.scheduled
        works = ", ".join(
            f"{work.request_id} {work.start}+{scheduled.num_scheduled_tokens[work.request_id]}"
            for work in batch.works
        )
        line = f"step {batch.number}: {works or 'nothing to compute'}"
        if scheduled.preempted_req_ids:
            line += f"; preempted {' '.join(sorted(scheduled.preempted_req_ids))}"
        if batch.zeroed:
            line += f"; zeroed {_ids(batch.zeroed)}"
        if batch.copies:
            line += f"; copied {batch.copies}"
        self.note(line)
        self._plan(scheduled.kv_connector_metadata)

    def _plan(self, plan: StepPlan) -> None:
        for what, transfers in (
            ("store before", plan.stores_before_forward),
            ("store", plan.stores_after_forward),
            ("load", plan.loads),
        ):
            for transfer in transfers:
                self.note(f"  {what} {_transfer(transfer, what == 'load')}")
        if plan.fences:
            self.note(f"  fence {_ids(plan.fences)}")
        if plan.failures:
            self.note(f"  announce failed loads of {' '.join(plan.failures)}")

    def _see_abort(self, original: Any, request_id: str) -> None:
        self.note(f"abort {request_id}")
        original(request_id)

    def _see_output(self, original: Any, output: Any) -> None:
        report = output.kv_connector_worker_meta
        if isinstance(report, StepReport) and report.outcomes:
            self.note(
                "  reported "
                + ", ".join(
                    f"{o.transfer_id}@{o.rank} {o.failure.value if o.failure else 'done'}"
                    for o in report.outcomes
                )
            )
        before = self._sets(output)
        original(output)
        after = self._sets(output)
        if before or after:
            self.note(f"  ids {before or 'none'} -> {after or 'none'}")

    @staticmethod
    def _sets(output: Any) -> str:
        names = ("finished_recving", "finished_sending", "failed_recving")
        sets = ((name, sorted(getattr(output, name) or ())) for name in names)
        return ", ".join(f"{name} {' '.join(ids)}" for name, ids in sets if ids)


def _transfer(transfer: Transfer, is_load: bool) -> str:
    arrow = "<-" if is_load else "->"
    pairs = zip(transfer.block_ids, transfer.slot_ids, strict=True)
    return f"{transfer.transfer_id}: " + " ".join(f"{b}{arrow}{s}" for b, s in pairs)


def _ids(ids: Any) -> str:
    return " ".join(map(str, ids))
