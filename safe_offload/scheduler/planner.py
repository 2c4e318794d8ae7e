"""Facts of a step in, a plan out: the only control flow of the scheduler side.

Each method answers one hook of vLLM. They take what vLLM knows and decide; there is no I/O, no
clock and no callback in here.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from safe_offload.compat import allocated_block_ids, early_written_block_ids
from safe_offload.observe.counters import Count, Counters
from safe_offload.protocol import (
    EMPTY_PLAN,
    Outcome,
    StepPlan,
    StepReport,
)
from safe_offload.scheduler.agenda import Agenda
from safe_offload.scheduler.cost import Costs, StepWatch
from safe_offload.scheduler.fences import Store
from safe_offload.scheduler.gpu_blocks import GpuBlocks
from safe_offload.scheduler.harvest import Harvest
from safe_offload.scheduler.index import HostIndex
from safe_offload.scheduler.leases import LeaseBook
from safe_offload.scheduler.loads import Load, Loads
from safe_offload.scheduler.ranks import Ranks
from safe_offload.scheduler.requests import Phase, RequestBook
from safe_offload.scheduler.sharing import WAIT_MAX_S
from safe_offload.scheduler.stores import Stores

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

logger = logging.getLogger(f"vllm.{__name__}")

START_STEPS_MAX = 1000
"""So many steps an idle engine makes at its start until every rank has told how many slots it has,
so that an operator sees them before the first request. An idle step takes a millisecond."""


@dataclass(frozen=True, slots=True)
class PlannerOptions:
    """What the planner has to know about the engine.

    Attributes:
        num_ranks: worker processes that report.
        num_store_blocks_max: blocks of all stores in flight together.
        lazy_num_blocks: store only what is about to be evicted, looking so many blocks ahead of the
            allocator; None to store everything that is computed.
        blocks_written_early: the workers write new blocks before they honour fences
            (see `compat.early_written_block_ids`).
        state_group_ids: KV cache groups of Mamba states.
        num_decode_tokens_max: a request that has computed its prompt computes at most so many
            tokens in one step.
        transfer_timeout_s: no request waits longer for loads of others.
        min_load_tokens, num_step_tokens_max: see `cost.Costs`.
        num_steps_in_flight: see `cost.StepWatch`.
    """

    num_ranks: int
    num_store_blocks_max: int
    lazy_num_blocks: int | None = None
    blocks_written_early: bool = False
    state_group_ids: tuple[int, ...] = ()
    num_decode_tokens_max: int = 1
    transfer_timeout_s: float = WAIT_MAX_S
    min_load_tokens: int | None = 0
    num_step_tokens_max: int = 1
    num_steps_in_flight: int = 1

    @property
    def is_lazy(self) -> bool:
        """Whether only what is about to be evicted is stored."""
        return self.lazy_num_blocks is not None


class Planner:
    """The scheduler side.

    Args:
        index: the host index, empty.
        options: see `PlannerOptions`.
        counters: what it does is counted here.
    """

    def __init__(self, index: HostIndex, options: PlannerOptions, counters: Counters) -> None:
        transfer_ids = itertools.count()
        self._index = index
        index.slots.counters = counters
        self._options = options
        self._counters = counters
        self._leases = LeaseBook(index.slots)
        self._book = RequestBook(len(index.group_block_sizes), counters)
        self._costs = Costs(options.min_load_tokens, options.num_step_tokens_max)
        num_in_flight, num_decoded = options.num_steps_in_flight, options.num_decode_tokens_max
        watch = StepWatch(self._costs, num_in_flight, num_decoded)
        self._steps = watch if self._costs.is_measuring else None
        ranks, wait_max_s = options.num_ranks, min(WAIT_MAX_S, options.transfer_timeout_s)
        self._loads = Loads(
            index, self._leases, transfer_ids, ranks, counters, wait_max_s, self._costs
        )
        self._harvest = Harvest(index, self._leases, counters)
        self._stores = Stores(
            self._harvest, index, self._leases, transfer_ids, options.num_ranks, counters
        )
        self._agenda = Agenda(index.group_block_sizes, options.num_decode_tokens_max)
        self._ranks = Ranks(options.num_ranks, index.slots, counters)
        self._is_disabled = False
        self._gpu: GpuBlocks | None = None
        self._start_steps_left = START_STEPS_MAX
        self.has_changed = True
        """Whether a gauge may have changed since somebody set this to False.

        A hit alone does not say so: what follows it does, and one is asked for in every step.
        """

    def bind(self, gpu: GpuBlocks) -> None:
        """Learn where vLLM keeps its block tables; before this nothing is matched or stored."""
        self._gpu = gpu
        self._loads.bind(gpu)
        num_tokens_kept = gpu.num_tokens_kept(self._index.group_ids)
        self._agenda.bind(num_tokens_kept, is_lazy=self._options.is_lazy)
        self._harvest.bind(gpu, self._options.lazy_num_blocks, self._options.num_store_blocks_max)

    def disable(self, report: object = None) -> None:
        """After an error inside the planner: only finish what the workers copy (I7, I8).

        The error may have come between any two steps of the books. So they are not mended but made
        anew from what is certain: a transfer that some rank has not reported goes on, and no store
        is published; of the rest every lease is released, and a request that vLLM keeps waiting is
        told to recompute. Hits that were reported stay until vLLM takes or drops them.

        Args:
            report: of the workers, if it was lost by the error: what it names has ended.
        """
        self._is_disabled = self.has_changed = True
        self._start_steps_left = 0
        if isinstance(report, StepReport):
            for outcome in report.outcomes:
                transfer = self._find(outcome.transfer_id)
                if transfer is not None:
                    transfer.ranks_left.discard(outcome.rank)
        states = {*self._book, *self._loads.owners}
        self._loads.give_up(states)
        self._stores.give_up()
        for state in states:
            state.prefix = state.loaded = None
            state.leftover, state.num_stores = [], 0
        hits = (state.hit_lease for state in states if state.hit_lease is not None)
        self._leases.keep_only({*hits, *self._loads.leases, *self._stores.leases})

    # ---- vLLM asks about a request -------------------------------------------------------------

    def see(self, request: Request) -> None:
        """on_new_request: remember the request, so that finished ids can be told from foreign."""
        self._book.see(request)

    def match(self, request: Request, num_computed_tokens: int, now_s: float) -> int | None:
        """get_num_new_matched_tokens: report and lease the longest host hit (I1).

        May be called any number of times for one request; each call replaces the last.

        Args:
            request: not scheduled yet, or preempted.
            num_computed_tokens: tokens that the GPU's prefix cache has.
            now_s: of a clock that never goes back.

        Returns:
            Number of tokens behind those that can be loaded, 0 for none; None while a load of the
            same blocks for another request is under way, which this one waits for.
        """
        state = self._book.see(request)
        if state.finished or state.phase is Phase.LOADING:
            return 0
        state.preempt()
        is_off = self._is_disabled or self._gpu is None
        if request.skip_reading_prefix_cache or is_off:
            state.drop_hit()
            return 0
        num_tokens = self._loads.match(state, num_computed_tokens, now_s)
        if self._options.is_lazy and num_tokens is not None:
            self._harvest.look_ahead(num_computed_tokens + num_tokens)
        return num_tokens

    def allocated(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        """update_state_after_alloc: turn the leased hit into a load, or give it up.

        Args:
            request: the request that was given blocks.
            blocks: its whole block table.
            num_external_tokens: how many of the reported tokens vLLM wants loaded; 0 for none.
        """
        self.has_changed = True
        state = self._book.see(request)
        state.announced = False
        if state.finished:
            return
        state.preempt()
        if num_external_tokens > 0:
            self._loads.begin(state, blocks.blocks, num_external_tokens)
        else:
            self._loads.let_go(state)
            state.drop_hit()
            state.must_compute = False
            state.wait.stuck_at = -1
            state.move(Phase.RUNNING)
            self._agenda.add(state)

    def owe_failure(self, request: Request) -> None:
        """`allocated` failed although vLLM waits for a load: tell it to recompute."""
        self._loads.owe_failure(self._book.see(request))

    def finish(self, request: Request) -> None:
        """request_finished: store what is still unstored, give up all leases but those in flight.

        The request still holds its blocks. It holds none of them for us when this returns (I2), and
        a second call finds nothing to do (I4).
        """
        self.has_changed = True
        state = self._book.see(request)
        try:
            if not self._is_disabled:
                self._harvest.add_finished(state)
        finally:  # vLLM does not ask again
            self._loads.let_go(state)
            self._book.finish(state)

    # ---- a step is planned ---------------------------------------------------------------------

    def plan(self, scheduler_output: SchedulerOutput, now_s: float) -> StepPlan:
        """build_connector_meta: what the workers do in this step.

        What is new counts as sent when the plan is complete, so that an error on the way leaves
        nothing in flight that no worker knows.

        Args:
            scheduler_output: of vLLM.
            now_s: the time, of a clock that does not go back.
        """
        self._index.slots.set_time(now_s)
        if self._start_steps_left:
            self._start_steps_left -= 1
        if self._gpu is None:
            return EMPTY_PLAN
        if self._steps is not None:
            self._steps.planned(scheduler_output, now_s)
        self._book.purge(self._gpu)
        if not self._is_disabled:
            self._find_stores(scheduler_output)
        before, after, fences = self._stores.plan(lambda: self._early_written(scheduler_output))
        if not (before or after or fences or self._loads.has_news):
            return EMPTY_PLAN
        plan = StepPlan(self._loads.new_transfers(), before, after, fences, self._loads.failures)
        self._stores.sent()
        self._loads.sent(now_s)
        self.has_changed = True
        return plan

    def _early_written(self, scheduler_output: SchedulerOutput) -> set[int]:
        """Blocks that are written before the workers can honour a fence of this step."""
        if not self._options.blocks_written_early:
            return set()
        return early_written_block_ids(scheduler_output, self._options.state_group_ids)

    def _find_stores(self, scheduler_output: SchedulerOutput) -> None:
        scheduled = scheduler_output.num_scheduled_tokens
        if scheduler_output.preempted_req_ids:
            self._find_preempted(scheduler_output)
        if self._loads.has_news:
            self._harvest.add_computed(self._loads.owners_of_new)
        due = self._agenda.due(scheduled)
        if due:
            self._harvest.add_computed(due)
        if self._options.state_group_ids:
            self._harvest.add_boundary_states(scheduler_output, self._book)
        if self._options.is_lazy:
            self._harvest.add_given_away()
            if self._book.has_live:  # else an idle engine would store without end
                self._harvest.add_about_to_be_evicted()

    def _find_preempted(self, scheduler_output: SchedulerOutput) -> None:
        preempted = []
        for request_id in sorted(scheduler_output.preempted_req_ids or ()):
            state = self._book.get(request_id)
            if state is not None and not state.finished:
                if request_id not in scheduler_output.num_scheduled_tokens:
                    state.preempt()  # else it runs again already, and `match` has done this
                preempted.append(state)
        given_out = allocated_block_ids(scheduler_output) | self._loads.new_targets
        given_out -= self._early_written(scheduler_output)  # too late to store those
        self._harvest.add_preempted(preempted, given_out)

    def plan_nothing(self) -> StepPlan:
        """The plan of a step whose planning failed, after `disable`: it tells what has failed."""
        plan = StepPlan(failures=self._loads.failures)
        self._loads.sent()
        return plan

    # ---- the workers have reported -------------------------------------------------------------

    def settle(self, output: KVConnectorOutput) -> None:
        """update_connector_output: settle transfers, complete loads, filter vLLM's finished ids."""
        if output.invalid_block_ids:
            # Another connector's load failed: what was computed from it since is garbage too.
            self._stores.poison_all(self._book)
        report = output.kv_connector_worker_meta
        try:
            if isinstance(report, StepReport):
                self.has_changed = True
                self._settle_report(report, output)
        finally:  # vLLM reads the ids in any case
            if self._gpu is not None and (output.finished_recving or output.finished_sending):
                self._book.filter(output, self._gpu)

    def _settle_report(self, report: StepReport, output: KVConnectorOutput) -> None:
        """Settle what every rank has reported by now.

        All outcomes are noted before the first transfer is settled, because none of them is told
        again; and loads go first, because requests wait for them.
        """
        for bad in report.bad_slots:  # before the failure that frees them for others
            self._ranks.retire(bad)
        complete = [self._note(outcome) for outcome in report.outcomes]
        for load in complete:
            if isinstance(load, Load) and (state := self._loads.settle(load)) is not None:
                received = output.finished_recving or ()
                output.finished_recving = {*received, state.request.request_id}
        for store in complete:
            if isinstance(store, Store):
                self._stores.settle(store)
        for capacity in report.capacities:
            self._ranks.add_capacity(capacity)
        for facts in report.host_facts:
            self._ranks.add_facts(facts)
        for rank in report.lost_ranks:
            self._ranks.lose(rank, "no way to copy passed its self-test")
            self._is_disabled = True
        if self._index.slots.num_usable or report.lost_ranks:
            self._start_steps_left = 0

    def _note(self, outcome: Outcome) -> Store | Load | None:
        """Note what one rank has reported; returns the transfer if it was the last rank."""
        transfer_id = outcome.transfer_id
        transfer = self._find(transfer_id)
        if transfer is None:
            self._counters[Count.STALE_REPORTS] += 1
            return None
        if outcome.rank not in transfer.ranks_left:
            self._counters[Count.DUPLICATE_REPORTS] += 1
            return None
        transfer.ranks_left.discard(outcome.rank)
        failed = outcome.failure is not None
        self._ranks.watch(outcome, type(transfer).__name__)
        if self._ranks.has_dead:
            self._is_disabled = True  # the books are in order, so they stay
        if isinstance(transfer, Store):
            transfer.poisoned |= failed
        else:
            transfer.failed |= failed
        return None if transfer.ranks_left else transfer

    def _find(self, transfer_id: int) -> Store | Load | None:
        """The transfer of that id, if it is in flight."""
        return self._stores.get(transfer_id) or self._loads.get(transfer_id)

    # ---- the rest ------------------------------------------------------------------------------

    def reset(self) -> None:
        """reset_cache: nothing stored so far is ever found again.

        What is in flight keeps its lease until it settles, and is not published.
        """
        self.has_changed = True
        self._counters[Count.RESETS] += 1
        logger.info(
            "The host cache was reset: what %d slots held can no longer be hit.",
            self._index.slots.num_filled,
        )
        self._index.forget_all()
        for state in self._book:
            state.drop_hit()
            state.let_go_prefix()
            state.wait.called_off = True
        self._stores.forget_unsent(self._book)

    @property
    def has_work(self) -> bool:
        """Whether the engine must keep stepping.

        A transfer is planned or in flight, or the ranks have not told yet how many slots there are.
        """
        if self._start_steps_left:
            return True
        return bool(len(self._stores) or self._harvest.found or self._loads.has_work)

    def gauges(self) -> dict[str, int]:
        """How the host pool stands now; see `observe.metrics.GAUGES`."""
        return {
            "slots": self._index.slots.num_usable,
            "leased_slots": self._index.slots.num_leased,
            "retired_slots": self._index.slots.num_retired,
            "is_disabled": int(self._is_disabled),
            "stores_in_flight": len(self._stores),
            "loads_in_flight": len(self._loads),
            **self._costs.gauges(),
        }

    @property
    def host_labels(self) -> Mapping[str, str]:
        """See `Ranks.host_labels`."""
        return self._ranks.host_labels

    def check_invariants(self) -> None:
        """Compare all bookkeeping with itself; call it between steps.

        Raises:
            InvariantError: a lease, a reference or a fence is wrong.
        """
        self._leases.check_invariants()
        self._stores.check_invariants()
