"""I5: taking host slots is one atomic step, and running out is a smaller grant."""

from collections.abc import Callable
from typing import Any

from safe_offload.protocol import StepPlan
from safe_offload.scheduler.cache.leases import Lease, LeaseKind
from tests.simulator.checkers.ledger import Ledger, loads_in, writes_of
from tests.simulator.checkers.taps import tap
from tests.simulator.engine_core import EngineCore
from tests.simulator.findings import Finding


class SlotChecker:
    """No slot has two writers, lies outside any rank's memory, or belongs to another owner."""

    def __init__(self, core: EngineCore, ledger: Ledger) -> None:
        self._core = core
        self._ledger = ledger
        self.squeezed: list[Lease | None] = []
        """Slots that another owner has taken, as leases, so that our own checks add up."""
        self._leases = core.connector.side.leases
        tap(core.connector.side.hits.slots, "grant", self._see_grant)
        ledger.on_plan.append(self._see_plan)

    def squeeze(self, count: int) -> bool:
        """Take slots for another owner; return whether there were any."""
        self.squeezed.append(self._leases.grant(LeaseKind.STORE, count))
        return self.squeezed[-1] is not None

    def give_back(self) -> None:
        lease = self.squeezed.pop(0)
        if lease is not None:
            lease.release()

    def spilled(self) -> set[int]:
        """Slots that some rank may still be reading to write them to a tier."""
        records = (record for _, record in self._ledger.open_tier_transfers())
        return {slot for record in records if not record.is_fetch for slot in record.slot_ids}

    def _see_grant(self, original: Callable[..., list[Any]], count: int, *salt: Any) -> list[Any]:
        try:
            slots = original(count, *salt)
        except Exception as error:
            raise Finding("I5", f"asking for {count} slots raised {error!r}") from error
        if len(slots) > max(count, 0):
            raise Finding("I5", f"asked for {count} slots, got {len(slots)}")
        return slots

    def _see_others(self, plan: StepPlan, other: Ledger, taken: dict[int, str]) -> None:
        """What an engine of the same pool writes, nobody reads or writes; what it reads, ..."""
        for record in (*other.open_stores(), *other.open_loads()):
            what = "store" if record.is_store else "load"
            name = f"{what} {record.transfer.transfer_id} of another engine"
            taken.update((slot, name) for slot in record.transfer.slot_ids)
            read = {slot for load in loads_in(plan) for slot in load.slot_ids}
            if record.is_store and not read.isdisjoint(record.transfer.slot_ids):
                raise Finding("I6", f"a load reads what {name} writes")

    def _see_plan(self, plan: StepPlan) -> None:
        leases = [lease for lease in self.squeezed if lease is not None]
        taken = {slot: "somebody else" for lease in leases for slot in lease.slots}
        for record in self._ledger.open_stores():
            name = f"store {record.transfer.transfer_id}"
            taken.update((slot, name) for slot in record.transfer.slot_ids)
        for transfer_id, tier_record in self._ledger.open_tier_transfers():
            name = f"{'fetch' if tier_record.is_fetch else 'spill'} {transfer_id}"
            taken.update((slot, name) for slot in tier_record.slot_ids)
        if self._core.node is not None:
            for other in self._core.node.ledgers_of_others(self._ledger):
                self._see_others(plan, other, taken)
        num_slots = min(worker.device.num_usable_slots for worker in self._core.workers)
        for name, slots in writes_of(plan):
            for slot in slots:
                if not 0 <= slot < num_slots:
                    raise Finding("I5", f"slot {slot} lies outside some rank's usable host memory")
                if slot in self._ledger.bad_slots:
                    raise Finding("I6", f"slot {slot} is used again, whose memory is bad")
                if slot in taken:
                    raise Finding("I5", f"{name} writes slot {slot}, which {taken[slot]} has")
                taken[slot] = name
