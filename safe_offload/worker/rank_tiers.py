"""The tiers of a rank, each in its own process if that can map the slots."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from safe_offload.config.options import OffloadConfig
from safe_offload.config.units import format_bytes
from safe_offload.layout import HostLayout
from safe_offload.mapped_files import find_file
from safe_offload.tiers.base import Buffers
from safe_offload.tiers.choice import OpenTier, open_tier
from safe_offload.tiers.guarded_tier import GuardedTier
from safe_offload.tiers.namespace.namespace_facts import NamespaceFacts
from safe_offload.tiers.process.process_tier import ProcessTier, opener
from safe_offload.worker.rank_memory import RankMemory

logger = logging.getLogger(f"vllm.{__name__}")

SlotOf = Callable[[int], Any]
"""Returns a slot as tiers take it: its number if they map the memory, otherwise buffers."""


def open_tiers(
    config: OffloadConfig,
    rank: int,
    memory: RankMemory,
    facts: NamespaceFacts,
    open_one: OpenTier | None,
) -> tuple[list[GuardedTier], SlotOf]:
    """Open the tiers, each with a namespace from all facts that determine its bytes.

    `open_one` opens a tier in this process; None prefers processes.
    """
    slot_of: SlotOf = buffers_of(memory.host.tensor.numpy().data, memory.layout)
    if open_one is None:
        open_one = open_tier
        start = memory.host.tensor.data_ptr()
        file = find_file(start)
        if file is not None and file.start == start:
            slot_of, open_one = int, opener(file, memory.layout)
    guarded_tiers = []
    slot_bytes = memory.layout.geometry.slot_bytes
    for tier_config in config.tiers:
        of_rank = tier_config.of_rank(config.world_size, config.tenants or "")
        tier, namespace_of = open_one(of_rank, slot_bytes, facts.facts_of(tier_config))
        rate, limit = tier_config.write_bytes_per_s, tier_config.limit_bytes
        guarded_tiers.append(
            GuardedTier(
                tier,
                tier_config,
                namespace_of,
                slot_bytes=slot_bytes,
                write_bytes_per_s=rate and rate / config.world_size,
            )
        )
        logger.info(
            "Tier %d of rank %d is %s%s: %s.",
            len(guarded_tiers),
            rank,
            tier.label,
            f", in process {tier.process.pid}" if isinstance(tier, ProcessTier) else "",
            "no capacity limit" if limit is None else f"at most {format_bytes(limit)}",
        )
    return guarded_tiers, slot_of


def buffers_of(memory: memoryview, layout: HostLayout) -> SlotOf:
    """Return the function from a slot of host memory to its buffers."""

    def slot_of(slot_id: int) -> Buffers:
        return tuple(memory[at : at + length] for at, length in layout.ranges_of(slot_id))

    return slot_of
