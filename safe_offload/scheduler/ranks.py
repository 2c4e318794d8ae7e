"""The state of the ranks, from their reports: slots, failures, corrupted memory."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from safe_offload.observe.counters import Count, Counters, is_milestone
from safe_offload.protocol import BadSlots, Capacity, FailureReason, HostFacts, MemoryKind, Outcome

if TYPE_CHECKING:
    from safe_offload.scheduler.cache.slots import SlotPool

logger = logging.getLogger(f"vllm.{__name__}")

FAILED_IN_A_ROW_MAX = 100
"""Consecutive failed copies after which a rank counts as lost."""


class Ranks:
    """The worker processes, as known from their reports.

    Bound: an entry for each rank, and for each failure reason.
    """

    def __init__(self, num_ranks: int, slots: SlotPool, counters: Counters) -> None:
        self._num_ranks = num_ranks
        self._slots = slots
        self._counters = counters
        self.has_dead = False  # a rank will never copy again
        # Labels of `observe.metrics.INFO` that depend on the ranks; a new object after each change.
        self.host_labels: Mapping[str, str] = merge(())
        self._facts: dict[int, HostFacts] = {}
        self._is_ready = False
        self._capacities: dict[int, int] = {}
        self._num_failed: Counter[FailureReason] = Counter()
        # Consecutive failed copies, by rank; a success removes the entry.
        self.num_failed_in_a_row: Counter[int] = Counter()

    def add_capacity(self, capacity: Capacity) -> None:
        """Open the slots that every rank has."""
        self._capacities[capacity.rank] = capacity.num_slots
        if len(self._capacities) == self._num_ranks:
            self._slots.open(min(self._capacities.values()))

    def add_facts(self, facts: HostFacts) -> None:
        """Record the memory and copy paths of a rank; log once when the memory of all is ready.

        Ranks that share memory store one part each, so they must agree on who shares.
        """
        self._facts[facts.rank] = facts
        known = list(self._facts.values())
        for other in known:
            few, many = sorted((facts.num_sharing, other.num_sharing))
            if few != many and facts.rank // many == other.rank // many:
                why = f"it reports {facts.num_sharing} consecutive ranks sharing its host memory"
                self.lose(facts.rank, f"{why}; rank {other.rank} reports {other.num_sharing}")
        if len(known) < self._num_ranks:
            return
        labels = merge(known)
        if labels != self.host_labels:
            self.host_labels = labels
        if self._is_ready or any(f.memory.kind is MemoryKind.LOCKING for f in known):
            return
        self._is_ready = True
        logger.info(
            "Host memory is ready: %d slots per rank (%d). It is %s, huge pages %s, NUMA node %s. "
            "Copies by %s.",
            self._slots.num_usable,
            self._num_ranks,
            labels["memory"],
            labels["huge_pages"],
            labels["numa_node"],
            labels["copies_by"],
        )

    @property
    def load_block_s(self) -> float:
        """Return what a load takes for each block on the slowest rank; 0 if not all timed one."""
        seconds = [facts.load_block_s for facts in self._facts.values()]
        return max(seconds) if len(seconds) == self._num_ranks and all(seconds) else 0.0

    def retire(self, bad: BadSlots) -> None:
        """Retire slots whose memory has changed."""
        retired = self._slots.retire(bad.slot_ids)
        self._slots.forget(retired)
        if retired:
            self._counters[Count.CHECKSUM_MISMATCHES] += len(retired)
            logger.error(
                "Host memory of rank %d was corrupted in slots %s. Their tokens are recomputed, "
                "and the slots are retired. The usual cause is a memory error: check the machine "
                "(dmesg, ECC counts of edac-util or ipmitool sel), and replace the module if it "
                "recurs.",
                bad.rank,
                sorted(retired),
            )

    def watch(self, outcome: Outcome, kind: str) -> None:
        """Log a failure; give up on a rank that will never copy again."""
        rank, failure = outcome.rank, outcome.failure
        if failure is None:
            del self.num_failed_in_a_row[rank]
            return
        if self._is_worth_a_line(failure):
            logger.warning(
                "%s %d failed on rank %d: %s. Its tokens are recomputed when needed.",
                kind,
                outcome.transfer_id,
                rank,
                failure.value,
            )
        if failure is FailureReason.COPY_FAILED:
            self.num_failed_in_a_row[rank] += 1
        num_failed = self.num_failed_in_a_row[rank]
        if failure is FailureReason.NOT_RUNNING:
            self.lose(rank, "its transfer loop has ended")
        elif num_failed >= FAILED_IN_A_ROW_MAX:
            self.lose(rank, f"{num_failed} transfers in a row failed")

    def lose(self, rank: int, why: str) -> None:
        """Give up on a rank that will never copy again, and log it once."""
        if self.has_dead:
            return
        self.has_dead = True
        logger.error(
            "Rank %d can no longer copy: %s. Offloading is off until the server is restarted; "
            "vLLM serves without host hits. The log of that rank gives the cause.",
            rank,
            why,
        )

    def _is_worth_a_line(self, reason: FailureReason) -> bool:
        self._num_failed[reason] += 1
        return is_milestone(self._num_failed[reason])


def merge(facts: Sequence[HostFacts]) -> dict[str, str]:
    """Return labels common to all ranks, "mixed" or "unknown" otherwise, and all NUMA nodes."""
    memories = [one.memory for one in facts]
    nodes = sorted({node for memory in memories for node in memory.numa_nodes})
    return {
        "memory": _same(memory.kind.value for memory in memories),
        "huge_pages": _same(memory.huge_pages for memory in memories),
        "numa_node": ",".join(map(str, nodes)) or "unknown",
        "copies_by": _same(", ".join(one.copy_paths) for one in facts),
        "ranks_per_copy": _same(str(one.num_sharing) for one in facts),
    }


def _same(values: Iterable[str]) -> str:
    found = set(values) or {"unknown"}
    return found.pop() if len(found) == 1 else "mixed"
