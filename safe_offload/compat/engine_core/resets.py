"""Lets vLLM reset its prefix cache while requests wait for loads.

A reset that preempts running requests (`reset_running_requests`, a pause that keeps requests) fails
while a request waits for a load, because vLLM preempts running requests only, and while steps are
in flight, because with a connector their blocks are freed when they end. So the engine is first
stepped, with nothing new scheduled, until both have ended. Then requests that waited release their
blocks, as after a failed load.

Source: vLLM 0.31 to 0.33, EngineCore.reset_prefix_cache of v1/engine/core.py;
Scheduler._handle_blocked_waiting_request and _update_waiting_for_remote_kv of v1/core/sched.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from time import monotonic
from typing import Any, Final

from safe_offload.compat.wrapping import wrap

SETTLES_WITHIN_S: Final = 30.0
"""After this time, vLLM refuses the reset."""

logger = logging.getLogger(f"vllm.{__name__}")


def allow_resets_under_loads() -> None:
    """Wrap `reset_prefix_cache` of vLLM; a second call does nothing."""
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine.core import EngineCore

    wrap(EngineCore, "reset_prefix_cache", _when_settled)
    wrap(Scheduler, "reset_prefix_cache", _after_release)


def _when_settled(
    original: Callable[..., bool],
    engine_core: Any,
    /,
    reset_running_requests: bool = False,
    *args: Any,
    **kwargs: Any,
) -> bool:
    if reset_running_requests:
        try:
            _settle(engine_core)
        except Exception:
            logger.exception("Loads in flight may make vLLM refuse to reset its prefix cache")
    return original(engine_core, reset_running_requests, *args, **kwargs)


def _settle(engine_core: Any) -> None:
    """Step the engine until no load and no step is in flight."""
    step = getattr(engine_core, "_process_engine_step", None)
    scheduler = engine_core.scheduler
    if step is None or scheduler.connector is None or not _is_in_flight(engine_core):
        return  # a client in the engine's process steps it itself, and needs the outputs
    state, deadline_s = scheduler.pause_state, monotonic() + SETTLES_WITHIN_S
    scheduler.set_pause_state(type(state).PAUSED_ALL)
    try:
        while _is_in_flight(engine_core) and monotonic() < deadline_s:
            if not (engine_core.batch_queue or scheduler.has_requests()):
                break  # the load is another connector's, which does not request steps
            step()
    finally:
        scheduler.set_pause_state(state)


def _is_in_flight(engine_core: Any) -> bool:
    scheduler = engine_core.scheduler
    return bool(engine_core.batch_queue) or any(
        request.status.name == "WAITING_FOR_REMOTE_KVS"
        and request.request_id not in scheduler.finished_recving_kv_req_ids
        for request in scheduler.kv_holding_waiting
    )


def _after_release(
    original: Callable[..., bool],
    scheduler: Any,
    /,
    reset_running_requests: bool = False,
    *args: Any,
    **kwargs: Any,
) -> bool:
    if reset_running_requests and scheduler.connector is not None:
        for request in reversed(list(scheduler.kv_holding_waiting)):
            _release(scheduler, request)
    return original(scheduler, reset_running_requests, *args, **kwargs)


def _release(scheduler: Any, request: Any) -> None:
    """Free the blocks of a waiting request, unless something is being loaded into them."""
    if request.status.name == "WAITING_FOR_REMOTE_KVS":
        if request.request_id not in scheduler.finished_recving_kv_req_ids:
            return
        request.num_computed_tokens = 0
        scheduler.failed_recving_kv_req_ids.add(request.request_id)
        scheduler._handle_blocked_waiting_request(request)  # which frees them
    elif request.status.name in ("WAITING", "PREEMPTED"):
        scheduler._free_request_blocks(request)
        request.num_computed_tokens = 0
    else:
        return
    scheduler._inflight_prefills.discard(request)  # otherwise blocks stay reserved for it
    scheduler.kv_holding_waiting.remove_request(request)
    scheduler.deferred_waiting.discard(request)
    scheduler.waiting.prepend_request(request)
