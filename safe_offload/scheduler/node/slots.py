"""Slots of a pool that all engines of a machine share.

What others have stored is found in this engine's directory like its own, so that hits, stores and
prefixes need not know whose it is. Only three things differ. Whatever another may overwrite is
marked as a guest's when it is leased (`Table.visit`), and may be lost by then; later it is not,
whatever the owner does. Slots are granted from this engine's lots only: what guests read there is
parked, and can still be hit. And what it stores is published in the table, too.
"""

from __future__ import annotations

import secrets
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import chain, filterfalse, islice
from typing import TYPE_CHECKING, Any

import numpy as np

from safe_offload.errors import InvariantError
from safe_offload.node.locks import fence
from safe_offload.observe.counters import Count
from safe_offload.scheduler.cache.slots import SlotPool

if TYPE_CHECKING:
    from safe_offload.node.table import Slots, Table

LOOKS_MAX = 2048
"""Changed slots that are looked at in one `sync`, once in a step: a few milliseconds."""
GIVES_MAX = 4
"""Lots that are given to others in one step."""


class NodeSlots(SlotPool):
    """See `SlotPool`. Until it is attached to a table it has no slots.

    Bound: an entry for each slot.

    Attributes:
        is_alone: the ranks have memory of their own after all, so there is no table.
        generation: of what this engine stores and finds, 0 until a reset.
        secret: of what nobody else may find, see `is_private`.
        is_private: whether a hash does not say all that a block was computed from.
        num_lost: slots that were overwritten by another before they could be leased.
        is_behind: not all that others have changed was looked at yet.
        parked: guests read them, or they are bad; under no lease but one that keeps them from
            being granted until these have gone. Read only.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        # All is mutable, and changed here only.
        self.is_alone = False
        self.is_private: Callable[[bytes], bool] = lambda block_hash: False
        self.table: Table | None = None
        self.is_behind = False
        self.num_lost = 0
        self.generation = 0
        self.secret = _new_number()
        self._num_ready = 0
        self._is_own = bytearray(self.num_slots)
        self._lots: set[int] = set()  # of this engine, as far as it knows
        self._has_lot = np.zeros(0, bool)  # by lot, the same
        self._marked: set[int] = set()  # slots where this engine is a guest
        self.parked: dict[int, None] = {}
        self._seen = np.zeros(self.num_slots, np.uint64)  # words when slots were looked at
        self._versions = np.zeros(0, np.uint64)

    @property
    def num_leased(self) -> int:
        """See `SlotPool`; those that only wait for guests do not count."""
        return super().num_leased - len(self.parked)

    @property
    def num_own(self) -> int:
        """Slots of this engine's lots."""
        return min(self.num_usable, len(self._lots) * self._table.lot_slots)

    def attach(self, table: Table) -> None:
        """Use the slots of a table that this engine has joined."""
        self.table = table
        self._versions = np.zeros(table.num_lots, np.uint64)
        self._has_lot = np.zeros(table.num_lots, bool)
        self._extend()

    def keep_private(self, is_private: Callable[[bytes], bool]) -> None:
        """Let nobody else find blocks of such hashes."""
        self.is_private = is_private

    def stand_alone(self) -> None:
        """The ranks have memory of their own: be `EngineSlots`."""
        self.is_alone = True
        self._is_own = bytearray(b"\1") * self.num_slots
        self.open(self._num_ready)

    def open(self, num_usable: int) -> None:
        if self.is_alone:
            super().open(num_usable)
        self._num_ready = max(self._num_ready, num_usable)
        self._extend()

    def _extend(self) -> None:
        if self.table is not None:
            self.num_usable = min(self._num_ready, self.num_slots, self.table.num_slots)
            self._versions[:] = np.iinfo(np.uint64).max  # look at all of them again

    # ---- what others do ------------------------------------------------------------------------

    @property
    def _table(self) -> Table:
        assert self.table is not None
        return self.table

    def wake(self) -> bool:
        """Make sure that nobody takes lots of this engine; False if it is not possible now."""
        table = self.table
        if table is None or table.is_awake:
            return True
        if not table.wake():
            return False
        if lost := self._lots.difference(table.own_lots()):
            self._lose(lost)
        return True

    def nap(self) -> None:
        """Nothing is leased: let others have lots that this engine has beyond its share."""
        if self.table is not None:
            self.table.nap()

    def sync(self) -> None:
        """Find what others have stored, and no longer find what they have overwritten."""
        table = self.table
        if table is None:
            return
        self._keep_lots()
        changed = np.flatnonzero(table.versions != self._versions).tolist()
        self.is_behind = False
        if not changed:
            return
        versions = table.versions.copy()
        fence()
        num_left = LOOKS_MAX
        for lot in changed:
            if num_left <= 0:
                self.is_behind = True
                return
            if lot not in self._lots:
                num_left -= self._look_at(lot)
            self._versions[lot] = versions[lot]

    def _keep_lots(self) -> None:
        """Take back lots that a damaged table says are not this engine's, or give them up."""
        table = self._table
        if not table.is_awake:
            return
        gone = np.flatnonzero(self._has_lot & (table.owners != np.uint64(table.engine + 1)))
        lost = [lot for lot in gone.tolist() if not table.reclaim(lot)]
        if not lost:
            return
        slots = [slot for lot in lost for slot in table.range_of(lot)]
        self._guard(self._leased(slots))
        self._lose(lost)
        self.forget([slot for slot in slots if self.directory.hashes[slot] is not None])

    def _leased(self, slots: Iterable[int]) -> list[int]:
        """Return those of the slots that somebody needs."""
        leased, parked = self._references.leased, self.parked
        return [slot for slot in slots if slot in leased and slot not in parked]

    def _guard(self, slots: Sequence[int]) -> None:
        """Be a guest at leased slots of a lot that will be another's."""
        self._table.mark(_array(slots))
        self._marked.update(slots)

    def _drop_changed(self, lot: int) -> Slots:
        """No longer find what has changed in a lot of another; return these slots.

        Where this engine is a guest nothing has, even if the owner lets nobody else find it.
        """
        slots, table = self._table.range_of(lot), self._table
        part = slice(slots.start, min(slots.stop, self.num_usable))
        is_changed = table.words[part] != self._seen[part]
        is_changed &= table.marks[table.engine, part] == 0
        changed: Slots = np.flatnonzero(is_changed) + slots.start
        gone = [slot for slot in changed.tolist() if self.directory.hashes[slot] is not None]
        if gone:
            self.forget(gone)
        return changed

    def _look_at(self, lot: int) -> int:
        """Look at what has changed in a lot of another; return how many slots that were."""
        changed, tables = self._drop_changed(lot), self.directory.tables
        new: defaultdict[int, dict[bytes, int]] = defaultdict(dict)
        self._seen[changed] = 0  # what is being changed now is looked at again when its lot changes
        records = self._table.read(changed)
        self._seen[[record[0] for record in records]] = [record[1] for record in records]
        ours, num_groups = (self.generation, self.secret), len(tables)
        for slot, _, generation, group, block_hash in records:
            if generation in ours and group < num_groups and block_hash not in tables[group]:
                new[group].setdefault(block_hash, slot)
        for group_idx, found in new.items():
            found_slots = list(found.values())
            self.directory.begin_store(found_slots, group_idx, list(found), {})
            self.directory.publish(found_slots)
        return len(changed)

    def balance(self) -> None:
        """Give lots beyond this engine's share to others who have too few."""
        table = self.table
        if table is None or not table.is_wanted:
            return
        num_beyond = min(GIVES_MAX, len(self._lots) - table.fair_share())
        if num_beyond <= 0 or table.free_lots(self.num_usable):
            return
        count = GIVES_MAX * table.lot_slots
        first = *self._empty[:count], *self._evictable.peek(count)
        for lot in dict.fromkeys(slot // table.lot_slots for slot in first):
            num_beyond -= self._give(lot)
            if num_beyond <= 0:
                return

    def _give(self, lot: int) -> bool:
        """Release a lot with its contents; False if a slot in it is leased."""
        slots = self._table.range_of(lot)
        leased = self._leased(slots)
        hashes, being_stored = self.directory.hashes, self.directory.being_stored
        if any(hashes[slot] is None or slot in being_stored for slot in leased):
            return False
        self._guard(leased)
        self._lose([lot])
        self._table.give(lot)
        return True

    def _lose(self, lots: Collection[int]) -> None:
        """Lots are another's from now on; what they hold can still be found."""
        for lot in lots:
            slots = self._table.range_of(lot)
            self._lots.discard(lot)
            self._has_lot[lot] = False
            self._is_own[slots.start : slots.stop] = bytes(len(slots))
            self._evictable.forget(slots)
            self._let_go(filter(self.parked.__contains__, slots))
            self._versions[lot] = np.iinfo(np.uint64).max
        self._empty = list(self._own(self._empty))

    # ---- grants --------------------------------------------------------------------------------

    def grant(self, count: int, salt: str | None = None) -> list[int]:
        """See `SlotPool`; what guests read is not granted, and stays as it is."""
        table = self.table
        if table is None or not table.is_awake or count <= 0:
            return self._take(count) if self.is_alone else []
        self._unpark()
        if count > len(self._empty):
            self._claim(count - len(self._empty))
        self._spare(count - len(self._empty))
        granted: list[int] = []
        while len(granted) < count:
            self._park_next(count - len(granted) - len(self._empty))
            slots = self._take(count - len(granted))
            if not slots:
                break
            held = self._retract(slots)
            self.parked.update(dict.fromkeys(held))
            granted += filterfalse(set(held).__contains__, slots) if held else slots
        is_short = len(granted) < count and len(self._lots) < table.fair_share()
        table.want(is_short=is_short)
        return granted

    def _retract(self, slots: Sequence[int]) -> list[int]:
        array = _array(slots)
        held = self._table.retract(array)
        self._seen[array] = self._table.words[array]
        return list(held.tolist())

    def _unpark(self) -> None:
        """Take back slots whose guests have gone, of those that were not asked for longest."""
        if some := list(islice(self.parked, LOOKS_MAX)):
            held = self._table.guests_at(_array(some)).tolist()
            for slot in some:
                del self.parked[slot]
            self.parked.update(dict.fromkeys(held))
            self.release(sorted(filterfalse(self.parked.__contains__, some)))

    def _park_next(self, count: int) -> None:
        """Pass over what would be evicted next, but is read by guests."""
        while count > 0:
            held = self._table.guests_at(_array(self._evictable.peek(count))).tolist()
            if not held:
                return
            self._evictable.hold(held)
            self._references.add_first(held)
            self.parked.update(dict.fromkeys(held))
            count *= 2  # however many there are, these are few rounds

    def _let_go(self, slots: Iterable[int]) -> None:
        """Parked slots need not be kept any more, or a lease keeps them."""
        parked = list(slots)
        for slot in parked:
            del self.parked[slot]
        self._references.drop(parked)

    def _spare(self, count: int) -> None:
        """What others have used since it was last released is evicted as if it was new."""
        next_slots = self._evictable.peek(count) if count > 0 else []
        if next_slots:
            array = _array(next_slots)
            touched = array[self._table.touched[array] != 0]
            if len(touched):
                self._table.touched[touched] = 0
                used = touched.tolist()
                self._evictable.hold(used)
                self._evictable.release(used, self._now_s)

    def _claim(self, num_wanted: int) -> None:
        """Take over free lots, and what napping engines have too many of."""
        table = self._table
        free = table.free_lots(self.num_usable)
        if len(self._evictable) >= num_wanted and len(self._lots) >= table.fair_share():
            free = [lot for lot in free if self._has_room(lot)]
        elif not free and table.free_napping():
            free = table.free_lots(self.num_usable)
        for lot in free:
            if num_wanted > 0 and table.claim(lot):
                num_wanted -= self._take_over(lot)

    def _has_room(self, lot: int) -> bool:
        return not (self._table.words[self._table.range_of(lot)] & np.uint64(1)).all()

    def _take_over(self, lot: int) -> int:
        """A lot is this engine's from now on, with what it holds; return how many slots it has."""
        table = self._table
        slots = table.range_of(lot)
        self._drop_changed(lot)  # and find nothing new: it may be what is stored next
        self._lots.add(lot)
        self._has_lot[lot] = True
        hashes, leased = self.directory.hashes, self._references.leased
        unknown = [slot for slot in slots if hashes[slot] is None]
        bad = [slot for slot in unknown if table.bad[slot] and slot not in leased]
        for slot in slots:
            self._is_own[slot] = 1
        if unknown:  # of others' generations, or there twice, or new, or nothing
            self._retract(unknown)
        self.parked.update(dict.fromkeys(bad))
        self._references.add_first(bad)
        self._empty += [slot for slot in reversed(unknown) if slot not in leased]
        filled = [s for s in slots if hashes[s] is not None and s not in leased]
        self._evictable.evict_first(filled, self._now_s)
        return len(slots)

    def publish(self, slots: Sequence[int]) -> None:
        """Let other engines find what this one has stored."""
        if self.table is None:
            return
        directory = self.directory
        stored: list[tuple[int, bytes]] = [
            (slot, block_hash)
            for slot in slots
            if (block_hash := directory.hashes[slot]) is not None
            and slot not in directory.being_stored
            and self._is_own[slot]
        ]
        if stored:
            array = _array([slot for slot, _ in stored])
            hashes = [block_hash for _, block_hash in stored]
            groups = [directory.group_of(slot) for slot, _ in stored]
            generations = [self.secret if self.is_private(h) else self.generation for h in hashes]
            self.table.publish(array, groups, hashes, generations)
            self._seen[array] = self.table.words[array]

    # ---- leases --------------------------------------------------------------------------------

    def lease(self, slots: Sequence[int]) -> None:
        """See `SlotPool`; what another has overwritten by now is forgotten (`num_lost`)."""
        self._visit(slots)
        self._evictable.lease(self._own(slots))

    def hold(self, slots: Sequence[int]) -> None:
        self._visit(slots)
        self._evictable.hold(self._own(slots))

    def _own(self, slots: Iterable[int]) -> Sequence[int]:
        """See `SlotPool`; those of this engine's lots."""
        return list(filter(self._is_own.__getitem__, slots))

    def _all_own(self) -> Iterable[int]:
        """See `SlotPool`."""
        table = self.table
        if table is None:
            return super()._all_own()
        return chain.from_iterable(map(table.range_of, sorted(self._lots)))

    def _visit(self, slots: Sequence[int]) -> None:
        """Add a lease to each slot; be a guest at those that are another's."""
        foreign = filterfalse(self._is_own.__getitem__, slots)
        new = list(filterfalse(self._marked.__contains__, foreign))
        if new and self.table is not None:
            array = _array(new)
            lost = self.table.visit(array, self._seen[array]).tolist()
            self._marked.update(new)
            self._marked.difference_update(lost)
            self._counters[Count.BORROWED_BLOCKS] += len(new) - len(lost)
            if lost:
                self.num_lost += len(lost)
                self._counters[Count.LOST_BLOCKS] += len(lost)
                self.forget(lost)
        self._references.add(slots)
        if self.parked:
            self._let_go(filter(self.parked.__contains__, dict.fromkeys(slots)))

    def release(self, slots: Sequence[int], first: Sequence[int] = ()) -> None:
        super().release(slots, first)
        leased, marked = self._references.leased, self._marked
        self._leave([slot for slot in slots if slot in marked and slot not in leased])

    def _leave(self, slots: Sequence[int]) -> None:
        if slots and (table := self.table) is not None:
            table.leave(array := _array(slots))
            self._marked.difference_update(slots)
            changed = array[table.words[array] != self._seen[array]]  # while it was a guest
            self._versions[changed // table.lot_slots] = np.iinfo(np.uint64).max

    def _unleased(self, slots: Sequence[int]) -> list[int]:
        return super()._unleased(self._own(slots))

    def _forgotten(self, slots: Sequence[int]) -> None:
        super()._forgotten(slots)
        own = self._own(slots)
        if own and self.table is not None and self.table.is_awake:
            self._retract(own)

    def forget_all(self) -> None:
        """See `SlotPool`; what others have stored so far is of another generation, too."""
        super().forget_all()
        self.generation = _new_number()
        self.secret = _new_number()

    def retire(self, slots: Iterable[int]) -> list[int]:
        """See `SlotPool`; no engine uses them again."""
        retired = super().retire(slots)
        if self.table is not None and retired:
            self.table.condemn(_array(retired))
        return retired

    def mend(self, leases: Iterable[Sequence[int]]) -> None:
        super().mend(leases)
        self._leave(sorted(self._marked - self._references.leased))

    # ---- the rest ------------------------------------------------------------------------------

    def _count(self, leases: Iterable[Sequence[int]]) -> Any:
        expected = super()._count(leases)
        expected.update(self.parked.keys())
        return expected

    def check_invariants(self, leases: Iterable[Sequence[int]]) -> None:
        """See `SlotPool`; and what this engine leases, the table shows as this engine's."""
        super().check_invariants(leases)
        table = self.table
        if table is None:
            return
        if table.is_awake and self._lots != set(table.own_lots()):
            raise InvariantError("I8", "the table has other lots of this engine than it knows")
        is_marked = set(np.flatnonzero(table.marks[table.engine]).tolist())
        if is_marked != self._marked or not self._marked <= self._references.leased:
            raise InvariantError("I1", "guest marks are not exactly those of leased slots")


def _new_number() -> int:
    return secrets.randbits(63) + 1


def _array(slots: Sequence[int]) -> Slots:
    return np.array(slots, np.int64)
