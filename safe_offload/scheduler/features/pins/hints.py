"""Hints: what a router, or the runtime of an agent, knows about a request.

A hint is an action in an envelope of vLLM's (vLLM 0.32.0, v1/kv_hints/protocol.py; vllm#53423), in
the request itself or in `kv_transfer_params`. vLLM defines the envelope only. `kv.fetch` is
Dynamo's, and `kv.retain` is named after it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from safe_offload.observe.counters import Count, Counters, is_milestone
from safe_offload.scheduler.feature import Feature
from safe_offload.scheduler.limits import MAX_PIN_S, Limits, is_pin_time

if TYPE_CHECKING:
    from vllm.v1.request import Request

    from safe_offload.scheduler.requests import RequestState

logger = logging.getLogger(f"vllm.{__name__}")

PROTOCOL_VERSION, ACTION_VERSION = "0.1", "1.0"
KEYS = ("kv_hints", "kv_hint")
"""In `kv_transfer_params`; the second is Dynamo's (ai-dynamo/dynamo#13134)."""
FETCH, RETAIN = "kv.fetch", "kv.retain"
TTL_KEY = "ttl_s"
ACTIONS_MAX = 64
KNOWN = (
    f'protocol_version "{PROTOCOL_VERSION}", action_version "{ACTION_VERSION}", action_type '
    f'"{FETCH}" or "{RETAIN}", with "{TTL_KEY}" in its payload, a number from 0 to {MAX_PIN_S}'
)


class Hints(Feature):
    """Applies hints to the limits of requests."""

    def __init__(self, counters: Counters) -> None:
        self._counters = counters
        self._num_with_problems = 0

    def on_new_request(self, state: RequestState) -> None:
        limits, problems = with_hints(state.request, state.limits, self._counters)
        state.limit(limits)
        if problems:
            self._num_with_problems += 1
            if is_milestone(self._num_with_problems):
                logger.warning(
                    "Invalid hints in %d requests, which were ignored; in the last one, %s. "
                    "Supported: %s.",
                    self._num_with_problems,
                    " and ".join(dict.fromkeys(problems)),
                    KNOWN,
                )


def with_hints(request: Request, limits: Limits, counters: Counters) -> tuple[Limits, list[str]]:
    """Apply the hints of a request to its limits; never raises, and counts each action.

    Also returns the problems with ignored hints. These name fields and types, never a value: a
    client may have put its prompt there.
    """
    problems: list[str] = []
    for envelope in _envelopes(request):
        actions = _field(envelope, "actions")
        if problem := _problem_of_envelope(envelope, actions):
            problems.append(problem)
            continue
        for action in actions[:ACTIONS_MAX]:
            limits, count, problem = _with_action(limits, action)
            if count is None:
                problems.append(problem)
            else:
                counters[count] += 1
    counters[Count.UNKNOWN_HINTS] += len(problems)
    return limits, problems


def _envelopes(request: Request) -> Iterator[Any]:
    own = getattr(request, "kv_hints", None)
    if own is not None:
        yield own
    params = request.kv_transfer_params
    if isinstance(params, dict):
        yield from (params[key] for key in KEYS if params.get(key) is not None)


def _problem_of_envelope(envelope: Any, actions: Any) -> str:
    if _field(envelope, "protocol_version") != PROTOCOL_VERSION:
        return "protocol_version is missing or unsupported"
    if not isinstance(actions, list | tuple):
        return f"actions is of type {type(actions).__name__}"
    return ""


def _with_action(limits: Limits, action: Any) -> tuple[Limits, Count | None, str]:
    """Return the limits with an action applied, its counter, and its problem, if any."""
    if _field(action, "action_version") != ACTION_VERSION:
        return limits, None, "action_version is missing or unsupported"
    kind = _field(action, "action_type")
    if kind == FETCH:  # from where is in our tiers, whatever its payload says
        return replace(limits, is_fetched=True), Count.FETCH_HINTS, ""
    if kind != RETAIN:
        return limits, None, "action_type is another"
    ttl_s = _field(_field(action, "payload"), TTL_KEY)
    if is_pin_time(ttl_s):
        is_longer = ttl_s > (limits.pin_s or 0)  # than the client's own, or another hint's
        return replace(limits, pin_s=ttl_s) if is_longer else limits, Count.RETAIN_HINTS, ""
    return limits, None, f"{TTL_KEY} of {RETAIN} is of type {type(ttl_s).__name__}, or out of range"


def _field(thing: Any, name: str) -> Any:
    """Return a field of vLLM's struct, or of a client's mapping."""
    return thing.get(name) if isinstance(thing, dict) else getattr(thing, name, None)
