"""From vLLM's KV cache to transfers that run: host memory, backend, event loop, self-test."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from safe_offload.compat import specs
from safe_offload.config.options import OffloadConfig
from safe_offload.config.units import format_bytes
from safe_offload.errors import ConfigError, SharingError, StalledError
from safe_offload.layout import Geometry, HostLayout, make_geometry
from safe_offload.mapped_files import find_file
from safe_offload.node.pools import Wanted
from safe_offload.threads import on_other_cores
from safe_offload.tiers.choice import OpenTier, open_tier
from safe_offload.tiers.guarded_tier import GuardedTier
from safe_offload.tiers.namespace.namespace_facts import NamespaceFacts
from safe_offload.tiers.namespace.this_machine import name_here
from safe_offload.tiers.process.process_tier import ProcessTier, opener
from safe_offload.worker.copies.base import ProvableBackend
from safe_offload.worker.copies.choice import OpenBackend, open_backend
from safe_offload.worker.copies.threads import DirectionThreads
from safe_offload.worker.loop_thread import Loop, LoopThread
from safe_offload.worker.memory.host_memory import (
    HostMemory,
    available_host_bytes,
    check_host_bytes,
)
from safe_offload.worker.memory.page_lock import SLAB_BYTES
from safe_offload.worker.memory.shared_memory import (
    ALONE,
    Share,
    bytes_with_checksums,
    checksum_table,
    map_alone,
    secret_of,
    share_memory,
)
from safe_offload.worker.pool import PoolMemory, open_pool
from safe_offload.worker.self_test import IdleTiming, SelfTest
from safe_offload.worker.tier_runner import HostSlots, Slots, TierRunner
from safe_offload.worker.transfers import Transfers
from safe_offload.worker.verify import Verifier

if TYPE_CHECKING:
    import torch
    from vllm.v1.kv_cache_interface import KVCacheConfig

logger = logging.getLogger(f"vllm.{__name__}")

NOT_SHARED = (
    "Ranks with the same KV cache cannot share one copy on this machine: %s. Each keeps its own, "
    "so host memory holds that many times fewer tokens."
)

ALONE_HERE = (
    "The host cache of rank %d is not shared with other engines of this machine: %s. Model files "
    "must not change while an engine starts, and the settings must determine everything it "
    "computes."
)

STALLED = (
    "The host cache of rank %d is not shared with other engines of this machine: %s. Fix: "
    "continue or kill that process (`ps -eo pid,stat,args` shows T for stopped ones), then "
    "restart this engine."
)

GRACE_MIN_S = 10.0
"""Longer than the steps take that a device may have been given before a store."""
GRACE_FACTOR = 4
SLOW_BYTES_PER_S = 1e9
"""Where no store was measured."""


@dataclass(frozen=True, slots=True)
class Opened:
    """What a rank copies with.

    Attributes:
        share: which part of each store is this rank's.
        pool: where other engines keep their slots, too.
        storage: of the KV cache; it must stay for as long as something may be copied.
        idle_timing: None where there is no choice, or where slots may be used by other engines.
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
    """What is known of a rank before vLLM has allocated its KV cache.

    Attributes:
        rank: from 0 to the number of ranks of this engine.
        num_ranks_on_host: whose memory is compared with this machine's.
        is_child: vLLM has started this process for the worker.
        namespace_facts_of: from the geometry of blocks and the first of the ranks that hold the
            same; called only if there are tiers.
        open_tier: makes a tier, and what names its objects; None for one in a process of its own,
            where that can map the slots.
        hash_bytes: the most that a block's hash has.
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
        """Take the host memory, start the transfers, and return them if a way to copy is right.

        Where another process holds up a pool, the memory is this engine's alone.

        Args:
            kv_caches: by layer name, at least one; views of one storage.

        Raises:
            ConfigError: the layout is not supported, or the memory is not to be had.
        """
        try:
            return self._open(kv_caches)
        except StalledError as error:
            logger.warning(STALLED, self.rank, error)
        return replace(self, config=replace(self.config, sharing=None))._open(kv_caches)

    def _open(self, kv_caches: Mapping[str, torch.Tensor | list[torch.Tensor]]) -> Opened | None:
        storage, device = storage_of(kv_caches)
        geometry = make_geometry(
            specs.segments(self.kv_cache_config), self.kv_cache_config.num_blocks, storage.nbytes()
        )
        share, layout, host, pool = self._take_host_memory(geometry, device)
        with contextlib.ExitStack() as made:  # given back unless all goes well
            if pool is not None:
                made.callback(pool.close)
            is_bound = device.type == "cpu" and self.is_child
            with on_other_cores() if is_bound else contextlib.nullcontext():
                backend, rows = self.open_backend(storage, device, layout, host, self.config)
                has_table = share.count > 1 or pool is not None
                transfers, tiers = self._start(backend, host, layout, share, has_table=has_table)
            made.pop_all()
            made.callback(_close, transfers, pool)
            idle_timing, rate = None, None
            if self.config.self_test:
                # Other ranks of the share test in this memory too, each in slots of its own.
                slots = share.part(layout.slots_per_slab) if share.count > 1 else None
                test = SelfTest(transfers, backend, rows, host.tensor.numpy(), layout)
                with backend.undisturbed(), contextlib.ExitStack() as testing:
                    if pool is not None:
                        free = testing.enter_context(pool.tests(share.index))
                        slots = share.part(len(free))
                    if not test.run(slots=slots):
                        return None
                if pool is None and backend.choices:
                    idle_timing = IdleTiming(test)
                rate = test.store_bytes_per_s
            if pool is not None:
                pool.keep_after_death(grace_s(device.type, self.config, backend.slot_bytes, rate))
            made.pop_all()
        logger.info(
            "Rank %d keeps KV cache in %s of host memory%s: %d slots of %d bytes in %s, %d of them "
            "ready. Copies by %s.",
            self.rank,
            format_bytes(host.size_bytes),
            f", one copy for {share.count} ranks" if share.count > 1 else "",
            backend.num_slots,
            backend.slot_bytes,
            f"{num_ranges} ranges" if (num_ranges := len(geometry.segments)) > 1 else "one range",
            backend.num_usable_slots,
            ", ".join(path.value for path in backend.paths),
        )
        return Opened(transfers, backend, share, storage, tiers, pool, idle_timing)

    def _start(
        self,
        backend: ProvableBackend,
        host: HostMemory,
        layout: HostLayout,
        share: Share,
        *,
        has_table: bool,
    ) -> tuple[Transfers, TierRunner | None]:
        loop, verifier, tiers = self.make_loop(), None, None
        if self.config.verify_every:
            threads = DirectionThreads("safe-offload-verify")
            kept = checksum_table(host, layout) if has_table else None
            verifier = Verifier(backend, threads, self.config.verify_every, kept)
        if self.config.tiers:
            copy_rank = self.rank - self.rank % self.config.ranks_per_copy
            namespace_facts = self.namespace_facts_of(layout.geometry, copy_rank)
            slots: Slots = HostSlots(host, layout, backend)
            open_one = self.open_tier or open_tier
            file = find_file(host.tensor.data_ptr()) if self.open_tier is None else None
            if file is not None and file.start == host.tensor.data_ptr():
                slots, open_one = Slots(backend), opener(file, layout)
            tiers = TierRunner(
                self.rank,
                self._open_tiers(layout.geometry, namespace_facts, open_one),
                slots,
                loop,
                share=share,
                verifier=verifier,
                namespace_facts=namespace_facts,
            )
        transfers = Transfers(
            backend,
            loop,
            self.config.max_inflight_bytes,
            timeout_s=self.config.transfer_timeout_s,
            verifier=verifier,
            tiers=tiers,
        )
        return transfers, tiers

    def _open_tiers(
        self, geometry: Geometry, namespace_facts: NamespaceFacts, open_one: OpenTier
    ) -> list[GuardedTier]:
        """Make the tiers, each with a namespace that follows from all that its bytes mean."""
        guarded_tiers = []
        for config in self.config.tiers:
            facts = namespace_facts.facts_of(config)
            of_rank = config.of_rank(self.config.world_size, self.config.tenants or "")
            tier, namespace_of = open_one(of_rank, geometry.slot_bytes, facts)
            rate = config.write_bytes_per_s
            guarded = GuardedTier(
                tier,
                config,
                namespace_of,
                slot_bytes=geometry.slot_bytes,
                write_bytes_per_s=rate and rate / self.config.world_size,
            )
            guarded_tiers.append(guarded)
            limit = config.limit_bytes
            logger.info(
                "Tier %d of rank %d is %s%s: %s.",
                len(guarded_tiers),
                self.rank,
                tier.label,
                f", in process {tier.process.pid}" if isinstance(tier, ProcessTier) else "",
                "no capacity limit" if limit is None else f"at most {format_bytes(limit)}",
            )
        return guarded_tiers

    def _take_host_memory(
        self, geometry: Geometry, device: torch.device
    ) -> tuple[Share, HostLayout, HostMemory, PoolMemory | None]:
        """Share a memory with other engines, or ranks that hold the same, or take one alone."""
        config, share = self.config, Share.of_rank(self.rank, self.config.ranks_per_copy)
        if config.sharing is not None and (pool := self._open_pool(geometry, device, share)):
            layout = _lay_out(geometry, device, config, pool.num_slots)
            return share, layout, pool.host, pool
        if share.count > 1:
            layout = _lay_out(geometry, device, config)
            check = functools.partial(self._check_host_bytes, share, layout)
            try:
                secret = secret_of(self.rank - share.index)
                return share, layout, share_memory(share, layout, secret, check), None
            except SharingError as error:
                # Of the other ranks once is enough; each of them has a reason of its own.
                logger.log(logging.INFO if share.index else logging.WARNING, NOT_SHARED, error)
                config, share = dataclasses.replace(config, ranks_per_copy=1), ALONE
        layout = _lay_out(geometry, device, config)
        self._check_host_bytes(share, layout)
        if config.tiers and self.open_tier is None:
            with contextlib.suppress(SharingError):  # then tiers are in this process
                return share, layout, HostMemory(map_alone(layout.size_bytes)), None
        return share, layout, HostMemory.allocate(layout.size_bytes), None

    def _open_pool(
        self, geometry: Geometry, device: torch.device, share: Share
    ) -> PoolMemory | None:
        first = self.rank - share.index
        has_checksums = f"{bool(self.config.verify_every)}"  # all who store note them, or none
        more = {
            "device": device.type,
            "ranks_per_copy": f"{share.count}",
            "has_checksums": has_checksums,
        }
        facts = self.namespace_facts_of(geometry, first)
        name, doubts = name_here(facts, more)
        if doubts:
            logger.warning(ALONE_HERE, self.rank, " and ".join(doubts))
            return None

        def check(size_bytes: int) -> None:
            check_host_bytes(
                self.config,
                bytes_per_rank=size_bytes,
                num_ranks_on_host=1,  # whoever makes something is alone with it
                available_bytes=available_host_bytes(),
            )

        rows = [segment.length_bytes for segment in geometry.segments]
        return open_pool(
            Wanted(
                name=name,
                about=facts.facts.get("model", ""),
                rank=first,
                num_slots=self.config.num_slots_of(geometry.slot_bytes),
                size_of=lambda n: bytes_with_checksums(_lay_out(geometry, device, self.config, n)),
                terms=hashlib.sha256(repr(rows).encode()).digest(),
                hash_bytes=self.hash_bytes,
                check=check,
            )
        )

    def _check_host_bytes(self, share: Share, layout: HostLayout) -> None:
        check_host_bytes(
            self.config,
            # What several ranks share is there once.
            bytes_per_rank=layout.size_bytes // share.count,
            num_ranks_on_host=max(self.num_ranks_on_host, share.count),
            available_bytes=available_host_bytes(),
        )


def _close(transfers: Transfers, pool: PoolMemory | None) -> None:
    """Give back what was made, but no memory that a copy may still touch."""
    if transfers.close() and pool is not None:
        pool.close()


def grace_s(
    device_type: str, config: OffloadConfig, slot_bytes: int, store_bytes_per_s: float | None
) -> float:
    """Return how long after this process has died its slots may still be written.

    Copies on the CPU are made by its threads, which end before it does. A device, or the network
    card of a tier, may have been given all stores that are not copied yet, each behind what the
    engine computes.
    """
    if device_type == "cpu" and not config.tiers:
        return 0.0
    size_bytes = max(config.store_bytes_max, slot_bytes)
    return max(GRACE_MIN_S, GRACE_FACTOR * size_bytes / (store_bytes_per_s or SLOW_BYTES_PER_S))


def storage_of(
    kv_caches: Mapping[str, torch.Tensor | list[torch.Tensor]],
) -> tuple[Any, torch.device]:
    """Return the one storage that all layers' caches are views of, and its device."""
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


def _lay_out(
    geometry: Geometry, device: torch.device, config: OffloadConfig, num_slots: int | None = None
) -> HostLayout:
    num_slots = num_slots or config.num_slots_of(geometry.slot_bytes)
    if device.type == "cpu":
        return HostLayout.in_one_slab(geometry, num_slots)
    return HostLayout.in_slabs(geometry, num_slots, SLAB_BYTES)
