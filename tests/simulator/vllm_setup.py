"""vLLM's real objects, as small as they can be: configuration, scheduler, connectors."""

import copy
import functools
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

from tests.simulator import remote
from tests.simulator.groups import PAGE_BYTES, Group
from tests.simulator.models import ModelCache, Recipe, make_cache, small_cache

OURS = "SafeCPUOffloadConnector"
NONE = "none"
"""Not a connector: the engine runs without one."""


@dataclass(frozen=True)
class EngineShape:
    """What an engine is made of."""

    groups: tuple[str, ...] = ("full",)  # see `Group.parse`
    num_blocks: int = 40  # GPU blocks, vLLM's null block included
    num_slots: int = 60  # host slots of each rank that the scheduler side plans with
    num_missing_slots: int = 0  # how many fewer each further rank has
    ticks_per_slot: int = 0  # of the device, until one more host slot is ready; 0: all are at once
    tensor_ranks: int = 1  # ranks of each pipeline stage
    pipeline_ranks: int = 1  # stages; as many steps are in flight
    # The ranks of a stage hold the same words and keep one copy on the host.
    is_replicated: bool = False
    is_async: bool = False  # asynchronous scheduling: two steps in flight
    # The only rank runs in the scheduler's process, on its thread (vLLM's executor "uni").
    is_in_process: bool = False
    # VLLM's Model Runner V2, which writes new blocks ahead of the connector's hooks.
    is_v2: bool = False
    has_streams: bool = False  # a GPU; otherwise vLLM's CPU engine
    is_zeroed: bool = False  # groups of two precisions, for which vLLM zeroes new blocks
    # Of the blocks of windows vLLM hashes one run in this many tokens, with 0 those at the end of
    # a prompt only, with None all.
    retention_interval: int | None = None
    # Tokens; hits may end at a multiple of it inside a block, where there are Mamba states; 0 for
    # the tokens of the smallest block.
    prefix_match_unit: int = 0
    num_draft_tokens: int = 0  # of speculative decoding; 0 for none
    is_eagle: bool = False  # with EAGLE drafts: of each hit vLLM drops the last block
    is_priority: bool = False  # scheduling by priority
    max_batched_tokens: int = 24  # of a step
    max_chunk_tokens: int = 0  # of a prompt in one step, where others wait or run; 0: no bound
    max_seqs: int = 6  # running at once
    max_model_len: int = 2048  # tokens of the longest request
    extra: dict[str, Any] = field(default_factory=dict)  # `kv_connector_extra_config`
    connector: str = OURS  # another connector of vLLM's to compare with, or `NONE`
    # A stand-in for NIXL beside ours, under MultiConnector: asked "first" or "last"; "" for none.
    remote: str = ""
    remote_failures: float = 0.0  # how many of its transfers fail on a rank
    failure_policy: str = "recompute"  # what vLLM does with a request whose load failed
    has_events: bool = False  # KV events are on
    page_bytes: int = PAGE_BYTES  # of a block, as vLLM is told
    recipe: Recipe | None = None  # a model whose groups take the place of `groups`

    def holder_of(self, rank: int) -> int:
        """The first of the ranks that hold what this rank holds."""
        return rank - rank % self.tensor_ranks if self.is_replicated else rank

    def slots_of(self, rank: int) -> int:
        return self.num_slots - rank * self.num_missing_slots

    @property
    def num_ranks(self) -> int:
        return self.tensor_ranks * self.pipeline_ranks

    @functools.cached_property
    def parsed_groups(self) -> tuple[Group, ...]:
        if self.recipe is not None:
            return cache_of(self.recipe).groups(self.recipe.decode_ranks)
        return tuple(Group.parse(text) for text in self.groups)

    @property
    def block_words(self) -> int:
        """Words of a block: as many as the largest group has tokens."""
        return max(group.block_tokens for group in self.parsed_groups)

    @property
    def hash_tokens(self) -> int:
        """Tokens of one hash of a request."""
        if self.recipe is not None:
            return cache_of(self.recipe).hash_tokens
        return self.prefix_match_unit or min(group.block_tokens for group in self.parsed_groups)


@functools.cache
def _base_config(connector: str) -> Any:
    from vllm.engine.arg_utils import EngineArgs

    from examples.tiny_models import write_tiny_model
    from safe_offload.start.plugin import register

    register()
    with tempfile.TemporaryDirectory(prefix="safe-offload-sim-") as folder:
        args = EngineArgs(
            model=str(write_tiny_model("llama", Path(folder))),
            max_model_len=2048,
            enforce_eager=True,
            skip_tokenizer_init=True,
            kv_transfer_config={
                "kv_connector": OURS if connector == NONE else connector,
                "kv_role": "kv_both",
                "kv_load_failure_policy": "recompute",
                # Whatever shape it is copied for, the memory of this machine does not matter.
                "kv_connector_extra_config": {"num_cpu_blocks": 1},
            },
        )
        return args.create_engine_config()


@functools.cache
def cache_of(recipe: Recipe) -> ModelCache:
    """The KV cache of a model, as it is simulated.

    Raises:
        Exception: what vLLM raises where it refuses the model.
    """
    cache = real_cache(recipe)[0]
    return small_cache(recipe, cache) if recipe.is_small else cache


def real_cache(recipe: Recipe, num_bytes: int = 0) -> tuple[ModelCache, Any]:
    """The KV cache of a real model, and vLLM's configuration of it; see `make_cache`."""
    config = copy.deepcopy(_base_config(OURS))
    _serve(recipe, config, num_ranks=recipe.decode_ranks * recipe.prefill_ranks)
    return make_cache(recipe, config, num_bytes), config


def _serve(recipe: Recipe, config: Any, num_ranks: int) -> None:
    parallel = config.parallel_config
    parallel.decode_context_parallel_size = recipe.decode_ranks
    parallel.prefill_context_parallel_size = recipe.prefill_ranks
    parallel.tensor_parallel_size = num_ranks // recipe.prefill_ranks
    if recipe.drafts:
        config.speculative_config = _speculative_config(recipe.num_draft_tokens, config)
        config.speculative_config.method = recipe.drafts


def make_config(shape: EngineShape, rank: int = 0) -> Any:
    config = copy.deepcopy(_base_config(shape.connector))
    config.cache_config.block_size = min(g.block_tokens for g in shape.parsed_groups)
    config.cache_config.num_gpu_blocks = shape.num_blocks
    config.cache_config.prefix_match_unit = shape.prefix_match_unit or None
    config.model_config.max_model_len = shape.max_model_len
    for group in shape.parsed_groups:
        if group.kind == "mamba":  # whose blocks the scheduler ends chunks at
            config.cache_config.mamba_cache_mode = "align"
            config.cache_config.block_size = group.block_tokens
    scheduler = config.scheduler_config
    scheduler.max_num_batched_tokens = shape.max_batched_tokens
    scheduler.max_num_scheduled_tokens = None
    scheduler.long_prefill_token_threshold = shape.max_chunk_tokens
    scheduler.max_num_seqs = shape.max_seqs
    scheduler.async_scheduling = shape.is_async
    scheduler.policy = "priority" if shape.is_priority else "fcfs"
    parallel = config.parallel_config
    parallel.tensor_parallel_size = shape.tensor_ranks
    parallel.pipeline_parallel_size = shape.pipeline_ranks
    parallel.world_size = shape.num_ranks
    parallel.rank = rank
    parallel.distributed_executor_backend = "uni" if shape.is_in_process else "mp"
    config.kv_transfer_config.kv_connector_extra_config = {
        "num_cpu_blocks": shape.num_slots,
        # Steps and copies take what the seed says, so whether a hit pays is not to be asked.
        "min_load_tokens": 0,
        "load_in_step": False,
        **shape.extra,
    }
    if "tiers" in shape.extra or "share" in shape.extra:
        config.cache_config.prefix_caching_hash_algo = "sha256_cbor"
    config.kv_transfer_config.kv_load_failure_policy = shape.failure_policy
    if shape.has_events:
        config.kv_events_config = _events_config()
    if shape.connector == NONE:
        config.kv_transfer_config = None
    if shape.num_draft_tokens:
        config.speculative_config = _speculative_config(shape.num_draft_tokens, config)
    if shape.recipe is not None:
        cache = cache_of(shape.recipe)
        config.cache_config.block_size = cache.block_tokens
        if shape.recipe.match_units > 1:
            config.cache_config.prefix_match_unit = cache.hash_tokens
        _serve(shape.recipe, config, shape.tensor_ranks)
    return config


def _events_config() -> Any:
    from vllm.config import KVEventsConfig

    return KVEventsConfig(enable_kv_cache_events=True, publisher="null")


def _speculative_config(num_draft_tokens: int, config: Any) -> Any:
    from vllm.config import SpeculativeConfig

    return SpeculativeConfig(
        method="ngram",
        num_speculative_tokens=num_draft_tokens,
        prompt_lookup_max=2,
        target_model_config=config.model_config,
        # Of one rank: the heads of the tiny model cannot be divided by every number of ranks.
        target_parallel_config=_base_config(OURS).parallel_config,
    )


def make_kv_cache_config(shape: EngineShape) -> Any:
    """vLLM's description of the KV cache: all groups over one storage."""
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, KVCacheTensor

    page = shape.page_bytes
    if shape.recipe is not None and not shape.recipe.is_small:
        cache = cache_of(shape.recipe).kv_cache_config
        block = max(tensor.size for tensor in cache.kv_cache_tensors) // cache.num_blocks
        config = real_cache(shape.recipe, shape.num_blocks * block)[0].kv_cache_config
        config.prefix_cache_retention_interval = shape.retention_interval
        return config
    if shape.recipe is not None:
        groups = cache_of(shape.recipe).kv_cache_config.kv_cache_groups
    else:
        groups = [
            KVCacheGroupSpec(
                [f"layer.{index}"],
                group.spec(half_precision=shape.is_zeroed and index == 1, page_bytes=page),
                is_eagle_group=shape.is_eagle,
            )
            for index, group in enumerate(shape.parsed_groups)
        ]
        page = groups[0].kv_cache_spec.page_size_bytes
    size = page * shape.num_blocks
    config = KVCacheConfig(
        num_blocks=shape.num_blocks,
        kv_cache_tensors=[
            KVCacheTensor(size=size, layers=g.layer_names, layer_stride=size, block_stride=page)
            for g in groups
        ],
        kv_cache_groups=groups,
        prefix_cache_retention_interval=shape.retention_interval,
    )
    config.kv_tp_replicas = shape.tensor_ranks if shape.is_replicated else 1
    return config


def hits_overwritten_states(shape: EngineShape) -> bool:
    """Whether vLLM's own prefix cache finds Mamba states that decoding has written over.

    vLLM 0.31.0 caches the state at the end of a prompt, if that is inside a block, while the prompt
    is computed. With asynchronous scheduling it does so again when the next token is scheduled,
    in the block that the token writes over. 0.32 caches no state at a prompt's very end.
    """
    from safe_offload.compat.versions import installed_version

    has_states_inside_blocks = any(
        group.kind == "mamba" and group.block_tokens > shape.hash_tokens
        for group in shape.parsed_groups
    )
    return shape.is_async and has_states_inside_blocks and installed_version().startswith("0.31.")


def as_model_runner(shape: EngineShape) -> Any:
    """A context in which vLLM believes that its workers run Model Runner V2, or V1."""
    from vllm.config import VllmConfig

    _base_config(shape.connector)  # made as what it is
    is_v2 = property(lambda _: shape.is_v2)
    return mock.patch.object(VllmConfig, "use_v2_model_runner", is_v2)


def make_scheduler(shape: EngineShape) -> tuple[Any, Any]:
    """vLLM's real scheduler, and its function that hashes the blocks of a request.

    The connector is the one of `shape.connector`, made by vLLM's own factory.
    """
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core.kv_cache_utils import (
        get_request_block_hasher,
        init_none_hash,
        resolve_kv_cache_block_sizes,
    )
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.structured_output import StructuredOutputManager

    config = make_config(shape)
    if shape.remote:
        config.kv_transfer_config = remote.beside(config.kv_transfer_config, shape.remote)
    kv_cache_config = make_kv_cache_config(shape)
    block_size, hash_block_size = resolve_kv_cache_block_sizes(kv_cache_config, config)
    hash_fn = get_hash_fn_by_name(config.cache_config.prefix_caching_hash_algo)
    init_none_hash(hash_fn)
    scheduler_class = AsyncScheduler if shape.is_async else Scheduler
    scheduler = scheduler_class(
        vllm_config=config,
        kv_cache_config=kv_cache_config,
        structured_output_manager=StructuredOutputManager(config),
        block_size=block_size,
        hash_block_size=hash_block_size,
        log_stats=True,
    )
    scheduler.finish_requests = functools.partial(_finish_in_order, scheduler.finish_requests)
    return scheduler, get_request_block_hasher(hash_block_size, hash_fn)


def _finish_in_order(finish: Any, request_ids: Any, status: Any) -> list[Any]:
    """Finish requests by name: vLLM takes a set of them in an order that each process draws."""
    each = sorted(request_ids) if isinstance(request_ids, set) else [request_ids]
    return [request for name in each for request in finish(name, status)]


def runner_output(request_ids: list[str], sampled: list[list[int]], connector_output: Any) -> Any:
    """What a model runner returns for a step: the tokens of each request, and the connector's."""
    from vllm.v1.outputs import ModelRunnerOutput

    return ModelRunnerOutput(
        req_ids=request_ids,
        req_id_to_index={name: index for index, name in enumerate(request_ids)},
        sampled_token_ids=sampled,
        kv_connector_output=connector_output,
    )
