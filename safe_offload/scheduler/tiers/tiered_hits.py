"""Tiered hits: the longest hit after a fetch of all that tiers have, by vLLM's own hit rules."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from safe_offload.scheduler.loads.hits import NO_SLOT, FoundAsBlocks, HostHits, coordinator_over

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

    from safe_offload.scheduler.cache.directory import Directory

STAGE_ENDS = (8, 4, 2)
"""A stage ends at an eighth, a quarter, and half of the tokens."""
MORE_BLOCKS_MAX = 1.5
"""A hit is fetched in stages if these have at most this many times its blocks."""

Present = tuple[dict[bytes, int], ...]
"""By KV cache group and hash, the tier that has the block, counted from 1."""


class TierBlock(NamedTuple):
    """A block that only tiers have; `tier` is the nearest that has it, counted from 1."""

    first_token: int
    group_idx: int
    block_hash: bytes
    tier: int


class Stage(NamedTuple):
    """Blocks that extend the hit to the next boundary, after all earlier stages."""

    first_token: int  # the token that a request can reach without it
    blocks: list[TierBlock]


@dataclass(frozen=True, slots=True)
class TieredHit:
    """A run of tokens that host memory and tiers have, after those that the GPU has.

    Bound: an entry for each block of its request, of each KV cache group.
    """

    num_tokens: int
    blocks: list[TierBlock]  # that only tiers have, in the order of their tokens
    slots: list[int]  # of the other blocks, including those being filled


class _HostOrTiers:
    """See `Finder`: the slot that has a block or is being filled with it, or its hash."""

    def __init__(self, directory: Directory) -> None:
        self._tables = directory.tables
        self.present: Present = ()  # of the search that goes on

    def find(self, group_idx: int, block_hash: bytes) -> int | bytes | None:
        slot = self._tables[group_idx].get(block_hash)
        if slot is None and block_hash in self.present[group_idx]:
            return block_hash
        return slot

    def find_run(self, group_idx: int, hashes: Sequence[bytes]) -> list[int | bytes]:
        table, present = self._tables[group_idx], self.present[group_idx]
        run: list[int | bytes] = []
        for block_hash in hashes:
            slot = table.get(block_hash)
            if slot is not None:
                run.append(slot)
            elif block_hash in present:
                run.append(block_hash)
            else:
                break
        return run


class TieredHits:
    """Finds tiered hits; it has no state between searches."""

    def __init__(
        self, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, hits: HostHits
    ) -> None:
        self._hits = hits
        self._finder = _HostOrTiers(hits.directory)
        pool = FoundAsBlocks(self._finder, hits.geometry.hash_block_size)
        self._coordinator = coordinator_over(pool, vllm_config, kv_cache_config)

    def find(
        self,
        block_hashes: Sequence[bytes],
        num_computed_tokens: int,
        end_max: int,
        present: Present,
    ) -> TieredHit | None:
        """Find the longest run of tokens from `num_computed_tokens` on; see `HostHits.find_hit`."""
        hits = self._hits
        if num_computed_tokens % hits.geometry.alignment_tokens:
            return None
        remaining = block_hashes[num_computed_tokens // hits.geometry.hash_block_size :]
        num_tokens_max = end_max - num_computed_tokens
        if not remaining or num_tokens_max <= 0:
            return None
        self._finder.present = present
        by_group: tuple[list[Any], ...]
        if hits.geometry.is_plain:
            size = hits.geometry.hash_block_size
            run = self._finder.find_run(0, remaining[: num_tokens_max // size])
            by_group, num_tokens = (run,), len(run) * size
        else:
            found = self._coordinator.find_longest_cache_hit(remaining, num_tokens_max)
            by_group, num_tokens = found[:2]
        if not 0 < num_tokens <= num_tokens_max:
            return None
        in_tiers: list[TierBlock] = []
        slots: list[int] = []
        for group_idx, blocks in enumerate(by_group):
            size, tiers = hits.geometry.group_block_sizes[group_idx], present[group_idx]
            for index, block in enumerate(blocks):
                if isinstance(block, bytes):
                    first_token = num_computed_tokens + index * size
                    in_tiers.append(TierBlock(first_token, group_idx, block, tiers[block]))
                elif block != NO_SLOT:
                    slots.append(block)
        if len(by_group) > 1:
            in_tiers.sort()
        return TieredHit(num_tokens, in_tiers, slots)

    def stages(
        self,
        hit: TieredHit,
        block_hashes: Sequence[bytes],
        num_computed_tokens: int,
        first_token: int,
        present: Present,
    ) -> list[Stage]:
        """Split a hit into stages, so that the first ones are usable when the rest is late.

        A hit needs the window or the state at its end. So each stage includes those at its own end,
        which the whole hit may not need.

        Args:
            hit: found with the other arguments.
            first_token: the token that the request can reach without the hit.

        Returns:
            One stage, if several would have too many blocks.
        """
        end_token = num_computed_tokens + hit.num_tokens
        stages: list[Stage] = []
        seen: set[tuple[int, bytes]] = set()
        last_end = first_token
        for part in STAGE_ENDS:
            end_max = first_token + (end_token - first_token) // part
            nearer = self.find(block_hashes, num_computed_tokens, end_max, present)
            if nearer is not None and num_computed_tokens + nearer.num_tokens > last_end:
                stages.append(Stage(last_end, _unseen(nearer.blocks, seen)))
                last_end = num_computed_tokens + nearer.num_tokens
        stages.append(Stage(last_end, _unseen(hit.blocks, seen)))
        if len(seen) > MORE_BLOCKS_MAX * len(hit.blocks):
            return [Stage(first_token, hit.blocks)]
        return [stage for stage in stages if stage.blocks]


def _unseen(blocks: list[TierBlock], seen: set[tuple[int, bytes]]) -> list[TierBlock]:
    """Return the blocks that are not in `seen`, and add them."""
    new = [block for block in blocks if (block.group_idx, block.block_hash) not in seen]
    seen.update((block.group_idx, block.block_hash) for block in new)
    return new
