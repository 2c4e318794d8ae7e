"""Which GPU blocks to store.

A block is worth storing when vLLM has hashed it for its own prefix cache (so it is full, and its
tokens are known) and when its bytes are there by the time that the store reads them.

That vLLM has hashed a block proves nothing about its bytes: it hashes the blocks of a step while it
schedules the step. But every block that a request *scheduled in this step* has hashed is computed
once the forward of this step has run, and a store after the forward is ordered behind it. So a
block is stored in the very step that computes it. A step later would be too late for many: a
sliding window has passed and its blocks are no longer in the table, or the request was preempted.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from safe_offload.compat import block_hash_of, get_block_hash, get_group_id
from safe_offload.scheduler.slots import Key
from safe_offload.scheduler.witness import Sources

if TYPE_CHECKING:
    from collections.abc import Iterable

    from vllm.v1.core.kv_cache_utils import KVCacheBlock

    from safe_offload.compat import GpuBlocks
    from safe_offload.scheduler.index import HostIndex
    from safe_offload.scheduler.requests import RequestState


class EagerScan:
    """Finds what a request has computed since the last scan.

    Args:
        index: to skip what the host has or is about to have.
        gpu: the block tables.
    """

    def __init__(self, index: HostIndex, gpu: GpuBlocks) -> None:
        self._slots = index.slots
        self._hash_block_size = index.hash_block_size
        self._block_sizes = index.group_block_sizes
        self._gpu = gpu
        self._group_ids = [g for g in index.group_ids if gpu.is_positional(g)]

    def scan(self, state: RequestState) -> tuple[list[Sources], list[int]]:
        """Move the request's cursors to the end of what is hashed.

        Returns:
            For each group that has any, the blocks to store; and the host slots that hold blocks of
            this request already.
        """
        found: list[Sources] = []
        present: list[int] = []
        request_id = state.request.request_id
        for group_idx in self._group_ids:
            num_hashed = self._gpu.num_hashed(request_id, group_idx)
            if state.limits.store_tokens is not None:
                num_allowed = state.limits.store_tokens // self._block_sizes[group_idx]
                num_hashed = min(num_hashed, num_allowed)
            cursor = state.cursors[group_idx]
            if cursor < num_hashed:
                state.cursors[group_idx] = num_hashed
                sources = self._scan_group(state, group_idx, slice(cursor, num_hashed), present)
                if sources is not None:
                    found.append(sources)
        return found, present

    def _scan_group(
        self, state: RequestState, group_idx: int, span: slice, present: list[int]
    ) -> Sources | None:
        """What to store of some blocks of a table; what the host has of them goes to `present`."""
        request_id = state.request.request_id
        blocks = self._gpu.of_request(request_id, group_idx)[span]
        witnesses = list(map(block_hash_of, blocks))
        if self._block_sizes[group_idx] == self._hash_block_size and None not in witnesses:
            hashes = state.request.block_hashes[span]
        else:  # a window slid past some, or no hit can ever need them; or a block has several
            blocks = [block for block in blocks if block_hash_of(block) is not None]
            witnesses = [witness for witness in witnesses if witness is not None]
            hashes = [get_block_hash(witness) for witness in witnesses]
        kept = list(map(self._slots.tables[group_idx].get, hashes))
        wanted = [slot is None for slot in kept]
        if not all(wanted):
            present += self._slots.findable(slot for slot in kept if slot is not None)
        if not any(wanted):
            return None
        home = self._gpu.home(request_id, group_idx)
        more_keys = self._gpu_more_keys(blocks, hashes)
        return Sources(group_idx, blocks, witnesses, hashes, more_keys, home).keep(wanted)
