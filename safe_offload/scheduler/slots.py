"""Taking, leasing and giving back host slots, and what each of them holds.

A slot is one position in the host memory of every rank, as large as one GPU block. It is a plain
number here, from 0. A slot is leased by somebody, or it is empty, or it holds what can be found
under a key and is evictable; a slot that is leased may hold something too. What is done to many
slots is done to all of them in one call: a long prompt has thousands, and they are on vLLM's way to
its next step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from safe_offload.errors import InvariantError
from safe_offload.observe.counters import Count, Counters
from safe_offload.scheduler.eviction import POLICIES

NO_SLOT = -1
"""Stands in a hit for a block that its group does not need (a window has slid past it)."""


class Key(NamedTuple):
    """Under what a slot is found."""

    group_idx: int
    block_hash: bytes


def needed(items: list[Any], markers: list[Any], null: object) -> list[Any]:
    """The items whose marker, in the same place, is not `null`.

    A window leaves thousands of nulls at the head and none behind, so that is looked at first.
    """
    num_nulls = markers.count(null)
    if num_nulls and null in markers[num_nulls:]:
        return [item for item, marker in zip(items, markers, strict=True) if marker != null]
    return items[num_nulls:]


class SlotPool:
    """Host slots; every operation is one step that cannot half happen.

    Slots become usable as all ranks say how many they have (`open`); before that, and when the pool
    is full of leased slots, a smaller grant is the normal answer.

    Args:
        num_slots: that every rank will have in the end.
        num_groups: KV cache groups.
        policy: one of `eviction.POLICIES`.

    Attributes:
        counters: evictions are counted here.
    """

    def __init__(self, num_slots: int, num_groups: int, policy: str) -> None:
        self.num_slots = num_slots
        self.num_usable = 0
        self.tables: tuple[dict[bytes, int], ...] = tuple({} for _ in range(num_groups))
        """For each group, slots by block hash: those that can be found, and those that are being
        stored. Read only, but for this class."""
        self.version = 0
        """Changes when a slot can be found that could not, or the other way round."""
        self.num_forgets = 0
        """How often slots were forgotten that may be leased."""
        self._leased: set[int] = set()
        self._more_leases: Counter[int] = Counter()  # of a slot, beyond the first
        self._hashes: dict[int, bytes] = {}  # of each slot in the tables
        self._groups = bytearray(num_slots)
        self._more_keys: dict[int, list[Key]] = {}
        self._being_stored: set[int] = set()
        self._empty: list[int] = []  # the last one is taken first
        self._filled = POLICIES[policy](num_slots)
        self._retired: set[int] = set()
        self.counters = Counters()
        self._hit: set[int] = set()  # of the filled ones, those that a load has read

    @property
    def num_free(self) -> int:
        """Slots that nothing leases; they may hold cached prefixes, which a grant then evicts."""
        return len(self._empty) + len(self._filled)

    @property
    def num_leased(self) -> int:
        """Slots under at least one lease; those that are retired do not count."""
        return len(self._leased) - len(self._retired)

    @property
    def num_filled(self) -> int:
        """Slots that hold something, or are being filled."""
        return len(self._hashes)

    @property
    def num_retired(self) -> int:
        """Slots that are never granted again."""
        return len(self._retired)

    def open(self, num_usable: int) -> None:
        """Allow the first `num_usable` slots and withhold the others.

        Called when the capacity of every rank is known, and again when it has grown: memory is made
        ready piece by piece. Fewer than before changes nothing.
        """
        opened = range(self.num_usable, min(num_usable, self.num_slots))
        if opened:
            self._empty[:0] = reversed(opened)
            self.num_usable = opened.stop

    # ---- leases --------------------------------------------------------------------------------

    def grant(self, count: int) -> list[int]:
        """Take up to `count` slots, each under one lease of the caller's.

        Returns:
            Possibly fewer than asked for, possibly none: full is normal, and then nothing else has
            changed. What a granted slot held before is forgotten.
        """
        if count <= 0:
            return []
        granted = self._empty[-count:]
        granted.reverse()
        del self._empty[-count:]
        if len(granted) < count:
            evicted = self._filled.evict(count - len(granted))
            self._count_evicted(evicted)
            self._unname(evicted)
            granted += evicted
        self._leased.update(granted)
        return granted

    def lease(self, slots: Sequence[int]) -> None:
        """Add one lease to each slot: none of them can be evicted until it is released.

        Args:
            slots: none twice.
        """
        leased, more = self._leased, self._more_leases
        if leased.isdisjoint(slots):
            leased.update(slots)
        else:
            more.update(leased.intersection(slots))
            leased.update(slots)
        self._filled.lease(slots)

    def release(self, slots: Sequence[int]) -> None:
        """Take one lease from each slot, given in prefix order.

        Slots that nobody else leases become evictable, the tail of the prefix before its head: a
        prefix without its head can never be hit.

        Raises:
            InvariantError: one of them is not leased; then nothing has changed.
        """
        if not self._leased.issuperset(slots):
            unleased = sorted(set(slots) - self._leased)
            raise InvariantError("I8", f"slots {unleased} released more often than leased")
        more = self._more_leases
        if more and not more.keys().isdisjoint(slots):
            last = []
            for slot in slots:  # one may be among them twice
                num_more = more.get(slot)
                if num_more is None:
                    last.append(slot)
                elif num_more == 1:
                    more.pop(slot)
                else:
                    more[slot] = num_more - 1
            slots = last
        self._leased.difference_update(slots)
        hashes = self._hashes
        if all(map(hashes.__contains__, slots)):
            self._filled.release(slots[::-1])
        else:
            self._filled.release([slot for slot in reversed(slots) if slot in hashes])
            self._empty += [slot for slot in reversed(slots) if slot not in hashes]

    def retire(self, slots: Iterable[int]) -> list[int]:
        """Never grant these slots again: the memory under them is not to be trusted (I6).

        Each is given one lease that nobody releases; leases on it stay as they are. What it holds
        can still be found until somebody forgets it.

        Returns:
            The slots that were not retired before.
        """
        usable = (slot for slot in slots if 0 <= slot < self.num_usable)
        retired = [slot for slot in dict.fromkeys(usable) if slot not in self._retired]
        self._retired.update(retired)
        self._empty = [slot for slot in self._empty if slot not in self._retired]
        self.lease(retired)
        return retired

    def mend(self, leases: Iterable[Sequence[int]]) -> None:
        """After an error: give every slot the references of its leases, and make the tables anew.

        What was being stored without a lease is forgotten; a slot that is retired has one more.
        """
        expected = self._count(leases)
        for slot in self._being_stored - expected.keys():
            self._hashes.pop(slot, None)
        self._being_stored &= self._hashes.keys()
        self._more_keys.clear()
        for table in self.tables:
            table.clear()
        for slot, block_hash in self._hashes.items():
            self.tables[self._groups[slot]][block_hash] = slot
        self._leased = set(expected)
        self._more_leases = Counter({slot: n - 1 for slot, n in expected.items() if n > 1})
        unleased = [slot for slot in range(self.num_usable) if slot not in expected]
        self._filled.forget(range(self.num_slots))
        self._filled.release([slot for slot in unleased if slot in self._hashes])
        self._empty = [slot for slot in reversed(unleased) if slot not in self._hashes]

    # ---- what they hold ------------------------------------------------------------------------

    def begin_store(
        self,
        slots: Sequence[int],
        group_idx: int,
        hashes: Sequence[bytes],
        more_keys: Mapping[bytes, Sequence[Key]],
    ) -> None:
        """Leased slots are being filled: nobody else need store this, and nobody finds it yet.

        Args:
            slots: granted, each to hold one block.
            group_idx: KV cache group of all the blocks.
            hashes: of the blocks, none of them in the group's table.
            more_keys: by such a hash, what else the block is known under.
        """
        self._being_stored.update(slots)
        self._hashes.update(zip(slots, hashes, strict=True))
        self.tables[group_idx].update(zip(hashes, slots, strict=True))
        if len(self.tables) > 1:
            for slot in slots:
                self._groups[slot] = group_idx
        for block_hash, keys in more_keys.items():
            slot = self.tables[group_idx][block_hash]
            free = [key for key in keys if key.block_hash not in self.tables[key.group_idx]]
            self._more_keys[slot] = free
            for key in free:
                self.tables[key.group_idx][key.block_hash] = slot

    def publish(self, slots: Sequence[int]) -> None:
        """They are filled: from now on they can be found, if nobody has forgotten them."""
        self.version += 1
        self._being_stored.difference_update(slots)

    def find(self, group_idx: int, block_hash: bytes) -> int | None:
        """The slot that holds a block, if any."""
        slot = self.tables[group_idx].get(block_hash)
        return None if slot in self._being_stored else slot

    def find_run(self, group_idx: int, hashes: Sequence[bytes]) -> list[int]:
        """The slots that hold the first blocks of a prefix, up to the first that none holds."""
        table = self.tables[group_idx]
        if not hashes or hashes[0] not in table:
            return []  # most prompts are new
        found = list(map(table.get, hashes))
        slots: list[Any] = found[: found.index(None)] if None in found else found
        if not self._being_stored.isdisjoint(slots):
            unfilled = (i for i, slot in enumerate(slots) if slot in self._being_stored)
            del slots[next(unfilled) :]
        return slots

    def filled(self, slots: list[int]) -> list[int]:
        """Of slots that a table has, those that can be found."""
        if self._being_stored.isdisjoint(slots):
            return slots
        return [slot for slot in slots if slot not in self._being_stored]

    def kept(self) -> dict[int, Key]:
        """What each slot holds that can be found."""
        return {
            slot: Key(self._groups[slot], block_hash)
            for slot, block_hash in self._hashes.items()
            if slot not in self._being_stored
        }

    def forget(self, slots: Iterable[int]) -> None:
        """Never find these slots again; leases on them stay as they are."""
        slots = [slot for slot in slots if slot in self._hashes]
        self.num_forgets += 1
        self._hit.difference_update(slots)
        self._being_stored.difference_update(slots)
        self._unname(slots)
        self._filled.forget(slots)
        self._empty += [slot for slot in slots if slot not in self._leased]

    def forget_all(self) -> None:
        """Never find any slot again that is in a table now."""
        self.forget(list(self._hashes))

    def mark_hit(self, slots: Iterable[int]) -> None:
        """A load reads these."""
        self._hit.update(slots)

    def set_time(self, now_s: float) -> None:
        """From now on it is so late; only the age of what is evicted depends on it."""
        self._filled.now_s = now_s

    def _count_evicted(self, slots: Sequence[int]) -> None:
        hit = self._hit.intersection(slots)
        if hit:
            self._hit -= hit
            self.counters[Count.EVICTED_BLOCKS_HIT] += len(hit)
        self.counters[Count.EVICTED_BLOCKS_UNHIT] += len(slots) - len(hit)
        self.counters.add_seconds(Count.EVICTED_AGE_SECONDS, self._filled.take_age_s())

    def _unname(self, slots: Sequence[int]) -> None:
        """What these hold, or will, cannot be found any more."""
        self.version += 1
        groups, tables, hashes = self._groups, self.tables, map(self._hashes.pop, slots)
        if len(tables) == 1:
            list(map(tables[0].pop, hashes))
        else:
            for slot, block_hash in zip(slots, hashes, strict=True):
                del tables[groups[slot]][block_hash]
        if self._more_keys:
            for slot in slots:
                for key in self._more_keys.pop(slot, ()):
                    del tables[key.group_idx][key.block_hash]

    # ---- the rest ------------------------------------------------------------------------------

    def _count(self, leases: Iterable[Sequence[int]]) -> Counter[int]:
        """How many leases each slot should have."""
        expected = Counter(slot for slots in leases for slot in slots)
        expected.update(self._retired)
        return expected

    def check_invariants(self, leases: Iterable[Sequence[int]]) -> None:
        """Compare every slot's leases with those that exist (I1, I8), and the tables.

        Raises:
            InvariantError: they differ, or the free slots are not those that nobody leases.
        """
        expected = self._count(leases)
        for slot in range(self.num_slots):
            found = (slot in self._leased) + self._more_leases.get(slot, 0)
            if found != expected[slot]:
                raise InvariantError(
                    "I8",
                    f"slot {slot} has {found} references and {expected[slot]} leases or reasons "
                    "to keep it",
                )
        unleased = {slot for slot in range(self.num_usable) if slot not in self._leased}
        if sorted(self._empty) != sorted(unleased - self._hashes.keys()):
            raise InvariantError("I8", "the empty slots are not exactly those that hold nothing")
        if self.num_free != len(unleased):
            raise InvariantError("I8", "the free slots are not exactly the unleased ones")
        if not self._being_stored <= self._leased:
            raise InvariantError("I5", "a slot that is being stored is not leased")
        num_names = len(self._hashes) + sum(map(len, self._more_keys.values()))
        if sum(map(len, self.tables)) != num_names:
            raise InvariantError("I6", "two slots are to be found under one key")
        if any(self.tables[self._groups[s]].get(h) != s for s, h in self._hashes.items()):
            raise InvariantError("I6", "a slot cannot be found under its own key")
