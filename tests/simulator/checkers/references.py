"""I2 and I8: no reference on a GPU block is ours, and none of anything is left in the end."""

from collections import Counter
from collections.abc import Callable
from typing import Any

from tests.scheduler.features import tiers_of
from tests.simulator.checkers.ledger import Ledger
from tests.simulator.checkers.taps import tap
from tests.simulator.engine_core import EngineCore
from tests.simulator.findings import Finding
from tests.simulator.tiers import Task


class ReferenceChecker:
    """Counts the references that vLLM itself holds, and compares."""

    def __init__(self, core: EngineCore, ledger: Ledger) -> None:
        self._core = core
        self._ledger = ledger
        tap(core.connector, "request_finished_all_groups", self._see_finish)

    def _see_finish(self, original: Callable[..., Any], request: Any, blocks: Any) -> Any:
        before = self._counts()
        answer = original(request, blocks)
        changed = [i for i, count in enumerate(self._counts()) if count != before[i]]
        if answer[0]:
            raise Finding("I2", f"request_finished of {request.request_id} keeps its blocks")
        if changed:
            raise Finding(
                "I2", f"request_finished of {request.request_id} referenced blocks {changed}"
            )
        return answer

    def _counts(self) -> list[int]:
        return [block.ref_cnt for block in self._core.pool.blocks]

    def check(self) -> None:
        """Every GPU block has as many references as vLLM's own tables hold."""
        expected: Counter[int] = Counter()
        scheduler = self._core.scheduler
        for manager in scheduler.kv_cache_manager.coordinator.single_type_managers:
            for table in manager.req_to_blocks.values():
                expected.update(block.block_id for block in table)
        for _, blocks in getattr(scheduler, "deferred_frees", ()):
            expected.update(block.block_id for block in blocks)
        for block in self._core.pool.blocks:
            if not block.is_null and block.ref_cnt != expected[block.block_id]:
                raise Finding(
                    "I2",
                    f"block {block.block_id} has {block.ref_cnt} references, of which vLLM's "
                    f"tables hold {expected[block.block_id]}",
                )

    def check_drained(self) -> None:
        """Nothing is held."""
        core = self._core
        planner = core.connector.side
        found = planner.statistics()
        if core.pool.get_num_free_blocks() != core.shape.num_blocks - 1:
            raise Finding("I8", f"{core.pool.get_num_free_blocks()} GPU blocks are free")
        slots = planner.hits.slots
        directory = planner.hits.directory
        num_bad = len(self._ledger.bad_slots)
        num_parked = 0 if slots.source is None else len(slots.source.parked)  # which others read
        left = {
            "requests of vLLM's": len(core.scheduler.requests),
            "leases": found.leases,
            "slots with a reference": slots.num_leased + slots.num_retired - num_bad,
            "slots in use": slots.num_usable - slots.num_free - num_bad - num_parked,
            "slots that count as being stored": len(directory.being_stored),
            "blocks that count against the stores' bound": found.store_blocks,
            "stores in flight": found.stores,
            "loads in flight": found.loads,
            "requests that hold blocks for a load": found.holders,
            "live requests": found.requests,
            "transfers of the ranks": sum(
                len(worker.transfers.statistics().pending_ids) for worker in core.workers
            ),
            "copies": sum(len(worker.device.running) for worker in core.workers),
            "fetches and spills": len(list(self._ledger.open_tier_transfers())),
            "spills that no plan names": bool(core.stores and tiers_of(planner).spills.is_waiting),
            # A probe touches no slot, and goes on to its deadline when no request waits for it.
            "operations of tiers": sum(
                operation.task is not Task.PROBE
                for rank in core.tiers
                for operation in rank.running()
            ),
        }
        if planner.has_pending_push_work() or any(left.values()):
            what_is_left = ", ".join(f"{count} {what}" for what, count in left.items() if count)
            raise Finding("I8", f"left when all work has drained: {what_is_left or 'pending work'}")
