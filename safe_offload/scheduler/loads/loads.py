"""Loads: from a leased hit to a request that may run, or must be recomputed.

vLLM waits for a load by request id, and a report cannot be revoked. So the id is reported once,
when every rank has the bytes. A load that failed on any rank is withheld: the next plan announces
it to all workers, and each of them reports it as received and failed. With several KV cache groups,
vLLM recomputes only then.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import TYPE_CHECKING

from safe_offload.observe.counters import FAILED_LOADS, HIT_TOKENS, Count, Counters
from safe_offload.protocol import FailureReason, Transfer, ids_of
from safe_offload.scheduler.cache.leases import Lease, LeaseBook, LeaseKind
from safe_offload.scheduler.loads.admission import Admission
from safe_offload.scheduler.loads.cost import Costs, Offer
from safe_offload.scheduler.loads.hits import NO_SLOT, Hit, HostHits, needed
from safe_offload.scheduler.loads.shared_loads import SharedLoads, Wait, num_shared
from safe_offload.scheduler.pending import Ledger, Load
from safe_offload.scheduler.requests import Phase, RequestQueue, RequestState

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_utils import KVCacheBlock
    from vllm.v1.request import Request

    from safe_offload.scheduler.blocks import GpuBlocks

FAILED_LOADS_MAX = 3
"""Failed loads of a request after which it gets no more hits."""


Wanted = tuple[Sequence[bytes], int, int]
"""The hashes of a request, the tokens that the GPU has, and the upper limit of a hit's end."""


class Case(enum.Enum):
    """The decision of `Loads` when vLLM asks for a hit."""

    COMPUTE = 1
    """Its load failed, or its hit did not pay, and it has not run since: no hit."""
    WAIT_ON = 2
    """It waits for another request's load, still usefully: vLLM asks again."""
    WAIT_NO_MORE = 3
    """It waits for such a load, but computing is now expected to be faster: no hit."""
    BEGIN_TO_WAIT = 4
    """Another request is loading the same blocks: vLLM asks again."""
    MISS = 5
    """The host has no blocks that continue the GPU's hit: no hit."""
    DOES_NOT_PAY = 6
    """Loading is expected to take longer than computing: no hit before it has run."""
    POSTPONE = 7
    """Others hold too many GPU blocks: vLLM asks again while they load; otherwise no hit."""
    OFFER = 8
    """A new hit, which is leased."""
    HOLD_BACK = 9
    """The reported hit is still the longest, but vLLM found too few blocks, perhaps because it
    reserves some for a request whose load has failed and that holds none: vLLM asks again."""
    OFFER_AGAIN = 10
    """The reported hit is still the longest."""

    __hash__ = object.__hash__  # an enum's own is a call


Decision = tuple[Case, Hit | None, Load | None, int]
"""With the hit, the load of another request that is relevant, and, without a hit, the token where
prompts diverged (`HostHits.search`)."""


class LoadProgress:
    """The hits and loads of a request; only `Loads` changes it."""

    hit: Hit | None = None  # the reported hit (MATCHED only), under `lease`
    lease: Lease | None = None
    # Its load failed, or its hit does not pay; it gets no hit before it has run.
    must_compute = False
    num_failed = 0  # failed loads, over its whole life
    has_failed = False  # a load has failed since it last ran

    def __init__(self) -> None:
        self.wait = Wait()  # for loads of others


class Loads:
    """Hits, loads that are planned or in flight, and failures to be announced.

    Bound: the requests that vLLM has.
    """

    def __init__(  # noqa: PLR0913
        self,
        hits: HostHits,
        leases: LeaseBook,
        gpu: GpuBlocks,
        transfer_ids: Iterable[int],
        num_ranks: int,
        counters: Counters,
        wait_max_s: float,
        costs: Costs,
    ) -> None:
        self._hits = hits
        self._geometry = hits.geometry
        self._is_plain = hits.geometry.is_plain
        self._boundaries = hits.boundaries
        self._leases = leases
        self._counters = counters
        self._admission = Admission(hits.geometry, gpu.num_blocks)
        self._shared_loads = SharedLoads(hits, wait_max_s, counters)
        self._costs, self._offers_all = costs, costs.offers_all
        self._null_block_id = gpu.null_block_id
        self.ledger: Ledger[Load] = Ledger(transfer_ids, num_ranks)
        self.unannounced: list[RequestState] = []  # requests whose failure is to be announced
        # Blocks that the next step reads although no load of them can be planned.
        self.unloaded: list[int] = []
        self.of_step: list[Load] = []  # loads in the step that is being scheduled
        self._num_failed = 0  # requests whose load has failed since they ran last
        # Requests for which vLLM may hold blocks of a finished load. Read only outside.
        self.holders = RequestQueue()

    def __repr__(self) -> str:
        return f"Loads({self.ledger!r})"

    # ---- hits ----------------------------------------------------------------------------------

    def match(self, state: RequestState, num_computed_tokens: int, now_s: float) -> int | None:
        """Lease the longest hit of a waiting request (I1); return its tokens, None to wait."""
        request, progress = state.request, state.load
        wait = progress.wait
        was_put_off = wait.is_put_off
        if was_put_off:
            wait.asked_again(now_s)
        if wait.load is not None:
            self._shared_loads.go_on(wait, request, num_computed_tokens, now_s)
        # The last token is always computed, for its logits.
        num_tokens_max = request.num_tokens - 1
        if state.limits.load_tokens is not None:
            limit = num_computed_tokens + state.limits.load_tokens
            num_tokens_max = min(num_tokens_max, limit - limit % self._geometry.hash_block_size)
        hashes, hit = request.block_hashes, progress.hit
        wanted = hashes, num_computed_tokens, num_tokens_max
        if hit is not None and not self._hits.is_still_longest(
            hit, hashes, num_computed_tokens, num_tokens_max
        ):
            self._renew_hit(state, hit, wanted)
        decision = self._decide(state, wanted, now_s)
        if was_put_off:
            wait.end_putting_off()
        case, hit, load, parted_at = decision
        if load is None:  # the two that come most often
            if case is Case.OFFER_AGAIN and hit is not None:
                return hit.num_tokens
            if case is Case.MISS:
                if not self._is_plain:
                    self._has_no_hit(state, num_computed_tokens, parted_at)
                return 0
        return self._act(state, decision, num_computed_tokens, now_s)

    def _decide(self, state: RequestState, wanted: Wanted, now_s: float) -> Decision:
        """Return the `Case` of a request, its hit and the load that it may wait for.

        Changes nothing, except that `Costs` counts refused hits, of which it tries some.
        """
        progress = state.load
        if progress.must_compute:
            return Case.COMPUTE, None, None, 0
        request, wait, num_computed_tokens = state.request, progress.wait, wanted[1]
        if wait.load is not None:
            num_wanted = request.num_tokens - num_computed_tokens - 1
            what = wait.load, request, num_computed_tokens, num_wanted, now_s
            is_worth = self._is_worth_waiting(*what)
            return Case.WAIT_ON if is_worth else Case.WAIT_NO_MORE, None, None, 0
        hit, load, num_tokens = progress.hit, None, -1
        is_loading = self.ledger.in_flight or self.ledger.new
        if hit is None:
            if is_loading:
                load, num_tokens = self._find_unsearched(wait, request, wanted)
                if load and self._is_worth_waiting(
                    load, request, num_computed_tokens, num_tokens, now_s
                ):
                    return Case.BEGIN_TO_WAIT, None, load, 0
            hit, parted_at = self._hits.search(*wanted)
            if hit is None:
                return Case.MISS, None, load, parted_at
        if is_loading and load is None and num_tokens:
            load = self._shared_loads.find(wait, request, num_computed_tokens)
            if load and self._is_worth_waiting(
                load, request, num_computed_tokens, hit.num_tokens, now_s
            ):
                return Case.BEGIN_TO_WAIT, hit, load, 0
        is_new = hit is not progress.hit
        if is_new and not (self._offers_all or wait.is_put_off):
            num_left = request.num_tokens - num_computed_tokens - hit.num_tokens
            if not self._costs.pays(Offer(hit.num_tokens, num_left)):
                return Case.DOES_NOT_PAY, hit, load, 0
        if not self._is_plain and not self._admission.admits(
            state, num_computed_tokens + hit.num_tokens
        ):
            return Case.POSTPONE, hit, load, 0
        if is_new:
            return Case.OFFER, hit, load, 0
        if self._num_failed:
            return Case.HOLD_BACK, hit, load, 0
        return Case.OFFER_AGAIN, hit, load, 0

    def _act(
        self, state: RequestState, decision: Decision, num_computed_tokens: int, now_s: float
    ) -> int | None:
        case, hit, load, parted_at = decision
        progress = state.load
        if load is not None:  # which is not waited for again
            progress.wait.begin(load, num_computed_tokens, now_s)
            if case is not Case.BEGIN_TO_WAIT:
                progress.wait.end()
        if case is Case.OFFER and hit is not None:
            progress.hit, progress.lease = hit, self._leases.lease(LeaseKind.MATCH, hit.slots())
            state.move(Phase.MATCHED)
            return hit.num_tokens
        if case is Case.OFFER_AGAIN and hit is not None:
            return hit.num_tokens
        if case is Case.HOLD_BACK or case is Case.WAIT_ON:
            return None
        self.drop_hit(state)
        if case is Case.BEGIN_TO_WAIT:
            self._counters[Count.SHARED_WAITS] += 1
            return None
        if case is Case.MISS:
            if not self._is_plain:
                self._has_no_hit(state, num_computed_tokens, parted_at)
        elif case is Case.WAIT_NO_MORE:
            progress.wait.end()
            self._counters[Count.SKIPPED_HITS] += 1
        elif case is Case.DOES_NOT_PAY:
            self._counters[Count.SKIPPED_HITS] += 1
            progress.must_compute = True  # decided once, however often vLLM asks
        elif case is Case.POSTPONE and hit is not None:
            self._counters[Count.POSTPONED_HITS] += 1
            self._boundaries.part(state, hit.parted_at)
            if self.is_loading and self._shared_loads.puts_off(progress.wait, now_s):
                return None
        return 0

    def drop_hit(self, state: RequestState) -> None:
        """Drop a reported hit that does not become a load."""
        progress = state.load
        if progress.lease is not None:
            progress.lease.release()
        progress.hit = progress.lease = None
        if state.phase is Phase.MATCHED:
            state.move(Phase.WAITING)

    def _find_unsearched(
        self, wait: Wait, request: Request, wanted: Wanted
    ) -> tuple[Load | None, int]:
        """Return the load to wait for and the tokens of the hit; None and -1 require a search.

        In a burst of requests with one long prefix, each search would cover the whole prefix.
        """
        hashes, num_computed_tokens, _ = wanted
        for load in self._shared_loads.candidates(wait, request, num_computed_tokens):
            num_tokens = self._num_found(load, *wanted)
            if not num_tokens:
                return None, -1
            if self._shared_loads.is_kept(load, hashes, num_computed_tokens):
                return load, num_tokens
        return None, 0

    def _num_found(
        self, load: Load, hashes: Sequence[bytes], num_computed_tokens: int, end_max: int
    ) -> int:
        """Return a lower bound of a hit's tokens from another request's load; 0 if unknown.

        The load's slots are leased, so a search would find them, if the hit may end where the two
        prompts diverge: with windows or states, it may only end where the load does. With EAGLE
        drafts, a search drops the last block.
        """
        if load.failure is not None or not self._hits.may_begin(hashes, num_computed_tokens):
            return 0
        size = self._geometry.hash_block_size
        num_dropped = self._boundaries.num_dropped_tokens // size
        count = min(num_shared(load, hashes, num_dropped), end_max // size) - num_dropped
        if not self._hits.ends_anywhere and count < load.end_hash:
            return 0
        return max(0, count * size - num_computed_tokens)

    def _is_worth_waiting(
        self,
        load: Load,
        request: Request,
        num_computed_tokens: int,
        num_tokens_max: int,
        now_s: float,
    ) -> bool:
        """Return whether another's load is expected to be faster than computing its tokens."""
        num_brought = load.end_hash * self._geometry.hash_block_size - num_computed_tokens
        num_tokens = min(num_brought, num_tokens_max)
        num_left = request.num_tokens - num_computed_tokens - num_tokens
        loading_s = now_s - load.sent_s if load.sent_s is not None else 0.0
        return self._costs.pays(Offer(num_tokens, num_left, loading_s))

    def _has_no_hit(self, state: RequestState, num_computed_tokens: int, parted_at: int) -> None:
        """Let vLLM retain windows or states where a hit might have begun."""
        state.ends_hits_at(num_computed_tokens)
        self._boundaries.part(state, parted_at)
        self._boundaries.move(state, num_computed_tokens)

    def _renew_hit(self, state: RequestState, hit: Hit, wanted: Wanted) -> None:
        """Extend a reported hit that is no longer the longest at its head, or drop it."""
        progress = state.load
        grown = self._hits.grown(hit, *wanted)
        if grown is None or progress.lease is None:
            self.drop_hit(state)
            return
        progress.hit, new_slots = grown
        self._leases.extend_head(progress.lease, new_slots)

    # ---- loads ---------------------------------------------------------------------------------

    def begin(
        self,
        state: RequestState,
        blocks_by_group: Sequence[Sequence[KVCacheBlock]],
        num_tokens: int,
        *,
        is_in_step: bool = False,
    ) -> None:
        """Turn the request's hit into a load of its first `num_tokens` tokens.

        vLLM waits for it from now on, so any problem becomes an announced failure; of a load in the
        step, blocks that were not loaded.
        """
        progress = state.load
        hit, lease = progress.hit, progress.lease
        block_ids, slots = self.pair(hit, blocks_by_group, num_tokens)
        num_local_tokens = hit.num_computed_tokens if hit is not None else 0
        if not self._is_plain:
            self._admission.hold(state, num_local_tokens + num_tokens)
        if slots and lease is not None:
            progress.lease = None
            lease.keep(LeaseKind.LOAD, slots)
            transfer_id, ranks = self.ledger.open()
            transfer = Transfer(transfer_id, ids_of(block_ids), ids_of(slots))
            size = self._geometry.hash_block_size
            load = Load(
                transfer_id=transfer_id,
                ranks_left=ranks,
                transfer=transfer,
                lease=lease,
                owner=state,
                num_tokens=num_tokens,
                hashes=state.request.block_hashes,
                first_hash=num_local_tokens // size,
                end_hash=(num_local_tokens + num_tokens) // size,
                is_in_step=is_in_step,
            )
            self.ledger.new.append(load)
            if is_in_step:  # others have its blocks as hits of the GPU
                self.of_step.append(load)
                self._counters[Count.LOADS_IN_STEP] += 1
            else:
                self._shared_loads.begin(load)
                self._counters[Count.LOADS_AHEAD] += 1
            if not self._is_plain and hit is not None:
                self._boundaries.end(load, hit.parted_at)
            self._counters[Count.HIT_TOKENS] += num_tokens
            self._counters.observe(HIT_TOKENS, num_tokens)
            self._hits.slots.mark_hit(slots)
        else:
            self._counters[Count.UNUSABLE_HITS] += 1
            if is_in_step:
                self.unloaded += [block.block_id for blocks in blocks_by_group for block in blocks]
            else:
                self.unannounced.append(state)
        self.drop_hit(state)
        if is_in_step:
            self.compute(state)
            progress.must_compute |= not slots  # once vLLM has taken its blocks away
        else:
            state.begin_load()

    def pair(
        self, hit: Hit | None, blocks_by_group: Sequence[Sequence[KVCacheBlock]], num_tokens: int
    ) -> tuple[list[int], list[int]]:
        """Return the GPU block ids and host slots of the first tokens of a hit.

        Empty if the hit cannot fill every block that vLLM allocated for these tokens, as attention
        would read unwritten bytes (I6); or if it does not end at its Mamba state.
        """
        if hit is None or num_tokens > hit.num_tokens:
            return [], []
        if num_tokens < hit.num_tokens and self._geometry.has_states:
            return [], []
        all_block_ids: list[int] = []
        all_slots: list[int] = []
        for group_idx in self._geometry.group_ids:
            block_size = self._geometry.group_block_sizes[group_idx]
            first = hit.num_computed_tokens // block_size
            end = -(-(hit.num_computed_tokens + num_tokens) // block_size)
            block_ids = [block.block_id for block in blocks_by_group[group_idx][first:end]]
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

    def compute(self, state: RequestState) -> None:
        """A request runs without a load: it may get hits and loads again."""
        if self._admission.num_holders:
            self._admission.release(state)
        progress = state.load
        if progress.has_failed:
            self._no_longer_failed(progress)
        self.holders.discard(state)
        if progress.hit is not None:
            self.drop_hit(state)
        progress.must_compute = progress.num_failed >= FAILED_LOADS_MAX
        if progress.wait.stuck_at >= 0:
            progress.wait.unstick()

    def compute_next(self, state: RequestState) -> None:
        """A failed load was reported, this connector's or another's: no hit before it has run.

        The hit might be unusable again. And vLLM 0.32.0 counts blocks reserved for the first load
        of a request against its second, which would never start in a small pool.
        """
        progress = state.load
        progress.must_compute = True
        if not state.finished:
            self._num_failed += not progress.has_failed
            progress.has_failed = True
            self.holders.add(state)

    def waits_for_failed(self) -> bool:
        """Return whether vLLM holds blocks of a request whose load failed, or preceded a reset.

        vLLM frees or uses them when that request is next in its queue, and stops at the first
        request with too few blocks, which may need these: after a reset, requests share no blocks,
        but shared blocks were counted once. So all wait until vLLM has reached each such request.
        """
        while self.holders:
            state = next(iter(self.holders))
            if state.holds_blocks:
                return True
            self.holders.discard(state)  # it takes others only to run
        return False

    def end(self, state: RequestState) -> None:
        """A request has ended: release its hit and the blocks held for a load."""
        progress = state.load
        if progress.has_failed:
            self._no_longer_failed(progress)
        if self._admission.num_holders:
            self._admission.release(state)
        if progress.hit is not None:
            self.drop_hit(state)

    def _no_longer_failed(self, progress: LoadProgress) -> None:
        progress.has_failed = False
        self._num_failed -= 1

    def reset(self, state: RequestState) -> None:
        """The host cache was reset: a request has no hit and no load to wait for."""
        if state.is_announced and state.holds_blocks:
            self.holders.add(state)
        self.drop_hit(state)
        state.load.wait.call_off()

    def fail_all(self) -> None:
        """The host cache was reset: the loads in flight are not used, either."""
        for load in (*self.ledger.new, *self.ledger.in_flight.values()):
            load.fail()

    def announce_failure(self, state: RequestState) -> None:
        """Let vLLM recompute a request that waits for a load which cannot be planned."""
        if state.announce_failure():
            self.unannounced.append(state)

    # ---- plans and reports ---------------------------------------------------------------------

    def new_transfers(self) -> tuple[Transfer, ...]:
        """Return the loads begun since the last `sent`, but those in the step."""
        new = self.ledger.new
        return tuple([load.transfer for load in new if not load.is_in_step]) if new else ()

    def take_in_step(self) -> tuple[tuple[Transfer, ...], tuple[int, ...]]:
        """Return the loads in the step that is planned, and the blocks that it cannot load."""
        return tuple([load.transfer for load in self.of_step]), tuple(self.unloaded)

    def name_unloaded(self, block_ids: Iterable[int]) -> None:
        """The next step reads blocks whose load could not be planned."""
        self.unloaded += block_ids

    def planned(self) -> None:
        """The plan of a step is complete."""
        self.unloaded, self.of_step = [], []

    @property
    def failures(self) -> tuple[str, ...]:
        """Ids of requests whose load failed since the last `sent`."""
        failed = self.unannounced
        return tuple([state.request.request_id for state in failed]) if failed else ()

    def sent(self, now_s: float | None = None) -> None:
        """The plan with new loads and failures has been sent; the loads are in flight.

        From now on, only the workers' reports end the wait of a request whose load failed.
        """
        for load in self.ledger.sent():
            load.sent(now_s)
        failures, self.unannounced = self.unannounced, []
        for state in failures:
            state.end_load(has_failed=True)
            self._count_failure(state.load)

    def _count_failure(self, progress: LoadProgress) -> None:
        progress.num_failed += 1
        if progress.num_failed == FAILED_LOADS_MAX:
            self._counters[Count.GIVEN_UP_REQUESTS] += 1

    def give_up(self, book: Iterable[RequestState]) -> None:
        """After an internal error, fail the loads that no worker copies; mend all requests."""
        for load in self.of_step:
            load.fail()
            self.unloaded += load.transfer.block_ids
            self.ledger.in_flight.pop(load.transfer_id, None)
        self.of_step = []
        new, gone = self.ledger.new, self.ledger.give_up()
        for load in gone:
            self._shared_loads.end(load)
        loads = self.ledger.in_flight.values()
        loading = {load.owner for load in loads if not load.is_in_step}
        states = {*book, *(load.owner for load in gone), *loading, *self.unannounced}
        for load in new:
            load.fail()
            load.end()
        waiting = {s for s in states if s.phase is Phase.LOADING or s.num_loads}
        self.unannounced = list(waiting - loading)
        for state in states:
            state.mend(int(state in loading or state in waiting))

    def settle(self, load: Load) -> bool:
        """Complete a load that every rank has reported; return whether its request may run.

        Its slots stay leased for the prefix of its request. The next plan announces a failure.
        """
        self.ledger.remove(load)
        self._shared_loads.end(load)
        load.end()
        state = load.owner
        if load.failure is not None:
            if load.failure is not FailureReason.SOURCE_LOST:  # a reset is no failure
                self._counters[FAILED_LOADS[load.failure]] += 1
            # The same hit must not be offered again.
            self._hits.slots.forget(load.lease.slots)
            if not load.is_in_step:
                self.unannounced.append(state)
            elif load.failure is not FailureReason.SOURCE_LOST:
                self._count_failure(state.load)
            load.lease.release()
            return False
        self._counters[Count.LOADED_TOKENS] += load.num_tokens
        self._counters[Count.LOADED_BLOCKS] += len(load.lease.slots)
        if load.sent_s is not None and not state.finished:
            if not load.is_in_step:  # nobody has waited for it alone
                self._costs.landed.append((load.num_tokens, load.sent_s))
            num_left = state.request.num_tokens - load.end_hash * self._geometry.hash_block_size
            saved_s = self._costs.saved_s(Offer(load.num_tokens, max(1, num_left)))
            self._counters.add_seconds(Count.SAVED_SECONDS, saved_s)
        if load.is_in_step:
            return False
        state.end_load(has_failed=False)
        return True

    def leases(self, book: Iterable[RequestState]) -> list[Lease]:
        """Return the leases of reported hits and of loads in flight."""
        hits = [lease for state in book if (lease := state.load.lease) is not None]
        return [*hits, *(load.lease for load in self.ledger.in_flight.values())]

    @property
    def new_targets(self) -> set[int]:
        """The GPU blocks of the loads begun since the last `sent`."""
        return {block_id for load in self.ledger.new for block_id in load.transfer.block_ids}

    @property
    def num_holders(self) -> int:
        """Requests that hold GPU blocks for a load."""
        return self._admission.num_holders

    @property
    def has_work(self) -> bool:
        """Return whether a load is planned or in flight, or a failure is to be announced."""
        return self.is_loading or bool(self.unannounced)

    @property
    def is_loading(self) -> bool:
        """Return whether a load is planned or in flight."""
        return bool(self.ledger.new or self.ledger.in_flight)

    @property
    def is_loading_in_step(self) -> bool:
        """Return whether a load in the step is planned or in flight: then it is the oldest."""
        oldest = next(chain(self.ledger.in_flight.values(), self.ledger.new), None)
        return oldest is not None and oldest.is_in_step

    def __len__(self) -> int:
        return len(self.ledger.in_flight)
