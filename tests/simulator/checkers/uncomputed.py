"""I6: what no step computes is found nowhere."""

from collections.abc import Callable
from typing import Any

from tests.simulator.checkers.taps import tap
from tests.simulator.engine_core import EngineCore
from tests.simulator.findings import Finding


class UncomputedChecker:
    """Sees what vLLM hashes for a request that it takes out of the same step again, by priority.

    A connector that is disabled leaves that alone: it stores nothing any more.
    """

    def __init__(self, core: EngineCore) -> None:
        self._core = core
        self._managers = core.scheduler.kv_cache_manager.coordinator.single_type_managers
        self._hashed: dict[str, list[tuple[Any, Any]]] = {}
        """Of each request of the step: blocks that were hashed for it, with their new hashes."""
        self._uncomputed: list[tuple[Any, Any]] = []
        if core.shape.is_priority:
            tap(core.scheduler, "schedule", self._see_schedule)
            tap(core.scheduler, "_preempt_request", self._see_preemption)
            tap(core.scheduler.kv_cache_manager, "allocate_slots", self._see_allocation)

    def _hashes_of(self, request: Any) -> list[tuple[Any, Any]]:
        """Of the blocks that hold a token which is not computed yet.

        A block whose last token is a draft that was right is computed before it is hashed.
        """
        num_computed = request.num_computed_tokens
        return [
            (block, block.block_hash)
            for manager in self._managers
            for block in manager.req_to_blocks.get(request.request_id, ())[
                num_computed // manager.block_size :
            ]
        ]

    def _see_allocation(
        self, original: Callable[..., Any], request: Any, *what: Any, **how: Any
    ) -> Any:
        before = {block.block_id: known for block, known in self._hashes_of(request)}
        blocks = original(request, *what, **how)
        if blocks is not None:
            self._hashed[request.request_id] = [
                (block, new)
                for block, new in self._hashes_of(request)
                if new is not None and new is not before.get(block.block_id)
            ]
        return blocks

    def _see_preemption(
        self, original: Callable[..., Any], request: Any, *what: Any, **how: Any
    ) -> None:
        self._uncomputed += self._hashed.pop(request.request_id, ())
        original(request, *what, **how)

    def _see_schedule(self, original: Callable[..., Any], *what: Any) -> Any:
        self._hashed.clear()
        self._uncomputed.clear()
        output = original(*what)
        if self._core.connector.side.statistics().is_disabled:
            return output
        for block, uncomputed in self._uncomputed:
            if block.block_hash is uncomputed:
                detail = f"block {block.block_id} can be found, and no step has computed it"
                raise Finding("I6", detail)
        return output
