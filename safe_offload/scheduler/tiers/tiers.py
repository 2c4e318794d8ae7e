"""Tiers beside the scheduler: what is asked for, fetched and written, and what has come of it.

A tier only feeds the host cache. What it has of a request is brought into host slots before vLLM
is told of a hit, which is then an ordinary hit of host memory:

1. When a request is new, its blocks that the host has not are asked for (`lookups.py`).
2. When all ranks have answered, vLLM's own hit rules tell how far host and tiers together could
   bring it (`tiered_hits.py`). If that pays, it is fetched (`promotions.py`).
3. While that goes on, vLLM is told to ask again. What has arrived is published (`fetches.py`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from safe_offload.observe.counters import FETCH_S, PROBE_S, Count
from safe_offload.scheduler.feature import NO_MESSAGES, Answer, Feature, TierMessages
from safe_offload.scheduler.loads.cost import TierCosts
from safe_offload.scheduler.pending import Fetch, FetchBatch, Load, Spill, Store
from safe_offload.scheduler.tiers.fetches import Fetches
from safe_offload.scheduler.tiers.generation import Generation
from safe_offload.scheduler.tiers.lookups import LookUps
from safe_offload.scheduler.tiers.probes import PendingProbe, Probes
from safe_offload.scheduler.tiers.promotions import Promotions
from safe_offload.scheduler.tiers.spills import Spills

if TYPE_CHECKING:
    from safe_offload.protocol import Outcome, StepReport, TierTransfer
    from safe_offload.scheduler.cache.leases import Lease
    from safe_offload.scheduler.requests import RequestState
    from safe_offload.scheduler.tiers.context import TierContext
    from safe_offload.scheduler.tiers.private import PrivateBlocks
    from safe_offload.scheduler.tiers.tiered_hits import TieredHits

STUCK_FACTOR = 2
"""An idle engine steps for transfers until this many times the time limit of a tier has passed
without news of any."""


AT_ONCE = -math.inf
"""When to plan again after something has happened."""


class Tiers(Feature):
    """What plans tell the workers of tiers and what these report; the rest is parts of it.

    Its own state, which nothing else changes: what has ended since the last plan, when there was
    news of a transfer last, and when to plan again.

    Bound: what has ended since the last plan.

    Args:
        private: needed by others too, which note what is new.
    """

    def __init__(
        self, tiered_hits: TieredHits, context: TierContext, private: PrivateBlocks
    ) -> None:
        configs, has_version = context.configs, bool(context.configs[0].model_version)
        self._counters = context.counters
        self._slot_bytes = context.slot_bytes
        self._hash_block_size = context.hits.geometry.hash_block_size
        self._stuck_s = STUCK_FACTOR * max(config.timeout_s for config in configs)
        self.generation = Generation(context.new_generation, has_model_version=has_version)
        self.costs = TierCosts(context.costs, len(configs))
        self.private = private
        self._probes = Probes(context)
        self.fetches = Fetches(context)
        self.spills = Spills(context, private.hashes)
        parts = context, self.costs
        self.lookups = LookUps(*parts, private, self._probes, self.fetches)
        self._promotions = Promotions(*parts, tiered_hits, self.lookups, self.fetches)
        # Looked at in every step.
        self._private, self._wanting = private.growing, self.lookups.wanting
        self._probes_waiting = self._probes.waiting
        self._answered: list[PendingProbe] = []
        self._fetched: list[FetchBatch] = []
        self._complete: list[Fetch | Spill] = []
        self._has_news, self._last_news_s, self._is_stuck = False, 0.0, False
        self._due_s = math.inf

    def __repr__(self) -> str:
        return f"Tiers({self.lookups!r}, {self.fetches!r}, {self.spills!r})"

    def seen(self, state: RequestState, *, may_read: bool) -> None:
        """See `Feature`; look it up while it waits for its turn."""
        if may_read and not state.limits.is_brought:
            self.lookups.see(state)
        self._due_s = AT_ONCE

    def answer(self, state: RequestState, num_computed_tokens: int, now_s: float) -> Answer:
        waits = self.lookups.waits(state, num_computed_tokens, now_s)
        if self._wanting or self._probes_waiting:
            self._due_s = AT_ONCE
        return Answer.ASK_AGAIN if waits else Answer.SEARCH

    def matched(self, state: RequestState) -> None:
        self.lookups.matched(state)

    def scheduled(self, state: RequestState, num_tokens: int) -> None:
        self.lookups.scheduled(state, num_tokens)

    def ended(self, state: RequestState) -> None:
        self.lookups.end(state)

    def hit_tokens(self, load: Load, num_tokens: int) -> Mapping[int, int]:
        first_token = load.first_hash * self._hash_block_size
        return self.lookups.hit_tokens(load.owner, first_token, num_tokens)

    # ---- a step is planned ---------------------------------------------------------------------

    def messages(self, now_s: float) -> TierMessages:
        return self._plan(now_s) if now_s > self._due_s else NO_MESSAGES

    def _plan(self, now_s: float) -> TierMessages:
        """See `messages`; from now on only what happens, or is stuck, is a reason to plan again."""
        if self._private:
            self.private.learn()
        if self._answered or self._fetched:
            self._measure(now_s)
        generation = self.generation.name
        fetches: tuple[TierTransfer, ...] = ()
        if self._wanting:
            self._promotions.begin(generation)
            fetches = self.fetches.plan()
        probes = self._probes.plan(generation) if self._probes_waiting else ()
        spills = self.spills.plan(generation, now_s)
        is_waiting = bool(self.fetches or self.spills)
        if self._has_news or not is_waiting:
            self._has_news, self._last_news_s = False, now_s
        self._is_stuck = now_s - self._last_news_s > self._stuck_s
        is_news_due = is_waiting and not self._is_stuck
        self._due_s = self._last_news_s + self._stuck_s if is_news_due else math.inf
        looks = self.spills.looks or self.spills.is_waiting
        if looks or self._wanting or self._probes_waiting or self._private:
            self._due_s = AT_ONCE
        self._due_s = min(self._due_s, self.spills.due_s)
        if not (probes or fetches or spills):
            return NO_MESSAGES
        return TierMessages(probes, fetches, spills)

    def sent(self, now_s: float) -> None:
        self._probes.sent(now_s)
        self.fetches.sent(now_s)
        self.spills.sent()
        self._has_news, self._due_s = True, AT_ONCE

    def _measure(self, now_s: float) -> None:
        """Note how long what has ended took."""
        for probe in self._answered:
            if probe.sent_s is not None:
                self.costs.add_probe(len(probe.keys), now_s - probe.sent_s)
                self._counters.observe(PROBE_S, now_s - probe.sent_s)
        for batch in self._fetched:
            if batch.sent_s is not None:
                self.costs.add_fetch(batch.tier, batch.num_slots, now_s - batch.sent_s)
                self._counters.observe(FETCH_S, now_s - batch.sent_s)
        self._answered, self._fetched = [], []

    # ---- the workers have reported -------------------------------------------------------------

    def note(self, outcome: Outcome) -> bool:
        transfer_id = outcome.transfer_id
        transfer = self.fetches.ledger.get(transfer_id) or self.spills.ledger.get(transfer_id)
        if transfer is None:
            return False
        if outcome.rank not in transfer.ranks_left:
            self._counters[Count.DUPLICATE_REPORTS] += 1
        elif transfer.settled(outcome):
            self._complete.append(transfer)
        return True

    def settled(self, report: StepReport) -> None:
        """See `Feature`; settle what every rank has reported by now."""
        if self._complete:
            complete, self._complete = self._complete, []
            self._has_news, self._due_s = True, AT_ONCE
            for transfer in complete:
                if isinstance(transfer, Fetch):
                    self._settle_fetch(transfer)
                else:
                    self.spills.settle(transfer)
        for presence in report.presences:
            probe = self._probes.note(presence)
            if probe is not None:
                self._answered.append(probe)
                self._due_s = AT_ONCE
                self.lookups.answered(probe)

    def _settle_fetch(self, fetch: Fetch) -> None:
        self.spills.fetched(fetch, self.fetches.settle(fetch))
        batch = fetch.batch
        if batch.ended(is_whole=fetch.is_whole) and batch.is_whole:
            self._fetched.append(batch)
        self.lookups.fetched(fetch)

    def stored(self, store: Store) -> None:
        self.spills.stored(store)
        self._due_s = AT_ONCE

    # ---- what went wrong -----------------------------------------------------------------------

    def stopped(self) -> None:
        """See `Feature`; look up and spill nothing of what was wanted until now."""
        self.lookups.stop()
        self._probes.forget()
        self.spills.forget()

    def doubted(self, doubts: Sequence[str]) -> None:
        """See `Feature`; use only what this engine has written itself.

        Without a generation a rank that doubts finds and writes nothing.
        """
        if not self.generation.name:
            self.stopped()
            self.generation.stand_alone(doubts)

    def reset(self, cause: str | None) -> None:
        """See `Feature`; what tiers have may be of other weights from now on.

        What the operator says with `model_version`, if anything, is true of weights that the
        operator has changed, not only of those that were loaded when the engine started.
        """
        self.stopped()
        self.generation.reset(is_vouched_for=cause is None)

    def given_up(self) -> None:
        self.lookups.give_up()
        self._answered, self._fetched, self._complete = [], [], []
        self._probes.forget()
        self.fetches.give_up()
        self.spills.give_up()

    def leases(self) -> list[Lease]:
        return [*self.fetches.leases, *self.spills.leases]

    # ---- the rest ------------------------------------------------------------------------------

    def has_work(self) -> bool:
        """See `Feature`; for what is in flight.

        Not for what is stuck: when it ends, the next step notices. And not for look-ups: their
        requests keep vLLM stepping.
        """
        if self.spills.is_waiting or self.spills.retries_soon:
            return True
        return not self._is_stuck and bool(self.fetches or self.spills)

    def statistics(self) -> dict[str, int]:
        return {
            "lookups": self.lookups.num_active,
            "fetches": len(self.fetches),
            "spills": len(self.spills),
        }

    def check_invariants(self) -> None:
        self.fetches.check_invariants()

    def gauges(self) -> dict[str, float]:
        return {
            "fetches_in_flight": len(self.fetches),
            "spills_in_flight": len(self.spills),
            **self.costs.gauges(self._slot_bytes),
        }
