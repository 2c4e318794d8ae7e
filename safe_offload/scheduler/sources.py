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

from dataclasses import dataclass
from itertools import compress
from typing import TYPE_CHECKING, Any

from safe_offload.scheduler.gpu_blocks import (
    Home,
    Place,
    block_hash_of,
    get_block_hash,
    get_group_id,
    hashes_of,
)
from safe_offload.scheduler.slots import Key, SlotPool, needed
from safe_offload.scheduler.witness import Sources

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from vllm.v1.core.kv_cache_utils import KVCacheBlock

    from safe_offload.scheduler.gpu_blocks import GpuBlocks
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

    def new(self) -> dict[int, Sources]:
        """Nothing, for each group: what `scan` adds to."""
        return {
            group_idx: Sources(group_idx, homes=[] if self._gpu.has_homes(group_idx) else None)
            for group_idx in self._group_ids
        }

    def scan(self, state: RequestState, found: dict[int, Sources]) -> list[int]:
        """Move the request's cursors to the end of what is hashed.

        Args:
            state: of the request.
            found: what to store is added, by group, in prefix order.

        Returns:
            The host slots that hold blocks of this request already.
        """
        present: list[int] = []
        request_id = state.request.request_id
        cursors, limit = state.cursors, state.limits.store_tokens
        for group_idx, sources in found.items():
            tables, nums_hashed = self._gpu.tables_of(group_idx)
            num_hashed = nums_hashed.get(request_id, 0)
            if limit is not None:
                num_hashed = min(num_hashed, limit // self._block_sizes[group_idx])
            cursor = cursors[group_idx]
            if cursor >= num_hashed:
                continue
            cursors[group_idx] = num_hashed
            table = tables[request_id]
            num_added = self._scan_table(state, table[cursor:num_hashed], cursor, sources, present)
            if num_added:
                sources.owners.append((state, num_added))
                if sources.homes is not None:
                    sources.homes.append(Home(tables, request_id, table))
        return present

    def _scan_table(
        self,
        state: RequestState,
        blocks: list[KVCacheBlock],
        first: int,
        sources: Sources,
        present: list[int],
    ) -> int:
        """Look at blocks of a table, from the `first` on: which are to be stored, which are there.

        Returns:
            How many were added to `sources`.
        """
        if len(blocks) == 1:
            return self._scan_block(state, blocks[0], first, sources, present)
        group_idx = sources.group_idx
        witnesses: list[Any] = hashes_of(blocks)
        is_whole = all(witnesses)
        if not is_whole:  # a window slid past some, or no hit can ever need them
            blocks = needed(blocks, witnesses, None)
            witnesses = needed(witnesses, witnesses, None)
        if is_whole and self._block_sizes[group_idx] == self._hash_block_size:
            hashes = state.request.block_hashes[first : first + len(blocks)]
        else:
            hashes = [get_block_hash(witness) for witness in witnesses]
        kept: list[Any] = list(map(self._slots.tables[group_idx].get, hashes))
        num_missing = kept.count(None)
        if num_missing < len(kept):
            if not num_missing:
                present += self._slots.filled(kept)
                return 0
            present += self._slots.filled([slot for slot in kept if slot is not None])
            missing = [slot is None for slot in kept]
            blocks = list(compress(blocks, missing))
            witnesses = list(compress(witnesses, missing))
            hashes = list(compress(hashes, missing))
        sources.add(blocks, witnesses, hashes)
        sources.more_keys.update(find_more_keys(self._gpu, blocks, hashes))
        return num_missing

    def _scan_block(
        self,
        state: RequestState,
        block: KVCacheBlock,
        place: int,
        sources: Sources,
        present: list[int],
    ) -> int:
        """The same for one block, which is what a request that decodes has."""
        witness = block_hash_of(block)
        if witness is None:
            return 0
        is_named = self._block_sizes[sources.group_idx] == self._hash_block_size
        block_hash = state.request.block_hashes[place] if is_named else get_block_hash(witness)
        slot = self._slots.tables[sources.group_idx].get(block_hash)
        if slot is not None:
            present += self._slots.filled([slot])
            return 0
        sources.add([block], [witness], [block_hash])
        sources.more_keys.update(find_more_keys(self._gpu, [block], [block_hash]))
        return 1


@dataclass(slots=True)
class Snapshot:
    """What a running request had computed when it was looked at last, to be found when it is gone.

    Attributes:
        group_idx: KV cache group, whose blocks are as large as what the request has hashes of.
        table: its block table; vLLM drops it when it preempts the request, and leaves it as it is.
        num_hashed: so many blocks at the head of it are computed.
    """

    group_idx: int
    table: list[KVCacheBlock]
    num_hashed: int

    def given_out(self, hashes: Sequence[bytes], block_ids: Collection[int]) -> Sources:
        """The blocks that somebody else was given in this step.

        Nothing has written them yet, so that they can still be stored, before the forward.

        Args:
            hashes: of the request.
            block_ids: what was allocated in this step.
        """
        sources = Sources(self.group_idx)
        for block, block_hash in zip(self.table[: self.num_hashed], hashes, strict=False):
            if block.block_id in block_ids and not block.is_null:
                witness = block_hash_of(block)
                if witness is None or get_block_hash(witness) != block_hash:
                    sources.add([block], [_NO_WITNESS], [block_hash])
        return sources


_NO_WITNESS = b"given away"
"""Is the hash object of no block."""


class LazyWalk:
    """Finds what is about to be evicted: the head of vLLM's queue of free blocks.

    The queue is not walked in every step. What was looked at once needs no second look while it
    stays in the queue: so a step goes on behind the last block that was seen, up to a distance from
    the head that no step can eat up, and begins again at the head when half of that is gone.

    Args:
        slots: to skip what the host has or is about to have.
        gpu: the free queue.
        num_blocks: how far ahead of the allocator to look; twice what a step may allocate.
    """

    def __init__(self, slots: SlotPool, gpu: GpuBlocks, num_blocks: int) -> None:
        self._slots = slots
        self._gpu = gpu
        self._num_blocks = num_blocks
        self._num_seen = 0
        self._half: Place | None = None
        self._last: Place | None = None

    def at_risk(self, request_id: str) -> list[Sources]:
        """Blocks of a request that finishes, if the next step may allocate them unseen."""
        if self._gpu.num_free_blocks >= self._num_blocks // 2:
            return []
        return sources_of(self._gpu.hashed_blocks(request_id), self._gpu, self._slots)

    def walk(self) -> list[Sources]:
        """Free blocks that the allocator takes soon, that the host does not have, not seen yet."""
        half, last = self._half, self._last
        if half is None or last is None or not (half.stands() and last.stands()):
            blocks = self._gpu.free_blocks(self._num_blocks)
            self._num_seen = 0
            middle = min(len(blocks), self._num_blocks // 2) - 1
            self._half = Place.of(blocks[middle]) if blocks else None
        elif self._num_seen < self._num_blocks:
            blocks = self._gpu.free_blocks(self._num_blocks - self._num_seen, last.block)
        else:
            return []
        if not blocks:
            return []
        self._num_seen += len(blocks)
        self._last = Place.of(blocks[-1])
        return sources_of(blocks, self._gpu, self._slots)

    def begin_again(self) -> None:
        """Look at everything anew, in the next step."""
        self._half = self._last = None


def sources_of(blocks: Iterable[KVCacheBlock], gpu: GpuBlocks, slots: SlotPool) -> list[Sources]:
    """Of some blocks, those that vLLM has hashed and the host neither has nor is about to have.

    Of blocks that hold the same, as two requests may have computed it, the first.
    """
    by_group: dict[int, Sources] = {}
    seen: set[bytes] = set()
    for block in blocks:
        witness = block_hash_of(block)
        if witness is None or witness in seen:
            continue
        seen.add(witness)
        group_idx, block_hash = get_group_id(witness), get_block_hash(witness)
        if block_hash in slots.tables[group_idx]:
            continue
        sources = by_group.get(group_idx)
        if sources is None:
            sources = by_group[group_idx] = Sources(group_idx)
        sources.add([block], [witness], [block_hash])
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
