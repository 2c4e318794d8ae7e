"""I4: finishing twice has the answer and the effect of finishing once."""

import dataclasses
from collections.abc import Callable
from typing import Any

from tests.simulator.checkers.taps import tap
from tests.simulator.engine_core import EngineCore
from tests.simulator.findings import Finding


class FinishChecker:
    """Finishes every second request twice."""

    def __init__(self, core: EngineCore) -> None:
        self._core = core
        self._num_finished = 0
        tap(core.connector, "request_finished_all_groups", self._see_finish)

    def _see_finish(self, original: Callable[..., Any], request: Any, blocks: Any) -> Any:
        asks_for_pin = "pin_s" in (request.kv_transfer_params or ())
        answer = original(request, blocks)
        if answer[0] or not (asks_for_pin or answer[1] is None):
            raise Finding("I4", f"request_finished of {request.request_id} answers {answer}")
        self._num_finished += 1
        if self._core.chance.happens(0.5, "finish twice", self._num_finished):
            before = self._state()
            again = original(request, blocks)
            if (again, self._state()) != (answer, before):
                raise Finding(
                    "I4",
                    f"request_finished of {request.request_id}, called again, answers {again} "
                    f"and turns {before} into {self._state()}",
                )
        return answer

    def _state(self) -> dict[str, int]:
        planner = self._core.connector.side
        lookups = planner.tiers.lookups.num_active if planner.tiers is not None else 0
        state = {**planner.gauges(), **dataclasses.asdict(planner.statistics())}
        return {**state, "lookups": lookups}
