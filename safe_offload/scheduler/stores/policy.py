"""The interface of store policies, which decide which blocks are stored, and when.

vLLM drops the block table of a request that it preempts. A `Snapshot` keeps it, so that the plan of
the same step can store its blocks before they are overwritten.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from safe_offload.scheduler.blocks import BlockSet, block_hash_of, get_block_hash, get_group_id
from safe_offload.scheduler.requests import Phase
from safe_offload.scheduler.stores.extras import Extras

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_utils import KVCacheBlock
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

    from safe_offload.compat.cache_hits import GroupGeometry
    from safe_offload.scheduler.blocks import GpuBlocks
    from safe_offload.scheduler.loads.hits import HostHits
    from safe_offload.scheduler.requests import RequestBook, RequestState
    from safe_offload.scheduler.stores.stores import Stores


STEPS_BETWEEN_LOOKS = 16
"""For decoding requests. More saves little; with fewer, most steps have a store."""

_NO_WITNESS = b"given away"
"""A hash object that no block has."""


class StoreSchedule:
    """Running requests by the step of their next check: they may have filled a block by then.

    A prefill fills blocks in every step. A decoding request fills one in many steps, the earliest
    of which is known, and its blocks stay in place while it runs. So decoding requests are checked
    together, once in several steps, and their blocks share a store.

    A late check loses nothing but time: computed blocks are found at the next check, at a
    preemption, or at the end.

    Bound: the requests that vLLM has; ended ones remain until their step.

    Args:
        block_sizes: tokens of a block, by KV cache group.
        num_decode_tokens_max: the maximum number of tokens of a decoding request per step.
        num_tokens_kept: the minimum number of tokens computed before a full block leaves its table;
            None if blocks never do. It limits the distance of checks.
        is_lazy: no block is stored while its request runs.
        extras: blocks that vLLM hashes for the connector, whose boundaries move; None for none.
    """

    def __init__(
        self,
        block_sizes: Sequence[int],
        num_decode_tokens_max: int,
        num_tokens_kept: int | None = None,
        *,
        is_lazy: bool = False,
        extras: Extras | None = None,
    ) -> None:
        self._block_size = math.gcd(*block_sizes)
        self._extras = extras
        self._num_decode_tokens_max = num_decode_tokens_max
        # Decoding requests are checked in steps that are multiples of this; 0: at first only.
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
        """Check a request that starts to run in the next step."""
        self._next.append(state)

    def num_computed(self, state: RequestState) -> int:
        """Return the number of computed tokens of a request, without the step that is planned.

        The last output token came from a step that computed all tokens before it.
        """
        return int(state.request.num_tokens) - 1 if state.is_decoding else state.num_computed

    def due(self, scheduled: Mapping[str, int]) -> list[RequestState]:
        """Return the requests to check in this step, of those in `scheduled`, with their tokens."""
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
        if self._extras is not None and found and self.num_steps_between:
            self._extras.plan()
        return found

    def _plan_next(self, state: RequestState, num_scheduled: int) -> None:
        request = state.request
        num_tokens, num_computed = request.num_tokens, request.num_computed_tokens + num_scheduled
        if self._extras is not None:
            self._extras.look(state, num_computed)
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


@dataclass(slots=True)
class Snapshot:
    """A block table of a running request.

    Bound: an entry for each block of its request; the list is vLLM's own.
    """

    group_idx: int
    # Its block table, which vLLM drops at a preemption without changing it.
    table: list[KVCacheBlock]
    # Leading computed blocks at the last check; None if it was decoding, when its tokens determine
    # the number.
    num_blocks: int | None
    num_prompt_tokens: int  # of the request then; it changes when a client sends more input

    def is_current(self, request: Request) -> bool:
        """Return whether it is still valid: taken while decoding, with the same prompt."""
        return self.num_blocks is None and self.num_prompt_tokens == request.num_prompt_tokens

    def num_computed(self, request: Request, block_size: int) -> int:
        """Return the leading blocks computed before this step; see `StoreSchedule.num_computed`."""
        if self.num_blocks is not None:
            return self.num_blocks
        if request.num_prompt_tokens != self.num_prompt_tokens:
            return 0
        num_tokens: int = request.num_tokens - 1
        return num_tokens // block_size

    def unsaved(
        self, hashes: Sequence[bytes], places: range, given_out: Collection[int], gpu: GpuBlocks
    ) -> tuple[BlockSet, BlockSet]:
        """Return its unstored blocks, after its request was preempted.

        Args:
            hashes: of the request's blocks.
            places: of the blocks that are computed and were not stored before.
            given_out: ids of the blocks allocated in this step.

        Returns:
            The blocks that must be stored before the forward pass, because they were reallocated in
                this step or have no hash that would reveal it (many blocks of sliding windows); and
                the blocks that are in the free queue.
        """
        lost, waiting = BlockSet(self.group_idx), BlockSet(self.group_idx)
        is_window = gpu.is_window(self.group_idx)
        first = 0 if is_window else places.start  # what was not hashed was passed over
        table = self.table[first : places.stop]
        for block, block_hash in zip(table, hashes[first:], strict=False):
            if block.is_null:
                continue
            hash_object = block_hash_of(block)
            if (
                hash_object is not None
                and get_block_hash(hash_object) == block_hash
                # Another group may hold the same tokens in it by now.
                and get_group_id(hash_object) == self.group_idx
            ):
                waiting.append(block, hash_object, block_hash)
            elif is_window or block.block_id in given_out:
                lost.append(block, _NO_WITNESS, block_hash)
        return lost, waiting


class SnapshotTaker:
    """Takes snapshots (`RequestState.snapshots`), and finds their unstored blocks.

    Bound: an entry for each KV cache group.
    """

    def __init__(self, geometry: GroupGeometry, gpu: GpuBlocks) -> None:
        self._geometry = geometry
        self._gpu = gpu
        # The tables of other groups do not tell which tokens a block holds.
        self._group_ids = [g for g in geometry.group_ids if gpu.is_positional(g)]

    def take(self, state: RequestState, *, is_decoding: bool) -> None:
        """Take snapshots of a request, one for each group."""
        request, request_id = state.request, state.request.request_id
        taken = []
        for group_idx in self._group_ids:
            tables, nums_hashed = self._gpu.tables_of(group_idx)
            table = tables.get(request_id)
            if table:
                num_blocks = None if is_decoding else nums_hashed.get(request_id, 0)
                taken.append(Snapshot(group_idx, table, num_blocks, request.num_prompt_tokens))
        state.snapshots = taken

    def drop(self, state: RequestState) -> Sequence[Snapshot]:
        """Remove and return the snapshots of a request."""
        taken, state.snapshots = state.snapshots, ()
        return taken

    def unsaved(
        self, state: RequestState, snapshot: Snapshot, first: int, given_out: Collection[int]
    ) -> tuple[BlockSet, BlockSet]:
        """Return the unstored blocks of a preempted request (see `Snapshot.unsaved`)."""
        block_size = self._geometry.group_block_sizes[snapshot.group_idx]
        end = snapshot.num_computed(state.request, block_size)
        # Coming in vLLM: drafts may have left out the last blocks, which have a hash all the same.
        publishable = getattr(state.request, "num_publishable_block_hashes", None)
        if publishable is not None:
            end = min(end, publishable * self._geometry.hash_block_size // block_size)
        if state.limits.store_tokens is not None:
            end = min(end, state.limits.store_tokens // block_size)
        hashes = self._geometry.hashes_of(state.request, snapshot.group_idx)
        return snapshot.unsaved(hashes, range(first, end), given_out, self._gpu)


class StorePolicy:
    """Selects blocks and passes them to `Stores.add`.

    The planner calls it; it never calls the planner. It keeps nothing of a request after `end`. Its
    state: the schedule, `RequestState.snapshots` and `RequestState.tables`.

    Bound: an entry for each KV cache group of the requests that vLLM has.

    Args:
        hits: to skip blocks that the host has or is storing.
        num_decode_tokens_max, is_lazy: see `StoreSchedule`.
    """

    def __init__(
        self,
        hits: HostHits,
        gpu: GpuBlocks,
        stores: Stores,
        num_decode_tokens_max: int,
        *,
        is_lazy: bool,
    ) -> None:
        self._hits = hits
        self._geometry = hits.geometry
        self._gpu = gpu
        self._stores = stores
        sizes, kept = hits.geometry.group_block_sizes, gpu.num_tokens_kept(hits.geometry.group_ids)
        # Blocks that vLLM hashes for the connector; None if boundaries are never moved.
        self.extras = Extras(hits, gpu) if hits.boundaries.every else None
        # When requests are checked.
        self.schedule = StoreSchedule(
            sizes, num_decode_tokens_max, kept, is_lazy=is_lazy, extras=self.extras
        )
        self._snapshot_taker = SnapshotTaker(hits.geometry, gpu)

    def keep_out(self, state: RequestState) -> None:
        """Store nothing that a new request computes."""

    def run(self, state: RequestState) -> None:
        """A request has its blocks and starts to run."""
        self.schedule.add(state)
        state.tables = self._gpu.all_tables_of(state.request.request_id)

    def forget_uncomputed(self, state: RequestState) -> set[bytes]:
        """Remove and return the hashes of blocks that a request preempted in this step lacks.

        With priority scheduling, vLLM may schedule a request, hash the blocks that it would fill,
        and then preempt it in the same step. Neither vLLM's prefix cache nor a store may find them.
        (vLLM 0.32.0, Scheduler.schedule; vllm#59907)
        """
        tables, state.tables = state.tables, ()
        size = self._geometry.hash_block_size
        first = self.schedule.num_computed(state) // size
        longest = max(map(len, tables), default=0)
        end = longest * max(self._geometry.group_block_sizes) // size
        hashes = set(state.request.block_hashes[first:end])
        self._gpu.forget_blocks_of(tables, hashes)
        return hashes

    def preempt(self, state: RequestState) -> None:
        """vLLM has preempted a running request."""
        if self.extras is not None:
            self.extras.leave(state)

    def forget_table(self, state: RequestState) -> None:
        """Store nothing that a request computes in its present block table."""
        self._snapshot_taker.drop(state)

    def finish(self, state: RequestState) -> None:
        """A request is about to end; it still has its blocks and its phase."""

    def end(self, state: RequestState) -> None:
        """A request has ended."""
        if self.extras is not None:
            self.extras.end(state)

    def rescue(self, states: Sequence[RequestState], given_out: Collection[int]) -> None:
        """Store the computed blocks of requests preempted in this step.

        Of reallocated blocks, only those in `given_out` can be stored before they are written.
        """

    def find(
        self, output: SchedulerOutput, book: RequestBook, loading: Sequence[RequestState]
    ) -> None:
        """Store the selected blocks of this step; the loads of `loading` requests start in it."""

    def pass_over(self, states: Sequence[RequestState]) -> None:
        """Store nothing that any request has computed so far."""
        for state in states:
            self._snapshot_taker.drop(state)
