"""The scheduler side's view of vLLM's GPU blocks: owners, hashes, the free queue.

Nothing here changes a block or its reference count. `forget_hashes` lets vLLM remove hashes,
`reuse_first` changes the order of free blocks, and `watch_allocations` wraps a method of vLLM. The
module reads internals of vLLM 0.31 to 0.33 (v1/core/block_pool.py,
single_type_kv_cache_manager.py).

The hash *object* of a block identifies its owner: vLLM resets it when it reallocates the block, and
creates a new object when it caches the block again. So a block whose hash is not the recorded
object was reallocated: to a request, a load, a copy-on-write or another connector.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter, is_, is_not
from typing import Any

from vllm.v1.core.kv_cache_utils import (
    BlockHash,
    KVCacheBlock,
    get_block_hash,
    get_group_id,
    make_block_hash_with_group_id,
)
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager, SlidingWindowManager

from safe_offload.scheduler.cache.directory import Key

__all__ = ["get_block_hash", "get_group_id"]  # re-exported

# The attribute behind the property: a step reads thousands, and a property is a Python call.
_HASH_FIELD = "_block_hash" if hasattr(KVCacheBlock, "_block_hash") else "block_hash"
block_hash_of: Callable[[KVCacheBlock], bytes | None] = attrgetter(_HASH_FIELD)
"""Return a block's own hash in vLLM's prefix cache, or None. The null block never has one."""


if _HASH_FIELD == "_block_hash":

    def hashes_of(blocks: Iterable[KVCacheBlock]) -> list[bytes | None]:
        """Return the own hash of each block, twice as fast as `block_hash_of` for each."""
        return [block._block_hash for block in blocks]
else:

    def hashes_of(blocks: Iterable[KVCacheBlock]) -> list[bytes | None]:
        """Return the own hash of each block."""
        return [block.block_hash for block in blocks]


@dataclass(slots=True)
class BlockTable:
    """A block table whose blocks stay in it for as long as it exists."""

    tables: Mapping[str, Any]  # vLLM's tables of one KV cache group, by request id
    request_id: str
    table: Any

    def stands(self) -> bool:
        """Return whether the request still has this table, and so each of its blocks."""
        return self.tables.get(self.request_id) is self.table


@dataclass(slots=True)
class QueuePlace:
    """A block in the free queue with its predecessor, to detect that it has moved."""

    block: KVCacheBlock
    before: Any
    block_hash: bytes | None

    @classmethod
    def of(cls, block: KVCacheBlock) -> QueuePlace:
        """Return the present place of a free block."""
        return cls(block, block.prev_free_block, block_hash_of(block))

    def stands(self) -> bool:
        """Return whether neither the block nor its predecessor has moved."""
        block = self.block
        return (
            block.ref_cnt == 0
            and block.prev_free_block is self.before
            and block_hash_of(block) is self.block_hash
        )


@dataclass(slots=True)
class BlockSet:
    """GPU blocks of one KV cache group that a store reads, with their hashes at that time.

    Bound: an entry for each block of the GPU, and the groups that it is hashed for.
    """

    group_idx: int
    blocks: list[KVCacheBlock] = field(default_factory=list)
    hash_objects: list[bytes] = field(default_factory=list)
    # Of each block, without the group: the key of its bytes.
    hashes: list[bytes] = field(default_factory=list)
    # By hash, further keys of a block; most have none.
    more_keys: dict[bytes, list[Key]] = field(default_factory=dict)
    # The block tables of all blocks, if blocks leave these only all at once; None if each block
    # must be checked.
    kept_in: list[BlockTable] | None = None

    def given_away(self) -> bool:
        """Return whether one of the blocks may have been reallocated."""
        if self.kept_in is not None and all(table.stands() for table in self.kept_in):
            return False
        return any(map(is_not, hashes_of(self.blocks), self.hash_objects))

    def intact(self) -> BlockSet:
        """Return the blocks that were not reallocated."""
        if not self.given_away():
            return self
        return self.keep(list(map(is_, hashes_of(self.blocks), self.hash_objects)))

    def keep(self, wanted: list[bool]) -> BlockSet:
        """Return the blocks for which `wanted` is true."""
        if all(wanted):
            return self
        return self.part([index for index, is_wanted in enumerate(wanted) if is_wanted])

    def part(self, indices: Sequence[int]) -> BlockSet:
        """Return the blocks at these indices."""
        hashes = [self.hashes[index] for index in indices]
        more_keys = self.more_keys and {h: self.more_keys[h] for h in hashes if h in self.more_keys}
        return BlockSet(
            self.group_idx,
            [self.blocks[index] for index in indices],
            [self.hash_objects[index] for index in indices],
            hashes,
            more_keys,
            self.kept_in,
        )

    def add(
        self, blocks: list[KVCacheBlock], hash_objects: list[bytes], hashes: list[bytes]
    ) -> None:
        """Add blocks, with one hash object and hash each."""
        self.blocks += blocks
        self.hash_objects += hash_objects
        self.hashes += hashes

    def append(self, block: KVCacheBlock, hash_object: bytes, block_hash: bytes) -> None:
        """Add a block."""
        self.blocks.append(block)
        self.hash_objects.append(hash_object)
        self.hashes.append(block_hash)


class GpuBlocks:
    """A view of vLLM's KV cache manager: owners and hashes of blocks. It has no state of its own.

    Bound: an entry for each KV cache group.
    """

    def __init__(self, kv_cache_manager: Any) -> None:
        self._coordinator = kv_cache_manager.coordinator
        self._managers = kv_cache_manager.coordinator.single_type_managers
        self._pool = kv_cache_manager.block_pool
        # All other managers remove blocks from live tables: a window slides, a state moves. (vLLM
        # 0.32.0, v1/core/single_type_kv_cache_manager.py, remove_skipped_blocks)
        self._keeps_blocks = [type(m) is FullAttentionManager for m in self._managers]

    @property
    def null_block_id(self) -> int:
        """The id of vLLM's null block."""
        return int(self._pool.null_block.block_id)

    def keeps_blocks(self, group_idx: int) -> bool:
        """Return whether the blocks of a table of the group leave it only all at once."""
        return self._keeps_blocks[group_idx]

    def num_tokens_kept(self, group_ids: Iterable[int]) -> int | None:
        """Return the minimum of tokens until full blocks leave their table; None if they stay."""
        kept = None
        for group_idx in group_ids:
            if not self.keeps_blocks(group_idx):
                is_window = self.is_window(group_idx)
                num_tokens = self._managers[group_idx].sliding_window - 1 if is_window else 0
                kept = num_tokens if kept is None else min(kept, num_tokens)
        return kept

    def is_window(self, group_idx: int) -> bool:
        """Return whether the group has plain sliding windows."""
        return type(self._managers[group_idx]) is SlidingWindowManager

    def tables_of(self, group_idx: int) -> tuple[Mapping[str, Any], Mapping[str, int]]:
        """Return a group's block tables and their numbers of hashed blocks, by request id.

        A table is one growing list for as long as the request holds blocks. A hashed block is full,
        its tokens are known, and its bytes are complete after the step that is being scheduled.
        """
        manager = self._managers[group_idx]
        return manager.req_to_blocks, manager.num_cached_block

    @property
    def num_blocks(self) -> int:
        """Blocks that can be allocated: all but the null block."""
        return int(self._pool.num_gpu_blocks) - 1

    @property
    def num_groups(self) -> int:
        """KV cache groups."""
        return len(self._managers)

    def forget_hashes(self, block_ids: set[int] | None = None) -> None:
        """Remove these blocks, or all, from vLLM's prefix cache; requests keep their blocks.

        As vLLM does if another connector could not load them (0.31 to 0.33,
        BlockPool.evict_blocks).
        """
        if block_ids is None:
            if not len(self._pool.cached_block_hash_to_block):
                return
            blocks = self._pool.blocks
            block_ids = {b.block_id for b in blocks if block_hash_of(b) is not None}
            block_ids.update(getattr(self._pool, "cached_block_hashes_by_block", ()))
        self._pool.evict_blocks(block_ids)

    def reuse_first(self, blocks: Iterable[KVCacheBlock]) -> None:
        """Let vLLM allocate these free blocks first (0.31 to 0.33, BlockPool.free_blocks)."""
        queue = self._pool.free_block_queue
        moved = list(blocks)
        for block in moved:
            queue.remove(block)
        queue.prepend_n(moved)

    def unhashed_ahead(self, count: int) -> list[KVCacheBlock]:
        """Return up to `count` blocks from the head of the free queue, before any hashed one."""
        queue = self._pool.free_block_queue
        end, block = queue.fake_free_list_tail, queue.fake_free_list_head.next_free_block
        blocks: list[KVCacheBlock] = []
        while len(blocks) < count and block is not end and block_hash_of(block) is None:
            blocks.append(block)
            block = block.next_free_block
        return blocks

    def all_tables_of(self, request_id: str) -> list[Sequence[KVCacheBlock]]:
        """Return the non-empty block tables of a request."""
        tables = (manager.req_to_blocks.get(request_id) for manager in self._managers)
        return list(filter(None, tables))

    def forget_blocks_of(
        self, tables: Iterable[Sequence[KVCacheBlock]], hashes: Collection[bytes]
    ) -> None:
        """Remove blocks from vLLM's cache whose key ends with one of these hashes."""
        length = len(next(iter(hashes), b""))
        self.forget_hashes(
            {
                block.block_id
                for block in itertools.chain.from_iterable(tables)
                if (h := block_hash_of(block)) and get_block_hash(h)[-length:] in hashes
            }
        )

    def is_positional(self, group_idx: int) -> bool:
        """Return whether block `i` of a table holds the i-th tokens (not for Mamba "align")."""
        return bool(getattr(self._managers[group_idx], "has_positionally_stable_blocks", True))

    def block_tokens(self, group_idx: int) -> int:
        """Return the number of tokens per block of a group."""
        return int(self._managers[group_idx].block_size)

    def num_cached_tokens(self, request: Any) -> int:
        """Return the length of a request's hit in vLLM's prefix cache, without side effects."""
        found = self._coordinator.find_longest_cache_hit(
            request.block_hashes, request.num_tokens - 1
        )
        return int(found[1])

    def holds_blocks(self, request_id: str) -> bool:
        """Return whether vLLM still holds any block for this request id."""
        return any(manager.req_to_blocks.get(request_id) for manager in self._managers)

    def block_ids_of(self, request_id: str) -> set[int]:
        """Return the ids of a request's blocks in all groups."""
        tables = (manager.req_to_blocks.get(request_id, ()) for manager in self._managers)
        return {block.block_id for table in tables for block in table}

    def block(self, block_id: int) -> KVCacheBlock:
        """Return the block with this id."""
        block: KVCacheBlock = self._pool.blocks[block_id]
        return block

    def free_blocks(self, count: int, after: KVCacheBlock | None = None) -> list[KVCacheBlock]:
        """Return up to `count` blocks of the free queue, from its head or after a block."""
        queue = self._pool.free_block_queue
        end = queue.fake_free_list_tail
        block = (after or queue.fake_free_list_head).next_free_block
        blocks: list[KVCacheBlock] = []
        for _ in range(count):
            if block is end:
                break
            blocks.append(block)
            block = block.next_free_block
        return blocks

    def watch_allocations(self, watch: Callable[[list[KVCacheBlock]], None]) -> None:
        """Call `watch` with the blocks of each allocation, before vLLM resets their hashes.

        `watch` must not raise. Source: vLLM 0.31 to 0.33, BlockPool.get_new_blocks.
        """
        queue = self._pool.free_block_queue
        take = queue.popleft_n

        def popleft_n(count: int) -> list[KVCacheBlock]:
            blocks: list[KVCacheBlock] = take(count)
            watch(blocks)
            return blocks

        queue.popleft_n = popleft_n

    def cached_hashes(self) -> set[bytes]:
        """Return all hashes in vLLM's prefix cache, in time linear in the number of blocks."""
        hash_objects = hashes_of(self._pool.blocks)
        return {
            get_block_hash(hash_object) for hash_object in hash_objects if hash_object is not None
        }

    def more_hashes(self, block_id: int) -> list[bytes]:
        """Return the further hashes, with groups, under which vLLM finds a block."""
        table = getattr(self._pool, "cached_block_hashes_by_block", None)
        return sorted(table.get(block_id, ())) if table else []

    @property
    def has_more_hashes(self) -> bool:
        """Whether any block has further hashes."""
        return bool(getattr(self._pool, "cached_block_hashes_by_block", None))


def missing_blocks(
    blocks: Sequence[KVCacheBlock],
    hash_objects: Sequence[bytes | None],
    gpu: GpuBlocks,
    tables: Sequence[Mapping[bytes, int]],
) -> list[BlockSet]:
    """Return the hashed blocks that the host neither has nor is storing, by group.

    Of duplicates, which two requests may have computed, it is the first.

    Args:
        hash_objects: the hash object of each block; None if vLLM has not hashed it.
        tables: by group, the hashes of the host's blocks.
    """
    by_end = {_end_of(group_idx): table for group_idx, table in enumerate(tables)}
    first: dict[bytes, KVCacheBlock] = {}
    end = -len(_end_of(0))
    for block, h in zip(blocks, hash_objects, strict=True):  # without a call for each
        if h is not None and h[:end] not in by_end[h[end:]]:
            first.setdefault(h, block)
    missing = []
    for group_idx, group_end in enumerate(by_end):
        if found := [h for h in first if h[end:] == group_end]:
            hashes: list[bytes] = [h[:end] for h in found]
            missing.append(BlockSet(group_idx, [first[h] for h in found], found, hashes))
    if gpu.has_more_hashes:
        for block_set in missing:
            owned = block_set.intact()  # a reallocated block has the hashes of its new owner
            block_set.more_keys = find_more_keys(gpu, owned.blocks, owned.hashes)
    return missing


def _end_of(group_idx: int) -> bytes:
    return bytes(make_block_hash_with_group_id(BlockHash(b""), group_idx))


def find_more_keys(
    gpu: GpuBlocks, blocks: Sequence[KVCacheBlock], hashes: Sequence[bytes]
) -> dict[bytes, list[Key]]:
    """Return the further keys of blocks, by their own hash."""
    more = ((h, gpu.more_hashes(b.block_id)) for h, b in zip(hashes, blocks, strict=True))
    return {h: [Key(get_group_id(k), get_block_hash(k)) for k in keys] for h, keys in more if keys}
