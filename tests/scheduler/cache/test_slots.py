"""Host slots: who gets them, and that no call half happens."""

import itertools
from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from safe_offload.errors import InvariantError
from safe_offload.observe.counters import Count, Counters
from safe_offload.scheduler.cache.directory import Directory, Key, SplitTable
from safe_offload.scheduler.cache.slots import SlotPool
from safe_offload.scheduler.eviction.policies import POLICIES
from safe_offload.scheduler.eviction.policy import Lru


def pool_of(
    num_slots: int, num_groups: int = 1, policy: str = "lru", num_usable: int | None = None
) -> SlotPool:
    directory = Directory(num_slots, num_groups)
    pool = SlotPool(num_slots, directory, POLICIES[policy](num_slots, directory.hashes), Counters())
    pool.open(num_slots if num_usable is None else num_usable)
    return pool


def held_by(pool: SlotPool) -> list[int]:
    return [slot for slot, held in enumerate(pool.directory.hashes) if held is not None]


def hashes_of(*names: str) -> list[bytes]:
    return [name.encode() for name in names]


def fill(pool: SlotPool, *names: str) -> list[int]:
    """Slots that hold these and are still leased."""
    slots = pool.grant(len(names))
    pool.directory.begin_store(slots, 0, hashes_of(*names), {})
    pool.directory.publish(slots)
    return slots


# ---- grants ------------------------------------------------------------------------------------


# ---- leases ------------------------------------------------------------------------------------


@pytest.mark.parametrize("slots", [[2], [0, 2], [2, 0]])
def test_a_release_of_what_is_not_leased_is_an_error_and_changes_nothing(slots):
    pool = pool_of(3)
    pool.lease(pool.grant(2))
    with pytest.raises(InvariantError, match=r"I8.*\[2\] released more often than leased"):
        pool.release(slots)
    pool.check_invariants([[0, 1], [0, 1]])


# ---- bad memory, and errors --------------------------------------------------------------------


class FailingAfter(dict[bytes, int]):
    """A table in which the next update ends in an error when it has taken some of its items."""

    def __init__(self, num_items: int) -> None:
        super().__init__()
        self.num_items = num_items

    def update(self, items: object, /) -> None:  # type: ignore[override]
        super().update(itertools.islice(items, self.num_items))  # type: ignore[call-overload]
        raise MemoryError


@pytest.mark.parametrize("num_items", [0, 1, 2])
def test_a_store_that_was_interrupted_when_it_began_leaves_nothing_when_mended(num_items):
    pool = pool_of(6)
    pool.directory.tables = (FailingAfter(num_items),)
    slots = pool.grant(2)
    with pytest.raises(MemoryError):
        pool.directory.begin_store(slots, 0, hashes_of("a", "b"), {})
    pool.mend([])
    pool.check_invariants([])
    assert pool.num_free == 6
    assert not pool.directory.tables[0]


@pytest.mark.parametrize(
    ("spoil", "leases", "invariant_id"),
    [
        (lambda pool, policy: None, [[0]], "I8"),
        (lambda pool, policy: None, [[0, 1], [1]], "I8"),
        (lambda pool, policy: pool.directory.begin_store([2], 0, [b"c"], {}), [[0, 1]], "I5"),
        (lambda pool, policy: fill_unleased(pool, 2), [[0, 1]], "I8.*empty"),
        (lambda pool, policy: policy.release([1], 0.0), [[0, 1]], "I8.*evictable"),
        (lambda pool, policy: pool.directory.tables[0].update(c=0), [[0, 1]], "I6"),
    ],
)
def test_a_spoilt_pool_is_seen(spoil, leases, invariant_id):
    policy = Lru(4)
    pool = SlotPool(4, Directory(4, 1), policy, Counters())
    pool.open(4)
    fill(pool, "a", "b")
    pool.check_invariants([[0, 1]])
    spoil(pool, policy)
    with pytest.raises(InvariantError, match=invariant_id):
        pool.check_invariants(leases)


def fill_unleased(pool: SlotPool, slot: int) -> None:
    pool.directory.begin_store([slot], 0, [b"c"], {})
    pool.directory.publish([slot])


def test_what_is_evicted_is_counted_by_whether_it_was_ever_loaded_and_by_age():
    counters = Counters()
    pool = SlotPool(3, Directory(3, 1), Lru(3), counters)
    pool.open(3)
    pool.set_time(10.0)
    slots = fill(pool, "a", "b", "c")
    pool.mark_hit(slots[1:])
    pool.release(slots)
    pool.forget(slots[2:])
    pool.set_time(17.0)
    assert len(pool.grant(3)) == 3
    assert counters[Count.EVICTED_BLOCKS_HIT] == 1
    assert counters[Count.EVICTED_BLOCKS_UNHIT] == 1
    assert counters[Count.EVICTED_AGE_SECONDS] == 2 * 7


# ---- against a model ---------------------------------------------------------------------------

NUM_SLOTS, NUM_GROUPS = 9, 2
KEYS = [Key(group_idx, bytes([n])) for group_idx in range(NUM_GROUPS) for n in range(8)]


class SlotMachine(RuleBasedStateMachine):
    """A pool beside what is known of each slot: who leases it, under which keys it is found."""

    @initialize(policy=st.sampled_from(list(POLICIES)), is_split=st.booleans())
    def start(self, policy: str, is_split: bool) -> None:
        self.pool = pool_of(NUM_SLOTS, NUM_GROUPS, policy, num_usable=0)
        if is_split:
            self.pool.directory.tables = tuple(SplitTable() for _ in range(NUM_GROUPS))
        self.num_usable = 0
        self.leases: list[list[int]] = []
        self.retired: set[int] = set()
        self.keys: dict[int, list[Key]] = {}  # its own key first
        self.storing: set[int] = set()
        self.granted: list[list[int]] = []  # leases that nothing was stored in yet

    def leased(self) -> set[int]:
        return {slot for lease in self.leases for slot in lease} | self.retired

    def taken(self) -> set[Key]:
        return {key for keys in self.keys.values() for key in keys}

    def drop(self, slots: Sequence[int]) -> None:
        for slot in slots:
            self.keys.pop(slot, None)
            self.storing.discard(slot)

    @rule(count=st.integers(0, NUM_SLOTS + 2))
    def open(self, count: int) -> None:
        self.pool.open(count)
        self.num_usable = max(self.num_usable, min(count, NUM_SLOTS))

    @rule(count=st.integers(-1, 5))
    def grant(self, count: int) -> None:
        free = set(range(self.num_usable)) - self.leased()
        empty = free - self.keys.keys()
        slots = self.pool.grant(count)
        assert len(slots) == len(set(slots)) == max(0, min(count, len(free)))
        assert set(slots) <= free
        assert set(slots[: len(empty)]) <= empty, "evicted although others were empty"
        self.drop(slots)
        if slots:
            self.leases.append(slots)
            self.granted.append(slots)

    @precondition(lambda self: self.granted)
    @rule(data=st.data(), group_idx=st.integers(0, NUM_GROUPS - 1), num_more=st.integers(0, 2))
    def begin_store(self, data: st.DataObject, group_idx: int, num_more: int) -> None:
        slots = self.granted.pop()
        free = [k for k in KEYS if k.group_idx == group_idx and k not in self.taken()]
        slots = slots[: len(free)]
        if not slots:
            return
        own = data.draw(st.permutations(free))[: len(slots)]
        more = data.draw(st.lists(st.sampled_from(KEYS), max_size=num_more, unique=True))
        more_keys = {own[0].block_hash: more} if more else {}
        self.pool.directory.begin_store(
            slots, group_idx, [key.block_hash for key in own], more_keys
        )
        for slot, key in zip(slots, own, strict=True):
            self.keys[slot] = [key]
        self.keys[slots[0]] += [key for key in more if key not in self.taken()]
        self.storing.update(slots)

    @precondition(lambda self: self.storing)
    @rule(data=st.data())
    def publish(self, data: st.DataObject) -> None:
        slots = data.draw(st.lists(st.sampled_from(sorted(self.storing)), unique=True))
        self.pool.directory.publish(slots)
        self.storing.difference_update(slots)

    @rule(data=st.data())
    def lease(self, data: st.DataObject) -> None:
        found = sorted(self.keys.keys() - self.storing)
        if found:
            slots = data.draw(st.lists(st.sampled_from(found), min_size=1, unique=True))
            self.pool.lease(slots)
            self.leases.append(slots)

    @rule(data=st.data())
    def hold(self, data: st.DataObject) -> None:
        held = held_by(self.pool)
        if held:
            slots = data.draw(st.lists(st.sampled_from(held), unique=True))
            self.pool.hold(slots)
            self.leases.append(slots)

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        chosen = data.draw(st.lists(st.sampled_from(range(len(self.leases))), unique=True))
        slots = [slot for index in chosen for slot in self.leases[index]]
        left = [lease for index, lease in enumerate(self.leases) if index not in chosen]
        if self.storing & (set(slots) - {s for lease in left for s in lease} - self.retired):
            return  # a store keeps its lease until it has settled
        first = data.draw(st.lists(st.sampled_from(slots or [0]), unique=True)) if slots else []
        self.pool.release(slots, first)
        free = {*held_by(self.pool)} - {slot for lease in left for slot in lease} - self.retired
        gone_first = [slot for slot in first if slot in free]
        assert self.pool.next_evicted(len(gone_first)) == gone_first
        self.leases = left
        self.granted = [lease for lease in self.granted if lease in left]

    @rule(slots=st.lists(st.integers(0, NUM_SLOTS - 1)))
    def forget(self, slots: list[int]) -> None:
        self.pool.forget(dict.fromkeys(slots))
        self.drop(slots)

    @rule()
    def forget_all(self) -> None:
        self.pool.forget_all()
        self.drop(list(self.keys))

    @rule(slots=st.lists(st.integers(0, NUM_SLOTS), max_size=2))
    def retire(self, slots: list[int]) -> None:
        new = {slot for slot in slots if slot < self.num_usable} - self.retired
        assert set(self.pool.retire(slots)) == new
        self.retired |= new

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def mend(self, data: st.DataObject) -> None:
        chosen = data.draw(st.lists(st.sampled_from(range(len(self.leases))), unique=True))
        self.leases = [self.leases[index] for index in sorted(chosen)]
        self.granted = [lease for lease in self.granted if lease in self.leases]
        self.pool.mend(self.leases)
        self.drop([slot for slot in self.storing if slot not in self.leased()])
        self.keys = {slot: keys[:1] for slot, keys in self.keys.items()}

    @invariant()
    def the_books_are_right(self) -> None:
        if not hasattr(self, "pool"):
            return
        pool = self.pool
        pool.check_invariants(self.leases)
        num_leases = Counter(slot for lease in self.leases for slot in lease)
        num_taken = len(num_leases.keys() | self.retired)
        assert pool.num_free == self.num_usable - num_taken
        assert pool.num_leased == num_taken - len(self.retired)
        slot_of = {key: slot for slot, keys in self.keys.items() for key in keys}
        for key in KEYS:
            slot = slot_of.get(key)
            assert pool.directory.tables[key.group_idx].get(key.block_hash) == slot
            assert pool.directory.find(*key) == (None if slot in self.storing else slot)
        found = self.keys.keys() - self.storing
        assert pool.directory.kept() == {slot: self.keys[slot][0] for slot in found}


TestSlotMachine = SlotMachine.TestCase
TestSlotMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
