"""Requests that continue after a reset with KV cache from before it."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from safe_offload.scheduler.blocks import BlockTable, block_hash_of, get_block_hash
from safe_offload.scheduler.requests import RequestQueue

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from vllm.v1.core.kv_cache_utils import KVCacheBlock
    from vllm.v1.request import Request

    from safe_offload.scheduler.blocks import GpuBlocks
    from safe_offload.scheduler.requests import RequestState


@dataclass(slots=True)
class OutdatedTable:
    """A block table that a request had at a reset. Bound: an entry for each block of it."""

    kept_in: BlockTable
    group_idx: int
    num_seen: int = 0  # leading blocks whose hashes were removed, and which get none again
    # The blocks after them at the last check. They may leave the table with a new hash.
    watched: Sequence[KVCacheBlock] = ()


class Outdated:
    """Keeps blocks computed before a reset, and blocks computed from them, out of every cache.

    vLLM cannot reset its prefix cache while requests run, and a request that continues attends to
    blocks of the old weights, so its new blocks belong to neither. So none of its blocks keeps a
    hash, by which vLLM and stores find it, until the request has ended or has lost all its blocks.

    Bound: the requests that vLLM has, and the GPU's blocks.

    Args:
        has_states: vLLM keeps copies of Mamba states in blocks of no table. Then no block of any
            request has a hash for as long as there are such requests.
    """

    def __init__(self, gpu: GpuBlocks, *, has_states: bool) -> None:
        self._gpu = gpu
        self._has_states = has_states
        # These; their tables are in `RequestState.outdated`. Read only outside.
        self.requests = RequestQueue()
        # Blocks whose hashes the last check removed; with states, some of them.
        self.taken_ids: set[int] = set()

    def __repr__(self) -> str:
        return f"Outdated({len(self)} requests)"

    def __len__(self) -> int:
        return len(self.requests)

    def begin(self, book: Iterable[RequestState]) -> None:
        """Begin after a reset: all blocks of all requests, and vLLM's cache, are outdated."""
        self._gpu.forget_hashes()
        for state in book:
            if not state.finished:
                self._add(state)

    def _add(self, state: RequestState) -> None:
        request_id = state.request.request_id
        found = []
        for group_idx in range(self._gpu.num_groups):
            tables, _ = self._gpu.tables_of(group_idx)
            if table := tables.get(request_id):
                found.append(OutdatedTable(BlockTable(tables, request_id, table), group_idx))
                found[-1].watched = list(table)
        if found:
            state.outdated = found
            self.requests.add(state)

    def keep_out(
        self, book: Iterable[RequestState], only: Sequence[RequestState] = ()
    ) -> list[RequestState]:
        """Remove the hashes that vLLM has given these requests' blocks since the last plan.

        Returns the requests, all or `only` these that end, and newly found ones. Those preempted
        since are no longer outdated.
        """
        states = list(only or self.requests)
        taken: set[int] = set()
        is_shared = False
        for state in states:
            is_shared |= self._take(state, taken)
        if is_shared:
            states += self._found_by_others(book, taken)
        for state in states:
            if not self._stands(state):
                state.outdated = ()
                self.requests.discard(state)
        self.taken_ids = taken
        if self._has_states:
            self._gpu.forget_hashes()
        elif taken:
            self._gpu.forget_hashes(taken)
        return states

    def _take(self, state: RequestState, taken: set[int]) -> bool:
        """Add the blocks whose hashes to remove; return whether others may have found one."""
        is_shared = False
        for table in state.outdated:
            for block, num_owners in self._hashed_since(table, state):
                taken.add(block.block_id)
                is_shared |= block.ref_cnt > num_owners
            table.num_seen = self._num_hashed(table, state.request)
            table.watched = table.kept_in.table[table.num_seen :]
        return is_shared

    def _found_by_others(self, book: Iterable[RequestState], taken: set[int]) -> list[RequestState]:
        """Add requests that were scheduled later in this step and have found such a block.

        Others may have found their blocks in the same step, and so on. A Mamba state, or a copy for
        a hit inside a block, is found from the next step on only (vLLM 0.32.0,
        MambaManager.cached_blocks_this_step).
        """
        owners: defaultdict[int, list[RequestState]] = defaultdict(list)
        for state in book:
            if not (state.finished or self._stands(state)):
                for block_id in self._gpu.block_ids_of(state.request.request_id):
                    owners[block_id].append(state)
        found = []
        reached = list(taken)
        while reached:
            for state in owners.pop(reached.pop(), ()):
                if not self._stands(state):
                    self._add(state)
                    found.append(state)
                    of_state: set[int] = set()
                    self._take(state, of_state)
                    reached += of_state - taken
                    taken |= of_state
        return found

    def _stands(self, state: RequestState) -> bool:
        return any(table.kept_in.stands() for table in state.outdated)

    def _hashed_since(
        self, table: OutdatedTable, state: RequestState
    ) -> Iterator[tuple[KVCacheBlock, bool]]:
        """Yield blocks of a table hashed since the last check, and whether they are still in it.

        A block that has left it, such as one of a sliding window, may have a new owner. With a hash
        of this request, it is outdated, unless the request has restarted and computed it anew.
        """
        kept_in = table.kept_in
        present, stands = kept_in.table[table.num_seen :], kept_in.stands()
        kept_ids = {block.block_id for block in present if stands}
        num_found = state.request.num_computed_tokens // self._gpu.block_tokens(table.group_idx)
        anew = () if stands else kept_in.tables.get(kept_in.request_id, ())[num_found:]
        anew_ids = {block.block_id for block in anew}
        own: set[bytes] = set()
        length = 0
        for block in (*present, *table.watched):
            hash_object = block_hash_of(block)
            if hash_object is None or block.block_id in anew_ids:
                continue
            is_kept = block.block_id in kept_ids
            if not (is_kept or own):
                own.update(state.request.block_hashes)
                length = len(next(iter(own), hash_object))
            if is_kept or get_block_hash(hash_object)[-length:] in own:
                yield block, is_kept

    def _num_hashed(self, table: OutdatedTable, request: Request) -> int:
        """Return the number of leading blocks of a table that need no further check.

        The block in which a prompt ends gets a hash of its first part repeatedly (vLLM 0.32.0,
        FullAttentionManager._cache_partial_tail_block).
        """
        if not self._gpu.is_positional(table.group_idx):
            return 0
        _, nums_hashed = self._gpu.tables_of(table.group_idx)
        prompt_end = int(request.num_prompt_tokens) - 1
        num_before = prompt_end // self._gpu.block_tokens(table.group_idx)
        return min(nums_hashed.get(table.kept_in.request_id, 0), num_before)
