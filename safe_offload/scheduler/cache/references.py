"""How many leases each slot has."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from safe_offload.errors import InvariantError


class References:
    """How many leases each slot has.

    Bound: an entry for each leased slot.

    Attributes:
        leased: slots with at least one. Read only.
    """

    def __init__(self) -> None:
        # Both are mutable, and changed here only.
        self.leased: set[int] = set()
        self._more: Counter[int] = Counter()  # of a slot, beyond the first

    def add_first(self, slots: Sequence[int]) -> None:
        """Give each slot, which has none, its first."""
        self.leased.update(slots)

    def add(self, slots: Sequence[int]) -> None:
        """Add one to each slot, given once."""
        leased = self.leased
        if not leased.isdisjoint(slots):
            self._more.update(leased.intersection(slots))
        leased.update(slots)

    def drop(self, slots: Sequence[int]) -> Sequence[int]:
        """Take one from each slot, of which one may be given twice.

        Returns:
            Those that have none left, in the order given.

        Raises:
            InvariantError: one of them has none; then nothing has changed.
        """
        leased, more = self.leased, self._more
        if not leased.issuperset(slots):
            unleased = sorted(set(slots) - leased)
            raise InvariantError("I8", f"slots {unleased} released more often than leased")
        if more and not more.keys().isdisjoint(slots):
            last = []
            for slot in slots:
                num_more = more.get(slot)
                if num_more is None:
                    last.append(slot)
                elif num_more == 1:
                    more.pop(slot)
                else:
                    more[slot] = num_more - 1
            slots = last
        leased.difference_update(slots)
        return slots

    def rebuild(self, expected: Mapping[int, int]) -> None:
        """From now on each slot has so many."""
        self.leased = set(expected)
        self._more = Counter({slot: count - 1 for slot, count in expected.items() if count > 1})

    def check(self, expected: Mapping[int, int]) -> None:
        """Raise an InvariantError unless each slot has so many."""
        for slot in sorted(self.leased | self._more.keys() | expected.keys()):
            found = (slot in self.leased) + self._more.get(slot, 0)
            if found != expected.get(slot, 0):
                raise InvariantError(
                    "I8",
                    f"slot {slot} has {found} references and {expected.get(slot, 0)} leases or "
                    "reasons to keep it",
                )
