"""Hints: what a router, or the runtime of an agent, knows of a request beside its tokens.

A hint is an action in an envelope of vLLM's (vLLM 0.32.0, v1/kv_hints/protocol.py; vllm#53423), in
the request itself or, where a front has no field for it, in `kv_transfer_params`. vLLM defines
the envelope alone. `kv.fetch` is Dynamo's word; the others are made after it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from safe_offload.observe.counters import Count, Counters
from safe_offload.scheduler.limits import Limits, is_pin_time

if TYPE_CHECKING:
    from vllm.v1.request import Request

PROTOCOL_VERSION, ACTION_VERSION = "0.1", "1.0"
KEYS = ("kv_hints", "kv_hint")
"""In `kv_transfer_params`; the second is Dynamo's (ai-dynamo/dynamo#13134)."""
TTL_KEY = "ttl_s"
ACTIONS_MAX = 64


def with_hints(request: Request, limits: Limits, counters: Counters) -> Limits:
    """Add to what a request asks for what its hints do; never raises, and counts each action."""
    if limits.leaves_nothing:
        return limits
    for envelope in _envelopes(request):
        actions = _field(envelope, "actions")
        is_known = _field(envelope, "protocol_version") == PROTOCOL_VERSION
        if not (is_known and isinstance(actions, list | tuple)):
            counters[Count.UNKNOWN_HINTS] += 1
            continue
        for action in actions[:ACTIONS_MAX]:
            limits, count = _with_action(limits, action)
            counters[count] += 1
    return limits


def _envelopes(request: Request) -> Iterator[Any]:
    own = getattr(request, "kv_hints", None)
    if own is not None:
        yield own
    params = request.kv_transfer_params
    if isinstance(params, dict):
        yield from (params[key] for key in KEYS if params.get(key) is not None)


def _with_action(limits: Limits, action: Any) -> tuple[Limits, Count]:
    is_known = _field(action, "action_version") == ACTION_VERSION
    kind = _field(action, "action_type") if is_known else None
    if kind == "kv.fetch":  # from where is in our tiers, whatever its payload says
        return replace(limits, is_fetched=True), Count.FETCH_HINTS
    if kind == "kv.demote":
        return replace(limits, is_demoted=True), Count.DEMOTE_HINTS
    ttl_s = _field(_field(action, "payload"), TTL_KEY)
    if kind == "kv.retain" and is_pin_time(ttl_s):
        return replace(limits, pin_s=ttl_s), Count.RETAIN_HINTS
    return limits, Count.UNKNOWN_HINTS


def _field(thing: Any, name: str) -> Any:
    """Return a field of a struct of vLLM's, or of a mapping that a client wrote."""
    return thing.get(name) if isinstance(thing, dict) else getattr(thing, name, None)
