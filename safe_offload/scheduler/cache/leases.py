"""Leases, which prevent the eviction of slots: each reference in the pool belongs to one lease."""

from __future__ import annotations

import enum
from collections.abc import Iterator, Sequence, Set

from safe_offload.scheduler.cache.slots import SlotPool


class LeaseKind(enum.Enum):
    """The purpose of a lease."""

    MATCH = "match"
    """A hit reported to vLLM, until it is loaded or dropped (I1)."""
    LOAD = "load"
    """Its slots are being copied to the GPU."""
    STORE = "store"
    """Its slots are being written from the GPU."""
    PREFIX = "prefix"
    """The host copy of a live request's prefix; it keeps the head of a too long prompt."""
    FETCH = "fetch"
    """Its slots are being filled from a tier, or were, for requests without a match so far."""
    SPILL = "spill"
    """Its slots are being written to a tier."""
    PIN = "pin"
    """A client has pinned a prompt for a time after its last use."""


class Lease:
    """Slots that keep their contents until `release`, which is idempotent."""

    __slots__ = ("_book", "kind", "slots")

    def __init__(self, book: LeaseBook, kind: LeaseKind, slots: list[int]) -> None:
        # All is mutable. This file alone changes it; a lease without a book is released.
        self._book: LeaseBook | None = book
        self.kind = kind
        self.slots = slots

    @property
    def held(self) -> bool:
        """Return whether the lease still protects its slots."""
        return self._book is not None

    def release(self, first: Sequence[int] = ()) -> None:
        """Release all slots, in prefix order, those in `first` to be evicted first; idempotent."""
        if self._book is not None:
            book, self._book = self._book, None
            del book._held[self]
            if self.slots:
                book._pool.release(self.slots, first)

    def keep(self, kind: LeaseKind, slots: list[int]) -> None:
        """Hold some of its slots for another purpose, and release the others."""
        if len(slots) < len(self.slots) and self._book is not None:
            kept = set(slots)
            self._book._pool.release([slot for slot in self.slots if slot not in kept])
        self.kind, self.slots = kind, slots

    def share(self, shares: Sequence[tuple[int, Lease | None]]) -> None:
        """Move all slots to other held leases, atomically.

        Args:
            shares: the number of slots for each lease, in order; None releases them, as the slots
                after the last share.
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
        """Move all slots to another held lease."""
        self.share([(len(self.slots), other)])

    def __repr__(self) -> str:
        state = "held" if self.held else "released"
        return f"<Lease: {len(self.slots)} slots for {self.kind.value}, {state}>"


class LeaseBook:
    """All leases. Bound: a lease for each request, transfer and pinned run."""

    def __init__(self, pool: SlotPool) -> None:
        self._pool = pool
        # Mutable: the leases that are held, in order. A lease takes itself out when it is released.
        self._held: dict[Lease, None] = {}

    def lease(self, kind: LeaseKind, slots: Sequence[int] = ()) -> Lease:
        """Lease filled slots, which may be evictable now."""
        if slots:
            self._pool.lease(slots)
        return self._hold(kind, list(slots))

    def grant(self, kind: LeaseKind, count: int, salt: str | None = None) -> Lease | None:
        """Lease up to `count` slots to overwrite; None, with nothing changed, if none is free."""
        slots = self._pool.grant(count, salt)
        return self._hold(kind, slots) if slots else None

    def hold(self, kind: LeaseKind, slots: Sequence[int]) -> Lease:
        """Lease filled slots without counting that as a use."""
        self._pool.hold(slots)
        return self._hold(kind, list(slots))

    def extend(self, lease: Lease, slots: Sequence[int]) -> None:
        """Add filled slots to a held lease."""
        self._pool.lease(slots)
        lease.slots.extend(slots)

    def extend_head(self, lease: Lease, slots: Sequence[int]) -> None:
        """Add slots before those of a held lease."""
        self._pool.lease(slots)
        lease.slots[:0] = slots

    def keep_only(self, needed: Set[Lease]) -> None:
        """After an internal error, end all other leases, including incomplete ones."""
        for lease in self:
            if lease not in needed:
                lease._book = None
        self._held = {lease: None for lease in needed if lease.held}
        self._pool.mend(lease.slots for lease in self)

    def __iter__(self) -> Iterator[Lease]:
        return iter(self._held)

    def __len__(self) -> int:
        return len(self._held)

    def __repr__(self) -> str:
        return f"<LeaseBook: {list(self)}>"

    def check_invariants(self) -> None:
        """Check that every slot has as many references as leases; see `SlotPool`."""
        self._pool.check_invariants(lease.slots for lease in self)

    def _hold(self, kind: LeaseKind, slots: list[int]) -> Lease:
        lease = Lease(self, kind, slots)
        self._held[lease] = None
        return lease
