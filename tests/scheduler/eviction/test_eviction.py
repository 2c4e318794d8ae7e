"""Every eviction policy keeps the contract; each has an order of its own."""

import pickle

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from safe_offload.scheduler.eviction.policies import POLICIES
from safe_offload.scheduler.eviction.policy import EvictionPolicy, Lru
from safe_offload.scheduler.eviction.reuse import GHOSTS_MAX, ExpectedReuse

NUM_SLOTS = 24


@pytest.fixture(params=list(POLICIES))
def policy(request):
    return POLICIES[request.param](NUM_SLOTS)


def take_all(policy: EvictionPolicy, now_s: float = 0.0) -> list[int]:
    return policy.evict(len(policy), now_s)


# ---- what every policy promises ----------------------------------------------------------------


def test_the_tail_goes_before_the_head_that_others_use_too(policy):
    head = [3, 2, 1, 0]
    policy.release([5, 4, *head], 0.0)
    for tail in ([7, 6], [9, 8], [11, 10]):
        policy.lease(reversed(head))
        policy.release([*tail, *head], 0.0)
    evicted = take_all(policy)
    for prefix in ([5, 4, *head], [7, 6, *head], [9, 8, *head], [11, 10, *head]):
        assert [slot for slot in evicted if slot in prefix] == prefix


@pytest.mark.parametrize("name", POLICIES)
def test_hits_without_evictions_take_no_memory(name):
    """What a lease leaves behind in a queue is swept out, though nothing is ever evicted."""
    policy = POLICIES[name](100)
    policy.release(range(100), 0.0)
    sizes = []
    for index in range(2000):
        slots = [(index + offset) % 60 for offset in range(10)]
        policy.lease(slots)
        policy.release(slots, 0.0)
        sizes.append(len(pickle.dumps(policy)))
    assert max(sizes[1000:]) < 1.2 * max(sizes[500:1000])
    assert sorted(take_all(policy)) == list(range(100))


# ---- age ---------------------------------------------------------------------------------------


def test_age_counts_from_the_last_release(policy):
    policy.release([0, 1, 2], 100.0)
    policy.lease([2])
    policy.release([2], 110.0)
    policy.release([3], 110.0)
    assert policy.take_age_s() == 0.0
    assert sorted(take_all(policy, 150.0)) == [0, 1, 2, 3]
    assert policy.take_age_s() == 50.0 + 50.0 + 40.0 + 40.0
    assert policy.take_age_s() == 0.0, "it has been taken"


# ---- what is read for a spill ------------------------------------------------------------------


def test_what_is_only_read_is_evicted_as_if_nothing_had_read_it():
    policy = Lru(NUM_SLOTS)
    policy.release([0, 1], 0.0)
    policy.lease([2])  # a hit
    policy.release([2], 0.0)
    policy.hold([0])
    policy.release([0], 0.0)
    assert take_all(policy) == [1, 2, 0]


def test_what_is_to_go_first_goes_first_and_can_be_seen_before(policy):
    policy.release([0, 1, 2, 3], 0.0)
    policy.lease([2])
    policy.release([2], 0.0)
    policy.hold([3, 2])
    policy.evict_first([3, 2], 1.0)
    assert policy.peek(3) == [3, 2, 0]
    policy.release([4], 2.0)
    assert take_all(policy) == [3, 2, 0, 1, 4]
    assert policy.peek(2) == []


# ---- against a model ---------------------------------------------------------------------------


class PolicyMachine(RuleBasedStateMachine):
    """A pool of slots with lease counts; what is filled and unleased is the policy's."""

    @initialize(name=st.sampled_from(sorted(POLICIES)))
    def start(self, name: str) -> None:
        self.name = name
        self.policy = POLICIES[name](NUM_SLOTS)
        self.empty = list(range(NUM_SLOTS))
        self.leased: list[int] = []
        self.evictable: list[int] = []  # in the order in which LRU evicts

    @rule(count=st.integers(0, NUM_SLOTS))
    def fill(self, count: int) -> None:
        self.leased += self.empty[:count]
        del self.empty[:count]

    @precondition(lambda self: self.leased)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        slots = data.draw(st.lists(st.sampled_from(self.leased), unique=True))
        self.policy.release(slots, 50.0)
        self.leased = [slot for slot in self.leased if slot not in slots]
        self.evictable += slots

    @rule(slots=st.lists(st.integers(0, NUM_SLOTS - 1)))
    def lease(self, slots: list[int]) -> None:
        slots = [slot for slot in slots if slot not in self.empty]
        self.policy.lease(slots)
        self._take_out(set(slots), self.leased)

    @rule(slots=st.lists(st.integers(0, NUM_SLOTS - 1)))
    def hold(self, slots: list[int]) -> None:
        slots = [slot for slot in slots if slot not in self.empty]
        self.policy.hold(slots)
        self._take_out(set(slots), self.leased)

    @precondition(lambda self: self.evictable)
    @rule(data=st.data())
    def evict_first(self, data: st.DataObject) -> None:
        slots = data.draw(st.lists(st.sampled_from(self.evictable), unique=True))
        self.policy.hold(slots)
        self.policy.evict_first(slots, 50.0)
        self.evictable = slots + [slot for slot in self.evictable if slot not in slots]
        assert self.policy.peek(len(slots)) == slots

    @rule(count=st.integers(0, NUM_SLOTS + 1))
    def peek(self, count: int) -> None:
        slots = self.policy.peek(count)
        assert len(slots) == len(set(slots)) == min(count, len(self.evictable))
        assert set(slots) <= set(self.evictable)
        if self.name == "lru":
            assert slots == self.evictable[:count]

    @rule(slots=st.lists(st.integers(0, NUM_SLOTS - 1)))
    def forget(self, slots: list[int]) -> None:
        self.policy.forget(slots)
        self._take_out(set(slots), self.empty)

    @rule(count=st.integers(0, NUM_SLOTS + 1))
    def evict(self, count: int) -> None:
        slots = self.policy.evict(count, 50.0)
        assert len(slots) == len(set(slots)) == min(count, len(self.evictable))
        assert set(slots) <= set(self.evictable), "evicted though it was leased, empty or gone"
        if self.name == "lru":
            assert slots == self.evictable[:count]
        self._take_out(set(slots), self.leased)

    @invariant()
    def the_length_is_what_is_evictable(self) -> None:
        if hasattr(self, "policy"):
            assert len(self.policy) == len(self.evictable)

    def _take_out(self, slots: set[int], whereto: list[int]) -> None:
        whereto += sorted(slots.intersection(self.evictable))
        self.evictable = [slot for slot in self.evictable if slot not in slots]

    def teardown(self) -> None:
        if hasattr(self, "policy"):
            assert sorted(self.policy.evict(NUM_SLOTS + 1, 50.0)) == sorted(self.evictable)


TestPolicyMachine = PolicyMachine.TestCase
TestPolicyMachine.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)


# ---- the order of each -------------------------------------------------------------------------


def test_returns_keeps_what_comes_back_and_evicts_what_came_later_and_does_not():
    policy = ExpectedReuse(6)
    policy.release([3, 2, 1, 0, 4, 5], -10.0)
    for index in range(200):
        now_s = 10.0 * index
        policy.lease([0, 1, 2, 3])
        policy.release([3, 2, 1, 0], now_s)
        once = policy.evict(2, now_s + 1)
        policy.release(once, now_s + 1)
    policy.hold([4, 5])
    policy.release([4, 5], 1994.0)
    assert policy.evict(2, 1995.0) == [4, 5], "the others are older, and expected"


def learned(gap_s: float) -> ExpectedReuse:
    """A policy that has seen prompts of four slots come back after a gap, and others never."""
    policy = ExpectedReuse(NUM_SLOTS)
    for index in range(200):
        now_s = 2 * gap_s * index
        policy.release([3, 2, 1, 0], now_s)
        policy.release([7, 6, 5, 4], now_s)
        policy.lease([0, 1, 2, 3])
        policy.release([3, 2, 1, 0], now_s + gap_s)
        policy.forget([0, 1, 2, 3])
        assert policy.evict(4, now_s + 1.9 * gap_s) == [7, 6, 5, 4]
    return policy


def test_returns_evicts_first_what_is_overdue():
    policy = learned(20.0)
    policy.release([3, 2, 1, 0], 10_000.0)
    policy.release([7, 6, 5, 4], 10_110.0)
    assert policy.evict(4, 10_115.0) == [3, 2, 1, 0]


def test_returns_evicts_first_what_a_conversation_has_gone_on_without():
    policy = ExpectedReuse(NUM_SLOTS)
    for index in range(200):
        policy.release([3, 2, 1, 0], 100.0 * index)
        policy.lease([0, 1])
        policy.release([5, 4, 1, 0], 100.0 * index + 10)
        assert policy.evict(2, 100.0 * index + 20) == [3, 2]
        policy.forget(range(6))
    policy.release([9, 8, 7, 6], 30_000.0)
    policy.release([3, 2, 1, 0], 30_001.0)
    policy.lease([0, 1])
    policy.release([5, 4, 1, 0], 30_008.0)
    assert policy.evict(2, 30_009.0) == [3, 2], "not what is older, and may come back"


def test_returns_learns_of_what_comes_back_after_it_was_evicted():
    hashes: list[bytes | None] = [None] * 8
    with_ghosts, without = ExpectedReuse(8, hashes), ExpectedReuse(8)
    for policy in (with_ghosts, without):
        for index in range(200):
            hashes[:4] = b"back", b"b", b"%d" % index, b"o"
            policy.release([1, 0], 50.0 * index)  # it has come back, each time too late
            policy.evict(2, 50.0 * index + 1)
    for policy in (with_ghosts, without):
        hashes[0], hashes[2] = b"back", b"new"
        policy.release([0], 10_040.0)
        policy.release([2], 10_041.0)
    assert without.evict(1, 10_045.0) == [0]
    assert with_ghosts.evict(1, 10_045.0) == [2]


def test_returns_refuses_what_is_worth_less_than_what_would_go():
    policy = learned(10.0)
    policy.release([7, 6, 5, 4], 10_000.0)
    policy.lease([4, 5, 6, 7])
    policy.release([7, 6, 5, 4], 10_010.0)  # expected at 10,020
    assert not policy.admits(4, None, b"new", 10_015.0), "what is new seldom comes back"
    assert policy.admits(4, None, b"new", 10_500.0), "what was expected has not come"


@pytest.mark.parametrize("comes_back", [True, False])
def test_returns_learns_of_what_it_has_refused(comes_back):
    policy, admitted = ExpectedReuse(8), []
    policy.release([3, 2, 1, 0], -40.0)
    for index in range(400):
        if index % 10 == 0:
            policy.lease([0, 1, 2, 3])
            policy.release([3, 2, 1, 0], 4.0 * index)
        admitted.append(policy.admits(4, None, b"%d" % (index * (not comes_back)), 4.0 * index + 1))
    assert (sum(admitted[-10:]) > 5) == comes_back


def test_returns_takes_what_goes_on_for_what_it_goes_on_from():
    policy = ExpectedReuse(8)
    policy.release([5, 4, 1, 0], 0.0)
    for index in range(1, 200):
        policy.lease([0, 1, 4, 5])
        policy.release([3, 2], 10.0 * index)
        assert policy.evict(2, 10.0 * index) == [3, 2]
        policy.release([5, 4, 1, 0], 10.0 * index)
    policy.lease([0, 1])
    assert policy.admits(2, 1, b"more", 1_999.0)
    assert not policy.admits(2, None, b"new", 1_999.0)


def test_returns_remembers_a_bounded_number_of_what_it_has_evicted():
    hashes: list[bytes | None] = [None] * 4
    policy, sizes = ExpectedReuse(4, hashes), []
    for index in range(2 * GHOSTS_MAX + 2):
        hashes[0] = b"%08d" % index
        policy.release([0], float(index))
        policy.evict(1, index + 0.5)
        if index % GHOSTS_MAX == 1:
            sizes.append(len(pickle.dumps(policy)))
    assert sizes[0] < 0.1 * sizes[1]
    assert sizes[2] < 1.1 * sizes[1]
