"""What the scheduler side logs at the start: the set-up, and probable mistakes."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from safe_offload import __version__
from safe_offload.compat import specs, versions
from safe_offload.config import other_connectors
from safe_offload.config.options import CAPACITY_KEYS, VALID_KEYS, OffloadConfig
from safe_offload.config.transfer_config import DEFAULT_KV_ROLE
from safe_offload.config.units import format_bytes

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

logger = logging.getLogger(f"vllm.{__name__}")


def advise(
    vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, config: OffloadConfig, num_slots: int
) -> dict[str, str]:
    """Log the set-up and probable mistakes; return labels of `observe.metrics.INFO`, if known."""
    try:
        transfer_config = vllm_config.kv_transfer_config
        pool = _Pool(vllm_config, kv_cache_config, num_slots)
        versions.warn_if_untested()
        _advise_on_failures(transfer_config)
        _advise_on_settings_without_effect(transfer_config, config)
        _advise_on_pool(pool, config)
        return _introduce(pool, config, transfer_config.kv_load_failure_policy)
    except Exception:
        logger.debug("The set-up could not be described", exc_info=True)
        return {}


class _Pool:
    """The host pool beside the GPU's own, and a request of `max_model_len` in all groups."""

    def __init__(self, vllm_config: VllmConfig, cache: KVCacheConfig, num_slots: int) -> None:
        self.num_slots = num_slots
        self.num_gpu = int(cache.num_blocks) - 1  # vLLM keeps its null block
        self.num_request = specs.num_blocks_of_longest_request(vllm_config, cache)
        self.block_bytes = specs.block_bytes(cache)
        self.num_groups = len(cache.kv_cache_groups)
        self.max_model_len: int = vllm_config.model_config.max_model_len

    def blocks(self, count: int) -> str:
        return f"{count} blocks ({format_bytes(count * self.block_bytes)})"


def _introduce(pool: _Pool, config: OffloadConfig, policy: str) -> dict[str, str]:
    """Log the set-up in one line, and return it by the labels of `INFO`.

    A slot holds one block of one KV cache group, so its tokens follow from vLLM's longest request.
    """
    num_requests = pool.num_slots / pool.num_request
    copy_bytes = pool.num_slots * pool.block_bytes
    num_sharing = config.ranks_per_copy
    info = {
        "version": __version__,
        "stores": "lazy" if config.lazy_offload else "eager",
        "eviction_policy": config.eviction_policy,
        "load_failure_policy": str(policy),
        "copy_path": config.copy_path,
        "self_test": "on" if config.self_test else "off",
        "ranks": str(config.world_size),
        "slots_per_rank": str(pool.num_slots),
        "host_bytes_per_rank": str(copy_bytes // num_sharing),
        "tokens": str(int(num_requests * pool.max_model_len)),
        "longest_requests": f"{num_requests:.1f}",
        "gpu_pools": f"{pool.num_slots / max(1, pool.num_gpu):.1f}",
        "groups": str(pool.num_groups),
    }
    fate = "end their request with an error" if policy == "fail" else "are recomputed"
    sharing = f", one copy for {num_sharing} ranks" if num_sharing > 1 else ""
    logger.info(
        "safe_offload %(version)s: %(stores)s stores, %(eviction_policy)s eviction, failed loads "
        f"{fate}. Per rank (%(ranks)s): up to %(slots_per_rank)s slots in "
        f"{format_bytes(copy_bytes)} of host memory{sharing}: about %(tokens)s tokens, or "
        f"%(longest_requests)s requests of max_model_len ({pool.max_model_len} tokens), "
        "%(gpu_pools)s times the GPU's own pool. KV cache groups: %(groups)s. copy_path "
        "%(copy_path)s, self-test %(self_test)s.",
        info,
    )
    return info


def _advise_on_failures(transfer_config: Any) -> None:
    if transfer_config.kv_load_failure_policy == "fail":
        logger.warning(
            'kv_load_failure_policy is "fail": failed loads end their request with an error. '
            'Fix: to recompute their tokens instead, write "kv_load_failure_policy": "recompute" '
            'beside "kv_connector" in --kv-transfer-config; under MultiConnector, beside its name, '
            "where it applies to all connectors."
        )


def _advise_on_settings_without_effect(transfer_config: Any, config: OffloadConfig) -> None:
    extra: Mapping[str, object] = transfer_config.kv_connector_extra_config or {}
    reasons = other_connectors.without_effect(extra, VALID_KEYS)
    if transfer_config.kv_role != DEFAULT_KV_ROLE:
        reasons["kv_role"] = "this connector always stores and loads"
    for key in CAPACITY_KEYS:
        if key in extra and key != config.capacity_key:
            reasons[key] = f'"{config.capacity_key}" takes precedence'
    if reasons:
        logger.warning(
            "These settings have no effect; remove them: %s.",
            "; ".join(f'"{key}" ({reason})' for key, reason in reasons.items()),
        )
    variables = sorted(name for name in os.environ if name.startswith(other_connectors.LMCACHE))
    if variables:
        logger.warning(
            "LMCache variables have no effect here: %s. Fix: set the equivalents in "
            'kv_connector_extra_config, such as "cpu_bytes_to_use_per_rank": "20GB" for '
            "LMCACHE_MAX_LOCAL_CPU_SIZE=20, and remove them.",
            ", ".join(variables),
        )


def _advise_on_pool(pool: _Pool, config: OffloadConfig) -> None:
    """Warn of a pool that is small for a request, or, if eager, for the GPU's own pool."""
    larger = []
    if pool.num_slots < pool.num_request:
        larger.append(
            f"a request of max_model_len ({pool.max_model_len} tokens) needs "
            f"{pool.blocks(pool.num_request)} and does not fit"
        )
    if pool.num_slots < pool.num_gpu and not config.lazy_offload:
        larger.append(
            f"the GPU's own pool has {pool.blocks(pool.num_gpu)}, so the host mostly duplicates it"
        )
    if larger:
        num_wanted = max(pool.num_request, 0 if config.lazy_offload else pool.num_gpu)
        logger.warning(
            'The host pool is small: "%s" gives each rank %s; %s. Set at least %s.',
            config.capacity_key,
            pool.blocks(pool.num_slots),
            "; ".join(larger),
            config.value_for(num_wanted, pool.block_bytes),
        )
