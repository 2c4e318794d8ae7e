"""The scheduler side of an engine that shares its host cache with others of the machine."""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING, Any

from safe_offload.errors import SharingError
from safe_offload.node.pools import TABLE
from safe_offload.node.table import Table
from safe_offload.observe.counters import Count
from safe_offload.protocol import PoolFacts, StepReport
from safe_offload.scheduler.node.slots import NodeSlots
from safe_offload.scheduler.planner import Planner
from safe_offload.scheduler.stores.stores import Stores
from safe_offload.scheduler.tiers.private import PrivateBlocks

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

    from safe_offload.protocol import StepPlan
    from safe_offload.scheduler.pending import Store
    from safe_offload.scheduler.requests import RequestState

logger = logging.getLogger(f"vllm.{__name__}")

LOOK_S = 1.0
"""Between two looks for engines that have died."""
STALLED_AFTER_S = 1.0
"""So long another process keeps this engine from its slots before that is said."""
TRIES_MAX = 8
"""Hits that others overwrite while they are leased, one after the other, before there is none."""


class NodeStores(Stores):
    """Stores whose blocks other engines find too."""

    def settle(self, store: Store) -> None:
        slots = [slot for part in store.parts for slot in part.lease.slots]
        super().settle(store)
        assert isinstance(self._hits.slots, NodeSlots)
        self._hits.slots.publish(slots)


class NodePlanner(Planner):
    """A planner whose host slots are of a pool that other engines use, too.

    Its state beside that of `Planner`: what the ranks have said of their memory, blocks that only
    this engine may find, whether it has looked at the table in this step, when it looks for dead
    engines again, and since when another process has kept it from its slots.

    Bound: an entry for each rank.
    """

    make_stores = NodeStores

    def __init__(self, *what: Any, **how: Any) -> None:
        super().__init__(*what, **how)
        assert isinstance(self.hits.slots, NodeSlots)
        self.slots = self.hits.slots
        self.private = PrivateBlocks(
            self.hits, self.gpu, tells_media_ids=self.options.tells_media_ids
        )
        self.slots.keep_private(lambda block_hash: block_hash in self.private.hashes)
        self._pools: dict[int, PoolFacts | None] = {}
        self._is_synced = False
        self._look_again_s = 0.0
        self._folder = ""
        self._num_damaged = 0
        self._stalled_since_s: float | None = None
        self._is_stalled = False  # and that was said

    def on_new_request(self, request: Request) -> RequestState:
        self.slots.wake()
        is_new = self.book.find(request) is None
        state = super().on_new_request(request)
        if is_new:
            self.private.see(request)
        return state

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int, now_s: float
    ) -> int | None:
        """See `Planner`; what others overwrite before it is leased is no hit.

        A request that comes before the ranks have told where the pool is waits for that: they do so
        in the first step, or not at all.
        """
        if self._start_steps_left and not self._is_disabled:
            return None
        if not self.slots.wake():
            return 0
        self._sync()
        for _ in range(TRIES_MAX):
            num_lost = self.slots.num_lost
            found = super().get_num_new_matched_tokens(request, num_computed_tokens, now_s)
            if num_lost == self.slots.num_lost:
                return found
            self.loads.drop_hit(self.on_new_request(request))
        return 0

    def build_connector_meta(self, scheduler_output: SchedulerOutput, now_s: float) -> StepPlan:
        slots = self.slots
        self._say_what_is_damaged()
        is_awake = slots.wake()
        self._say_if_stalled(now_s, is_awake=is_awake)
        if is_awake and slots.table is not None:
            self._sync()
            slots.balance()
            if now_s >= self._look_again_s:
                self._look_again_s = now_s + LOOK_S
                if num_dead := slots.table.bury(now_s):
                    logger.info("%d engines of the shared host cache have ended.", num_dead)
        if self.private.noted:
            self.private.note()
        self._is_synced = False
        plan = super().build_connector_meta(scheduler_output, now_s)
        self._nap_if_idle()
        return plan

    def _sync(self) -> None:
        """Look at what others have changed, once in a step, however many requests ask."""
        if not self._is_synced:
            self._is_synced = True
            self.slots.sync()

    def _say_what_is_damaged(self) -> None:
        """Count and log what the table has that cannot be; leave the pool if that is our place."""
        table = self.slots.table
        if table is None or (table.num_damaged == self._num_damaged and not table.lost):
            return
        self._counters[Count.DAMAGED_ENTRIES] += table.num_damaged - self._num_damaged
        if not self._num_damaged:
            logger.error(
                "The table of the shared host cache %s is damaged: an entry is impossible. "
                "Invalid entries are ignored and counted. Fix: stop all engines that use it, run "
                "`safe-offload cache rm node %s`, and check for memory errors.",
                self._folder,
                os.path.basename(self._folder),
            )
        self._num_damaged = table.num_damaged
        if table.lost:
            self._ranks.lose(
                0, f"the shared host cache {self._folder} cannot be used: {table.lost}"
            )
            self._stop()

    def _say_if_stalled(self, now_s: float, *, is_awake: bool) -> None:
        """Count and log that another process keeps this engine from its slots: it computes."""
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
                "recomputes. Fix: continue or kill that process; it may have been stopped (`ps "
                "-eo pid,stat,args` shows T).",
                self._folder,
            )

    def update_connector_output(self, output: KVConnectorOutput) -> None:
        report = output.kv_connector_worker_meta
        if isinstance(report, StepReport):
            for facts in report.host_facts:
                if facts.rank not in self._pools:
                    self._pools[facts.rank] = facts.pool
                    self._attach()
        super().update_connector_output(output)
        self._nap_if_idle()

    def _attach(self) -> None:
        """Join the pool when all ranks have told where it is."""
        if len(self._pools) < self.options.num_ranks:
            return
        found = list(self._pools.values())
        pools = [pool for pool in found if pool is not None]
        if not pools:
            self.slots.stand_alone()
            return
        try:
            if len(pools) < len(found) or len({pool.place for pool in pools}) > 1:
                raise SharingError("its ranks found different pools")
            folder, pool_id = pools[0].place
            table = Table(os.path.join(folder, TABLE))
            if table.pool_id != pool_id:
                raise SharingError("it was removed while the engine started")
            table.join([pool.token for pool in pools])
        except (OSError, SharingError) as error:
            self._ranks.lose(
                0, f"the shared host cache {pools[0].place[0]} cannot be used: {error}"
            )
            return
        self.slots.attach(table)
        self._folder = folder
        logger.info(
            "This engine is number %d of %d that share the host cache %s, which has %d slots.",
            table.engine,
            len(table.engines),
            folder,
            table.num_slots,
        )

    def gauges(self) -> dict[str, float]:
        gauges, table = super().gauges(), self.slots.table
        if table is not None:
            gauges |= {"pool_engines": len(table.engines), "own_slots": self.slots.num_own}
        return gauges

    def _nap_if_idle(self) -> None:
        if not (self.book.num_live or len(self.leases) or self.has_pending_push_work()):
            self.slots.nap()

    def _end(self, state: RequestState) -> None:
        super()._end(state)
        self.private.end(state.request)

    def reset_cache(self, cause: str | None = None) -> None:
        """See `Planner`; from now on nothing is shared with engines of the weights of before."""
        self.slots.wake()
        super().reset_cache(cause)
        if self.slots.table is not None:
            logger.info(
                "The weights may have changed with the reset, so this engine and the others no "
                "longer share blocks in the host cache."
            )

    def has_pending_push_work(self) -> bool:
        """See `Planner`; or it has not looked at all yet that others have stored."""
        return self.slots.is_behind or super().has_pending_push_work()

    def shutdown(self) -> None:
        """See `SchedulerSide`."""
        if self.slots.table is not None:
            self.slots.table.close()
