"""Host slots: who gets them, what they hold, and that no call half happens."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from safe_offload.errors import InvariantError
from safe_offload.scheduler.slots import NO_SLOT, Key, SlotPool, needed


def pool_of(num_slots: int, num_groups: int = 1, policy: str = "lru") -> SlotPool:
    pool = SlotPool(num_slots, num_groups, policy)
    pool.open(num_slots)
    return pool


def hashes_of(*names: str) -> list[bytes]:
    return [name.encode() for name in names]


def fill(pool: SlotPool, *names: str) -> list[int]:
    """Slots that hold these and are still leased."""
    slots = pool.grant(len(names))
    pool.begin_store(slots, 0, hashes_of(*names), {})
    pool.publish(slots)
    return slots


# ---- grants ------------------------------------------------------------------------------------


def test_empty_slots_are_granted_from_the_first_on() -> None:
    pool = pool_of(6)
    assert [pool.grant(2), pool.grant(3), pool.grant(1)] == [[0, 1], [2, 3, 4], [5]]


def test_no_slot_is_granted_before_the_ranks_have_said_how_many_they_have() -> None:
    pool = SlotPool(6, 1, "lru")
    assert pool.grant(1) == []
    pool.check_invariants([])


def test_a_grant_of_nothing_changes_nothing() -> None:
    pool = pool_of(3)
    assert pool.grant(0) == pool.grant(-1) == []
    assert pool.num_free == 3


def test_full_is_a_smaller_grant_or_none() -> None:
    pool = pool_of(3)
    leases = [pool.grant(2), pool.grant(2), pool.grant(1)]
    assert leases == [[0, 1], [2], []]
    pool.check_invariants(leases)


@given(markers=st.lists(st.sampled_from([NO_SLOT, 3, 4]), max_size=8))
def test_what_is_needed_has_a_marker_that_is_not_null(markers: list[int]) -> None:
    items = list(range(len(markers)))
    expected = [item for item in items if markers[item] != NO_SLOT]
    assert needed(items, markers, NO_SLOT) == expected


def test_what_is_filled_is_evicted_only_when_nothing_is_empty() -> None:
    pool = pool_of(5)
    pool.release(fill(pool, "a", "b", "c"))
    version = pool.version
    assert pool.grant(2) == [3, 4]
    assert pool.version == version, "nothing that was found has gone"
    assert pool.grant(1) == [2], "the tail of the prefix goes before its head"
    assert pool.version > version
    assert pool.find_run(0, hashes_of("a", "b", "c")) == [0, 1]


def test_one_grant_takes_what_is_empty_and_evicts_the_rest() -> None:
    pool = pool_of(4)
    pool.release(fill(pool, "a", "b"))
    assert pool.grant(9) == [2, 3, 1, 0]
    assert pool.find(0, b"a") is None
    assert pool.kept() == {}


def test_a_leased_slot_is_not_evicted() -> None:
    pool = pool_of(3)
    slots = fill(pool, "a", "b", "c")
    pool.release(slots)
    pool.lease([1])
    assert pool.grant(3) == [2, 0]
    assert pool.find(0, b"b") == 1


@pytest.mark.parametrize("policy", ["lru", "slru"])
def test_opening_more_keeps_the_order_and_what_is_leased(policy: str) -> None:
    pool = SlotPool(8, 1, policy)
    pool.open(3)
    leased = pool.grant(1)
    pool.open(5)
    pool.open(2)  # a rank that says less than before takes nothing away
    assert pool.num_usable == 5
    pool.open(20)
    assert pool.num_usable == 8
    assert pool.grant(20) == [1, 2, 3, 4, 5, 6, 7]
    pool.check_invariants([leased, range(1, 8)])


# ---- leases ------------------------------------------------------------------------------------


def test_a_slot_is_free_when_the_last_of_its_leases_is_released() -> None:
    pool = pool_of(3)
    slots = fill(pool, "a", "b")
    pool.lease([0])
    pool.lease([1, 0])
    pool.check_invariants([slots, [0], [1, 0]])
    pool.release(slots)
    assert pool.num_leased == 2
    pool.release([0])
    assert pool.num_leased == 2
    pool.release([1, 0])
    assert pool.num_leased == 0
    pool.check_invariants([])


def test_a_slot_may_be_in_one_release_as_often_as_it_is_leased() -> None:
    pool = pool_of(3)
    pool.release(fill(pool, "a", "b", "c"))
    pool.lease([0, 1])
    pool.lease([0])
    pool.lease([0])
    pool.release([0, 1, 0])
    pool.check_invariants([[0]])
    pool.lease([0])
    pool.release([0, 0])
    pool.check_invariants([])


@pytest.mark.parametrize("slots", [[2], [0, 2], [2, 0]])
def test_a_release_of_what_is_not_leased_is_an_error_and_changes_nothing(slots: list[int]) -> None:
    pool = pool_of(3)
    pool.lease(pool.grant(2))
    with pytest.raises(InvariantError, match=r"I8.*\[2\] released more often than leased"):
        pool.release(slots)
    pool.check_invariants([[0, 1], [0, 1]])


def test_what_holds_nothing_is_empty_again_when_it_is_released() -> None:
    pool = pool_of(4)
    filled = fill(pool, "a")
    unfilled = pool.grant(2)
    pool.release(filled + unfilled)
    pool.check_invariants([])
    assert pool.grant(3) == [1, 2, 3], "in the order of the prefix, and before what is filled"


# ---- what they hold ----------------------------------------------------------------------------


def test_what_is_being_stored_is_neither_found_nor_given_away() -> None:
    pool = pool_of(3)
    pool.release(fill(pool, "a"))
    slots = pool.grant(2)
    pool.begin_store(slots, 0, hashes_of("b", "c"), {})
    assert pool.find(0, b"b") is None
    assert pool.find_run(0, hashes_of("a", "b", "c")) == [0]
    assert pool.filled([0, *slots]) == [0]
    assert pool.kept() == {0: Key(0, b"a")}
    assert b"b" in pool.tables[0], "nobody need store it twice"
    assert pool.grant(3) == [0]
    pool.check_invariants([slots, [0]])


def test_what_is_published_is_found_and_changes_the_version() -> None:
    pool = pool_of(3)
    slots = pool.grant(3)
    pool.begin_store(slots, 0, hashes_of("a", "b", "c"), {})
    version = pool.version
    pool.publish(slots[:2])
    assert pool.version > version
    assert pool.find_run(0, hashes_of("a", "b", "c")) == slots[:2]
    assert pool.filled(slots) == slots[:2]
    assert pool.find(0, b"a") == slots[0]


def test_a_run_ends_at_the_first_that_is_missing() -> None:
    pool = pool_of(4)
    fill(pool, "a", "b", "d")
    assert pool.find_run(0, hashes_of("a", "b", "c", "d")) == [0, 1]
    assert pool.find_run(0, hashes_of("c", "d")) == []
    assert pool.find_run(0, []) == []


def test_what_is_forgotten_while_it_is_leased_stays_leased() -> None:
    pool = pool_of(3)
    slots = fill(pool, "a", "b")
    version, num_forgets = pool.version, pool.num_forgets
    pool.forget([0, 2])
    assert pool.version > version
    assert pool.num_forgets > num_forgets
    assert pool.find(0, b"a") is None
    assert pool.find(0, b"b") == 1
    pool.check_invariants([slots])
    pool.release(slots)
    pool.check_invariants([])
    assert pool.grant(2) == [0, 2], "one that holds nothing is empty"


def test_what_is_forgotten_while_it_is_stored_is_not_found_when_it_is_published() -> None:
    pool = pool_of(2)
    slots = pool.grant(1)
    pool.begin_store(slots, 0, hashes_of("a"), {})
    pool.forget(slots)
    pool.publish(slots)
    assert pool.find(0, b"a") is None
    pool.release(slots)
    pool.check_invariants([])


def test_the_same_can_be_stored_again_when_it_was_forgotten_on_the_way() -> None:
    pool = pool_of(2)
    first = pool.grant(1)
    pool.begin_store(first, 0, hashes_of("a"), {})
    pool.forget_all()
    second = fill(pool, "a")
    pool.publish(first)
    pool.release(first)
    assert pool.find(0, b"a") == second[0]
    pool.check_invariants([second])


def test_forgetting_all_leaves_nothing_to_find() -> None:
    pool = pool_of(6, num_groups=2)
    leased = fill(pool, "a", "b")
    pool.release(leased[1:])
    storing = pool.grant(2)
    pool.begin_store(storing, 1, hashes_of("a", "b"), {})
    pool.forget_all()
    assert pool.kept() == {}
    assert not any(pool.tables)
    pool.check_invariants([leased[:1], storing])


def test_groups_do_not_see_each_other() -> None:
    pool = pool_of(4, num_groups=2)
    slots = pool.grant(2)
    pool.begin_store(slots, 1, hashes_of("a", "b"), {})
    pool.publish(slots)
    assert pool.find(0, b"a") is None
    assert pool.find(1, b"a") == 0
    assert pool.kept() == {0: Key(1, b"a"), 1: Key(1, b"b")}


# ---- blocks that are known under several keys --------------------------------------------------


def test_a_block_is_found_under_each_of_its_keys_and_forgotten_under_all() -> None:
    pool = pool_of(4, num_groups=2)
    slots = pool.grant(1)
    more = [Key(0, b"a2"), Key(1, b"a3")]
    pool.begin_store(slots, 0, hashes_of("a"), {b"a": more})
    assert pool.find(0, b"a2") is None
    pool.publish(slots)
    assert [pool.find(0, b"a"), pool.find(0, b"a2"), pool.find(1, b"a3")] == [0, 0, 0]
    pool.check_invariants([slots])
    pool.release(slots)
    assert pool.grant(4) == [1, 2, 3, 0]
    assert not any(pool.tables)


def test_a_key_that_another_slot_has_stays_with_it() -> None:
    pool = pool_of(4)
    first = fill(pool, "b")
    slots = pool.grant(2)
    more = {b"a": [Key(0, b"b"), Key(0, b"c"), Key(0, b"d")]}
    pool.begin_store(slots, 0, hashes_of("a", "c"), more)
    pool.publish(slots)
    assert [pool.find(0, h) for h in hashes_of("b", "c", "d")] == [first[0], slots[1], slots[0]]
    pool.forget(slots[:1])
    assert [pool.find(0, h) for h in hashes_of("b", "c", "d")] == [first[0], slots[1], None]
    pool.check_invariants([first, slots])


# ---- bad memory, and errors --------------------------------------------------------------------


def test_a_retired_slot_is_never_granted_again() -> None:
    pool = pool_of(6)
    leased, evictable = fill(pool, "a"), fill(pool, "b")
    pool.release(evictable)
    assert pool.retire([0, 1, 2, 2, 99, -1]) == [0, 1, 2]
    assert pool.retire([0, 5]) == [5]
    assert pool.num_retired == 4
    assert pool.find(0, b"b") == 1, "until somebody forgets it"
    pool.forget([0, 1, 2])
    pool.check_invariants([leased])
    pool.release(leased)
    assert pool.grant(6) == [3, 4]
    pool.check_invariants([[3, 4]])


def test_mending_gives_each_slot_the_leases_that_exist_and_forgets_what_nobody_stores() -> None:
    pool = pool_of(6)
    kept, gone = fill(pool, "a"), fill(pool, "b")
    storing, lost = pool.grant(1), pool.grant(1)
    pool.begin_store(storing, 0, hashes_of("c"), {b"c": [Key(0, b"c2")]})
    pool.begin_store(lost, 0, hashes_of("d"), {})
    pool.retire([5])
    pool.lease(kept)
    pool.mend([kept, kept, storing])
    pool.check_invariants([kept, kept, storing])
    assert pool.kept() == {kept[0]: Key(0, b"a"), gone[0]: Key(0, b"b")}
    assert pool.tables[0].keys() == {b"a", b"b", b"c"}
    pool.publish(storing)
    assert pool.find(0, b"c") == storing[0]
    assert sorted(pool.grant(6)) == sorted([*gone, *lost, 4])


class FailingAfter(dict[bytes, int]):
    """A table in which the next update ends in an error when it has taken some of its items."""

    def __init__(self, num_items: int) -> None:
        super().__init__()
        self.num_items = num_items

    def update(self, items: object, /) -> None:  # type: ignore[override]
        super().update(itertools.islice(items, self.num_items))  # type: ignore[call-overload]
        raise MemoryError


@pytest.mark.parametrize("num_items", [0, 1, 2])
def test_a_store_that_was_interrupted_when_it_began_leaves_nothing_when_mended(
    num_items: int,
) -> None:
    pool = SlotPool(6, 1, "lru")
    pool.tables = (FailingAfter(num_items),)
    pool.open(6)
    slots = pool.grant(2)
    with pytest.raises(MemoryError):
        pool.begin_store(slots, 0, hashes_of("a", "b"), {})
    pool.mend([])
    pool.check_invariants([])
    assert pool.num_free == 6
    assert not pool.tables[0]


def test_a_grant_whose_taker_was_lost_is_free_when_mended() -> None:
    pool = pool_of(4)
    pool.release(fill(pool, "a", "b", "c", "d"))
    pool.grant(3)
    pool.mend([])
    pool.check_invariants([])
    assert pool.find(0, b"a") == 0
    assert pool.num_free == 4


@pytest.mark.parametrize(
    ("spoil", "leases", "invariant_id"),
    [
        (lambda pool: None, [[0]], "I8"),
        (lambda pool: None, [[0, 1], [1]], "I8"),
        (lambda pool: pool._empty.append(0), [[0, 1]], "I8"),
        (lambda pool: pool._filled.release([1]), [[0, 1]], "I8"),
        (lambda pool: pool._being_stored.add(3), [[0, 1]], "I5"),
        (lambda pool: pool.tables[0].update(c=0), [[0, 1]], "I6"),
        (lambda pool: pool.tables[0].update(a=1, b=0), [[0, 1]], "I6"),
    ],
)
def test_a_spoilt_pool_is_seen(
    spoil: Callable[[SlotPool], object], leases: list[list[int]], invariant_id: str
) -> None:
    pool = pool_of(4)
    fill(pool, "a", "b")
    pool.check_invariants([[0, 1]])
    spoil(pool)
    with pytest.raises(InvariantError, match=invariant_id):
        pool.check_invariants(leases)


# ---- against a model ---------------------------------------------------------------------------

NUM_SLOTS, NUM_GROUPS = 9, 2
KEYS = [Key(group_idx, bytes([n])) for group_idx in range(NUM_GROUPS) for n in range(8)]


class SlotMachine(RuleBasedStateMachine):
    """A pool beside what is known of each slot: who leases it, under which keys it is found."""

    @initialize(policy=st.sampled_from(["lru", "slru"]))
    def start(self, policy: str) -> None:
        self.pool = SlotPool(NUM_SLOTS, NUM_GROUPS, policy)
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

    @rule(count=st.integers(0, 5))
    def grant(self, count: int) -> None:
        free = set(range(self.num_usable)) - self.leased()
        empty = free - self.keys.keys()
        slots = self.pool.grant(count)
        assert len(slots) == len(set(slots)) == min(count, len(free))
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
        self.pool.begin_store(slots, group_idx, [key.block_hash for key in own], more_keys)
        for slot, key in zip(slots, own, strict=True):
            self.keys[slot] = [key]
        self.keys[slots[0]] += [key for key in more if key not in self.taken()]
        self.storing.update(slots)

    @precondition(lambda self: self.storing)
    @rule(data=st.data())
    def publish(self, data: st.DataObject) -> None:
        slots = data.draw(st.lists(st.sampled_from(sorted(self.storing)), unique=True))
        self.pool.publish(slots)
        self.storing.difference_update(slots)

    @rule(data=st.data())
    def lease(self, data: st.DataObject) -> None:
        found = sorted(self.keys.keys() - self.storing)
        if found:
            slots = data.draw(st.lists(st.sampled_from(found), min_size=1, unique=True))
            self.pool.lease(slots)
            self.leases.append(slots)

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        chosen = data.draw(st.lists(st.sampled_from(range(len(self.leases))), unique=True))
        slots = [slot for index in chosen for slot in self.leases[index]]
        left = [lease for index, lease in enumerate(self.leases) if index not in chosen]
        if self.storing & (set(slots) - {s for lease in left for s in lease} - self.retired):
            return  # a store keeps its lease until it has settled
        self.pool.release(slots)
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
        assert pool.num_free == self.num_usable - len(num_leases.keys() | self.retired)
        assert pool.num_leased == len(num_leases.keys() | self.retired) - len(self.retired)
        slot_of = {key: slot for slot, keys in self.keys.items() for key in keys}
        for key in KEYS:
            slot = slot_of.get(key)
            assert pool.tables[key.group_idx].get(key.block_hash) == slot
            assert pool.find(*key) == (None if slot in self.storing else slot)
        found = self.keys.keys() - self.storing
        assert pool.kept() == {slot: self.keys[slot][0] for slot in found}


TestSlotMachine = SlotMachine.TestCase
TestSlotMachine.settings = settings(max_examples=120, stateful_step_count=40, deadline=None)
