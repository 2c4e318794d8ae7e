"""Which running requests may have filled a block since they were looked at last.

A request that computes its prompt fills blocks in every step; one that decodes fills one in many
steps, and it is known when at the earliest. Its blocks stay where they are for as long as it runs,
so there is no hurry: those that decode are looked at together, once in several steps, and what they
have filled goes into one store. If one ends or is preempted before, it is looked at then.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from safe_offload.scheduler.requests import Phase

if TYPE_CHECKING:
    from safe_offload.scheduler.requests import RequestState
    from safe_offload.scheduler.stores.extras import Extras


STEPS_BETWEEN_LOOKS = 16
"""At requests that decode. More saves little; less, and most steps have a store of their own."""


class StoreSchedule:
    """Running requests by the step in which they are to be looked at.

    Looking late loses nothing but time: what a request has computed is found when it is looked at
    next, when it is preempted, or when it ends.

    Its state: the number of the step, which requests are looked at in the next one and in later
    ones, and `RequestState.is_decoding` and `.num_computed`.

    Bound: the requests that vLLM has; of those that have ended, until their step comes.

    Args:
        block_sizes: tokens of a block, of each KV cache group.
        num_decode_tokens_max: the most tokens that a request which decodes computes in one step.
        num_tokens_kept: the fewest tokens that a request computes before a full block leaves its
            table; None if blocks never do. Looks are no further apart.
        is_lazy: nothing is stored while its request runs.

    Attributes:
        num_steps_between: looks at requests that decode are in steps that are multiples of this;
            0 for no look but the first.
    """

    def __init__(
        self,
        block_sizes: Sequence[int],
        num_decode_tokens_max: int,
        num_tokens_kept: int | None = None,
        *,
        is_lazy: bool = False,
    ) -> None:
        self._block_size = math.gcd(*block_sizes)
        self._num_decode_tokens_max = num_decode_tokens_max
        self.num_steps_between = 0 if is_lazy else STEPS_BETWEEN_LOOKS
        if not is_lazy and num_tokens_kept is not None:
            # Half of it, because scheduling is ahead of what is known.
            num_steps = num_tokens_kept // (2 * num_decode_tokens_max)
            self.num_steps_between = max(1, min(STEPS_BETWEEN_LOOKS, num_steps))
        self._step = 0
        self._next: list[RequestState] = []
        self._later: dict[int, list[RequestState]] = {}

    def __repr__(self) -> str:
        return f"StoreSchedule(step {self._step}, {len(self._next)} in the next)"

    def add(self, state: RequestState) -> None:
        """A request begins to run: look at it in the next step."""
        self._next.append(state)

    def num_computed(self, state: RequestState) -> int:
        """Return how many first tokens a request has computed, without the step that is planned.

        The last token of an answer came out of a step that has computed all those before it.
        """
        return int(state.request.num_tokens) - 1 if state.is_decoding else state.num_computed

    def due(self, scheduled: Mapping[str, int]) -> list[RequestState]:
        """Return the requests to look at in this step, of those that are scheduled in it.

        Args:
            scheduled: number of tokens by request id.
        """
        self._step += 1
        candidates = self._next
        later = self._later.pop(self._step, None)
        if later:
            candidates = [*candidates, *later]
        if not candidates:
            return []
        self._next = []
        found, running = [], Phase.RUNNING
        for state in dict.fromkeys(candidates):
            if state.phase is not running:
                continue  # it is added again when it runs again
            num_tokens = scheduled.get(state.request.request_id)
            if num_tokens is None:
                self._next.append(state)
            else:
                found.append(state)
                self._plan_next(state, num_tokens)
        return found

    def _plan_next(self, state: RequestState, num_scheduled: int) -> None:
        request = state.request
        num_tokens, num_computed = request.num_tokens, request.num_computed_tokens + num_scheduled
        if num_computed < num_tokens:
            state.is_decoding = False
            self._next.append(state)
            state.num_computed = num_computed
            return
        state.is_decoding = True
        if not self.num_steps_between:
            return
        # vLLM hashes a block when all its tokens are known, which is later than they are computed
        # with drafts or asynchronous scheduling. (vLLM 0.32.0, KVCacheManager.allocate_slots)
        num_missing = self._block_size - num_tokens % self._block_size
        step = self._step + -(-num_missing // self._num_decode_tokens_max)  # rounded up
        step += -step % self.num_steps_between  # to the next multiple
        self._later.setdefault(step, []).append(state)


class PlainSchedule(StoreSchedule):
    """Where no boundary is ever moved."""


class MovingSchedule(StoreSchedule):
    """Looks at what vLLM hashes on our account, too, which moves boundaries."""

    def __init__(
        self,
        extras: Extras,
        block_sizes: Sequence[int],
        num_decode_tokens_max: int,
        num_tokens_kept: int | None = None,
        *,
        is_lazy: bool = False,
    ) -> None:
        super().__init__(block_sizes, num_decode_tokens_max, num_tokens_kept, is_lazy=is_lazy)
        self._extras = extras

    def due(self, scheduled: Mapping[str, int]) -> list[RequestState]:
        """See `StoreSchedule`; if not lazy, extras may be reused from now on."""
        found = super().due(scheduled)
        if found and self.num_steps_between:
            self._extras.plan()
        return found

    def _plan_next(self, state: RequestState, num_scheduled: int) -> None:
        self._extras.look(state, state.request.num_computed_tokens + num_scheduled)
        super()._plan_next(state, num_scheduled)
