"""The state of requests, and the filter of finished request ids.

vLLM's hooks name a request in any order, repeatedly, or not at all. The first of them creates its
`RequestState`, which is kept until vLLM holds no block of the request. Requests are identified by
their object, not by their id, so that a reused id is a new request.
"""

from __future__ import annotations

import enum
import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from vllm.v1.request import RequestStatus

from safe_offload.errors import InvariantError
from safe_offload.observe.counters import Count, Counters, is_milestone
from safe_offload.scheduler.limits import ALLOWED, NO_LIMITS, Limits, read_limits

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_utils import KVCacheBlock
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

    from safe_offload.scheduler.blocks import BlockSet, GpuBlocks
    from safe_offload.scheduler.cache.leases import Lease
    from safe_offload.scheduler.features.pins.pins import Pin
    from safe_offload.scheduler.loads.admission import Need
    from safe_offload.scheduler.loads.boundaries import Boundary
    from safe_offload.scheduler.loads.loads import LoadProgress
    from safe_offload.scheduler.outdated import OutdatedTable
    from safe_offload.scheduler.stores.eager import EagerProgress
    from safe_offload.scheduler.stores.extras import Extra
    from safe_offload.scheduler.stores.policy import Snapshot
    from safe_offload.scheduler.tiers.lookups import LookUp

logger = logging.getLogger(f"vllm.{__name__}")

HIT_ENDS_MAX = 256
"""Per request: at its end, the host's blocks at each are checked."""
HELD_LOOKS = 64
"""Ended requests checked per step for blocks and loads that are still held."""


class Phase(enum.Enum):
    """The phase of a request."""

    WAITING = "waiting"
    """Known, without a hit; also after a preemption and after a load."""
    MATCHED = "matched"
    """A hit was reported to vLLM and is leased."""
    LOADING = "loading"
    """vLLM waits for this connector's load, or for the report of its failure."""
    RUNNING = "running"
    """Scheduled: its blocks are being computed and stored."""
    FINISHED = "finished"
    """vLLM has finished it."""

    __hash__ = object.__hash__  # an enum's own is a call


_EDGES: dict[Phase, frozenset[Phase]] = {
    Phase.WAITING: frozenset({Phase.MATCHED, Phase.LOADING, Phase.RUNNING, Phase.FINISHED}),
    Phase.MATCHED: frozenset({Phase.WAITING, Phase.LOADING, Phase.RUNNING, Phase.FINISHED}),
    Phase.LOADING: frozenset({Phase.WAITING, Phase.FINISHED}),
    Phase.RUNNING: frozenset({Phase.WAITING, Phase.FINISHED}),
    Phase.FINISHED: frozenset(),
}


class RequestQueue(dict["RequestState", None]):
    """Requests that wait for the same event, in the order of arrival.

    `RequestState.close` removes the request from all its queues.

    Bound: the requests that vLLM has.
    """

    __slots__ = ()

    def add(self, state: RequestState) -> None:
        """Add a request, unless it is in the queue."""
        if state not in self:
            self[state] = None
            state.queues += (self,)

    def discard(self, state: RequestState) -> None:
        """Remove a request, if it is in the queue."""
        if state in self:
            del self[state]
            state.queues = tuple(queue for queue in state.queues if queue is not self)

    def clear(self) -> None:
        """Remove all requests."""
        for state in list(self):
            self.discard(state)


class RequestState:
    """The state of one request; nothing about it is kept anywhere else.

    Only the methods here change the fields, except for the slots, each of which one other file
    fills.

    Bound: `HIT_ENDS_MAX` ends, and that of each slot's owner.
    """

    # Values of the class, so that a request is made in a few instructions.
    phase = Phase.WAITING
    num_loads: int = 0  # loads that not all ranks have reported, or whose failure is not announced
    # A plan has announced that its load failed, and the workers have not yet reported that to vLLM,
    # which alone ends its wait.
    is_failing: bool = False
    is_announced: bool = False  # the end of its present wait was reported to vLLM
    # Its blocks are stored even if others are worth more, and at once when it ends.
    is_retained: bool = False
    # Fields that vLLM adds to the `kv_transfer_params` of its response, if any.
    response: dict[str, Any] | None = None
    queues: tuple[RequestQueue, ...] = ()  # that it is in; only `RequestQueue` changes them
    # ---- slots
    load: LoadProgress  # its hits and loads
    need: Need | None = None  # the GPU blocks that it holds for a load, and those that it misses
    # Some of its hashes, by which requests with the same ones are found.
    marks: Sequence[bytes] = ()
    boundary: Boundary | None = None  # where vLLM retains its windows and states
    # Blocks that vLLM has hashed for the connector, by boundary, since it last started.
    extras: deque[list[Extra]] | None = None
    # At the last check for blocks to store, it had computed all its tokens.
    is_decoding: bool = False
    num_computed: int = 0  # of its tokens at that check, if it had not
    snapshots: Sequence[Snapshot] = ()  # its block tables at that check
    tables: Sequence[Sequence[KVCacheBlock]] = ()  # its block tables when it last started to run
    eager: EagerProgress | None = None  # the progress of its eager stores
    # Its blocks from this hash on are not stored lazily; None if all may be.
    left_out_from: int | None = None
    prefix: Lease | None = None  # a lease of its host copy
    loaded: Lease | None = None  # a lease of its loaded slots, until they become part of its prefix
    num_parts: int = 0  # of unsettled stores that extend its prefix
    left_over: Sequence[BlockSet] = ()  # blocks that found no slots, as they were at the last check
    outdated: Sequence[OutdatedTable] = ()  # its block tables at a reset, while it has one of them
    lookup: LookUp | None = None  # its lookups in tiers; None without
    private: int | None = None  # number of its hashes checked for private ones; None if it has none
    num_learned: int | None = None  # number of its hashes that KV events can describe; None without
    # Tokens requested from the host, while it waits; None if no tenant counts them.
    num_requested: int | None = None
    pins: Sequence[Pin] = ()  # that it uses

    def __init__(self, request: Request, limits: Limits = NO_LIMITS) -> None:
        self.request = request
        self.limits = limits
        # Tokens at which hits of its prompt end: the ends of the GPU's and the host's hits, and
        # points of divergence; the first `HIT_ENDS_MAX` of them.
        self.hit_ends: set[int] = set()

    def __repr__(self) -> str:
        return f"<RequestState: {self.request.request_id} is {self.phase.value}>"

    @property
    def finished(self) -> bool:
        """Return whether vLLM has finished the request."""
        return self.phase is Phase.FINISHED

    @property
    def holds_blocks(self) -> bool:
        """Return whether vLLM holds loaded blocks for it although it does not run."""
        status, is_begun = self.request.status, self.request.num_computed_tokens > 0
        is_ready = status in (RequestStatus.WAITING, RequestStatus.PREEMPTED)
        return status == RequestStatus.WAITING_FOR_REMOTE_KVS or bool(is_ready and is_begun)

    def move(self, phase: Phase) -> None:
        """Change the phase; raise InvariantError for an edge that the table above lacks."""
        if phase not in _EDGES[self.phase]:
            raise InvariantError(
                "I4",
                f"request {self.request.request_id} cannot go from {self.phase.value} "
                f"to {phase.value}",
            )
        self.phase = phase

    def limit(self, limits: Limits) -> None:
        """Replace its limits."""
        self.limits = limits

    def retain(self) -> None:
        """Store all its blocks without delay; see `is_retained`."""
        self.is_retained = True

    def refuse(self, num_tokens: int) -> None:
        """Store no block that ends after this many tokens, as others are worth more."""
        self.limits = replace(self.limits, store_tokens=num_tokens)

    def respond(self, fields: Mapping[str, Any]) -> None:
        """Add fields to the response of a request that ends."""
        self.response = {**(self.response or {}), **fields}

    def close(self) -> None:
        """Remove an ended request from all queues; its slots are freed with the state.

        The owners of slots have returned leases and shared counts before, in the order of
        `Planner._end`.
        """
        self.move(Phase.FINISHED)
        for queue in self.queues:
            del queue[self]
        self.queues = ()

    def ends_hits_at(self, num_tokens: int) -> None:
        """Record a token at which hits end."""
        if len(self.hit_ends) < HIT_ENDS_MAX:
            self.hit_ends.add(num_tokens)

    def allocated(self) -> None:
        """vLLM has allocated blocks: the end of its next wait is not announced yet."""
        self.is_announced = False

    def begin_load(self) -> None:
        """vLLM waits for a load of the request from now on."""
        self.move(Phase.LOADING)
        self.num_loads += 1

    def end_load(self, *, has_failed: bool) -> None:
        """Its load has ended: every rank has reported it, or a plan announces its failure."""
        self.is_failing |= has_failed
        if self.phase is Phase.LOADING:
            self.move(Phase.WAITING)
        self.num_loads -= 1  # last: while it counts, an error before ends in a failure

    def announce_failure(self) -> bool:
        """vLLM waits for an unplanned load; return whether its failure is to be announced."""
        self.is_announced = False
        is_new = not self.num_loads
        self.num_loads += is_new
        return is_new

    def mend(self, num_loads: int) -> None:
        """After an internal error, set the number of its remaining loads."""
        self.num_loads = num_loads

    def announced(self) -> None:
        """The end of its wait is reported to vLLM."""
        self.is_announced, self.is_failing = True, False


class RequestBook:
    """All requests of vLLM that a hook has named. Only this class changes its state.

    Bound: the requests that vLLM has, and ended ones whose blocks or loads are still held.
    """

    def __init__(self, counters: Counters, begin_loads: Callable[[], LoadProgress]) -> None:
        self._counters = counters
        self._begin_loads = begin_loads  # returns the initial `load` of a request
        self._states: dict[str, RequestState] = {}
        self.get = self._states.get
        """Returns the state of a request id, if any hook has named it."""
        self.finished: set[str] = set()  # ids of finished requests
        self.num_running = 0  # running requests
        self._held: deque[RequestState] = deque()
        self._num_ended = 0
        self._perhaps_brought = RequestQueue()
        self._num_bad_params = 0

    def __repr__(self) -> str:
        return f"RequestBook({len(self._states)} requests, {len(self.finished)} finished)"

    def add(self, request: Request) -> RequestState:
        """Add a new request, in place of one with the same id, and return its state."""
        limits = NO_LIMITS if request.kv_transfer_params is None else self._read_limits(request)
        state = RequestState(request, limits)
        state.load = self._begin_loads()
        self._states[request.request_id] = state
        self.finished.discard(request.request_id)
        return state

    def _read_limits(self, request: Request) -> Limits:
        limits, problems = read_limits(request.kv_transfer_params)
        if problems:
            self._counters[Count.BAD_REQUEST_PARAMS] += 1
            self._num_bad_params += 1
            if is_milestone(self._num_bad_params):
                logger.warning(
                    "Invalid kv_transfer_params in %d requests, which were served without limits; "
                    "in the last one, %s. Allowed: %s.",
                    self._num_bad_params,
                    " and ".join(problems),
                    ALLOWED,
                )
            if not isinstance(request.kv_transfer_params, dict):
                # vLLM asks it for keys, right after our hook and later on.
                request.kv_transfer_params = None
        return limits

    def find(self, request: Request) -> RequestState | None:
        """Return the state of this request object; None if another one has its id."""
        state = self._states.get(request.request_id)
        return state if state is not None and state.request is request else None

    def run(self, state: RequestState) -> None:
        """A request has its blocks: it counts as running, whichever connector fills them."""
        state.move(Phase.RUNNING)
        self.num_running += 1
        if state.request.kv_transfer_params is not None:  # else none brings it from elsewhere
            self._perhaps_brought.add(state)

    def runs(self, request_id: str) -> bool:
        """Return whether it has its blocks, and has not ended."""
        state = self._states.get(request_id)
        return state is not None and state.phase is Phase.RUNNING

    def preempt(self, state: RequestState) -> None:
        """vLLM took a running request's blocks away."""
        state.move(Phase.WAITING)
        self.num_running -= 1

    def finish(self, state: RequestState) -> None:
        """A request has ended."""
        self.num_running -= state.phase is Phase.RUNNING
        state.close()
        self.finished.add(state.request.request_id)
        self._held.appendleft(state)
        self._num_ended += 1

    def purge(self, gpu: GpuBlocks) -> None:
        """Remove finished requests whose blocks vLLM has freed; check a few held ones in turn."""
        num_looks, self._num_ended = self._num_ended + HELD_LOOKS, 0
        for _ in range(min(len(self._held), num_looks)):
            state = self._held.popleft()
            request_id = state.request.request_id
            if self._states.get(request_id) is not state:
                continue  # another one of the same id has come
            if state.num_loads or gpu.holds_blocks(request_id):
                self._held.append(state)
            else:
                del self._states[request_id]
                self.finished.discard(request_id)

    @property
    def num_live(self) -> int:
        """The number of unfinished requests."""
        return len(self._states) - len(self.finished)

    def __iter__(self) -> Iterator[RequestState]:
        return iter(self._states.values())

    def brought(self) -> list[str]:
        """Return the ids of requests that wait for another connector's load."""
        for state in list(self._perhaps_brought):
            is_waiting = state.request.status == RequestStatus.WAITING_FOR_REMOTE_KVS
            if not (is_waiting and state.phase is Phase.RUNNING):
                self._perhaps_brought.discard(state)  # until it is given blocks again
        return [state.request.request_id for state in self._perhaps_brought]

    def filter(self, output: KVConnectorOutput, gpu: GpuBlocks) -> list[RequestState]:
        """Remove finished ids on which the scheduler would assert (I3), also other connectors' ids.

        Returns the requests that vLLM recomputes now, because their load failed.
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
            self._states[request_id].announced()
        output.finished_recving = received or None
        output.finished_sending = sent or None
        return [self._states[request_id] for request_id in received if request_id in failed]

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
        if state.num_loads or (state.is_failing and not failed):
            return Count.DROPPED_PREMATURE_IDS
        if state.request.status == RequestStatus.WAITING_FOR_REMOTE_KVS:
            return Count.DROPPED_DUPLICATE_IDS if state.is_announced else None
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
