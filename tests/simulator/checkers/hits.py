"""I1: a reported hit stays as it is until its load has landed; I7: it is not offered for ever."""

from collections.abc import Callable, Iterable
from typing import Any

from safe_offload.protocol import StepPlan
from safe_offload.scheduler.loads.hits import Hit
from tests.simulator.checkers.ledger import Ledger, loads_in, writes_of
from tests.simulator.checkers.taps import RESETS, tap
from tests.simulator.engine_core import EngineCore
from tests.simulator.findings import Finding

FAILED_LOADS_MAX = 3
"""A request is offered no hit when this many of its loads have failed."""


class HitChecker:
    """Guards the slots of every hit that was reported, and of every load that is not over."""

    def __init__(self, core: EngineCore, ledger: Ledger) -> None:
        self._core = core
        self._ledger = ledger
        self._found: Hit | None = None
        self._last_found: dict[str, set[int]] = {}
        """By request id: what was found when the host was searched for it last."""
        self.offered: dict[str, tuple[int, set[int]]] = {}
        """By request id: tokens and slots of the hit that was reported last."""
        self._failed: set[int] = set()
        """Slots whose load failed, and that were not stored anew."""
        connector = core.connector
        tap(connector.side.hits, "search", self._see_search)
        tap(connector.side.hits, "grown", self._see_growth)
        tap(connector, "get_num_new_matched_tokens", self._see_match)
        tap(connector, "update_state_after_alloc", self._see_allocation)
        tap(connector, "request_finished_all_groups", self._see_finish)
        for name in RESETS:
            tap(connector, name, self._see_reset)
        ledger.on_plan.append(self._see_plan)
        if core.node is not None:
            core.node.watch(core, self._see_others_store)

    def _see_search(
        self, original: Callable[..., tuple[Hit | None, int]], *args: Any
    ) -> tuple[Hit | None, int]:
        self._found, parted_at = original(*args)
        return self._found, parted_at

    def _see_growth(self, original: Callable[..., Any], *args: Any) -> Any:
        grown = original(*args)
        if grown is not None:
            self._found = grown[0]
        return grown

    def _see_match(
        self, original: Callable[..., Any], request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        self._found = None
        self.offered.pop(request.request_id, None)
        num_tokens, is_async = original(request, num_computed_tokens)
        if is_async != bool(num_tokens) and (is_async or not self._core.config.load_in_step):
            raise Finding("I1", f"match answers {(num_tokens, is_async)}")
        if num_tokens is None:  # see `WaitChecker`
            return None, False
        if not 0 <= num_tokens < request.num_tokens - num_computed_tokens:
            raise Finding("I1", f"a hit of {num_tokens} tokens behind {num_computed_tokens}")
        if self._found is not None:
            self._last_found[request.request_id] = set(self._found.slots())
        if num_tokens:
            slots = self._last_found.get(request.request_id, set())
            self._learn_failures()
            if slots & self._failed:
                raise Finding("I7", f"slots {slots & self._failed} failed and are offered again")
            num_failed = sum(load.has_failed for load in self._ledger.loads_of(request))
            if num_failed >= FAILED_LOADS_MAX:
                raise Finding("I7", f"a hit for {request.request_id}: {num_failed} loads failed")
            self.offered[request.request_id] = (num_tokens, slots)
        return num_tokens, is_async

    def _see_others_store(self, slots: Iterable[int]) -> None:
        self._learn_failures()  # of what was there before
        self._failed.difference_update(slots)

    def _learn_failures(self) -> None:
        for record in self._ledger.take_over_loads():
            if record.has_failed:
                self._failed.update(record.transfer.slot_ids)

    def _see_allocation(
        self, original: Callable[..., None], request: Any, blocks: Any, num_tokens: int
    ) -> None:
        offered, _ = self.offered.pop(request.request_id, (0, set()))
        if num_tokens > offered:
            raise Finding("I1", f"expected {num_tokens} hit tokens, got {offered}")
        original(request, blocks, num_tokens)

    def _see_finish(self, original: Callable[..., Any], request: Any, blocks: Any) -> Any:
        self.offered.pop(request.request_id, None)
        return original(request, blocks)

    def _see_reset(self, original: Callable[..., Any], *args: Any) -> Any:
        self.offered.clear()
        return original(*args)

    def _see_plan(self, plan: StepPlan) -> None:
        self._learn_failures()
        guarded = {
            slot: f"a hit of {name}" for name, (_, ids) in self.offered.items() for slot in ids
        }
        for record in self._ledger.open_loads():
            name = f"load {record.transfer.transfer_id}"
            guarded.update((slot, name) for slot in record.transfer.slot_ids)
        for transfer in loads_in(plan):
            guarded.update((slot, f"load {transfer.transfer_id}") for slot in transfer.slot_ids)
        for name, slots in writes_of(plan):
            self._failed.difference_update(slots)
            for slot in slots:
                if slot in guarded:
                    raise Finding(
                        "I1", f"{name} writes slot {slot}, which belongs to {guarded[slot]}"
                    )
