"""vLLM's KV events for blocks in host memory."""

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
"""Fields of a KV event: the kind of memory, and that it is on the publisher's machine."""


@dataclass(frozen=True, slots=True)
class EventGroup:
    """A KV cache group as KV events describe it: sizes in tokens, vLLM's kind of attention."""

    index: int
    block_size: int
    kind: str
    sliding_window: int | None


def publishes_kv_events(vllm_config: VllmConfig) -> bool:
    """Return whether vLLM is configured to publish KV events."""
    config = vllm_config.kv_events_config
    return config is not None and bool(config.enable_kv_cache_events)


def event_endpoint(vllm_config: VllmConfig) -> str | None:
    """Return the endpoint where vLLM publishes KV events; None if it publishes none."""
    config = vllm_config.kv_events_config
    is_published = publishes_kv_events(vllm_config) and config.publisher != "null"
    return str(config.endpoint) if is_published else None


def event_groups(
    kv_cache_config: KVCacheConfig, block_sizes: Sequence[int]
) -> tuple[EventGroup, ...]:
    """Return the description of each KV cache group; `block_sizes` in tokens."""
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
    """Return an event for new blocks, as SimpleCPUOffloadScheduler does (vLLM 0.31 to 0.33)."""
    return BlockStored(
        medium=EVENT_MEDIUM,
        group_idx=group.index,
        kv_cache_spec_kind=group.kind,
        kv_cache_spec_sliding_window=group.sliding_window,
        locality=EVENT_LOCALITY,
        **fields,
    )


def block_removed(group: EventGroup, block_hashes: list[bytes | int]) -> BlockRemoved:
    """Return vLLM's event for blocks that can no longer be hit in host memory."""
    return BlockRemoved(
        block_hashes=block_hashes,
        medium=EVENT_MEDIUM,
        group_idx=group.index,
        locality=EVENT_LOCALITY,
    )
