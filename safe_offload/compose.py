"""Composes the scheduler side: which features a configuration has, and what each of them needs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from safe_offload.compat import engine_config, media_ids, specs
from safe_offload.compat.engine_core.step_loads import may_load_in_step
from safe_offload.config.tenants import TenantsFile
from safe_offload.scheduler.cache.directory import Directory
from safe_offload.scheduler.cache.events import make_events
from safe_offload.scheduler.cache.slots import SlotPool
from safe_offload.scheduler.cache.tenants import TenantQuotas
from safe_offload.scheduler.eviction.policies import POLICIES
from safe_offload.scheduler.features.events import Events
from safe_offload.scheduler.features.node import NodePool
from safe_offload.scheduler.features.pins.hints import Hints
from safe_offload.scheduler.features.pins.pins import PinnedPrompts
from safe_offload.scheduler.features.private_blocks import PrivateBlocks
from safe_offload.scheduler.features.tenants import TenantShares
from safe_offload.scheduler.loads.hits import HostHits
from safe_offload.scheduler.planner import Planner, PlannerOptions
from safe_offload.scheduler.tiers.context import TierContext
from safe_offload.scheduler.tiers.tiered_hits import TieredHits
from safe_offload.scheduler.tiers.tiers import Tiers

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

    from safe_offload.config.options import OffloadConfig
    from safe_offload.observe.counters import Counters
    from safe_offload.scheduler.blocks import GpuBlocks
    from safe_offload.scheduler.feature import Feature


class Composition:
    """Checks everything when the engine starts; makes the planner once vLLM has its blocks."""

    def __init__(
        self,
        config: OffloadConfig,
        vllm_config: VllmConfig,
        kv_cache_config: KVCacheConfig,
        counters: Counters,
    ) -> None:
        self._config = config
        self._vllm_config, self._kv_cache_config = vllm_config, kv_cache_config
        self._counters = counters
        block_bytes = max(1, specs.block_bytes(kv_cache_config))
        self.num_slots = config.num_slots_of(block_bytes)  # of the host cache
        # None if vLLM publishes no KV events.
        self.events = make_events(
            vllm_config,
            kv_cache_config,
            is_lazy=config.lazy_offload,
            is_shared=config.sharing is not None,
        )
        num_groups = len(kv_cache_config.kv_cache_groups)
        directory = Directory(self.num_slots, num_groups, self.events)
        make_policy = POLICIES[config.eviction_policy]
        self._tenants = TenantsFile(config.tenants) if config.tenants is not None else None
        self._quotas = None
        if self._tenants is not None:
            groups = () if config.lazy_offload else specs.state_group_ids(kv_cache_config)
            self._quotas = TenantQuotas(self.num_slots, directory.hashes, make_policy, groups)
        self._slots = SlotPool(
            self.num_slots,
            directory,
            self._quotas.policy if self._quotas else make_policy(self.num_slots, directory.hashes),
            counters,
            quotas=self._quotas,
            awaits_source=config.sharing is not None,
        )
        self._hits = HostHits(vllm_config, kv_cache_config, self._slots)
        self._options = PlannerOptions(
            num_ranks=vllm_config.parallel_config.world_size,
            num_store_blocks_max=max(1, config.store_bytes_max // block_bytes),
            slot_bytes=block_bytes * config.world_size // config.ranks_per_copy,
            is_lazy=config.lazy_offload,
            blocks_written_early=engine_config.uses_v2_model_runner(vllm_config),
            state_group_ids=specs.state_group_ids(kv_cache_config),
            num_decode_tokens_max=engine_config.num_decode_tokens_max(vllm_config),
            transfer_timeout_s=config.transfer_timeout_s,
            min_load_tokens=config.min_load_tokens,
            num_step_tokens_max=vllm_config.scheduler_config.max_num_batched_tokens,
            num_steps_in_flight=engine_config.num_steps_in_flight(vllm_config),
            # Data-parallel engines that go in step with one another wait for each other's steps.
            waits_when_idle=vllm_config.parallel_config.data_parallel_size == 1,
            may_refuse=not config.tiers,  # which want all
            may_load_in_step=may_load_in_step(
                vllm_config, kv_cache_config, config, is_plain=self._hits.geometry.is_plain
            ),
        )

    def make_planner(self, gpu: GpuBlocks) -> Planner:
        """Return the scheduler side over vLLM's blocks."""
        return Planner(self._hits, gpu, self._options, self._counters, self.tiers, self.features)

    def tiers(self, planner: Planner) -> Tiers | None:
        """Return the tiers, if any are configured."""
        if not self._config.tiers:
            return None
        return Tiers(self._find_tiered(), self._tier_context(planner))

    def features(self, planner: Planner) -> Iterator[Feature]:
        """Yield the features of the configuration, in the order in which they are called."""
        config, slots = self._config, self._slots
        if self.events is not None:
            yield Events(self.events)
        if config.uses_blocks_of_others:
            has_version = bool(config.tiers and config.tiers[0].model_version)
            yield PrivateBlocks(
                planner.book,
                planner.hits,
                planner.gpu,
                tells_media_ids=media_ids.tells_media_ids(self._vllm_config),
                vouches_for_adapters=has_version and config.sharing is None,
            )
        if config.sharing is not None:
            yield NodePool(planner, slots)
        if self._quotas and self._tenants:
            yield TenantShares(planner, slots, self._quotas, self._tenants)
        if config.kv_hints:
            yield Hints(planner.counters)
        if config.pin_share or config.kv_hints:
            yield PinnedPrompts(planner, self._find_tiered(), config.pin_share)

    def _find_tiered(self) -> TieredHits:
        return TieredHits(self._vllm_config, self._kv_cache_config, self._hits)

    def _tier_context(self, planner: Planner) -> TierContext:
        return TierContext(
            hits=planner.hits,
            gpu=planner.gpu,
            book=planner.book,
            leases=planner.leases,
            loads=planner.loads.ledger,
            transfer_ids=planner.transfer_ids,
            costs=planner.costs,
            counters=planner.counters,
            configs=self._config.tiers,
            num_ranks=self._options.num_ranks,
            slot_bytes=self._options.slot_bytes,
        )
