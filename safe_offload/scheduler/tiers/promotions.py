"""Promotions: starts the fetches of requests whose probes are answered, if they pay and fit."""

from __future__ import annotations

from typing import TYPE_CHECKING

from safe_offload.observe.counters import Count
from safe_offload.scheduler.cache.leases import LeaseKind
from safe_offload.scheduler.loads.cost import Offer, TierCosts
from safe_offload.scheduler.tiers.tiered_hits import Stage

if TYPE_CHECKING:
    from safe_offload.scheduler.pending import Fetch
    from safe_offload.scheduler.tiers.context import TierContext
    from safe_offload.scheduler.tiers.fetches import Fetches
    from safe_offload.scheduler.tiers.lookups import LookUp, LookUps
    from safe_offload.scheduler.tiers.tiered_hits import Present, TieredHit, TieredHits


LOOKED_AT_MAX = 1 << 15
"""Maximum number of blocks checked per step, beyond the first request: some 20 ms."""


class Promotions:
    """Starts fetches; it has no state between steps. Bound: an entry for each tier."""

    def __init__(
        self,
        context: TierContext,
        costs: TierCosts,
        tiered_hits: TieredHits,
        lookups: LookUps,
        fetches: Fetches,
    ) -> None:
        self._hits = context.hits
        self._leases = context.leases
        self._counters = context.counters
        self._waits_s = [config.wait_s for config in context.configs]
        self._costs = costs
        self._tiered_hits = tiered_hits
        self._lookups = lookups
        self._fetches = fetches

    def begin(self, generation: str) -> None:
        """Start fetches, first for requests that vLLM has asked about, then in order of arrival."""
        wanting = sorted(
            (lookup for user in self._lookups.wanting if (lookup := user.lookup) is not None),
            key=lambda lookup: (not lookup.is_asked, lookup.number),
        )
        num_left = LOOKED_AT_MAX
        for lookup in wanting:
            if not lookup.is_roomless or self._fetches.num_slots_left(lookup.user) > 0:
                self._begin_for(lookup, generation)
                num_left -= len(lookup.user.request.block_hashes)
                if num_left <= 0:
                    return

    def _begin_for(self, lookup: LookUp, generation: str) -> None:
        """Fetch the blocks of a request from tiers, if that pays, as far as there is room."""
        user, num_computed_tokens = lookup.user, lookup.num_computed_tokens
        hashes, present = user.request.block_hashes, self._present(lookup)
        end_max = lookup.end_max(num_computed_tokens)
        hit = self._tiered_hits.find(hashes, num_computed_tokens, end_max, present)
        first_token = self._lookups.first_missing(user, num_computed_tokens, end_max)
        if hit is None or not self._pays(lookup, hit, first_token):
            self._lookups.finish(lookup)
            return
        # The host's part of it must not go for the rest; from now on it is the last to go.
        held = None
        num_wanted = len(hit.blocks)
        if num_wanted > self._hits.slots.num_empty:
            held = self._leases.lease(LeaseKind.FETCH, list(dict.fromkeys(hit.slots)))
        room = max(0, self._fetches.num_slots_left(user))
        while hit is not None and len(hit.blocks) > room:
            end_max = hit.blocks[room].first_token
            hit = self._tiered_hits.find(hashes, num_computed_tokens, end_max, present)
        if hit is not None and num_computed_tokens + hit.num_tokens > first_token:
            self._counters[Count.FETCH_BLOCKS_NO_SLOT] += num_wanted - len(hit.blocks)
            self._fetch(lookup, hit, first_token, present, generation)
        elif room or not self._fetches.has_share(user):
            self._counters[Count.FETCH_BLOCKS_NO_SLOT] += num_wanted
            self._lookups.finish(lookup)
        else:
            self._lookups.finds_no_room(lookup)
        if held is not None:
            held.release()

    def _pays(self, lookup: LookUp, hit: TieredHit, first_token: int) -> bool:
        offer = _offer(lookup, hit, first_token)
        if offer.num_tokens <= 0:
            return False
        shared = self._fetches.under_way(hit.slots)
        num_slots = len(hit.blocks) + sum(len(fetch.lease.slots) for fetch in shared)
        pays = self._costs.fetch_pays(offer, num_slots, _farthest(hit, shared))
        if pays or lookup.is_trial or self._costs.tries_all_the_same():
            return True
        self._counters[Count.SKIPPED_FETCH_TOKENS] += offer.num_tokens
        return False

    def _fetch(
        self, lookup: LookUp, hit: TieredHit, first_token: int, present: Present, generation: str
    ) -> None:
        """Fetch the blocks that only tiers have, and wait for those being fetched."""
        user = lookup.user
        shared = self._fetches.under_way(hit.slots)
        tier = _farthest(hit, shared)
        fetches: list[Fetch] = []
        if hit.blocks:
            stages = [Stage(first_token, hit.blocks)]
            if not (self._hits.geometry.is_plain or shared):
                stages = self._stages(lookup, hit, first_token, tier, present)
            fetches = self._fetches.begin(stages, user, generation)
        if shared:
            self._fetches.share(shared, user)
            fetches = sorted([*shared, *fetches], key=lambda fetch: fetch.first_token)
        if not fetches:  # it has come meanwhile, or is being stored
            self._lookups.finish(lookup)
            return
        span = first_token, lookup.num_computed_tokens + hit.num_tokens
        starts = [fetch.first_token for fetch in fetches]
        if shared and not self._hits.geometry.is_plain:
            starts = [first_token] * len(fetches)  # others' stages need not be its own
        self._lookups.fetch(lookup, fetches, starts, span, max(self._waits_s[:tier]))

    def _stages(
        self, lookup: LookUp, hit: TieredHit, first_token: int, tier: int, present: Present
    ) -> list[Stage]:
        """Return a hit in stages if it may be late and only the whole hit is usable."""
        whole = [Stage(first_token, hit.blocks)]
        offer = _offer(lookup, hit, first_token)
        if self._costs.is_soon(offer, len(hit.blocks), tier, lookup.waited_s):
            return whole
        hashes, computed = lookup.user.request.block_hashes, lookup.num_computed_tokens
        stages = self._tiered_hits.stages(hit, hashes, computed, first_token, present)
        num_blocks = sum(len(stage.blocks) for stage in stages)
        has_room = num_blocks <= self._fetches.num_slots_left(lookup.user)
        return stages if has_room and self._costs.fetch_pays(offer, num_blocks, tier) else whole

    def _present(self, lookup: LookUp) -> Present:
        present: Present = tuple({} for _ in self._hits.geometry.group_block_sizes)
        for probe in lookup.probes:
            for group_idx, block_hash, tier in probe.present():
                present[group_idx][block_hash] = tier
        return present


def _offer(lookup: LookUp, hit: TieredHit, first_token: int) -> Offer:
    end_token = lookup.num_computed_tokens + hit.num_tokens
    return Offer(end_token - first_token, lookup.user.request.num_tokens - end_token)


def _farthest(hit: TieredHit, shared: list[Fetch]) -> int:
    tiers = [block.tier for block in hit.blocks]
    return max([*tiers, *(fetch.batch.tier for fetch in shared)], default=1)
