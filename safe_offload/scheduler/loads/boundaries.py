"""Where vLLM keeps windows and states of a prompt, so that others and the host find them there.

By default vLLM hashes of sliding windows and Mamba states what a hit at the end of a prompt needs,
and at one boundary more, `Request.shared_prefix_boundary`: where the GPU has attention without gaps
and no windows, so that prompts have parted there. What is hashed is stored, as everything is.
The host knows more prompts than the GPU, and has room for more. So this moves the boundary of a
request: to where the host saw prompts part, to where its load ends, and, where nothing is known, to
one position after another of the prompt and of the answer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from safe_offload.compat import cache_hits
from safe_offload.compat.cache_hits import keep_boundary, kept_boundary

if TYPE_CHECKING:
    from vllm.v1.request import Request

    from safe_offload.scheduler.geometry import GroupGeometry
    from safe_offload.scheduler.pending import Load
    from safe_offload.scheduler.requests import RequestState

SHARE_MAX = 4
"""Positions are so far apart that their windows take at most a fourth of what the rest takes."""
STEPS_PER_STATE = 2
"""vLLM ends a step at a boundary where there are states: at most one step more in so many."""


class Boundaries:
    """Moves the boundaries of requests; it has no state of its own.

    Args:
        coordinator: of vLLM, over any pool.
        num_step_tokens: the most that a step computes.

    Attributes:
        every: positions are multiples of so many tokens; 0 for none.
        blocks_per_hash: that attention without gaps takes for each hash of a request.
        needs: of each other group the blocks that a hit needs at its end, and the hashes of one.
    """

    def __init__(self, geometry: GroupGeometry, coordinator: Any, num_step_tokens: int) -> None:
        self._hash_block_size = geometry.hash_block_size
        self._num_step_tokens = num_step_tokens
        self.every = 0
        all_needs = cache_hits.boundary_blocks(coordinator)
        needs = [all_needs[group_idx] for group_idx in geometry.group_ids]
        sizes = [geometry.group_block_sizes[group_idx] for group_idx in geometry.group_ids]
        blocks_per_token = sum(
            1 / size for size, need in zip(sizes, needs, strict=True) if not need
        )
        self.blocks_per_hash = blocks_per_token * self._hash_block_size
        hashes_per_block = (size / self._hash_block_size for size in sizes)
        self.needs = [need for need in zip(needs, hashes_per_block, strict=True) if need[0]]
        if geometry.retention_interval == 0 and blocks_per_token:
            num_tokens = SHARE_MAX * sum(needs) / blocks_per_token
            if geometry.has_states:
                num_tokens = max(num_tokens, STEPS_PER_STATE * num_step_tokens)
            self.every = (
                int(-(-num_tokens // geometry.alignment_tokens)) * geometry.alignment_tokens
            )
        self._span = max((n * size for n, size in zip(needs, sizes, strict=True)), default=0)

    def part(self, state: RequestState, parted_at: int) -> None:
        """A request computes beyond where others left it."""
        boundary = max(parted_at, kept_boundary(state.request))
        keep_boundary(state.request, boundary)
        state.ends_hits_at(boundary)

    def end(self, load: Load, parted_at: int) -> None:
        """A load begins: others go on where it ends, or its request leaves others later."""
        load.owner.ends_hits_at(load.first_hash * self._hash_block_size)
        self.part(load.owner, max(load.end_hash * self._hash_block_size, parted_at))

    def move(self, request: Request, num_computed_tokens: int) -> None:
        """A request computes on: keep the next position whose whole window is yet to come."""
        if not self.every or kept_boundary(request) > num_computed_tokens:
            return
        last = min(num_computed_tokens + self._num_step_tokens, request.num_tokens - 1)
        first = num_computed_tokens + self._span
        boundary = max(last // self.every, -(-first // self.every)) * self.every
        if boundary < request.num_prompt_tokens + request.max_tokens:
            keep_boundary(request, boundary)
