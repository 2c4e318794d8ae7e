"""Each request's life as the connector sees it, and the filter for finished ids.

vLLM tells about a request through hooks that may come in any order, twice, or not at all
(FAULTS: C1 to C6, C17). A `RequestState` is made the first time any hook names the request, and
kept until vLLM holds no block for it. Requests are told apart by their object, not by their id, so
that an id that is used again starts a new life (FAULTS: K10).
"""

from __future__ import annotations

import enum
import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from vllm.v1.request import RequestStatus

from safe_offload.errors import InvariantError
from safe_offload.observe.counters import Count, Counters, is_milestone
from safe_offload.scheduler.limits import ALLOWED, NO_LIMITS, Limits, read_limits
from safe_offload.scheduler.sharing import Wait

if TYPE_CHECKING:
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

    from safe_offload.scheduler.gpu_blocks import GpuBlocks
    from safe_offload.scheduler.index import Hit
    from safe_offload.scheduler.leases import Lease
    from safe_offload.scheduler.sources import Snapshot
    from safe_offload.scheduler.witness import Sources


logger = logging.getLogger(f"vllm.{__name__}")


class Phase(enum.Enum):
    """Where a request is in its life."""

    WAITING = "waiting"
    """Known, without a hit; also after a preemption and after a load."""
    MATCHED = "matched"
    """A hit was reported to vLLM and is leased."""
    LOADING = "loading"
    """vLLM waits for a load of ours, or for the news that it failed."""
    RUNNING = "running"
    """Scheduled: its blocks are being computed and stored."""
    FINISHED = "finished"
    """vLLM has finished it."""


_EDGES: dict[Phase, frozenset[Phase]] = {
    Phase.WAITING: frozenset({Phase.MATCHED, Phase.LOADING, Phase.RUNNING, Phase.FINISHED}),
    Phase.MATCHED: frozenset({Phase.WAITING, Phase.LOADING, Phase.RUNNING, Phase.FINISHED}),
    Phase.LOADING: frozenset({Phase.WAITING, Phase.FINISHED}),
    Phase.RUNNING: frozenset({Phase.WAITING, Phase.FINISHED}),
    Phase.FINISHED: frozenset(),
}


@dataclass(slots=True, eq=False)
class RequestState:
    """One request.

    Attributes:
        request: vLLM's object.
        hit: the hit that was reported (MATCHED only), under `hit_lease`.
        prefix: lease on the host copy of its prefix, while it runs; None before its first store.
        loaded: lease on what it has loaded, until it becomes part of `prefix`.
        cursors: for each group, leading blocks of the block table that need no more storing.
        leftover: blocks that could not be stored for want of slots, as they were last seen.
        decodes: it had computed its prompt, and the answer so far, when it was looked at last.
        snapshots: where to find what it has computed and what is not stored, if it is preempted.
        num_loads: its loads that not all ranks have reported, or whose failure is not announced.
        num_stores: parts of stores with its blocks that not all ranks have reported.
        failing: a plan has announced that its load failed, and the workers' echo, which alone may
            end its wait, has not come back.
        announced: vLLM was told that its present wait has ended.
        limits: what its client allows to be stored and loaded.
        must_compute: its load failed, or its hit does not pay; no hit is reported for it before it
            has run.
        num_failed_loads: over its whole life.
        wait: for loads of others.
    """

    request: Request
    num_groups: int
    phase: Phase = Phase.WAITING
    hit: Hit | None = None
    hit_lease: Lease | None = None
    prefix: Lease | None = None
    loaded: Lease | None = None
    cursors: list[int] = field(default_factory=list)
    leftover: list[Sources] = field(default_factory=list)
    decodes: bool = False
    snapshots: list[Snapshot] = field(default_factory=list)
    num_loads: int = 0
    num_stores: int = 0
    failing: bool = False
    announced: bool = False
    must_compute: bool = False
    num_failed_loads: int = 0
    limits: Limits = NO_LIMITS
    wait: Wait = field(default_factory=Wait)

    def __post_init__(self) -> None:
        self.cursors = [0] * self.num_groups

    @property
    def finished(self) -> bool:
        """Whether vLLM has finished the request."""
        return self.phase is Phase.FINISHED

    def move(self, phase: Phase) -> None:
        """Change the phase.

        Raises:
            InvariantError: the table above has no such edge.
        """
        if phase not in _EDGES[self.phase]:
            raise InvariantError(
                "I4",
                f"request {self.request.request_id} cannot go from {self.phase.value} "
                f"to {phase.value}",
            )
        self.phase = phase

    def drop_hit(self) -> None:
        """Give up a reported hit that was not turned into a load."""
        if self.hit_lease is not None:
            self.hit_lease.release()
        self.hit = self.hit_lease = None
        if self.phase is Phase.MATCHED:
            self.move(Phase.WAITING)

    def let_go_prefix(self) -> None:
        """Let the host copy of its prefix be evicted."""
        for lease in (self.loaded, self.prefix):
            if lease is not None:
                lease.release()
        self.loaded = self.prefix = None

    def drop_prefix(self) -> None:
        """Its blocks are gone: let their host copy be evicted, and begin again at the first."""
        self.let_go_prefix()
        self.cursors = [0] * self.num_groups

    def preempt(self) -> None:
        """vLLM took its blocks away; what is not stored so far is in `leftover` and `snapshots`."""
        if self.phase is Phase.RUNNING:
            self.move(Phase.WAITING)
            for snapshot in self.snapshots:
                snapshot.first = self.cursors[snapshot.group_idx]
            self.drop_prefix()


class RequestBook:
    """All requests that vLLM owns, as far as hooks have named them."""

    def __init__(self, num_groups: int, counters: Counters) -> None:
        self._num_groups = num_groups
        self._counters = counters
        self._states: dict[str, RequestState] = {}
        self._finished: set[str] = set()
        self._num_bad_params = 0

    def see(self, request: Request) -> RequestState:
        """The state of a request, made if it is new or if its id is used again."""
        state = self._states.get(request.request_id)
        if state is None or state.request is not request:
            if state is not None:
                self.finish(state)
            state = RequestState(request, self._num_groups, limits=self._read_limits(request))
            self._states[request.request_id] = state
            self._finished.discard(request.request_id)
        return state

    def _read_limits(self, request: Request) -> Limits:
        limits, problems = read_limits(request.kv_transfer_params)
        if problems:
            self._counters[Count.BAD_REQUEST_PARAMS] += 1
            self._num_bad_params += 1
            if is_milestone(self._num_bad_params):
                logger.warning(
                    "kv_transfer_params of %d requests could not be used, and they were served "
                    "without limits; of the last one %s. Allowed: %s.",
                    self._num_bad_params,
                    " and ".join(problems),
                    ALLOWED,
                )
            if not isinstance(request.kv_transfer_params, dict):
                # vLLM asks it for keys, right behind our hook and later on.
                request.kv_transfer_params = None
        return limits

    def get(self, request_id: str) -> RequestState | None:
        """The state of a request id, if any hook has named it."""
        return self._states.get(request_id)

    def finish(self, state: RequestState) -> None:
        """The request has ended: give up what only a live request needs."""
        if state.finished:
            return
        state.drop_hit()
        state.move(Phase.FINISHED)
        state.leftover, state.snapshots = [], []
        if not state.num_stores:
            state.drop_prefix()
        self._finished.add(state.request.request_id)

    def purge(self, gpu: GpuBlocks) -> None:
        """Forget finished requests for which vLLM holds no block any more."""
        for request_id in list(self._finished):
            state = self._states[request_id]
            if not state.num_loads and not gpu.holds_blocks(request_id):
                del self._states[request_id]
                self._finished.discard(request_id)

    @property
    def has_live(self) -> bool:
        """Whether there is a request that has not finished."""
        return len(self._states) > len(self._finished)

    def __iter__(self) -> Iterator[RequestState]:
        return iter(self._states.values())

    def __len__(self) -> int:
        return len(self._states)

    def filter(self, output: KVConnectorOutput, gpu: GpuBlocks) -> None:
        """Keep of vLLM's finished ids only those that the scheduler can act on (I3).

        vLLM asserts on every other (FAULTS: C2, C3, C4). Ids of other connectors (MultiConnector)
        are judged by the same rules and pass.
        """
        failed = output.failed_recving
        received = self._keep(
            output.finished_recving, lambda i: self._refuse_received(i, gpu, i in failed)
        )
        sent = self._keep(
            output.finished_sending,
            lambda i: Count.DROPPED_DUPLICATE_IDS if i in received else self._refuse_sent(i, gpu),
        )
        for request_id in received:
            state = self._states[request_id]
            state.announced, state.failing = True, False
            if request_id in failed:
                state.snapshots = []  # of a table that vLLM gives up now, for another one
        output.finished_recving = received or None
        output.finished_sending = sent or None

    def _keep(
        self, request_ids: Iterable[str] | None, refuse: Callable[[str], Count | None]
    ) -> set[str]:
        kept: set[str] = set()
        for request_id in request_ids or ():
            reason = refuse(request_id)
            if reason is None:
                kept.add(request_id)
            else:
                self._counters[reason] += 1
                logger.debug("dropped finished id %s: %s", request_id, reason.doc)
        return kept

    def _refuse_received(self, request_id: str, gpu: GpuBlocks, failed: bool) -> Count | None:
        state = self._states.get(request_id)
        if state is None:
            return Count.DROPPED_UNKNOWN_IDS
        if state.num_loads or (state.failing and not failed):
            return Count.DROPPED_PREMATURE_IDS
        if state.request.status == RequestStatus.WAITING_FOR_REMOTE_KVS:
            return Count.DROPPED_DUPLICATE_IDS if state.announced else None
        if state.request.is_finished() and gpu.holds_blocks(request_id):
            return None
        return Count.DROPPED_UNOWNED_IDS

    def _refuse_sent(self, request_id: str, gpu: GpuBlocks) -> Count | None:
        state = self._states.get(request_id)
        if state is None:
            return Count.DROPPED_UNKNOWN_IDS
        if state.num_loads:
            return Count.DROPPED_PREMATURE_IDS  # the load still writes the blocks
        if state.request.is_finished() and gpu.holds_blocks(request_id):
            return None
        return Count.DROPPED_UNOWNED_IDS
