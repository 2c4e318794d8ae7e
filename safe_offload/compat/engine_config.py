"""Facts of an engine's configuration: ranks, steps, hashes, layers, unsupported combinations."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from vllm import envs
from vllm.v1.core import kv_cache_utils

from safe_offload.compat import specs
from safe_offload.config.tiers import SHARED_HASH
from safe_offload.errors import ConfigError

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

logger = logging.getLogger(f"vllm.{__name__}")

_HASH_SEED = "PYTHONHASHSEED"


def refuse_unsupported(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> None:
    """Raise a ConfigError for a combination that cannot work."""
    parallel = vllm_config.parallel_config
    if parallel.distributed_executor_backend == "external_launcher" and parallel.world_size > 1:
        raise ConfigError(
            f'distributed_executor_backend is "external_launcher" with {parallel.world_size} '
            "ranks: each rank has its own scheduler, which would wait forever for the host memory "
            'of the others. Fix: let vLLM start the ranks (distributed_executor_backend "mp" or '
            '"ray"), or remove kv_transfer_config.'
        )
    attention = getattr(vllm_config, "attention_config", None)
    groups = kv_cache_config.kv_cache_groups
    if getattr(attention, "hisparse_config", None) is not None or any(
        getattr(group, "host_resident", False) for group in groups
    ):
        # Its managers count blocks of a pool of their own (vLLM 0.32.0, HiSparseSourceManager).
        raise ConfigError(
            "HiSparse keeps its own KV cache on the host and cannot be combined with "
            "SafeCPUOffloadConnector. Fix: use HiSparseConnector alone, or remove it and "
            "hisparse_config."
        )


def refuse_lost_experts(vllm_config: VllmConfig, *, has_others_blocks: bool) -> None:
    """Raise a ConfigError where a hit would need routed experts that vLLM has dropped.

    vLLM keeps routed experts for a limited number of blocks, by default as many as the GPU has. Up
    to 0.32, a hit beyond them, or of another engine's blocks, ends the engine with a
    BlockObjectStoreError; 0.33 has `cap_external_hit`.
    """
    from vllm.distributed.aux_output_connector.connector import AuxOutputSchedulerConnector

    aux = vllm_config.aux_output_config
    if hasattr(AuxOutputSchedulerConnector, "cap_external_hit") or not aux.enabled:
        return
    fix = "set --aux-output-config.max_bytes high enough for the host's blocks"
    if has_others_blocks:
        fix = 'remove "tiers" and "share"'
    elif aux.max_bytes is not None:
        return
    raise ConfigError(
        "--enable-return-routed-experts: this vLLM keeps routed experts only for as many blocks "
        "as the GPU has, and a hit beyond them ends the engine with a BlockObjectStoreError. Fix: "
        f"use vLLM 0.33, or {fix}."
    )


def can_be_of_use(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, *, logs: bool) -> bool:
    """Return whether a hit is possible; with `logs`, which one process sets, log why not."""
    if not vllm_config.cache_config.enable_prefix_caching:
        if logs:
            logger.warning(
                "Prefix caching is off, so SafeCPUOffloadConnector does nothing. Fix: remove "
                "--no-enable-prefix-caching."
            )
        return False
    has_late_counts = (
        vllm_config.parallel_config.pipeline_parallel_size > 1
        and vllm_config.speculative_config is not None
    )
    if has_late_counts and specs.state_group_ids(kv_cache_config):
        # The state of a boundary is written once the number of accepted drafts is known. Earlier
        # stages learn it some steps later, after the store. Source: vLLM 0.32.0, v1/worker/gpu,
        # MambaHybridModelState.postprocess_state and PPHandler.
        if logs:
            logger.warning(
                "With pipeline parallelism and draft tokens, the Mamba states of earlier stages "
                "are not ready in time to be stored, so SafeCPUOffloadConnector does nothing. "
                "Fix: remove --speculative-config or --pipeline-parallel-size."
            )
        return False
    return True


def require_shared_hashes(vllm_config: VllmConfig, where: str = '"tiers"') -> None:
    """Raise a ConfigError if block hashes are not the same in all processes.

    Source: vLLM 0.32.0, vllm/utils/hashing.py and v1/core/kv_cache_utils.py, init_none_hash.
    """
    algorithm = vllm_config.cache_config.prefix_caching_hash_algo
    shared = f"write --prefix-caching-hash-algo {SHARED_HASH}"
    if not algorithm.endswith("_cbor"):
        what, fix = "hashes pickles, which can differ between processes for equal tokens", shared
    elif not _has_hash_seed(algorithm):
        what = "uses a seed that differs between processes"
        fix = f"set {_HASH_SEED} to the same number for all engines"
        fix += f", or {shared}" if algorithm != SHARED_HASH else ""
    else:
        return
    raise ConfigError(
        f'prefix_caching_hash_algo is "{algorithm}", which {what}: other engines, or this one '
        f"after a restart, would not find blocks in {where}. Fix: {fix}."
    )


def refuse_sharing(vllm_config: VllmConfig) -> None:
    """Raise a ConfigError if this engine cannot share its host cache with others."""
    parallel = vllm_config.parallel_config
    problems = {
        "pipeline parallelism": (
            parallel.pipeline_parallel_size > 1,
            "the ranks of two stages keep different layers, and all ranks use one pool",
        ),
        "ranks on several machines": (
            getattr(parallel, "nnodes", 1) > 1,
            "a pool is memory of one machine",
        ),
    }
    for problem, (is_there, why) in problems.items():
        if is_there:
            raise ConfigError(
                f'"share": "node" and {problem} are not supported together: {why}. '
                "Fix: remove one of the two."
            )


def _has_hash_seed(algorithm: str) -> bool:
    """Return whether the hashes of all processes start from the same seed.

    Source: vLLM 0.32.0, v1/core/kv_cache_utils.py, resolve_none_hash_seed; 0.31 has no default.
    """
    has_default = hasattr(kv_cache_utils, "DEFAULT_NONE_HASH_SEED")
    is_default = has_default and algorithm.startswith("sha256")
    return is_default or _HASH_SEED in os.environ


def uses_v2_model_runner(vllm_config: VllmConfig) -> bool:
    """Return whether workers run vLLM's Model Runner V2; True, the safe default, if unknown."""
    return bool(getattr(vllm_config, "use_v2_model_runner", True))


def num_decode_tokens_max(vllm_config: VllmConfig) -> int:
    """Return the maximum number of tokens per step of a request that decodes."""
    speculative = vllm_config.speculative_config
    return 1 + (int(speculative.num_speculative_tokens or 0) if speculative is not None else 0)


def num_steps_in_flight(vllm_config: VllmConfig) -> int:
    """Return the steps in flight of a busy engine (vLLM 0.32.0, `max_concurrent_batches`)."""
    num_stages: int = vllm_config.parallel_config.pipeline_parallel_size
    if not getattr(vllm_config.scheduler_config, "async_scheduling", False):
        return num_stages
    return num_stages + 1 if num_stages == 1 or uses_v2_model_runner(vllm_config) else num_stages


def ranks_per_copy(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> int:
    """Return the number of consecutive ranks on one machine that hold the same KV cache.

    Only the executor "mp" determines which ranks share a machine (vLLM 0.32.0,
    v1/executor/multiproc_executor.py).
    """
    parallel = vllm_config.parallel_config
    num_same = specs.num_replicas(kv_cache_config)
    if (
        num_same == 1
        or parallel.distributed_executor_backend != "mp"
        or getattr(parallel, "prefill_context_parallel_size", 1) > 1
    ):
        return 1
    return math.gcd(num_same, int(parallel.local_world_size))


def are_workers_here(parallel: Any) -> bool:
    """Return whether the engine's workers run on this machine; Ray's may run elsewhere."""
    is_here = parallel.distributed_executor_backend in ("mp", "uni")
    return is_here and int(parallel.data_parallel_size_local) > 0


def is_worker_beside_scheduler(parallel: Any) -> bool:
    """Return whether the only worker runs on the scheduler's thread (executor "uni")."""
    return bool(parallel.distributed_executor_backend == "uni")


def num_ranks_on_host(parallel: Any) -> int:
    """Return the number of workers on this machine, of all data-parallel engines."""
    num_ranks = getattr(parallel, "local_world_size", parallel.world_size)
    return int(num_ranks) * max(1, int(parallel.data_parallel_size_local))


def variable_names() -> tuple[str, ...]:
    """Return the environment variables that vLLM knows."""
    return tuple(envs.environment_variables)


def cache_root() -> str:
    """Return vLLM's cache folder."""
    return str(envs.VLLM_CACHE_ROOT)


def layer_facts(vllm_config: VllmConfig, layer_names: Iterable[str]) -> dict[str, str]:
    """Return by layer the format of its keys and values; requires a loaded model.

    Some CPUs have layouts of their own (vLLM 0.32.0, v1/attention/backends/cpu_attn.py, `isa`).
    """
    layers = getattr(vllm_config.compilation_config, "static_forward_context", {})
    facts = {}
    for name in layer_names:
        layer = layers.get(name)
        backend = getattr(layer, "attn_backend", None)
        words = [type(layer).__name__, "" if backend is None else f"{backend.get_name()}"]
        for field in ("kv_cache_dtype", "_k_scale_float", "_v_scale_float", "isa"):
            words.append(f"{getattr(layer, field, '')}")
        facts[name] = " ".join(words)
    return facts
