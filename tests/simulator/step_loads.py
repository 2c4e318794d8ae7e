"""Another connector beside ours that loads in the step itself, as LMCache does, and may fail.

What it brings is there when attention reads it, so the forward of that step is taken to write it.
With the output of the step it names the blocks that it could not load. Under MultiConnector ours is
asked all the same, and then told that vLLM wants nothing of it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tests.simulator.checkers.taps import tap

if TYPE_CHECKING:
    from tests.simulator.checkers import Checkers
    from tests.simulator.engine_core import EngineCore


class StepLoads:
    """Brings the prompts of requests of which the GPU has nothing, once for each `expect`."""

    def __init__(self, core: EngineCore, checkers: Checkers) -> None:
        self._core = core
        self._contents = checkers.contents
        self._num_expected = self._num_plans = 0
        self._offered: dict[str, int] = {}  # tokens, by request
        self._loading: dict[str, set[int]] = {}  # blocks, by requests of the step to be planned
        self._bad: dict[int, set[int]] = {}  # blocks, by the steps whose output names them
        tap(core.connector, "get_num_new_matched_tokens", self._see_match)
        tap(core.connector, "update_state_after_alloc", self._see_alloc)
        tap(core.connector, "build_connector_meta", self._see_plan)
        core.mutate_outputs.append(self._name_bad)

    def expect(self) -> None:
        """Bring the next prompt that can be brought."""
        self._num_expected += 1

    def stop(self) -> None:
        """Bring nothing more."""
        self._num_expected = 0

    def _see_match(self, original: Callable[..., Any], request: Any, num_computed: int) -> Any:
        answer = original(request, num_computed)
        size = self._core.shape.block_words
        count = (request.num_tokens - 1) // size * size
        self._offered.pop(request.request_id, None)
        if not self._num_expected or num_computed or count <= 0 or answer[0] is None:
            return answer
        self._offered[request.request_id] = count
        return count, False

    def _see_alloc(
        self, original: Callable[..., Any], request: Any, blocks: Any, num_tokens: int
    ) -> None:
        if not self._offered.pop(request.request_id, 0):
            original(request, blocks, num_tokens)
            return
        original(request, blocks, 0)
        if num_tokens:
            self._num_expected -= 1
            self._core.runner.load_in_step(request.request_id, num_tokens)
            table = blocks.blocks[0][: num_tokens // self._core.shape.block_words]
            self._loading[request.request_id] = {block.block_id for block in table}

    def _see_plan(self, original: Callable[[Any], Any], scheduler_output: Any) -> Any:
        for request_id, block_ids in self._loading.items():
            if self._core.chance.happens(0.75, "bad load", request_id, self._num_plans):
                self._core.injected["spoil"] += 1
                self._bad.setdefault(self._num_plans, set()).update(block_ids)
                self._contents.spoil(block_ids)
        self._loading.clear()
        self._num_plans += 1
        return original(scheduler_output)

    def _name_bad(self, number: int, outputs: list[Any]) -> None:
        outputs[0].invalid_block_ids |= self._bad.pop(number, set())
