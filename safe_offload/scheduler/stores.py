"""Stores: from what was found worth keeping to slots that can be found, or to nothing.

All that a step has found goes into one store, or two: behind the forward if the blocks are still
what they were, ahead of it if one of them was given away in this step.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

from safe_offload.observe.counters import Count, Counters
from safe_offload.protocol import Transfer, ids_of
from safe_offload.scheduler.fences import Part, Store, StoresInFlight
from safe_offload.scheduler.harvest import Harvest
from safe_offload.scheduler.hits import HostHits
from safe_offload.scheduler.leases import Lease, LeaseBook, LeaseKind
from safe_offload.scheduler.requests import Phase, RequestBook


class Stores:
    """All stores that are planned or in flight.

    Args:
        harvest: what there is to store.
        index: to publish in.
        leases: of prefixes.
        transfer_ids: never gives the same twice.
        num_ranks: workers that report.
        counters: what happens is counted here.
    """

    def __init__(
        self,
        harvest: Harvest,
        index: HostHits,
        leases: LeaseBook,
        transfer_ids: Iterable[int],
        num_ranks: int,
        counters: Counters,
    ) -> None:
        self._harvest = harvest
        self._index = index
        self._leases = leases
        self._transfer_ids = iter(transfer_ids)
        self._num_ranks = num_ranks
        self._counters = counters
        self._in_flight = StoresInFlight()
        self._planned: list[Store] = []
        """Of the plan that is being made; the workers do not know them."""

    # ---- a step is planned ---------------------------------------------------------------------

    def plan(
        self, early_written: Callable[[], Collection[int]]
    ) -> tuple[tuple[Transfer, ...], tuple[Transfer, ...], tuple[int, ...]]:
        """Turn what was found since the last `sent` into stores, and see which need a fence.

        Args:
            early_written: tells which blocks the workers write before they can honour a fence of
                this step; a store that reads one of them is poisoned instead.

        Returns:
            The stores before the forward, those after it, and the ids of those that the writes of
            this step must wait for.
        """
        fenced = self._in_flight.fence()
        self._harvest.drop_given_away()
        found, intact = self._harvest.found, self._harvest.intact
        if not (found or intact or fenced):
            return (), (), ()
        before: tuple[Transfer, ...] = ()
        after: tuple[Transfer, ...] = ()
        if found or intact:
            given_away = [part for part in found if part.sources.given_away()]
            if len(given_away) < len(found):
                intact = [part for part in found if part not in given_away] + intact
            if given_away:
                store = self._make(given_away, is_fenced=True)
                fenced.append(store)
                before = (_transfer(store),)
            if intact:
                after = (_transfer(self._make(intact, is_fenced=False)),)
        if fenced:
            self._counters[Count.FENCED_STORES] += len(fenced)
            written = early_written()
            for store in fenced:
                store.poisoned |= bool(written) and store.reads(written)
        return before, after, tuple(store.transfer_id for store in fenced)

    def _make(self, parts: list[Part], *, is_fenced: bool) -> Store:
        """One store of all parts."""
        ranks = set(range(self._num_ranks))
        store = Store(next(self._transfer_ids), parts, self._index.directory.epoch, ranks)
        self._planned.append(store)
        self._in_flight.add(store, is_fenced=is_fenced)
        return store

    def sent(self) -> None:
        """The workers have been told of the new stores."""
        self._planned = []
        self._harvest.sent()

    # ---- the workers have reported -------------------------------------------------------------

    def get(self, transfer_id: int) -> Store | None:
        """The store of that id, if it is in flight."""
        return self._in_flight.get(transfer_id)

    def poison_all(self, book: RequestBook) -> None:
        """What is being stored, or remembered to be, is wrong; publish none of it."""
        for store in self._in_flight:
            store.poisoned = True
        self.forget_unsent(book)

    def forget_unsent(self, book: RequestBook) -> None:
        """Store nothing of what was found and not planned yet, nor of what is computed by now."""
        for state in book:
            self._harvest.pass_over(state)
        for part in (*self._harvest.found, *self._harvest.intact):
            self._index.slots.forget(part.lease.slots)
            self._return_slots(part)
        self._harvest.reset()
        self.sent()

    def give_up(self) -> None:
        """After an internal error: publish nothing, forget each store that no worker copies."""
        gone = [*self._harvest.found, *self._harvest.intact]
        for store in list(self._in_flight):
            if store in self._planned or not store.ranks_left:
                self._in_flight.remove(store)
                gone += store.parts
            else:
                store.poisoned = True
                for part in store.parts:
                    part.sources.owners = []
        for part in gone:
            self._index.slots.forget(part.lease.slots)
        left = (part for store in self._in_flight for part in store.parts)
        self._harvest.num_blocks = sum(len(part.sources.blocks) for part in left)
        self._harvest.reset()
        self.sent()

    @property
    def leases(self) -> list[Lease]:
        """Of the stores in flight."""
        return [part.lease for store in self._in_flight for part in store.parts]

    def settle(self, store: Store) -> None:
        """Every rank has reported a store: publish it if it went well."""
        self._in_flight.remove(store)
        if store.poisoned:
            self._counters[Count.FAILED_STORES] += 1
        elif store.epoch == self._index.directory.epoch:
            self._counters[Count.STORED_BLOCKS] += store.num_blocks
        else:
            self._counters[Count.UNPUBLISHED_BLOCKS] += store.num_blocks
        for part in store.parts:
            if store.poisoned:
                self._index.slots.forget(part.lease.slots)
            elif store.epoch == self._index.directory.epoch:
                self._index.directory.publish(part.lease.slots)
            self._return_slots(part)

    def _return_slots(self, part: Part) -> None:
        """Hand the slots of a part to its owners' prefixes, or let them go."""
        self._harvest.settled(part)
        ended = []
        shares: list[tuple[int, Lease | None]] = []
        for state, count in part.sources.owners:
            state.num_stores -= 1
            phase = state.phase
            if state.prefix is None and (phase is Phase.RUNNING or phase is Phase.FINISHED):
                state.prefix = self._leases.lease(LeaseKind.PREFIX)
            shares.append((count, state.prefix))
            if phase is Phase.FINISHED and not state.num_stores:
                ended.append(state)
        part.lease.share(shares)
        for state in ended:  # releases its whole prefix at once, tail first
            state.drop_prefix()

    # ---- the rest ------------------------------------------------------------------------------

    def check_invariants(self) -> None:
        """See `StoresInFlight.check_invariants`."""
        self._in_flight.check_invariants()

    def __len__(self) -> int:
        return len(self._in_flight)


def _transfer(store: Store) -> Transfer:
    block_ids, slot_ids = ids_of(()), ids_of(())
    for part in store.parts:
        block_ids.extend([block.block_id for block in part.sources.blocks])
        slot_ids.extend(part.lease.slots)
    return Transfer(store.transfer_id, block_ids, slot_ids)
