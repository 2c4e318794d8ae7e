"""The host memory of a rank: shared with other engines, with other ranks, or its own."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from safe_offload.config.options import OffloadConfig
from safe_offload.errors import SharingError
from safe_offload.layout import Geometry, HostLayout
from safe_offload.node.pools import Wanted
from safe_offload.tiers.namespace.namespace_facts import NamespaceFacts
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


@dataclass(frozen=True, slots=True)
class RankMemory:
    """The allocated host memory of a rank, and its share of stores; `pool` if engines share it."""

    share: Share
    layout: HostLayout
    host: HostMemory
    pool: PoolMemory | None = None

    @property
    def checksums(self) -> npt.NDArray[np.uint64] | None:
        """Return the checksums of all slots, if others store in this memory, too."""
        is_shared = self.share.count > 1 or self.pool is not None
        return checksum_table(self.host, self.layout) if is_shared else None


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """The choice of a rank's memory; see `Opening`.

    `device_type` is that of the KV cache, as in torch. `namespace_facts_of` is called only to share
    a pool. `for_processes`: processes of tiers map the memory, if the system allows it.
    """

    config: OffloadConfig
    rank: int
    num_ranks_on_host: int
    geometry: Geometry
    device_type: str
    namespace_facts_of: Callable[[Geometry, int], NamespaceFacts]
    hash_bytes: int
    for_processes: bool

    def take(self) -> RankMemory:
        """Allocate the memory.

        ConfigError: it cannot be allocated. StalledError: another process blocks the pool.
        """
        share = Share.of_rank(self.rank, self.config.ranks_per_copy)
        if self.config.sharing is not None and (pool := self._open_pool(share)):
            return RankMemory(share, self._lay_out(pool.num_slots), pool.host, pool)
        if share.count > 1:
            try:
                return self._share_with_ranks(share)
            except SharingError as error:
                # Of the other ranks once is enough; each of them has a reason of its own.
                logger.log(logging.INFO if share.index else logging.WARNING, NOT_SHARED, error)
        return replace(self, config=replace(self.config, ranks_per_copy=1))._take_alone()

    def _share_with_ranks(self, share: Share) -> RankMemory:
        layout = self._lay_out()
        check = functools.partial(self._check_host_bytes, share, layout)
        host = share_memory(share, layout, secret_of(self.rank - share.index), check)
        return RankMemory(share, layout, host)

    def _take_alone(self) -> RankMemory:
        share, layout = ALONE, self._lay_out()
        self._check_host_bytes(share, layout)
        if self.for_processes:
            with contextlib.suppress(SharingError):  # then tiers are in this process
                return RankMemory(share, layout, HostMemory(map_alone(layout.size_bytes)))
        return RankMemory(share, layout, HostMemory.allocate(layout.size_bytes))

    def _open_pool(self, share: Share) -> PoolMemory | None:
        first = self.rank - share.index
        has_checksums = f"{bool(self.config.verify_every)}"  # all engines record them, or none
        more = {
            "device": self.device_type,
            "ranks_per_copy": f"{share.count}",
            "has_checksums": has_checksums,
        }
        facts = self.namespace_facts_of(self.geometry, first)
        name, doubts = facts.name_here(more)
        if doubts:
            logger.warning(ALONE_HERE, self.rank, " and ".join(doubts))
            return None

        def check(size_bytes: int) -> None:
            check_host_bytes(
                self.config,
                bytes_per_rank=size_bytes,
                num_ranks_on_host=1,  # the other engines only map it
                available_bytes=available_host_bytes(),
            )

        rows = [segment.length_bytes for segment in self.geometry.segments]
        return open_pool(
            Wanted(
                name=name,
                about=facts.facts.get("model", ""),
                rank=first,
                num_slots=self.config.num_slots_of(self.geometry.slot_bytes),
                size_of=lambda n: bytes_with_checksums(self._lay_out(n)),
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

    def _lay_out(self, num_slots: int | None = None) -> HostLayout:
        num_slots = num_slots or self.config.num_slots_of(self.geometry.slot_bytes)
        if self.device_type == "cpu":
            return HostLayout.in_one_slab(self.geometry, num_slots)
        return HostLayout.in_slabs(self.geometry, num_slots, SLAB_BYTES)
