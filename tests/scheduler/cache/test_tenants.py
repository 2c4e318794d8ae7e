"""Slots of tenants: who pays for a grant, and that no guarantee is touched."""

import itertools
import json
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from safe_offload.config.tenants import Tenants, parse
from safe_offload.observe.counters import Counters
from safe_offload.scheduler.cache.directory import Directory
from safe_offload.scheduler.cache.slots import SlotPool
from safe_offload.scheduler.cache.tenants import TenantQuotas
from safe_offload.scheduler.eviction.policies import POLICIES

NUMBERS = itertools.count()


def tenants_of(default: int = 0, **shares: int) -> Tenants:
    """Each label is the prefix of its salts too."""
    guaranteed = {label: {"share": f"{n}%", "prefix": label} for label, n in shares.items()}
    return parse(json.dumps({"default": f"{default}%", "guaranteed": guaranteed}).encode())


def pool_of(num_slots: int, tenants: Tenants, policy: str = "lru") -> SlotPool:
    directory = Directory(num_slots, 1)
    quotas = TenantQuotas(num_slots, directory.hashes, POLICIES[policy])
    pool = SlotPool(num_slots, directory, quotas.policy, Counters(), quotas=quotas)
    pool.open(num_slots)
    pool.use_tenants(tenants)
    return pool


def take(pool: SlotPool, salt: str, count: int) -> list[int]:
    """Fill slots for a salt; they are leased still."""
    slots = pool.grant(count, salt)
    pool.directory.begin_store(slots, 0, [b"%d" % next(NUMBERS) for _ in slots], {})
    pool.directory.publish(slots)
    return slots


def fill(pool: SlotPool, salt: str, count: int) -> list[int]:
    """Fill slots for a salt, and let them go."""
    slots = take(pool, salt, count)
    pool.release(slots)
    return slots


def held(pool: SlotPool) -> list[int]:
    return pool.quotas.policy.held


def test_free_slots_are_for_all_and_who_is_above_his_share_gives_them_back():
    pool = pool_of(100, tenants_of(10, a=30, b=20))
    assert len(fill(pool, "other", 500)) == 100
    fill(pool, "a", 30)
    assert held(pool) == [70, 30, 0]
    fill(pool, "b", 20)
    assert held(pool) == [50, 30, 20]
    fill(pool, "other", 500)
    assert held(pool) == [50, 30, 20], "it pushes out its own"


def test_what_is_above_the_shares_becomes_equal():
    pool = pool_of(100, tenants_of(10, a=30, b=20))
    fill(pool, "other", 100)
    for _ in range(20):
        fill(pool, "a", 5)
    assert held(pool) == [40, 60, 0], "30 above each"
    for _ in range(20):
        fill(pool, "b", 5)
    above = [now - own for now, own in zip(held(pool), pool.quotas.policy.guaranteed, strict=True)]
    assert sorted(above) == [13, 13, 14]
    pool.check_invariants(())


def test_leased_slots_are_not_taken_and_others_shares_neither():
    pool = pool_of(100, tenants_of(10, a=30, b=20))
    leased = take(pool, "other", 80)
    fill(pool, "a", 20)
    assert take(pool, "b", 20) == [], "what it is guaranteed is leased, and a has no more than it"
    pool.release(leased)
    assert len(take(pool, "b", 20)) == 20
    assert held(pool) == [60, 20, 20]


@pytest.mark.parametrize("policy", ["lru", "returns"])
def test_of_each_tenants_slots_its_policy_says_which_go(policy):
    pool = pool_of(10, tenants_of(0, a=50), policy)
    first = fill(pool, "other", 5)
    fill(pool, "a", 5)
    pool.lease(first[:2])
    pool.mark_hit(first[:2])
    pool.set_time(100.0)
    pool.release(first[:2])
    assert sorted(take(pool, "a", 3)) == sorted(first[2:])


def test_other_tenants_keep_the_slots_of_their_labels_and_the_order_of_these():
    pool = pool_of(10, tenants_of(0, a=50, b=50))
    of_a, of_b = fill(pool, "a", 4), fill(pool, "b", 5)
    pool.use_tenants(tenants_of(20, b=40, c=40))
    pool.check_invariants(())
    assert held(pool) == [4, 5, 0]
    assert take(pool, "c", 3)[1:] == [of_a[3], of_a[2]], "c's share is free, or had by a no more"
    assert held(pool) == [2, 5, 3]
    assert take(pool, "c", 1) == [of_b[4]]


SHARES = st.lists(st.integers(0, 33), min_size=3, max_size=3)
STEPS = st.lists(st.tuples(st.integers(0, 3), st.integers(1, 30), st.booleans()), max_size=25)


@given(SHARES, STEPS)
def test_no_tenant_within_its_share_ever_loses_a_slot(shares: Sequence[int], steps):
    names = ("a", "b", "c", "other")
    pool = pool_of(40, tenants_of(0, **dict(zip("abc", shares, strict=True))))
    leases: list[list[int]] = []
    for who, count, is_kept in steps:
        number = (who + 1) % 4
        before, guaranteed = list(held(pool)), list(pool.quotas.policy.guaranteed)
        num_grantable = pool.num_grantable(names[who])
        slots = take(pool, names[who], count)
        assert len(slots) == min(count, num_grantable)
        for tenant, now in enumerate(held(pool)):
            if tenant != number:
                assert now >= min(before[tenant], guaranteed[tenant])
        leases.append(slots)
        if not is_kept:
            pool.release(leases.pop(0))
        pool.check_invariants(leases)
