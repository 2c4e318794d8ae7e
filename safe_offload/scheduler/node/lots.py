"""The lots of a pool that all engines of a machine share, as a source of this engine's slots.

Blocks stored by others are in this engine's directory like its own. Only three things differ: slots
that another engine may overwrite are marked as a guest's when they are leased (`Table.visit`), and
may be lost by then, but not later. Slots are granted from this engine's lots only; those that
guests read are parked, and can still be hit. And what it stores is published in the table, too.
"""

from __future__ import annotations

import secrets
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence, Set
from itertools import chain, filterfalse, islice
from typing import TYPE_CHECKING

import numpy as np

from safe_offload.errors import InvariantError
from safe_offload.node.locks import fence
from safe_offload.observe.counters import Count

if TYPE_CHECKING:
    from safe_offload.node.table import Slots, Table
    from safe_offload.observe.counters import Counters
    from safe_offload.scheduler.cache.slots import SlotPool

LOOKS_MAX = 2048
"""Changed slots read by one `sync`, which runs once in a step: a few milliseconds."""
GIVES_MAX = 4
"""Lots given to other engines in one step."""
_UNSEEN = np.iinfo(np.uint64).max
"""The version of a lot that the next `sync` reads in any case."""


class NodeLots:
    """The `SlotSource` of this engine's lots in a table that it has joined.

    Bound: an entry for each slot.
    """

    def __init__(self, pool: SlotPool, table: Table, counters: Counters) -> None:
        self._pool = pool
        self._directory = pool.directory
        self._directory.tell_published(self.publish)
        self.table = table
        self.num_slots: int = table.num_slots
        self._counters = counters
        # What follows is mutable, and changed here only.
        self.is_behind = False  # changes of other engines are left for the next `sync`
        self.num_lost = 0  # slots that were overwritten by another before they could be leased
        # Of what this engine stores and finds; 0 if there has been no reset.
        self.generation = _new_number() if self._directory.epoch else 0
        self.secret = _new_number()  # of what no other engine may find, see `Directory.private`
        self._is_own = bytearray(table.num_slots)
        self._lots: set[int] = set()  # of this engine, as far as it knows
        self._has_lot = np.zeros(table.num_lots, bool)  # by lot, the same
        self._marked: set[int] = set()  # slots where this engine is a guest
        self.parked: dict[int, None] = {}  # own slots that guests read, or that are bad. Read only.
        self._seen = np.zeros(table.num_slots, np.uint64)  # words when slots were looked at
        self._versions = np.full(table.num_lots, _UNSEEN)  # of lots, likewise

    @property
    def num_own(self) -> int:
        """Slots of this engine's lots."""
        return min(self._pool.num_usable, len(self._lots) * self.table.lot_slots)

    def look_again(self) -> None:
        self._versions[:] = _UNSEEN

    # ---- what others do ------------------------------------------------------------------------

    def wake(self) -> bool:
        """Keep others from taking lots of this engine; False if that is impossible now."""
        table = self.table
        if table.is_awake:
            return True
        if not table.wake():
            return False
        if lost := self._lots.difference(table.own_lots()):
            self._lose(lost)
        return True

    def sync(self) -> None:
        """Add what others have stored to the directory; remove what they have overwritten."""
        table = self.table
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
        """Take back, or give up, lots that a damaged table does not assign to this engine."""
        table = self.table
        if not table.is_awake:
            return
        gone = np.flatnonzero(self._has_lot & (table.owners != np.uint64(table.engine + 1)))
        lost = [lot for lot in gone.tolist() if not table.reclaim(lot)]
        if not lost:
            return
        slots = [slot for lot in lost for slot in table.range_of(lot)]
        self._guard(self._leased(slots))
        self._lose(lost)
        self._forget(slots)

    def _forget(self, slots: Iterable[int]) -> None:
        """Find these slots no more, of those that hold something."""
        hashes = self._directory.hashes
        if filled := [slot for slot in slots if hashes[slot] is not None]:
            self._pool.forget(filled)

    def _leased(self, slots: Iterable[int]) -> list[int]:
        leased, parked = self._pool.leased, self.parked
        return [slot for slot in slots if slot in leased and slot not in parked]

    def _guard(self, slots: Sequence[int]) -> None:
        """Mark leased slots of a lot that another engine may claim next."""
        self.table.mark(_array(slots))
        self._marked.update(slots)

    def _drop_changed(self, lot: int) -> Slots:
        """Drop changed slots of another engine's lot, unless leased here; return these slots."""
        slots, table = self.table.range_of(lot), self.table
        part = slice(slots.start, min(slots.stop, self._pool.num_usable))
        is_changed = table.words[part] != self._seen[part]
        is_changed &= table.marks[table.engine, part] == 0
        changed: Slots = np.flatnonzero(is_changed) + slots.start
        self._forget(changed.tolist())
        return changed

    def _look_at(self, lot: int) -> int:
        """Read what has changed in another engine's lot; return how many slots."""
        changed, tables = self._drop_changed(lot), self._directory.tables
        new: defaultdict[int, dict[bytes, int]] = defaultdict(dict)
        self._seen[changed] = 0  # a slot that is being changed is read again when its lot changes
        records = self.table.read(changed)
        self._seen[[record[0] for record in records]] = [record[1] for record in records]
        ours, num_groups = (self.generation, self.secret), len(tables)
        for slot, _, generation, group, block_hash in records:
            if generation in ours and group < num_groups and block_hash not in tables[group]:
                new[group].setdefault(block_hash, slot)
        for group_idx, found in new.items():
            found_slots = list(found.values())
            self._directory.begin_store(found_slots, group_idx, list(found), {})
            self._directory.publish(found_slots)
        return len(changed)

    def balance(self) -> None:
        """Give surplus lots to engines that have too few."""
        table = self.table
        if not table.is_wanted:
            return
        num_beyond = min(GIVES_MAX, len(self._lots) - table.fair_share())
        if num_beyond <= 0 or table.free_lots(self._pool.num_usable):
            return
        count = GIVES_MAX * table.lot_slots
        for lot in dict.fromkeys(s // table.lot_slots for s in self._pool.least_needed(count)):
            num_beyond -= self._give(lot)
            if num_beyond <= 0:
                return

    def _give(self, lot: int) -> bool:
        """Release a lot with its contents; False if a slot in it is leased."""
        slots = self.table.range_of(lot)
        leased = self._leased(slots)
        hashes, being_stored = self._directory.hashes, self._directory.being_stored
        if any(hashes[slot] is None or slot in being_stored for slot in leased):
            return False
        self._guard(leased)
        self._lose([lot])
        self.table.give(lot)
        return True

    def _lose(self, lots: Collection[int]) -> None:
        """Give up lots; their contents can still be found."""
        lost: list[int] = []
        for lot in lots:
            slots = self.table.range_of(lot)
            self._lots.discard(lot)
            self._has_lot[lot] = False
            self._is_own[slots.start : slots.stop] = bytes(len(slots))
            self._versions[lot] = _UNSEEN
            lost += slots
        self._pool.withdraw(lost)
        if parked := [slot for slot in lost if slot in self.parked]:
            for slot in parked:
                del self.parked[slot]
            self._pool.release(parked)

    # ---- grants --------------------------------------------------------------------------------

    def grant(self, count: int) -> list[int]:
        """Take slots of this engine's lots that no guest reads."""
        table, pool = self.table, self._pool
        if not table.is_awake or count <= 0:
            return []
        self._unpark()
        if count > pool.num_empty:
            self._claim(count - pool.num_empty)
        self._spare(count - pool.num_empty)
        granted: list[int] = []
        while len(granted) < count:
            self._park_next(count - len(granted) - pool.num_empty)
            slots = pool.take(count - len(granted))
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
        held = self.table.retract(array)
        self._seen[array] = self.table.words[array]
        return list(held.tolist())

    def _unpark(self) -> None:
        """Release parked slots whose guests have left; the longest parked come first."""
        if some := list(islice(self.parked, LOOKS_MAX)):
            held = self.table.guests_at(_array(some)).tolist()
            for slot in some:
                del self.parked[slot]
            self.parked.update(dict.fromkeys(held))
            self._pool.release(sorted(filterfalse(self.parked.__contains__, some)))

    def _park_next(self, count: int) -> None:
        while count > 0:
            held = self.table.guests_at(_array(self._pool.next_evicted(count))).tolist()
            if not held:
                return
            self._pool.withhold(held)
            self.parked.update(dict.fromkeys(held))
            count *= 2  # however many there are, these are few rounds

    def _spare(self, count: int) -> None:
        """Requeue the next victims that other engines have used since their last release."""
        next_slots = self._pool.next_evicted(count) if count > 0 else []
        if next_slots:
            array = _array(next_slots)
            touched = array[self.table.touched[array] != 0]
            if len(touched):
                self.table.touched[touched] = 0
                used = touched.tolist()
                self._pool.hold(used)
                self._pool.release(used[::-1])

    def _claim(self, num_wanted: int) -> None:
        table = self.table
        free = table.free_lots(self._pool.num_usable)
        if self._pool.num_evictable >= num_wanted and len(self._lots) >= table.fair_share():
            free = [lot for lot in free if self._has_room(lot)]
        elif not free and table.free_napping():
            free = table.free_lots(self._pool.num_usable)
        for lot in free:
            if num_wanted > 0 and table.claim(lot):
                num_wanted -= self._take_over(lot)

    def _has_room(self, lot: int) -> bool:
        return not (self.table.words[self.table.range_of(lot)] & np.uint64(1)).all()

    def _take_over(self, lot: int) -> int:
        """Take over a claimed lot with its contents; return its number of slots."""
        table = self.table
        slots = table.range_of(lot)
        self._drop_changed(lot)  # and add nothing: it may be about to be stored
        self._lots.add(lot)
        self._has_lot[lot] = True
        hashes, leased = self._directory.hashes, self._pool.leased
        unknown = [slot for slot in slots if hashes[slot] is None]
        bad = [slot for slot in unknown if table.bad[slot] and slot not in leased]
        for slot in slots:
            self._is_own[slot] = 1
        if unknown:  # of others' generations, or there twice, or new, or nothing
            self._retract(unknown)
        self.parked.update(dict.fromkeys(bad))
        self._pool.withhold(bad)
        empty = [slot for slot in unknown if slot not in leased]
        filled = [s for s in slots if hashes[s] is not None and s not in leased]
        self._pool.supply(empty, filled)
        return len(slots)

    def publish(self, slots: Sequence[int]) -> None:
        """Publish what this engine has stored."""
        directory = self._directory
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
            private = directory.private
            generations = [self.secret if h in private else self.generation for h in hashes]
            self.table.publish(array, groups, hashes, generations)
            self._seen[array] = self.table.words[array]

    # ---- leases --------------------------------------------------------------------------------

    def own(self, slots: Iterable[int]) -> Sequence[int]:
        return list(filter(self._is_own.__getitem__, slots))

    def all_own(self) -> Iterator[int]:
        return chain.from_iterable(map(self.table.range_of, sorted(self._lots)))

    def visit(self, slots: Sequence[int]) -> Sequence[int]:
        foreign = filterfalse(self._is_own.__getitem__, slots)
        new = list(filterfalse(self._marked.__contains__, foreign))
        if new:
            array = _array(new)
            lost = self.table.visit(array, self._seen[array]).tolist()
            self._marked.update(new)
            self._marked.difference_update(lost)
            self._counters[Count.BORROWED_BLOCKS] += len(new) - len(lost)
            if lost:
                self.num_lost += len(lost)
                self._counters[Count.LOST_BLOCKS] += len(lost)
                self._pool.forget(lost)
        if self.parked:
            parked = set(filter(self.parked.__contains__, slots))
            for slot in parked:
                del self.parked[slot]
            slots = list(filterfalse(parked.__contains__, slots))
        return slots

    def leave(self, slots: Sequence[int]) -> None:
        left = list(filter(self._marked.__contains__, slots))
        if left:
            self.table.leave(array := _array(left))
            self._marked.difference_update(left)
            changed = array[self.table.words[array] != self._seen[array]]  # while it was a guest
            self._versions[changed // self.table.lot_slots] = _UNSEEN

    def unpublish(self, slots: Sequence[int]) -> None:
        if slots and self.table.is_awake:
            self._retract(slots)

    def renew(self) -> None:
        self.generation = _new_number()
        self.secret = _new_number()

    def condemn(self, slots: Sequence[int]) -> None:
        if slots:
            self.table.condemn(_array(slots))

    def check_invariants(self, leased: Set[int]) -> None:
        table = self.table
        if table.is_awake and self._lots != set(table.own_lots()):
            raise InvariantError("I8", "the table has other lots of this engine than it knows")
        is_marked = set(np.flatnonzero(table.marks[table.engine]).tolist())
        if is_marked != self._marked or not self._marked <= leased:
            raise InvariantError("I1", "guest marks are not exactly those of leased slots")


def _new_number() -> int:
    return secrets.randbits(63) + 1


def _array(slots: Sequence[int]) -> Slots:
    return np.array(slots, np.int64)
