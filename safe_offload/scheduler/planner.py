"""The order of events: what vLLM's hooks tell goes in, a plan for the workers comes out.

Methods are called as the hooks that they answer. They take what vLLM knows and decide; there is no
I/O, no clock and no callback in here.
"""

from __future__ import annotations

import itertools
import logging
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from safe_offload.compat.block_ids import (
    allocated_block_ids,
    early_written_block_ids,
    spoilt_block_ids,
)
from safe_offload.observe.counters import LOAD_WAIT_S, Count, Counters
from safe_offload.protocol import EMPTY_PLAN, IDLE_PLAN, Outcome, StepPlan, StepReport
from safe_offload.scheduler.cache.leases import LeaseBook
from safe_offload.scheduler.feature import Answer, Feature, Hooks
from safe_offload.scheduler.loads.cost import Costs, StepWatch, busy_steps_s, pays_in_step
from safe_offload.scheduler.loads.loads import LoadProgress, Loads
from safe_offload.scheduler.loads.shared_loads import WAIT_MAX_S
from safe_offload.scheduler.outdated import Outdated
from safe_offload.scheduler.pending import Ledger, Load, Store
from safe_offload.scheduler.ranks import Ranks
from safe_offload.scheduler.requests import Phase, RequestBook, RequestState
from safe_offload.scheduler.stores.eager import EagerStores
from safe_offload.scheduler.stores.lazy import LazyStores
from safe_offload.scheduler.stores.stores import Stores
from safe_offload.scheduler.tiers.tiers import NO_MESSAGES, Tiers
from safe_offload.sides import SchedulerSide

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

    from safe_offload.scheduler.blocks import GpuBlocks
    from safe_offload.scheduler.cache.slots import SlotSource
    from safe_offload.scheduler.loads.hits import HostHits
    from safe_offload.scheduler.stores.policy import StorePolicy

logger = logging.getLogger(f"vllm.{__name__}")

START_STEPS_MAX = 1000
"""Steps that an idle engine makes at its start until every rank has reported how many slots it has,
so that an operator sees them before the first request. An idle step takes a millisecond."""


TRIES_MAX = 8
"""Hits that others overwrite while they are leased, one after the other, before there is none."""


@dataclass(frozen=True, slots=True)
class PlannerOptions:
    """What the planner has to know about the engine.

    Attributes:
        num_ranks: worker processes that report.
        num_store_blocks_max: blocks of all stores in flight together.
        slot_bytes: of one slot, on all ranks together.
        is_lazy: store only what is about to be evicted, not everything that is computed.
        blocks_written_early: the workers write new blocks before they honour fences
            (see `block_ids.early_written_block_ids`).
        state_group_ids: KV cache groups of Mamba states.
        num_decode_tokens_max: the most tokens of a step of a request that has computed its prompt.
        transfer_timeout_s: no request waits longer for loads of others.
        min_load_tokens, num_step_tokens_max: see `cost.Costs`.
        num_steps_in_flight: see `cost.StepWatch`.
        waits_when_idle: workers may wait for news in a step that computes nothing.
        may_refuse: the eviction policy may keep blocks from being stored.
        may_load_in_step: see `engine_core.step_loads`.
    """

    num_ranks: int
    num_store_blocks_max: int
    slot_bytes: int = 0
    is_lazy: bool = False
    blocks_written_early: bool = False
    state_group_ids: tuple[int, ...] = ()
    num_decode_tokens_max: int = 1
    transfer_timeout_s: float = WAIT_MAX_S
    min_load_tokens: int | None = 0
    num_step_tokens_max: int = 1
    num_steps_in_flight: int = 1
    waits_when_idle: bool = True
    may_refuse: bool = True
    may_load_in_step: bool = False


@dataclass(frozen=True, slots=True)
class Statistics:
    """How the scheduler side stands, for tests and checkers.

    Attributes:
        requests: that vLLM has not finished.
        store_blocks: that count against the bound of all stores.
        holders: requests that hold GPU blocks for a load.
        is_disabled: it only finishes what is in flight.
        contained_errors: since counts were taken last.
    """

    requests: int
    leases: int
    stores: int
    store_blocks: int
    loads: int
    holders: int
    is_disabled: bool
    contained_errors: int


class Planner(SchedulerSide):
    """The scheduler side, complete once vLLM has bound its blocks.

    Its own state: whether it is disabled, whether a gauge may have changed, the steps left for the
    start, how many steps have computed nothing by now, and the last steps. Everything else belongs
    to others, which are public, and each of which changes only its own.

    Bound: the steps in flight, and one.

    Args:
        make_tiers, make_features: make those of this configuration, once all else is made.
    """

    def __init__(
        self,
        hits: HostHits,
        gpu: GpuBlocks,
        options: PlannerOptions,
        counters: Counters,
        make_tiers: Callable[[Planner], Tiers | None] = lambda planner: None,
        make_features: Callable[[Planner], Iterable[Feature]] = lambda planner: (),
    ) -> None:
        self.transfer_ids = itertools.count()
        num_ranks, num_decoded = options.num_ranks, options.num_decode_tokens_max
        self.hits = hits
        self.gpu = gpu
        self.options = options
        self.counters = counters
        self.leases = LeaseBook(hits.slots)
        self.book = RequestBook(counters, LoadProgress)
        self.costs = Costs(options.min_load_tokens, options.num_step_tokens_max, self.book)
        watch = StepWatch(self.costs, options.num_steps_in_flight, num_decoded)
        self.steps = watch if self.costs.is_measuring else None
        self.loads = Loads(
            hits,
            self.leases,
            gpu,
            self.transfer_ids,
            num_ranks,
            counters,
            min(WAIT_MAX_S, options.transfer_timeout_s),
            self.costs,
        )
        ledger: Ledger[Store] = Ledger(self.transfer_ids, num_ranks)
        num_blocks_max = options.num_store_blocks_max
        self.stores = Stores(hits, self.leases, ledger, num_blocks_max, counters)
        self.policy: StorePolicy
        if options.is_lazy:
            num_step_blocks = hits.geometry.num_blocks_in_step(options.num_step_tokens_max)
            self.policy = LazyStores(hits, gpu, self.stores, num_decoded, num_step_blocks)
        else:
            may_refuse = hits.slots.may_refuse and options.may_refuse
            self.policy = EagerStores(
                hits, gpu, self.stores, num_decoded, counters, may_refuse=may_refuse
            )
        self._extras = self.policy.extras
        self._look_up = hits.boundaries.look_up if hits.boundaries.every else None
        self.outdated = Outdated(gpu, has_states=hits.geometry.has_states)
        self.ranks = Ranks(num_ranks, hits.slots, counters)
        self._is_disabled = False
        self._start_steps_left = START_STEPS_MAX
        self._num_idle_steps = 0
        # Steps, the latest last, and when they were planned.
        self._last_steps: deque[tuple[float, SchedulerOutput]] = deque(
            maxlen=options.num_steps_in_flight + 1
        )
        self.has_changed = True
        self.tiers = make_tiers(self)
        self.features = tuple(make_features(self))
        hooks = Hooks(self.features)
        self._on_new_request, self._on_match = hooks.on_new_request, hooks.on_match
        self._on_scheduled, self._on_finished = hooks.on_scheduled, hooks.on_request_finished
        self._on_step, self._on_step_planned = hooks.on_step, hooks.on_step_planned
        self._on_report, self._on_settled = hooks.on_report, hooks.on_settled
        self._has_work, self._gauges = hooks.has_work, hooks.gauges
        self._check_invariants = hooks.check_invariants
        self._slots = hits.slots
        self._in_step: Request | None = None  # whose hit was reported last, if in the step

    def __repr__(self) -> str:
        return f"Planner({self.book!r}, {self.loads!r}, {self.stores!r})"

    # ---- vLLM asks about a request -------------------------------------------------------------

    def on_new_request(self, request: Request) -> RequestState:
        """Remember the request, so that ids of other connectors are recognised later."""
        state = self.book.get(request.request_id)
        if state is None or state.request is not request:
            if state is not None:  # another one of the same id
                self._end(state)
            state = self.book.add(request)
            if state.limits.leaves_nothing:
                self.policy.keep_out(state)
                return state
            if self._look_up is not None:
                self.hits.boundaries.see(state)
            for feature in self._on_new_request:
                feature.on_new_request(state)
            if self.tiers is not None:
                may_read = not (self._is_disabled or request.skip_reading_prefix_cache)
                self.tiers.add_request(state, may_read=may_read)
        return state

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int, now_s: float
    ) -> int | None:
        """Report and lease the longest host hit (I1).

        May be called any number of times for one request; each call replaces the last.

        Args:
            request: not scheduled yet, or preempted.
            num_computed_tokens: tokens that the GPU's prefix cache has.
            now_s: of a clock that never goes back.

        Returns:
            Number of further tokens that can be loaded, 0 for none; None while the request waits
            for another request's load of the same blocks, or in the step, or for a tier.
        """
        state = self.book.get(request.request_id)
        if state is None or state.request is not request:
            state = self.on_new_request(request)
        phase = state.phase
        if not (phase is Phase.WAITING or phase is Phase.MATCHED):
            if phase is not Phase.RUNNING:
                return 0
            self._preempt(state)
        if self.loads.holders and self.loads.waits_for_failed():
            return None
        if request.skip_reading_prefix_cache or self._is_disabled:
            self.loads.drop_hit(state)
            return 0
        if self._look_up is not None:
            self._look_up(state, num_computed_tokens)
        for feature in self._on_match:
            answer = feature.on_match(state, num_computed_tokens, now_s)
            if answer is not Answer.SEARCH:
                return None if answer is Answer.ASK_AGAIN else 0
        if self.tiers is not None and self.tiers.waits(state, num_computed_tokens, now_s):
            return None
        if self._slots.source is None:
            num_tokens = self.loads.match(state, num_computed_tokens, now_s)
        else:
            num_tokens = self._match_shared(self._slots.source, state, num_computed_tokens, now_s)
        if num_tokens and num_computed_tokens and self.loads.is_loading_in_step:
            return None  # the GPU's blocks may be those being loaded (`engine_core.step_loads`)
        if num_tokens is not None:
            if num_tokens and self._extras is not None:
                self._extras.make_room(num_computed_tokens + num_tokens)
            if self.tiers is not None:
                self.tiers.matched(state)
        return num_tokens

    def _match_shared(
        self, source: SlotSource, state: RequestState, num_computed_tokens: int, now_s: float
    ) -> int | None:
        """Return a hit of which nothing was overwritten by another engine while it was leased."""
        for _ in range(TRIES_MAX):
            num_lost = source.num_lost
            num_tokens = self.loads.match(state, num_computed_tokens, now_s)
            if source.num_lost == num_lost:
                return num_tokens
            self.loads.drop_hit(state)
        return 0

    def loads_in_step(self, request: Request, now_s: float) -> bool:
        """Return whether the hit just reported is loaded in the very step that needs it.

        Not while the load of another request is ahead in the queue of copies.
        """
        is_in_step = False
        if self.options.may_load_in_step and not self.loads.is_loading:
            state, num_running = self.book.find(request), self.book.num_running
            hit = state.load.hit if state is not None else None
            copy_s = self.ranks.load_block_s * len(hit.slots_by_group[0]) if hit is not None else 0
            num_waiting = self.book.num_live - num_running - 1
            steps_s = busy_steps_s(self._last_steps, now_s, self.book) if copy_s else ()
            is_in_step = pays_in_step(copy_s, num_running, num_waiting, steps_s)
        self._in_step = request if is_in_step else None
        return is_in_step

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        """Turn the leased hit into a load, or give it up.

        Args:
            blocks: its whole block table.
            num_external_tokens: how many of the reported tokens vLLM wants loaded; 0 for none.
        """
        self.has_changed = True
        state = self.book.find(request) or self.on_new_request(request)
        state.allocated()
        if state.phase is Phase.FINISHED:
            return
        if state.phase is Phase.RUNNING:
            self._preempt(state)
        if num_external_tokens <= 0:
            self.loads.compute(state)
            self.book.run(state)
            self.policy.run(state)
        elif request is self._in_step:
            self.loads.begin(state, blocks.blocks, num_external_tokens, is_in_step=True)
            self.book.run(state)
            self.policy.run(state)
            self._in_step = None
        else:
            self.loads.begin(state, blocks.blocks, num_external_tokens)
        num_tokens = max(0, num_external_tokens)
        if self.tiers is not None:
            self.tiers.scheduled(state, num_tokens)
        for feature in self._on_scheduled:
            feature.on_scheduled(state, num_tokens)

    def hit_tokens_by_tier(self, request: Request, num_tokens: int) -> Mapping[int, int]:
        """Return how many tokens of the load that just began each tier has brought; 0: none."""
        load = self.loads.ledger.new[-1] if self.loads.ledger.new else None
        if self.tiers is None or load is None or load.owner.request is not request:
            return {}
        return self.tiers.hit_tokens(load, num_tokens)

    def _preempt(self, state: RequestState) -> None:
        """vLLM took a request's blocks away: let their host copy be evicted."""
        self.book.preempt(state)
        self.policy.preempt(state)
        self.stores.release_prefix(state)

    def announce_failure(self, request: Request) -> None:
        """A load could not be planned, for which vLLM waits or in its step: let it recompute."""
        if self._in_step is not None and request is self._in_step:
            self.loads.name_unloaded(self.gpu.block_ids_of(request.request_id))
        else:
            self.loads.announce_failure(self.on_new_request(request))

    def request_finished(self, request: Request) -> dict[str, Any] | None:
        """Store what is still unstored, give up all leases but those in flight.

        The request still holds its blocks. It holds none of them for us when this returns (I2), and
        a second call finds nothing to do (I4).

        Returns:
            See `RequestState.response`.
        """
        self.has_changed = True
        state = self.book.find(request) or self.on_new_request(request)
        try:
            if state.outdated:
                self._keep_out([state])  # vLLM may have hashed a block just now
            elif not self._is_disabled:
                self.policy.finish(state)
        finally:  # vLLM does not ask again
            self._end(state)
        return state.response

    def _keep_out(self, states: Sequence[RequestState] = ()) -> None:
        """Keep what outdated requests have computed, all or these, out of every cache."""
        for state in self.outdated.keep_out(self.book, states):
            self.policy.forget_table(state)
        if self.outdated.taken_ids:
            self.stores.lose_hashes(self.outdated.taken_ids)

    def _end(self, state: RequestState) -> None:
        """A request has ended: give up what only a live one needs."""
        if state.phase is not Phase.FINISHED:
            self.loads.end(state)
            if state.marks:
                self.hits.boundaries.leave(state)
            self.book.finish(state)
            self.policy.end(state)
            self.stores.end(state)
            if self.tiers is not None:
                self.tiers.end_request(state)
            for feature in self._on_finished:
                feature.on_request_finished(state)

    # ---- a step is planned ---------------------------------------------------------------------

    def build_connector_meta(self, scheduler_output: SchedulerOutput, now_s: float) -> StepPlan:
        """Return what the workers do in this step.

        What is new counts as sent when the plan is complete, so that an error on the way leaves
        nothing in flight that no worker knows.
        """
        self._last_steps.append((now_s, scheduler_output))
        if self._on_step:
            for feature in self._on_step:
                feature.on_step(scheduler_output, now_s)
            if self.ranks.has_dead:
                self._stop()
        self.hits.slots.set_time(now_s)
        if self._start_steps_left:
            self._start_steps_left -= 1
        is_idle = self._is_idle(scheduler_output)
        if self.costs.landed:
            self._count_waits(now_s)
        if self.steps is not None:
            self.steps.planned(scheduler_output, now_s)
        if self.book.finished:
            self.book.purge(self.gpu)
        if self.outdated.requests:
            self._keep_out()
        new_loads, messages = self.loads.ledger.new, NO_MESSAGES
        if not self._is_disabled:
            if scheduler_output.preempted_req_ids:
                self._rescue(scheduler_output)
            loading = [load.owner for load in new_loads if not load.is_in_step] if new_loads else ()
            self.policy.find(scheduler_output, self.book, loading)
        before, after, fences = self.stores.plan(self._early_written, scheduler_output)
        if self.tiers is not None and now_s > self.tiers.due_s and not self._is_disabled:
            messages = self.tiers.plan(now_s)
        if not (
            before
            or after
            or fences
            or new_loads
            or self.loads.unannounced
            or self.loads.unloaded
            or messages is not NO_MESSAGES
        ):
            plan = IDLE_PLAN if is_idle else EMPTY_PLAN
        else:
            loads = self.loads.new_transfers()
            failures = self.loads.failures
            in_step = self.loads.take_in_step()
            plan = StepPlan(loads, before, after, fences, failures, *messages, is_idle, *in_step)
            self.stores.sent()
            self.loads.sent(now_s)
            if messages is not NO_MESSAGES and self.tiers is not None:
                self.tiers.sent(now_s)
            self.has_changed = True
        if self._on_step_planned:
            for feature in self._on_step_planned:
                feature.on_step_planned()
        if plan.loads_in_step or plan.unloaded:
            self.loads.planned()
        return plan

    def _is_idle(self, scheduler_output: SchedulerOutput) -> bool:
        """Whether neither this step computes anything, nor one that may still be in flight."""
        if scheduler_output.total_num_scheduled_tokens:
            self._num_idle_steps = 0
            return False
        self._num_idle_steps += 1
        return self.options.waits_when_idle and (
            self._num_idle_steps >= self.options.num_steps_in_flight
        )

    def _count_waits(self, now_s: float) -> None:
        """Requests whose loads have landed since the last plan may run from now on."""
        for _, sent_s in self.costs.landed:
            self.counters.observe(LOAD_WAIT_S, now_s - sent_s)
        if self.steps is None:
            self.costs.landed.clear()

    def _early_written(self, scheduler_output: SchedulerOutput) -> set[int]:
        """Return blocks that are written before a fence of this step, or whatever it orders.

        Another connector (NIXL) lets another machine write the blocks of a request that waits for
        it. No stream of this device orders that, so a fence does not either.
        """
        written: set[int] = set()
        for request_id in self.book.brought():
            written |= self.gpu.block_ids_of(request_id)
        if self.options.blocks_written_early:
            groups = self.options.state_group_ids
            written |= early_written_block_ids(scheduler_output, groups)
        return written

    def _rescue(self, scheduler_output: SchedulerOutput) -> None:
        """Store what requests had computed that are preempted in this step."""
        preempted = []
        for request_id in sorted(scheduler_output.preempted_req_ids or ()):
            state = self.book.get(request_id)
            if state is not None and not state.finished:
                is_again = request_id in scheduler_output.num_scheduled_tokens
                if state.phase is Phase.RUNNING and not is_again:  # else the match did this
                    self.policy.forget_uncomputed(state)
                    self._preempt(state)
                preempted.append(state)
                if self.hits.directory.events is not None:  # what is rescued has no owner
                    self.hits.directory.events.learn(state)
        given_out = allocated_block_ids(scheduler_output) | self.loads.new_targets
        given_out -= self._early_written(scheduler_output)  # too late to store those
        self.policy.rescue(preempted, given_out)

    def plan_nothing(self) -> StepPlan:
        """Return the plan of a step whose planning failed, after `disable`: what has failed."""
        transfers, unloaded = self.loads.take_in_step()  # the former if `disable` failed, too
        unloaded += tuple(block_id for load in transfers for block_id in load.block_ids)
        plan = StepPlan(failures=self.loads.failures, unloaded=unloaded)
        self.loads.sent()
        self.loads.planned()
        return plan

    # ---- the workers have reported -------------------------------------------------------------

    def update_connector_output(self, output: KVConnectorOutput) -> None:
        """Settle transfers, complete loads, filter vLLM's finished ids."""
        if output.invalid_block_ids:
            # A load in a step failed, this connector's or another's: what was computed from it
            # since is garbage too, and vLLM goes on finding some of it (0.33: what requests share,
            # or leave at an abort).
            self.stores.fail_all()
            self._pass_over()
            in_flight = [scheduler_output for _, scheduler_output in self._last_steps]
            self.gpu.forget_hashes(spoilt_block_ids(in_flight, output.invalid_block_ids))
        report = output.kv_connector_worker_meta
        try:
            if isinstance(report, StepReport):
                self.has_changed = True
                for feature in self._on_report:
                    feature.on_report(report)
                self._settle_report(report, output)
        finally:  # vLLM reads the ids in any case
            if output.finished_recving or output.finished_sending:
                for state in self.book.filter(output, self.gpu):
                    self.policy.forget_table(state)
                    self.loads.compute_next(state)
        if self._on_settled:
            for feature in self._on_settled:
                feature.on_settled()

    def _settle_report(self, report: StepReport, output: KVConnectorOutput) -> None:
        """Settle what every rank has reported by now.

        All outcomes are recorded before the first transfer is settled, because they come only once;
        and loads go first, because requests wait for them.
        """
        for bad in report.bad_slots:  # before the failure that frees them for others
            self.ranks.retire(bad)
        complete = [self._record(outcome) for outcome in report.outcomes]
        received = output.finished_recving = {*(output.finished_recving or ())}
        for load in complete:
            if isinstance(load, Load):
                if load.failure is None and load.is_in_step and load.owner.prefix is not None:
                    load.lease.release()  # its request runs, and leases its prefix
                elif load.failure is None:
                    self.stores.load_landed(load.owner, load.lease)
                if self.loads.settle(load):  # nothing may fail from here to the next line
                    received.add(load.owner.request.request_id)
        for store in complete:
            if isinstance(store, Store):
                if self.tiers is not None and not self._is_disabled:
                    self.tiers.stored(store)
                self.stores.settle(store)
        if self.tiers is not None:
            self.tiers.settle(report)
        for capacity in report.capacities:
            self.ranks.add_capacity(capacity)
        for facts in report.host_facts:
            self.ranks.add_facts(facts)
            if facts.doubts and self.tiers is not None:
                self.tiers.stand_alone(facts.doubts)
        for rank in report.lost_ranks:
            self.ranks.lose(rank, "no copy path passed the self-test")
        if self.ranks.has_dead:
            self._stop()
        if self.hits.slots.num_usable or report.lost_ranks:
            self._start_steps_left = 0

    def _record(self, outcome: Outcome) -> Store | Load | None:
        """Record an outcome; return its transfer if this rank was the last to report it."""
        transfer_id = outcome.transfer_id
        transfer = self.stores.ledger.get(transfer_id) or self.loads.ledger.get(transfer_id)
        if transfer is None:
            if self.tiers is None or not self.tiers.record(outcome):
                self.counters[Count.STALE_REPORTS] += 1
            return None
        if outcome.rank not in transfer.ranks_left:
            self.counters[Count.DUPLICATE_REPORTS] += 1
            return None
        is_last = transfer.reported(outcome.rank, outcome.failure)
        if outcome.failure is not None or self.ranks.num_failed_in_a_row:
            self.ranks.watch(outcome, type(transfer).__name__)
            if self.ranks.has_dead:
                self._stop()
        return transfer if is_last else None

    # ---- what went wrong -----------------------------------------------------------------------

    def _stop(self) -> None:
        """Plan nothing more, since a rank copies no more. The books are in order, so they stay."""
        if not self._is_disabled:
            self._is_disabled = True
            if self.tiers is not None:
                self.tiers.stop()
            self.hits.directory.withdraw()

    def disable(self, report: object = None) -> None:
        """After an error inside the planner: only finish what the workers copy (I7, I8).

        The error may have come between any two steps of the books. So they are rebuilt from what is
        certain: a transfer that some rank has not reported goes on, and no store is published; of
        the rest every lease is released, and a request that vLLM keeps waiting is told to
        recompute. Hits that were reported stay until vLLM takes or drops them.

        Args:
            report: of the workers, if it was lost by the error: what it names has ended.
        """
        self._is_disabled = self.has_changed = True
        self._start_steps_left = 0
        self.hits.directory.withdraw()
        if isinstance(report, StepReport):
            for outcome in report.outcomes:
                transfer_id = outcome.transfer_id
                transfer = self.stores.ledger.get(transfer_id) or self.loads.ledger.get(transfer_id)
                if transfer is not None:
                    transfer.reported(outcome.rank, None)
                elif self.tiers is not None:
                    self.tiers.record(outcome)
        self.loads.give_up(self.book)
        self.stores.give_up(self.book)
        needed = {*self.loads.leases(self.book), *self.stores.leases}
        if self.tiers is not None:
            self.tiers.give_up()
            needed.update(self.tiers.leases)
        for feature in self.features:
            feature.on_disabled()
        self.leases.keep_only(needed)

    def reset_cache(self, cause: str | None = None) -> None:
        """Nothing stored so far is ever found again.

        What is in flight keeps its lease until it settles. No store of it is published, and no load
        is used.

        Args:
            cause: why the weights may be others, if they were changed in the running engine. An
                operator who resets knows which they are, and may have named them for the tiers.
        """
        self.has_changed = True
        self.counters[Count.RESETS] += 1
        num_held = self.hits.directory.num_held
        if cause is None:
            logger.info("The host cache was reset: %d slots were invalidated.", num_held)
        elif num_held:  # an update of the weights may be many calls
            message = "The weights may have changed (%s): %d slots were invalidated."
            logger.info(message, cause, num_held)
        self.hits.slots.forget_all()
        for state in self.book:
            self.loads.reset(state)
            self.stores.release_prefix(state)
        self.loads.fail_all()
        self.stores.reset()
        if self.tiers is not None:
            self.tiers.reset(is_vouched_for=cause is None)
        for feature in self.features:
            feature.on_reset(cause)
        self._pass_over()
        self.outdated.begin(self.book)

    def _pass_over(self) -> None:
        """Store nothing of what was found and not planned yet, nor of what is computed by now."""
        self.policy.pass_over(list(self.book))
        self.stores.forget_unplanned()

    # ---- the rest ------------------------------------------------------------------------------

    def has_pending_push_work(self) -> bool:
        """Whether the engine must keep stepping.

        A transfer is planned or in flight, or the ranks have not reported how many slots they have,
        or there are KV events, which vLLM takes in a step.
        """
        if self._start_steps_left or self.stores.has_work or self.loads.has_work:
            return True
        if self.tiers is not None and self.tiers.has_work:
            return True
        return bool(self._has_work) and any(feature.has_work() for feature in self._has_work)

    @property
    def is_disabled(self) -> bool:
        """Whether only what is in flight goes on."""
        return self._is_disabled

    @property
    def is_starting(self) -> bool:
        """Whether the ranks may still tell of their memory for the first time."""
        return bool(self._start_steps_left) and not self._is_disabled

    def note_change(self) -> None:
        """A gauge or a label of a feature may have changed."""
        self.has_changed = True

    def take_changes(self, counters: Counters) -> None:
        """See `Side`. A hit alone changes nothing: what follows it does."""
        self.has_changed = False

    def statistics(self) -> Statistics:
        """Return how it stands; see `Statistics`."""
        return Statistics(
            requests=self.book.num_live,
            leases=len(self.leases),
            stores=len(self.stores),
            store_blocks=self.stores.num_blocks,
            loads=len(self.loads),
            holders=self.loads.num_holders,
            is_disabled=self._is_disabled,
            contained_errors=self.counters[Count.CONTAINED_ERRORS],
        )

    def gauges(self) -> dict[str, float]:
        """Return how the host pool stands now; see `observe.metrics.GAUGES`."""
        slots = self.hits.slots
        gauges = {
            "slots": slots.num_usable,
            "configured_slots": slots.num_slots,
            "used_slots": slots.directory.num_held - len(slots.directory.being_stored),
            "leased_slots": slots.num_leased,
            "retired_slots": slots.num_retired,
            "capacity_bytes": slots.num_usable * self.options.slot_bytes,
            "is_disabled": int(self._is_disabled),
            "stores_in_flight": len(self.stores.ledger.in_flight),
            "loads_in_flight": len(self.loads.ledger.in_flight),
            **self.costs.gauges(),
        }
        if self.tiers is not None:
            gauges |= self.tiers.gauges()
        for feature in self._gauges:
            gauges |= feature.gauges()
        return gauges

    @property
    def host_labels(self) -> Mapping[str, str]:
        """See `Ranks.host_labels`."""
        return self.ranks.host_labels

    def check_invariants(self) -> None:
        self.leases.check_invariants()
        self.stores.check_invariants()
        if self.tiers is not None:
            self.tiers.check_invariants()
        for feature in self._check_invariants:
            feature.check_invariants()

    def shutdown(self) -> None:
        """See `SchedulerSide`."""
        for feature in self.features:
            feature.shutdown()
