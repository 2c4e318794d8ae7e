"""vLLM's KV events for blocks in this host's memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_events import BlockRemoved, BlockStored
from vllm.v1.kv_cache_interface import get_kv_cache_spec_kind, get_kv_cache_spec_sliding_window

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

EVENT_MEDIUM, EVENT_LOCALITY = "CPU", "LOCAL"
"""Of a KV event: in what the blocks are, and whether that is on the publisher's own machine."""


@dataclass(frozen=True, slots=True)
class EventGroup:
    """What KV events say of a KV cache group; sizes in tokens, `kind` of attention as vLLM's."""

    index: int
    block_size: int
    kind: str
    sliding_window: int | None


def publishes_kv_events(vllm_config: VllmConfig) -> bool:
    """Return whether vLLM is to publish KV events."""
    config = vllm_config.kv_events_config
    return config is not None and bool(config.enable_kv_cache_events)


def event_endpoint(vllm_config: VllmConfig) -> str | None:
    """Return where vLLM publishes KV events, its own of the GPU's cache too."""
    config = vllm_config.kv_events_config
    is_published = publishes_kv_events(vllm_config) and config.publisher != "null"
    return str(config.endpoint) if is_published else None


def event_groups(
    kv_cache_config: KVCacheConfig, block_sizes: Sequence[int]
) -> tuple[EventGroup, ...]:
    """Return what KV events say of each KV cache group; `block_sizes` in tokens."""
    specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
    return tuple(
        EventGroup(
            index,
            block_size,
            get_kv_cache_spec_kind(spec).value,
            get_kv_cache_spec_sliding_window(spec),
        )
        for index, (spec, block_size) in enumerate(zip(specs, block_sizes, strict=True))
    )


def block_stored(group: EventGroup, **fields: Any) -> BlockStored:
    """Return vLLM's event for blocks that can be hit in this host's memory from now on.

    Source: vLLM 0.31 to 0.33, SimpleCPUOffloadScheduler._process_store_completion.
    """
    return BlockStored(
        medium=EVENT_MEDIUM,
        group_idx=group.index,
        kv_cache_spec_kind=group.kind,
        kv_cache_spec_sliding_window=group.sliding_window,
        locality=EVENT_LOCALITY,
        **fields,
    )


def block_removed(group: EventGroup, block_hashes: list[bytes | int]) -> BlockRemoved:
    """Return vLLM's event for blocks that can no longer be hit in this host's memory."""
    return BlockRemoved(
        block_hashes=block_hashes,
        medium=EVENT_MEDIUM,
        group_idx=group.index,
        locality=EVENT_LOCALITY,
    )
