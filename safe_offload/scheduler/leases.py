"""Why a slot may not be evicted: leases, and who holds them.

A lease is a set of slots that somebody needs as they are. There are four kinds, and every slot
reference in the pool belongs to exactly one of them:

- MATCH: reported to vLLM as a hit, until the load is planned, the request ends or the cache is
  reset (I1);
- LOAD: being copied to the GPU;
- STORE: being written from the GPU;
- PREFIX: the host copy of a live request's prefix. It keeps the head of a long prompt in a pool
  that is too small for all of it, and is released tail first when the request ends.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Sequence, Set

from safe_offload.scheduler.slots import SlotPool


class LeaseKind(enum.Enum):
    """What a lease is held for."""

    MATCH = "match"
    LOAD = "load"
    STORE = "store"
    PREFIX = "prefix"


class Lease:
    """Slots that stay as they are until `release`; releasing twice is the same as once."""

    __slots__ = ("_book", "kind", "slots")

    def __init__(self, book: LeaseBook, kind: LeaseKind, slots: list[int]) -> None:
        self._book: LeaseBook | None = book
        self.kind = kind
        self.slots = slots

    @property
    def held(self) -> bool:
        """Whether the lease still protects its slots."""
        return self._book is not None

    def release(self) -> None:
        """Let go of all slots, given in prefix order; a second call does nothing."""
        if self._book is not None:
            book, self._book = self._book, None
            book.forget(self)

    def keep(self, kind: LeaseKind, slots: list[int]) -> None:
        """Hold some of its slots for another reason, and let go of the others."""
        if len(slots) < len(self.slots) and self._book is not None:
            kept = set(slots)
            self._book.let_go([slot for slot in self.slots if slot not in kept])
        self.kind, self.slots = kind, slots

    def share(self, shares: Sequence[tuple[int, Lease | None]]) -> None:
        """Hand all slots over to other held leases, and let go of those that nobody takes.

        Args:
            shares: how many of the first slots go to whom, how many of the next, and so on.
        """
        if self._book is None or any(other and other._book is None for _, other in shares):
            raise ValueError("all leases must be held")
        slots, left, start = self.slots, [], 0
        for count, other in shares:
            taken = slots[start : start + count]
            start += count
            if other is not None:
                other.slots += taken
            else:
                left += taken
        self.slots = left + slots[start:]
        self.release()

    def give_to(self, other: Lease) -> None:
        """Hand all slots over to another held lease, without a moment in which they are free."""
        self.share([(len(self.slots), other)])


class LeaseBook:
    """All leases that are held."""

    def __init__(self, pool: SlotPool) -> None:
        self._pool = pool
        self._held: dict[int, Lease] = {}

    def lease(self, kind: LeaseKind, slots: Sequence[int] = ()) -> Lease:
        """Lease slots that hold something (they may be evictable now)."""
        if slots:
            self._pool.lease(slots)
        return self._hold(kind, list(slots))

    def grant(self, kind: LeaseKind, count: int) -> Lease | None:
        """Lease up to `count` slots to overwrite; None, and nothing changed, if none is free."""
        slots = self._pool.grant(count)
        return self._hold(kind, slots) if slots else None

    def extend(self, lease: Lease, slots: Sequence[int]) -> None:
        """Add slots that hold something to a held lease."""
        self._pool.lease(slots)
        lease.slots.extend(slots)

    def extend_head(self, lease: Lease, slots: Sequence[int]) -> None:
        """The same, of slots that come before those that it has."""
        self._pool.lease(slots)
        lease.slots[:0] = slots

    def forget(self, lease: Lease) -> None:
        """Called by `Lease.release` only."""
        del self._held[id(lease)]
        if lease.slots:
            self._pool.release(lease.slots)

    def let_go(self, slots: Sequence[int]) -> None:
        """Called by `Lease` only."""
        self._pool.release(slots)

    def keep_only(self, needed: Set[Lease]) -> None:
        """After an internal error: let go of what nobody can name, leased or half way to it."""
        for lease in self:
            if lease not in needed:
                lease._book = None
        self._held = {id(lease): lease for lease in needed if lease.held}
        self._pool.mend(lease.slots for lease in self)

    def __iter__(self) -> Iterator[Lease]:
        return iter(self._held.values())

    def __len__(self) -> int:
        return len(self._held)

    def check_invariants(self) -> None:
        """Every slot has as many references as leases.

        Raises:
            InvariantError: see `SlotPool.check_invariants`.
        """
        self._pool.check_invariants(lease.slots for lease in self._held.values())

    def _hold(self, kind: LeaseKind, slots: list[int]) -> Lease:
        lease = Lease(self, kind, slots)
        self._held[id(lease)] = lease
        return lease
