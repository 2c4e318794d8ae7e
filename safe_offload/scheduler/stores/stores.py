"""Stores: from selected blocks to published slots.

Blocks that a policy adds (`eager.py`, `lazy.py`) get their slots at once. The blocks of a step form
one store or two: after the forward pass if they are intact, before it if one of them was
reallocated in this step.

A store holds no reference on a GPU block (I2). While the request runs, its own reference protects
its blocks. Once they are free, their bytes stay intact until vLLM reallocates them and a kernel or
a load of a later step writes them. When a block of a store in flight is reallocated, the plan of
that step fences the store: nothing of the step may write before the copy has read.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import filterfalse
from typing import TYPE_CHECKING

from safe_offload.errors import InvariantError
from safe_offload.observe.counters import FAILED_STORES, Count, Counters
from safe_offload.protocol import Transfer, ids_of
from safe_offload.scheduler.cache.leases import Lease, LeaseBook, LeaseKind
from safe_offload.scheduler.pending import Ledger, Part, Store
from safe_offload.scheduler.requests import Phase, RequestQueue, RequestState

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput

    from safe_offload.scheduler.blocks import BlockSet
    from safe_offload.scheduler.loads.hits import HostHits


class Stores:
    """Pending stores, stores in flight, and the prefixes that they extend.

    Bound: `num_blocks_max` blocks, as backpressure, and the requests that vLLM has with their
    blocks.
    """

    def __init__(
        self,
        hits: HostHits,
        leases: LeaseBook,
        ledger: Ledger[Store],
        num_blocks_max: int,
        counters: Counters,
    ) -> None:
        self._hits = hits
        self._leases = leases
        self._quotas = hits.slots.quotas
        self.num_blocks_max = num_blocks_max
        self._counters = counters
        self._exposed: list[Part] = []
        """Found before this step was planned: since then the blocks may have been reallocated."""
        self._intact: list[Part] = []
        """Found while this step is planned, which writes none of the blocks."""
        self.ledger = ledger
        self._unfenced: dict[int, Store] = {}
        self.num_blocks = 0
        """Of all of them. Read only outside."""
        self.left_over = RequestQueue()
        """Requests with blocks that found no slots. Read only outside."""

    def __repr__(self) -> str:
        return f"Stores({self.ledger!r}, {self.num_blocks} blocks)"

    # ---- what to store -------------------------------------------------------------------------

    def add(self, blocks: BlockSet, owner: RequestState | None, *, is_intact: bool) -> int:
        """Store as many blocks as slots and backpressure allow.

        Args:
            blocks: that the host neither has nor is storing, in prefix order.
            owner: the request whose prefix they extend.
            is_intact: this step writes none of them. Otherwise they may have been reallocated, and
                this is the last chance to store them.

        Returns:
            The number of leading blocks that got a slot.
        """
        num_found = len(blocks.blocks)
        if not num_found:
            return 0
        salt = None
        if owner is not None:
            salt = owner.request.cache_salt
        elif self._quotas is not None:
            block_ids = [block.block_id for block in blocks.blocks]
            runs = self._quotas.salts.runs(blocks.group_idx, block_ids)
            if len(runs) > 1:
                parts = [blocks.part(run) for run, _ in runs]
                return sum(self.add(part, None, is_intact=is_intact) for part in parts)
            salt = runs[0][1]
        num_wanted = min(num_found, self.num_blocks_max - self.num_blocks)
        if num_wanted < num_found:
            self._counters[Count.SKIPPED_STORES] += 1
        lease = self._leases.grant(LeaseKind.STORE, num_wanted, salt)
        num_granted = len(lease.slots) if lease is not None else 0
        if num_granted < num_found:
            if not is_intact:
                self._counters[Count.SKIPPED_BLOCKS] += num_found - num_granted
            blocks = blocks.part(range(num_granted))
        if lease is not None:
            owners = [(owner, num_granted)] if owner is not None else []
            self._begin(Part(blocks, lease, owners), is_intact=is_intact)
        return num_granted

    def add_whole(
        self, blocks: BlockSet, owners: list[tuple[RequestState, int]], *, is_intact: bool
    ) -> bool:
        """Store blocks of several requests, all or none; return whether they are stored."""
        count = len(blocks.blocks)
        if count > self.num_blocks_max - self.num_blocks or len(set(blocks.hashes)) < count:
            return False
        if self._quotas is not None and not self._quotas.are_of_one(
            owner.request.cache_salt for owner, _ in owners
        ):
            return False  # what several tenants store goes request by request
        lease = self._leases.grant(LeaseKind.STORE, count, owners[0][0].request.cache_salt)
        if lease is None or len(lease.slots) < count:
            if lease is not None:
                lease.release()
            return False
        self._begin(Part(blocks, lease, owners), is_intact=is_intact)
        return True

    def put_off(self, state: RequestState, blocks: BlockSet) -> None:
        """Keep blocks of a request that found no slots until its next check."""
        self.left_over.add(state)
        state.left_over = (*state.left_over, blocks)

    def take_left_over(self, state: RequestState) -> Sequence[BlockSet]:
        """Remove and return the blocks of a request that found no slots."""
        left, state.left_over = state.left_over, ()
        self.left_over.discard(state)
        return left

    def keep_left_over(self, kept: Callable[[BlockSet], BlockSet]) -> None:
        """Replace each set of left-over blocks by what `kept` returns for it."""
        for state in list(self.left_over):
            state.left_over = [part for b in state.left_over if (part := kept(b)).blocks]
            if not state.left_over:
                self.left_over.discard(state)

    def rescue(self, blocks: BlockSet) -> None:
        """Store the computed blocks of a request preempted in this step, as far as possible."""
        num_stored = self.add(self.missing(blocks), None, is_intact=False)
        self._counters[Count.RESCUED_BLOCKS] += num_stored

    def _begin(self, part: Part, *, is_intact: bool) -> None:
        blocks = part.blocks
        for owner, _ in part.owners:
            owner.num_parts += 1
        self._hits.directory.begin_store(
            part.lease.slots, blocks.group_idx, blocks.hashes, blocks.more_keys, part.owners
        )
        (self._intact if is_intact else self._exposed).append(part)
        self.num_blocks += len(part.lease.slots)

    def missing(self, blocks: BlockSet) -> BlockSet:
        """Return the blocks that the host neither has nor is storing."""
        table = self._hits.directory.tables[blocks.group_idx]
        return blocks.keep([block_hash not in table for block_hash in blocks.hashes])

    # ---- prefixes of requests ------------------------------------------------------------------

    def extend_prefix(self, state: RequestState, present: Sequence[int]) -> None:
        """Lease the host's blocks of a request, in the order of its tokens."""
        prefix, loaded, state.loaded = state.prefix, state.loaded, None
        if loaded is not None:
            known = set(loaded.slots)
            self._leases.extend(loaded, [slot for slot in present if slot not in known])
            is_all = len(loaded.slots) == len(present)
            loaded.keep(LeaseKind.PREFIX, list(present) if is_all else loaded.slots)
            if prefix is None:
                state.prefix = loaded
            else:
                loaded.give_to(prefix)
        elif present and prefix is None:
            state.prefix = self._leases.lease(LeaseKind.PREFIX, present)
        elif present and prefix is not None:
            self._leases.extend(prefix, present)

    def load_landed(self, state: RequestState, lease: Lease) -> None:
        """Add the leased slots of a load to the prefix of its request."""
        if state.finished:
            lease.release()
        else:
            self.release_prefix(state)
            state.loaded = lease

    def release_prefix(self, state: RequestState) -> None:
        """Let the host copy of a request's prefix be evicted."""
        for lease in (state.loaded, state.prefix):
            if lease is not None:
                lease.release()
        state.loaded = state.prefix = None

    def end(self, state: RequestState) -> None:
        """Release the prefix of an ended request, unless a store still extends it."""
        if not state.num_parts:
            self._release_whole(state)

    def _release_whole(self, state: RequestState) -> None:
        """Release the prefix of an ended request, windows and states without need first."""
        prefix = None
        if not self._hits.geometry.is_plain:
            prefix, state.prefix = state.prefix, None
        self.release_prefix(state)
        if prefix is not None:
            spare, needed = self._hits.at_ends(state.request, state.hit_ends, prefix.slots)
            if needed:
                self._leases.extend(prefix, needed)
            prefix.release(first=spare)

    # ---- a step is planned ---------------------------------------------------------------------

    def plan(
        self, early_written: Callable[[SchedulerOutput], Collection[int]], output: SchedulerOutput
    ) -> tuple[tuple[Transfer, ...], tuple[Transfer, ...], tuple[int, ...]]:
        """Turn the parts added since the last `sent` into stores, and find those to fence.

        Args:
            early_written: returns the blocks that the workers write before they can honor a fence
                of the step; a store that reads one of them fails instead.

        Returns:
            The stores before the forward pass, those after it, and the ids of the fenced stores.
        """
        exposed, intact = self._exposed, self._intact
        fenced = []
        if self._unfenced:
            fenced = [store for store in self._unfenced.values() if store.given_away()]
            for store in fenced:
                del self._unfenced[store.transfer_id]
        if not (exposed or intact or fenced):
            return (), (), ()
        before: tuple[Transfer, ...] = ()
        after: tuple[Transfer, ...] = ()
        if exposed or intact:
            given_away = [p for p in exposed if p.blocks.given_away()] if exposed else []
            if len(given_away) < len(exposed):
                gone = set(given_away)
                intact = [part for part in exposed if part not in gone] + intact
            if given_away:
                store = self._make(given_away)
                fenced.append(store)
                before = (_transfer(store),)
            if intact:
                store = self._make(intact)
                self._unfenced[store.transfer_id] = store
                after = (_transfer(store),)
        if fenced:
            self._counters[Count.FENCED_STORES] += len(fenced)
            written = early_written(output)
            for store in fenced:
                if written and store.reads(written):
                    store.fail()
        return before, after, tuple(store.transfer_id for store in fenced)

    def _make(self, parts: list[Part]) -> Store:
        transfer_id, ranks = self.ledger.open()
        epoch = self._hits.directory.epoch
        store = Store(transfer_id=transfer_id, ranks_left=ranks, parts=parts, epoch=epoch)
        self.ledger.new.append(store)
        return store

    def sent(self) -> None:
        """The plan with the new stores has been sent to the workers."""
        self.ledger.sent()
        self._exposed, self._intact = [], []

    # ---- the workers have reported -------------------------------------------------------------

    def settle(self, store: Store) -> None:
        """Publish a store that every rank has reported, unless it failed."""
        self.ledger.remove(store)
        self._unfenced.pop(store.transfer_id, None)
        directory = self._hits.directory
        is_current = store.epoch == directory.epoch
        if store.failure is not None:
            self._counters[FAILED_STORES[store.failure]] += 1
        elif is_current:
            self._counters[Count.STORED_BLOCKS] += store.num_blocks
        else:
            self._counters[Count.UNPUBLISHED_BLOCKS] += store.num_blocks
        for part in store.parts:
            if store.failure is not None:
                self._hits.slots.forget(part.lease.slots)
            elif is_current:
                directory.publish(part.lease.slots)
            self._return_slots(part)

    def _return_slots(self, part: Part) -> None:
        """Add the slots of a part to its owners' prefixes, or release them."""
        self.num_blocks -= len(part.blocks.blocks)
        ended = []
        shares: list[tuple[int, Lease | None]] = []
        for state, count in part.owners:
            state.num_parts -= 1
            prefix, phase = state.prefix, state.phase
            if prefix is None and (phase is Phase.RUNNING or phase is Phase.FINISHED):
                prefix = state.prefix = self._leases.lease(LeaseKind.PREFIX)
            shares.append((count, prefix))
            if phase is Phase.FINISHED and not state.num_parts:
                ended.append(state)
        part.lease.share(shares)
        for state in ended:  # tail first
            self._release_whole(state)

    # ---- what went wrong -----------------------------------------------------------------------

    def reset(self) -> None:
        """Publish none of the stores in flight; they need no fences any more."""
        self._unfenced.clear()

    def fail_all(self) -> None:
        """Publish none of the present stores, whose contents are wrong; none needs a fence."""
        self._unfenced.clear()
        for store in self.ledger.in_flight.values():
            store.fail()

    def lose_hashes(self, block_ids: Collection[int]) -> None:
        """Publish no store of blocks that have lost their hashes: their contents may be wrong."""
        self.keep_left_over(
            lambda left: left.keep([block.block_id not in block_ids for block in left.blocks])
        )
        for store in list(self._unfenced.values()):
            if store.reads(block_ids):
                for part in store.parts:
                    self._hits.slots.forget(part.lease.slots)
                store.keep_back()
                del self._unfenced[store.transfer_id]  # what is not published needs no fence
        for parts in (self._exposed, self._intact):
            lost = [part for part in parts if part.reads(block_ids)]
            if lost:
                parts[:] = filterfalse(set(lost).__contains__, parts)
                for part in lost:
                    self._forget(part)

    def forget_unplanned(self) -> None:
        """Drop the parts that no plan names yet."""
        self._drop_left_over()
        for part in (*self._exposed, *self._intact):
            self._forget(part)
        self._exposed, self._intact = [], []

    def _drop_left_over(self) -> None:
        for state in list(self.left_over):
            self.take_left_over(state)

    def _forget(self, part: Part) -> None:
        self._hits.slots.forget(part.lease.slots)
        self._return_slots(part)

    def give_up(self, book: Iterable[RequestState]) -> None:
        """After an internal error, publish nothing, and drop prefixes and stores of no worker."""
        gone = [*self._exposed, *self._intact]
        for store in self.ledger.give_up():
            self._unfenced.pop(store.transfer_id, None)
            gone += store.parts
        for part in gone:
            self._hits.slots.forget(part.lease.slots)
        self.num_blocks = 0
        for store in self.ledger.in_flight.values():
            store.fail()
            store.disown()
            self.num_blocks += sum(len(part.blocks.blocks) for part in store.parts)
        for state in book:
            state.loaded = state.prefix = None
            state.num_parts = 0
        self._drop_left_over()
        self._exposed, self._intact = [], []

    @property
    def leases(self) -> list[Lease]:
        """Of the stores in flight."""
        return [part.lease for store in self.ledger.in_flight.values() for part in store.parts]

    # ---- the rest ------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        """Return whether a store is in flight, or must be in the next plan."""
        return bool(self.ledger.in_flight or self._exposed)

    def check_invariants(self) -> None:
        """Check that no store in flight reads a reallocated block without a fence (I6)."""
        for store in self._unfenced.values():
            if store.given_away():
                raise InvariantError(
                    "I6", f"store {store.transfer_id} reads a block that was given away, unfenced"
                )

    def __len__(self) -> int:
        return len(self.ledger.in_flight)


def _transfer(store: Store) -> Transfer:
    block_ids, slot_ids = ids_of(()), ids_of(())
    for part in store.parts:
        block_ids.extend([block.block_id for block in part.blocks.blocks])
        slot_ids.extend(part.lease.slots)
    return Transfer(store.transfer_id, block_ids, slot_ids)
