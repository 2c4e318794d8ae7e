"""Stores: what to keep, which slots it takes, and what becomes of them.

What is found worth keeping takes its slots at once and is in flight from then on. All that a step
has found goes into one store, or two: behind the forward if the blocks are still what they were,
ahead of it if one of them was given away in this step.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import TYPE_CHECKING

from safe_offload.compat import block_id_of
from safe_offload.observe.counters import Count, Counters
from safe_offload.protocol import Transfer, ids_of
from safe_offload.scheduler.fences import Part, Store, StoresInFlight
from safe_offload.scheduler.index import HostIndex
from safe_offload.scheduler.leases import Lease, LeaseBook, LeaseKind
from safe_offload.scheduler.requests import Phase, RequestBook, RequestState
from safe_offload.scheduler.sources import EagerScan, LazyWalk, sources_of
from safe_offload.scheduler.witness import Sources

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput

    from safe_offload.compat import GpuBlocks


class Found(enum.Enum):
    """When it was seen that blocks are worth storing."""

    EARLIER = "earlier"
    """Before this step was planned: since then they may have been given away."""
    NOW = "now"
    """While this step is planned: nobody else writes them in it."""


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
        self._found: list[Part] = []
        """To be stored by the next plan; what it reads may have been given away by then."""
        self._intact: list[Part] = []
        """To be stored by the plan that is being made, behind the forward."""
        self._planned: list[Store] = []
        """Of the plan that is being made; the workers do not know them."""
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
        if lazy_num_blocks is None:
            self._scan = EagerScan(self._index, gpu)
        else:
            self._walk = LazyWalk(self._index, gpu, lazy_num_blocks)

    # ---- what to store -------------------------------------------------------------------------

    def add_finished(self, state: RequestState) -> None:
        """Take slots for what a request that finishes has computed and not stored."""
        if self._scan is not None and state.phase is Phase.RUNNING:
            self._add_found(self._scan, state, Found.EARLIER)

    def add_preempted(self, state: RequestState) -> None:
        """Take slots for what a preempted request had computed.

        Most of it was stored in the step that computed it. The rest is in `leftover`: blocks that
        were intact when the last plan was made, so that nobody can have written them yet.
        """
        leftover, state.leftover = state.leftover, []
        for sources in leftover:
            num_rescued = self._add(None, self._still_wanted(sources), Found.EARLIER)
            self._counters[Count.RESCUED_BLOCKS] += num_rescued

    def add_computed(self, states: Sequence[RequestState]) -> None:
        """Take slots for what requests have computed once the forward of this step has run."""
        if self._scan is None or not states:
            return
        if len(states) == 1:
            self._add_found(self._scan, states[0], Found.NOW)
            return
        plain = []
        for state in states:
            if state.leftover or state.loaded is not None:
                self._add_found(self._scan, state, Found.NOW)
            else:
                plain.append(state)
        self._add_found_of_all(self._scan, plain)

    def add_about_to_be_evicted(self) -> None:
        """Take slots for what the allocator takes next (lazy mode)."""
        if self._walk is not None:
            for sources in self._walk.walk():
                self._add(None, sources, Found.NOW)

    def add_boundary_states(self, scheduler_output: SchedulerOutput, book: RequestBook) -> None:
        """Take slots for states of Mamba groups, whose block table says nothing about positions.

        vLLM hands over the exact blocks (KVConnectorBlockState.boundary_state_offloads). Those of
        requests that are not scheduled are left alone: they may never have been computed.

        Args:
            scheduler_output: of this step.
            book: all requests.
        """
        block_state = getattr(scheduler_output, "kv_connector_block_state", None)
        offers = getattr(block_state, "boundary_state_offloads", None)
        if not offers or self._gpu is None or self._scan is None:
            return
        blocks = []
        for request_id in scheduler_output.num_scheduled_tokens:
            state = book.get(request_id)
            if state is None or request_id not in offers:
                continue
            limit = state.limits.store_tokens
            for _, block_id, num_tokens in offers[request_id]:
                if limit is None or num_tokens <= limit:
                    blocks.append(self._gpu.block(block_id))
        for sources in sources_of(blocks, self._gpu, self._index.slots):
            self._add(None, sources, Found.EARLIER)

    def _add_found(self, scan: EagerScan, state: RequestState, when: Found) -> None:
        """Take slots for what of a request is computed and not stored."""
        found = scan.new()
        self._extend_prefix(state, scan.scan(state, found))
        if state.leftover:
            leftover, state.leftover = state.leftover, []
            self._short_of_slots.discard(state)
            for sources in leftover:
                self._add(state, self._still_wanted(sources.intact()), when)
            # A request that began again finds there what it has left over from before.
            found = {group_idx: self._still_wanted(found[group_idx]) for group_idx in found}
        for sources in found.values():
            self._add(state, sources, when)

    def _add_found_of_all(self, scan: EagerScan, states: Sequence[RequestState]) -> None:
        """The same for many requests in one go: most of them have a block or none.

        What does not go at once, for want of slots or because two requests have computed the same,
        goes request by request.
        """
        found = scan.new()
        for state in states:
            present = scan.scan(state, found)
            if present:
                self._extend_prefix(state, present)
        for sources in found.values():
            if sources.blocks and not self._add_whole(sources):
                start = 0
                for state, count in sources.owners:
                    part = sources.part(range(start, start + count))
                    self._add(state, self._still_wanted(part), Found.NOW)
                    start += count

    def _add_whole(self, sources: Sources) -> bool:
        """Store all of these, of several requests; False, and none is stored, if not all go."""
        count = len(sources.blocks)
        if count > self._num_blocks_max - self._in_flight.num_blocks:
            return False
        if len(set(sources.hashes)) < count:
            return False
        lease = self._leases.grant(LeaseKind.STORE, count)
        if lease is None or len(lease.slots) < count:
            if lease is not None:
                lease.release()
            return False
        self._begin(Part(sources, lease), Found.NOW)
        return True

    def _extend_prefix(self, state: RequestState, present: list[int]) -> None:
        """Lease what the host has of a request, in the order of its tokens."""
        if state.loaded is not None:
            lease, state.loaded = state.loaded, None
            loaded = set(lease.slots)
            self._leases.extend(lease, [slot for slot in present if slot not in loaded])
            if len(lease.slots) == len(present):
                lease.slots = present
            lease.kind = LeaseKind.PREFIX
            if state.prefix is None:
                state.prefix = lease
            else:
                lease.give_to(state.prefix)
        elif present and state.prefix is None:
            state.prefix = self._leases.lease(LeaseKind.PREFIX, present)
        elif present and state.prefix is not None:
            self._leases.extend(state.prefix, present)

    def _still_wanted(self, sources: Sources) -> Sources:
        """Those that the host neither has nor is about to have."""
        table = self._index.slots.tables[sources.group_idx]
        return sources.keep([block_hash not in table for block_hash in sources.hashes])

    def _add(self, state: RequestState | None, sources: Sources, when: Found) -> int:
        """Store as many sources as there are free slots and as may be in flight.

        Args:
            state: the request whose prefix they extend; it keeps what finds no slot.
            sources: in prefix order.
            when: nobody will try again for what was found earlier and finds no slot.

        Returns:
            How many sources found a slot.
        """
        num_found = len(sources.blocks)
        if not num_found:
            return 0
        num_wanted = min(num_found, self._num_blocks_max - self._in_flight.num_blocks)
        if num_wanted < num_found:
            self._counters[Count.SKIPPED_STORES] += 1
        lease = self._leases.grant(LeaseKind.STORE, num_wanted)
        num_granted = len(lease.slots) if lease is not None else 0
        if num_granted < num_found:
            if when is Found.EARLIER:
                self._counters[Count.SKIPPED_BLOCKS] += num_found - num_granted
            elif state is not None:
                state.leftover.append(sources.part(range(num_granted, num_found)))
                self._short_of_slots.add(state)
            sources = sources.part(range(num_granted))
        if lease is None:
            return 0
        sources.owners = [(state, num_granted)] if state is not None else []
        self._begin(Part(sources, lease), when)
        return num_granted

    def _begin(self, part: Part, when: Found) -> None:
        """From now on a part is being stored."""
        sources = part.sources
        for state, _ in sources.owners:
            state.num_stores += 1
        self._index.slots.begin_store(
            part.lease.slots, sources.group_idx, sources.hashes, sources.more_keys
        )
        (self._found if when is Found.EARLIER else self._intact).append(part)
        self._in_flight.claim(part)

    # ---- a step is planned ---------------------------------------------------------------------

    def plan(
        self, early_written: Callable[[], Collection[int]]
    ) -> tuple[tuple[Transfer, ...], tuple[Transfer, ...], tuple[int, ...]]:
        """Turn what was found since the last `sent` into stores, and see which need a fence.

        Args:
            early_written: tells which blocks the workers write before they can honour a fence of
                this step; a store that reads one of them is poisoned instead.

        Returns:
            The stores before the forward, those after it, and the ids of those that the writes of
            this step must wait for.
        """
        fenced = self._in_flight.fence()
        before: tuple[Transfer, ...] = ()
        after: tuple[Transfer, ...] = ()
        if self._found or self._intact:
            given_away = [part for part in self._found if part.sources.given_away()]
            intact = self._intact
            if len(given_away) < len(self._found):
                intact = [part for part in self._found if part not in given_away] + intact
            if given_away:
                store = self._make(given_away, is_fenced=True)
                fenced.append(store)
                before = (_transfer(store),)
            if intact:
                after = (_transfer(self._make(intact, is_fenced=False)),)
        if fenced:
            self._counters[Count.FENCED_STORES] += len(fenced)
            written = early_written()
            for store in fenced:
                store.poisoned |= bool(written) and store.reads(written)
        if self._short_of_slots:
            self._drop_given_away()
        return before, after, tuple(store.transfer_id for store in fenced)

    def _make(self, parts: list[Part], *, is_fenced: bool) -> Store:
        """One store of all parts."""
        ranks = set(range(self._num_ranks))
        store = Store(next(self._transfer_ids), parts, self._index.epoch, ranks)
        self._planned.append(store)
        self._in_flight.add(store, is_fenced=is_fenced)
        return store

    def _drop_given_away(self) -> None:
        """Forget of what found no slot what this step writes: it can be stored no more.

        A window slides on even when its request is not scheduled, for want of blocks.
        """
        for state in list(self._short_of_slots):
            intact = [sources.intact() for sources in state.leftover]
            state.leftover = [sources for sources in intact if sources.blocks]
            if not state.leftover:
                self._short_of_slots.discard(state)

    def sent(self) -> None:
        """The workers have been told of the new stores."""
        self._found, self._intact, self._planned = [], [], []

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
        for part in (*self._found, *self._intact):
            self._in_flight.release(part)
            self._index.slots.forget(part.lease.slots)
        for store in list(self._in_flight):
            if store in self._planned or not store.ranks_left:
                self._in_flight.remove(store)
                for part in store.parts:
                    self._index.slots.forget(part.lease.slots)
            else:
                store.poisoned = True
                for part in store.parts:
                    part.sources.owners = []
        self.sent()
        self._short_of_slots.clear()

    @property
    def leases(self) -> list[Lease]:
        """Of the stores in flight."""
        return [part.lease for store in self._in_flight for part in store.parts]

    def settle(self, store: Store) -> None:
        """Every rank has reported a store: publish it if it went well."""
        self._in_flight.remove(store)
        if store.poisoned:
            self._counters[Count.FAILED_STORES] += 1
        elif store.epoch == self._index.epoch:
            self._counters[Count.STORED_BLOCKS] += store.num_blocks
        else:
            self._counters[Count.UNPUBLISHED_BLOCKS] += store.num_blocks
        for part in store.parts:
            if store.poisoned:
                self._index.slots.forget(part.lease.slots)
            elif store.epoch == self._index.epoch:
                self._index.slots.publish(part.lease.slots)
            self._return_slots(part)

    def _return_slots(self, part: Part) -> None:
        """Hand the slots of a part to its owners' prefixes, or let them go."""
        ended = []
        for state, count in part.sources.owners:
            state.num_stores -= 1
            if state.prefix is None and (state.phase is Phase.RUNNING or state.finished):
                state.prefix = self._leases.lease(LeaseKind.PREFIX)
            if state.prefix is not None:
                part.lease.give(count, state.prefix)
            else:
                part.lease.release_first(count)
            if state.finished and not state.num_stores:
                ended.append(state)
        part.lease.release()
        for state in ended:  # releases its whole prefix at once, tail first
            state.drop_prefix()

    # ---- the rest ------------------------------------------------------------------------------

    def reset(self, book: RequestBook) -> None:
        """Forget what was not planned; what is in flight is not published."""
        for state in book:
            state.leftover = []
            state.let_go_prefix()
        self._short_of_slots.clear()
        for part in (*self._found, *self._intact):
            self._in_flight.release(part)
            self._return_slots(part)
        self.sent()

    def check_invariants(self) -> None:
        """See `StoresInFlight.check_invariants`."""
        self._in_flight.check_invariants()

    def __len__(self) -> int:
        return len(self._in_flight)


def _transfer(store: Store) -> Transfer:
    block_ids, slot_ids = ids_of(()), ids_of(())
    for part in store.parts:
        block_ids.extend(map(block_id_of, part.sources.blocks))
        slot_ids.extend(part.lease.slots)
    return Transfer(store.transfer_id, block_ids, slot_ids)
