"""I7: a request waits for another's load only while that load brings what it lacks, and not long.

It may wait for any load if those under way hold too many blocks for its own, or have failed.

I9: it waits for tiers only while they are asked for what it lacks, and in all at most its bound.

What is looked at is vLLM's own: its requests, their states, their tokens.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from safe_offload.protocol import StepPlan
from safe_offload.scheduler.cache.leases import LeaseKind
from tests.simulator.checkers.ledger import Ledger
from tests.simulator.checkers.taps import RESETS, tap
from tests.simulator.engine_core import EngineCore
from tests.simulator.findings import Finding

WAIT_MAX_S = 10.0
"""A request waits no longer over its whole life, nor longer than a transfer may."""
IDLE_ASKS_MAX = 3
"""How often a request is told to wait in a row, and no tier is asked for anything of it."""


@dataclass(slots=True)
class _Waiter:
    """How a request has waited."""

    request: Any  # kept, so that its address is no other's
    # The load that it waits for is one of these; empty if it does not wait.
    waits_for: set[tuple[int, ...]] = field(default_factory=set)
    # Loads that it has certainly waited for before.
    had: set[tuple[int, ...]] = field(default_factory=set)
    is_for_tiers: bool = False  # it waits for tiers, if it does not wait for a load
    # It waits for a load or for tiers, as some request looks them up.
    may_be_for_tiers: bool = False
    asked_s: float = 0.0  # when it was asked about last, while it waits
    waited_s: float = 0.0  # in all, for loads for certain
    waited_for_tiers_s: float = 0.0  # in all, while there was no load to wait for
    num_idle_asks: int = 0  # in a row
    is_put_off: bool = False  # it waits for blocks that loads hold

    def end(self) -> None:
        """It waits no more for what it waited for."""
        if len(self.waits_for) == 1:
            self.had |= self.waits_for
        self.waits_for = set()
        self.is_for_tiers = False


class WaitChecker:
    """Watches every answer to the question how many tokens the host has."""

    def __init__(self, core: EngineCore, ledger: Ledger) -> None:
        self._core = core
        self._ledger = ledger
        self._waiters: dict[int, _Waiter] = {}
        self._wait_max_s = min(WAIT_MAX_S, core.config.transfer_timeout_s)
        self._tier_wait_max_s = max((tier.wait_s for tier in core.config.tiers), default=0.0)
        self._has_room = False
        """Whether the last plan has left slots, and no fetch holds any."""
        self._num_resets = 0
        """Of vLLM's prefix cache, in which whoever has loaded may give its blocks back."""
        self._landed: set[Any] = set()
        """Requests that had not run since their load, at the last reset."""
        self._released: dict[Any, int] = {}
        """Requests that may have given blocks back at a reset, and how often each was preempted."""
        ledger.on_plan.append(self._see_plan)
        for name in RESETS:
            tap(core.connector, name, self._see_reset)
        tap(core.scheduler, "reset_prefix_cache", self._see_gpu_reset)
        tap(core.connector, "get_num_new_matched_tokens", self._see_match)

    def _see_plan(self, plan: StepPlan) -> None:
        side = self._core.connector.side
        has_fetched = any(lease.kind is LeaseKind.FETCH for lease in side.leases)
        self._has_room = side.hits.slots.num_free > 0 and not has_fetched

    def _see_match(
        self, original: Callable[..., Any], request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        answer: tuple[int | None, bool] = original(request, num_computed_tokens)
        if answer[0] is None and (self._is_starting() or self._is_held_up()):
            return answer
        side = self._core.connector.side
        if answer[0] is None and num_computed_tokens and side.loads.is_loading_in_step:
            return answer
        state = side.book.find(request)
        is_put_off = answer[0] is None and state is not None and state.load.wait.is_put_off
        waiter = self._waiters.setdefault(id(request), _Waiter(request))
        now_s = self._core.clock.now_s
        if waiter.is_put_off or (waiter.waits_for and not waiter.may_be_for_tiers):
            waiter.waited_s += now_s - waiter.asked_s
        if waiter.is_for_tiers:
            waiter.waited_for_tiers_s += now_s - waiter.asked_s
        waiter.asked_s, waiter.is_put_off = now_s, is_put_off
        if is_put_off:
            waiter.end()
            self._check_put_off(waiter)
        elif answer[0] is None:
            self._check(waiter, num_computed_tokens)
        else:
            waiter.end()
        return answer

    def _is_starting(self) -> bool:
        """Whether an engine that shares its pool has not heard from its ranks where that is."""
        core = self._core
        return core.node is not None and core.connector.side.hits.slots.source is None

    def _is_held_up(self) -> bool:
        """Whether vLLM has blocks for a request whose load failed, or had landed at a reset.

        Or has not come yet to one that gave them back there.
        """
        scheduler = self._core.scheduler
        return (
            bool(scheduler.failed_recving_kv_req_ids)
            or any(
                not request.num_computed_tokens or request in self._landed
                for request in self._ended_loads()
            )
            or any(map(self._has_not_run_since, self._released))
        )

    def _has_not_run_since(self, request: Any) -> bool:
        from vllm.v1.request import RequestStatus

        return bool(
            request.status == RequestStatus.WAITING
            and request.num_preemptions == self._released[request]
        )

    def _see_reset(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._landed = set(self._ended_loads())
        return original(*args, **kwargs)

    def _see_gpu_reset(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._num_resets += 1
        held = self._core.scheduler.kv_holding_waiting
        self._released |= {request: request.num_preemptions for request in held}
        return original(*args, **kwargs)

    def _ended_loads(self) -> Iterator[Any]:
        """Requests that vLLM has not run since their load ended."""
        from vllm.v1.request import RequestStatus

        for request in getattr(self._core.scheduler, "_inflight_prefills", ()):
            if request.status != RequestStatus.RUNNING and not self._is_loading(request):
                yield request

    def _check_put_off(self, waiter: _Waiter) -> None:
        name = waiter.request.request_id
        if waiter.waited_s > self._wait_max_s:
            raise Finding("I7", f"{name} has waited {waiter.waited_s:.1f} s for blocks")
        if not any(map(self._is_loading, self._core.scheduler.requests.values())):
            raise Finding("I7", f"{name} waits for blocks, and no load is under way")

    def _check(self, waiter: _Waiter, num_computed_tokens: int) -> None:
        name = waiter.request.request_id
        side = self._core.connector.side
        waiter.may_be_for_tiers = bool(self._core.stores and side.tiers.lookups.num_active)
        is_too_long = waiter.waited_s > self._wait_max_s
        if is_too_long and not self._core.stores:
            raise Finding("I7", f"{name} has waited {waiter.waited_s:.1f} s for loads of others")
        # While there is a load to wait for it may wait for that, or for a tier.
        loads = set(self._loads_of_the_same(waiter.request, num_computed_tokens))
        if is_too_long:
            waiter.end()
            self._check_waits_for_tiers(waiter, is_again=False)
            return
        if loads & waiter.waits_for:
            waiter.waits_for &= loads
            return
        is_for_tiers = waiter.is_for_tiers
        waiter.end()
        waiter.waits_for = loads - waiter.had
        if waiter.waits_for:
            return
        if self._core.stores:
            self._check_waits_for_tiers(waiter, is_again=is_for_tiers)
        elif loads:
            raise Finding("I7", f"{name} waits twice for the same load")
        else:
            raise Finding("I7", f"{name} waits, and no load brings what it lacks")

    def _check_waits_for_tiers(self, waiter: _Waiter, *, is_again: bool) -> None:
        name = waiter.request.request_id
        if waiter.waited_for_tiers_s > self._tier_wait_max_s:
            raise Finding("I9", f"{name} has waited {waiter.waited_for_tiers_s:.1f} s for tiers")
        waiter.is_for_tiers = True
        hashes = {bytes(block_hash) for block_hash in waiter.request.block_hashes}
        slots = self._core.connector.side.hits.slots
        num_grantable = slots.num_grantable(waiter.request.cache_salt)
        has_room = self._has_room and num_grantable > 0  # not only for another tenant
        is_idle = has_room and not self._ledger.asks_tiers_for(hashes)
        waiter.num_idle_asks = waiter.num_idle_asks * is_again + 1 if is_idle else 0
        if waiter.num_idle_asks > IDLE_ASKS_MAX:
            raise Finding("I9", f"{name} waits for tiers, which are not asked for what it lacks")

    def _loads_of_the_same(
        self, request: Any, num_computed_tokens: int
    ) -> Iterator[tuple[int, ...]]:
        """Loads that vLLM waits for, of requests that begin as this one to its first missing token.

        A load is known by its request and how often that may have lost its blocks before.
        """
        end = num_computed_tokens + 1
        wanted = list(request.all_token_ids[:end])
        for other in self._core.scheduler.requests.values():
            if (
                other.num_computed_tokens >= end
                and other.cache_salt == request.cache_salt
                and list(other.all_token_ids[:end]) == wanted
                and self._is_loading(other)
            ):
                yield id(other), other.num_preemptions, self._num_resets

    def _is_loading(self, request: Any) -> bool:
        """Whether vLLM waits for a load of a request, and will for some time."""
        from vllm.v1.request import RequestStatus

        return bool(
            request.status == RequestStatus.WAITING_FOR_REMOTE_KVS
            and request.request_id not in self._core.scheduler.finished_recving_kv_req_ids
            and not self._ledger.has_heard_of_load(request)
        )
