"""`SafeCPUOffloadConnector`: vLLM's hooks, one line each, and the frame that contains errors.

vLLM creates the connector twice, as a `Planner` and as a `WorkerBridge`. An exception from a hook
would kill the engine or the worker, so none leaves this file: it is logged and counted, and the
connector disables itself, so that every lookup misses. Only an invalid configuration is an error,
when the engine starts.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from time import monotonic
from typing import TYPE_CHECKING, Any, TypeVar, cast

from safe_offload.compat import base, engine_config, specs
from safe_offload.compat.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from safe_offload.compat.engine_core.live_weights import MODEL_LOADS, Adapters, watch
from safe_offload.compat.engine_core.pauses import REPORTED, skip_pauses
from safe_offload.compat.engine_core.resets import allow_resets_under_loads
from safe_offload.compat.engine_core.step_loads import preempt_failed
from safe_offload.compose import Composition
from safe_offload.config.options import OffloadConfig
from safe_offload.errors import InvariantError
from safe_offload.observe.counters import Count, Counters
from safe_offload.observe.metrics import OffloadPromMetrics, OffloadStats, StatsReporter
from safe_offload.observe.served import ServedStats
from safe_offload.protocol import EMPTY_PLAN, StepPlan, StepReport
from safe_offload.scheduler.blocks import GpuBlocks
from safe_offload.scheduler.planner import Planner
from safe_offload.sides import SchedulerSide, Side, WorkerSide
from safe_offload.start.advice import advise

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

    from safe_offload.scheduler.cache.events import KvEvents

logger = logging.getLogger(f"vllm.{__name__}")

Hook = TypeVar("Hook", bound=Callable[..., Any])


def contained(default: Callable[[], Any]) -> Callable[[Hook], Hook]:
    """Keep a hook's exceptions from vLLM; the hook then returns `default()`."""

    def decorate(hook: Hook) -> Hook:
        @functools.wraps(hook)
        def guarded(*args: Any, **kwargs: Any) -> Any:  # the connector first
            try:
                return hook(*args, **kwargs)
            except Exception as error:
                args[0]._contain(hook.__name__, error)
                return default()

        return cast("Hook", guarded)

    return decorate


class SafeCPUOffloadConnector(KVConnectorBase_V1, SupportsHMA):
    """Keeps KV cache in host memory and brings it back instead of recomputing it."""

    _cache_hit_source = base.HIT_SOURCES.get("")

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        engine_config.refuse_unsupported(vllm_config, kv_cache_config)
        world_size = vllm_config.parallel_config.world_size
        extra: Mapping[str, object] = self._kv_transfer_config.kv_connector_extra_config or {}
        self._config = dataclasses.replace(
            OffloadConfig.from_extra_config(extra, world_size=world_size),
            ranks_per_copy=engine_config.ranks_per_copy(vllm_config, kv_cache_config),
        )
        engine_config.refuse_lost_experts(
            vllm_config, has_others_blocks=self._config.uses_blocks_of_others
        )
        self._hit_sources: list[Any] = []
        if self._config.sharing is not None:
            engine_config.require_shared_hashes(vllm_config, '"share": "node"')
            engine_config.refuse_sharing(vllm_config)
        if self._config.tiers:
            schemes = "", *(tier.location.scheme for tier in self._config.tiers)
            self._hit_sources = [base.HIT_SOURCES.get(s, base.OTHER_HIT_SOURCE) for s in schemes]
            engine_config.require_shared_hashes(vllm_config)
        self._counters = Counters()
        self._stats: StatsReporter | ServedStats = StatsReporter(self._counters, {})
        self._served: ServedStats | None = None
        parallel = vllm_config.parallel_config
        self._is_beside_worker = engine_config.is_worker_beside_scheduler(parallel)
        self._clock = monotonic
        self.adapters = Adapters()
        self.model_loads = MODEL_LOADS
        self._num_model_loads = MODEL_LOADS.count
        self._events: KvEvents | None = None
        self._make_planner: Callable[[GpuBlocks], Planner] | None = None
        self.scheduler = SchedulerSide()
        self.worker = WorkerSide()
        self.side: Side = self.scheduler
        """Of the two, the one of this connector's role; the other does nothing."""
        is_scheduler = role is KVConnectorRole.SCHEDULER
        if not engine_config.can_be_of_use(vllm_config, kv_cache_config, logs=is_scheduler):
            pass  # and take no memory
        elif is_scheduler:
            self._make_planner = self._prepare_planner()
            watch()
            allow_resets_under_loads()
            skip_pauses()
            preempt_failed()
        else:
            self.side = self.worker = self._make_worker()
        is_watched = self._config.verify_invariants or self._served is not None
        self._does_more = is_watched or self._is_beside_worker

    def _prepare_planner(self) -> Callable[[GpuBlocks], Planner]:
        """Check the configuration; return the factory of the planner, called with vLLM's blocks."""
        vllm_config, kv_cache_config = self._vllm_config, self._kv_cache_config
        config = self._config
        composition = Composition(config, vllm_config, kv_cache_config, self._counters)
        self._events = composition.events
        info = advise(vllm_config, kv_cache_config, config, composition.num_slots)
        self._stats = reporter = StatsReporter(self._counters, info)
        if config.metrics_port is not None:
            self._stats = self._served = ServedStats(reporter, config, vllm_config)
        return composition.make_planner

    def _make_worker(self) -> WorkerSide:
        # Only workers import the code that copies (tests/test_layering.py).
        from safe_offload.tiers.namespace.namespace_facts import namespace_facts_of
        from safe_offload.worker.bridge import WorkerBridge
        from safe_offload.worker.opening import Opening

        parallel = self._vllm_config.parallel_config
        # Ranks counted before the engine started may have allocated their memory by now.
        are_counted = self._config.num_slots is None and engine_config.are_workers_here(parallel)
        opening = Opening(
            config=self._config,
            kv_cache_config=self._kv_cache_config,
            rank=parallel.rank,
            num_ranks_on_host=1 if are_counted else engine_config.num_ranks_on_host(parallel),
            is_child=parallel.distributed_executor_backend == "mp",
            hash_bytes=specs.hash_bytes(self._kv_cache_config, self._vllm_config),
            namespace_facts_of=functools.partial(
                namespace_facts_of, self._vllm_config, self._kv_cache_config
            ),
        )
        return WorkerBridge(opening, is_beside_scheduler=self._is_beside_worker)

    def _contain(self, hook: str, error: Exception, report: object = None) -> None:
        if self._config.verify_invariants and isinstance(error, InvariantError):
            raise error
        self._counters[Count.CONTAINED_ERRORS] += 1
        logger.error(
            "%s failed in SafeCPUOffloadConnector; the engine continues. Offloading is off until "
            "the server is restarted; only transfers in flight are completed. Open an issue with "
            "this log.",
            hook,
            exc_info=error,
        )
        try:
            self.side.disable(report)
        except Exception:
            logger.exception(
                "SafeCPUOffloadConnector could not clean up after an error. Host slots may stay "
                "leased until the server is restarted. Open an issue with this log."
            )

    # ---- scheduler side ------------------------------------------------------------------------

    @property
    def requires_kv_delivery(self) -> bool:
        """Return False: a lost store is a cache miss, no reason to recompute a request."""
        return False

    def bind_kv_cache_manager(self, kv_cache_manager: KVCacheManager) -> None:
        """See KVConnectorBase_V1; nothing is matched or stored before this call."""
        super().bind_kv_cache_manager(kv_cache_manager)
        if self._make_planner is not None:
            self.side = self.scheduler = self._make_planner(GpuBlocks(kv_cache_manager))

    @contained(lambda: None)
    def on_new_request(self, request: Request) -> None:
        adapter = request.lora_request
        if self._num_model_loads != self.model_loads.count:
            self._model_has_loaded()
        elif adapter is not None and self.adapters.is_other(adapter, request.request_id):
            self.weights_changed("a LoRA adapter is loaded in place")
        self.scheduler.on_new_request(request)

    @contained(lambda: (0, False))
    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """See KVConnectorBase_V1; None while a shared load or a tier lookup is pending."""
        if self._num_model_loads != self.model_loads.count:
            return 0, False  # vLLM has begun to schedule: the reset comes with the plan
        now_s = self._clock()
        num_tokens = self.scheduler.get_num_new_matched_tokens(request, num_computed_tokens, now_s)
        return num_tokens, bool(num_tokens) and not self.scheduler.loads_in_step(request, now_s)

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        try:
            self.scheduler.update_state_after_alloc(request, blocks, num_external_tokens)
        except Exception as error:
            self._contain("update_state_after_alloc", error)
            if num_external_tokens > 0:
                self._announce_failure(request)

    def get_external_cache_hit_sources(self, request: Request, num_external_tokens: int) -> Any:
        """See KVConnectorBase_V1 of vLLM 0.32; tokens fetched for this request count for a tier."""
        if self._hit_sources:
            return self._hit_sources_of(request, num_external_tokens)
        return {self._cache_hit_source: num_external_tokens}

    @contained(dict)
    def _hit_sources_of(self, request: Request, num_external_tokens: int) -> dict[Any, int]:
        assert isinstance(self.scheduler, Planner)
        by_tier = self.scheduler.hit_tokens_by_tier(request, num_external_tokens)
        sources = Counter[Any]()
        for tier, num_tokens in (by_tier or {0: num_external_tokens}).items():
            sources[self._hit_sources[tier]] += num_tokens
        return dict(+sources)

    @contained(lambda: None)
    def _announce_failure(self, request: Request) -> None:
        self.scheduler.announce_failure(request)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        if self._num_model_loads != self.model_loads.count:
            self._model_has_loaded()
        try:
            plan = self.scheduler.build_connector_meta(scheduler_output, self._clock())
            if self._config.verify_invariants:
                self.scheduler.check_invariants()
            return plan
        except Exception as error:
            self._contain("build_connector_meta", error)
            return self._plan_nothing()

    @contained(lambda: EMPTY_PLAN)
    def _plan_nothing(self) -> StepPlan:
        return self.scheduler.plan_nothing()

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        if self._num_model_loads != self.model_loads.count:
            self._model_has_loaded()  # before anything is published
        try:
            if self._does_more:
                self._update(connector_output)
            else:
                self.scheduler.update_connector_output(connector_output)
            if connector_output.finished_recving:
                REPORTED.extend(connector_output.finished_recving)
        except Exception as error:
            report = connector_output.kv_connector_worker_meta
            self._contain("update_connector_output", error, report)

    def _update(self, connector_output: KVConnectorOutput) -> None:
        """Complete the report, and check invariants and serve metrics, if configured."""
        report = connector_output.kv_connector_worker_meta
        if isinstance(report, StepReport):
            connector_output.kv_connector_worker_meta = report.completed()
        self.scheduler.update_connector_output(connector_output)
        if self._config.verify_invariants:
            self.scheduler.check_invariants()
        if self._served is not None:
            self._served.of_workers(connector_output.kv_connector_stats)

    @contained(lambda: (False, None))
    def request_finished(
        self, request: Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """See KVConnectorBase_V1; returns False, no block is kept (I2), and the output params."""
        return False, self.scheduler.request_finished(request)

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished(request, [])

    @contained(lambda: False)
    def has_pending_push_work(self) -> bool:
        """Return whether the engine must keep stepping until transfers have settled."""
        return self.scheduler.has_pending_push_work()

    @contained(lambda: True)
    def reset_cache(self) -> bool:
        """Empty the host cache; returns True, because nothing stored earlier can be hit."""
        self.scheduler.reset_cache()
        return True

    @contained(lambda: None)
    def weights_changed(self, cause: str) -> None:
        """Reset the cache: the weights of the running engine may have changed (`live_weights`)."""
        self._num_model_loads = self.model_loads.count
        self.scheduler.reset_cache(cause)

    def _model_has_loaded(self) -> None:
        self.weights_changed("the model has loaded weights")

    def take_events(self) -> Iterable[KVCacheEvent]:
        events = self._events
        return self._take_events(events) if events is not None and events.is_pending else ()

    @contained(tuple)
    def _take_events(self, events: KvEvents) -> Iterable[KVCacheEvent]:
        return events.take()

    # ---- worker side ---------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """See KVConnectorBase_V1; raises ConfigError, as the engine is still starting."""
        self.worker.register_kv_caches(kv_caches)

    def unregister_kv_caches(self) -> None:
        """Prepare for sleep (vLLM 0.33); raises TransferError if a copy is still running."""
        self.worker.unregister_kv_caches()

    @contained(lambda: None)
    def restore_kv_caches(self) -> None:
        self.worker.restore_kv_caches()

    @contained(lambda: None)
    def get_handshake_metadata(self) -> None:
        """Return None. vLLM calls this after it has captured its graphs, so the engine is idle.

        Nothing signals a sleep before the first step (0.32), so an engine that may sleep counts as
        busy. Source: `EngineCore.__init__` in vllm/v1/engine/core.py (0.32.0).
        """
        if not self._vllm_config.model_config.enable_sleep_mode:
            self.worker.engine_has_started()

    @contained(lambda: None)
    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        if isinstance(kv_connector_metadata, StepPlan):
            self.worker.handle_preemptions(kv_connector_metadata)

    @contained(lambda: None)
    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        if isinstance(connector_metadata, StepPlan):
            self.worker.bind_connector_metadata(connector_metadata)

    @contained(lambda: None)
    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        self.worker.start_load_kv()

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Do nothing: a load in the step has been ordered before all layers (`WorkerBridge`)."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Do nothing: whole blocks are stored after the forward pass."""

    @contained(lambda: None)
    def wait_for_save(self) -> None:
        """See KVConnectorBase_V1; starts the stores and does not wait."""
        self.worker.wait_for_save()

    @contained(KVConnectorTransferResults)
    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """See KVConnectorBase_V1; names failed loads only (see `scheduler.loads`)."""
        failed = set(self.worker.get_transfer_results())
        return KVConnectorTransferResults(finished_recving=failed, failed_recving=set(failed))

    @contained(set)
    def get_block_ids_with_load_errors(self) -> set[int]:
        """See KVConnectorBase_V1; blocks of loads in the step only."""
        return self.worker.take_unloaded()

    @contained(lambda: None)
    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        return self.worker.build_connector_worker_meta()

    @contained(lambda: None)
    def clear_connector_metadata(self) -> None:
        super().clear_connector_metadata()
        self.worker.clear_connector_metadata()

    @contained(lambda: None)
    def shutdown(self) -> None:
        """Stop the worker's thread and free its memory; a second call does nothing."""
        self.worker.shutdown()
        self.scheduler.shutdown()
        if self._served is not None:
            self._served.close()

    # ---- observation ---------------------------------------------------------------------------

    @contained(lambda: None)
    def get_kv_connector_stats(self) -> OffloadStats | None:
        """Return counts since the last call and gauges, if any changed."""
        return self._stats.take(self.side)

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> OffloadStats:
        return OffloadStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> OffloadPromMetrics:
        return OffloadPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)
