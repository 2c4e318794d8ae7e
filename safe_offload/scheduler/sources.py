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

from collections.abc import Callable
from typing import TYPE_CHECKING

from safe_offload.compat import block_hash_of
from safe_offload.scheduler.witness import Sources, sources_of

if TYPE_CHECKING:
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
        self._find = index.slots.find
        self._block_sizes = index.group_block_sizes
        self._gpu = gpu
        self._in_flight = in_flight
        self._group_ids = [g for g in index.group_ids if gpu.is_positional(g)]

    def scan(self, state: RequestState) -> tuple[list[Sources], list[int]]:
        """Move the request's cursors to the end of what is hashed.

        Returns:
            For each group that has any, the blocks to store; and the host slots that hold blocks of
            this request already.
        """
        found: list[Sources] = []
        present: list[int] = []
        request_id = state.request.request_id
        for group_idx in self._group_ids:
            num_hashed = self._gpu.num_hashed(request_id, group_idx)
            if state.limits.store_tokens is not None:
                num_allowed = state.limits.store_tokens // self._block_sizes[group_idx]
                num_hashed = min(num_hashed, num_allowed)
            cursor = state.cursors[group_idx]
            if cursor >= num_hashed:
                continue
            state.cursors[group_idx] = num_hashed
            sources = self._scan_group(request_id, group_idx, slice(cursor, num_hashed), present)
            if sources:
                found.append(sources)
        return found, present

    def _scan_group(
        self, request_id: str, group_idx: int, span: slice, present: list[int]
    ) -> Sources:
        """What to store of some blocks of a table; what the host has of them goes to `present`."""
        blocks, keys = [], []
        find, is_in_flight = self._find, self._in_flight
        for block in self._gpu.of_request(request_id, group_idx)[span]:
            key = block_hash_of(block)
            if key is None:
                continue  # a window slid past it, or no hit can ever need it
            slot = find(key)
            if slot is not None:
                present.append(slot)
            elif not is_in_flight(key):
                blocks.append(block)
                keys.append(key)
        if not blocks:
            return Sources()
        home = self._gpu.home(request_id, group_idx)
        return Sources(blocks, keys, self._gpu.more_keys(blocks), home)


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
        self._find = index.slots.find
        self._gpu = gpu
        self._in_flight = in_flight
        self._num_blocks = num_blocks

    def walk(self) -> Sources:
        """The free blocks that the allocator takes next and that the host does not have."""
        found = sources_of(list(self._gpu.free_blocks(self._num_blocks)), self._gpu)
        find, is_in_flight = self._find, self._in_flight
        return found.keep([find(key) is None and not is_in_flight(key) for key in found.keys])
