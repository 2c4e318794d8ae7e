"""Tiers beside the scheduler: what is asked for, what has arrived, who waits until when.

A tier only feeds the host cache. What it has of a request is brought into host slots before vLLM
is told of a hit, which is then an ordinary hit of host memory:

1. When a request is new, its blocks that the host has not are asked for (`probes.py`).
2. When all ranks have answered, vLLM's own hit rules tell how far host and tiers together could
   bring it (`reach.py`). If that pays, it is fetched (`fetches.py`).
3. While that goes on, vLLM is told to ask again. What has arrived is published.

What bounds the wait (docs/guarantees.md: I9):

- A request waits at most `wait_s` seconds over its whole life, whatever it waits for.
- As soon as it is known what computing takes, it waits no longer than that makes it a tenth later,
  wherever the tier may stall (`TierCosts.wait_max_s`).
- After that it goes on with what the host has by then. It looks up again only if it has run and
  was preempted.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from safe_offload.observe.counters import FETCH_S, PROBE_S, TIER_WAIT_S, Count, Counters
from safe_offload.scheduler.cache.leases import LeaseKind
from safe_offload.scheduler.loads.cost import NOTHING_FETCHED, Offer, TierCosts
from safe_offload.scheduler.pending import Course, Fetch, Store, TierPending
from safe_offload.scheduler.tiers.fetches import Fetches
from safe_offload.scheduler.tiers.lookups import LookUp, Stage
from safe_offload.scheduler.tiers.private import PrivateBlocks
from safe_offload.scheduler.tiers.probes import Probes, Question
from safe_offload.scheduler.tiers.reach import Leg
from safe_offload.scheduler.tiers.spills import Spills

if TYPE_CHECKING:
    from vllm.v1.request import Request

    from safe_offload.config.tiers import TierConfig
    from safe_offload.protocol import Outcome, Probe, StepReport, TierTransfer
    from safe_offload.scheduler.blocks import GpuBlocks
    from safe_offload.scheduler.cache.leases import Lease, LeaseBook
    from safe_offload.scheduler.loads.cost import Costs
    from safe_offload.scheduler.loads.hits import HostHits
    from safe_offload.scheduler.requests import RequestState
    from safe_offload.scheduler.tiers.reach import Present, Reach, Reaches

logger = logging.getLogger(f"vllm.{__name__}")

STUCK_FACTOR = 2
"""If so many times the time limit of a tier has passed without news of any transfer, an idle engine
does not go on stepping for it."""

NO_GAUGES: dict[str, float] = {
    "fetches_in_flight": 0,
    "spills_in_flight": 0,
    **NOTHING_FETCHED,
}
"""The gauges where there are none."""


@dataclass(frozen=True, slots=True)
class TierOptions:
    """What the scheduler side has to know about tiers.

    Attributes:
        configs: the tiers, the nearest first; alike in what `TierConfig` says must be.
        num_ranks: worker processes that report.
        slot_bytes: of one slot, on all ranks together.
        new_word: makes a word that no process has had, for the namespace after a reset.
        tells_media_ids: see `PrivateBlocks`.
    """

    configs: tuple[TierConfig, ...]
    num_ranks: int
    slot_bytes: int
    new_word: Callable[[], str]
    tells_media_ids: bool = False


class TierMessages(NamedTuple):
    """What a plan tells the workers about tiers; see `StepPlan`."""

    probes: tuple[Probe, ...] = ()
    fetches: tuple[TierTransfer, ...] = ()
    spills: tuple[TierTransfer, ...] = ()


NO_MESSAGES = TierMessages()


class Tiers:
    """Look-ups of requests; the probes, fetches and spills are parts of it.

    Its own state, which nothing else changes: the look-ups by request, those for which it is to be
    decided what to fetch, what has ended since the last plan, the word of the namespace, and when
    there was news of a transfer last.

    Args:
        reaches: how far tiers can bring a request.
        hits: what the host has.
        gpu: what vLLM's own cache has.
        leases: where slots are protected.
        transfer_ids: never gives the same twice.
        costs: of computing and loading.
        counters: what happens is counted here.
        options: see `TierOptions`.

    Attributes:
        private_requests: those that have blocks which tiers are not given.
        has_to_plan: something has happened of which the next plan may have to tell.
        plan_again_s: when to plan all the same, to see what is stuck.
    """

    def __init__(  # noqa: PLR0913
        self,
        reaches: Reaches,
        hits: HostHits,
        gpu: GpuBlocks,
        leases: LeaseBook,
        transfer_ids: Iterator[int],
        costs: Costs,
        counters: Counters,
        options: TierOptions,
    ) -> None:
        configs = options.configs
        self._reaches = reaches
        self._hits = hits
        self._gpu = gpu
        self._leases = leases
        self._counters = counters
        self._options = options
        self._wait_max_s = max(config.wait_s for config in configs)
        self._stuck_s = STUCK_FACTOR * max(config.timeout_s for config in configs)
        self.costs = TierCosts(costs, len(configs))
        self.private = PrivateBlocks(
            hits,
            gpu,
            tells_media_ids=options.tells_media_ids,
            vouches_for_adapters=bool(configs[0].model_version),
        )
        self.private_requests = self.private.noted
        self.probes = Probes(options.num_ranks, len(hits.geometry.group_block_sizes), counters)
        what = hits, leases, transfer_ids, options.num_ranks, options.slot_bytes, counters
        self.fetches = Fetches(*what)
        self.spills = Spills(
            *what,
            private=self.private.hashes,
            evicted_only=configs[0].stores_evicted,
            nearest_kept=next((n for n, c in enumerate(configs, 1) if c.keep), len(configs)),
        )
        self.word = ""
        self._lookups: dict[RequestState, LookUp] = {}
        self._num_lookups = 0
        self._wanting: dict[LookUp, None] = {}
        self._answered: list[Question] = []
        self._fetched: list[Course] = []
        self._complete: list[TierPending] = []
        self._has_news, self._last_news_s, self._is_stuck = False, 0.0, False
        self.has_to_plan, self.plan_again_s = False, math.inf

    def __repr__(self) -> str:
        return f"Tiers({self.num_active} look-ups, {self.fetches!r}, {self.spills!r})"

    # ---- a request -----------------------------------------------------------------------------

    def see(self, state: RequestState, *, may_read: bool) -> None:
        """A request is new; if it may read, look it up while it waits for its turn."""
        self.private.see(state.request)
        if not may_read:
            return
        self._num_lookups += 1
        lookup = self._lookups[state] = LookUp(state, self._num_lookups)
        self._begin(lookup, self._gpu.num_cached_tokens(state.request))

    def _begin(self, lookup: LookUp, num_computed_tokens: int) -> None:
        """Ask for what the host has not, unless that cannot pay."""
        state, hits = lookup.state, self._hits
        request = state.request
        end_max = self._end_max(state, num_computed_tokens)
        wanted, is_fetched = self._missing(request, num_computed_tokens, end_max)
        is_missing = any(wanted)
        if not (is_missing or is_fetched):
            return  # its turn may come when the host has lost something
        hit = hits.find_hit(request.block_hashes, num_computed_tokens, end_max)
        first_token = num_computed_tokens + (hit.num_tokens if hit is not None else 0)
        num_tokens = end_max - first_token
        offer = Offer(num_tokens, request.num_tokens - end_max)
        is_trial = False
        if not self.costs.probe_pays(offer, hits.geometry.num_blocks_held(num_tokens)):
            is_trial = self.costs.tries_all_the_same()
            if not is_trial:
                lookup.end()
                return
        span = first_token, end_max
        lookup.begin(num_computed_tokens, span, self._wait_max_s, is_trial=is_trial)
        if is_missing:
            self._counters[Count.TIER_LOOKUPS] += 1
            lookup.ask(self.probes.ask(wanted, state))
            self.has_to_plan = True
        else:
            self._want(lookup)

    def _missing(
        self, request: Request, num_computed_tokens: int, end_max: int
    ) -> tuple[list[list[bytes]], bool]:
        """Return, for each group, hashes that the host has not; and whether some are fetched now.

        Of a span of tokens; what is being stored or fetched is not missing.
        """
        hits, private = self._hits, self.private.hashes
        wanted: list[list[bytes]] = [[] for _ in hits.geometry.group_block_sizes]
        is_fetched = False
        if num_computed_tokens >= end_max:
            return wanted, is_fetched
        for group_idx in hits.geometry.group_ids:
            size, table = (
                hits.geometry.group_block_sizes[group_idx],
                hits.directory.tables[group_idx],
            )
            span = slice(num_computed_tokens // size, end_max // size)
            hashes = hits.geometry.hashes_of(request, group_idx)[span]
            wanted[group_idx] = [h for h in hashes if h not in table and h not in private]
            if self.fetches and not is_fetched:
                slots = [table[h] for h in hashes if h in table]
                is_fetched = bool(self.fetches.under_way(slots))
        return wanted, is_fetched

    def _end_max(self, state: RequestState, num_computed_tokens: int) -> int:
        """Return the token at which a hit of a request ends at the latest."""
        num_tokens: int = state.request.num_tokens - 1
        if state.limits.load_tokens is not None:
            num_tokens = min(num_tokens, num_computed_tokens + state.limits.load_tokens)
        return num_tokens

    def _want(self, lookup: LookUp) -> None:
        lookup.want()
        self._wanting[lookup] = None
        self.has_to_plan = True

    def waits(self, state: RequestState, num_computed_tokens: int, now_s: float) -> bool:
        """Whether a request that vLLM asks about is to wait for tiers.

        Args:
            state: of the request.
            num_computed_tokens: that the GPU's prefix cache has.
            now_s: of a clock that never goes back.
        """
        lookup = self._lookups.get(state)
        if lookup is None:
            return False
        if lookup.stage is Stage.IDLE:
            self._begin(lookup, num_computed_tokens)
            if lookup.stage is Stage.IDLE:
                lookup.end()
        if lookup.stage is Stage.OVER:
            if lookup.asked_s is not None:
                self._answer(lookup, now_s)
            return False
        lookup.asked(num_computed_tokens, now_s)
        if lookup.num_tokens > 0:
            # vLLM asks again in a step, which is expected to take as long as the last one.
            if lookup.waited_s + lookup.last_gap_s < self._wait_limit_s(lookup):
                return True
            self._counters[Count.TIER_WAITS_CUT] += 1
        self._finish(lookup)
        self._answer(lookup, now_s)
        return False

    def _wait_limit_s(self, lookup: LookUp) -> float:
        """Return how long a request may wait in all (I9)."""
        num_tokens = lookup.num_tokens
        num_left = lookup.state.request.num_tokens - lookup.num_computed_tokens - num_tokens
        limit_s = self.costs.wait_max_s(Offer(num_tokens, num_left), lookup.share())
        return lookup.wait_max_s if limit_s is None else min(limit_s, lookup.wait_max_s)

    def _answer(self, lookup: LookUp, now_s: float) -> None:
        lookup.answered(now_s)
        if lookup.waited_s:
            self._counters.observe(TIER_WAIT_S, lookup.waited_s)

    def _finish(self, lookup: LookUp) -> None:
        """Wait for nothing more; what has come stays leased until the request has matched."""
        self.probes.let_go(lookup.questions, lookup.state)
        self._wanting.pop(lookup, None)
        lookup.end()

    def _let_go(self, lookup: LookUp) -> None:
        if lookup.is_active:
            self._finish(lookup)
        if lookup.fetches:
            self.fetches.let_go(lookup.fetches, lookup.state)
            lookup.let_go()

    def matched(self, state: RequestState) -> None:
        """vLLM was told of the hit of a request, or that there is none: it has its own lease."""
        lookup = self._lookups.get(state)
        if lookup is not None and lookup.fetches:
            self._let_go(lookup)

    def scheduled(self, state: RequestState, *, is_running: bool) -> None:
        """vLLM has given a request blocks, to load or to run."""
        lookup = self._lookups.get(state)
        if lookup is not None:
            self._let_go(lookup)
            if is_running and lookup.stage is Stage.OVER:
                lookup.ran()

    def end(self, state: RequestState) -> None:
        """A request has ended."""
        self.private.end(state.request)
        lookup = self._lookups.pop(state, None)
        if lookup is not None:
            self._let_go(lookup)

    # ---- a step is planned ---------------------------------------------------------------------

    def note_private(self) -> None:
        """Any block that is hashed by now may be stored in this step."""
        self.private.note()

    def plan(self, now_s: float) -> TierMessages:
        """Return what this step tells the workers; `NO_MESSAGES` itself for nothing."""
        if self._answered or self._fetched:
            self._measure(now_s)
        fetches: tuple[TierTransfer, ...] = ()
        self.has_to_plan = self.spills.evicted_only
        if self._wanting:
            self._decide()
            fetches = self.fetches.plan()
        probes = self.probes.plan(self.word) if self.probes.is_waiting else ()
        spills = self.spills.plan(self.word)
        is_waiting = bool(self.fetches or self.spills)
        if self._has_news or not is_waiting:
            self._has_news, self._last_news_s = False, now_s
        self._is_stuck = now_s - self._last_news_s > self._stuck_s
        is_news_due = is_waiting and not self._is_stuck
        self.plan_again_s = self._last_news_s + self._stuck_s if is_news_due else math.inf
        self.has_to_plan |= bool(self._wanting) or self.spills.is_waiting
        if not (probes or fetches or spills):
            return NO_MESSAGES
        return TierMessages(probes, fetches, spills)

    def sent(self, now_s: float) -> None:
        """The workers are told of what `plan` has returned."""
        self.probes.sent(now_s)
        self.fetches.sent(now_s)
        self.spills.sent()
        self._has_news = self.has_to_plan = True

    def _measure(self, now_s: float) -> None:
        """Note how long what has ended took."""
        for question in self._answered:
            if question.sent_s is not None:
                self.costs.add_probe(len(question.keys), now_s - question.sent_s)
                self._counters.observe(PROBE_S, now_s - question.sent_s)
        for course in self._fetched:
            if course.sent_s is not None:
                self.costs.add_fetch(course.tier, course.num_slots, now_s - course.sent_s)
                self._counters.observe(FETCH_S, now_s - course.sent_s)
        self._answered, self._fetched = [], []

    def _decide(self) -> None:
        """Fetch what tiers have, for whom vLLM asks about first, then in the order of arrival."""
        wanting = sorted(self._wanting, key=lambda lookup: (not lookup.is_asked, lookup.number))
        for lookup in wanting:
            if not lookup.is_roomless or self.fetches.num_slots_left > 0:
                self._decide_on(lookup)

    def _decide_on(self, lookup: LookUp) -> None:
        """Fetch what tiers have for a request, if that pays, as much as there is room for."""
        state, num_computed_tokens = lookup.state, lookup.num_computed_tokens
        hashes, present = state.request.block_hashes, self._present(lookup)
        wanted = hashes, num_computed_tokens, self._end_max(state, num_computed_tokens)
        reach = self._reaches.find(*wanted, present)
        hit = self._hits.find_hit(*wanted)
        first_token = num_computed_tokens + (hit.num_tokens if hit is not None else 0)
        if reach is None or not self._pays(lookup, reach, first_token):
            self._finish(lookup)
            return
        # The host's part of it must not go for the rest; from now on it is the last to go.
        held = None
        num_far = len(reach.far)
        if num_far > self._hits.slots.num_empty:
            held = self._leases.lease(LeaseKind.FETCH, list(dict.fromkeys(reach.slots)))
        room = max(0, self.fetches.num_slots_left)
        while reach is not None and len(reach.far) > room:
            end_max = reach.far[room].first_token
            reach = self._reaches.find(hashes, num_computed_tokens, end_max, present)
        if reach is not None and num_computed_tokens + reach.num_tokens > first_token:
            self._counters[Count.ROOMLESS_BLOCKS] += num_far - len(reach.far)
            self._fetch(lookup, reach, first_token, present)
        elif room or not self.fetches.has_share:
            self._counters[Count.ROOMLESS_BLOCKS] += num_far
            self._finish(lookup)
        else:
            lookup.finds_no_room()
        if held is not None:
            held.release()

    def _pays(self, lookup: LookUp, reach: Reach, first_token: int) -> bool:
        """Whether a reach is worth being fetched."""
        offer = self._offer(lookup, reach, first_token)
        if offer.num_tokens <= 0:
            return False
        shared = self.fetches.under_way(reach.slots)
        num_slots = len(reach.far) + sum(len(fetch.lease.slots) for fetch in shared)
        pays = self.costs.fetch_pays(offer, num_slots, _farthest(reach, shared))
        if pays or lookup.is_trial or self.costs.tries_all_the_same():
            return True
        self._counters[Count.UNPAID_FETCH_TOKENS] += offer.num_tokens
        return False

    def _fetch(self, lookup: LookUp, reach: Reach, first_token: int, present: Present) -> None:
        """Fetch what is far, and wait for what others fetch."""
        state = lookup.state
        shared = self.fetches.under_way(reach.slots)
        tier = _farthest(reach, shared)
        fetches: list[Fetch] = []
        if reach.far:
            legs = [Leg(first_token, reach.far)]
            if not (self._hits.geometry.is_plain or shared):
                legs = self._legs(lookup, reach, first_token, tier, present)
            fetches = self.fetches.begin(legs, state, self.word)
        if shared:
            self.fetches.share(shared, state)
            fetches = sorted([*shared, *fetches], key=lambda fetch: fetch.first_token)
        if not fetches:  # it has come meanwhile, or is being stored
            self._finish(lookup)
            return
        del self._wanting[lookup]
        span = first_token, lookup.num_computed_tokens + reach.num_tokens
        self.probes.let_go(lookup.questions, state)
        starts = [fetch.first_token for fetch in fetches]
        if shared and not self._hits.geometry.is_plain:
            starts = [first_token] * len(fetches)  # others' legs need not be its own
        lookup.fetch(fetches, starts, span, max(c.wait_s for c in self._options.configs[:tier]))

    def _legs(
        self, lookup: LookUp, reach: Reach, first_token: int, tier: int, present: Present
    ) -> list[Leg]:
        """Cut what is far into legs if it may be late, as only all of it together is of use."""
        whole = [Leg(first_token, reach.far)]
        offer = self._offer(lookup, reach, first_token)
        if self.costs.is_soon(offer, len(reach.far), tier, lookup.waited_s):
            return whole
        hashes, computed = lookup.state.request.block_hashes, lookup.num_computed_tokens
        legs = self._reaches.legs(reach, hashes, computed, first_token, present)
        num_blocks = sum(len(leg.far) for leg in legs)
        has_room = num_blocks <= self.fetches.num_slots_left
        return legs if has_room and self.costs.fetch_pays(offer, num_blocks, tier) else whole

    def _offer(self, lookup: LookUp, reach: Reach, first_token: int) -> Offer:
        """Return what a reach brings beyond a token."""
        end_token = lookup.num_computed_tokens + reach.num_tokens
        return Offer(end_token - first_token, lookup.state.request.num_tokens - end_token)

    def _present(self, lookup: LookUp) -> Present:
        """Return what the tiers have of a request's blocks, as they have answered."""
        present: Present = tuple({} for _ in self._hits.geometry.group_block_sizes)
        for question in lookup.questions:
            for group_idx, block_hash, tier in question.present():
                present[group_idx][block_hash] = tier
        return present

    # ---- the workers have reported -------------------------------------------------------------

    def note(self, outcome: Outcome) -> bool:
        """Note what one rank says of a fetch or a spill; False if there is none of that id."""
        transfer = self.fetches.get(outcome.transfer_id) or self.spills.get(outcome.transfer_id)
        if transfer is None:
            return False
        if outcome.rank not in transfer.ranks_left:
            self._counters[Count.DUPLICATE_REPORTS] += 1
        elif transfer.settled(outcome):
            self._complete.append(transfer)
        return True

    def settle(self, report: StepReport) -> None:
        """Settle what every rank has reported by now."""
        complete, self._complete = self._complete, []
        if complete:
            self._has_news = self.has_to_plan = True
        for transfer in complete:
            if isinstance(transfer, Fetch):
                self._settle_fetch(transfer)
            else:
                self.spills.settle(transfer)
        for presence in report.presences:
            question = self.probes.note(presence)
            if question is not None:
                self._settle_question(question)

    def _settle_fetch(self, fetch: Fetch) -> None:
        self.spills.fetched(fetch, self.fetches.settle(fetch))
        course = fetch.course
        if course.ended(is_whole=fetch.is_whole) and course.is_whole:
            self._fetched.append(course)
        for state in fetch.users:
            lookup = self._lookups[state]
            if lookup.stage is Stage.FETCHING and lookup.has_arrived:
                lookup.end()

    def _settle_question(self, question: Question) -> None:
        self._answered.append(question)
        self.has_to_plan = True
        for state in question.users:
            lookup = self._lookups[state]
            if lookup.stage is Stage.ASKING and lookup.is_answered:
                self._want(lookup)

    # ---- what went wrong -----------------------------------------------------------------------

    def stop(self) -> None:
        """Look up and spill nothing of what was wanted until now; what is in flight goes on."""
        for lookup in self._lookups.values():
            self._let_go(lookup)
            if lookup.stage is Stage.IDLE:
                lookup.end()
        self.probes.forget()
        self.spills.forget()

    def stand_alone(self, doubts: Sequence[str]) -> None:
        """It is not known what this engine computes: use only what it has written itself.

        Without a word a rank that doubts finds and writes nothing.
        """
        if self.word:
            return
        self.stop()
        self.word = self._options.new_word()
        logger.warning(
            "Nothing in tiers is shared with other engines or found again after a restart: %s. If "
            'the model comes from elsewhere and is the same in every process, write "model_version"'
            " into each tier, and another one whenever it changes. Files of the model must not "
            "change while an engine starts.",
            " and ".join(doubts),
        )

    def reset(self, *, is_vouched_for: bool = True) -> None:
        """What tiers have may be of other weights from now on: leave it to those who know.

        With `model_version` the operator says which weights they are.

        Args:
            is_vouched_for: that is true of these weights too, not only of those that were loaded
                when the engine started.
        """
        self.stop()
        if is_vouched_for and self._options.configs[0].model_version:
            return
        is_first = not self.word
        self.word = self._options.new_word()
        if is_first:
            logger.info(
                "After a reset the weights may be others, so what tiers hold by now is not used "
                "any more by this engine, nor is what it writes used by others. To go on with "
                "what they hold, set the tier's model_version."
            )

    def give_up(self) -> None:
        """After an internal error: only what the workers read or write goes on."""
        self._lookups.clear()
        self._wanting.clear()
        self._answered, self._fetched, self._complete = [], [], []
        self.probes.forget()
        self.fetches.give_up()
        self.spills.give_up()

    @property
    def leases(self) -> list[Lease]:
        """Of what is in flight."""
        return [*self.fetches.leases, *self.spills.leases]

    # ---- the rest ------------------------------------------------------------------------------

    def stored(self, store: Store) -> None:
        """See `Spills.stored`."""
        self.spills.stored(store)
        self.has_to_plan = True

    @property
    def num_active(self) -> int:
        """Requests that wait for tiers, or will when vLLM asks about them."""
        return sum(lookup.is_active for lookup in self._lookups.values())

    @property
    def has_work(self) -> bool:
        """Whether the engine must keep stepping for what is in flight.

        Not for what is stuck: when it ends, the next step notices. And not for look-ups: their
        requests keep vLLM stepping.
        """
        if self.spills.is_waiting:
            return True
        return not self._is_stuck and bool(self.fetches or self.spills)

    def gauges(self) -> dict[str, float]:
        """Return how tiers stand; see `observe.metrics.GAUGES`."""
        return {
            "fetches_in_flight": len(self.fetches),
            "spills_in_flight": len(self.spills),
            **self.costs.gauges(self._options.slot_bytes),
        }

    def check_invariants(self) -> None:
        """Check the share of slots, and that what is wanted is wanted by a look-up.

        Raises:
            InvariantError: something is wrong.
        """
        self.fetches.check_invariants()


def _farthest(reach: Reach, shared: list[Fetch]) -> int:
    """Return the number of the farthest tier that something comes from."""
    tiers = [block.tier for block in reach.far]
    return max([*tiers, *(fetch.course.tier for fetch in shared)], default=1)
