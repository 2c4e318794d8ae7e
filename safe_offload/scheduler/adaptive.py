"""A planner whose host slots are evicted in the order that would have hit most lately."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from safe_offload.scheduler.eviction.contest import NUM_SAMPLED_MIN, RATE_MAX, START, Contest
from safe_offload.scheduler.planner import Planner
from safe_offload.scheduler.requests import Phase

if TYPE_CHECKING:
    from vllm.v1.request import Request

    from safe_offload.scheduler.requests import RequestState

logger = logging.getLogger(f"vllm.{__name__}")


class AdaptivePlanner(Planner):
    """See `Planner`. Its own state: the contest of the orders.

    Where no KV cache group is of attention without gaps, or the host holds few blocks, the order
    stays as it is.
    """

    def __init__(self, *what: Any, **how: Any) -> None:
        super().__init__(*what, **how)
        self.contest: Contest | None = None
        self._ranks.label("eviction_order", START)

    def _end(self, state: RequestState) -> None:
        if state.phase is not Phase.FINISHED and not state.limits.leaves_nothing:
            self._watch(state.request)
        super()._end(state)

    def _watch(self, request: Request) -> None:
        hits, contest = self.hits, self.contest or self._make_contest()
        if contest is None:
            return
        before, slots = contest.order, hits.slots
        num_asked = (request.num_prompt_tokens - 1) // hits.geometry.hash_block_size
        contest.see(request.block_hashes, num_asked, slots.now_s, slots.num_empty)
        if contest.order is not before:
            slots.prefer(contest.order)
            self._ranks.label("eviction_order", contest.order)
            self.has_changed = True
            logger.info(
                "The host cache now evicts in the order %s, not %s, which would have hit less on "
                "a sample of requests.",
                contest.order,
                before,
            )

    def _make_contest(self) -> Contest | None:
        per_hash = self.hits.boundaries.blocks_per_hash
        num_slots = round(self.hits.slots.num_slots / per_hash) if per_hash else 0
        if num_slots * RATE_MAX >= NUM_SAMPLED_MIN:
            may_refuse = not (self.options.tiers or self.options.is_lazy)
            self.contest = Contest(num_slots, may_refuse=may_refuse, rate_max=RATE_MAX)
        return self.contest
