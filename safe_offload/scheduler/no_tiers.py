"""What stands in the place of tiers where none are configured."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from safe_offload.scheduler.tiers.tiers import NO_GAUGES, NO_MESSAGES, TierMessages

if TYPE_CHECKING:
    from safe_offload.scheduler.cache.leases import Lease


def _ignore(*_: object, **__: object) -> None:
    pass


class NoTiers:
    """Nothing is looked up, fetched or spilled: methods and fields of `Tiers`, as the planner's."""

    has_to_plan, plan_again_s, has_work = False, math.inf, False
    num_active = 0
    leases: Sequence[Lease] = ()
    fetches: Collection[object] = ()
    spills: Collection[object] = ()
    private_requests: Collection[object] = ()
    see = matched = scheduled = end = staticmethod(_ignore)
    note_private = sent = settle = stored = staticmethod(_ignore)
    stop = stand_alone = reset = give_up = check_invariants = staticmethod(_ignore)

    def waits(self, *_: object) -> bool:
        """Return whether a request is to wait."""
        return False

    def plan(self, now_s: float) -> TierMessages:
        """Return what this step tells the workers."""
        return NO_MESSAGES

    def note(self, outcome: object) -> bool:
        """Return whether a rank has reported a fetch or a spill."""
        return False

    def gauges(self) -> dict[str, float]:
        """Return how tiers stand."""
        return NO_GAUGES
