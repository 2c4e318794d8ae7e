"""Blocks that vLLM has hashed for the connector only: vLLM reuses them before its own (I15).

Where `boundaries.py` has moved a boundary, vLLM hashes more blocks than its own hits need. In its
free queue, these would displace blocks that the GPU would have without the connector. So once they
are free and stored, they move to the head of the queue, unless that starts with unhashed blocks.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, NamedTuple

from safe_offload.scheduler.blocks import QueuePlace, block_hash_of, get_block_hash

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vllm.v1.core.kv_cache_utils import KVCacheBlock
    from vllm.v1.request import Request

    from safe_offload.scheduler.blocks import GpuBlocks
    from safe_offload.scheduler.loads.hits import HostHits
    from safe_offload.scheduler.requests import RequestState


class Extra(NamedTuple):
    """A block as it was when vLLM hashed it for the connector."""

    group_idx: int
    block: KVCacheBlock
    hash_object: bytes


class Extras:
    """Blocks that vLLM has hashed because of a moved boundary, until they are reused or hit.

    A hit turns such a block into an ordinary one. Free blocks may stay in their place while a guard
    behind the blocks that two steps need has not moved.

    Bound: the GPU's blocks, once in each.
    """

    def __init__(self, hits: HostHits, gpu: GpuBlocks) -> None:
        self._directory = hits.directory
        self.boundaries = hits.boundaries
        self._gpu = gpu
        self._num_step_blocks = hits.boundaries.num_step_blocks
        self._geometry = hits.geometry
        self._hashes: dict[int, bytes] = {}
        self._left: list[Extra] = []
        self._unstored: list[Extra] = []
        self._waiting: list[Extra] = []
        self._guard: QueuePlace | None = None

    def __repr__(self) -> str:
        return f"Extras({len(self._waiting)} blocks stay)"

    def look(self, state: RequestState, num_computed_tokens: int) -> None:
        """Record newly hashed blocks, up to the step that is planned, and move the boundary."""
        held = state.extras
        if held is None:  # it begins to run
            held = state.extras = deque()
            self._spare_hit(state)
        self._record(state, num_computed_tokens)
        self.boundaries.move(state, num_computed_tokens)
        while held and not any(self._stands(one) and one.block.ref_cnt for one in held[0]):
            self._left += held.popleft()

    def _spare_hit(self, state: RequestState) -> None:
        """Treat the blocks of a request's hit as ordinary blocks from now on."""
        request = state.request
        for group_idx, places in self.boundaries.ends(request.num_computed_tokens):
            for block in self._table(request, group_idx)[places.start : places.stop]:
                self._hashes.pop(block.block_id, None)

    def _record(self, state: RequestState, num_computed_tokens: int) -> None:
        found: dict[int, list[Extra]] = {}
        for boundary, group_idx, places in self.boundaries.extras(state, num_computed_tokens):
            table = self._table(state.request, group_idx)
            hashes = self._geometry.hashes_of(state.request, group_idx)
            for place in places:
                if place >= min(len(table), len(hashes)):
                    break
                block = table[place]
                hash_object = block_hash_of(block)
                if (
                    hash_object is not None
                    and get_block_hash(hash_object) == hashes[place]
                    and self._hashes.get(block.block_id) is not hash_object
                ):
                    self._hashes[block.block_id] = hash_object
                    found.setdefault(boundary, []).append(Extra(group_idx, block, hash_object))
        if found:
            if state.extras is None:
                state.extras = deque()
            state.extras.extend(found.values())

    def _table(self, request: Request, group_idx: int) -> Sequence[KVCacheBlock]:
        tables, _ = self._gpu.tables_of(group_idx)
        table: Sequence[KVCacheBlock] = tables.get(request.request_id, ())
        return table

    def end(self, state: RequestState) -> None:
        """A request has ended; if vLLM has finished it, it still has its blocks."""
        self._record(state, state.request.num_computed_tokens)
        self.leave(state)

    def leave(self, state: RequestState) -> None:
        """A request has released its blocks, or is about to."""
        for extras in state.extras or ():
            self._left += extras
        state.extras = None

    def _stands(self, one: Extra) -> bool:
        """Return whether a block is unchanged and without a hit."""
        hash_object = self._hashes.get(one.block.block_id)
        return hash_object is one.hash_object and block_hash_of(one.block) is hash_object

    def _is_being_stored(self, one: Extra) -> bool:
        slot = self._directory.tables[one.group_idx].get(get_block_hash(one.hash_object))
        return slot in self._directory.being_stored

    def plan(self) -> bool:
        """Let vLLM reuse free and stored blocks first; return whether there were any."""
        if self._left or self._unstored:
            free, self._left, self._unstored = [*self._unstored, *self._left], [], []
            for one in free:
                (self._unstored if self._is_being_stored(one) else self._waiting).append(one)
        if len(self._waiting) > self._gpu.num_blocks:  # what is gone is still among them
            self._waiting = [one for one in self._waiting if self._stands(one)]
        return bool(self._waiting) and not self._has_room() and self._reuse()

    def make_room(self, num_tokens: int) -> None:
        """A request may allocate blocks for this many tokens at once."""
        if self._waiting and not self._has_room(self._geometry.num_blocks_spanned(num_tokens)):
            self._reuse()

    def _reuse(self) -> bool:
        waiting, self._waiting = self._waiting, []
        blocks = []
        for one in waiting:
            if self._stands(one) and not one.block.ref_cnt:
                del self._hashes[one.block.block_id]  # it may have been recorded twice
                blocks.append(one.block)
        self._gpu.reuse_first(blocks)
        return bool(blocks)

    def _has_room(self, num_more: int = 0) -> bool:
        """Return whether there are unhashed blocks for two more steps and this many blocks."""
        if num_more or self._guard is None or not self._guard.stands():
            count = 2 * self._num_step_blocks + num_more
            blocks = self._gpu.unhashed_ahead(count)
            has_all = len(blocks) == count
            self._guard = QueuePlace.of(blocks[-self._num_step_blocks]) if has_all else None
        return self._guard is not None
