"""Which running requests may have filled a block since they were looked at last.

A request that computes its prompt fills blocks in every step; one that decodes fills one in many
steps, and it is known when at the earliest. Its blocks stay where they are for as long as it runs,
so there is no hurry: those that decode are looked at together, every so many steps, and what they
have filled goes into one store. If one ends or is preempted before, it is looked at then.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from safe_offload.scheduler.requests import Phase

if TYPE_CHECKING:
    from safe_offload.scheduler.requests import RequestState


STEPS_BETWEEN_LOOKS = 16
"""At requests that decode. More saves little; less, and most steps have a store of their own."""


class Agenda:
    """Running requests by the step in which they are to be looked at.

    Looking late loses nothing but time: what a request has computed is found when it is looked at
    next, when it is preempted, or when it ends.

    Args:
        block_sizes: tokens of a block, of each KV cache group.
        num_decode_tokens_max: a request that decodes computes at most so many in one step.

    Attributes:
        num_steps_between: looks at requests that decode are in steps that are multiples of this;
            0 for no look but the first.
    """

    def __init__(self, block_sizes: Sequence[int], num_decode_tokens_max: int) -> None:
        self._block_size = math.gcd(*block_sizes)
        self._num_decode_tokens_max = num_decode_tokens_max
        self.num_steps_between = 1
        self._step = 0
        self._next: dict[RequestState, None] = {}
        self._later: dict[int, list[RequestState]] = {}

    def bind(self, num_tokens_kept: int | None, *, is_lazy: bool) -> None:
        """Learn how long a block stays where it is found: looks are no further apart.

        Args:
            num_tokens_kept: after a block is full, its request computes at least so many tokens
                before the block leaves its table; None if it never does.
            is_lazy: nothing is stored while its request runs.
        """
        self.num_steps_between = 0 if is_lazy else STEPS_BETWEEN_LOOKS
        if self.num_steps_between and num_tokens_kept is not None:
            # Half of it, because what is scheduled runs ahead of what is known.
            num_steps = num_tokens_kept // (2 * self._num_decode_tokens_max)
            self.num_steps_between = max(1, min(STEPS_BETWEEN_LOOKS, num_steps))

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
        num_tokens = state.request.num_tokens
        state.decodes = state.request.num_computed_tokens + num_scheduled >= num_tokens
        if not state.decodes:
            self._next[state] = None
            return
        if not self.num_steps_between:
            return
        # vLLM hashes a block when all its tokens are known, which is later than they are computed
        # with drafts or asynchronous scheduling. (vLLM 0.32.0, KVCacheManager.allocate_slots)
        num_missing = self._block_size - num_tokens % self._block_size
        step = self._step - (-num_missing // self._num_decode_tokens_max)
        step += -step % self.num_steps_between
        self._later.setdefault(step, []).append(state)
