"""Boundaries: positions of a prompt at which vLLM retains windows and states for later hits.

By default, vLLM hashes the windows and Mamba states that a hit at the end of a prompt needs, and
those at one earlier boundary, `Request.shared_prefix_boundary`: where prompts diverge on the GPU.
This module moves it: to where a prompt diverges from those that the host has or that are being
served, to the end of its load, and, without such knowledge, from position to position through
prompt and output.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from safe_offload.compat import cache_hits
from safe_offload.compat.cache_hits import keep_boundary, kept_boundary

if TYPE_CHECKING:
    from safe_offload.compat.cache_hits import GroupGeometry
    from safe_offload.scheduler.pending import Load
    from safe_offload.scheduler.requests import RequestState

SHARE_MAX = 4
"""Minimum distance of positions: their windows take at most a quarter of the other blocks."""
STEPS_PER_STATE = 2
"""With states, vLLM ends a step at a boundary: at most one more step in this many."""


class Boundary(NamedTuple):
    """The boundaries of a request."""

    num_found: int  # tokens of vLLM's own hit at the last lookup
    own: int  # vLLM's own boundary; 0 for none
    # The connector's boundary, until vLLM has retained the blocks there.
    moved: tuple[int, ...] = ()


NOWHERE = Boundary(0, 0)


class Boundaries:
    """Moves the boundaries of requests.

    Bound: the logarithm of the length of each request that vLLM has.

    Args:
        coordinator: vLLM's, over any pool.
        num_step_tokens: the maximum number of tokens of a step.
    """

    def __init__(self, geometry: GroupGeometry, coordinator: Any, num_step_tokens: int) -> None:
        self._hash_block_size = geometry.hash_block_size
        self._alignment_tokens = geometry.alignment_tokens
        self._num_step_tokens = num_step_tokens
        # The maximum number of blocks that a step may allocate for its tokens.
        self.num_step_blocks = geometry.num_blocks_in_step(num_step_tokens)
        self.every = 0  # positions are multiples of this number of tokens; 0 for none
        all_needs = cache_hits.boundary_blocks(coordinator)
        needs = [all_needs[group_idx] for group_idx in geometry.group_ids]
        sizes = [geometry.group_block_sizes[group_idx] for group_idx in geometry.group_ids]
        blocks_per_token = sum(
            1 / size for size, need in zip(sizes, needs, strict=True) if not need
        )
        if geometry.retention_interval == 0 and blocks_per_token:
            num_tokens = SHARE_MAX * sum(needs) / blocks_per_token
            if geometry.has_states:
                num_tokens = max(num_tokens, STEPS_PER_STATE * num_step_tokens)
            self.every = (
                int(-(-num_tokens // geometry.alignment_tokens)) * geometry.alignment_tokens
            )
        managers, pool = coordinator.single_type_managers, coordinator.block_pool
        self._ends = [
            (group_idx, size, need)
            for group_idx, size, need in zip(geometry.group_ids, sizes, needs, strict=True)
            if need and managers[group_idx].block_pool is pool
        ]
        self._coordinator = coordinator
        self._span = max((n * size for n, size in zip(needs, sizes, strict=True)), default=0)
        drafts = coordinator.eagle_group_ids
        # Of a hit's last block, which vLLM drops for EAGLE drafts.
        self.num_dropped_tokens = max((geometry.group_block_sizes[g] for g in drafts), default=0)
        # Its state, with `RequestState.marks` and `.boundary`: by some hashes of each request, the
        # last request with that hash.
        self.last: dict[bytes, RequestState] = {}

    def see(self, state: RequestState) -> None:
        """Find where a new request diverges from the present one with the longest shared prefix."""
        hashes = state.request.block_hashes
        # Each hash says that all before it are equal too, so those after 1, 2, 4, ... tell which.
        marks = [hashes[(1 << power) - 1] for power in range(len(hashes).bit_length())]
        known = [self.last[mark] for mark in marks if mark in self.last]
        state.marks = marks
        self.last.update(dict.fromkeys(marks, state))
        for other in known[-1:]:
            theirs = other.request.block_hashes
            places = range(min(len(hashes), len(theirs)))
            count = bisect_left(places, True, key=lambda place: hashes[place] != theirs[place])
            end = count * self._hash_block_size - self.num_dropped_tokens
            end = max(0, end // self._alignment_tokens * self._alignment_tokens)
            state.ends_hits_at(end)
            other.ends_hits_at(end)
            at = other.request.num_computed_tokens
            if at + self._span <= end and not at < kept_boundary(other.request) <= end:
                self.keep(other, end, at)

    def leave(self, state: RequestState) -> None:
        """A request has ended."""
        for mark in state.marks:
            if self.last.get(mark) is state:
                del self.last[mark]
        state.marks = ()

    def look_up(self, state: RequestState, num_computed_tokens: int) -> None:
        """Record vLLM's own hit and boundary of a request after a lookup."""
        state.boundary = Boundary(num_computed_tokens, kept_boundary(state.request))

    def keep(self, state: RequestState, boundary: int, num_computed_tokens: int = 0) -> bool:
        """Move a boundary, unless that displaces vLLM's own; return whether it is there now."""
        num_found, own, moved = state.boundary or NOWHERE
        reach = boundary + self._num_step_tokens + self._span
        if num_computed_tokens < own < reach:
            keep_boundary(state.request, own)
            return own == boundary
        can_keep = keep_boundary(state.request, boundary)
        if can_keep and self.every and boundary != own:
            begun = [end for end in moved if end - self._span < num_computed_tokens]
            state.boundary = Boundary(num_found, own, (*begun, boundary))
        return can_keep

    def part(self, state: RequestState, parted_at: int) -> None:
        """Record that a request computes beyond a point of divergence."""
        boundary = max(parted_at, kept_boundary(state.request))
        self.keep(state, boundary)
        state.ends_hits_at(boundary)

    def end(self, load: Load, parted_at: int) -> None:
        """Move the boundary of a begun load to its end, or to a later point of divergence."""
        load.owner.ends_hits_at(load.first_hash * self._hash_block_size)
        end = load.end_hash * self._hash_block_size
        near = [one for one in load.owner.hit_ends if end < one <= end + self._num_step_tokens]
        num_found, own, moved = load.owner.boundary or NOWHERE
        if own < end:  # which the load takes the place of
            load.owner.boundary = Boundary(num_found, end if own else 0, moved)
            keep_boundary(load.owner.request, 0)
        self.part(load.owner, max(end, parted_at, *near))

    def move(self, state: RequestState, num_computed_tokens: int) -> None:
        """Move the boundary of a running request to the next position with a whole window."""
        request = state.request
        if not self.every or kept_boundary(request) > num_computed_tokens:
            return
        last = min(num_computed_tokens + self._num_step_tokens, request.num_tokens - 1)
        first = num_computed_tokens + (self._span if num_computed_tokens else 1)
        position = max(last // self.every, -(-first // self.every)) * self.every
        boundary = min((end for end in state.hit_ends if end >= first), default=position)
        if boundary < request.num_prompt_tokens + request.max_tokens:
            self.keep(state, boundary, num_computed_tokens)

    def extras(
        self, state: RequestState, num_computed_tokens: int
    ) -> Iterator[tuple[int, int, list[int]]]:
        """Yield boundary, group and places of blocks newly hashed for the connector."""
        num_found, own, moved = state.boundary or NOWHERE
        if not moved:
            return
        now, far = kept_boundary(state.request), num_computed_tokens - self.num_dropped_tokens
        passed = {end for end in moved if end <= far or end != now}
        if not passed:
            return
        left = tuple(end for end in moved if end not in passed)
        state.boundary = Boundary(num_found, own, left)
        for boundary in sorted(passed):
            for group_idx, size, _ in self._ends:
                first = max(num_found, boundary - self._span - size, 0) // size
                places = range(first, boundary // size + 2)
                what = places, state.request.num_prompt_tokens, own
                kept = cache_hits.kept_alone(self._coordinator, group_idx, *what)
                yield boundary, group_idx, [p for p, k in zip(places, kept, strict=True) if not k]

    def ends(self, num_tokens: int) -> Iterator[tuple[int, range]]:
        """Yield by group with windows or states the blocks that a hit with this end needs."""
        for group_idx, size, need in self._ends:
            end = num_tokens // size
            yield group_idx, range(max(0, end - need), end)
