"""The order in which host slots are evicted: the one that would have hit most lately."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from safe_offload.scheduler.eviction.contest import NUM_SAMPLED_MIN, RATE_MAX, START, Contest
from safe_offload.scheduler.feature import Feature

if TYPE_CHECKING:
    from safe_offload.scheduler.planner import Planner
    from safe_offload.scheduler.requests import RequestState

logger = logging.getLogger(f"vllm.{__name__}")


class EvictionOrder(Feature):
    """Its state: the contest of the orders.

    Where no KV cache group is of attention without gaps, or the host holds few blocks, the order
    stays as it is.
    """

    def __init__(self, planner: Planner) -> None:
        self._planner = planner
        self.contest: Contest | None = None
        planner.ranks.label("eviction_order", START)

    def ended(self, state: RequestState) -> None:
        """See `Feature`; of what never ran, or may not be stored, no order would hold anything."""
        hits, contest = self._planner.hits, self.contest or self._make_contest()
        num_kept = state.num_kept_tokens // hits.geometry.hash_block_size
        if contest is None or not num_kept:
            return
        before, slots, request = contest.order, hits.slots, state.request
        num_usable = (request.num_prompt_tokens - 1) // hits.geometry.hash_block_size
        num_asked = min(num_usable, num_kept) if state.may_hit else 0
        contest.see(request.block_hashes[:num_kept], num_asked, slots.now_s, slots.num_empty)
        if contest.order is not before:
            slots.prefer(contest.order)
            self._planner.ranks.label("eviction_order", contest.order)
            self._planner.note_change()
            logger.info(
                "The host cache now evicts in the order %s, not %s, which would have hit less on "
                "a sample of requests.",
                contest.order,
                before,
            )

    def _make_contest(self) -> Contest | None:
        hits, options = self._planner.hits, self._planner.options
        per_hash = hits.boundaries.blocks_per_hash
        num_slots = round(hits.slots.num_slots / per_hash) if per_hash else 0
        if num_slots * RATE_MAX >= NUM_SAMPLED_MIN:
            may_refuse = options.may_refuse and not options.is_lazy
            self.contest = Contest(num_slots, may_refuse=may_refuse, rate_max=RATE_MAX)
        return self.contest
