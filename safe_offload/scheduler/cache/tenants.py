"""Quotas of tenants in a pool of slots: no grant takes what another tenant is guaranteed.

A grant takes empty slots first. Then it evicts from tenants over quota until their excess is equal,
as far as possible; the requesting tenant counts as if it already had the slots. If that is not
enough, it evicts slots of its own. A slot belongs to its tenant from the grant until it is evicted
or empty: salts separate the hashes, so no slot serves two tenants.
"""

from __future__ import annotations

import functools
from collections import ChainMap, Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

from safe_offload.config.tenants import WHOLE, Tenants, payments
from safe_offload.errors import InvariantError
from safe_offload.observe.counters import of_tenant
from safe_offload.scheduler.eviction.policy import EvictionPolicy, Hashes

if TYPE_CHECKING:
    from safe_offload.observe.counters import Counters

MakePolicy = Callable[[int, Hashes], EvictionPolicy]


def _for_each(name: str) -> Any:
    """Return the method of `EvictionPolicy` of this name, called for each tenant's slots."""

    def call(self: TenantPolicy, slots: Iterable[int], *now_s: float) -> None:
        for policy, own in self.split(list(slots)):
            getattr(policy, name)(own, *now_s)

    return call


class TenantPolicy(EvictionPolicy):
    """An `EvictionPolicy` for each tenant; only `TenantQuotas` changes it.

    Bound: an entry for each slot, and `MAX_TENANTS` policies.

    Attributes:
        owners: the tenant of each slot that is leased or filled.
        held, guaranteed: slots of each tenant.
        asking, num_requested: the tenant of the next grant, and the slots of the current one.
    """

    def __init__(self, num_slots: int, hashes: Hashes, make: MakePolicy) -> None:
        super().__init__(0, hashes)
        self._make = functools.partial(make, num_slots, hashes)
        self._policies = [self._make()]
        self.owners = bytearray(num_slots)
        self.held, self.guaranteed = [0], [0]
        self.asking = self.num_requested = 0

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
        """Renumber tenants: `numbers` has the new number of each; 0 for one that is removed."""
        before, self._policies = self._policies, [self._make() for _ in range(num_tenants)]
        self._policies[0] = before[0]
        for old, new in enumerate(numbers):
            if new:
                self._policies[new] = before[old]
            elif old:
                self._policies[0].release(before[old].peek(len(before[old])), now_s)
        self.owners = self.owners.translate(bytes(numbers).ljust(256, b"\0"))
        self.asking = 0

    @property
    def above(self) -> list[int]:
        """Slots of each tenant above its guarantee, including the current grant."""
        above = [held - own for held, own in zip(self.held, self.guaranteed, strict=True)]
        above[self.asking] += self.num_requested
        return above

    def payments(self, count: int) -> list[int]:
        """Return the number of slots that each tenant gives of `count`, perhaps fewer together."""
        sizes = list(map(len, self._policies))
        given = payments(sizes, self.above, count)
        given[self.asking] += min(sizes[self.asking] - given[self.asking], count - sum(given))
        return given

    def peek(self, count: int) -> list[int]:
        """Return the next victims, those of the tenant with the largest excess first."""
        found: list[int] = []
        for tenant in sorted(range(len(self.held)), key=self.above.__getitem__, reverse=True):
            found += self._policies[tenant].peek(count - len(found))
        return found

    def evict(self, count: int, now_s: float) -> list[int]:
        """Evict fewer slots than exist, if the others are within their guarantees."""
        evicted: list[int] = []
        for tenant, num_given in enumerate(self.payments(count)):
            if num_given:
                evicted += self._policies[tenant].evict(num_given, now_s)
                self.held[tenant] -= num_given
        return evicted

    def take_age_s(self) -> float:
        return sum(policy.take_age_s() for policy in self._policies)

    def __len__(self) -> int:
        return sum(map(len, self._policies))


class BlockSalts:
    """The cache salt of the last request for which each GPU block was allocated.

    Blocks of `boundary_group_ids` are stored for the request of the step that allocates them.

    Bound: an entry for each block of the GPU.
    """

    def __init__(self, boundary_group_ids: tuple[int, ...]) -> None:
        self._boundary_group_ids = boundary_group_ids
        self._salts: dict[int, str | None] = {}
        self._new_salts: dict[int, str | None] = {}

    def begin_step(self) -> None:
        """A step is planned."""
        self._new_salts = {}

    def allocated(self, block_ids: Iterable[int], salt: str | None) -> None:
        """Blocks were allocated in the step that is planned."""
        self._new_salts.update(dict.fromkeys(block_ids, salt))

    def end_step(self) -> None:
        """The step is planned."""
        self._salts.update(self._new_salts)

    def runs(self, group_idx: int, block_ids: Sequence[int]) -> list[tuple[range, str | None]]:
        """Return runs of blocks with the same salt, as indices, with that salt."""
        salts: Mapping[int, str | None] = self._salts
        if group_idx in self._boundary_group_ids:
            salts = ChainMap(self._new_salts, self._salts)
        runs, start = [], 0
        for salt, run in groupby(map(salts.get, block_ids)):
            end = start + len(list(run))
            runs.append((range(start, end), salt))
            start = end
        return runs


class TenantQuotas:
    """The tenants of a `SlotPool`: the slots, the guarantee and the pins of each.

    Bound: an entry for each slot, and one for each tenant.
    """

    def __init__(
        self,
        num_slots: int,
        hashes: Hashes,
        make: MakePolicy,
        boundary_group_ids: tuple[int, ...] = (),
    ) -> None:
        self.policy = TenantPolicy(num_slots, hashes, make)
        # What follows is mutable, and changed here only.
        self.tenants = Tenants()
        self.salts = BlockSalts(boundary_group_ids)  # for whom the blocks of the GPU were allocated
        self._num_slots = 0  # usable and not retired
        self._num_pinned = [0]

    def use(self, tenants: Tenants, now_s: float) -> None:
        """See `SlotPool.use_tenants`; `recount` follows."""
        known = {label: number for number, label in enumerate(tenants.labels)}
        numbers = [known.get(label, 0) for label in self.tenants.labels]
        self.policy.rename(numbers, len(known), now_s)
        self.tenants = tenants

    def are_of_one(self, salts: Iterable[str | None]) -> bool:
        """Return whether all of these salts are of one tenant."""
        return len({self.tenants.number_of(salt) for salt in salts}) == 1

    def marks_of(self, slots: Iterable[int]) -> list[int]:
        """Return the marks of the slots' tenants, which objects of theirs carry in a tier."""
        owners, marks = self.policy.owners, self.tenants.marks
        return [marks[owners[slot]] for slot in slots]

    # ---- grants --------------------------------------------------------------------------------

    def num_grantable(self, num_empty: int, salt: str | None) -> int:
        """See `SlotPool`; what others are guaranteed is not free."""
        self.policy.asking = self.tenants.number_of(salt)
        return num_empty + sum(self.policy.payments(len(self.policy)))

    def has_in_reach(self, salt: str | None) -> bool:
        """Whether a tenant could be granted a slot that is not empty if none was leased."""
        policy = self.policy
        policy.asking = self.tenants.number_of(salt)
        return policy.held[policy.asking] > 0 or max(policy.above) > 0

    def ask(self, count: int, salt: str | None) -> None:
        """Begin a grant of `count` slots for the tenant of a salt; `granted` ends it."""
        self.policy.asking, self.policy.num_requested = self.tenants.number_of(salt), count

    def granted(self, slots: Sequence[int]) -> None:
        """Assign granted slots to the tenant."""
        policy = self.policy
        policy.num_requested = 0
        for slot in slots:
            policy.owners[slot] = policy.asking
        policy.held[policy.asking] += len(slots)

    def emptied(self, slots: Iterable[int]) -> None:
        """Take slots from their tenants: they are empty."""
        for slot in slots:
            self.policy.held[self.policy.owners[slot]] -= 1

    def count_evicted(self, slots: Iterable[int], counters: Counters) -> None:
        """Count what each tenant loses; the slots are still theirs."""
        owners, labels = self.policy.owners, self.tenants.labels
        for tenant, count in Counter(map(owners.__getitem__, slots)).items():
            counters[of_tenant("evicted_blocks", labels[tenant])] += count

    def recount(self, taken: Iterable[int], pinned: Iterable[int], num_slots: int) -> None:
        """Recompute slots, pins and guarantees of each tenant, from `num_slots` in total."""
        self._num_slots = num_slots
        self.policy.held = self._count_by_tenant(taken)
        self._num_pinned = self._count_by_tenant(pinned)
        self.policy.guaranteed = [s * num_slots // WHOLE for s in self.tenants.shares]

    # ---- pins ----------------------------------------------------------------------------------

    def num_overpinned(self, slots: Sequence[int] = ()) -> int:
        """Return the number of slots by which pins exceed the quotas, or would with these slots.

        Beyond their guarantees, tenants may pin unguaranteed slots, so pins of others never keep a
        tenant from its guarantee.
        """
        guaranteed, more = self.policy.guaranteed, self._count_by_tenant(slots)
        rows = zip(self._num_pinned, more, guaranteed, strict=True)
        num_beyond = sum(max(0, held + new - own) for held, new, own in rows)
        return max(0, num_beyond - (self._num_slots - sum(guaranteed)))

    def pin(self, slots: Iterable[int]) -> None:
        """See `SlotPool`; of slots that are not pinned."""
        for slot in slots:
            self._num_pinned[self.policy.owners[slot]] += 1

    def unpin(self, slots: Iterable[int]) -> None:
        """See `SlotPool`; of slots that are pinned."""
        for slot in slots:
            self._num_pinned[self.policy.owners[slot]] -= 1

    def must_unpin(self, slots: Sequence[int]) -> bool:
        """Return whether these pins, of tenants over quota, deny others their guarantees."""
        owners = {self.policy.owners[slot] for slot in slots}
        guaranteed = self.policy.guaranteed
        return self.num_overpinned() > 0 and any(
            self._num_pinned[o] > guaranteed[o] for o in owners
        )

    def _count_by_tenant(self, slots: Iterable[int]) -> list[int]:
        found = Counter(map(self.policy.owners.__getitem__, slots))
        return [found[tenant] for tenant in range(len(self.tenants.labels))]

    def check_invariants(self, taken: Iterable[int], pinned: Iterable[int]) -> None:
        """Raise an InvariantError unless the tenants have what was granted for them."""
        is_right = self._count_by_tenant(pinned) == self._num_pinned
        if self._count_by_tenant(taken) != self.policy.held or not is_right:
            raise InvariantError("I8", "the tenants do not have what was granted for them")
