"""The interface of store policies, which decide which blocks are stored, and when."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from safe_offload.scheduler.stores.extras import Extras
from safe_offload.scheduler.stores.schedule import StoreSchedule
from safe_offload.scheduler.stores.snapshots import SnapshotTaker

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput

    from safe_offload.scheduler.blocks import GpuBlocks
    from safe_offload.scheduler.loads.hits import HostHits
    from safe_offload.scheduler.requests import RequestBook, RequestState
    from safe_offload.scheduler.stores.stores import Stores


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
