"""Groups and block sizes of a model's KV cache."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from vllm.v1.core.kv_cache_utils import BlockHashListWithBlockSize
from vllm.v1.kv_cache_interface import ChunkedLocalAttentionSpec

from safe_offload.compat import cache_hits, specs

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request


class GroupGeometry:
    """Sizes of blocks and groups; immutable.

    Bound: an entry for each KV cache group.

    Args:
        coordinator: vLLM's, over any pool.

    Attributes:
        hash_block_size: tokens of one hash of `Request.block_hashes`.
        alignment_tokens: hits start at a multiple of this.
        group_ids: KV cache groups that are stored.
        group_block_sizes: tokens of a block, by group.
        is_plain: the only group is full attention.
        retention_interval: see `cache_hits.retention_interval`.
    """

    def __init__(
        self, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, coordinator: Any
    ) -> None:
        block_size, self.hash_block_size = specs.resolve_block_sizes(kv_cache_config, vllm_config)
        chunk_sizes = [
            group.kv_cache_spec.attention_chunk_size
            for group in kv_cache_config.kv_cache_groups
            if isinstance(group.kv_cache_spec, ChunkedLocalAttentionSpec)
        ]
        # A chunked-local group counts its chunks from the first token, so a search after the GPU's
        # hit must start at a chunk boundary.
        self.alignment_tokens = math.lcm(block_size, *chunk_sizes)
        self.group_ids = specs.cacheable_group_ids(kv_cache_config)
        self._kept = [
            (m.get_num_skipped_tokens, m.block_size, cache_hits.peak_blocks(m, block_size))
            for m in coordinator.single_type_managers
        ]
        self.group_block_sizes: tuple[int, ...] = tuple(coordinator.group_block_sizes)
        self.is_plain = cache_hits.has_plain_hits(coordinator, self.hash_block_size)
        self.has_states = bool(specs.state_group_ids(kv_cache_config))
        self.ends_inside_blocks = cache_hits.ends_inside_blocks(coordinator)
        self.retention_interval = cache_hits.retention_interval(coordinator)

    def hashes_of(self, request: Request, group_idx: int) -> Sequence[bytes]:
        """Return the hashes of a request's blocks, of the block size of a group."""
        block_size = self.group_block_sizes[group_idx]
        hashes: Sequence[bytes] = request.block_hashes
        if block_size != self.hash_block_size:
            hashes = BlockHashListWithBlockSize(hashes, self.hash_block_size, block_size)
        return hashes

    def num_blocks_spanned(self, num_tokens: int) -> int:
        """Return the number of blocks that `num_tokens` tokens span, over all groups."""
        return sum([-(-num_tokens // size) for size in self.group_block_sizes])

    def num_blocks_at_once(self, num_tokens: int) -> int:
        """Return how many of these a request holds at most while it computes them."""
        return sum([min(-(-num_tokens // size), peak) for _, size, peak in self._kept])

    def num_blocks_held(self, num_tokens: int) -> int:
        """Return how many of these a request still needs after computing them (windows slide)."""
        num_held = 0
        for num_skipped, size, peak in self._kept:
            num_held += min(-(-num_tokens // size) - num_skipped(num_tokens) // size, peak)
        return num_held

    def num_blocks_in_step(self, num_tokens: int) -> int:
        """Return the maximum number of blocks for `num_tokens` tokens of a step, all groups."""
        return sum(-(-num_tokens // size) + 1 for size in self.group_block_sizes)
