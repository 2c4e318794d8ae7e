"""Facts of a step in, a plan out: the only control flow of the scheduler side.

Each method answers one hook of vLLM. They take what vLLM knows and decide; there is no I/O, no
clock and no callback in here. What vLLM's hooks may do to us is in docs/architecture.md.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from safe_offload.compat import GpuBlocks, early_written_block_ids
from safe_offload.observe.counters import Count, Counters
from safe_offload.protocol import EMPTY_PLAN, Outcome, StepPlan, StepReport, Transfer
from safe_offload.scheduler.fences import Source, Store, StoresInFlight
from safe_offload.scheduler.index import HostIndex
from safe_offload.scheduler.leases import Lease, LeaseBook, LeaseKind
from safe_offload.scheduler.requests import Phase, RequestBook, RequestState
from safe_offload.scheduler.slots import slot_id
from safe_offload.scheduler.sources import EagerScan, LazyWalk, source_of

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.kv_cache_utils import KVCacheBlock
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

logger = logging.getLogger(f"vllm.{__name__}")


@dataclass(frozen=True, slots=True)
class PlannerOptions:
    """What the planner has to know about the engine.

    Attributes:
        num_ranks: worker processes that report.
        lazy: store what is about to be evicted instead of everything that is computed.
        lazy_num_blocks: how many blocks ahead of the allocator the lazy mode looks.
        blocks_written_early: the workers write new blocks before they honour fences
            (see `compat.early_written_block_ids`).
    """

    num_ranks: int
    lazy: bool = False
    lazy_num_blocks: int = 0
    blocks_written_early: bool = False


@dataclass(slots=True, eq=False)
class Load:
    """A load from its planning until every rank has reported it.

    Attributes:
        lease: the slots it reads.
        owner: the request that waits for it.
        ranks_left: ranks that have not reported it.
        failed: a rank reported that it failed.
    """

    transfer: Transfer
    lease: Lease
    owner: RequestState
    ranks_left: set[int]
    failed: bool = False


class Planner:
    """The scheduler side.

    Args:
        index: the host index, empty.
        options: see `PlannerOptions`.
        counters: what it does is counted here.
    """

    def __init__(self, index: HostIndex, options: PlannerOptions, counters: Counters) -> None:
        self._index = index
        self._options = options
        self._counters = counters
        self._leases = LeaseBook(index.slots)
        self._book = RequestBook(len(index.group_block_sizes), counters)
        self._stores = StoresInFlight()
        self._loads: dict[int, Load] = {}
        self._new_loads: list[Load] = []
        self._new_stores: list[Store] = []
        self._short_of_slots: set[RequestState] = set()
        self._failures: list[RequestState] = []
        self._capacities: dict[int, int] = {}
        self._transfer_ids = itertools.count()
        self._is_disabled = False
        self._gpu: GpuBlocks | None = None
        self._scan: EagerScan | None = None
        self._walk: LazyWalk | None = None

    def bind(self, gpu: GpuBlocks) -> None:
        """Learn where vLLM keeps its block tables; before this nothing is matched or stored."""
        self._gpu = gpu
        in_flight = self._stores.stores_key
        if self._options.lazy:
            self._walk = LazyWalk(self._index, gpu, in_flight, self._options.lazy_num_blocks)
        else:
            self._scan = EagerScan(self._index, gpu, in_flight)

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
        if state.finished or state.phase is Phase.LOADING or self._gpu is None:
            return 0
        state.preempt()
        if request.skip_reading_prefix_cache or self._is_disabled:
            return 0
        # The last token is always computed, for its logits.
        hit = self._index.find_hit(
            request.block_hashes, num_computed_tokens, request.num_tokens - 1
        )
        if hit is None:
            return 0
        state.hit, state.hit_lease = hit, self._leases.lease(LeaseKind.MATCH, hit.slots())
        state.move(Phase.MATCHED)
        return hit.num_tokens

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
        if num_external_tokens <= 0:
            state.drop_hit()
            state.preempt()
            state.move(Phase.RUNNING)
            return
        if state.phase is Phase.RUNNING:
            state.preempt()
        pairs = self._pair(state, blocks.blocks, num_external_tokens)
        if pairs:
            lease = self._leases.lease(LeaseKind.LOAD, [slot for _, slot in pairs])
            transfer = Transfer(
                next(self._transfer_ids),
                tuple(block.block_id for block, _ in pairs),
                tuple(slot_id(slot) for _, slot in pairs),
            )
            self._new_loads.append(
                Load(transfer, lease, state, set(range(self._options.num_ranks)))
            )
            self._counters[Count.HIT_TOKENS] += num_external_tokens
        else:
            # vLLM waits for us all the same: tell it to compute the tokens itself.
            self._counters[Count.UNUSABLE_HITS] += 1
            self._failures.append(state)
        state.drop_hit()
        state.move(Phase.LOADING)
        state.num_loads += 1

    def _pair(
        self,
        state: RequestState,
        blocks_by_group: Sequence[Sequence[KVCacheBlock]],
        num_tokens: int,
    ) -> list[tuple[KVCacheBlock, KVCacheBlock]]:
        """GPU block and host slot for every block of the first `num_tokens` tokens of the hit.

        Returns:
            Empty if the hit cannot fill every block that vLLM allocated for these tokens: loading
            the rest would leave bytes in the window of attention that nobody wrote (I6).
        """
        hit = state.hit
        if hit is None or num_tokens > hit.num_tokens:
            return []
        pairs = []
        for group_idx in self._index.group_ids:
            block_size = self._index.group_block_sizes[group_idx]
            first = hit.num_computed_tokens // block_size
            last = -(-(hit.num_computed_tokens + num_tokens) // block_size)
            blocks = blocks_by_group[group_idx][first:last]
            slots = hit.slots_by_group[group_idx][: len(blocks)]
            if len(slots) < len(blocks):
                return []
            for block, slot in zip(blocks, slots, strict=True):
                if block.is_null:
                    continue
                if slot.is_null:
                    return []
                pairs.append((block, slot))
        return pairs

    def finish(self, request: Request) -> None:
        """request_finished: store what is still unstored, give up all leases but those in flight.

        The request still holds its blocks. It holds none of them for us when this returns (I2), and
        a second call finds nothing to do (I4).
        """
        state = self._book.see(request)
        if state.finished:
            return
        if state.phase is Phase.RUNNING and self._scan is not None and not self._is_disabled:
            self._store_later(state)
        self._book.finish(state)

    def _store_later(self, state: RequestState) -> None:
        """Take slots now for what the finished request has computed; the next plan stores it."""
        store = self._new_store(state, self._collect(state), Count.SKIPPED_BLOCKS)
        if store is not None:
            self._new_stores.append(store)

    # ---- a step is planned ---------------------------------------------------------------------

    def plan(self, scheduler_output: SchedulerOutput) -> StepPlan:
        """build_connector_meta: what the workers do in this step."""
        gpu = self._gpu
        if gpu is None:
            return EMPTY_PLAN
        early_written = (
            early_written_block_ids(scheduler_output) if self._options.blocks_written_early else ()
        )
        before = self._rescue(scheduler_output)
        after: list[Store] = []
        for store in self._new_stores:
            (before if store.source_given_away() else after).append(store)
        self._new_stores = []
        after += self._store_computed(scheduler_output, gpu)
        for store in before:
            self._stores.poison_if_reading(store, early_written)
        for store in (*before, *after):
            self._stores.add(store)
        loads, self._new_loads = self._new_loads, []
        self._loads.update((load.transfer.transfer_id, load) for load in loads)
        fences = self._stores.fence(early_written)
        self._counters[Count.FENCED_STORES] += len(fences)
        failures = self._announce_failures()
        self._forget_lost_leftovers()
        self._book.purge(gpu)
        if not (loads or before or after or fences or failures):
            return EMPTY_PLAN
        return StepPlan(
            loads=tuple(load.transfer for load in loads),
            stores_before_forward=tuple(_transfer(store) for store in before),
            stores_after_forward=tuple(_transfer(store) for store in after),
            fences=tuple(fences),
            failures=failures,
        )

    def _rescue(self, scheduler_output: SchedulerOutput) -> list[Store]:
        """Store what preempted requests had computed, before this step overwrites it.

        Most of it was stored in the step that computed it. The rest is in `leftover`: blocks that
        were intact when the last plan was made, so that nobody can have written them yet.
        """
        stores = []
        for request_id in scheduler_output.preempted_req_ids or ():
            state = self._book.get(request_id)
            if state is None or state.finished:
                continue
            if request_id not in scheduler_output.num_scheduled_tokens:
                state.preempt()  # else it runs again already, and `match` has done this
            leftover, state.leftover = state.leftover, []
            store = self._new_store(None, self._still_wanted(leftover), Count.SKIPPED_BLOCKS)
            if store is not None:
                self._counters[Count.RESCUED_BLOCKS] += len(store.sources)
                stores.append(store)
        return stores

    def _store_computed(self, scheduler_output: SchedulerOutput, gpu: GpuBlocks) -> list[Store]:
        """Stores of what this step computes."""
        if self._is_disabled:
            return []
        scheduled = scheduler_output.num_scheduled_tokens
        stores = []
        if self._walk is not None:
            if scheduled:
                stores.append(self._new_store(None, list(self._walk.walk()), None))
        else:
            owners = [load.owner for load in self._new_loads]
            owners += [s for i in scheduled if (s := self._book.get(i)) is not None]
            for state in owners:
                stores.append(self._new_store(state, self._collect(state), None))
            stores.append(self._store_boundary_states(scheduler_output, gpu))
        return [store for store in stores if store is not None]

    def _store_boundary_states(
        self, scheduler_output: SchedulerOutput, gpu: GpuBlocks
    ) -> Store | None:
        """States of Mamba groups, whose block table says nothing about positions.

        vLLM hands over the exact blocks (KVConnectorBlockState.boundary_state_offloads). Those of
        requests that are not scheduled are left alone: they may never have been computed.
        """
        block_state = getattr(scheduler_output, "kv_connector_block_state", None)
        offers = getattr(block_state, "boundary_state_offloads", None) or {}
        sources = []
        for request_id, entries in offers.items():
            if request_id not in scheduler_output.num_scheduled_tokens:
                continue
            for _, block_id, _ in entries:
                source = source_of(gpu.block(block_id), gpu)
                if source is not None:
                    sources.append(source)
        return self._new_store(None, self._still_wanted(sources), Count.SKIPPED_BLOCKS)

    def _collect(self, state: RequestState) -> list[Source]:
        """What of a request is computed and not stored; leases what the host has of it already."""
        assert self._scan is not None
        found, present = self._scan.scan(state)
        if present:
            if state.prefix is None:
                state.prefix = self._leases.lease(LeaseKind.PREFIX, present)
            else:
                self._leases.extend(state.prefix, present)
        leftover = [source for source in state.leftover if not source.given_away]
        state.leftover = []
        self._short_of_slots.discard(state)
        return self._still_wanted(leftover) + found if leftover else found

    def _still_wanted(self, sources: list[Source]) -> list[Source]:
        """Those that the host neither has nor is about to have."""
        return [
            s
            for s in sources
            if not self._stores.stores_key(s.keys[0]) and self._index.find(s.keys[0]) is None
        ]

    def _new_store(
        self, state: RequestState | None, sources: list[Source], skipped: Count | None
    ) -> Store | None:
        """Take slots for as many sources as there are slots.

        Args:
            state: the request whose prefix they extend; what finds no slot is kept there.
            sources: in prefix order.
            skipped: count what finds no slot under this name, because nobody tries again.

        Returns:
            None if there is nothing to store or no slot is free.
        """
        if not sources:
            return None
        lease = self._leases.grant(LeaseKind.STORE, len(sources))
        num_granted = len(lease.slots) if lease is not None else 0
        rest = sources[num_granted:]
        if skipped is not None:
            self._counters[skipped] += len(rest)
        elif state is not None and rest:
            state.leftover = rest
            self._short_of_slots.add(state)
        if lease is None:
            return None
        if state is not None:
            state.num_stores += 1
        return Store(
            next(self._transfer_ids),
            sources[:num_granted],
            lease,
            state,
            self._index.epoch,
            set(range(self._options.num_ranks)),
        )

    def _forget_lost_leftovers(self) -> None:
        """Drop blocks that were given away before they could be stored: this step writes them."""
        for state in list(self._short_of_slots):
            state.leftover = [source for source in state.leftover if not source.given_away]
            if not state.leftover:
                self._short_of_slots.discard(state)

    def _announce_failures(self) -> tuple[str, ...]:
        """Ids of requests whose load failed; from here on only the workers' echo ends their wait."""
        failures, self._failures = self._failures, []
        for state in failures:
            state.num_loads -= 1
            state.failing = True
            if not state.finished:
                state.move(Phase.WAITING)
        self._counters[Count.FAILED_LOADS] += len(failures)
        return tuple(state.request.request_id for state in failures)

    # ---- the workers have reported -------------------------------------------------------------

    def settle(self, output: KVConnectorOutput) -> None:
        """update_connector_output: settle transfers, complete loads, filter vLLM's finished ids."""
        if output.invalid_block_ids:
            # Another connector's load failed: what was computed from it since is garbage too.
            for store in self._stores:
                store.poisoned = True
        report = output.kv_connector_worker_meta
        completed: list[RequestState] = []
        if isinstance(report, StepReport):
            for capacity in report.capacities:
                self._add_capacity(capacity.rank, capacity.num_slots)
            for outcome in report.outcomes:
                self._settle_outcome(outcome, completed)
        if completed:
            received = set(output.finished_recving or ())
            received.update(state.request.request_id for state in completed)
            output.finished_recving = received
        if self._gpu is not None and (output.finished_recving or output.finished_sending):
            self._book.filter(output, self._gpu)

    def _add_capacity(self, rank: int, num_slots: int) -> None:
        """Open the pool once every rank has said how many slots it has (FAULTS: X1)."""
        self._capacities[rank] = num_slots
        if len(self._capacities) == self._options.num_ranks:
            self._index.slots.open(min(self._capacities.values()))

    def _settle_outcome(self, outcome: Outcome, completed: list[RequestState]) -> None:
        transfer = self._stores.get(outcome.transfer_id) or self._loads.get(outcome.transfer_id)
        if transfer is None:
            self._counters[Count.STALE_REPORTS] += 1
            return
        if outcome.rank not in transfer.ranks_left:
            self._counters[Count.DUPLICATE_REPORTS] += 1
            return
        transfer.ranks_left.discard(outcome.rank)
        if outcome.failure is not None:
            logger.warning(
                "%s %d failed on rank %d: %s. Its tokens are recomputed when they are needed.",
                type(transfer).__name__.lower(),
                outcome.transfer_id,
                outcome.rank,
                outcome.failure.value,
            )
        if isinstance(transfer, Store):
            transfer.poisoned |= outcome.failure is not None
            if not transfer.ranks_left:
                self._settle_store(transfer)
        else:
            transfer.failed |= outcome.failure is not None
            if not transfer.ranks_left:
                self._settle_load(transfer, completed)

    def _settle_store(self, store: Store) -> None:
        """Publish a store that went well; its slots then belong to the owner's prefix."""
        self._stores.remove(store.transfer_id)
        if store.poisoned:
            self._counters[Count.FAILED_STORES] += 1
        elif store.epoch == self._index.epoch:
            self._publish(store)
        else:
            self._counters[Count.UNPUBLISHED_BLOCKS] += len(store.sources)
        self._return_store(store)

    def _publish(self, store: Store) -> None:
        for source, slot in zip(store.sources, store.lease.slots, strict=True):
            if self._index.find(source.keys[0]) is None:
                self._index.publish(slot, source.keys, source.num_tokens)
                self._counters[Count.STORED_BLOCKS] += 1
            else:
                self._counters[Count.UNPUBLISHED_BLOCKS] += 1

    def _return_store(self, store: Store) -> None:
        """Hand the slots of a settled store to its owner's prefix, or let them go."""
        state = store.owner
        if state is None:
            store.lease.release()
            return
        state.num_stores -= 1
        if state.phase is Phase.RUNNING or (state.finished and state.num_stores):
            if state.prefix is None:
                state.prefix = self._leases.lease(LeaseKind.PREFIX)
            store.lease.give_to(state.prefix)
        else:
            # The last store of a finished request releases its whole prefix at once, tail first.
            if state.prefix is not None:
                store.lease.give_to(state.prefix)
                state.drop_prefix()
            store.lease.release()

    def _settle_load(self, load: Load, completed: list[RequestState]) -> None:
        """Complete a load that went well; withhold one that failed until the workers announce it."""
        del self._loads[load.transfer.transfer_id]
        state = load.owner
        if load.failed:
            # The same hit must not be offered again (FAULTS: H4).
            self._index.forget(load.lease.slots)
            self._failures.append(state)
        else:
            self._counters[Count.LOADED_BLOCKS] += len(load.lease.slots)
            state.num_loads -= 1
            completed.append(state)
            if not state.finished:
                state.move(Phase.WAITING)
        load.lease.release()

    # ---- the rest ------------------------------------------------------------------------------

    def reset(self) -> None:
        """reset_cache: nothing stored so far is ever found again.

        What is in flight keeps its lease until it settles, and is not published.
        """
        self._index.forget_all()
        for state in self._book:
            state.drop_hit()
            state.leftover = []
            if state.prefix is not None:
                state.prefix.release()
                state.prefix = None
        for store in self._new_stores:
            self._return_store(store)
        self._new_stores = []

    def disable(self) -> None:
        """Match and store nothing more; what is in flight still settles."""
        self._is_disabled = True
        for state in self._book:
            state.drop_hit()

    def owe_failure(self, request: Request) -> None:
        """Something went wrong after vLLM began to wait for a load: tell it to recompute."""
        state = self._book.see(request)
        if state.num_loads == 0:
            state.num_loads = 1
            self._failures.append(state)

    def plan_nothing(self) -> StepPlan:
        """The plan of a step whose planning failed: every load that was not sent has failed."""
        for load in self._new_loads:
            load.lease.release()
            self._failures.append(load.owner)
        self._new_loads = []
        return StepPlan(failures=self._announce_failures())

    @property
    def has_work(self) -> bool:
        """Whether a transfer is planned or in flight, so that the engine must keep stepping."""
        return bool(
            self._stores or self._loads or self._new_loads or self._new_stores or self._failures
        )

    def gauges(self) -> dict[str, int]:
        """How the host pool stands now: slots in all, leased, and stores and loads in flight."""
        return {
            "slots": self._index.slots.num_slots,
            "leased_slots": self._index.slots.num_leased,
            "stores_in_flight": len(self._stores),
            "loads_in_flight": len(self._loads),
        }

    def check_invariants(self) -> None:
        """Compare all bookkeeping with itself.

        Raises:
            InvariantError: a lease, a reference or a fence is wrong.
        """
        self._leases.check_invariants()


def _transfer(store: Store) -> Transfer:
    return Transfer(
        store.transfer_id,
        tuple(source.block.block_id for source in store.sources),
        tuple(slot_id(slot) for slot in store.lease.slots),
    )
