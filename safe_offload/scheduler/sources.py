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

from typing import TYPE_CHECKING, Any

from safe_offload.compat import block_hash_of, get_block_hash, get_group_id
from safe_offload.scheduler.slots import Key, SlotPool
from safe_offload.scheduler.witness import Sources

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from vllm.v1.core.kv_cache_utils import KVCacheBlock

    from safe_offload.compat import GpuBlocks
    from safe_offload.scheduler.index import HostIndex
    from safe_offload.scheduler.requests import RequestState


class EagerScan:
    """Finds what a request has computed since the last scan.

    Args:
        index: to skip what the host has or is about to have.
        gpu: the block tables.
    """

    def __init__(self, index: HostIndex, gpu: GpuBlocks) -> None:
        self._slots = index.slots
        self._hash_block_size = index.hash_block_size
        self._block_sizes = index.group_block_sizes
        self._gpu = gpu
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
            if cursor < num_hashed:
                state.cursors[group_idx] = num_hashed
                sources = self._scan_group(state, group_idx, slice(cursor, num_hashed), present)
                if sources is not None:
                    found.append(sources)
        return found, present

    def _scan_group(
        self, state: RequestState, group_idx: int, span: slice, present: list[int]
    ) -> Sources | None:
        """What to store of some blocks of a table; what the host has of them goes to `present`."""
        request_id = state.request.request_id
        blocks = list(self._gpu.of_request(request_id, group_idx)[span])
        witnesses: list[Any] = list(map(block_hash_of, blocks))
        is_whole = all(witnesses)
        if not is_whole:  # a window slid past some, or no hit can ever need them
            blocks = [block for block, witness in zip(blocks, witnesses, strict=True) if witness]
            witnesses = [witness for witness in witnesses if witness]
        if is_whole and self._block_sizes[group_idx] == self._hash_block_size:
            hashes = state.request.block_hashes[span]
        else:
            hashes = [get_block_hash(witness) for witness in witnesses]
        found = list(map(self._slots.tables[group_idx].get, hashes))
        missing = [slot is None for slot in found]
        if not all(missing):
            present += self._slots.filled(slot for slot in found if slot is not None)
        if not any(missing):
            return None
        more_keys = find_more_keys(self._gpu, blocks, hashes)
        home = self._gpu.home(request_id, group_idx)
        return Sources(group_idx, blocks, witnesses, hashes, more_keys, home).keep(missing)


class LazyWalk:
    """Finds what is about to be evicted: the head of vLLM's queue of free blocks.

    Args:
        index: to skip what the host has or is about to have.
        gpu: the free queue.
        num_blocks: how far ahead of the allocator to look.
    """

    def __init__(self, index: HostIndex, gpu: GpuBlocks, num_blocks: int) -> None:
        self._slots = index.slots
        self._gpu = gpu
        self._num_blocks = num_blocks

    def walk(self) -> list[Sources]:
        """The free blocks that the allocator takes next and that the host does not have."""
        return sources_of(self._gpu.free_blocks(self._num_blocks), self._gpu, self._slots)


def sources_of(blocks: Iterable[KVCacheBlock], gpu: GpuBlocks, slots: SlotPool) -> list[Sources]:
    """Of some blocks, those that vLLM has hashed and the host neither has nor is about to have."""
    by_group: dict[int, Sources] = {}
    for block in blocks:
        witness = block_hash_of(block)
        if witness is None:
            continue
        group_idx, block_hash = get_group_id(witness), get_block_hash(witness)
        if block_hash in slots.tables[group_idx]:
            continue
        sources = by_group.get(group_idx)
        if sources is None:
            sources = by_group[group_idx] = Sources(group_idx, [], [], [])
        sources.blocks.append(block)
        sources.witnesses.append(witness)
        sources.hashes.append(block_hash)
    for sources in by_group.values():
        sources.more_keys = find_more_keys(gpu, sources.blocks, sources.hashes)
    return list(by_group.values())


def find_more_keys(
    gpu: GpuBlocks, blocks: Sequence[KVCacheBlock], hashes: Sequence[bytes]
) -> dict[bytes, list[Key]]:
    """What blocks are known under beside their own hash, by that hash."""
    if not gpu.has_more_hashes:
        return {}
    more = ((h, gpu.more_hashes(b.block_id)) for h, b in zip(hashes, blocks, strict=True))
    return {h: [Key(get_group_id(k), get_block_hash(k)) for k in keys] for h, keys in more if keys}
