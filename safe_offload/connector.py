"""`SafeCPUOffloadConnector`: vLLM's hooks, one line each, and the frame that contains errors.

vLLM builds the connector twice, and the role is decided once, here: beside the scheduler it is a
`Planner`, in a worker a `WorkerBridge`. An exception from a hook kills the engine or the worker, so
none leaves this file: it is logged, counted, and the connector switches itself off and goes on as a
cache that always misses. Bad configuration is the exception: it is an error when the engine starts.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar, cast

from safe_offload import compat
from safe_offload.compat import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from safe_offload.config import OffloadConfig
from safe_offload.errors import InvariantError
from safe_offload.last_words import telling
from safe_offload.observe.counters import Count, Counters
from safe_offload.observe.metrics import OffloadPromMetrics, OffloadStats
from safe_offload.protocol import EMPTY_PLAN, StepPlan
from safe_offload.scheduler.gpu_blocks import GpuBlocks
from safe_offload.scheduler.index import HostIndex
from safe_offload.scheduler.planner import Planner, PlannerOptions
from safe_offload.start_advice import advise

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

    from safe_offload.worker.bridge import WorkerBridge

logger = logging.getLogger(f"vllm.{__name__}")

STORES_FACTOR = 4
"""Stores wait to be copied up to so many times `max_inflight_bytes`; there are no more of them."""

Hook = TypeVar("Hook", bound=Callable[..., Any])


def contained(default: Callable[[], Any]) -> Callable[[Hook], Hook]:
    """Keep a hook's exceptions from vLLM; the hook then answers `default()`."""

    def decorate(hook: Hook) -> Hook:
        @functools.wraps(hook)
        def guarded(self: SafeCPUOffloadConnector, *args: Any, **kwargs: Any) -> Any:
            try:
                return hook(self, *args, **kwargs)
            except Exception as error:
                self._contain(hook.__name__, error)
                return default()

        return cast("Hook", guarded)

    return decorate


class SafeCPUOffloadConnector(KVConnectorBase_V1, SupportsHMA):
    """Keeps KV cache in host memory and brings it back instead of recomputing it.

    Args:
        vllm_config: the engine's configuration; ours is `kv_connector_extra_config`.
        role: which half this is.
        kv_cache_config: layers, groups and sizes of the GPU's KV cache.

    Raises:
        ConfigError: a setting is wrong or cannot be met.
    """

    _cache_hit_source = compat.HOST_HIT_SOURCE

    @telling
    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        compat.refuse_unsupported(vllm_config, kv_cache_config)
        world_size = vllm_config.parallel_config.world_size
        extra: Mapping[str, object] = self._kv_transfer_config.kv_connector_extra_config or {}
        self._config = dataclasses.replace(
            OffloadConfig.from_extra_config(extra, world_size=world_size),
            ranks_per_copy=compat.ranks_per_copy(vllm_config, kv_cache_config),
        )
        self._counters = Counters()
        self._last_gauges: dict[str, int] = {}
        self._info: dict[str, str] = {}
        self._told_info: dict[str, str] = {}
        self._told_host: Mapping[str, str] | None = None
        self._clock = time.monotonic
        self._planner: Planner | None = None
        self._worker: WorkerBridge | None = None
        is_scheduler = role is KVConnectorRole.SCHEDULER
        if not compat.can_be_of_use(vllm_config, kv_cache_config, tell=is_scheduler):
            pass  # and take no memory
        elif is_scheduler:
            self._planner = self._make_planner()
        else:
            self._worker = self._make_worker()

    def _make_planner(self) -> Planner:
        vllm_config, kv_cache_config = self._vllm_config, self._kv_cache_config
        config = self._config
        slot_bytes = max(1, compat.block_bytes(kv_cache_config))
        num_slots = config.num_slots_of(slot_bytes)
        policy = config.eviction_policy
        index = HostIndex.for_engine(vllm_config, kv_cache_config, num_slots, policy)
        self._info = advise(vllm_config, kv_cache_config, config, num_slots)
        num_step_tokens = vllm_config.scheduler_config.max_num_batched_tokens
        num_ahead = 2 * index.num_blocks_in_step(num_step_tokens)
        options = PlannerOptions(
            num_ranks=vllm_config.parallel_config.world_size,
            num_store_blocks_max=max(1, STORES_FACTOR * config.max_inflight_bytes // slot_bytes),
            lazy_num_blocks=num_ahead if config.lazy_offload else None,
            blocks_written_early=compat.uses_v2_model_runner(vllm_config),
            state_group_ids=compat.state_group_ids(kv_cache_config),
            num_decode_tokens_max=compat.num_decode_tokens_max(vllm_config),
            transfer_timeout_s=config.transfer_timeout_s,
            min_load_tokens=config.min_load_tokens,
            num_step_tokens_max=num_step_tokens,
            num_steps_in_flight=compat.num_steps_in_flight(vllm_config),
        )
        return Planner(index, options, self._counters)

    def _make_worker(self) -> WorkerBridge:
        # Only a worker may pull in the copying code (DESIGN: two processes).
        from safe_offload.worker.bridge import WorkerBridge
        from safe_offload.worker.opening import Opening

        parallel = self._vllm_config.parallel_config
        opening = Opening(
            config=self._config,
            kv_cache_config=self._kv_cache_config,
            rank=parallel.rank,
            num_ranks_on_host=getattr(parallel, "local_world_size", parallel.world_size),
            is_child=parallel.distributed_executor_backend == "mp",
        )
        return WorkerBridge(opening)

    def _contain(self, hook: str, error: Exception, report: object = None) -> None:
        if self._config.verify_invariants and isinstance(error, InvariantError):
            raise error
        self._counters[Count.CONTAINED_ERRORS] += 1
        logger.error(
            "%s failed in SafeCPUOffloadConnector and was kept from the engine. Until the next "
            "restart the connector only finishes what is in flight. Please report this.",
            hook,
            exc_info=error,
        )
        if self._planner is not None:
            try:
                self._planner.disable(report)
            except Exception:
                logger.exception(
                    "SafeCPUOffloadConnector could not put its books in order after an error. Host "
                    "slots may stay taken until the next restart. Please report this."
                )

    def _check(self) -> None:
        if self._config.verify_invariants and self._planner is not None:
            self._planner.check_invariants()

    # ---- scheduler side ------------------------------------------------------------------------

    @property
    def requires_kv_delivery(self) -> bool:
        """False: a store that is lost is a cache miss, not a reason to recompute a request."""
        return False

    def bind_kv_cache_manager(self, kv_cache_manager: KVCacheManager) -> None:
        """See KVConnectorBase_V1."""
        super().bind_kv_cache_manager(kv_cache_manager)
        if self._planner is not None:
            self._planner.bind(GpuBlocks(kv_cache_manager))

    @contained(lambda: None)
    def on_new_request(self, request: Request) -> None:
        """See KVConnectorBase_V1."""
        if self._planner is not None:
            self._planner.see(request)

    @contained(lambda: (0, False))
    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """See KVConnectorBase_V1; None only while another loads the same (see `sharing`)."""
        if self._planner is None:
            return 0, False
        num_tokens = self._planner.match(request, num_computed_tokens, self._clock())
        return num_tokens, bool(num_tokens)

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        """See KVConnectorBase_V1."""
        if self._planner is None:
            return
        try:
            self._planner.allocated(request, blocks, num_external_tokens)
        except Exception as error:
            self._contain("update_state_after_alloc", error)
            if num_external_tokens > 0:
                self._owe_failure(request)

    @contained(lambda: None)
    def _owe_failure(self, request: Request) -> None:
        """A load that vLLM waits for was not planned: tell it to recompute (I7)."""
        if self._planner is not None:
            self._planner.owe_failure(request)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        """See KVConnectorBase_V1."""
        if self._planner is None:
            return EMPTY_PLAN
        try:
            plan = self._planner.plan(scheduler_output, self._clock())
            self._check()
            return plan
        except Exception as error:
            self._contain("build_connector_meta", error)
            return self._plan_nothing()

    @contained(lambda: EMPTY_PLAN)
    def _plan_nothing(self) -> StepPlan:
        """The plan of a step whose planning failed."""
        return self._planner.plan_nothing() if self._planner is not None else EMPTY_PLAN

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """See KVConnectorBase_V1."""
        if self._planner is None:
            return
        try:
            self._planner.settle(connector_output)
            self._check()
        except Exception as error:
            report = connector_output.kv_connector_worker_meta
            self._contain("update_connector_output", error, report)

    @contained(lambda: (False, None))
    def request_finished(
        self, request: Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """See KVConnectorBase_V1; always (False, None): no block is kept (I2)."""
        if self._planner is not None:
            self._planner.finish(request)
        return False, None

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """See SupportsHMA; always (False, None): no block is kept (I2)."""
        return self.request_finished(request, [])

    @contained(lambda: False)
    def has_pending_push_work(self) -> bool:
        """Whether the engine must keep stepping until transfers have settled."""
        return self._planner is not None and self._planner.has_work

    @contained(lambda: True)
    def reset_cache(self) -> bool:
        """Forget everything; True, because nothing that was stored can be hit any more."""
        if self._planner is not None:
            self._planner.reset()
        return True

    # ---- worker side ---------------------------------------------------------------------------

    @telling
    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """See KVConnectorBase_V1; raises ConfigError, since the engine is only starting."""
        if self._worker is not None:
            self._worker.register(kv_caches)

    def unregister_kv_caches(self) -> None:
        """Before vLLM 0.33 sleeps; raises TransferError if a copy would touch what is gone then."""
        if self._worker is not None:
            self._worker.unregister()

    @contained(lambda: None)
    def restore_kv_caches(self) -> None:
        """See KVConnectorBase_V1 of vLLM 0.33."""
        if self._worker is not None:
            self._worker.restore()

    @contained(lambda: None)
    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        """See KVConnectorBase_V1."""
        if self._worker is not None and isinstance(kv_connector_metadata, StepPlan):
            self._worker.before_step(kv_connector_metadata)

    @contained(lambda: None)
    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """See KVConnectorBase_V1."""
        super().bind_connector_metadata(connector_metadata)
        if self._worker is not None and isinstance(connector_metadata, StepPlan):
            self._worker.begin(connector_metadata)

    @contained(lambda: None)
    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """See KVConnectorBase_V1."""
        if self._worker is not None:
            self._worker.start_loads()

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing: loads are asynchronous, the request is not scheduled before they end."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Nothing: stores are of whole blocks, behind the forward."""

    @contained(lambda: None)
    def wait_for_save(self) -> None:
        """See KVConnectorBase_V1; starts the stores, waits for nothing."""
        if self._worker is not None:
            self._worker.start_stores()

    @contained(KVConnectorTransferResults)
    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """See KVConnectorBase_V1; only loads that failed are named here (DESIGN section 2)."""
        failed = set(self._worker.collect_failures()) if self._worker is not None else set()
        return KVConnectorTransferResults(finished_recving=failed, failed_recving=set(failed))

    @contained(lambda: None)
    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        """See KVConnectorBase_V1."""
        return self._worker.report() if self._worker is not None else None

    @contained(lambda: None)
    def clear_connector_metadata(self) -> None:
        """See KVConnectorBase_V1."""
        super().clear_connector_metadata()
        if self._worker is not None:
            self._worker.end()

    @contained(lambda: None)
    def shutdown(self) -> None:
        """End the worker's thread and free its memory; a second call does nothing."""
        if self._worker is not None:
            self._worker.shutdown()

    # ---- observation ---------------------------------------------------------------------------

    @contained(lambda: None)
    def get_kv_connector_stats(self) -> OffloadStats | None:
        """Counts since the last call and the state of the host pool; None if neither changed."""
        if self._planner is not None:
            if not self._counters and not self._planner.has_changed:
                return None
            self._planner.has_changed = False
        if self._worker is not None:
            self._counters.update(self._worker.take_counts())
        counts = self._counters.take()
        gauges = self._planner.gauges() if self._planner is not None else {}
        info, old_info = self._new_info()
        if not counts and gauges == self._last_gauges and not info:
            return None
        self._last_gauges = gauges
        return OffloadStats.of(counts, gauges, info, old_info)

    def _new_info(self) -> tuple[dict[str, str], dict[str, str]]:
        """Return how the connector is set up, if that has changed, and what was said before."""
        host = self._planner.host_labels if self._planner is not None else None
        if host is None or host is self._told_host or not self._info:
            return {}, {}
        self._told_host = host
        old_info, self._told_info = self._told_info, {**self._info, **host}
        return self._told_info, old_info

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> OffloadStats:
        """See KVConnectorBase_V1."""
        return OffloadStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> OffloadPromMetrics:
        """See KVConnectorBase_V1."""
        return OffloadPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)
