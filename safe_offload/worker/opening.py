"""The composition of a rank's worker side, from vLLM's KV cache to running transfers."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from safe_offload.compat import specs
from safe_offload.config.options import OffloadConfig
from safe_offload.config.units import format_bytes
from safe_offload.errors import ConfigError, StalledError
from safe_offload.layout import Geometry, make_geometry
from safe_offload.threads import on_other_cores
from safe_offload.tiers.choice import OpenTier
from safe_offload.tiers.namespace.namespace_facts import NamespaceFacts
from safe_offload.worker.copies.base import ProvableBackend
from safe_offload.worker.copies.choice import OpenBackend, open_backend
from safe_offload.worker.copies.threads import DirectionThreads
from safe_offload.worker.loop_thread import Loop, LoopThread
from safe_offload.worker.memory.shared_memory import Share
from safe_offload.worker.pool import PoolMemory
from safe_offload.worker.rank_memory import MemoryPlan, RankMemory
from safe_offload.worker.rank_tiers import open_tiers
from safe_offload.worker.self_test import IdleTiming, SelfTest
from safe_offload.worker.tier_runner import TierRunner
from safe_offload.worker.transfers import Transfers
from safe_offload.worker.verify import Verifier

if TYPE_CHECKING:
    import torch
    from vllm.v1.kv_cache_interface import KVCacheConfig

logger = logging.getLogger(f"vllm.{__name__}")

STALLED = (
    "The host cache of rank %d is not shared with other engines of this machine: %s. Fix: "
    "continue or kill that process (`ps -eo pid,stat,args` shows T for stopped ones), then "
    "restart this engine."
)

GRACE_MIN_S = 10.0
"""Minimum grace: longer than the steps that a device may have queued before a store."""
GRACE_FACTOR = 4
SLOW_BYTES_PER_S = 1e9
"""If no store was measured."""


@dataclass(frozen=True, slots=True)
class Opened:
    """The running worker side of a rank.

    `share` is its part of each store; the KV cache's `storage` lives as long as copies may run.
    There is no `idle_timing` without a choice of copy paths, or if other engines may use the slots.
    """

    transfers: Transfers
    backend: ProvableBackend
    share: Share
    storage: Any
    tiers: TierRunner | None = None
    pool: PoolMemory | None = None
    idle_timing: IdleTiming | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Opening:
    """The facts of a rank that are known before vLLM has allocated its KV cache.

    Attributes:
        rank: from 0 to the number of ranks of this engine.
        num_ranks_on_host: ranks whose memory together must fit into this machine's.
        is_child: vLLM has started this process for the worker.
        namespace_facts_of: of the geometry of blocks and the first rank with the same KV cache;
            called only with tiers.
        open_tier: opens a tier, and returns it with its naming; None for tiers in their own
            processes, if these can map the slots.
        hash_bytes: the maximum size of a block's hash.
    """

    config: OffloadConfig
    kv_cache_config: KVCacheConfig
    rank: int
    num_ranks_on_host: int
    is_child: bool = False
    open_backend: OpenBackend = open_backend
    make_loop: Callable[[], Loop] = LoopThread
    namespace_facts_of: Callable[[Geometry, int], NamespaceFacts]
    open_tier: OpenTier | None = None
    hash_bytes: int = 32

    def open(self, kv_caches: Mapping[str, torch.Tensor | list[torch.Tensor]]) -> Opened | None:
        """Allocate the host memory and start the transfers, if a copy path passes the self-test.

        If another process blocks a shared pool, the memory is this engine's alone. `kv_caches`, by
        layer name, are views of one storage. ConfigError: the layout is not supported, or the
        memory cannot be allocated.
        """
        try:
            return self._open(kv_caches)
        except StalledError as error:
            logger.warning(STALLED, self.rank, error)
        return replace(self, config=replace(self.config, sharing=None))._open(kv_caches)

    def _open(self, kv_caches: Mapping[str, torch.Tensor | list[torch.Tensor]]) -> Opened | None:
        config, (storage, device) = self.config, storage_of(kv_caches)
        geometry = make_geometry(
            specs.segments(self.kv_cache_config), self.kv_cache_config.num_blocks, storage.nbytes()
        )
        memory = MemoryPlan(
            config=config,
            rank=self.rank,
            num_ranks_on_host=self.num_ranks_on_host,
            geometry=geometry,
            device_type=device.type,
            namespace_facts_of=self.namespace_facts_of,
            hash_bytes=self.hash_bytes,
            for_processes=bool(config.tiers) and self.open_tier is None,
        ).take()
        pool, test = memory.pool, None
        with contextlib.ExitStack() as made:  # given back unless all goes well
            if pool is not None:
                made.callback(pool.close)
            is_bound = device.type == "cpu" and self.is_child
            with on_other_cores() if is_bound else contextlib.nullcontext():
                backend, rows = self.open_backend(
                    storage, device, memory.layout, memory.host, config
                )
                loop = self.make_loop()
                verifier = self._make_verifier(backend, memory)
                tiers = self._make_tiers(backend, memory, loop, verifier)
                transfers = Transfers(
                    backend,
                    loop,
                    config.max_inflight_bytes,
                    timeout_s=config.transfer_timeout_s,
                    verifier=verifier,
                    tiers=tiers,
                )
            made.pop_all()
            made.callback(_close, transfers, pool)
            if config.self_test:
                test = SelfTest(transfers, backend, rows, memory.host.tensor.numpy(), memory.layout)
                if not _passes(test, backend, memory):
                    return None
            if pool is not None:
                rate = None if test is None else test.store_bytes_per_s
                pool.keep_after_death(grace_s(device.type, config, backend.slot_bytes, rate))
            made.pop_all()
        self._log(backend, memory)
        # In a pool, other engines may use the slots by now.
        may_time = test is not None and pool is None and bool(backend.choices)
        idle_timing = IdleTiming(test) if test is not None and may_time else None
        return Opened(transfers, backend, memory.share, storage, tiers, pool, idle_timing)

    def _make_verifier(self, backend: ProvableBackend, memory: RankMemory) -> Verifier | None:
        if not self.config.verify_every:
            return None
        threads = DirectionThreads("safe-offload-verify")
        return Verifier(backend, threads, self.config.verify_every, memory.checksums)

    def _make_tiers(
        self, backend: ProvableBackend, memory: RankMemory, loop: Loop, verifier: Verifier | None
    ) -> TierRunner | None:
        if not self.config.tiers:
            return None
        copy_rank = self.rank - self.rank % self.config.ranks_per_copy
        facts = self.namespace_facts_of(memory.layout.geometry, copy_rank)
        guarded_tiers, slot_of = open_tiers(self.config, self.rank, memory, facts, self.open_tier)
        return TierRunner(
            self.rank,
            guarded_tiers,
            backend,
            loop,
            slot_of=slot_of,
            share=memory.share,
            verifier=verifier,
            namespace_facts=facts,
        )

    def _log(self, backend: ProvableBackend, memory: RankMemory) -> None:
        share, num_ranges = memory.share, len(memory.layout.geometry.segments)
        logger.info(
            "Rank %d keeps KV cache in %s of host memory%s: %d slots of %d bytes in %s, %d of them "
            "ready. Copies by %s.",
            self.rank,
            format_bytes(memory.host.size_bytes),
            f", one copy for {share.count} ranks" if share.count > 1 else "",
            backend.num_slots,
            backend.slot_bytes,
            f"{num_ranges} ranges" if num_ranges > 1 else "one range",
            backend.num_usable_slots,
            ", ".join(path.value for path in backend.paths),
        )


def _passes(test: SelfTest, backend: ProvableBackend, memory: RankMemory) -> bool:
    """Run the self-test in slots that no other rank or engine uses meanwhile."""
    share, pool = memory.share, memory.pool
    with backend.undisturbed():
        if pool is not None:
            with pool.tests(share.index) as free:
                return test.run(slots=share.part(len(free)))
        is_shared = share.count > 1
        return test.run(slots=share.part(memory.layout.slots_per_slab) if is_shared else None)


def _close(transfers: Transfers, pool: PoolMemory | None) -> None:
    """Close everything, but do not free memory that a copy may still touch."""
    if transfers.close() and pool is not None:
        pool.close()


def grace_s(
    device_type: str, config: OffloadConfig, slot_bytes: int, store_bytes_per_s: float | None
) -> float:
    """Return how long after the death of this process its slots may still be written.

    Copies on the CPU are made by its threads, which end before it does. A device, or the network
    card of a tier, may have all pending stores queued, each behind the engine's computation.
    """
    if device_type == "cpu" and not config.tiers:
        return 0.0
    size_bytes = max(config.store_bytes_max, slot_bytes)
    return max(GRACE_MIN_S, GRACE_FACTOR * size_bytes / (store_bytes_per_s or SLOW_BYTES_PER_S))


def storage_of(
    kv_caches: Mapping[str, torch.Tensor | list[torch.Tensor]],
) -> tuple[Any, torch.device]:
    """Return the storage of which all layers' caches are views, and its device."""
    tensors: list[torch.Tensor] = []
    for cache in kv_caches.values():
        tensors += cache if isinstance(cache, list) else [cache]
    storage = tensors[0].untyped_storage()
    if any(tensor.untyped_storage().data_ptr() != storage.data_ptr() for tensor in tensors):
        raise ConfigError(
            "unsupported KV cache layout: expected one backing allocation for all layers, found "
            "several. vLLM 0.32 and later use one; open an issue that names model and vLLM version."
        )
    return storage, tensors[0].device
