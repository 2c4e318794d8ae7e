"""The KV cache as vLLM lays it out: groups, blocks, and the byte ranges of each block."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from vllm.v1.core import kv_cache_utils
from vllm.v1.core.kv_cache_utils import (
    get_max_concurrency_for_kv_cache_config,
    resolve_kv_cache_block_sizes,
)
from vllm.v1.kv_cache_interface import MambaSpec

from safe_offload.layout import Segment

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig


HASH_BYTES_MAX = 32
"""SHA-256, the longest of vLLM's hashes."""


def plan_kv_cache(vllm_config: VllmConfig, layers: dict[str, Any], num_bytes: int) -> KVCacheConfig:
    """Return vLLM's layout of a KV cache of `num_bytes` for these layer specs, on one rank.

    Source: vLLM 0.33.0, v1/engine/core.py, _initialize_kv_caches.
    """
    if hasattr(kv_cache_utils, "get_kv_cache_configs"):  # up to 0.32
        (config,) = kv_cache_utils.get_kv_cache_configs(vllm_config, [layers], [num_bytes])
        return config
    from vllm.v1.core import kv_cache_planning as planning

    groups = planning.get_global_kv_cache_groups(vllm_config, [layers])
    (config,) = planning.get_kv_cache_configs(vllm_config, [layers], [num_bytes], groups)
    return config


def cacheable_group_ids(kv_cache_config: KVCacheConfig) -> tuple[int, ...]:
    """Return the KV cache groups that may be stored by their hashes."""
    ids = getattr(kv_cache_config, "prefix_cacheable_group_ids", None)
    return tuple(range(len(kv_cache_config.kv_cache_groups))) if ids is None else tuple(ids)


def state_group_ids(kv_cache_config: KVCacheConfig) -> tuple[int, ...]:
    """Return the KV cache groups whose blocks hold Mamba states."""
    groups = enumerate(kv_cache_config.kv_cache_groups)
    return tuple(i for i, group in groups if isinstance(group.kv_cache_spec, MambaSpec))


def resolve_block_sizes(kv_cache_config: KVCacheConfig, vllm_config: VllmConfig) -> tuple[int, int]:
    """Return vLLM's (scheduler block size, hash block size), in tokens."""
    scheduler_block_size, hash_block_size = resolve_kv_cache_block_sizes(
        kv_cache_config, vllm_config
    )
    return int(scheduler_block_size), int(hash_block_size)


def hash_bytes(kv_cache_config: KVCacheConfig, vllm_config: VllmConfig) -> int:
    """Return the maximum size of a block's key: larger blocks have several hashes."""
    scheduler_block_size, hash_block_size = resolve_block_sizes(kv_cache_config, vllm_config)
    return HASH_BYTES_MAX * -(-scheduler_block_size // hash_block_size)


def block_bytes(kv_cache_config: KVCacheConfig) -> int:
    """Return the bytes of a block, all layers: one allocation (vLLM 0.32.0, KVCacheTensor)."""
    tensors = kv_cache_config.kv_cache_tensors
    size_bytes: int = max((t.size for t in tensors), default=0)
    return size_bytes // max(int(kv_cache_config.num_blocks), 1)


def num_replicas(kv_cache_config: KVCacheConfig) -> int:
    """Return the number of consecutive ranks that hold the same KV cache in all layers.

    It is 1 if vLLM does not provide it, and for a model with only some replicated layers. Source:
    vLLM 0.32.0, v1/core/kv_cache_utils.py, kv_cache_groups_tp_replicas.
    """
    return int(getattr(kv_cache_config, "kv_tp_replicas", 1))


def num_blocks_of_longest_request(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> int:
    """Return the number of GPU blocks that a request of `max_model_len` holds, in all groups."""
    num_requests = get_max_concurrency_for_kv_cache_config(vllm_config, kv_cache_config)
    return round(int(kv_cache_config.num_blocks) / float(num_requests))


def segments(kv_cache_config: KVCacheConfig) -> list[Segment]:
    """Return the byte ranges of a block, repeated where cache groups share them."""
    return [segment for _, segment in layer_segments(kv_cache_config)]


def layer_segments(kv_cache_config: KVCacheConfig) -> Iterator[tuple[str, Segment]]:
    """Yield each layer with the byte ranges that it has in a block.

    Layer `l` of a `KVCacheTensor` has block `b` at `offset + l * layer_stride + b * block_stride`.
    If layers are outermost, a layer has regions of `num_blocks * block_stride` bytes, several if
    the KV heads are split. If blocks are outermost, a page is `layer_stride` bytes, or one part of
    that size for each head if heads lie outside layers (BHLNC). Source: vLLM 0.32.0,
    v1/kv_cache_interface.py, KVCacheTensor.
    """
    for tensor in kv_cache_config.kv_cache_tensors:
        region_bytes = kv_cache_config.num_blocks * tensor.block_stride
        for layer_idx, layer in enumerate(tensor.layers):
            offset = tensor.offset + layer_idx * tensor.layer_stride
            if tensor.layer_stride < region_bytes:
                part_stride = len(tensor.layers) * tensor.layer_stride
                num_parts = _page_bytes(kv_cache_config, layer) // tensor.layer_stride
                for start in range(offset, offset + max(num_parts, 1) * part_stride, part_stride):
                    yield layer, Segment(tensor.block_stride, start, tensor.layer_stride)
                continue
            for start in range(offset, offset + tensor.layer_stride, region_bytes):
                yield layer, Segment(tensor.block_stride, start, tensor.block_stride)


def _page_bytes(kv_cache_config: KVCacheConfig, layer: str) -> int:
    """Return the bytes of one layer's page of a block; 0 if no group names the layer."""
    for group in kv_cache_config.kv_cache_groups:
        if layer in group.layer_names:
            spec = group.kv_cache_spec
            # UniformTypeKVCacheSpecs has one spec for each of its layers.
            return int(getattr(spec, "kv_cache_specs", {}).get(layer, spec).page_size_bytes)
    return 0
