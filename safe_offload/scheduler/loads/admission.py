"""Admission of loads: deadlock avoidance among requests that hold GPU blocks for a load.

A request that waits for its load, or whose load has landed, holds GPU blocks and cannot be
preempted. vLLM considers such requests in order and stops at the first for which there are too few
blocks. If two of them hold so many that neither can continue, the engine hangs. vLLM 0.32.0 has a
check, which counts too few blocks for sliding windows: it caps the blocks that a request needs and
then subtracts the null blocks of its table, too (Scheduler._inflight_prefill_reserved_blocks). So
with such groups, a hit is reported only if every request that holds blocks for a load could still
be scheduled next, also after its load fails: vLLM then frees its blocks, and it restarts at its
first token, before the others in the queue.
"""

from __future__ import annotations

from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from itertools import count
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from safe_offload.compat.cache_hits import GroupGeometry
    from safe_offload.scheduler.requests import RequestState

SPARE_BLOCKS = 2
"""Blocks per group that a request may need in addition to those of its tokens: one for draft
tokens, one for a copy of a shared block."""


@dataclass(frozen=True, slots=True)
class Need:
    """GPU blocks of one request."""

    held: int  # while it waits
    missing: int  # further blocks to compute it from its first token to the end of its prompt


class Admission:
    """The requests that hold GPU blocks for a load, for models with more than full attention.

    Bound: the requests that vLLM has, and twice as many heap entries: the entry of a released
    request is removed when it comes first, or when there are too many.
    """

    def __init__(self, geometry: GroupGeometry, num_gpu_blocks: int) -> None:
        self._geometry = geometry
        self._num_gpu_blocks = num_gpu_blocks
        self.num_holders = 0
        self._num_held = 0
        self._by_missing: list[tuple[int, int, RequestState, Need]] = []
        self._entry_ids = count()

    def __repr__(self) -> str:
        return f"Admission({self.num_holders} hold blocks)"

    def admits(self, state: RequestState, num_tokens: int) -> bool:
        """Return whether a request may hold the blocks of its first `num_tokens` tokens.

        A single holder always may: all other requests can be preempted. Not needed for full
        attention alone, where vLLM's own check counts correctly.
        """
        old = state.need
        if old is not None:
            self.release(state)
        is_admitted = True
        if self.num_holders:
            need = self._need(state, num_tokens)
            num_left = self._num_gpu_blocks - self._num_held - need.held
            is_admitted = max(need.missing, self._most_missing()) <= num_left
        if old is not None:
            self._hold(state, old)
        return is_admitted

    def hold(self, state: RequestState, num_tokens: int) -> None:
        """A request holds the blocks of its first `num_tokens` tokens, and waits."""
        self.release(state)
        self._hold(state, self._need(state, num_tokens))

    def release(self, state: RequestState) -> None:
        """A request continues or has ended; does nothing for one that is no holder."""
        need, state.need = state.need, None
        if need is not None:
            self.num_holders -= 1
            self._num_held -= need.held
        if len(self._by_missing) > 2 * self.num_holders:
            self._by_missing = [entry for entry in self._by_missing if self._is_valid(*entry)]
            heapify(self._by_missing)

    def _hold(self, state: RequestState, need: Need) -> None:
        state.need = need
        self.num_holders += 1
        self._num_held += need.held
        heappush(self._by_missing, (-need.missing, next(self._entry_ids), state, need))

    def _most_missing(self) -> int:
        while not self._is_valid(*self._by_missing[0]):
            heappop(self._by_missing)
        return self._by_missing[0][3].missing

    def _is_valid(self, _: int, __: int, state: RequestState, need: Need) -> bool:
        return state.need is need

    def _need(self, state: RequestState, num_tokens: int) -> Need:
        held = self._geometry.num_blocks_held(num_tokens)
        most = self._geometry.num_blocks_at_once(state.request.num_tokens)
        spare = SPARE_BLOCKS * len(self._geometry.group_block_sizes)
        return Need(held, most - held + spare)
