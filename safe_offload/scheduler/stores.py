"""Stores: what to keep, which slots it takes, and what becomes of them.

A store is made when a block is found worth keeping and a slot is free for it, and is in flight from
then on. Where it goes in the plan depends on its sources alone: behind the forward if they are
still what they were, ahead of it if one was given away in this step.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING

from safe_offload.observe.counters import Count, Counters
from safe_offload.protocol import Transfer
from safe_offload.scheduler.fences import Store, StoresInFlight
from safe_offload.scheduler.index import HostIndex
from safe_offload.scheduler.leases import Lease, LeaseBook, LeaseKind
from safe_offload.scheduler.requests import Phase, RequestBook, RequestState
from safe_offload.scheduler.slots import slot_id
from safe_offload.scheduler.sources import EagerScan, LazyWalk
from safe_offload.scheduler.witness import Source, source_of

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput

    from safe_offload.compat import GpuBlocks


class Stores:
    """All stores that are planned or in flight.

    Args:
        index: to publish in, and to skip what is there.
        leases: where slots come from.
        transfer_ids: never gives the same twice.
        num_ranks: workers that report.
        counters: what happens is counted here.
    """

    def __init__(
        self,
        index: HostIndex,
        leases: LeaseBook,
        transfer_ids: Iterable[int],
        num_ranks: int,
        counters: Counters,
    ) -> None:
        self._index = index
        self._leases = leases
        self._transfer_ids = iter(transfer_ids)
        self._num_ranks = num_ranks
        self._counters = counters
        self._in_flight = StoresInFlight()
        self._new: list[Store] = []
        self._short_of_slots: set[RequestState] = set()
        self._gpu: GpuBlocks | None = None
        self._scan: EagerScan | None = None
        self._walk: LazyWalk | None = None
        self._num_blocks_max = 0

    def bind(self, gpu: GpuBlocks, lazy_num_blocks: int | None, num_blocks_max: int) -> None:
        """Learn where the blocks are, and how many may be in flight.

        Args:
            gpu: vLLM's blocks.
            lazy_num_blocks: None for eager stores.
            num_blocks_max: of all stores together; there is no end to what a queue can take in
                that is filled faster than it is worked off.
        """
        self._gpu = gpu
        self._num_blocks_max = num_blocks_max
        is_stored = self._in_flight.stores_key
        if lazy_num_blocks is None:
            self._scan = EagerScan(self._index, gpu, is_stored)
        else:
            self._walk = LazyWalk(self._index, gpu, is_stored, lazy_num_blocks)

    # ---- what to store -------------------------------------------------------------------------

    def add_finished(self, state: RequestState) -> None:
        """Take slots for what a request that finishes has computed and not stored."""
        if self._scan is not None and state.phase is Phase.RUNNING:
            self._add(state, self._collect(self._scan, state), is_last_chance=True)

    def add_preempted(self, state: RequestState) -> None:
        """Take slots for what a preempted request had computed.

        Most of it was stored in the step that computed it. The rest is in `leftover`: blocks that
        were intact when the last plan was made, so that nobody can have written them yet.
        """
        leftover, state.leftover = state.leftover, []
        num_rescued = self._add(None, self._still_wanted(leftover), is_last_chance=True)
        self._counters[Count.RESCUED_BLOCKS] += num_rescued

    def add_computed(self, states: Iterable[RequestState]) -> None:
        """Take slots for what requests have computed once the forward of this step has run."""
        if self._scan is not None:
            for state in states:
                self._add(state, self._collect(self._scan, state))

    def add_about_to_be_evicted(self) -> None:
        """Take slots for what the allocator takes next (lazy mode)."""
        if self._walk is not None:
            self._add(None, list(self._walk.walk()))

    def add_boundary_states(
        self, scheduler_output: SchedulerOutput, states: Iterable[RequestState]
    ) -> None:
        """Take slots for states of Mamba groups, whose block table says nothing about positions.

        vLLM hands over the exact blocks (KVConnectorBlockState.boundary_state_offloads). Those of
        requests that are not scheduled are left alone: they may never have been computed.

        Args:
            states: the requests that are scheduled.
        """
        block_state = getattr(scheduler_output, "kv_connector_block_state", None)
        offers = getattr(block_state, "boundary_state_offloads", None)
        if not offers or self._gpu is None or self._scan is None:
            return
        sources = []
        for state in states:
            limit = state.limits.store_tokens
            for _, block_id, num_tokens in offers.get(state.request.request_id, ()):
                if limit is None or num_tokens <= limit:
                    source = source_of(self._gpu.block(block_id), self._gpu)
                    if source is not None:
                        sources.append(source)
        self._add(None, self._still_wanted(sources), is_last_chance=True)

    def _collect(self, scan: EagerScan, state: RequestState) -> list[Source]:
        """What of a request is computed and not stored; leases what the host has of it already."""
        found, present = scan.scan(state)
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
            source
            for source in sources
            if not self._in_flight.stores_key(source.keys[0])
            and self._index.find(source.keys[0]) is None
        ]

    def _add(
        self, state: RequestState | None, sources: list[Source], *, is_last_chance: bool = False
    ) -> int:
        """Make a store of as many sources as there are free slots and as may be in flight.

        Args:
            state: the request whose prefix they extend; it keeps what finds no slot.
            sources: in prefix order.
            is_last_chance: nobody will try again for what finds no slot.

        Returns:
            How many sources found a slot.
        """
        if not sources:
            return 0
        num_wanted = min(len(sources), self._num_blocks_max - self._in_flight.num_blocks)
        if num_wanted < len(sources):
            self._counters[Count.SKIPPED_STORES] += 1
        lease = self._leases.grant(LeaseKind.STORE, num_wanted)
        num_granted = len(lease.slots) if lease is not None else 0
        rest = sources[num_granted:]
        if rest and state is not None and not is_last_chance:
            state.leftover = rest
            self._short_of_slots.add(state)
        elif is_last_chance:
            self._counters[Count.SKIPPED_BLOCKS] += len(rest)
        if lease is None:
            return 0
        store = Store(
            next(self._transfer_ids),
            sources[:num_granted],
            lease,
            state,
            self._index.epoch,
            set(range(self._num_ranks)),
        )
        if state is not None:
            state.num_stores += 1
        self._new.append(store)
        self._in_flight.add(store)
        return num_granted

    # ---- a step is planned ---------------------------------------------------------------------

    def new_transfers(self) -> tuple[tuple[Transfer, ...], tuple[Transfer, ...]]:
        """The stores made since the last `sent`: those before the forward, those after it."""
        before: list[Transfer] = []
        after: list[Transfer] = []
        for store in self._new:
            (before if store.source_given_away() else after).append(_transfer(store))
        return tuple(before), tuple(after)

    def sent(self) -> None:
        """The workers have been told of the new stores."""
        self._new = []

    def fence(self, early_written: Collection[int]) -> tuple[int, ...]:
        """Ids of the stores that the writes of this step must wait for.

        Args:
            early_written: see `StoresInFlight.fence`.
        """
        fences = self._in_flight.fence(early_written)
        self._counters[Count.FENCED_STORES] += len(fences)
        for state in list(self._short_of_slots):
            # This step writes the blocks that were given away: they can be stored no more. A window
            # slides on even when its request is not scheduled, for want of blocks.
            state.leftover = [source for source in state.leftover if not source.given_away]
            if not state.leftover:
                self._short_of_slots.discard(state)
        return tuple(fences)

    # ---- the workers have reported -------------------------------------------------------------

    def get(self, transfer_id: int) -> Store | None:
        """The store of that id, if it is in flight."""
        return self._in_flight.get(transfer_id)

    def poison_all(self) -> None:
        """What is being stored is wrong; publish none of it."""
        for store in self._in_flight:
            store.poisoned = True

    def give_up(self) -> None:
        """After an internal error: publish nothing, forget each store that no worker copies."""
        for store in list(self._in_flight):
            if store in self._new or not store.ranks_left:
                self._in_flight.remove(store.transfer_id)
            else:
                store.poisoned, store.owner = True, None
        self._new = []
        self._short_of_slots.clear()

    @property
    def leases(self) -> list[Lease]:
        """Of the stores in flight."""
        return [store.lease for store in self._in_flight]

    def settle(self, store: Store) -> None:
        """Every rank has reported a store: publish it if it went well."""
        self._in_flight.remove(store.transfer_id)
        if store.poisoned:
            self._counters[Count.FAILED_STORES] += 1
        elif store.epoch == self._index.epoch:
            self._publish(store)
        else:
            self._counters[Count.UNPUBLISHED_BLOCKS] += len(store.sources)
        self._return_slots(store)

    def _publish(self, store: Store) -> None:
        for source, slot in zip(store.sources, store.lease.slots, strict=True):
            if self._index.find(source.keys[0]) is None:
                self._index.publish(slot, source.keys, source.num_tokens)
                self._counters[Count.STORED_BLOCKS] += 1
            else:
                self._counters[Count.UNPUBLISHED_BLOCKS] += 1

    def _return_slots(self, store: Store) -> None:
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

    # ---- the rest ------------------------------------------------------------------------------

    def reset(self, book: RequestBook) -> None:
        """Forget what was not planned; what is in flight is not published."""
        for state in book:
            state.leftover = []
            if state.prefix is not None:
                state.prefix.release()
                state.prefix = None
        self._short_of_slots.clear()
        for store in self._new:
            self._in_flight.remove(store.transfer_id)
            self._return_slots(store)
        self._new = []
        self._in_flight.forget_keys()

    def check_invariants(self) -> None:
        """See `StoresInFlight.check_invariants`."""
        self._in_flight.check_invariants()

    def __len__(self) -> int:
        return len(self._in_flight)


def _transfer(store: Store) -> Transfer:
    return Transfer(
        store.transfer_id,
        tuple(source.block.block_id for source in store.sources),
        tuple(slot_id(slot) for slot in store.lease.slots),
    )
