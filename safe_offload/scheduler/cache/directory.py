"""The directory: host slots by the hashes of their blocks."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from itertools import chain, repeat
from typing import TYPE_CHECKING, Any, NamedTuple

from safe_offload.errors import InvariantError

if TYPE_CHECKING:
    from safe_offload.scheduler.cache.events import KvEvents, Owner


SPLIT_FROM = 1 << 18
"""Slots above which a table is split: to rehash one dictionary takes 25 ms."""


class Key(NamedTuple):
    """The key of a slot."""

    group_idx: int
    block_hash: bytes


class SplitTable(MutableMapping[bytes, int]):
    """256 dictionaries, by the first byte of a hash: each of them is rehashed quickly.

    Bound: two entries for each slot, as further keys are few.
    """

    def __init__(self) -> None:
        self._parts: list[dict[bytes, int]] = [{} for _ in range(256)]

    def __getitem__(self, block_hash: bytes) -> int:
        return self._parts[block_hash[0]][block_hash]

    def __setitem__(self, block_hash: bytes, slot: int) -> None:
        self._parts[block_hash[0]][block_hash] = slot

    def __delitem__(self, block_hash: bytes) -> None:
        del self._parts[block_hash[0]][block_hash]

    def __contains__(self, block_hash: Any) -> bool:
        return block_hash in self._parts[block_hash[0]]

    def __iter__(self) -> Iterator[bytes]:
        return chain.from_iterable(self._parts)

    def __len__(self) -> int:
        return sum(map(len, self._parts))

    def get(self, block_hash: bytes, default: Any = None) -> Any:
        """Return the slot, or the default."""
        return self._parts[block_hash[0]].get(block_hash, default)


class Directory:
    """Slots by block hash, for each KV cache group; `events` is notified of all changes.

    Bound: as many entries as there are slots, a few further keys of each, and that of
    `PrivateBlocks`.
    """

    def __init__(self, num_slots: int, num_groups: int, events: KvEvents | None = None) -> None:
        self.events = events
        self._on_publish: Callable[[Sequence[int]], None] | None = None
        # Everything below is mutable. A store changes it when it begins and when it is published;
        # `SlotPool`, which knows what to do with a slot that holds nothing, does the rest.
        # Others only read: `tables` has the slots by hash of each group, also those being stored,
        # and `hashes` the hash of each slot.
        make = dict if num_slots < SPLIT_FROM else SplitTable
        self.tables = tuple[MutableMapping[bytes, int], ...](make() for _ in range(num_groups))
        self.hashes: list[bytes | None] = [None] * num_slots
        self.num_held = 0  # slots with a hash
        self.version = 0  # changes whenever a slot is published or removed
        self.num_forgets = 0  # times that slots were dropped which may be leased
        self.epoch = 0  # number of resets; a store of an earlier epoch is not published
        self._groups = bytearray(num_slots)
        self.group_of = self._groups.__getitem__
        """Returns the KV cache group of what a slot holds."""
        self._has_groups = num_groups > 1
        self._more_keys: dict[int, list[Key]] = {}
        self.being_stored: set[int] = set()  # slots that are not published yet
        # Hashes that do not cover all inputs of their blocks, so that only this engine may use
        # these; `PrivateBlocks` changes it.
        self.private: set[bytes] = set()

    def begin_store(
        self,
        slots: Sequence[int],
        group_idx: int,
        hashes: Sequence[bytes],
        more_keys: Mapping[bytes, Sequence[Key]],
        owners: Sequence[Owner] = (),
    ) -> None:
        """Add leased slots that are being filled: not found yet, but not stored again, either.

        Args:
            hashes: of the blocks, none of them in the group's table.
            more_keys: by hash, further keys of the block.
            owners: see `Part`; needed for KV events only.
        """
        self.being_stored.update(slots)
        any(map(self.hashes.__setitem__, slots, hashes))  # None each: all of it runs
        self.num_held += len(slots)
        self.tables[group_idx].update(zip(hashes, slots, strict=True))
        if self._has_groups:
            for slot in slots:
                self._groups[slot] = group_idx
        if more_keys:
            self._add_keys(group_idx, more_keys)
        if self.events is not None:
            self.events.storing(self._keys_of(slots), owners)

    def _add_keys(self, group_idx: int, more_keys: Mapping[bytes, Sequence[Key]]) -> None:
        for block_hash, keys in more_keys.items():
            slot = self.tables[group_idx][block_hash]
            free = [key for key in keys if key.block_hash not in self.tables[key.group_idx]]
            self._more_keys[slot] = free
            for key in free:
                self.tables[key.group_idx][key.block_hash] = slot

    def publish(self, slots: Sequence[int]) -> None:
        """Publish filled slots, except those dropped meanwhile."""
        self.version += 1
        self.being_stored.difference_update(slots)
        if self.events is not None:
            self.events.published(self._keys_of(slots))
        if self._on_publish is not None:
            self._on_publish(slots)

    def tell_published(self, on_publish: Callable[[Sequence[int]], None]) -> None:
        """Register a callback for newly published slots."""
        self._on_publish = on_publish

    def withdraw(self) -> None:
        """Disable all hits from now on."""
        if self.events is not None:
            self.events.withdraw(self.all_keys())

    def find(self, group_idx: int, block_hash: bytes) -> int | None:
        """Return the slot of a block, or None."""
        slot = self.tables[group_idx].get(block_hash)
        return None if slot in self.being_stored else slot

    def find_run(self, group_idx: int, hashes: Sequence[bytes]) -> list[int]:
        """Return the slots of the leading blocks of a prefix, up to the first missing one."""
        table = self.tables[group_idx]
        if not hashes or hashes[0] not in table:
            return []  # most prompts are new
        found = list(map(table.get, hashes))
        slots: list[Any] = found[: found.index(None)] if None in found else found
        if not self.being_stored.isdisjoint(slots):
            unfilled = (i for i, slot in enumerate(slots) if slot in self.being_stored)
            del slots[next(unfilled) :]
        return slots

    def filled(self, slots: list[int]) -> list[int]:
        """Return the published slots of a table."""
        if self.being_stored.isdisjoint(slots):
            return slots
        return [slot for slot in slots if slot not in self.being_stored]

    def kept(self) -> dict[int, Key]:
        """Return the keys of all published slots."""
        return {
            slot: Key(self._groups[slot], block_hash)
            for slot, block_hash in self._held()
            if slot not in self.being_stored
        }

    def _held(self) -> Iterator[tuple[int, bytes]]:
        return ((slot, held) for slot, held in enumerate(self.hashes) if held is not None)

    def all_keys(self) -> list[Key]:
        """Return all slots, published or being stored, by each of their keys."""
        return [Key(group_idx, h) for group_idx, table in enumerate(self.tables) for h in table]

    def _keys_of(self, slots: Iterable[int]) -> Iterator[Key]:
        """Yield all keys of slots, in their order; none for a dropped one."""
        for slot in slots:
            block_hash = self.hashes[slot]
            if block_hash is not None:
                yield Key(self._groups[slot], block_hash)
                yield from self._more_keys.get(slot, ())

    # ---- for `SlotPool` ------------------------------------------------------------------------

    def remove(self, slots: Sequence[int]) -> None:
        """Drop all keys of slots in the tables that are about to be overwritten."""
        self.version += 1
        if self.events is not None:
            self.events.removed(self._keys_of(slots))
        groups, tables = self._groups, self.tables
        hashes: list[Any] = list(map(self.hashes.__getitem__, slots))
        deque(map(self.hashes.__setitem__, slots, repeat(None)), maxlen=0)
        self.num_held -= len(hashes)
        if not self._has_groups:
            deque(map(tables[0].pop, hashes), maxlen=0)
        else:
            for slot, block_hash in zip(slots, hashes, strict=True):
                del tables[groups[slot]][block_hash]
        if self._more_keys:
            for slot in slots:
                for key in self._more_keys.pop(slot, ()):
                    del tables[key.group_idx][key.block_hash]

    def forget(self, slots: Iterable[int]) -> list[int]:
        """Drop all keys of slots, leased or not; return the slots that had one."""
        held = [slot for slot in slots if self.hashes[slot] is not None]
        self.num_forgets += 1
        self.being_stored.difference_update(held)
        self.remove(held)
        return held

    def forget_all(self) -> list[int]:
        """Begin a new epoch with empty tables; return the published slots, the last first."""
        self.epoch += 1
        return self.forget(range(len(self.hashes) - 1, -1, -1))

    def mend(self, leased: Iterable[int]) -> None:
        """After an error, rebuild the tables without slots being stored without a lease."""
        for slot in self.being_stored.difference(leased):
            self.hashes[slot] = None
        held = dict(self._held())
        self.num_held = len(held)
        self.being_stored &= held.keys()
        self._more_keys.clear()
        for table in self.tables:
            for block_hash in [*table]:
                del table[block_hash]
        for slot, block_hash in held.items():
            self.tables[self._groups[slot]][block_hash] = slot

    def __repr__(self) -> str:
        return f"<Directory of epoch {self.epoch}: {self.num_held} slots>"

    def check_invariants(self, leased: set[int]) -> None:
        """Check that the tables agree (I6), and that slots being stored are leased (I5)."""
        if not self.being_stored <= leased:
            raise InvariantError("I5", "a slot that is being stored is not leased")
        num_names = self.num_held + sum(map(len, self._more_keys.values()))
        if sum(map(len, self.tables)) != num_names:
            raise InvariantError("I6", "two slots are to be found under one key")
        held = list(self._held())
        if len(held) != self.num_held:
            raise InvariantError("I6", "slots that hold something are counted wrong")
        if any(self.tables[self._groups[s]].get(h) != s for s, h in held):
            raise InvariantError("I6", "a slot cannot be found under its own key")
