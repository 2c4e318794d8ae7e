"""The common dependencies of the tiers' modules."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from safe_offload.config.tiers import TierConfig
    from safe_offload.observe.counters import Counters
    from safe_offload.scheduler.blocks import GpuBlocks
    from safe_offload.scheduler.cache.leases import LeaseBook
    from safe_offload.scheduler.loads.cost import Costs
    from safe_offload.scheduler.loads.hits import HostHits
    from safe_offload.scheduler.pending import Ledger, Load
    from safe_offload.scheduler.requests import RequestBook


@dataclass(frozen=True, slots=True)
class TierContext:
    """The rest of the scheduler side as tiers see it, and their settings, the nearest first."""

    hits: HostHits
    gpu: GpuBlocks
    book: RequestBook
    leases: LeaseBook
    loads: Ledger[Load]
    transfer_ids: Iterator[int]
    costs: Costs
    counters: Counters
    configs: tuple[TierConfig, ...]
    num_ranks: int
    slot_bytes: int
