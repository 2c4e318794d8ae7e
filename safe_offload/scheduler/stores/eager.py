"""Eager stores: blocks are stored as soon as requests have computed them.

A block is stored if vLLM has hashed it for its own prefix cache (so it is full, and its tokens are
known). vLLM does so while it schedules the step whose forward pass computes the block, and a store
after the forward pass reads it later. So a block of a prompt is stored in the step that computes
it; one step later, a sliding window may have passed it. Output blocks are collected every few steps
(`schedule.py`), and from the block table of a preempted request (`snapshots.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import compress
from typing import TYPE_CHECKING, Any

from safe_offload.observe.counters import Count, Counters
from safe_offload.scheduler.blocks import (
    BlockSet,
    BlockTable,
    find_more_keys,
    get_block_hash,
    hashes_of,
    missing_blocks,
)
from safe_offload.scheduler.loads.hits import needed
from safe_offload.scheduler.requests import Phase, RequestBook, RequestState
from safe_offload.scheduler.stores.policy import StorePolicy

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from vllm.v1.core.kv_cache_utils import KVCacheBlock
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

    from safe_offload.scheduler.blocks import GpuBlocks
    from safe_offload.scheduler.loads.hits import HostHits
    from safe_offload.scheduler.stores.stores import Stores


@dataclass(slots=True)
class EagerProgress:
    """The progress of a request's stores; only `EagerStores` changes it.

    Bound: an entry for each KV cache group.
    """

    cursors: list[int]  # by group, the number of leading blocks of the block table that are done
    cursors_before: list[int]  # the same of the block table before the last preemption


class EagerStores(StorePolicy):
    """A `StorePolicy` that stores blocks as soon as requests have computed them.

    Bound: an entry for each KV cache group.
    """

    def __init__(
        self,
        hits: HostHits,
        gpu: GpuBlocks,
        stores: Stores,
        num_decode_tokens_max: int,
        counters: Counters,
        *,
        may_refuse: bool,
    ) -> None:
        super().__init__(hits, gpu, stores, num_decode_tokens_max, is_lazy=False)
        self._directory = hits.directory
        self._hash_block_size = hits.geometry.hash_block_size
        self._block_sizes = hits.geometry.group_block_sizes
        self._group_ids = [g for g in hits.geometry.group_ids if gpu.is_positional(g)]
        self._larger_ids = [
            g for g in self._group_ids if self._block_sizes[g] > self._hash_block_size
        ]
        self._begin = [0] * len(self._block_sizes)
        self._counters = counters
        self._may_refuse = may_refuse

    def __repr__(self) -> str:
        return f"EagerStores({self.schedule!r})"

    def _begin_storing(self, state: RequestState) -> EagerProgress:
        state.eager = EagerProgress([*self._begin], self._begin)
        return state.eager

    # ---- the life of a request -----------------------------------------------------------------

    def run(self, state: RequestState) -> None:
        """Skip a prompt whose blocks are worth less than their victims."""
        super().run(state)
        group_idx = self._hits.full_group
        if not self._may_refuse or group_idx is None or state.eager is not None:
            return
        if state.limits.store_tokens is not None or state.is_retained:
            return
        hashes = state.request.block_hashes
        found = self._directory.find_run(group_idx, hashes)
        num_missing, last_slot = len(hashes) - len(found), found[-1] if found else None
        if num_missing and not self._hits.slots.admits(num_missing, last_slot, hashes[len(found)]):
            self._counters[Count.SKIPPED_BLOCKS] += num_missing
            state.refuse(len(found) * self._hash_block_size)

    def preempt(self, state: RequestState) -> None:
        super().preempt(state)
        progress = state.eager or self._begin_storing(state)
        progress.cursors_before = progress.cursors
        progress.cursors = [0] * len(self._block_sizes)

    def finish(self, state: RequestState) -> None:
        """Store the remaining computed blocks of the request."""
        if state.phase is Phase.RUNNING:
            self._store_computed([state], is_intact=False)
            for blocks in self._tails(state):
                self._stores.add(blocks, state, is_intact=False)

    # ---- a step is planned ---------------------------------------------------------------------

    def rescue(self, states: Sequence[RequestState], given_out: Collection[int]) -> None:
        """Include blocks left over for lack of slots: they were intact in the last plan."""
        for state in states:
            progress = state.eager or self._begin_storing(state)
            rescued = list(self._stores.take_left_over(state))
            for snapshot in self._snapshot_taker.drop(state):
                first = progress.cursors_before[snapshot.group_idx]
                rescued += self._snapshot_taker.unsaved(state, snapshot, first, given_out)
            for blocks in rescued:
                self._stores.rescue(blocks)

    def find(
        self, output: SchedulerOutput, book: RequestBook, loading: Sequence[RequestState]
    ) -> None:
        if loading:
            self._look_at(loading)
        due = self.schedule.due(output.num_scheduled_tokens)
        if due:
            self._look_at(due)
        if self._geometry.has_states:
            self._store_boundary_states(output, book)
        if self._stores.left_over:
            # A window slides on even when its request is not scheduled, for want of blocks. What
            # this step writes can be stored no more.
            self._stores.keep_left_over(BlockSet.intact)

    def _look_at(self, states: Sequence[RequestState]) -> None:
        """Store the blocks that requests have computed after the forward pass of this step."""
        plain = []
        for state in states:
            taken = state.snapshots
            if not state.is_decoding:
                if taken:
                    self._snapshot_taker.drop(state)
            elif not (taken and taken[0].is_current(state.request)):
                self._snapshot_taker.take(state, is_decoding=True)
            if state.left_over or state.loaded is not None:
                self._store_computed([state], is_intact=True)
            else:
                plain.append(state)
        if plain:
            self._store_computed(plain, is_intact=True)

    def _store_boundary_states(self, output: SchedulerOutput, book: RequestBook) -> None:
        """Store states of Mamba groups, whose block tables have no positions.

        vLLM passes the exact blocks (KVConnectorBlockState.boundary_state_offloads). Those of
        requests that are not scheduled are skipped: they may never be computed.
        """
        block_state = getattr(output, "kv_connector_block_state", None)
        offers = getattr(block_state, "boundary_state_offloads", None)
        if not offers:
            return
        for request_id in output.num_scheduled_tokens:
            state = book.get(request_id)
            if state is None or request_id not in offers:
                continue
            blocks = []
            limit = state.limits.store_tokens
            for _, block_id, num_tokens in offers[request_id]:
                if limit is None or num_tokens <= limit:
                    blocks.append(self._gpu.block(block_id))
            tables = self._directory.tables
            for missing in missing_blocks(blocks, hashes_of(blocks), self._gpu, tables):
                self._stores.add(missing, state, is_intact=False)

    # ---- what requests have computed -----------------------------------------------------------

    def _store_computed(self, states: Sequence[RequestState], *, is_intact: bool) -> None:
        """Store the computed blocks of requests that are not stored yet.

        All at once, as most requests have one block or none. If that fails, for lack of slots or
        because two requests have computed the same, they are stored request by request.
        """
        found, present = self._scan(states)
        has_leftover = False
        for state in states:
            if state in present or state.loaded is not None:
                self._stores.extend_prefix(state, present.get(state, []))
            if state.left_over:
                self._store_leftover(state, is_intact=is_intact)
                has_leftover = True
        for blocks, owners in found:
            if len(owners) == 1:
                # A request that began again finds there what it has left over from before.
                wanted = self._stores.missing(blocks) if has_leftover else blocks
                self._add(owners[0][0], wanted, is_intact=is_intact)
            elif not self._stores.add_whole(blocks, owners, is_intact=is_intact):
                start = 0
                for state, count in owners:
                    part = blocks.part(range(start, start + count))
                    self._add(state, self._stores.missing(part), is_intact=is_intact)
                    start += count

    def _store_leftover(self, state: RequestState, *, is_intact: bool) -> None:
        for blocks in self._stores.take_left_over(state):
            self._add(state, self._stores.missing(blocks.intact()), is_intact=is_intact)

    def _add(self, state: RequestState, blocks: BlockSet, *, is_intact: bool) -> None:
        """Store blocks of a request; retry those that find no slot, while it runs."""
        num_stored = self._stores.add(blocks, state, is_intact=is_intact)
        if is_intact and num_stored < len(blocks.blocks):
            self._stores.put_off(state, blocks.part(range(num_stored, len(blocks.blocks))))

    def _scan(
        self, states: Sequence[RequestState]
    ) -> tuple[
        list[tuple[BlockSet, list[tuple[RequestState, int]]]], dict[RequestState, list[int]]
    ]:
        """Move the requests' cursors to the end of the hashed blocks.

        Returns the blocks to store by group, request by request in prefix order, with the number of
        blocks of each owner; and by request the slots of blocks that the host has already.
        """
        found = []
        present: dict[RequestState, list[int]] = {}
        for group_idx in self._group_ids:
            tables, nums_hashed = self._gpu.tables_of(group_idx)
            kept_in: list[BlockTable] | None = [] if self._gpu.keeps_blocks(group_idx) else None
            blocks, owners, num_found = BlockSet(group_idx, kept_in=kept_in), [], 0
            for state in states:
                request = state.request
                request_id = request.request_id
                num_hashed = nums_hashed.get(request_id, 0)
                limit = state.limits.store_tokens
                if limit is not None:
                    num_hashed = min(num_hashed, limit // self._block_sizes[group_idx])
                cursors = (state.eager or self._begin_storing(state)).cursors
                cursor = cursors[group_idx]
                if cursor >= num_hashed:
                    continue
                cursors[group_idx] = num_hashed
                table = tables[request_id]
                kept = self._look(request, table[cursor:num_hashed], cursor, blocks)
                if kept:
                    present[state] = present[state] + kept if state in present else kept
                num_added = len(blocks.blocks) - num_found
                if num_added:
                    num_found += num_added
                    owners.append((state, num_added))
                    if kept_in is not None:
                        kept_in.append(BlockTable(tables, request_id, table))
            if blocks.blocks:
                found.append((blocks, owners))
        return found, present

    def _tails(self, state: RequestState) -> list[BlockSet]:
        """Return the partial blocks in which the prompt ends, if vLLM has hashed them.

        vLLM does so where hits may end inside a block (0.32.0,
        FullAttentionManager._cache_partial_tail_block). It may become full while its request runs,
        so it is stored at the end.
        """
        request_id, limit = state.request.request_id, state.limits.store_tokens
        tails = []
        for group_idx in self._larger_ids:
            tables, nums_hashed = self._gpu.tables_of(group_idx)
            place = nums_hashed.get(request_id, 0)
            is_allowed = limit is None or (place + 1) * self._block_sizes[group_idx] <= limit
            table = tables.get(request_id, ())
            cursors = (state.eager or self._begin_storing(state)).cursors
            if is_allowed and cursors[group_idx] <= place < len(table):
                tails.append(BlockSet(group_idx))
                self._look(state.request, table[place : place + 1], place, tails[-1])
        return tails

    def _look(
        self, request: Request, blocks: list[KVCacheBlock], first: int, missing: BlockSet
    ) -> list[int]:
        """Add the blocks that the host lacks to `missing`; return the slots of the others."""
        group_idx = missing.group_idx
        hash_objects: list[Any] = hashes_of(blocks)
        is_whole = all(hash_objects)
        if not is_whole:  # a window slid past some, or no hit can ever need them
            if not any(hash_objects):
                return []
            blocks = needed(blocks, hash_objects, None)
            hash_objects = needed(hash_objects, hash_objects, None)
        if is_whole and self._block_sizes[group_idx] == self._hash_block_size:
            hashes = request.block_hashes[first : first + len(blocks)]
        else:
            hashes = [get_block_hash(hash_object) for hash_object in hash_objects]
        kept: list[Any] = list(map(self._directory.tables[group_idx].get, hashes))
        num_missing = kept.count(None)
        if num_missing < len(kept):
            if not num_missing:
                return self._directory.filled(kept)
            is_missing = [slot is None for slot in kept]
            blocks = list(compress(blocks, is_missing))
            hash_objects = list(compress(hash_objects, is_missing))
            hashes = list(compress(hashes, is_missing))
            kept = [slot for slot in kept if slot is not None]
        else:
            kept = []
        missing.add(blocks, hash_objects, hashes)
        if self._gpu.has_more_hashes:
            missing.more_keys.update(find_more_keys(self._gpu, blocks, hashes))
        return self._directory.filled(kept) if kept else kept

    # ---- what went wrong -----------------------------------------------------------------------

    def pass_over(self, states: Sequence[RequestState]) -> None:
        super().pass_over(states)
        for state in states:
            if state.phase is Phase.RUNNING:
                self._pass_over(state)

    def _pass_over(self, state: RequestState) -> None:
        cursors = (state.eager or self._begin_storing(state)).cursors
        for group_idx in self._group_ids:
            _, nums_hashed = self._gpu.tables_of(group_idx)
            num_hashed = nums_hashed.get(state.request.request_id, 0)
            if group_idx in self._larger_ids:
                num_hashed += 1  # the prompt may end in it
            cursors[group_idx] = max(cursors[group_idx], num_hashed)
