"""Facts of a step in, a plan out: the only control flow of the scheduler side.

Each method answers one hook of vLLM. They take what vLLM knows and decide; there is no I/O, no
clock and no callback in here.
"""

from __future__ import annotations

import itertools
import logging
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from safe_offload.compat import GpuBlocks, early_written_block_ids
from safe_offload.observe.counters import Count, Counters
from safe_offload.protocol import (
    EMPTY_PLAN,
    BadSlots,
    FailureReason,
    Outcome,
    StepPlan,
    StepReport,
)
from safe_offload.scheduler.fences import Store
from safe_offload.scheduler.index import HostIndex
from safe_offload.scheduler.leases import LeaseBook
from safe_offload.scheduler.loads import Loads
from safe_offload.scheduler.requests import Phase, RequestBook, RequestState
from safe_offload.scheduler.slots import slot_id
from safe_offload.scheduler.stores import Stores

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

logger = logging.getLogger(f"vllm.{__name__}")

FAILED_IN_A_ROW_MAX = 100
"""So many copies of a rank may fail, none in between ending well, before we give it up."""


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
    """

    num_ranks: int
    num_store_blocks_max: int
    lazy_num_blocks: int | None = None
    blocks_written_early: bool = False
    state_group_ids: tuple[int, ...] = ()


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
        self._options = options
        self._counters = counters
        self._leases = LeaseBook(index.slots)
        self._book = RequestBook(len(index.group_block_sizes), counters)
        self._loads = Loads(index, self._leases, transfer_ids, options.num_ranks, counters)
        self._stores = Stores(index, self._leases, transfer_ids, options.num_ranks, counters)
        self._capacities: dict[int, int] = {}
        self._is_disabled = False
        self._num_failed_in_a_row: Counter[int] = Counter()
        self._gpu: GpuBlocks | None = None

    def bind(self, gpu: GpuBlocks) -> None:
        """Learn where vLLM keeps its block tables; before this nothing is matched or stored."""
        self._gpu = gpu
        self._loads.bind(gpu.num_blocks)
        self._stores.bind(gpu, self._options.lazy_num_blocks, self._options.num_store_blocks_max)

    def disable(self) -> None:
        """Match and store nothing more; what is in flight still settles."""
        self._is_disabled = True

    # ---- vLLM asks about a request -------------------------------------------------------------

    def see(self, request: Request) -> None:
        """on_new_request: remember the request, so that finished ids can be told from foreign."""
        self._book.see(request)

    def match(self, request: Request, num_computed_tokens: int) -> int:
        """get_num_new_matched_tokens: report and lease the longest host hit (I1).

        May be called any number of times for one request; each call replaces the last.

        Args:
            request: not scheduled yet, or preempted.
            num_computed_tokens: tokens that the GPU's prefix cache has.

        Returns:
            Number of tokens behind those that can be loaded, 0 for none.
        """
        state = self._book.see(request)
        state.drop_hit()
        if state.finished or state.phase is Phase.LOADING:
            return 0
        state.preempt()
        if request.skip_reading_prefix_cache or self._is_disabled or self._gpu is None:
            return 0
        return self._loads.match(state, num_computed_tokens)

    def allocated(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        """update_state_after_alloc: turn the leased hit into a load, or give it up.

        Args:
            request: the request that was given blocks.
            blocks: its whole block table.
            num_external_tokens: how many of the reported tokens vLLM wants loaded; 0 for none.
        """
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
            state.move(Phase.RUNNING)

    def owe_failure(self, request: Request) -> None:
        """`allocated` failed although vLLM waits for a load: tell it to recompute."""
        self._loads.owe_failure(self._book.see(request))

    def finish(self, request: Request) -> None:
        """request_finished: store what is still unstored, give up all leases but those in flight.

        The request still holds its blocks. It holds none of them for us when this returns (I2), and
        a second call finds nothing to do (I4).
        """
        state = self._book.see(request)
        if not self._is_disabled:
            self._stores.add_finished(state)
        self._loads.let_go(state)
        self._book.finish(state)

    # ---- a step is planned ---------------------------------------------------------------------

    def plan(self, scheduler_output: SchedulerOutput) -> StepPlan:
        """build_connector_meta: what the workers do in this step."""
        if self._gpu is None:
            return EMPTY_PLAN
        early_written: set[int] = set()
        if self._options.blocks_written_early:
            early_written = early_written_block_ids(scheduler_output, self._options.state_group_ids)
        if not self._is_disabled:
            self._find_stores(scheduler_output)
        before, after = self._stores.take_new()
        fences = self._stores.fence(early_written)
        loads = tuple(load.transfer for load in self._loads.take_new())
        failures = self._loads.announce_failures()
        self._book.purge(self._gpu)
        if not (loads or before or after or fences or failures):
            return EMPTY_PLAN
        return StepPlan(loads, tuple(before), tuple(after), fences, failures)

    def _find_stores(self, scheduler_output: SchedulerOutput) -> None:
        scheduled = scheduler_output.num_scheduled_tokens
        for request_id in sorted(scheduler_output.preempted_req_ids or ()):
            state = self._book.get(request_id)
            if state is not None and not state.finished:
                if request_id not in scheduled:
                    state.preempt()  # else it runs again already, and `match` has done this
                self._stores.add_preempted(state)
        states = self._loads.owners_of_new
        states += [state for i in scheduled if (state := self._book.get(i)) is not None]
        self._stores.add_computed(states)
        self._stores.add_boundary_states(scheduler_output)
        if scheduled:  # else an idle engine would store without end
            self._stores.add_about_to_be_evicted()

    def plan_nothing(self) -> StepPlan:
        """The plan of a step whose planning failed: every load that was not sent has failed."""
        self._loads.fail_new()
        return StepPlan(failures=self._loads.announce_failures())

    # ---- the workers have reported -------------------------------------------------------------

    def settle(self, output: KVConnectorOutput) -> None:
        """update_connector_output: settle transfers, complete loads, filter vLLM's finished ids."""
        if output.invalid_block_ids:
            # Another connector's load failed: what was computed from it since is garbage too.
            self._stores.poison_all()
        report = output.kv_connector_worker_meta
        completed: list[RequestState] = []
        if isinstance(report, StepReport):
            for capacity in report.capacities:
                self._add_capacity(capacity.rank, capacity.num_slots)
            for bad in report.bad_slots:  # before the failure that frees them for others
                self._retire(bad)
            for outcome in report.outcomes:
                self._settle_outcome(outcome, completed)
        if completed:
            received = set(output.finished_recving or ())
            received.update(state.request.request_id for state in completed)
            output.finished_recving = received
        if self._gpu is not None and (output.finished_recving or output.finished_sending):
            self._book.filter(output, self._gpu)

    def _add_capacity(self, rank: int, num_slots: int) -> None:
        """Open as many slots as every rank has (FAULTS: X1)."""
        self._capacities[rank] = num_slots
        if len(self._capacities) == self._options.num_ranks:
            self._index.slots.open(min(self._capacities.values()))

    def _retire(self, bad: BadSlots) -> None:
        """Take slots whose memory has changed out of use, for good."""
        retired = self._index.slots.retire(bad.slot_ids)
        self._index.forget(retired)
        if retired:
            self._counters[Count.CHECKSUM_MISMATCHES] += len(retired)
            logger.error(
                "Host memory of rank %d has changed while it was kept, in slots %s. Their tokens "
                "are recomputed and they are not used again. This is most often a memory error: "
                "check the machine (dmesg, ECC counts of edac-util or ipmitool sel) and replace "
                "the module if it comes again.",
                bad.rank,
                sorted(slot_id(slot) for slot in retired),
            )

    def _watch_failures(self, outcome: Outcome) -> None:
        """Give up on a rank that will never copy again, and say so once."""
        rank, failure = outcome.rank, outcome.failure
        if failure is None:
            self._num_failed_in_a_row[rank] = 0
        elif failure is FailureReason.COPY_FAILED:
            self._num_failed_in_a_row[rank] += 1
        num_failed = self._num_failed_in_a_row[rank]
        is_dead = failure is FailureReason.NOT_RUNNING
        if self._is_disabled or not (is_dead or num_failed >= FAILED_IN_A_ROW_MAX):
            return
        self.disable()
        logger.error(
            "Rank %d cannot copy any more: %s. The connector goes on as a cache that always "
            "misses: nothing is stored or loaded until the server is restarted. The log of that "
            "rank says why.",
            rank,
            "its transfer engine has ended"
            if is_dead
            else f"{num_failed} transfers in a row failed",
        )

    def _settle_outcome(self, outcome: Outcome, completed: list[RequestState]) -> None:
        transfer_id = outcome.transfer_id
        transfer = self._stores.get(transfer_id) or self._loads.get(transfer_id)
        if transfer is None:
            self._counters[Count.STALE_REPORTS] += 1
            return
        if outcome.rank not in transfer.ranks_left:
            self._counters[Count.DUPLICATE_REPORTS] += 1
            return
        transfer.ranks_left.discard(outcome.rank)
        failed = outcome.failure is not None
        if outcome.failure is not None and not self._is_disabled:
            logger.warning(
                "%s %d failed on rank %d: %s. Its tokens are recomputed when they are needed.",
                type(transfer).__name__,
                transfer_id,
                outcome.rank,
                outcome.failure.value,
            )
        self._watch_failures(outcome)
        if isinstance(transfer, Store):
            transfer.poisoned |= failed
            if not transfer.ranks_left:
                self._stores.settle(transfer)
        else:
            transfer.failed |= failed
            if not transfer.ranks_left and (state := self._loads.settle(transfer)) is not None:
                completed.append(state)

    # ---- the rest ------------------------------------------------------------------------------

    def reset(self) -> None:
        """reset_cache: nothing stored so far is ever found again.

        What is in flight keeps its lease until it settles, and is not published.
        """
        self._index.forget_all()
        for state in self._book:
            state.drop_hit()
        self._stores.reset(self._book)

    @property
    def has_work(self) -> bool:
        """Whether a transfer is planned or in flight, so that the engine must keep stepping."""
        return bool(len(self._stores) or self._loads.has_work)

    def gauges(self) -> dict[str, int]:
        """How the host pool stands now; see `observe.metrics.GAUGES`."""
        return {
            "slots": self._index.slots.num_usable,
            "leased_slots": self._index.slots.num_leased,
            "retired_slots": self._index.slots.num_retired,
            "is_disabled": int(self._is_disabled),
            "stores_in_flight": len(self._stores),
            "loads_in_flight": len(self._loads),
        }

    def check_invariants(self) -> None:
        """Compare all bookkeeping with itself; call it between steps.

        Raises:
            InvariantError: a lease, a reference or a fence is wrong.
        """
        self._leases.check_invariants()
        self._stores.check_invariants()
