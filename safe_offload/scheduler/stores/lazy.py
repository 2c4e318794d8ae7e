"""Lazy stores: blocks are stored just before, or just after, vLLM reallocates them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from safe_offload.scheduler.blocks import (
    BlockSet,
    QueuePlace,
    get_block_hash,
    hashes_of,
    missing_blocks,
)
from safe_offload.scheduler.requests import Phase, RequestBook, RequestState
from safe_offload.scheduler.stores.policy import StorePolicy

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from vllm.v1.core.kv_cache_utils import KVCacheBlock
    from vllm.v1.core.sched.output import SchedulerOutput

    from safe_offload.scheduler.blocks import GpuBlocks
    from safe_offload.scheduler.loads.hits import HostHits
    from safe_offload.scheduler.stores.stores import Stores


SWEEP_MIN = 1 << 16
"""Excluded hashes, before those that the GPU has lost are removed."""


class LazyStores(StorePolicy):
    """A `StorePolicy` that stores the blocks that vLLM evicts next.

    These are at the head of vLLM's free queue, which is not walked in every step. A block in the
    queue needs one look only: a step continues after the last block seen, up to a distance from the
    head that lasts for some steps, and restarts at the head when half of that is used up.

    Blocks allocated before a walk has seen them, such as the tail of a request that has just ended,
    are recorded when vLLM allocates them, and stored before the forward pass of that step.

    Bound: the GPU's blocks and the hashes that a sweep leaves, both twice, and the requests that
    vLLM has.

    Args:
        num_step_blocks: the most blocks that one step may allocate for its tokens.
    """

    def __init__(
        self,
        hits: HostHits,
        gpu: GpuBlocks,
        stores: Stores,
        num_decode_tokens_max: int,
        num_step_blocks: int,
    ) -> None:
        super().__init__(hits, gpu, stores, num_decode_tokens_max, is_lazy=True)
        self._num_step_blocks = num_step_blocks
        # More than the host holds would push out what was just stored, step after step.
        self._num_ahead = min(2 * num_step_blocks, hits.slots.num_slots)
        self._given: list[KVCacheBlock] = []
        """What vLLM has given away since the last plan, and below with which hash objects."""
        self._given_hashes: list[bytes | None] = []
        self._given_max = 2 * gpu.num_blocks
        gpu.watch_allocations(self._record_given)
        self._has_ended = False  # a request, since the last walk
        self._num_seen = 0
        self._middle: QueuePlace | None = None
        """A block at half the distance; the walk begins again when it has left its place."""
        self._last: QueuePlace | None = None
        """The last block that the walk has seen."""
        self._growing: list[RequestState] = []
        """Requests of which nothing is stored and that have had blocks: more may be hashed."""
        self.left_out_hashes: set[bytes] = set()
        self._sweep_at = SWEEP_MIN
        self._missing = self._unstored  # another one from the first request on that is left out

    def __repr__(self) -> str:
        return f"LazyStores({self._num_seen} of {self._num_ahead} blocks seen)"

    # ---- what vLLM gives away ------------------------------------------------------------------

    def _record_given(self, blocks: list[KVCacheBlock]) -> None:
        if len(self._given) < self._given_max:  # else nothing is planned any more
            self._given += blocks
            self._given_hashes += hashes_of(blocks)

    def _forget_given(self) -> None:
        self._given, self._given_hashes = [], []

    # ---- the life of a request -----------------------------------------------------------------

    def keep_out(self, state: RequestState) -> None:
        """Exclude the blocks that a request computes by hash; those on the GPU are of others."""
        num_cached = self._gpu.num_cached_tokens(state.request)
        state.left_out_from = num_cached // self._geometry.hash_block_size
        self._missing = self._unstored_of_others
        if len(self.left_out_hashes) > self._sweep_at:
            self._sweep()

    def run(self, state: RequestState) -> None:
        super().run(state)
        if state.left_out_from is not None:
            self._growing.append(state)

    def end(self, state: RequestState) -> None:
        super().end(state)
        self._has_ended = True

    def _sweep(self) -> None:
        """Remove excluded hashes that the GPU has lost and that no allocation still names."""
        kept = self._gpu.cached_hashes()
        kept.update(get_block_hash(h) for h in self._given_hashes if h is not None)
        length = len(next(iter(self.left_out_hashes)))
        self.left_out_hashes &= {block_hash[-length:] for block_hash in kept}
        self._sweep_at = max(SWEEP_MIN, 2 * len(self.left_out_hashes))

    def forget_table(self, state: RequestState) -> None:
        """Also drop blocks seen with a hash and reallocated in this step."""
        super().forget_table(state)
        self._forget_given()

    def forget_uncomputed(self, state: RequestState) -> set[bytes]:
        """Also forget blocks that vLLM has hashed and reallocated in this step."""
        uncomputed = super().forget_uncomputed(state)
        length = len(next(iter(uncomputed), b""))
        given, seen = list(zip(self._given, self._given_hashes, strict=True)), set[int]()
        self._forget_given()
        for block, h in given:
            is_computed = h is None or get_block_hash(h)[-length:] not in uncomputed
            if is_computed and block.block_id not in seen:
                self._given.append(block)
                self._given_hashes.append(h)
            seen.add(block.block_id)
        return uncomputed

    def finish(self, state: RequestState) -> None:
        """Store blocks of retained requests now, not before eviction."""
        if state.is_retained and state.phase is Phase.RUNNING:
            if (events := self._hits.directory.events) is not None:
                events.learn(state)
            for group_idx in self._geometry.group_ids:
                tables, nums_hashed = self._gpu.tables_of(group_idx)
                request_id = state.request.request_id
                blocks = tables.get(request_id, ())[: nums_hashed.get(request_id, 0)]
                for missing in self._missing(blocks, hashes_of(blocks)):
                    self._stores.add(missing, None, is_intact=False)

    # ---- a step is planned ---------------------------------------------------------------------

    def rescue(self, states: Sequence[RequestState], given_out: Collection[int]) -> None:
        """Store blocks that are not in the free queue."""
        for state in states:
            for snapshot in self._snapshot_taker.drop(state):
                lost, _ = self._snapshot_taker.unsaved(state, snapshot, 0, given_out)
                self._stores.rescue(lost)

    def find(
        self, output: SchedulerOutput, book: RequestBook, loading: Sequence[RequestState]
    ) -> None:
        """Store reallocated blocks in every step, as one without computation may allocate, too."""
        for state in (*loading, *self.schedule.due(output.num_scheduled_tokens)):
            taken, is_decoding = state.snapshots, state.is_decoding
            if not (is_decoding and taken and taken[0].is_current(state.request)):
                self._snapshot_taker.take(state, is_decoding=is_decoding)
        if self._given:
            for blocks in self._missing(self._given, self._given_hashes):
                self._stores.add(blocks, None, is_intact=False)
            self._forget_given()
        if book.num_live or self._has_ended:  # an idle engine would store without end
            self._has_ended = False
            if self.extras is not None and self.extras.plan():
                self._begin_again()
            for blocks in self._walk():
                if self._stores.add(blocks, None, is_intact=True) < len(blocks.blocks):
                    self._begin_again()

    def _walk(self) -> list[BlockSet]:
        """Return unseen free blocks that are allocated soon and that the host lacks."""
        middle, last = self._middle, self._last
        if middle is None or last is None or not (middle.stands() and last.stands()):
            blocks = self._gpu.free_blocks(self._num_ahead)
            self._num_seen = 0
            half = min(len(blocks), self._num_step_blocks)
            self._middle = QueuePlace.of(blocks[half - 1]) if blocks else None
        elif self._num_seen < self._num_ahead:
            blocks = self._gpu.free_blocks(self._num_ahead - self._num_seen, last.block)
        else:
            return []
        if not blocks:
            return []
        self._num_seen += len(blocks)
        self._last = QueuePlace.of(blocks[-1])
        return self._missing(blocks, hashes_of(blocks))

    def _unstored_of_others(
        self, blocks: Sequence[KVCacheBlock], hash_objects: Sequence[bytes | None]
    ) -> list[BlockSet]:
        left_out = self.left_out_hashes
        for state in self._growing:
            hashes = state.request.block_hashes
            left_out.update(hashes[state.left_out_from :])
            state.left_out_from = len(hashes)
        self._growing = [s for s in dict.fromkeys(self._growing) if not s.finished]
        length = len(next(iter(left_out), b""))
        hash_objects = [
            None if h is not None and get_block_hash(h)[-length:] in left_out else h
            for h in hash_objects
        ]
        return self._unstored(blocks, hash_objects)

    def _unstored(
        self, blocks: Sequence[KVCacheBlock], hash_objects: Sequence[bytes | None]
    ) -> list[BlockSet]:
        return missing_blocks(blocks, hash_objects, self._gpu, self._hits.directory.tables)

    def _begin_again(self) -> None:
        self._middle = self._last = None

    # ---- what went wrong -----------------------------------------------------------------------

    def pass_over(self, states: Sequence[RequestState]) -> None:
        super().pass_over(states)
        self._forget_given()
        self._begin_again()
