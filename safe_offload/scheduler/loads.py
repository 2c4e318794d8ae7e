"""Loads: from a leased hit to a request that may run, or to the news that it must recompute.

vLLM waits for a load by the id of its request, and what it is told cannot be taken back. So the id
is told once, when every rank has the bytes; and a load that failed anywhere is withheld, announced
to all workers by the next plan, and reported by each of them as received and failed, which is the
only road on which vLLM recomputes with several KV cache groups (DESIGN section 2).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING

from safe_offload.observe.counters import Count, Counters
from safe_offload.protocol import Transfer, ids_of
from safe_offload.scheduler.admission import Admission
from safe_offload.scheduler.cost import Costs, Offer
from safe_offload.scheduler.hits import NO_SLOT, Hit, HostHits, needed
from safe_offload.scheduler.leases import Lease, LeaseBook, LeaseKind
from safe_offload.scheduler.requests import Phase, RequestState
from safe_offload.scheduler.sharing import Sharing

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_utils import KVCacheBlock

    from safe_offload.scheduler.gpu_blocks import GpuBlocks

FAILED_LOADS_MAX = 3
"""So many loads of one request may fail, then it is offered no more hits."""


@dataclass(slots=True, eq=False)
class Load:
    """A load from its planning until every rank has reported it.

    Attributes:
        lease: the slots it reads.
        owner: the request that waits for it.
        num_tokens: that it brings.
        hashes: of the owner's blocks, from its first token on.
        first_hash, end_hash: which of these blocks it brings.
        ranks_left: ranks that have not reported it.
        failed: a rank reported that it failed.
        has_ended: every rank has reported it, or it was given up.
        sent_s: when the plan was made that names it.
    """

    transfer: Transfer
    lease: Lease
    owner: RequestState
    num_tokens: int
    hashes: Sequence[bytes]
    first_hash: int
    end_hash: int
    ranks_left: set[int]
    failed: bool = False
    has_ended: bool = False
    sent_s: float | None = None

    @property
    def is_under_way(self) -> bool:
        """Whether the owner still waits for it."""
        return not (self.has_ended or self.owner.finished)

    @property
    def has_landed(self) -> bool:
        """Whether the owner has got what it brings."""
        return self.has_ended and not (self.failed or self.owner.finished)


class Loads:
    """All loads that are planned or in flight, and the failures that vLLM has not been told.

    Args:
        index: where hits are found.
        leases: where hits are protected.
        transfer_ids: never gives the same twice.
        num_ranks: workers that report.
        counters: what happens is counted here.
        wait_max_s: see `Sharing`.
        costs: say whether a hit is worth loading.
    """

    def __init__(  # noqa: PLR0913
        self,
        index: HostHits,
        leases: LeaseBook,
        transfer_ids: Iterable[int],
        num_ranks: int,
        counters: Counters,
        wait_max_s: float,
        costs: Costs,
    ) -> None:
        self._index = index
        self._leases = leases
        self._transfer_ids = iter(transfer_ids)
        self._num_ranks = num_ranks
        self._counters = counters
        self._admission = Admission(index)
        self._sharing = Sharing(index, wait_max_s, counters)
        self._costs = costs
        self._new: list[Load] = []
        self._in_flight: dict[int, Load] = {}
        self._failures: list[RequestState] = []
        self._null_block_id = 0

    def bind(self, gpu: GpuBlocks) -> None:
        """Learn which GPU blocks there are."""
        self._null_block_id = gpu.null_block_id
        self._admission.bind(gpu.num_blocks)

    def match(self, state: RequestState, num_computed_tokens: int, now_s: float) -> int | None:
        """Find and lease the longest hit of a waiting request (I1).

        Returns:
            Its tokens; None if a load of another request brings the first of them (see `sharing`).
        """
        request = state.request
        if state.must_compute or state.num_failed_loads >= FAILED_LOADS_MAX:
            state.drop_hit()
            return 0
        if state.wait.load is not None and self._sharing.goes_on(state, num_computed_tokens, now_s):
            num_wanted = request.num_tokens - num_computed_tokens - 1
            if self._is_worth_waiting(state, num_computed_tokens, num_wanted, now_s):
                return None
            state.wait.load = None
            self._counters[Count.UNPAID_HITS] += 1
            return 0
        # The last token is always computed, for its logits.
        num_tokens_max = request.num_tokens - 1
        if state.limits.load_tokens is not None:
            num_tokens_max = min(num_tokens_max, num_computed_tokens + state.limits.load_tokens)
        wanted = request.block_hashes, num_computed_tokens, num_tokens_max
        hit = state.hit
        if hit is not None and not self._index.is_still_longest(hit, *wanted):
            hit = self._grow_hit(state, hit, wanted)
        if hit is None:
            state.drop_hit()
            hit = self._index.find_hit(*wanted)
            if hit is None:
                return 0
        is_loading = self._in_flight or self._new
        if is_loading and self._begins_to_wait(state, hit, now_s):
            state.drop_hit()
            return None
        num_left = request.num_tokens - num_computed_tokens - hit.num_tokens
        if hit is not state.hit and not self._costs.pays(Offer(hit.num_tokens, num_left)):
            self._counters[Count.UNPAID_HITS] += 1
            state.must_compute = True  # decided once, however often vLLM asks
            state.drop_hit()
            return 0
        if not self._admission.admits(state, num_computed_tokens + hit.num_tokens):
            self._counters[Count.POSTPONED_HITS] += 1
            state.drop_hit()
            return 0
        if hit is not state.hit:
            state.hit, state.hit_lease = hit, self._leases.lease(LeaseKind.MATCH, hit.slots())
            state.move(Phase.MATCHED)
        return hit.num_tokens

    def _begins_to_wait(self, state: RequestState, hit: Hit, now_s: float) -> bool:
        """Whether a request waits from now on for another's load of what it has a hit for."""
        num_computed_tokens = hit.num_computed_tokens
        under_way = chain(self._in_flight.values(), self._new)
        load = self._sharing.find(state, num_computed_tokens, under_way)
        if load is None:
            return False
        self._sharing.begin(state, load, num_computed_tokens, now_s)
        if self._is_worth_waiting(state, num_computed_tokens, hit.num_tokens, now_s):
            self._counters[Count.SHARED_WAITS] += 1
            return True
        state.wait.load = None
        return False

    def _is_worth_waiting(
        self, state: RequestState, num_computed_tokens: int, num_tokens_max: int, now_s: float
    ) -> bool:
        """Whether what a request waits for is expected before it could be computed.

        Args:
            state: whose request waits.
            num_tokens_max: it has a use for so many behind those that the GPU has.
        """
        load = state.wait.load
        assert load is not None
        num_brought = load.end_hash * self._index.hash_block_size - num_computed_tokens
        num_tokens = min(num_brought, num_tokens_max)
        num_left = state.request.num_tokens - num_computed_tokens - num_tokens
        loading_s = now_s - load.sent_s if load.sent_s is not None else 0.0
        return self._costs.pays(Offer(num_tokens, num_left, loading_s))

    def _grow_hit(
        self, state: RequestState, hit: Hit, wanted: tuple[Sequence[bytes], int, int]
    ) -> Hit | None:
        """See `HostHits.grown`; what is new is leased too."""
        grown = self._index.grown(hit, *wanted)
        if grown is None or state.hit_lease is None:
            return None
        state.hit, new_slots = grown
        self._leases.extend_head(state.hit_lease, new_slots)
        return state.hit

    def begin(
        self,
        state: RequestState,
        blocks_by_group: Sequence[Sequence[KVCacheBlock]],
        num_tokens: int,
    ) -> None:
        """Turn the request's hit into a load of its first `num_tokens` tokens.

        vLLM waits for it from now on, so that whatever is wrong with it ends in a failure that is
        announced.
        """
        block_ids, slots = self._pair(state, blocks_by_group, num_tokens)
        num_local_tokens = state.hit.num_computed_tokens if state.hit is not None else 0
        self._admission.hold(state, num_local_tokens + num_tokens)
        if slots and state.hit_lease is not None:
            lease, state.hit_lease = state.hit_lease, None
            lease.keep(LeaseKind.LOAD, slots)
            transfer = Transfer(next(self._transfer_ids), ids_of(block_ids), ids_of(slots))
            size = self._index.hash_block_size
            places = num_local_tokens // size, (num_local_tokens + num_tokens) // size
            ranks = set(range(self._num_ranks))
            hashes = state.request.block_hashes
            self._new.append(Load(transfer, lease, state, num_tokens, hashes, *places, ranks))
            self._counters[Count.HIT_TOKENS] += num_tokens
            self._index.slots.mark_hit(slots)
        else:
            self._counters[Count.UNUSABLE_HITS] += 1
            self._failures.append(state)
        state.drop_hit()
        state.move(Phase.LOADING)
        state.num_loads += 1

    def _pair(
        self,
        state: RequestState,
        blocks_by_group: Sequence[Sequence[KVCacheBlock]],
        num_tokens: int,
    ) -> tuple[list[int], list[int]]:
        """Ids of GPU blocks and of their host slots, for the first `num_tokens` tokens of the hit.

        Returns:
            Empty if the hit cannot fill every block that vLLM allocated for these tokens: loading
            the rest would leave bytes in the window of attention that nobody wrote (I6). And if it
            ends elsewhere than the Mamba state that it brings.
        """
        hit = state.hit
        if hit is None or num_tokens > hit.num_tokens:
            return [], []
        if num_tokens < hit.num_tokens and self._index.has_states:
            return [], []
        all_block_ids: list[int] = []
        all_slots: list[int] = []
        for group_idx in self._index.group_ids:
            block_size = self._index.group_block_sizes[group_idx]
            first = hit.num_computed_tokens // block_size
            last = -(-(hit.num_computed_tokens + num_tokens) // block_size)
            block_ids = [block.block_id for block in blocks_by_group[group_idx][first:last]]
            slots = hit.slots_by_group[group_idx][: len(block_ids)]
            if len(slots) < len(block_ids):
                return [], []
            if self._null_block_id in block_ids:
                slots = needed(slots, block_ids, self._null_block_id)
                block_ids = needed(block_ids, block_ids, self._null_block_id)
            if NO_SLOT in slots:
                return [], []
            all_block_ids += block_ids
            all_slots += slots
        return all_block_ids, all_slots

    def let_go(self, state: RequestState) -> None:
        """A request goes on, is preempted, or has ended: it holds no blocks for a load any more."""
        self._admission.release(state)

    def owe_failure(self, state: RequestState) -> None:
        """Something went wrong after vLLM began to wait: tell it to recompute."""
        state.announced = False
        if state.num_loads == 0:
            state.num_loads = 1
            self._failures.append(state)

    def new_transfers(self) -> tuple[Transfer, ...]:
        """The loads that have begun since the last `sent`."""
        return tuple(load.transfer for load in self._new)

    @property
    def failures(self) -> tuple[str, ...]:
        """Ids of requests whose load failed since the last `sent`."""
        return tuple(state.request.request_id for state in self._failures)

    def sent(self, now_s: float | None = None) -> None:
        """The workers have been told of the new loads, which are in flight now, and of failures.

        From now on only the workers' echo ends the wait of a request whose load failed. It is
        offered no other hit before it has run: the same might be unusable again (FAULTS: H4), and
        vLLM 0.32.0 counts what it has reserved for the first load of a request against its second,
        which in a small pool then never begins.
        """
        for load in self._new:
            load.sent_s = now_s
            self._in_flight[load.transfer.transfer_id] = load
        self._new = []
        failures, self._failures = self._failures, []
        for state in failures:
            state.num_loads -= 1
            state.failing = True
            state.must_compute = True
            state.num_failed_loads += 1
            if state.num_failed_loads == FAILED_LOADS_MAX:
                self._counters[Count.GIVEN_UP_REQUESTS] += 1
            if state.phase is Phase.LOADING:
                state.move(Phase.WAITING)
        self._counters[Count.FAILED_LOADS] += len(failures)

    def give_up(self, states: Iterable[RequestState]) -> None:
        """After an internal error: a load that no worker copies has failed, the others go on.

        Args:
            states: all requests; what the books say about their loads is made anew.
        """
        for load in self._new:
            load.failed = load.has_ended = True
        self._new = []
        self._in_flight = {i: load for i, load in self._in_flight.items() if load.ranks_left}
        loading = {load.owner for load in self._in_flight.values()}
        failed = [
            s for s in states if (s.phase is Phase.LOADING or s.num_loads) and s not in loading
        ]
        for state in states:
            state.num_loads = int(state in loading)
        for state in failed:
            state.num_loads = 1
        self._failures = failed

    def get(self, transfer_id: int) -> Load | None:
        """The load of that id, if it is in flight."""
        return self._in_flight.get(transfer_id)

    def settle(self, load: Load) -> RequestState | None:
        """Every rank has reported a load.

        Returns:
            The request that may run now; None if the load failed, which is announced later.
        """
        del self._in_flight[load.transfer.transfer_id]
        load.has_ended = True
        state = load.owner
        if load.failed:
            # The same hit must not be offered again (FAULTS: H4).
            self._index.slots.forget(load.lease.slots)
            self._failures.append(state)
            load.lease.release()
            return None
        self._counters[Count.LOADED_TOKENS] += load.num_tokens
        self._counters[Count.LOADED_BLOCKS] += len(load.lease.slots)
        if self._costs.is_measuring and load.sent_s is not None and not state.finished:
            self._costs.landed.append((load.num_tokens, load.sent_s))
        if state.finished:
            load.lease.release()
        else:
            state.let_go_prefix()
            state.loaded = load.lease
        if state.phase is Phase.LOADING:
            state.move(Phase.WAITING)
        state.num_loads -= 1
        return state

    @property
    def owners(self) -> list[RequestState]:
        """The requests that a load or a failure belongs to."""
        loads = (*self._new, *self._in_flight.values())
        return [*(load.owner for load in loads), *self._failures]

    @property
    def leases(self) -> list[Lease]:
        """Of the loads in flight."""
        return [load.lease for load in self._in_flight.values()]

    @property
    def owners_of_new(self) -> list[RequestState]:
        """The requests whose load begins in this step."""
        return [load.owner for load in self._new]

    @property
    def new_targets(self) -> set[int]:
        """GPU blocks of the loads that have begun since the last `sent`."""
        return {block_id for load in self._new for block_id in load.transfer.block_ids}

    @property
    def has_news(self) -> bool:
        """Whether there is anything to tell the workers since the last `sent`."""
        return bool(self._new or self._failures)

    @property
    def has_work(self) -> bool:
        """Whether a load is planned or in flight, or a failure is to be announced."""
        return bool(self._new or self._in_flight or self._failures)

    def __len__(self) -> int:
        return len(self._in_flight)
