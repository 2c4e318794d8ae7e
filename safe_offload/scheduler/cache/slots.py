"""The pool of host slots: free, leased and evictable ones.

A slot is a position in the host memory of every rank, as large as a GPU block; here it is a number,
from 0. Each call takes many slots: a long prompt has thousands, and vLLM waits.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence, Set
from itertools import filterfalse, repeat
from typing import TYPE_CHECKING, Protocol

from safe_offload.errors import InvariantError
from safe_offload.observe.counters import Count, Counters
from safe_offload.scheduler.cache.directory import Directory
from safe_offload.scheduler.eviction.policy import EvictionPolicy

if TYPE_CHECKING:
    from safe_offload.config.tenants import Tenants
    from safe_offload.scheduler.cache.tenants import TenantQuotas

NEW_SLOTS = 4096
"""New slots listed at a time: a list of all takes a step's time and 40 bytes a slot."""


class SlotSource(Protocol):
    """Supplies a pool with slots that other engines use, too (`scheduler/node/lots.py`).

    Its slots are *own* (this engine may overwrite them) or another engine's.
    """

    num_slots: int  # own and others'
    num_lost: int  # slots that other engines have overwritten before they could be leased
    # Own slots that may not be granted yet, each under a lease of the source's.
    parked: dict[int, None]

    def grant(self, count: int) -> list[int]:
        """See `SlotPool.grant`."""

    def wake(self) -> bool:
        """Keep other engines from taking own slots; False if that is not possible now."""

    def own(self, slots: Iterable[int]) -> Sequence[int]:
        """Return those of the slots that are own."""

    def all_own(self) -> Iterable[int]:
        """Return all slots that are own."""

    def visit(self, slots: Sequence[int]) -> Sequence[int]:
        """Guard slots that get a lease against other engines; forget those that they overwrote.

        Returns:
            The slots without those that were parked, whose lease becomes the caller's.
        """

    def leave(self, slots: Sequence[int]) -> None:
        """Let owners overwrite these slots, which have no leases any more."""

    def unpublish(self, slots: Sequence[int]) -> None:
        """Hide these own slots from other engines."""

    def renew(self) -> None:
        """Stop sharing the blocks stored so far with other engines."""

    def condemn(self, slots: Sequence[int]) -> None:
        """Retire these slots for all engines."""

    def look_again(self) -> None:
        """More slots are usable."""

    def check_invariants(self, leased: Set[int]) -> None:
        """Raise an InvariantError unless leased slots are protected from other engines."""


class References:
    """The number of leases of each slot; `leased` are those with at least one, read only.

    Bound: an entry for each leased slot.
    """

    def __init__(self) -> None:
        # Both are mutable, and changed here only.
        self.leased: set[int] = set()
        self._more: Counter[int] = Counter()  # of a slot, beyond the first

    def add_first(self, slots: Sequence[int]) -> None:
        """Add the first lease of each slot."""
        self.leased.update(slots)

    def add(self, slots: Sequence[int]) -> None:
        """Add one lease to each slot; no slot is given twice."""
        leased = self.leased
        if not leased.isdisjoint(slots):
            self._more.update(leased.intersection(slots))
        leased.update(slots)

    def drop(self, slots: Sequence[int]) -> Sequence[int]:
        """Remove one lease from each slot; a slot may be given twice.

        Returns the slots without leases now, in the order given. Raises InvariantError, with
        nothing changed, if a slot has no lease.
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
        """Set the number of leases of each slot."""
        self.leased = set(expected)
        self._more = Counter({slot: count - 1 for slot, count in expected.items() if count > 1})

    def check(self, expected: Mapping[int, int]) -> None:
        """Raise an InvariantError unless each slot has this number of leases."""
        for slot in sorted(self.leased | self._more.keys() | expected.keys()):
            found = (slot in self.leased) + self._more.get(slot, 0)
            if found != expected.get(slot, 0):
                raise InvariantError(
                    "I8",
                    f"slot {slot} has {found} references and {expected.get(slot, 0)} leases or "
                    "reasons to keep it",
                )


class SlotPool:
    """Host slots; every operation is atomic.

    Bound: an entry for each slot.

    Args:
        num_slots: that every rank will have once all memory is ready.
        directory, policy: empty.
        quotas: of tenants, whose `policy` this is; None without tenants.
        awaits_source: no slot is usable before `use_source`.
    """

    def __init__(
        self,
        num_slots: int,
        directory: Directory,
        policy: EvictionPolicy,
        counters: Counters,
        *,
        quotas: TenantQuotas | None = None,
        awaits_source: bool = False,
    ) -> None:
        self.num_slots = num_slots
        self.directory = directory
        self.may_refuse = policy.may_refuse  # there may be something that `admits` does not admit
        self._counters = counters
        self.quotas = quotas
        # What follows is mutable, and only this class changes it, and the policy with it. A usable
        # slot is leased, or it is evictable (it is in the directory), or else it is empty.
        self.source: SlotSource | None = None  # of the slots, if other engines use them, too
        self._awaits_source = awaits_source
        self._num_ready = 0
        self.num_usable = 0
        self._num_new = 0  # the last of the usable slots, which are empty and not in this list:
        self._empty: list[int] = []  # the last one is taken first
        self._evictable = policy
        self._now_s = 0.0
        self._references = References()
        self._retired: set[int] = set()
        self._pinned: set[int] = set()
        self._was_hit = bytearray(num_slots)  # 1: what it holds has been loaded

    @property
    def num_leased(self) -> int:
        """The number of leased slots, without retired, pinned and parked ones."""
        num_parked = 0 if self.source is None else len(self.source.parked)
        num_others = len(self._retired) + len(self._pinned) + num_parked
        return len(self._references.leased) - num_others

    @property
    def leased(self) -> Set[int]:
        """The leased slots, including retired and parked ones."""
        return self._references.leased

    @property
    def num_empty(self) -> int:
        """The number of empty slots that can be granted."""
        return len(self._empty) + self._num_new

    @property
    def num_free(self) -> int:
        """The number of slots without a lease."""
        return self.num_usable - len(self._references.leased)

    @property
    def num_evictable(self) -> int:
        """The number of filled slots without a lease."""
        return len(self._evictable)

    def num_grantable(self, salt: str | None) -> int:
        """Return the maximum size of a grant for requests with this salt."""
        if self.quotas is None:
            return self.num_free
        return self.quotas.num_grantable(self.num_empty, salt)

    def num_in_reach(self, salt: str | None) -> int:
        """Return the slots that grants could take without leases; with tenants, all or none."""
        if self.quotas is None or self.num_empty or self.quotas.has_in_reach(salt):
            return self.num_usable
        return 0

    @property
    def num_retired(self) -> int:
        """The number of retired slots."""
        return len(self._retired)

    def open(self, num_ready: int) -> None:
        """Open the first `num_ready` slots, which every rank has made ready; never close any."""
        self._num_ready = max(self._num_ready, min(num_ready, self.num_slots))
        if self._awaits_source:
            return
        if self.source is not None:
            self.num_usable = min(self._num_ready, self.source.num_slots)
            self.source.look_again()
            return
        self._num_new += self._num_ready - self.num_usable
        self.num_usable = self._num_ready
        self._recount()

    def use_source(self, source: SlotSource | None) -> None:
        """Use a source of slots from now on; None if the memory is not shared after all."""
        self._awaits_source, self.source = False, source
        self.open(self._num_ready)

    def supply(self, empty: Sequence[int], filled: Sequence[int]) -> None:
        """Add unleased own slots; the filled ones are evicted first."""
        self._empty += reversed(empty)
        self._evictable.evict_first(filled, self._now_s)

    def withdraw(self, slots: Sequence[int]) -> None:
        """Remove slots that `SlotSource.own` no longer returns; leases stay."""
        self._evictable.forget(slots)
        assert self.source is not None
        self._empty = list(self.source.own(self._empty))

    def use_tenants(self, tenants: Tenants) -> None:
        """Replace the tenants; a label that stays keeps its slots."""
        assert self.quotas is not None
        self.quotas.use(tenants, self._now_s)
        self._recount()

    def _recount(self) -> None:
        if self.quotas is not None:
            self.quotas.recount(self._taken(), self._pinned, self.num_usable - len(self._retired))

    def _taken(self) -> set[int]:
        """Return the usable slots that are neither empty nor retired."""
        old = range(self.num_usable - self._num_new)
        return set(old).difference(self._empty, self._retired)

    def pin(self, slots: Iterable[int]) -> None:
        """Count slots as pinned, also for their tenants."""
        new = set(slots).difference(self._pinned)
        self._pinned |= new
        if self.quotas is not None:
            self.quotas.pin(new)

    def unpin(self, slots: Iterable[int]) -> None:
        """Count slots as no longer pinned."""
        old = self._pinned.intersection(slots)
        self._pinned -= old
        if self.quotas is not None:
            self.quotas.unpin(old)

    def admits(self, count: int, last_slot: int | None, first_hash: bytes) -> bool:
        """Return whether a request may store `count` blocks; see `EvictionPolicy.admits`."""
        num_evicted = count - self.num_empty
        return num_evicted <= 0 or self._evictable.admits(
            num_evicted, last_slot, first_hash, self._now_s
        )

    def grant(self, count: int, salt: str | None = None) -> list[int]:
        """Take up to `count` slots, possibly none, each under one lease of the caller's.

        The directory drops their previous contents. The salt determines the tenant; see
        `TenantQuotas`.
        """
        if self.source is not None:
            return self.source.grant(count)
        if self.quotas is None:
            return self.take(count)
        self.quotas.ask(count, salt)
        granted = self.take(count)
        self.quotas.granted(granted)
        return granted

    def take(self, count: int) -> list[int]:
        """Take up to `count` slots: empty ones first, then evictable ones."""
        if count <= 0:
            return []
        granted = self._empty[-count:]
        granted.reverse()
        del self._empty[-count:]
        if len(granted) < count:
            if self._num_new:
                self._list_new(count - len(granted) + NEW_SLOTS)
                self._references.add_first(granted)
                return granted + self.take(count - len(granted))
            evicted = self._evictable.evict(count - len(granted), self._now_s)
            self._count_evicted(evicted)
            self.directory.remove(evicted)
            granted += evicted
        self._references.add_first(granted)
        return granted

    def _list_new(self, count: int) -> None:
        """Move new slots to the list of empty ones, to be taken last."""
        first = self.num_usable - self._num_new
        self._num_new -= (count := min(count, self._num_new))
        self._empty[:0] = range(first + count - 1, first - 1, -1)

    def lease(self, slots: Sequence[int]) -> None:
        """Add one lease to each slot, given once; forget those that another engine overwrote."""
        if self.source is None:
            self._references.add(slots)
        else:
            self._references.add(self.source.visit(slots))
            slots = self.source.own(slots)
        self._evictable.lease(slots)

    def hold(self, slots: Sequence[int]) -> None:
        """Add one lease to each slot, given once, without counting that as a use."""
        if self.source is None:
            self._references.add(slots)
        else:
            self._references.add(self.source.visit(slots))
            slots = self.source.own(slots)
        self._evictable.hold(slots)

    def withhold(self, slots: Sequence[int]) -> None:
        """Add a lease of the source to slots without a lease."""
        self._evictable.hold(slots)
        self._references.add_first(slots)

    def release(self, slots: Sequence[int], first: Sequence[int] = ()) -> None:
        """Remove one lease from each slot, given in prefix order.

        The tail of a prefix is evicted before its head, without which it is useless.

        Args:
            first: those of the slots, each once, that are evicted before all others, in this order.

        Raises:
            InvariantError: a slot is not leased; nothing has changed.
        """
        slots = self._references.drop(slots)
        if self.source is not None:
            self.source.leave(slots)
            slots = self.source.own(slots)
        hashes = self.directory.hashes
        if None in map(hashes.__getitem__, slots):
            self._add_empty([slot for slot in reversed(slots) if hashes[slot] is None])
            slots = [slot for slot in slots if hashes[slot] is not None]
        if first:
            first = self._unleased(first)
            slots = list(filterfalse(set(first).__contains__, slots))
        self._evictable.release(slots[::-1], self._now_s)
        if first:
            self._evictable.evict_first(first, self._now_s)

    def _add_empty(self, slots: Sequence[int]) -> None:
        self._empty += slots
        if self.quotas is not None:
            self.quotas.emptied(slots)

    def _unleased(self, slots: Sequence[int]) -> Sequence[int]:
        """Return the own slots that are filled and have no lease."""
        if self.source is not None:
            slots = self.source.own(slots)
        if None in map(self.directory.hashes.__getitem__, slots):
            slots = [slot for slot in slots if self.directory.hashes[slot] is not None]
        return list(filterfalse(self._references.leased.__contains__, slots))

    def next_evicted(self, count: int) -> list[int]:
        """Return up to `count` evictable slots, in the order of their eviction."""
        return self._evictable.peek(count)

    def least_needed(self, count: int) -> list[int]:
        """Return up to `count` empty slots and up to `count` next victims."""
        return self._empty[:count] + self._evictable.peek(count)

    def forget(self, slots: Iterable[int]) -> None:
        """Remove slots from the directory; their leases stay."""
        self._forgotten(self.directory.forget(slots))

    def forget_all(self) -> None:
        """Empty the directory and begin a new epoch; stores in flight are not published."""
        if self.source is not None:
            self.source.wake()
        self._forgotten(self.directory.forget_all())
        if self.source is not None:
            self.source.renew()

    def _forgotten(self, slots: Sequence[int]) -> None:
        self._mark(slots, 0)
        if self.source is not None:
            slots = self.source.own(slots)
            self.source.unpublish(slots)
        leased = self._references.leased
        self._evictable.forget(slots)
        self._add_empty([slot for slot in slots if slot not in leased])

    def retire(self, slots: Iterable[int]) -> list[int]:
        """Lease unreliable slots for ever (I6); return those that were not retired before."""
        usable = (slot for slot in slots if 0 <= slot < self.num_usable)
        retired = [slot for slot in dict.fromkeys(usable) if slot not in self._retired]
        self._retired.update(retired)
        if any(slot >= self.num_usable - self._num_new for slot in retired):
            self._list_new(self._num_new)
        self._empty = [slot for slot in self._empty if slot not in self._retired]
        self.lease(retired)
        if self.source is not None:
            self.source.condemn(retired)
        self._recount()
        return retired

    def mend(self, leases: Iterable[Sequence[int]]) -> None:
        """After an error, rebuild all counts from the existing leases."""
        expected = self._count(leases)
        self.directory.mend(expected)
        self._references.rebuild(expected)
        unleased = [slot for slot in self._all_own() if slot not in expected]
        held = self.directory.hashes
        self._evictable.forget(range(self.num_slots))
        filled = [slot for slot in unleased if held[slot] is not None]
        self._evictable.release(filled, self._now_s)
        self._empty = [slot for slot in reversed(unleased) if held[slot] is None]
        self._num_new = 0
        if self.source is not None:
            self.source.leave([s for s in range(self.num_slots) if s not in expected])
        self._recount()

    def mark_hit(self, slots: Iterable[int]) -> None:
        """Record that a load reads these slots."""
        self._mark(slots, 1)

    def _mark(self, slots: Iterable[int], was_hit: int) -> None:
        deque(map(self._was_hit.__setitem__, slots, repeat(was_hit)), maxlen=0)

    def unread(self, slots: Sequence[int]) -> list[int]:
        """Return the slots that no load has read since they were filled."""
        return list(filterfalse(self._was_hit.__getitem__, slots))

    def set_time(self, now_s: float) -> None:
        """Set the time, for the ages of evicted slots."""
        self._now_s = now_s

    def _count_evicted(self, slots: Sequence[int]) -> None:
        num_hit = sum(map(self._was_hit.__getitem__, slots))
        if num_hit:
            self._mark(slots, 0)
            self._counters[Count.EVICTED_BLOCKS_HIT] += num_hit
        self._counters[Count.EVICTED_BLOCKS_UNHIT] += len(slots) - num_hit
        self._counters.add_seconds(Count.EVICTED_AGE_SECONDS, self._evictable.take_age_s())
        if self.quotas is not None:
            self.quotas.count_evicted(slots, self._counters)

    def _all_own(self) -> Iterable[int]:
        return range(self.num_usable) if self.source is None else self.source.all_own()

    def __repr__(self) -> str:
        return f"<SlotPool of {self.num_slots}: {self.num_free} free, {self.num_leased} leased>"

    def _count(self, leases: Iterable[Sequence[int]]) -> Counter[int]:
        expected = Counter(slot for slots in leases for slot in slots)
        expected.update(self._retired)
        if self.source is not None:
            expected.update(iter(self.source.parked))
        return expected

    def check_invariants(self, leases: Iterable[Sequence[int]]) -> None:
        """Compare each slot's count with the existing leases (I1, I8), and check the directory."""
        expected = self._count(leases)
        self._references.check(expected)
        leased = self._references.leased
        self.directory.check_invariants(leased)
        unleased = {slot for slot in self._all_own() if slot not in leased}
        held = {slot for slot in unleased if self.directory.hashes[slot] is not None}
        empty = [*self._empty, *range(self.num_usable - self._num_new, self.num_usable)]
        if sorted(empty) != sorted(unleased - held):
            raise InvariantError("I8", "the empty slots are not exactly those that hold nothing")
        if len(self._evictable) != len(held):
            raise InvariantError("I8", "the evictable slots are not exactly the other free ones")

        if self.source is not None:
            self.source.check_invariants(leased)
        if self.quotas is not None:
            self.quotas.check_invariants(self._taken(), self._pinned)
