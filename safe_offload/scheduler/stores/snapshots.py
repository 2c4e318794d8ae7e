"""The computed but unstored blocks of a preempted request.

vLLM drops the block table of a request that it preempts. A `Snapshot` keeps it, so that the plan of
the same step can store its blocks before they are overwritten.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from safe_offload.scheduler.blocks import BlockSet, block_hash_of, get_block_hash, get_group_id

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from vllm.v1.core.kv_cache_utils import KVCacheBlock
    from vllm.v1.request import Request

    from safe_offload.scheduler.blocks import GpuBlocks
    from safe_offload.scheduler.geometry import GroupGeometry
    from safe_offload.scheduler.requests import RequestState

_NO_WITNESS = b"given away"
"""A hash object that no block has."""


@dataclass(slots=True)
class Snapshot:
    """A block table of a running request.

    Bound: an entry for each block of its request; the list is vLLM's own.
    """

    group_idx: int
    # Its block table, which vLLM drops at a preemption without changing it.
    table: list[KVCacheBlock]
    # Leading computed blocks at the last check; None if it was decoding, when its tokens determine
    # the number.
    num_blocks: int | None
    num_prompt_tokens: int  # of the request then; it changes when a client sends more input

    def is_current(self, request: Request) -> bool:
        """Return whether it is still valid: taken while decoding, with the same prompt."""
        return self.num_blocks is None and self.num_prompt_tokens == request.num_prompt_tokens

    def num_computed(self, request: Request, block_size: int) -> int:
        """Return the leading blocks computed before this step; see `StoreSchedule.num_computed`."""
        if self.num_blocks is not None:
            return self.num_blocks
        if request.num_prompt_tokens != self.num_prompt_tokens:
            return 0
        num_tokens: int = request.num_tokens - 1
        return num_tokens // block_size

    def unsaved(
        self, hashes: Sequence[bytes], places: range, given_out: Collection[int], gpu: GpuBlocks
    ) -> tuple[BlockSet, BlockSet]:
        """Return its unstored blocks, after its request was preempted.

        Args:
            hashes: of the request's blocks.
            places: of the blocks that are computed and were not stored before.
            given_out: ids of the blocks allocated in this step.

        Returns:
            The blocks that must be stored before the forward pass, because they were reallocated in
                this step or have no hash that would reveal it (many blocks of sliding windows); and
                the blocks that are in the free queue.
        """
        lost, waiting = BlockSet(self.group_idx), BlockSet(self.group_idx)
        is_window = gpu.is_window(self.group_idx)
        first = 0 if is_window else places.start  # what was not hashed was passed over
        table = self.table[first : places.stop]
        for block, block_hash in zip(table, hashes[first:], strict=False):
            if block.is_null:
                continue
            hash_object = block_hash_of(block)
            if (
                hash_object is not None
                and get_block_hash(hash_object) == block_hash
                # Another group may hold the same tokens in it by now.
                and get_group_id(hash_object) == self.group_idx
            ):
                waiting.append(block, hash_object, block_hash)
            elif is_window or block.block_id in given_out:
                lost.append(block, _NO_WITNESS, block_hash)
        return lost, waiting


class SnapshotTaker:
    """Takes snapshots (`RequestState.snapshots`), and finds their unstored blocks.

    Bound: an entry for each KV cache group.
    """

    def __init__(self, geometry: GroupGeometry, gpu: GpuBlocks) -> None:
        self._geometry = geometry
        self._gpu = gpu
        # The tables of other groups do not tell which tokens a block holds.
        self._group_ids = [g for g in geometry.group_ids if gpu.is_positional(g)]

    def take(self, state: RequestState, *, is_decoding: bool) -> None:
        """Take snapshots of a request, one for each group."""
        request, request_id = state.request, state.request.request_id
        taken = []
        for group_idx in self._group_ids:
            tables, nums_hashed = self._gpu.tables_of(group_idx)
            table = tables.get(request_id)
            if table:
                num_blocks = None if is_decoding else nums_hashed.get(request_id, 0)
                taken.append(Snapshot(group_idx, table, num_blocks, request.num_prompt_tokens))
        state.snapshots = taken

    def drop(self, state: RequestState) -> Sequence[Snapshot]:
        """Remove and return the snapshots of a request."""
        taken, state.snapshots = state.snapshots, ()
        return taken

    def unsaved(
        self, state: RequestState, snapshot: Snapshot, first: int, given_out: Collection[int]
    ) -> tuple[BlockSet, BlockSet]:
        """Return the unstored blocks of a preempted request (see `Snapshot.unsaved`)."""
        block_size = self._geometry.group_block_sizes[snapshot.group_idx]
        end = snapshot.num_computed(state.request, block_size)
        # Coming in vLLM: drafts may have left out the last blocks, which have a hash all the same.
        publishable = getattr(state.request, "num_publishable_block_hashes", None)
        if publishable is not None:
            end = min(end, publishable * self._geometry.hash_block_size // block_size)
        if state.limits.store_tokens is not None:
            end = min(end, state.limits.store_tokens // block_size)
        hashes = self._geometry.hashes_of(state.request, snapshot.group_idx)
        return snapshot.unsaved(hashes, range(first, end), given_out, self._gpu)
