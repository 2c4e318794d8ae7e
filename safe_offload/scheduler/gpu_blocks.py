"""What the scheduler side sees of vLLM's GPU blocks: whose they are, which are hashed, which free.

Nothing here changes a block or its reference count. It reads inner parts of vLLM's KV cache manager
and block pool (vLLM 0.31 to 0.33, v1/core/block_pool.py and single_type_kv_cache_manager.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from vllm.v1.core.kv_cache_utils import KVCacheBlock, get_block_hash, get_group_id
from vllm.v1.core.single_type_kv_cache_manager import (
    FullAttentionManager,
    SlidingWindowManager,
)

__all__ = [
    "GpuBlocks",
    "Home",
    "Place",
    "block_hash_of",
    "get_block_hash",
    "get_group_id",
    "hashes_of",
]

# The slot behind the property: thousands are read in one step, and a property is a Python call.
_HASH_FIELD = "_block_hash" if hasattr(KVCacheBlock, "_block_hash") else "block_hash"
block_hash_of: Callable[[KVCacheBlock], bytes | None] = attrgetter(_HASH_FIELD)
"""A block's own hash in vLLM's prefix cache; None if it has none. The null block never has one."""


if _HASH_FIELD == "_block_hash":

    def hashes_of(blocks: Iterable[KVCacheBlock]) -> list[bytes | None]:
        """The own hash of each block; half the time of `block_hash_of` for one after the other."""
        return [block._block_hash for block in blocks]
else:

    def hashes_of(blocks: Iterable[KVCacheBlock]) -> list[bytes | None]:
        """The own hash of each block."""
        return [block.block_hash for block in blocks]


@dataclass(slots=True)
class Home:
    """A block table that keeps each of its blocks for as long as it exists.

    Attributes:
        tables: vLLM's tables of one KV cache group, by request id.
        request_id: whose table it is.
        table: the list itself.
    """

    tables: Mapping[str, Any]
    request_id: str
    table: Any

    def stands(self) -> bool:
        """Whether the request still has this very table, and with it each of its blocks."""
        return self.tables.get(self.request_id) is self.table


@dataclass(slots=True)
class Place:
    """A block in the queue of free blocks, with its neighbour, to see that it is still there."""

    block: KVCacheBlock
    before: Any
    block_hash: bytes | None

    @classmethod
    def of(cls, block: KVCacheBlock) -> Place:
        """Where a free block is now."""
        return cls(block, block.prev_free_block, block_hash_of(block))

    def stands(self) -> bool:
        """Whether neither the block nor the one before it has left its place."""
        block = self.block
        return (
            block.ref_cnt == 0
            and block.prev_free_block is self.before
            and block_hash_of(block) is self.block_hash
        )


class GpuBlocks:
    """Read-only view of vLLM's KV cache manager: whose blocks are whose, and what is hashed.

    Bound by `bind_kv_cache_manager` (vLLM 0.32 on). Nothing here changes a block or its reference
    count.
    """

    def __init__(self, kv_cache_manager: Any) -> None:
        self._managers = kv_cache_manager.coordinator.single_type_managers
        self._pool = kv_cache_manager.block_pool
        # Every other manager takes blocks out of a table that lives on: a window slides, a state
        # moves. (vLLM 0.32.0, v1/core/single_type_kv_cache_manager.py, remove_skipped_blocks)
        self._keeps_blocks = [type(m) is FullAttentionManager for m in self._managers]

    @property
    def null_block_id(self) -> int:
        """The id of the block that stands for no block."""
        return int(self._pool.null_block.block_id)

    def has_homes(self, group_idx: int) -> bool:
        """Whether no block of the group leaves a table before all do."""
        return self._keeps_blocks[group_idx]

    def num_tokens_kept(self, group_ids: Iterable[int]) -> int | None:
        """How many more tokens a request computes at least before a full block leaves its table.

        Returns:
            The least of these groups; None if blocks stay for as long as the request runs.
        """
        kept = None
        for group_idx in group_ids:
            if not self.has_homes(group_idx):
                is_window = self.is_window(group_idx)
                num_tokens = self._managers[group_idx].sliding_window - 1 if is_window else 0
                kept = num_tokens if kept is None else min(kept, num_tokens)
        return kept

    def is_window(self, group_idx: int) -> bool:
        """Whether the group is of sliding windows, and nothing else is special about it."""
        return type(self._managers[group_idx]) is SlidingWindowManager

    def tables_of(self, group_idx: int) -> tuple[Mapping[str, Any], Mapping[str, int]]:
        """A group's block tables by request id, and how many of their blocks vLLM has hashed.

        A table is one growing list for as long as the request holds blocks. Behind the second
        number every block is full, its tokens are known, and its bytes are there once the step that
        is being scheduled has run.
        """
        manager = self._managers[group_idx]
        return manager.req_to_blocks, manager.num_cached_block

    @property
    def num_blocks(self) -> int:
        """Blocks that can be allocated: all but the null block."""
        return int(self._pool.num_gpu_blocks) - 1

    def is_positional(self, group_idx: int) -> bool:
        """Whether block `i` of the table holds the i-th block of tokens (not so for Mamba "align").

        Source: SingleTypeKVCacheManager.has_positionally_stable_blocks.
        """
        return bool(getattr(self._managers[group_idx], "has_positionally_stable_blocks", True))

    def holds_blocks(self, request_id: str) -> bool:
        """Whether vLLM still keeps any block for this request id."""
        return any(manager.req_to_blocks.get(request_id) for manager in self._managers)

    def block(self, block_id: int) -> KVCacheBlock:
        """The block object of an id."""
        block: KVCacheBlock = self._pool.blocks[block_id]
        return block

    def free_blocks(self, count: int, behind: KVCacheBlock | None = None) -> list[KVCacheBlock]:
        """The first blocks of the free queue, the next to be allocated first.

        Args:
            count: so many, or as many as there are.
            behind: not from the head on, but from behind this block, which is in the queue.
        """
        queue = self._pool.free_block_queue
        end = queue.fake_free_list_tail
        block = (behind or queue.fake_free_list_head).next_free_block
        blocks: list[KVCacheBlock] = []
        while block is not end and len(blocks) < count:
            blocks.append(block)
            block = block.next_free_block
        return blocks

    @property
    def num_free_blocks(self) -> int:
        """Blocks that can be allocated now."""
        return int(self._pool.get_num_free_blocks())

    def more_hashes(self, block_id: int) -> list[bytes]:
        """Hashes under which vLLM's prefix cache knows a block beside its own, with their group."""
        table = getattr(self._pool, "cached_block_hashes_by_block", None)
        return sorted(table.get(block_id, ())) if table else []

    @property
    def has_more_hashes(self) -> bool:
        """Whether any block has."""
        return bool(getattr(self._pool, "cached_block_hashes_by_block", None))
