"""The scheduler side of an engine that shares its host cache with others of the machine."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

from safe_offload.errors import SharingError
from safe_offload.node.pools import TABLE
from safe_offload.node.table import Table
from safe_offload.observe.counters import Count
from safe_offload.scheduler.feature import Answer, Feature
from safe_offload.scheduler.node.lots import NodeLots

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput

    from safe_offload.protocol import PoolFacts, StepReport
    from safe_offload.scheduler.cache.slots import SlotPool
    from safe_offload.scheduler.planner import Planner
    from safe_offload.scheduler.requests import RequestState

logger = logging.getLogger(f"vllm.{__name__}")

LOOK_S = 1.0
"""Between two searches for dead engines."""
STALLED_AFTER_S = 1.0
"""How long another process may block this engine's slots before a warning."""


class NodePool(Feature):
    """Uses host slots of a pool that other engines use, too. Bound: an entry for each rank."""

    def __init__(self, planner: Planner, slots: SlotPool) -> None:
        self._planner = planner
        self._counters, self._ranks = planner.counters, planner.ranks
        self._slots = slots
        self._lots: NodeLots | None = None  # until all ranks have reported the pool
        self._pools: dict[int, PoolFacts | None] = {}
        self._is_synced = False
        self._look_again_s = 0.0
        self._folder = ""
        self._num_damaged = 0
        self._stalled_since_s: float | None = None
        self._is_stalled = False  # and a warning was logged

    def on_new_request(self, state: RequestState) -> None:
        self._wake()

    def _wake(self) -> bool:
        return self._lots is None or self._lots.wake()

    def on_match(self, state: RequestState, num_computed_tokens: int, now_s: float) -> Answer:
        """Synchronize before a search.

        A request that arrives before the ranks have reported the pool waits: they report it in the
        first step, or never.
        """
        if self._planner.is_starting:
            return Answer.ASK_AGAIN
        if not self._wake():
            return Answer.NO_HIT
        if self._lots is not None:
            self._sync(self._lots)
        return Answer.SEARCH

    def on_step(self, output: SchedulerOutput, now_s: float) -> None:
        if self._lots is not None:
            self._step(self._lots, now_s)
        self._is_synced = False

    def _step(self, lots: NodeLots, now_s: float) -> None:
        self._report_damage(lots.table)
        is_awake = lots.wake()
        self._report_stall(now_s, is_awake=is_awake)
        if is_awake:
            self._sync(lots)
            lots.balance()
            if now_s >= self._look_again_s:
                self._look_again_s = now_s + LOOK_S
                if num_dead := lots.table.bury(now_s):
                    logger.info("%d engines of the shared host cache have ended.", num_dead)

    def on_step_planned(self) -> None:
        self._nap_if_idle()

    def _sync(self, lots: NodeLots) -> None:
        if not self._is_synced:
            self._is_synced = True
            lots.sync()

    def _report_damage(self, table: Table) -> None:
        """Count and log impossible entries; leave the pool if this engine has lost its place."""
        if table.num_damaged == self._num_damaged and not table.lost:
            return
        self._counters[Count.DAMAGED_ENTRIES] += table.num_damaged - self._num_damaged
        if not self._num_damaged:
            logger.error(
                "The table of the shared host cache %s is damaged: it has invalid entries, "
                "which are ignored and counted. Fix: stop all engines that use it, run "
                "`safe-offload cache rm node %s`, and check for memory errors.",
                self._folder,
                os.path.basename(self._folder),
            )
        self._num_damaged = table.num_damaged
        if table.lost:
            self._ranks.lose(
                0, f"the shared host cache {self._folder} cannot be used: {table.lost}"
            )

    def _report_stall(self, now_s: float, *, is_awake: bool) -> None:
        """Count and log that another process blocks this engine's slots, so that it recomputes."""
        if is_awake:
            if self._is_stalled:
                logger.info("The shared host cache %s can be used again.", self._folder)
            self._stalled_since_s, self._is_stalled = None, False
        elif self._stalled_since_s is None:
            self._stalled_since_s = now_s
        elif not self._is_stalled and now_s - self._stalled_since_s >= STALLED_AFTER_S:
            self._is_stalled = True
            self._counters[Count.POOL_STALLS] += 1
            logger.warning(
                "Another process blocks this engine's access to the shared host cache %s, so it "
                "recomputes. Fix: continue or kill that process; it may be suspended (`ps -eo "
                "pid,stat,args` shows T).",
                self._folder,
            )

    def on_report(self, report: StepReport) -> None:
        for facts in report.host_facts:
            if facts.rank not in self._pools:
                self._pools[facts.rank] = facts.pool
                self._attach()

    def on_settled(self) -> None:
        self._nap_if_idle()

    def _attach(self) -> None:
        if len(self._pools) < self._planner.options.num_ranks:
            return
        found = list(self._pools.values())
        pools = [pool for pool in found if pool is not None]
        if not pools:
            self._slots.use_source(None)
            return
        try:
            if len(pools) < len(found) or len({pool.place for pool in pools}) > 1:
                raise SharingError("its ranks found different pools")
            folder, pool_id = pools[0].place
            table = Table(os.path.join(folder, TABLE))
            if table.pool_id != pool_id:
                raise SharingError("it was removed while the engine started")
            table.join([pool.token for pool in pools], max(pool.grace_s for pool in pools))
        except (OSError, SharingError) as error:
            self._ranks.lose(
                0, f"the shared host cache {pools[0].place[0]} cannot be used: {error}"
            )
            return
        self._lots = NodeLots(self._slots, table, self._counters)
        self._slots.use_source(self._lots)
        self._folder = folder
        logger.info(
            "This engine is number %d of %d that share the host cache %s, which has %d slots.",
            table.engine,
            len(table.engines),
            folder,
            table.num_slots,
        )

    def gauges(self) -> Mapping[str, float]:
        lots = self._lots
        if lots is None:
            return {}
        return {"pool_engines": len(lots.table.engines), "own_slots": lots.num_own}

    def _nap_if_idle(self) -> None:
        planner = self._planner
        is_busy = planner.book.num_live or len(planner.leases) or planner.has_pending_push_work()
        if self._lots is not None and not is_busy:
            self._lots.table.nap()

    def on_reset(self, cause: str | None) -> None:
        """From now on nothing is shared with engines of the previous weights."""
        if self._lots is not None:
            logger.info(
                "The weights may have changed with the reset, so this engine and the others no "
                "longer share blocks in the host cache."
            )

    def has_work(self) -> bool:
        """Return whether changes of other engines are left to read."""
        return self._lots is not None and self._lots.is_behind

    def shutdown(self) -> None:
        if self._lots is not None:
            self._lots.table.close()
