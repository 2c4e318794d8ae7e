"""I6 and I7: a load begins behind all that may still use its blocks, and behind nothing else."""

import functools
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from safe_offload.protocol import StepPlan
from safe_offload.worker.copies.base import Copy, Direction
from tests.simulator.checkers.ledger import loads_in
from tests.simulator.checkers.taps import tap
from tests.simulator.engine_core import EngineCore
from tests.simulator.worker import Worker

Ids = tuple[tuple[int, ...], tuple[int, ...]]


class MarkChecker:
    """Compares what a load waits for with what the compute stream had been given at its step.

    When a plan is bound, vLLM has issued the steps before and zeroed the new blocks of this one,
    and not issued its forward, which does not touch the blocks of its loads.
    """

    def __init__(self, core: EngineCore) -> None:
        self._findings = core.findings
        for worker in core.workers:
            marks: dict[Ids, set[int]] = defaultdict(set)
            see_plan = functools.partial(self._see_plan, worker, marks)
            tap(worker.connector, "bind_connector_metadata", see_plan)
            see_issue = functools.partial(self._see_issue, worker.rank, marks)
            side: Any = worker.connector.side
            tap(side.opened.backend, "issue", see_issue)

    def _see_plan(
        self,
        worker: Worker,
        marks: dict[Ids, set[int]],
        original: Callable[[StepPlan], None],
        plan: StepPlan,
    ) -> None:
        for load in loads_in(plan):
            ids = tuple(map(int, load.block_ids)), tuple(map(int, load.slot_ids))
            marks[ids].add(worker.device.num_enqueued)
        original(plan)

    def _see_issue(
        self,
        rank: int,
        marks: dict[Ids, set[int]],
        original: Callable[[Copy, int | None], Any],
        copy: Copy,
        after: int | None,  # None without streams: earlier steps have ended
    ) -> Any:
        if copy.direction is Direction.LOAD and after is not None:
            due = marks[tuple(copy.block_ids.tolist()), tuple(copy.slot_ids.tolist())]
            if after < min(due):
                self._findings.add("I6", f"rank {rank}: a load may begin before earlier steps end")
            elif after > max(due):
                self._findings.add("I7", f"rank {rank}: a load waits for its own step's forward")
        return original(copy, after)
