"""Lazy stores: what vLLM is about to evict, and what it has given away before that was seen."""

from __future__ import annotations

from itertools import compress
from operator import is_not
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
"""Hashes that are left out, before it is looked which of them the GPU still has."""


class LazyStores(StorePolicy):
    """A policy that stores what is about to be evicted. See `StorePolicy`.

    What is about to be evicted is the head of vLLM's queue of free blocks. The queue is not walked
    in every step. What was looked at once needs no second look while it stays in the queue: so a
    step goes on after the last block that was seen, up to a distance from the head that no step can
    use up, and begins again at the head when half of that is gone.

    Its own state is what follows `_watched` in `__init__`.

    Bound: the blocks of two steps, the GPU's blocks, the requests that vLLM has, and the hashes
    that a sweep leaves, twice.

    Args:
        hits, gpu, stores, num_decode_tokens_max: see `StorePolicy`.
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
        self._watched: list[tuple[list[KVCacheBlock], list[bytes | None]]] = []
        """What may be lost before the next plan, with the hash objects of then."""
        self._num_seen = 0
        self._middle: QueuePlace | None = None
        """A block at half the distance; the walk begins again when it has left its place."""
        self._last: QueuePlace | None = None
        """The last block that the walk has seen."""
        self._last_ahead: QueuePlace | None = None
        """The last block that `look_ahead` has seen since the last plan."""
        self._left_out: dict[RequestState, int] = {}
        """Requests of which nothing is stored, and how many of their hashes were looked at."""
        self._left_out_hashes: set[bytes] = set()
        self._sweep_at = SWEEP_MIN
        self._missing = self._unstored  # another one from the first request on that is left out

    def __repr__(self) -> str:
        return f"LazyStores({self._num_seen} of {self._num_ahead} blocks seen)"

    # ---- the life of a request -----------------------------------------------------------------

    def keep_out(self, state: RequestState) -> None:
        """See `StorePolicy`; others find what it computes, or what it leaves in the queue, by hash.

        What the GPU has already is of others, who may have it stored.
        """
        num_cached = self._gpu.num_cached_tokens(state.request)
        self._left_out[state] = num_cached // self._geometry.hash_block_size
        self._missing = self._unstored_of_others
        if len(self._left_out_hashes) > self._sweep_at:
            self._sweep()

    @property
    def num_left_out(self) -> int:
        """Hashes of which nothing is stored."""
        return len(self._left_out_hashes)

    def _sweep(self) -> None:
        """Forget what the GPU has lost and what is not stored in its last moment either."""
        kept = self._gpu.cached_hashes()
        for _, hash_objects in self._watched:
            kept.update(get_block_hash(h) for h in hash_objects if h is not None)
        length = len(next(iter(self._left_out_hashes)))
        self._left_out_hashes &= {block_hash[-length:] for block_hash in kept}
        self._sweep_at = max(SWEEP_MIN, 2 * len(self._left_out_hashes))

    def look_ahead(self, num_gpu_tokens: int, num_host_tokens: int) -> None:
        """See `StorePolicy`; remembers what the request may take, beside what the step takes.

        A hit in the GPU's own cache takes its blocks out of the queue, and a load takes new ones.
        """
        num_tokens = num_gpu_tokens + num_host_tokens
        if num_host_tokens and self.extras is not None and self.extras.make_room(num_tokens):
            self._begin_again()
            self._last_ahead = None
        num_blocks = self._geometry.num_blocks_spanned(num_tokens)
        if self._last_ahead is not None and self._last_ahead.stands():
            seen = self._last_ahead.block
        else:
            num_blocks += self._num_step_blocks
            seen = self._last.block if self._last is not None and self._last.stands() else None
        blocks = self._gpu.free_blocks(num_blocks, seen)
        if blocks:
            self._last_ahead = QueuePlace.of(blocks[-1])
            self._watched.append((blocks, hashes_of(blocks)))

    def forget_table(self, state: RequestState) -> None:
        """See `StorePolicy`; what it gave away in this step may have been seen with a hash."""
        super().forget_table(state)
        self._watched = []

    def finish(self, state: RequestState) -> None:
        """See `StorePolicy`; remembers blocks that the next step may allocate unseen.

        vLLM frees the tail of a table first, after what is free already.
        """
        num_at_risk = self._num_step_blocks - self._gpu.num_free_blocks
        if state.phase is not Phase.RUNNING or num_at_risk <= 0:
            return
        request_id = state.request.request_id
        for group_idx in self._geometry.group_ids:
            tables, nums_hashed = self._gpu.tables_of(group_idx)
            end = nums_hashed.get(request_id, 0) + 1  # the prompt may end in a block that is hashed
            first = max(0, end - 1 - num_at_risk)
            blocks = tables.get(request_id, ())[first:end]
            if blocks:
                self._watched.append((blocks, hashes_of(blocks)))

    def store_now(self, state: RequestState) -> None:
        """See `StorePolicy`."""
        if state.phase is Phase.RUNNING:
            if (events := self._hits.directory.events) is not None:
                events.learn(state.request)
            for group_idx in self._geometry.group_ids:
                tables, nums_hashed = self._gpu.tables_of(group_idx)
                request_id = state.request.request_id
                blocks = tables.get(request_id, ())[: nums_hashed.get(request_id, 0)]
                for missing in self._missing(blocks, hashes_of(blocks)):
                    self._stores.add(missing, None, is_intact=False)

    # ---- a step is planned ---------------------------------------------------------------------

    def rescue(self, states: Sequence[RequestState], given_out: Collection[int]) -> None:
        """See `StorePolicy`; the rest of what they had computed waits in the queue."""
        for state in states:
            for snapshot in self._snapshots.pop(state, ()):
                lost, _ = self._snapshot_taker.unsaved(state, snapshot, 0, given_out)
                self._stores.rescue(lost)

    def find(
        self, output: SchedulerOutput, book: RequestBook, loading: Sequence[RequestState]
    ) -> None:
        """See `StorePolicy`.

        What was given away is looked for in every step, one that computes nothing too: it may
        allocate blocks for a load.
        """
        for state in (*loading, *self.schedule.due(output.num_scheduled_tokens)):
            taken, is_decoding = self._snapshots.get(state), state in self.schedule.decoding
            if not (is_decoding and taken and taken[0].is_current(state.request)):
                self._snapshots[state] = self._snapshot_taker.take(state, is_decoding=is_decoding)
        for blocks in self._given_away():
            self._stores.add(self._stores.missing(blocks), None, is_intact=False)
        if book.num_live:  # else an idle engine would store without end
            if self.extras is not None and self.extras.plan():
                self._begin_again()
            for blocks in self._walk():
                if self._stores.add(blocks, None, is_intact=True) < len(blocks.blocks):
                    self._begin_again()

    def _given_away(self) -> list[BlockSet]:
        """Return what was watched, and was given away in this step; the rest is in the queue."""
        watched, self._watched, self._last_ahead = self._watched, [], None
        found = []
        for blocks, hash_objects in watched:
            is_lost = list(map(is_not, hashes_of(blocks), hash_objects))
            if any(is_lost):
                lost = list(compress(blocks, is_lost)), list(compress(hash_objects, is_lost))
                found += self._missing(*lost)
        return found

    def _walk(self) -> list[BlockSet]:
        """Return free blocks not seen yet that are taken soon, if the host does not have them."""
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
        """Return what is to be stored of blocks, but for those that are left out."""
        left_out = self._left_out_hashes
        for state, first in list(self._left_out.items()):
            hashes = state.request.block_hashes
            left_out.update(hashes[first:])
            self._left_out[state] = len(hashes)
            if state.finished:
                del self._left_out[state]
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
        """Look at everything again, in the next step."""
        self._middle = self._last = None

    # ---- what went wrong -----------------------------------------------------------------------

    def pass_over(self, states: Sequence[RequestState]) -> None:
        """See `StorePolicy`."""
        super().pass_over(states)
        self._watched, self._last_ahead = [], None
        self._begin_again()
