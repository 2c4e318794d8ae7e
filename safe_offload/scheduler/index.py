"""What the host holds: prefix hits, publishing, forgetting.

The prefix-hit rules of hybrid models (full attention, sliding window, chunked local, Mamba states,
MLA, the block that EAGLE drops) belong to vLLM. This class runs vLLM's own cache coordinator over a
`KVCacheConfig` of the host's size, so that a change of those rules touches one file here.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from vllm.v1.kv_cache_interface import ChunkedLocalAttentionSpec

from safe_offload import compat
from safe_offload.scheduler.slots import SlotPool

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_utils import KVCacheBlock
    from vllm.v1.kv_cache_interface import KVCacheConfig


@dataclass(frozen=True, slots=True)
class Hit:
    """A leading run of tokens, behind those that the GPU has, that the host can deliver.

    Attributes:
        slots_by_group: for each KV cache group, one slot for each block of the run; vLLM's null
            block where the group does not need one (a window that has slid past, say).
        num_tokens: length of the run.
        num_computed_tokens: tokens ahead of the run that are on the GPU already.
    """

    slots_by_group: tuple[Sequence[KVCacheBlock], ...]
    num_tokens: int
    num_computed_tokens: int

    def slots(self) -> list[KVCacheBlock]:
        """All real slots of the hit, each group in prefix order."""
        return [slot for group in self.slots_by_group for slot in group if not slot.is_null]


class HostIndex:
    """Maps block hashes to host slots.

    Args:
        coordinator: vLLM's `KVCacheCoordinator` over the host-sized configuration.
        hash_block_size: tokens of one hash of `Request.block_hashes`.
        alignment_tokens: hits start at a multiple of this.
        group_ids: KV cache groups that are stored.
    """

    def __init__(
        self,
        coordinator: Any,
        *,
        hash_block_size: int,
        alignment_tokens: int,
        group_ids: Sequence[int],
    ) -> None:
        self._coordinator = coordinator
        self._pool = coordinator.block_pool
        self._hash_block_size = hash_block_size
        self.alignment_tokens = alignment_tokens
        self.group_ids = tuple(group_ids)
        self.group_block_sizes: tuple[int, ...] = tuple(coordinator.group_block_sizes)
        self.slots = SlotPool(self._pool)
        self.epoch = 0

    @classmethod
    def for_engine(
        cls, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, num_slots: int
    ) -> HostIndex:
        """Build the index for an engine.

        Args:
            vllm_config: the engine's configuration.
            kv_cache_config: the scheduler's view of the GPU KV cache.
            num_slots: host slots, each as large as one GPU block.
        """
        host_config = replace(kv_cache_config, num_blocks=num_slots + 1)
        block_sizes = compat.resolve_block_sizes(kv_cache_config, vllm_config)
        chunk_sizes = [
            group.kv_cache_spec.attention_chunk_size
            for group in kv_cache_config.kv_cache_groups
            if isinstance(group.kv_cache_spec, ChunkedLocalAttentionSpec)
        ]
        return cls(
            compat.make_coordinator(vllm_config, host_config, *block_sizes),
            hash_block_size=block_sizes[1],
            # A chunked-local group counts its chunks from the first token, so a search that starts
            # behind the GPU's hit is right only at a chunk boundary.
            alignment_tokens=math.lcm(block_sizes[0], *chunk_sizes),
            group_ids=compat.cacheable_group_ids(kv_cache_config),
        )

    def find_hit(
        self, block_hashes: Sequence[bytes], num_computed_tokens: int, num_tokens_max: int
    ) -> Hit | None:
        """The longest run of tokens from `num_computed_tokens` on that the host holds.

        Args:
            block_hashes: the request's, one for each `hash_block_size` tokens.
            num_computed_tokens: tokens that the GPU has.
            num_tokens_max: the run ends at this token at the latest.

        Returns:
            None if there is none, or if it cannot start at `num_computed_tokens`.
        """
        if num_computed_tokens % self.alignment_tokens:
            return None
        remaining = block_hashes[num_computed_tokens // self._hash_block_size :]
        num_tokens_max -= num_computed_tokens
        if not remaining or num_tokens_max <= 0:
            return None
        slots_by_group, num_tokens = self._coordinator.find_longest_cache_hit(
            remaining, num_tokens_max
        )[:2]
        if not 0 < num_tokens <= num_tokens_max:
            return None
        return Hit(slots_by_group, num_tokens, num_computed_tokens)

    def num_blocks(self, num_tokens: int) -> tuple[int, int]:
        """GPU blocks of a request behind its first `num_tokens` tokens, over all groups.

        Returns:
            Those that it needs from there on (a window has slid past the others), and all that its
            block tables span.
        """
        needed = spanned = 0
        for manager in self._coordinator.single_type_managers:
            num_skipped = int(manager.get_num_skipped_tokens(num_tokens))
            in_all = -(-num_tokens // manager.block_size)
            spanned += in_all
            needed += in_all - num_skipped // manager.block_size
        return needed, spanned

    def find(self, key: bytes) -> KVCacheBlock | None:
        """The slot that holds a block hash (with its group id), if any."""
        slot: KVCacheBlock | None = self._pool.cached_block_hash_to_block.get_one_block(key)
        return slot

    def publish(self, slot: KVCacheBlock, keys: Iterable[bytes], num_tokens: int | None) -> None:
        """Let a slot be found under these block hashes, the block's own hash first."""
        for key in keys:
            self._pool._insert_block_hash(key, slot, num_tokens=num_tokens)
            num_tokens = None

    def forget(self, slots: Iterable[KVCacheBlock]) -> None:
        """Never find these slots again; leases on them stay as they are."""
        self._pool.evict_blocks({slot.block_id for slot in slots})

    def forget_all(self) -> None:
        """Forget every slot and begin a new epoch; leases stay as they are."""
        self.epoch += 1
        self.forget(slot for slot in self._pool.blocks if slot.block_hash is not None)
