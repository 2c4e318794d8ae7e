"""Host slots of several tenants: no grant takes what another tenant is guaranteed.

A grant takes empty slots first. Then tenants over quota are evicted until their excess is equal, as
far as slots can be evicted; the tenant that asks counts as if it already had the slots. If that is
not enough, it evicts slots of its own. A slot is its tenant's from the grant until it is evicted or
empty: salts keep hashes apart, so none is of use to two.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from safe_offload.config.tenants import WHOLE, Tenants, payments
from safe_offload.errors import InvariantError
from safe_offload.scheduler.cache.slots import SlotPool
from safe_offload.scheduler.eviction.policy import EvictionPolicy, Hashes

if TYPE_CHECKING:
    from safe_offload.observe.counters import Counters
    from safe_offload.scheduler.cache.directory import Directory

MakePolicy = Callable[[int, Hashes], EvictionPolicy]


def _for_each(name: str) -> Any:
    """Return the method of `EvictionPolicy` of this name, called for each tenant's slots."""

    def call(self: TenantPolicy, slots: Iterable[int], *now_s: float) -> None:
        for policy, own in self.split(list(slots)):
            getattr(policy, name)(own, *now_s)

    return call


class TenantPolicy(EvictionPolicy):
    """A policy for each tenant, and who pays. Only `TenantSlots` changes it.

    Bound: an entry for each slot, and `MAX_TENANTS` policies.

    Attributes:
        owners: by slot that is leased or holds something, its tenant.
        held, guaranteed, evicted: slots of each; those evicted since it was looked at last.
        asking, num_asked: who is granted something next, and how much is being granted.
    """

    def __init__(self, num_slots: int, hashes: Hashes, make: MakePolicy) -> None:
        super().__init__(0, hashes)
        self._make = functools.partial(make, num_slots, hashes)
        self._policies = [self._make()]
        self._order = ""
        self.owners = bytearray(num_slots)
        self.held, self.guaranteed = [0], [0]
        self.evicted: Counter[int] = Counter()
        self.asking = self.num_asked = 0

    release, lease, hold, evict_first, forget = map(
        _for_each, ("release", "lease", "hold", "evict_first", "forget")
    )

    def split(self, slots: list[int]) -> Iterator[tuple[EvictionPolicy, list[int]]]:
        """Yield each tenant's policy with its slots; a batch is of one tenant most of the time."""
        owners = self.owners
        found = set(map(owners.__getitem__, slots))
        for tenant in sorted(found):
            own = slots if len(found) == 1 else [slot for slot in slots if owners[slot] == tenant]
            yield self._policies[tenant], own

    def rename(self, numbers: Sequence[int], num_tenants: int, now_s: float) -> None:
        """`numbers` has for each tenant which it is from now on; 0 if it is none any more."""
        before, self._policies = self._policies, [self._make() for _ in range(num_tenants)]
        self._policies[0] = before[0]
        self.prefer(self._order)
        for old, new in enumerate(numbers):
            if new:
                self._policies[new] = before[old]
            elif old:
                self._policies[0].release(before[old].peek(len(before[old])), now_s)
        self.owners = self.owners.translate(bytes(numbers).ljust(256, b"\0"))
        self.asking = 0

    def prefer(self, order: str) -> None:
        """See `EvictionPolicy`; all tenants' are the same."""
        self._order = order
        for policy in self._policies:
            policy.prefer(order)

    @property
    def above(self) -> list[int]:
        """How many slots each tenant has above its guarantee, with those that it asks for."""
        above = [held - own for held, own in zip(self.held, self.guaranteed, strict=True)]
        above[self.asking] += self.num_asked
        return above

    def payments(self, count: int) -> list[int]:
        """Return how many slots each tenant gives of `count`, perhaps fewer together."""
        sizes = list(map(len, self._policies))
        given = payments(sizes, self.above, count)
        given[self.asking] += min(sizes[self.asking] - given[self.asking], count - sum(given))
        return given

    def peek(self, count: int) -> list[int]:
        """See `EvictionPolicy`; those of whom has most above its guarantee come first."""
        found: list[int] = []
        for tenant in sorted(range(len(self.held)), key=self.above.__getitem__, reverse=True):
            found += self._policies[tenant].peek(count - len(found))
        return found

    def evict(self, count: int, now_s: float) -> list[int]:
        """See `EvictionPolicy`; fewer than there are if others have no more than is guaranteed."""
        evicted: list[int] = []
        for tenant, num_given in enumerate(self.payments(count)):
            if num_given:
                evicted += self._policies[tenant].evict(num_given, now_s)
                self.held[tenant] -= num_given
                self.evicted[tenant] += num_given
        return evicted

    def take_age_s(self) -> float:
        return sum(policy.take_age_s() for policy in self._policies)

    def __len__(self) -> int:
        return sum(map(len, self._policies))


class TenantSlots(SlotPool):
    """Host slots of tenants; `by_tenant` knows who asks for what is granted next.

    Its state beside that of `SlotPool` and its policy: the tenants, which slots are pinned, and how
    many of each tenant.

    Bound: an entry for each slot, and one for each tenant.
    """

    def __init__(
        self, num_slots: int, directory: Directory, make: MakePolicy, counters: Counters
    ) -> None:
        self.by_tenant = TenantPolicy(num_slots, directory.hashes, make)
        super().__init__(num_slots, directory, self.by_tenant, counters)
        self.tenants = Tenants()
        self._pinned: set[int] = set()
        self._num_pinned = [0]

    def use(self, tenants: Tenants) -> None:
        """From now on these are the tenants; those of the same label keep their slots."""
        known = {label: number for number, label in enumerate(tenants.labels)}
        numbers = [known.get(label, 0) for label in self.tenants.labels]
        self.by_tenant.rename(numbers, len(known), self._now_s)
        self.tenants = tenants
        self._recount()

    def tenant_of(self, salt: str | None) -> int:
        """Return the number of a salt's tenant."""
        return self.tenants.number_of(salt)

    def num_grantable(self, salt: str | None) -> int:
        self.by_tenant.asking = self.tenants.number_of(salt)
        return self.num_empty + sum(self.by_tenant.payments(len(self.by_tenant)))

    def num_in_reach(self, salt: str | None) -> int:
        """See `SlotPool`; one in reach is enough for a share."""
        policy = self.by_tenant
        policy.asking = self.tenants.number_of(salt)
        has_any = self.num_empty or policy.held[policy.asking] or max(policy.above) > 0
        return self.num_usable if has_any else 0

    def num_overpinned(self, slots: Sequence[int] = ()) -> int:
        """See `SlotPool`; beyond their shares tenants may pin what is guaranteed to nobody.

        So whoever is below its guarantee can have all of it: pins of others are not in the way.
        """
        guaranteed, more = self.by_tenant.guaranteed, self._count_by_tenant(slots)
        rows = zip(self._num_pinned, more, guaranteed, strict=True)
        num_beyond = sum(max(0, held + new - own) for held, new, own in rows)
        num_free = self.num_usable - len(self._retired) - sum(guaranteed)
        return max(0, num_beyond - num_free)

    def pin(self, slots: Iterable[int]) -> None:
        for slot in slots:
            if slot not in self._pinned:
                self._pinned.add(slot)
                self._num_pinned[self.by_tenant.owners[slot]] += 1

    def unpin(self, slots: Iterable[int]) -> None:
        for slot in self._pinned.intersection(slots):
            self._pinned.discard(slot)
            self._num_pinned[self.by_tenant.owners[slot]] -= 1

    def must_unpin(self, slots: Sequence[int]) -> bool:
        """See `SlotPool`; tenants whose pins exceed their quota are unpinned."""
        owners = {self.by_tenant.owners[slot] for slot in slots}
        guaranteed = self.by_tenant.guaranteed
        return self.num_overpinned() > 0 and any(
            self._num_pinned[o] > guaranteed[o] for o in owners
        )

    def open(self, num_usable: int) -> None:
        super().open(num_usable)
        self._recount()

    def grant(self, count: int, salt: str | None = None) -> list[int]:
        """See `SlotPool`; what others are guaranteed is not free."""
        policy = self.by_tenant
        policy.asking, policy.num_asked = self.tenants.number_of(salt), count
        granted = self._take(count)
        policy.num_asked = 0
        for slot in granted:
            policy.owners[slot] = policy.asking
        policy.held[policy.asking] += len(granted)
        return granted

    def release(self, slots: Sequence[int], first: Sequence[int] = ()) -> None:
        num_empty = len(self._empty)
        super().release(slots, first)
        self._emptied(num_empty)

    def _forgotten(self, slots: Sequence[int]) -> None:
        num_empty = len(self._empty)
        super()._forgotten(slots)
        self._emptied(num_empty)

    def _emptied(self, num_before: int) -> None:
        """Empty slots beyond so many are nobody's from now on."""
        for slot in self._empty[num_before:]:
            self.by_tenant.held[self.by_tenant.owners[slot]] -= 1

    def retire(self, slots: Iterable[int]) -> list[int]:
        """See `SlotPool`; what is retired is nobody's."""
        retired = super().retire(slots)
        self._recount()
        return retired

    def mend(self, leases: Iterable[Sequence[int]]) -> None:
        super().mend(leases)
        self._recount()

    def _recount(self) -> None:
        num_slots = self.num_usable - len(self._retired)
        self.by_tenant.held = self._held()
        self._num_pinned = self._count_by_tenant(self._pinned)
        self.by_tenant.guaranteed = [s * num_slots // WHOLE for s in self.tenants.shares]

    def _held(self) -> list[int]:
        taken = set(range(self.num_usable - self._num_new)).difference(self._empty, self._retired)
        return self._count_by_tenant(taken)

    def _count_by_tenant(self, slots: Iterable[int]) -> list[int]:
        found = Counter(map(self.by_tenant.owners.__getitem__, slots))
        return [found[tenant] for tenant in range(len(self.tenants.labels))]

    def check_invariants(self, leases: Iterable[Sequence[int]]) -> None:
        """See `SlotPool`; also the books of the tenants."""
        super().check_invariants(leases)
        is_right = self._count_by_tenant(self._pinned) == self._num_pinned
        if self._held() != self.by_tenant.held or not is_right:
            raise InvariantError("I8", "the tenants do not have what was granted for them")
