"""What the host holds: prefix hits, publishing, forgetting.

The prefix-hit rules of hybrid models (full attention, sliding window, chunked local, Mamba states,
MLA, the block that EAGLE drops) belong to vLLM. This class runs vLLM's own cache coordinator over
the host's slots, so that a change of those rules touches one file here. One rule is so simple and
so common that it is here too, without a call for each block: that of full attention, alone or as
one kind of a hybrid model's.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from vllm.v1.core.kv_cache_utils import BlockHashListWithBlockSize
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager
from vllm.v1.kv_cache_interface import ChunkedLocalAttentionSpec

from safe_offload import compat
from safe_offload.scheduler.slots import NO_SLOT, SlotPool, needed

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request


@dataclass(frozen=True, slots=True)
class Hit:
    """A leading run of tokens, behind those that the GPU has, that the host can deliver.

    Attributes:
        slots_by_group: for each KV cache group, one slot for each block of the run; `NO_SLOT`
            where the group does not need one (a window that has slid past, say).
        num_tokens: length of the run.
        num_computed_tokens: tokens ahead of the run that are on the GPU already.
        num_tokens_max: it could not have been longer than this: the request ends there.
        as_of: `SlotPool.version` and `SlotPool.num_forgets` when it was found.
    """

    slots_by_group: tuple[list[int], ...]
    num_tokens: int
    num_computed_tokens: int
    num_tokens_max: int
    as_of: tuple[int, int]

    def slots(self) -> list[int]:
        """All real slots of the hit, each group in prefix order."""
        slots: list[int] = []
        for group in self.slots_by_group:
            slots += needed(group, group, NO_SLOT)
        return slots


class _SlotsAsBlocks:
    """The part of vLLM's `BlockPool` that its hit rules use, over host slots.

    Args:
        slots: what there is to find.
        hash_block_size: tokens of one hash of `Request.block_hashes`.
    """

    null_block = NO_SLOT

    def __init__(self, slots: SlotPool, hash_block_size: int) -> None:
        self.hash_block_size = hash_block_size
        self._find = slots.find
        self._find_run = slots.find_run

    def get_cached_block(self, block_hash: bytes, group_ids: Iterable[int]) -> list[int] | None:
        """The slot of a block for each group; None if one of them has none."""
        found = []
        for group_idx in group_ids:
            slot = self._find(group_idx, block_hash)
            if slot is None:
                return None
            found.append(slot)
        return found

    def find_runs(
        self, block_hashes: Sequence[bytes], group_ids: Iterable[int]
    ) -> tuple[list[int], ...]:
        """For each group, the slots of the first blocks, as many as all of the groups have."""
        runs = tuple(self._find_run(group_idx, block_hashes) for group_idx in group_ids)
        num_blocks = min(map(len, runs))
        for run in runs:
            del run[num_blocks:]
        return runs


class _FullAttentionInRuns(FullAttentionManager):
    """vLLM's rule of full attention for `_SlotsAsBlocks`, without a call for each block.

    Source: vLLM 0.32.0, FullAttentionManager.find_longest_cache_hit, which is asked wherever more
    than the number of leading blocks matters.
    """

    @classmethod
    def find_longest_cache_hit(  # noqa: PLR0913 (they are vLLM's)
        cls,
        block_hashes: Sequence[bytes],
        max_length: int,
        kv_cache_group_ids: list[int],
        block_pool: Any,
        kv_cache_spec: Any,
        drop_eagle_block: bool,
        alignment_tokens: int,
        dcp_world_size: int = 1,
        pcp_world_size: int = 1,
    ) -> Any:
        """The slots of each group, and the number of tokens that all of them cover."""
        size = kv_cache_spec.block_size
        is_aligned = size == block_pool.hash_block_size and alignment_tokens % size == 0
        if not is_aligned or drop_eagle_block or dcp_world_size > 1 or pcp_world_size > 1:
            return super().find_longest_cache_hit(
                block_hashes,
                max_length,
                kv_cache_group_ids,
                block_pool,
                kv_cache_spec,
                drop_eagle_block,
                alignment_tokens,
                dcp_world_size,
                pcp_world_size,
            )
        runs = block_pool.find_runs(block_hashes[: max_length // size], kv_cache_group_ids)
        num_tokens = len(runs[0]) * size
        num_tokens -= num_tokens % alignment_tokens
        for run in runs:
            del run[num_tokens // size :]
        return runs, num_tokens


class HostIndex:
    """Maps block hashes to host slots.

    Args:
        coordinator: vLLM's `KVCacheCoordinator` over the host-sized configuration.
        slots: all of them empty.
        hash_block_size: tokens of one hash of `Request.block_hashes`.
        alignment_tokens: hits start at a multiple of this.
        group_ids: KV cache groups that are stored.
    """

    def __init__(
        self,
        coordinator: Any,
        slots: SlotPool,
        *,
        hash_block_size: int,
        alignment_tokens: int,
        group_ids: Sequence[int],
    ) -> None:
        self._coordinator = coordinator
        self.is_plain = compat.has_plain_hits(coordinator, hash_block_size)
        """Whether there is nothing but one group of full attention."""
        self._full_group = compat.full_attention_group(coordinator, hash_block_size)
        compat.replace_full_attention(coordinator, _FullAttentionInRuns)
        coordinator.block_pool = _SlotsAsBlocks(slots, hash_block_size)
        for manager in coordinator.single_type_managers:
            manager.block_pool = coordinator.block_pool
            manager._null_block = NO_SLOT
        self.hash_block_size = hash_block_size
        self.alignment_tokens = alignment_tokens
        self.group_ids = tuple(group_ids)
        self.group_block_sizes: tuple[int, ...] = tuple(coordinator.group_block_sizes)
        self.slots = slots
        self.epoch = 0
        self.has_states = bool(compat.state_group_ids(coordinator.kv_cache_config))
        """Whether there are Mamba states."""
        self.ends_inside_blocks = compat.ends_inside_blocks(coordinator)
        """Whether hits may end inside a block."""
        self.retention_interval = compat.retention_interval(coordinator)
        """See `compat.retention_interval`."""

    @classmethod
    def for_engine(
        cls,
        vllm_config: VllmConfig,
        kv_cache_config: KVCacheConfig,
        num_slots: int,
        eviction_policy: str,
    ) -> HostIndex:
        """Build the index for an engine.

        Args:
            vllm_config: the engine's configuration.
            kv_cache_config: the scheduler's view of the GPU KV cache.
            num_slots: host slots, each as large as one GPU block.
            eviction_policy: see `eviction.POLICIES`.
        """
        # The coordinator makes a pool of its own, which has no use: one block is the least.
        rules_config = replace(kv_cache_config, num_blocks=1)
        block_sizes = compat.resolve_block_sizes(kv_cache_config, vllm_config)
        chunk_sizes = [
            group.kv_cache_spec.attention_chunk_size
            for group in kv_cache_config.kv_cache_groups
            if isinstance(group.kv_cache_spec, ChunkedLocalAttentionSpec)
        ]
        return cls(
            compat.make_coordinator(vllm_config, rules_config, *block_sizes),
            SlotPool(num_slots, len(kv_cache_config.kv_cache_groups), eviction_policy),
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
        remaining = block_hashes[num_computed_tokens // self.hash_block_size :]
        num_tokens_max -= num_computed_tokens
        if not remaining or num_tokens_max <= 0:
            return None
        if self.is_plain:
            return self._find_plain_hit(remaining, num_computed_tokens, num_tokens_max)
        slots_by_group, num_tokens = self._coordinator.find_longest_cache_hit(
            remaining, num_tokens_max
        )[:2]
        if not 0 < num_tokens <= num_tokens_max:
            return None
        return Hit(slots_by_group, num_tokens, num_computed_tokens, num_tokens_max, self._now)

    @property
    def _now(self) -> tuple[int, int]:
        return self.slots.version, self.slots.num_forgets

    def is_still_longest(
        self,
        hit: Hit,
        block_hashes: Sequence[bytes],
        num_computed_tokens: int,
        num_tokens_max: int,
    ) -> bool:
        """Whether `find_hit` would find a leased hit again, so that nobody need search.

        A request that waits at the head of the queue is asked about in every step.
        """
        return hit.num_computed_tokens == num_computed_tokens and self._ends_there(
            hit, block_hashes, num_tokens_max
        )

    def grown(
        self,
        hit: Hit,
        block_hashes: Sequence[bytes],
        num_computed_tokens: int,
        num_tokens_max: int,
    ) -> tuple[Hit, list[int]] | None:
        """A leased hit that begins earlier, because the GPU has lost blocks ahead of it since.

        That is what happens to a preempted request while it waits at the head of the queue.

        Returns:
            What `find_hit` would find, and which of its slots are new, which are its first; None if
            that takes a search.
        """
        num_more = hit.num_computed_tokens - num_computed_tokens
        if num_more <= 0 or num_computed_tokens % self.alignment_tokens:
            return None
        if not self._ends_there(hit, block_hashes, num_tokens_max):
            return None
        new: list[int] = []
        slots_by_group: list[list[int]] = []
        for group_idx, slots in enumerate(hit.slots_by_group):
            if group_idx == self._full_group:
                first = num_computed_tokens // self.hash_block_size
                end = hit.num_computed_tokens // self.hash_block_size
                new = self.slots.find_run(group_idx, block_hashes[first:end])
                if len(new) < end - first:
                    return None
                slots_by_group.append([*new, *slots])
            elif slots and slots[0] == NO_SLOT:
                slots_by_group.append(
                    [NO_SLOT] * (num_more // self.group_block_sizes[group_idx]) + [*slots]
                )
            else:
                return None
        num_tokens = hit.num_tokens + num_more
        num_tokens_max -= num_computed_tokens
        hit = Hit(tuple(slots_by_group), num_tokens, num_computed_tokens, num_tokens_max, self._now)
        return hit, new

    def _ends_there(self, hit: Hit, block_hashes: Sequence[bytes], num_tokens_max: int) -> bool:
        """Whether a leased hit still cannot be found to end any later, or earlier."""
        if hit.num_computed_tokens + hit.num_tokens_max != num_tokens_max:
            return False  # it has grown: one that was preempted may get a token while it waits
        if hit.as_of[1] != self.slots.num_forgets:
            return False  # a slot of a hit can be forgotten although it is leased
        if hit.as_of[0] == self.slots.version:
            return True
        group_idx, block_size = self._full_group, self.hash_block_size
        end = hit.num_computed_tokens + hit.num_tokens
        if group_idx is None or end % block_size:
            return False
        if end + block_size > num_tokens_max or end // block_size >= len(block_hashes):
            return True
        return self.slots.find(group_idx, block_hashes[end // block_size]) is None

    def _find_plain_hit(
        self, block_hashes: Sequence[bytes], num_computed_tokens: int, num_tokens_max: int
    ) -> Hit | None:
        """The rule of full attention: as many leading blocks as there are."""
        slots = self.slots.find_run(0, block_hashes[: num_tokens_max // self.hash_block_size])
        if not slots:
            return None
        num_tokens = len(slots) * self.hash_block_size
        return Hit((slots,), num_tokens, num_computed_tokens, num_tokens_max, self._now)

    def hashes_of(self, request: Request, group_idx: int) -> Sequence[bytes]:
        """The hash of each block of a request, as large as the blocks of a group are."""
        block_size = self.group_block_sizes[group_idx]
        hashes: Sequence[bytes] = request.block_hashes
        if block_size != self.hash_block_size:
            hashes = BlockHashListWithBlockSize(hashes, self.hash_block_size, block_size)
        return hashes

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

    def num_blocks_in_step(self, num_tokens: int) -> int:
        """The most GPU blocks that so many tokens of one step may need, over all groups."""
        return sum(-(-num_tokens // size) + 1 for size in self.group_block_sizes)

    def forget_all(self) -> None:
        """Forget every slot and begin a new epoch; leases stay as they are."""
        self.epoch += 1
        self.slots.forget_all()
