"""What stands in the place of tiers where none are configured."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from safe_offload.scheduler.tiers.tiers import NO_GAUGES, NO_MESSAGES, TierMessages

if TYPE_CHECKING:
    from safe_offload.protocol import Outcome, StepReport
    from safe_offload.scheduler.cache.leases import Lease
    from safe_offload.scheduler.pending import Store
    from safe_offload.scheduler.requests import RequestState


class NoTiers:
    """Nothing is looked up, fetched or spilled. See `Tiers`, whose methods these are."""

    has_to_plan, plan_again_s = False, math.inf
    has_work = False
    num_active = 0
    leases: Sequence[Lease] = ()
    private_requests: Collection[object] = ()
    fetches: Collection[object] = ()
    spills: Collection[object] = ()

    def see(self, state: RequestState, *, may_read: bool) -> None:
        """A request is new."""

    def waits(self, state: RequestState, num_computed_tokens: int, now_s: float) -> bool:
        """Whether a request that vLLM asks about is to wait."""
        return False

    def matched(self, state: RequestState) -> None:
        """vLLM was told of the hit of a request."""

    def scheduled(self, state: RequestState, *, is_running: bool) -> None:
        """vLLM has given a request blocks."""

    def end(self, state: RequestState) -> None:
        """A request has ended."""

    def note_private(self) -> None:
        """Blocks of private requests may be stored in this step."""

    def plan(self, now_s: float) -> TierMessages:
        """Return what this step tells the workers."""
        return NO_MESSAGES

    def sent(self, now_s: float) -> None:
        """The workers are told of what `plan` has returned."""

    def note(self, outcome: Outcome) -> bool:
        """Whether a rank has reported a fetch or a spill."""
        return False

    def settle(self, report: StepReport) -> None:
        """The workers have reported."""

    def stored(self, store: Store) -> None:
        """A store has settled."""

    def stop(self) -> None:
        """Look up and spill nothing more of what was wanted until now."""

    def stand_alone(self, doubts: Sequence[str]) -> None:
        """Use only what this engine has written itself."""

    def reset(self, *, is_vouched_for: bool = True) -> None:
        """The weights may be others."""

    def give_up(self) -> None:
        """After an internal error: only what the workers read or write goes on."""

    def gauges(self) -> dict[str, float]:
        """Return how tiers stand."""
        return NO_GAUGES

    def check_invariants(self) -> None:
        """Nothing can be wrong."""
