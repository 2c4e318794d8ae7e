"""Tiers beside the scheduler: lookups, fetches and spills, and their results.

A tier only feeds the host cache: what it has of a request is brought into host slots before vLLM
learns of a hit, which is then an ordinary hit of host memory (docs/architecture.md).
"""

from __future__ import annotations

import logging
import math
import secrets
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from safe_offload.observe.counters import FETCH_S, PROBE_S, Count
from safe_offload.scheduler.loads.cost import TierCosts
from safe_offload.scheduler.pending import Fetch, FetchBatch, Load, Spill, Store
from safe_offload.scheduler.tiers.fetches import Fetches
from safe_offload.scheduler.tiers.lookups import LookUps
from safe_offload.scheduler.tiers.probes import PendingProbe, Probes
from safe_offload.scheduler.tiers.promotions import Promotions
from safe_offload.scheduler.tiers.spills import Spills

if TYPE_CHECKING:
    from safe_offload.protocol import Outcome, Probe, StepReport, TierTransfer
    from safe_offload.scheduler.cache.leases import Lease
    from safe_offload.scheduler.requests import RequestState
    from safe_offload.scheduler.tiers.context import TierContext
    from safe_offload.scheduler.tiers.tiered_hits import TieredHits

logger = logging.getLogger(f"vllm.{__name__}")

STUCK_FACTOR = 2
"""Time limits of a tier without a report, until an idle engine stops stepping for it."""


AT_ONCE = -math.inf
"""`due_s` after an event."""


class TierMessages(NamedTuple):
    """The messages of a plan about tiers; see `StepPlan`."""

    probes: tuple[Probe, ...] = ()
    fetches: tuple[TierTransfer, ...] = ()
    spills: tuple[TierTransfer, ...] = ()


NO_MESSAGES = TierMessages()


class Tiers:
    """Lookups, fetches and spills of the engine. Only the planner calls it.

    Bound: the transfers ended since the last plan.
    """

    def __init__(self, tiered_hits: TieredHits, context: TierContext) -> None:
        configs = context.configs
        self._counters = context.counters
        self._slot_bytes = context.slot_bytes
        self._hash_block_size = context.hits.geometry.hash_block_size
        self._stuck_s = STUCK_FACTOR * max(config.timeout_s for config in configs)
        self._has_model_version = bool(configs[0].model_version)
        # In each message: it identifies the weights, if objects are not shared with others.
        self.generation = ""
        self.costs = TierCosts(context.costs, len(configs))
        self.probes = Probes(context)
        self.fetches = Fetches(context)
        self.spills = Spills(context)
        self.lookups = LookUps(context, self.costs, self.probes, self.fetches)
        self._promotions = Promotions(context, self.costs, tiered_hits, self.lookups, self.fetches)
        self._answered: list[PendingProbe] = []
        self._fetched: list[FetchBatch] = []
        self._complete: list[Fetch | Spill] = []
        self._has_news, self._last_news_s, self._is_stuck = False, 0.0, False
        self.due_s = math.inf  # after this time `plan` has something to do; read only outside

    def __repr__(self) -> str:
        return f"Tiers({self.lookups!r}, {self.fetches!r}, {self.spills!r})"

    # ---- a request -----------------------------------------------------------------------------

    def add_request(self, state: RequestState, *, may_read: bool) -> None:
        """Look a new request up while it is queued, if its hits may be loaded."""
        if may_read and not state.limits.is_brought:
            self.lookups.see(state)
        self.due_s = AT_ONCE

    def waits(self, state: RequestState, num_computed_tokens: int, now_s: float) -> bool:
        """Return whether a request waits for tiers, when vLLM asks for its hit."""
        waits = self.lookups.waits(state, num_computed_tokens, now_s)
        if self.lookups.wanting or self.probes.waiting:
            self.due_s = AT_ONCE
        return waits

    def matched(self, state: RequestState) -> None:
        """A hit of a request, or none, was reported to vLLM."""
        self.lookups.matched(state)

    def scheduled(self, state: RequestState, num_tokens: int) -> None:
        """VLLM has given a request blocks, to load `num_tokens` tokens or, with 0, to run."""
        self.lookups.scheduled(state, num_tokens)

    def end_request(self, state: RequestState) -> None:
        """A request has ended."""
        self.lookups.end(state)

    def hit_tokens(self, load: Load, num_tokens: int) -> Mapping[int, int]:
        """Return the tokens of a new load by the tier that they come from; 0 is the host."""
        first_token = load.first_hash * self._hash_block_size
        return self.lookups.hit_tokens(load.owner, first_token, num_tokens)

    # ---- a step is planned ---------------------------------------------------------------------

    def plan(self, now_s: float) -> TierMessages:
        """Return the messages to the workers; `NO_MESSAGES` itself if there is none.

        From now on, only an event or a stuck transfer is a reason to plan again.
        """
        if self._answered or self._fetched:
            self._measure(now_s)
        generation = self.generation
        fetches: tuple[TierTransfer, ...] = ()
        if self.lookups.wanting:
            self._promotions.begin(generation)
            fetches = self.fetches.plan()
        probes = self.probes.plan(generation) if self.probes.waiting else ()
        spills = self.spills.plan(generation, now_s)
        is_waiting = bool(self.fetches.ledger.in_flight or self.spills.ledger.in_flight)
        if self._has_news or not is_waiting:
            self._has_news, self._last_news_s = False, now_s
        self._is_stuck = now_s - self._last_news_s > self._stuck_s
        is_news_due = is_waiting and not self._is_stuck
        self.due_s = self._last_news_s + self._stuck_s if is_news_due else math.inf
        looks = self.spills.looks or self.spills.is_waiting
        if looks or self.lookups.wanting or self.probes.waiting:
            self.due_s = AT_ONCE
        self.due_s = min(self.due_s, self.spills.due_s)
        if not (probes or fetches or spills):
            return NO_MESSAGES
        return TierMessages(probes, fetches, spills)

    def sent(self, now_s: float) -> None:
        """The plan with the messages of `plan` has been sent."""
        self.probes.sent(now_s)
        self.fetches.sent(now_s)
        self.spills.sent()
        self._has_news, self.due_s = True, AT_ONCE

    def _measure(self, now_s: float) -> None:
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

    def record(self, outcome: Outcome) -> bool:
        """Record an outcome of a rank; return False if it is of no fetch or spill."""
        transfer_id = outcome.transfer_id
        transfer = self.fetches.ledger.get(transfer_id) or self.spills.ledger.get(transfer_id)
        if transfer is None:
            return False
        if outcome.rank not in transfer.ranks_left:
            self._counters[Count.DUPLICATE_REPORTS] += 1
        elif transfer.settled(outcome):
            self._complete.append(transfer)
        return True

    def settle(self, report: StepReport) -> None:
        """Complete the fetches and spills that every rank has reported."""
        if self._complete:
            complete, self._complete = self._complete, []
            self._has_news, self.due_s = True, AT_ONCE
            for transfer in complete:
                if isinstance(transfer, Fetch):
                    self._settle_fetch(transfer)
                else:
                    self.spills.settle(transfer)
        for presence in report.presences:
            probe = self.probes.record(presence)
            if probe is not None:
                self._answered.append(probe)
                self.due_s = AT_ONCE
                self.lookups.answered(probe)

    def _settle_fetch(self, fetch: Fetch) -> None:
        self.spills.fetched(fetch, self.fetches.settle(fetch))
        batch = fetch.batch
        if batch.ended(is_whole=fetch.is_whole) and batch.is_whole:
            self._fetched.append(batch)
        self.lookups.fetched(fetch)

    def stored(self, store: Store) -> None:
        """A store that every rank has reported is about to be settled."""
        self.spills.stored(store)
        self.due_s = AT_ONCE

    # ---- what went wrong -----------------------------------------------------------------------

    def stop(self) -> None:
        """End all lookups and drop waiting spills; transfers in flight continue."""
        self.lookups.stop()
        self.probes.forget()
        self.spills.forget()

    def stand_alone(self, doubts: Sequence[str]) -> None:
        """Use only objects of this engine, because a rank cannot identify its weights."""
        if not self.generation:
            self.stop()
            self.generation = secrets.token_hex()
            logger.warning(
                "Tiers are neither shared with other engines nor reused after a restart: %s. If "
                'the weights are the same in every process, set "model_version" in each tier, and '
                "change it whenever they change. Model files must not change while an engine "
                "starts.",
                " and ".join(doubts),
            )

    def reset(self, *, is_vouched_for: bool) -> None:
        """End the use of present objects, which may be of other weights.

        A `model_version` also applies to weights that the operator has changed since the start.
        """
        self.stop()
        if is_vouched_for and self._has_model_version:
            return
        if not self.generation:
            logger.info(
                "The weights may have changed with the reset, so this engine stops reading the "
                "present objects of its tiers and sharing new ones. To keep them across resets, "
                "set the tier's model_version."
            )
        self.generation = secrets.token_hex()

    def give_up(self) -> None:
        """After an internal error, keep only the transfers that workers copy."""
        self.lookups.give_up()
        self._answered, self._fetched, self._complete = [], [], []
        self.probes.forget()
        self.fetches.give_up()
        self.spills.give_up()

    @property
    def leases(self) -> list[Lease]:
        """Of what is in flight."""
        return [*self.fetches.leases, *self.spills.leases]

    # ---- the rest ------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        """Return whether the engine must keep stepping for transfers in flight.

        Not for stuck ones, nor for lookups, whose requests keep vLLM stepping.
        """
        if self.spills.is_waiting or self.spills.retries_soon:
            return True
        return not self._is_stuck and bool(
            self.fetches.ledger.in_flight or self.spills.ledger.in_flight
        )

    def check_invariants(self) -> None:
        """See `SchedulerSide`."""
        self.fetches.check_invariants()

    def gauges(self) -> dict[str, float]:
        """Return the gauges of fetches and spills; see `observe.metrics.GAUGES`."""
        return {
            "fetches_in_flight": len(self.fetches),
            "spills_in_flight": len(self.spills),
            **self.costs.gauges(self._slot_bytes),
        }
