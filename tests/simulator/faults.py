"""Faults beside copies: what they do and when."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from safe_offload.protocol import StepReport
from safe_offload.scheduler.features.tenants import TenantShares
from tests.scheduler.features import feature_of
from tests.simulator.device import CopyFault
from tests.simulator.events import Fault, FaultKind
from tests.simulator.step_loads import StepLoads
from tests.simulator.tenants import TEXTS
from tests.simulator.tiers import TierFault

if TYPE_CHECKING:
    from tests.simulator.checkers import Checkers
    from tests.simulator.engine_core import EngineCore


class Faults:
    """Lets faults happen.

    `core`: where; `checkers`: keep the books of squeezed slots; `faults`: what; `ids`: request ids
    that may turn up where they do not belong.
    """

    def __init__(
        self, core: EngineCore, checkers: Checkers, faults: list[Fault], ids: list[str]
    ) -> None:
        self._core = core
        self._injected = core.injected
        self._slots = checkers.slots
        self._contents = checkers.contents
        self._ids = ids
        self._by_step = [fault for fault in faults if isinstance(fault.kind, FaultKind)]
        self._give_back_at: list[int] = []
        self._withheld: dict[int, tuple[int, list[StepReport]]] = {}
        self._due: list[Fault] = []
        for fault in faults:
            if isinstance(fault.kind, CopyFault):
                core.workers[fault.rank].device.faults[fault.number] = fault.kind
            elif isinstance(fault.kind, TierFault):
                core.tiers[fault.rank].faults.planned.append((fault.number, fault.kind))
        core.mutate_outputs.append(self._mutate)
        self._step_loads = StepLoads(core, checkers)

    @property
    def is_pending(self) -> bool:
        """Whether something that was taken is still to be given back."""
        return bool(self._give_back_at)

    def rest(self) -> list[Fault]:
        """What has not gone wrong yet, of what goes by steps."""
        return list(self._by_step)

    def stop(self) -> None:
        """Nothing goes wrong any more; what has died stays dead."""
        self._by_step.clear()
        self._due.clear()
        self._step_loads.stop()
        self._withheld = {rank: (0, reports) for rank, (_, reports) in self._withheld.items()}
        for _ in self._give_back_at:
            self._slots.give_back()
        self._give_back_at.clear()
        for worker in self._core.workers:
            worker.device.recover()
            self._core.tiers[worker.rank].recover()

    def before_step(self, now: int) -> None:
        if self._give_back_at and self._give_back_at[0] <= now:
            self._give_back_at.pop(0)
            self._slots.give_back()
        for fault in [fault for fault in self._by_step if fault.number < now]:
            self._by_step.remove(fault)
            if fault.kind is FaultKind.LOOP_DIES:
                self._core.workers[fault.rank].loop.kill()
                self._injected[fault.kind.value] += 1
            elif fault.kind is FaultKind.LOADS_FAIL:
                self._core.workers[fault.rank].device.fails_loads = True
            elif fault.kind is FaultKind.BREAK:
                self._core.workers[fault.rank].device.is_broken = True
            elif fault.kind is FaultKind.FLIP:
                self._flip(fault)
            elif fault.kind is FaultKind.TENANTS:
                feature_of(self._core.connector.side, TenantShares).file.use(
                    TEXTS[fault.amount % len(TEXTS)]
                )
                self._injected[fault.kind.value] += 1
            elif fault.kind is FaultKind.DIE:
                span = self._core.chance.choose((4, 40, 400), "span", fault.name)
                left = 1 + self._core.chance.below(span, "fences", fault.name)
                self._core.num_fences_left = left
            elif fault.kind is FaultKind.SPOIL:
                self._step_loads.expect()
            elif fault.kind is FaultKind.SQUEEZE:
                self._injected[fault.kind.value] += self._slots.squeeze(fault.amount)
                last = self._give_back_at[-1] if self._give_back_at else 0
                self._give_back_at.append(max(last, now + fault.amount))
            else:
                self._due.append(fault)

    def _flip(self, fault: Fault) -> None:
        """Flip a bit of what is kept, if anything is.

        What is being stored has no checksum yet, and that of what is being spilled was compared.
        """
        spilled = self._slots.spilled()
        slots = [slot for slot in self._contents.kept_slots() if slot not in spilled]
        if not slots:
            return
        chance = self._core.chance
        slot = chance.choose(slots, "flip", fault.name)
        words = self._core.workers[fault.rank].device.memory.host[slot]
        word = chance.below(len(words), "flip", fault.name, "word")
        self._injected[fault.kind.value] += 1
        words[word] = (words[word] or 0) ^ 1 << chance.below(60, "flip", fault.name, "bit")
        self._contents.flipped(slot)

    def _mutate(self, number: int, outputs: list[Any]) -> None:
        due, self._due = self._due, []
        for fault in due:
            if fault.kind is FaultKind.FOREIGN_IDS:
                self._add_foreign_ids(fault, outputs)
            elif fault.kind is FaultKind.REPORT_LATE and fault.rank not in self._withheld:
                self._withheld[fault.rank] = (number + fault.amount, [])
            elif fault.kind is FaultKind.REPORT_TWICE:
                report = outputs[fault.rank].kv_connector_worker_meta
                if report is None:
                    self._due.append(fault)  # when there is something to report
                else:
                    self._injected[fault.kind.value] += 1
                    outputs[fault.rank].kv_connector_worker_meta = report.aggregate(report)
        for rank, output in enumerate(outputs):
            self._withhold(rank, number, output)

    def _withhold(self, rank: int, number: int, output: Any) -> None:
        if rank not in self._withheld:
            return
        until, reports = self._withheld[rank]
        if output.kv_connector_worker_meta is not None:
            self._injected[FaultKind.REPORT_LATE.value] += 1
            reports.append(output.kv_connector_worker_meta)
        report: StepReport | None = None
        if number >= until:
            del self._withheld[rank]
            for one in reports:
                report = one if report is None else report.aggregate(one)
        output.kv_connector_worker_meta = report

    def _add_foreign_ids(self, fault: Fault, outputs: list[Any]) -> None:
        chance = self._core.chance
        for index in range(1 + fault.amount % 3):
            name = ("foreign", fault.name, index)
            live = sorted(self._core.scheduler.requests)
            is_live = bool(live) and chance.happens(0.5, *name, "live")
            request_id = chance.choose(live if is_live else self._ids, *name)
            is_sent = chance.happens(0.4, *name, "sent")
            everywhere = chance.happens(0.6, *name, "everywhere")
            ranks = range(len(outputs)) if everywhere else [fault.rank]
            self._injected[fault.kind.value] += 1
            for rank in ranks:
                key = "finished_sending" if is_sent else "finished_recving"
                setattr(outputs[rank], key, {*(getattr(outputs[rank], key) or ()), request_id})
