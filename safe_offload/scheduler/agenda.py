"""Which running requests may have filled a block since they were looked at last.

A request that computes its prompt fills blocks in every step; one that decodes fills one in many
steps, and it is known when at the earliest. So a step looks at the few for which it may be time,
and not at all that run.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from safe_offload.scheduler.requests import Phase

if TYPE_CHECKING:
    from safe_offload.scheduler.requests import RequestState


class Agenda:
    """Running requests by the step in which they are to be looked at.

    Looking late loses nothing but time: what a request has computed is found when it is looked at
    next, or when it ends.

    Args:
        block_sizes: tokens of a block, of each KV cache group.
        num_decode_tokens_max: a request that decodes computes at most so many in one step.
    """

    def __init__(self, block_sizes: Sequence[int], num_decode_tokens_max: int) -> None:
        self._block_size = math.gcd(*block_sizes)
        self._num_decode_tokens_max = num_decode_tokens_max
        self._step = 0
        self._next: dict[RequestState, None] = {}
        self._later: dict[int, list[RequestState]] = {}

    def add(self, state: RequestState) -> None:
        """A request begins to run: look at it in the next step."""
        self._next[state] = None

    def due(self, scheduled: Mapping[str, int]) -> list[RequestState]:
        """The requests to look at in this step, of those that are scheduled in it.

        Args:
            scheduled: number of tokens by request id.
        """
        self._step += 1
        candidates: Iterable[RequestState] = self._next
        later = self._later.pop(self._step, None)
        if later:
            candidates = dict.fromkeys((*self._next, *later))
        if not candidates:
            return []
        self._next = {}
        found = []
        for state in candidates:
            if state.phase is not Phase.RUNNING:
                continue  # it is added again when it runs again
            num_tokens = scheduled.get(state.request.request_id)
            if num_tokens is None:
                self._next[state] = None
            else:
                found.append(state)
                self._plan_next(state, num_tokens)
        return found

    def _plan_next(self, state: RequestState, num_scheduled: int) -> None:
        request = state.request
        num_computed = request.num_computed_tokens + num_scheduled
        if num_computed < request.num_tokens:
            self._next[state] = None
            return
        # vLLM hashes a block when all its tokens are known, which is later than they are computed
        # with drafts or asynchronous scheduling. (vLLM 0.32.0, KVCacheManager.allocate_slots)
        num_missing = self._block_size - request.num_tokens % self._block_size
        num_steps = -(-num_missing // self._num_decode_tokens_max)
        self._later.setdefault(self._step + num_steps, []).append(state)
