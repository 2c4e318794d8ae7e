"""How far a prefix hits: vLLM's cache coordinator for a cache of another size, and its groups."""

from __future__ import annotations

import inspect
import math
import sys
from typing import TYPE_CHECKING, Any

from vllm.v1.core import kv_cache_coordinator
from vllm.v1.core.kv_cache_coordinator import get_kv_cache_coordinator
from vllm.v1.core.kv_cache_utils import BlockHashListWithBlockSize
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    MambaSpec,
    SlidingWindowSpec,
)

from safe_offload.compat import specs

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request


def make_coordinator(
    vllm_config: VllmConfig,
    kv_cache_config: KVCacheConfig,
    scheduler_block_size: int,
    hash_block_size: int,
) -> Any:
    """Return vLLM's cache coordinator for a cache of another size.

    Its hits may end inside a block, as vLLM's own do. Source: vLLM 0.31 to 0.33,
    HybridKVCacheCoordinator.enable_partial_hash_hits.
    """
    eagle = "use_eagle_block_drop", "use_eagle"
    wanted = {
        "kv_cache_config": kv_cache_config,
        "max_model_len": vllm_config.model_config.max_model_len,
        "max_in_flight_tokens": getattr(vllm_config, "max_in_flight_tokens", 0),
        "use_eagle": _answer_of(vllm_config.speculative_config, *eagle),
        "enable_caching": True,
        "enable_kv_cache_events": False,
        "dcp_world_size": vllm_config.parallel_config.decode_context_parallel_size,
        "pcp_world_size": 1,
        "scheduler_block_size": scheduler_block_size,
        "hash_block_size": hash_block_size,
        "num_prefill_lookahead": getattr(vllm_config, "num_prefill_lookahead_tokens", 0),
    }
    accepted = inspect.signature(get_kv_cache_coordinator).parameters
    return get_kv_cache_coordinator(**{k: v for k, v in wanted.items() if k in accepted})


def uses_drafter(vllm_config: VllmConfig) -> bool:
    """Return whether drafts come from the model's states: EAGLE, MTP and the like."""
    return _answer_of(vllm_config.speculative_config, "use_eagle")


def _answer_of(speculative_config: Any, *names: str) -> bool:
    """Return the result of the first of these methods that exists; False without one."""
    for name in names:
        method = getattr(speculative_config, name, None)
        if method is not None:
            return bool(method())
    return False


def replace_rules(coordinator: Any, rules: Mapping[type, type]) -> None:
    """Replace vLLM's managers of several groups by classes with the same arguments."""
    groups: list[Any] = getattr(coordinator, "attention_groups", [])
    for idx, group in enumerate(groups):
        theirs: Any = getattr(group, "manager_cls", None)
        if (ours := rules.get(theirs)) and _parameters(ours) == _parameters(theirs):
            groups[idx] = group._replace(manager_cls=ours)


def _parameters(manager_class: Any) -> list[str]:
    return list(inspect.signature(manager_class.find_longest_cache_hit).parameters)


def full_attention_group(coordinator: Any, hash_block_size: int) -> int | None:
    """Return a group whose leading blocks bound every hit, one hash each; None without one."""
    for group_idx, manager in enumerate(coordinator.single_type_managers):
        if (
            type(manager) is FullAttentionManager
            and manager.block_size == hash_block_size
            and not coordinator.eagle_group_ids
        ):
            return group_idx
    return None


def has_plain_hits(coordinator: Any, hash_block_size: int) -> bool:
    """Return whether a hit is as many leading blocks as the cache has."""
    return not coordinator.eagle_group_ids and ends_anywhere(coordinator, hash_block_size)


def ends_anywhere(coordinator: Any, hash_block_size: int) -> bool:
    """Return whether hits are plain, but that EAGLE drafts drop the last block.

    Source: vLLM 0.32.0, FullAttentionManager.find_longest_cache_hit, with none of its exceptions.
    """
    groups, managers = coordinator.kv_cache_config.kv_cache_groups, coordinator.single_type_managers
    return (
        len(groups) == 1
        and type(managers[0]) is FullAttentionManager
        and managers[0].block_size == hash_block_size
        and isinstance(groups[0].kv_cache_spec, FullAttentionSpec)
        and getattr(managers[0], "dcp_world_size", 1) == 1
    )


def ends_inside_blocks(coordinator: Any) -> bool:
    """Return whether hits may end inside a block."""
    return bool(getattr(coordinator, "enable_partial_hash_hits", False))


def retention_interval(coordinator: Any) -> int | None:
    """Return the distance in tokens at which vLLM keeps sliding windows and Mamba states.

    Windows and states at the end of a prompt are kept as well; 0 means only those. None means that
    all are kept, or that there are none.
    """
    kinds = (SlidingWindowSpec, MambaSpec)
    managers = coordinator.single_type_managers
    if not any(isinstance(manager.kv_cache_spec, kinds) for manager in managers):
        return None
    return getattr(coordinator, "retention_interval", None)


def peak_blocks(manager: Any, block_size: int) -> int:
    """Return the maximum number of blocks of its group that a request has, however long it is.

    A state moves on, a ring is written over, a window slides. A window in blocks of `block_size`,
    the largest size, is not limited here: few groups have those, and then nothing runs short.
    Source: vLLM 0.32.0, SingleTypeKVCacheManager.max_admission_blocks_per_request, MambaManager,
    which copies a shared state to a block of its own, and CircularBufferManager.
    """
    spec = manager.kv_cache_spec
    if not getattr(spec, "uses_slot_mapping", True):
        return 1
    if isinstance(spec, MambaSpec) and spec.mamba_cache_mode == "align":
        num_checkpoints = getattr(spec, "num_prefill_checkpoint_blocks", 0)
        return 3 + int(spec.num_speculative_blocks + num_checkpoints)
    cap = getattr(manager, "max_admission_blocks_per_request", None)
    return sys.maxsize if cap is None or manager.block_size == block_size else int(cap)


def boundary_blocks(coordinator: Any) -> list[int]:
    """Return the blocks of each group that a hit needs at its end; 0 for all before it.

    Source: vLLM 0.32 and 0.33, SlidingWindowManager._contiguous_blocks_for_hit.
    """
    needs = []
    for manager in coordinator.single_type_managers:
        spec = manager.kv_cache_spec
        if isinstance(spec, SlidingWindowSpec):
            num_blocks = -(-(spec.sliding_window - 1) // manager.block_size)
            needs.append(num_blocks + bool(getattr(manager, "use_eagle", False)))
        else:
            needs.append(int(isinstance(spec, MambaSpec)))
    return needs


def kept_alone(
    coordinator: Any, group_idx: int, places: range, num_prompt_tokens: int, boundary: int
) -> list[bool]:
    """Return which blocks of a table vLLM hashes if nobody moves the boundary of the request.

    Args:
        coordinator: of a group in which hits need only the blocks at their end.
        boundary: vLLM's own for the request; 0 for none.

    Source: vLLM 0.32 and 0.33, cache_blocks of KVCacheCoordinator and SingleTypeKVCacheManager.
    """
    manager = coordinator.single_type_managers[group_idx]
    block_size = coordinator.scheduler_block_size
    dropping = getattr(coordinator, "drop_eagle_group_ids", coordinator.eagle_group_ids)
    find = kv_cache_coordinator.replay_boundaries
    ends = [*find(num_prompt_tokens, block_size, bool(dropping)), boundary]
    if manager.use_eagle:  # vLLM 0.33: a hit may end one block before
        ends.append(max(0, boundary - manager.block_size))
    mask = manager.reachable_block_mask(
        start_block=places.start,
        end_block=places.stop,
        alignment_tokens=manager.cache_hit_alignment_tokens,
        kv_cache_spec=manager.kv_cache_spec,
        use_eagle=manager.use_eagle,
        retention_interval=coordinator.retention_interval,
        reachable_boundaries=[end for end in ends if end],
        dcp_world_size=manager.dcp_world_size,
    )
    return [True] * len(places) if mask is None else list(mask)


def reads_ends(coordinator: Any) -> list[bool]:
    """Return for each group whether a hit needs only the blocks at its end, or one state."""
    managers = coordinator.single_type_managers
    return [not isinstance(m.kv_cache_spec, FullAttentionSpec) for m in managers]


def uncached_tokens(found: tuple[Any, ...]) -> int:
    """Return the tokens of full attention behind a hit, where prompts diverged (not in 0.31)."""
    return int(found[2]) if len(found) > 2 else 0


def kept_boundary(request: Any) -> int:
    """Return the boundary at which vLLM keeps a request's windows and states; 0 for none.

    vLLM finds it in the lookup before each call of `get_num_new_matched_tokens`. Source: vLLM 0.32
    and 0.33, Request.shared_prefix_boundary, KVCacheManager.get_computed_blocks.
    """
    return int(getattr(request, "shared_prefix_boundary", 0))


def keep_boundary(request: Any, num_tokens: int) -> bool:
    """Move the boundary of a request; return whether vLLM has one."""
    if not hasattr(request, "shared_prefix_boundary"):
        return False
    request.shared_prefix_boundary = num_tokens
    return True


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
        retention_interval: see `retention_interval`.
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
            (m.get_num_skipped_tokens, m.block_size, peak_blocks(m, block_size))
            for m in coordinator.single_type_managers
        ]
        self.group_block_sizes: tuple[int, ...] = tuple(coordinator.group_block_sizes)
        self.is_plain = has_plain_hits(coordinator, self.hash_block_size)
        self.has_states = bool(specs.state_group_ids(kv_cache_config))
        self.ends_inside_blocks = ends_inside_blocks(coordinator)
        self.retention_interval = retention_interval(coordinator)

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
