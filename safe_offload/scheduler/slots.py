"""Taking, leasing and giving back host slots, and what each of them holds.

A slot is one position in the host memory of every rank, as large as one GPU block. It is a plain
number here, from 0. A slot is leased by somebody, or it is empty, or it holds what can be found
under a key and is evictable; a slot that is leased may hold something too. What is done to many
slots is done in one call, for a long prompt has thousands.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from safe_offload.errors import InvariantError
from safe_offload.scheduler.eviction import make_policy

NO_SLOT = -1
"""Stands in a hit for a block that its group does not need (a window has slid past it)."""


class SlotPool:
    """Host slots; every operation is one step that cannot half happen.

    Slots become usable as all ranks say how many they have (`open`); before that, and when the pool
    is full of leased slots, a smaller grant is the normal answer.

    Args:
        num_slots: that every rank will have in the end.
        policy: the name of an eviction policy.
    """

    def __init__(self, num_slots: int, policy: str = "lru") -> None:
        self.num_slots = num_slots
        self.num_usable = 0
        self.version = 0
        """Changes when a slot can be found that could not, or the other way round."""
        self.num_forgets = 0
        """How often slots were forgotten that may be leased."""
        self._leases = [0] * num_slots
        self._keys: list[bytes | None] = [None] * num_slots
        self._more_keys: dict[int, tuple[bytes, ...]] = {}
        self._slots: dict[bytes, int] = {}
        self._empty: list[int] = []  # the last one is taken first
        self._filled = make_policy(policy, self._keys, num_slots)
        self._retired: set[int] = set()

    @property
    def num_free(self) -> int:
        """Slots that nothing leases; they may hold cached prefixes, which a grant then evicts."""
        return len(self._empty) + len(self._filled)

    @property
    def num_leased(self) -> int:
        """Slots under at least one lease; those that are retired do not count."""
        return self.num_usable - self.num_free - self.num_retired

    @property
    def num_retired(self) -> int:
        """Slots that are never granted again."""
        return len(self._retired)

    @property
    def num_kept(self) -> int:
        """Slots that can be found."""
        return self.num_slots - self._keys.count(None)

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
            self._unname(evicted)
            granted += evicted
        for slot in granted:
            self._leases[slot] = 1
        return granted

    def lease(self, slots: Iterable[int]) -> None:
        """Add one lease to each slot: none of them can be evicted until it is released."""
        leases = self._leases
        needed_again = []
        for slot in slots:
            if not leases[slot]:
                needed_again.append(slot)
            leases[slot] += 1
        if needed_again:
            self._filled.lease(needed_again)

    def release(self, slots: Sequence[int]) -> None:
        """Take one lease from each slot, given in prefix order.

        Slots that nobody else leases become evictable, the tail of the prefix before its head: a
        prefix without its head can never be hit.
        """
        leases, keys = self._leases, self._keys
        evictable = []
        for slot in reversed(slots):
            num_left = leases[slot] = leases[slot] - 1
            if num_left <= 0:
                if num_left < 0:
                    leases[slot] = 0
                    raise InvariantError("I8", f"slot {slot} released more often than leased")
                if keys[slot] is None:
                    self._empty.append(slot)
                else:
                    evictable.append(slot)
        if evictable:
            self._filled.release(evictable)

    def retire(self, slots: Iterable[int]) -> list[int]:
        """Never grant these slots again: the memory under them is not to be trusted (I6).

        Each is given one lease that nobody releases; leases on it stay as they are. What it holds
        can still be found until somebody forgets it.

        Returns:
            The slots that were not retired before.
        """
        retired = [s for s in slots if 0 <= s < self.num_usable and s not in self._retired]
        retired = list(dict.fromkeys(retired))
        self._retired.update(retired)
        self._empty = [slot for slot in self._empty if slot not in self._retired]
        self.lease(retired)
        return retired

    def mend(self, leases: Iterable[Sequence[int]]) -> None:
        """Give every slot the references of its leases, and one more if it is retired."""
        expected = self._count(leases)
        self._leases = [expected[slot] for slot in range(self.num_slots)]
        unleased = [slot for slot in range(self.num_usable) if not expected[slot]]
        self._empty = [slot for slot in reversed(unleased) if self._keys[slot] is None]
        self._filled.forget(range(self.num_slots))
        self._filled.release([slot for slot in unleased if self._keys[slot] is not None])

    # ---- what they hold ------------------------------------------------------------------------

    def find(self, key: bytes) -> int | None:
        """The slot that can be found under a block hash (with its group id), if any."""
        return self._slots.get(key)

    def publish(
        self,
        slots: Sequence[int],
        keys: Sequence[bytes],
        more_keys: Mapping[bytes, tuple[bytes, ...]],
    ) -> int:
        """Let leased slots be found under these keys; a key that is there already stays as it is.

        Args:
            slots: what was stored.
            keys: one for each.
            more_keys: by its key, what else a slot may be found under.

        Returns:
            How many can be found now that could not be.
        """
        table, names = self._slots, self._keys
        num_before = len(table)
        for slot, key in zip(slots, keys, strict=True):
            if table.setdefault(key, slot) == slot:
                names[slot] = key
        num_published = len(table) - num_before
        if more_keys:
            for key, others in more_keys.items():
                slot = table[key]
                if slot in slots:
                    self._more_keys[slot] = tuple(
                        other for other in others if table.setdefault(other, slot) == slot
                    )
        self.version += 1
        return num_published

    def forget(self, slots: Iterable[int]) -> None:
        """Never find these slots again; leases on them stay as they are."""
        self.num_forgets += 1
        known = [slot for slot in slots if self._keys[slot] is not None]
        self._unname(known)
        unleased = [slot for slot in known if not self._leases[slot]]
        self._filled.forget(unleased)
        self._empty += unleased

    def forget_all(self) -> None:
        """Never find any slot again that can be found now."""
        self.forget(slot for slot in range(self.num_slots) if self._keys[slot] is not None)

    def _unname(self, slots: Iterable[int]) -> None:
        """What these hold cannot be found any more."""
        self.version += 1
        table, names = self._slots, self._keys
        for slot in slots:
            key = names[slot]
            if key is not None:
                del table[key]
                names[slot] = None
        if self._more_keys:
            for slot in slots:
                for key in self._more_keys.pop(slot, ()):
                    del table[key]

    # ---- the rest ------------------------------------------------------------------------------

    def _count(self, leases: Iterable[Sequence[int]]) -> Counter[int]:
        """How many references each slot should have."""
        expected = Counter(slot for slots in leases for slot in slots)
        expected.update(self._retired)
        return expected

    def check_invariants(self, leases: Iterable[Sequence[int]]) -> None:
        """Compare every slot's reference count with the leases that exist (I1, I8).

        Raises:
            InvariantError: a count differs, or the free count does not match.
        """
        expected = self._count(leases)
        for slot in range(self.num_slots):
            if self._leases[slot] != expected[slot]:
                raise InvariantError(
                    "I8",
                    f"slot {slot} has {self._leases[slot]} references and {expected[slot]} leases "
                    "or reasons to keep it",
                )
        unleased = [slot for slot in range(self.num_usable) if not self._leases[slot]]
        empty = {slot for slot in unleased if self._keys[slot] is None}
        if set(self._empty) != empty or len(self._empty) != len(empty):
            raise InvariantError("I8", "the empty slots are not exactly those that hold nothing")
        if self.num_free != len(unleased):
            raise InvariantError("I8", "the free slots are not exactly the unleased ones")
