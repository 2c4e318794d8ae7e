"""I11: what tiers fill, and what waits for it, is a bounded share of the host's slots."""

from safe_offload.protocol import StepPlan
from safe_offload.scheduler.cache.leases import LeaseKind
from tests.simulator.checkers.ledger import Ledger
from tests.simulator.engine_core import EngineCore
from tests.simulator.findings import Finding

SHARE = 4
"""Look-ups hold at most one slot in this many."""


class TierChecker:
    """Counts the slots of fetches that are not over, and those that wait for their requests."""

    def __init__(self, core: EngineCore, ledger: Ledger) -> None:
        self._core = core
        self._ledger = ledger
        self.num_slots_held_max = 0
        ledger.on_plan.append(self._see_plan)

    def _see_plan(self, plan: StepPlan) -> None:
        held = {slot for fetch in plan.fetches for slot in fetch.slot_ids}
        for _, record in self._ledger.open_tier_transfers():
            if record.is_fetch:
                held.update(record.slot_ids)
        for lease in self._core.connector.side.leases:
            if lease.kind is LeaseKind.FETCH:
                held.update(lease.slots)
        self.num_slots_held_max = max(self.num_slots_held_max, len(held))
        num_usable = self._core.connector.side.hits.slots.num_usable
        if len(held) > num_usable // SHARE:
            raise Finding(
                "I11",
                f"look-ups hold {len(held)} slots, {num_usable // SHARE} of {num_usable} may be",
            )
