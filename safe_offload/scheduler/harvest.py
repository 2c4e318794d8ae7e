"""What to keep: blocks that are worth storing, and the slots that they take.

What is found takes its slots at once and counts as being stored from then on. Eager: what a request
has computed. Lazy: what vLLM is about to evict, and what it has given away before anybody looked.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING

from safe_offload.observe.counters import Count, Counters
from safe_offload.scheduler.fences import Part
from safe_offload.scheduler.gpu_blocks import hashes_of
from safe_offload.scheduler.hits import HostHits
from safe_offload.scheduler.leases import LeaseBook, LeaseKind
from safe_offload.scheduler.requests import Phase, RequestBook, RequestState
from safe_offload.scheduler.sources import EagerScan, LazyWalk, Snapshot, sources_of
from safe_offload.scheduler.witness import Sources

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput

    from safe_offload.scheduler.gpu_blocks import GpuBlocks


class Found(enum.Enum):
    """When it was seen that blocks are worth storing."""

    EARLIER = "earlier"
    """Before this step was planned: since then they may have been given away."""
    NOW = "now"
    """While this step is planned: nobody else writes them in it."""


class Harvest:
    """What is to be stored by the plan that is being made, or by the next.

    Args:
        index: to skip what is there.
        leases: where slots come from.
        counters: what happens is counted here.

    Attributes:
        found: seen before this step was planned; what a part reads may have been given away since.
        intact: seen while it is planned, to be stored behind the forward.
        num_blocks: of all parts that have not settled.
    """

    def __init__(self, index: HostHits, leases: LeaseBook, counters: Counters) -> None:
        self._index = index
        self._leases = leases
        self._counters = counters
        self.found: list[Part] = []
        self.intact: list[Part] = []
        self.num_blocks = 0
        self._short_of_slots: set[RequestState] = set()
        self._gpu: GpuBlocks | None = None
        self._scan: EagerScan | None = None
        self._walk: LazyWalk | None = None
        self._positional_ids: list[int] = []
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
        self._positional_ids = [g for g in self._index.group_ids if gpu.is_positional(g)]
        self._num_blocks_max = num_blocks_max
        if lazy_num_blocks is None:
            self._scan = EagerScan(self._index, gpu)
        else:
            self._walk = LazyWalk(self._index, gpu, lazy_num_blocks)

    # ---- what to store -------------------------------------------------------------------------

    def add_finished(self, state: RequestState) -> None:
        """Take slots for what a request that finishes has computed and not stored.

        Lazy: if its blocks may be given away before the next walk sees them, remember them.
        """
        if state.phase is not Phase.RUNNING:
            return
        if self._scan is not None:
            self._add_found(self._scan, [state], Found.EARLIER)
            for sources in self._scan.tails(state):
                self._add(state, sources, Found.EARLIER)
        elif self._walk is not None:
            self._walk.watch(state)

    def look_ahead(self, num_tokens: int) -> None:
        """Lazy: a request with a hit of so many tokens, on the GPU or here, may be scheduled."""
        if self._walk is not None and num_tokens:
            self._walk.look_ahead(self._index.num_blocks_spanned(num_tokens))

    def add_preempted(self, states: Iterable[RequestState], given_out: Collection[int]) -> None:
        """Take slots for what preempted requests had computed, before it is overwritten.

        Eager: what is not stored yet. Some of it is in `leftover`: blocks that were intact when the
        last plan was made, so that nobody can have written them yet. Lazy: what of it was given
        away in this very step; the rest waits in the queue.

        Args:
            states: preempted in this step.
            given_out: ids of the blocks that were allocated in this step.
        """
        for state in states:
            if self._walk is not None:
                self._walk.avoid(self._uncomputed(state))
            rescued, state.leftover = state.leftover, []
            snapshots, state.snapshots = state.snapshots, []
            for snapshot in snapshots:
                rescued += self._unsaved(state, snapshot, given_out)
            for sources in rescued:
                num_rescued = self._add(None, self._still_wanted(sources), Found.EARLIER)
                self._counters[Count.RESCUED_BLOCKS] += num_rescued

    def _uncomputed(self, state: RequestState) -> set[bytes]:
        """Hashes of what a preempted request has not computed; vLLM may have filed blocks so."""
        request = state.request
        num_tokens = request.num_tokens - 1
        if not state.decodes:
            sizes = self._index.group_block_sizes
            known = (
                s.num_computed(request, sizes[s.group_idx]) * sizes[s.group_idx]
                for s in state.snapshots
            )
            num_tokens = min(known, default=0)
        return set(request.block_hashes[num_tokens // self._index.hash_block_size :])

    def _unsaved(
        self, state: RequestState, snapshot: Snapshot, given_out: Collection[int]
    ) -> tuple[Sources, ...]:
        if self._gpu is None:
            return ()
        block_size = self._index.group_block_sizes[snapshot.group_idx]
        num_blocks = snapshot.num_computed(state.request, block_size)
        if state.limits.store_tokens is not None:
            num_blocks = min(num_blocks, state.limits.store_tokens // block_size)
        hashes = self._index.hashes_of(state.request, snapshot.group_idx)
        unsaved = snapshot.unsaved(hashes, num_blocks, given_out, self._gpu)
        return unsaved if self._walk is None else unsaved[:1]

    def add_computed(self, states: Sequence[RequestState]) -> None:
        """Take slots for what requests have computed once the forward of this step has run.

        Lazy: only note what they have, in case they are preempted.
        """
        for state in states:
            if not state.decodes:
                state.snapshots = [] if self._walk is None else self._take_snapshots(state)
            elif not (state.snapshots and state.snapshots[0].grows_with(state.request)):
                state.snapshots = self._take_snapshots(state)
        if self._scan is None:
            return
        plain = []
        for state in states:
            if state.leftover or state.loaded is not None:
                self._add_found(self._scan, [state], Found.NOW)
            else:
                plain.append(state)
        if plain:
            self._add_found(self._scan, plain, Found.NOW)

    def _take_snapshots(self, state: RequestState) -> list[Snapshot]:
        """The block tables of a request, of groups whose tables say which tokens a block holds."""
        if self._gpu is None:
            return []
        request = state.request
        snapshots = []
        for group_idx in self._positional_ids:
            tables, nums_hashed = self._gpu.tables_of(group_idx)
            table = tables.get(request.request_id)
            if table:
                num = None if state.decodes else nums_hashed.get(request.request_id, 0)
                snapshots.append(Snapshot(group_idx, table, num, request.num_prompt_tokens))
        return snapshots

    def add_given_away(self) -> None:
        """Take slots for what the allocator has taken in this step unseen (lazy mode).

        In every step, one that computes nothing too: it may allocate blocks for a load.
        """
        if self._walk is not None:
            for sources in self._walk.lost():
                self._add(None, self._still_wanted(sources), Found.EARLIER)

    def add_about_to_be_evicted(self) -> None:
        """Take slots for what the allocator takes next (lazy mode)."""
        if self._walk is None:
            return
        for sources in self._walk.walk():
            num_found = len(sources.blocks)
            if self._add(None, sources, Found.NOW) < num_found:
                self._walk.begin_again()

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
        for sources in sources_of(blocks, hashes_of(blocks), self._gpu, self._index.directory):
            self._add(None, sources, Found.EARLIER)

    def _add_found(self, scan: EagerScan, states: Sequence[RequestState], when: Found) -> None:
        """Take slots for what of requests is computed and not stored.

        All of it in one go: most requests have a block or none. What does not go at once, for want
        of slots or because two requests have computed the same, goes request by request.
        """
        found, present = scan.scan(states)
        has_leftover = False
        for state in states:
            if state in present or state.loaded is not None:
                self._extend_prefix(state, present.get(state, []))
            if state.leftover:
                self._add_leftover(state, when)
                has_leftover = True
        for sources in found:
            owners = sources.owners
            if len(owners) == 1:
                # A request that began again finds there what it has left over from before.
                wanted = self._still_wanted(sources) if has_leftover else sources
                self._add(owners[0][0], wanted, when)
            elif not self._add_whole(sources, when):
                start = 0
                for state, count in owners:
                    part = sources.part(range(start, start + count))
                    self._add(state, self._still_wanted(part), when)
                    start += count

    def _add_leftover(self, state: RequestState, when: Found) -> None:
        """Take slots for what a request found none for before."""
        leftover, state.leftover = state.leftover, []
        self._short_of_slots.discard(state)
        for sources in leftover:
            self._add(state, self._still_wanted(sources.intact()), when)

    def _add_whole(self, sources: Sources, when: Found) -> bool:
        """Store all of these, of several requests; False, and none is stored, if not all go."""
        count = len(sources.blocks)
        if count > self._num_blocks_max - self.num_blocks:
            return False
        if len(set(sources.hashes)) < count:
            return False
        lease = self._leases.grant(LeaseKind.STORE, count)
        if lease is None or len(lease.slots) < count:
            if lease is not None:
                lease.release()
            return False
        self._begin(Part(sources, lease), when)
        return True

    def _extend_prefix(self, state: RequestState, present: list[int]) -> None:
        """Lease what the host has of a request, in the order of its tokens."""
        if state.loaded is not None:
            lease, state.loaded = state.loaded, None
            loaded = set(lease.slots)
            self._leases.extend(lease, [slot for slot in present if slot not in loaded])
            is_all = len(lease.slots) == len(present)
            lease.keep(LeaseKind.PREFIX, present if is_all else lease.slots)
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
        table = self._index.directory.tables[sources.group_idx]
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
        num_wanted = min(num_found, self._num_blocks_max - self.num_blocks)
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
        self._index.directory.begin_store(
            part.lease.slots, sources.group_idx, sources.hashes, sources.more_keys
        )
        (self.found if when is Found.EARLIER else self.intact).append(part)
        self.num_blocks += len(part.lease.slots)

    # ---- what becomes of it --------------------------------------------------------------------

    def sent(self) -> None:
        """The workers have been told of all of it."""
        self.found, self.intact = [], []

    def settled(self, part: Part) -> None:
        """A part has settled, or never will be stored."""
        self.num_blocks -= len(part.sources.blocks)

    def drop_given_away(self) -> None:
        """Forget of what found no slot what this step writes: it can be stored no more.

        A window slides on even when its request is not scheduled, for want of blocks.
        """
        for state in list(self._short_of_slots):
            intact = [sources.intact() for sources in state.leftover]
            state.leftover = [sources for sources in intact if sources.blocks]
            if not state.leftover:
                self._short_of_slots.discard(state)

    def pass_over(self, state: RequestState) -> None:
        """Store nothing of a request that it has computed by now."""
        state.snapshots = []
        if self._scan is not None and state.phase is Phase.RUNNING:
            self._scan.pass_over(state)

    def reset(self) -> None:
        """Forget what found no slot, and what was looked at."""
        for state in self._short_of_slots:
            state.leftover = []
        self._short_of_slots.clear()
        if self._walk is not None:
            self._walk.reset()
