"""Which GPU blocks to store.

A block is worth storing when vLLM has hashed it for its own prefix cache (so it is full, and its
tokens are known) and when its bytes are there by the time that the store reads them.

That vLLM has hashed a block proves nothing about its bytes: it hashes the blocks of a step while it
schedules the step. But every block that a request *scheduled in this step* has hashed is computed
once the forward of this step has run, and a store after the forward is ordered behind it. So a
block is stored in the very step that computes it. A step later would be too late for many: a
sliding window has passed and its blocks are no longer in the table, or the request was preempted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from safe_offload.scheduler.witness import Source, source_of

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_utils import KVCacheBlock

    from safe_offload.compat import GpuBlocks
    from safe_offload.scheduler.index import HostIndex
    from safe_offload.scheduler.requests import RequestState


class EagerScan:
    """Finds what a request has computed since the last scan.

    Args:
        index: to skip what the host has.
        gpu: the block tables.
        in_flight: whether a store of this block hash is in flight.
    """

    def __init__(
        self, index: HostIndex, gpu: GpuBlocks, in_flight: Callable[[bytes], bool]
    ) -> None:
        self._index = index
        self._gpu = gpu
        self._in_flight = in_flight
        self._group_ids = [g for g in index.group_ids if gpu.is_positional(g)]

    def scan(self, state: RequestState) -> tuple[list[Source], list[KVCacheBlock]]:
        """Move the request's cursors to the end of what is hashed.

        Returns:
            The blocks to store, and the host slots that hold blocks of this request already.
        """
        sources: list[Source] = []
        present: list[KVCacheBlock] = []
        for group_idx in self._group_ids:
            request_id = state.request.request_id
            num_hashed = self._gpu.num_hashed(request_id, group_idx)
            if state.limits.store_tokens is not None:
                num_allowed = state.limits.store_tokens // self._index.group_block_sizes[group_idx]
                num_hashed = min(num_hashed, num_allowed)
            cursor = state.cursors[group_idx]
            if cursor >= num_hashed:
                continue
            state.cursors[group_idx] = num_hashed
            for block in self._gpu.of_request(request_id, group_idx)[cursor:num_hashed]:
                key = block.block_hash
                if key is None or block.is_null:
                    continue  # a window slid past it, or no hit can ever need it
                slot = self._index.find(key)
                if slot is not None:
                    present.append(slot)
                elif not self._in_flight(key) and (source := source_of(block, self._gpu)):
                    sources.append(source)
        return sources, present


class LazyWalk:
    """Finds what is about to be evicted: the head of vLLM's queue of free blocks.

    Args:
        index: to skip what the host has.
        gpu: the free queue.
        in_flight: whether a store of this block hash is in flight.
        num_blocks: how far ahead of the allocator to look.
    """

    def __init__(
        self,
        index: HostIndex,
        gpu: GpuBlocks,
        in_flight: Callable[[bytes], bool],
        num_blocks: int,
    ) -> None:
        self._index = index
        self._gpu = gpu
        self._in_flight = in_flight
        self._num_blocks = num_blocks

    def walk(self) -> Iterator[Source]:
        """Yield the free blocks that the allocator takes next and that the host does not have."""
        for block in self._gpu.free_blocks(self._num_blocks):
            source = source_of(block, self._gpu)
            if (
                source is not None
                and self._index.find(source.keys[0]) is None
                and not self._in_flight(source.keys[0])
            ):
                yield source
