"""The policy that changes its order, and the contest that says to which."""

from __future__ import annotations

import hashlib
import itertools
import pickle
import random

import pytest
from vllm.v1.request import RequestStatus

from safe_offload.scheduler.eviction import reuse
from safe_offload.scheduler.eviction.adaptive import Adaptive, Order
from safe_offload.scheduler.eviction.contest import HOLD_S, Contest
from safe_offload.scheduler.eviction.policy import Lru
from safe_offload.scheduler.features import eviction_order
from safe_offload.scheduler.features.eviction_order import EvictionOrder
from tests.scheduler.features import feature_of
from tests.scheduler.rig import Rig

NUM_SLOTS = 60


def hashes(first: int, count: int) -> list[bytes]:
    return [hashlib.sha256(b"%d" % number).digest() for number in range(first, first + count)]


# ---- the policy --------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(20))
def test_in_the_order_lru_the_same_slots_go_as_with_lru(seed):
    chance = random.Random(seed)
    held: list[bytes | None] = [None] * NUM_SLOTS
    policies = Lru(NUM_SLOTS), Adaptive(NUM_SLOTS, held)
    numbers = itertools.count()
    evictable: set[int] = set()
    leased = list(range(NUM_SLOTS))
    for step in range(300):
        now_s = step * chance.random()
        told = []
        some = chance.sample(sorted(evictable), chance.randint(0, len(evictable)))
        done = leased[: chance.randint(0, len(leased))]
        count = chance.randint(0, 12)
        what = chance.choice(["release", "lease", "hold", "evict_first", "evict", "forget"])
        for policy in policies:
            if what == "release":
                policy.release(done, now_s)
            elif what == "evict_first":
                policy.hold(some)
                policy.evict_first(some, now_s)
            elif what == "evict":
                told.append((policy.peek(count), policy.evict(count, now_s)))
            else:
                getattr(policy, what)(some)
        if what == "release":
            for slot in done:
                held[slot] = held[slot] or b"%d" % next(numbers)
            evictable.update(done)
            leased = leased[len(done) :]
        elif what == "evict":
            assert told[0] == told[1]
            evictable.difference_update(told[0][1])
            leased += told[0][1]
            for slot in told[0][1]:
                held[slot] = None
        elif what != "evict_first":
            evictable.difference_update(some)
            leased += some
        assert len(policies[0]) == len(policies[1]) == len(evictable)


@pytest.mark.parametrize("order", Order)
def test_all_slots_go_in_each_order_and_a_change_loses_none(order):
    policy = Adaptive(NUM_SLOTS, [b"%d" % slot for slot in range(NUM_SLOTS)])
    for start in range(0, NUM_SLOTS, 10):
        policy.release(list(range(start, start + 10)), float(start))
    policy.lease([3, 4, 25])
    policy.release([3, 4, 25], 100.0)
    policy.evict(5, 101.0)
    policy.prefer(order)
    assert len(policy) == NUM_SLOTS - 5
    assert len({*policy.evict(NUM_SLOTS, 102.0)}) == NUM_SLOTS - 5


def test_with_two_queues_what_was_used_outlasts_a_flood_and_what_comes_back_is_known():
    held: list[bytes | None] = [b"%d" % slot for slot in range(NUM_SLOTS)]
    policy = Adaptive(NUM_SLOTS, held, Order.TWO_QUEUES)
    policy.release([1, 0], 0.0)
    policy.lease([0, 1])
    policy.release([1, 0], 10.0)
    policy.release(list(range(NUM_SLOTS - 1, 1, -1)), 20.0)
    flooded = policy.evict(50, 30.0)
    assert not {0, 1} & {*flooded}
    assert len(policy.evict(8, 40.0)) == 8, "the batch is empty, and known by its first block"
    policy.release([59, 58, 2], 50.0)  # its first block has come back, with others
    policy.release([*range(3, 57)], 60.0)
    assert {2, 58, 59} & {*policy.evict(50, 70.0)} == set()


@pytest.mark.parametrize("order", [Order.TWO_QUEUES, Order.RETURNS])
def test_after_the_first_change_what_was_there_goes_as_with_lru(order):
    held: list[bytes | None] = [b"%d" % slot for slot in range(NUM_SLOTS)]
    policy = Adaptive(NUM_SLOTS, held)
    policy.release([1, 0], 0.0)
    policy.release(list(range(40, 1, -1)), 10.0)
    policy.prefer(order)
    policy.lease([0, 1])
    policy.release([1, 0], 20.0)
    policy.release(list(range(NUM_SLOTS - 1, 40, -1)), 30.0)
    assert policy.evict(39, 40.0) == list(range(40, 1, -1)), "what was released before the change"
    assert not {0, 1} & {*policy.evict(15, 50.0)} or order is Order.RETURNS
    policy.prefer(Order.LRU)
    assert len(policy.evict(NUM_SLOTS, 60.0)) == 6


def test_while_the_host_has_room_all_orders_are_the_same_and_nothing_is_compared():
    judge = Contest(60, rate_max=1 / 8)
    for round_ in range(40):
        judge.see(hashes(0, 20), 20, round_, num_empty=1)
        judge.see(hashes(1000 * (round_ + 1), 100), 100, round_ + 0.5, num_empty=1)
    assert judge.order is Order.LRU
    judge.see(hashes(0, 20), 20, 40.0)
    assert judge.order is Order.LRU


def test_only_in_the_order_returns_anything_is_refused():
    for order in Order:
        held: list[bytes | None] = [b"%d" % slot for slot in range(NUM_SLOTS)]
        policy = Adaptive(NUM_SLOTS, held, order)
        for round_ in range(40):  # these are used again each second, and nothing else is
            policy.release(list(range(NUM_SLOTS)), float(round_))
            policy.lease(list(range(NUM_SLOTS)))
        policy.release(list(range(NUM_SLOTS)), 40.0)
        refuses = not policy.admits(NUM_SLOTS, None, b"new", 40.3)
        assert refuses is (order is Order.RETURNS)


def test_what_the_policy_remembers_has_a_bound(monkeypatch):
    monkeypatch.setattr(reuse, "GHOSTS_MAX", 64)
    held: list[bytes | None] = [None] * 4
    policy = Adaptive(4, held, Order.RETURNS)
    for number in range(200):
        held[:] = [b"%d %d" % (number, slot) for slot in range(4)]
        policy.release([3, 2, 1, 0], float(number))
        policy.evict(4, float(number))
    assert len(policy._ghosts) == 64
    assert not any(map(len, (policy._batches, policy._fresh, policy._used_before)))


# ---- the contest -------------------------------------------------------------------------------


def flood(judge: Contest, num_rounds: int, start_s: float = 0.0) -> list[Order]:
    """Ask for one shared prefix between one-off prompts as long as the host; return the orders."""
    shared, orders = hashes(0, 20), []
    for round_ in range(num_rounds):
        judge.see(shared, 20, start_s + round_)
        judge.see(hashes(1000 * (round_ + 1 + int(start_s)), 100), 100, start_s + round_ + 0.5)
        orders.append(judge.order)
    return orders


def test_a_flood_of_one_off_prompts_is_noticed():
    judge = Contest(60, rate_max=1 / 8)
    orders = flood(judge, 40)
    assert (orders[0], orders[-1]) == (Order.LRU, Order.TWO_QUEUES)


def test_the_order_stays_where_all_fits():
    judge = Contest(1000, rate_max=1 / 8)
    for now_s in range(200):
        judge.see(hashes(now_s % 8 * 100, 100), 100, float(now_s))
    assert judge.order is Order.LRU


@pytest.mark.parametrize("seed", range(5))
def test_the_order_changes_at_most_once_in_some_minutes(seed):
    chance, judge, changes = random.Random(seed), Contest(100, rate_max=1 / 8), [-HOLD_S]
    for step in range(4000):
        before, now_s = judge.order, step * 0.5
        is_flood = step // 400 % 2
        first = 10_000 * (step + 1) if is_flood and chance.random() < 0.7 else chance.randrange(9)
        judge.see(hashes(1000 * first, 40), 40, now_s)
        if judge.order is not before:
            changes.append(now_s)
    assert len(changes) > 1
    assert min(later - first for first, later in itertools.pairwise(changes)) >= HOLD_S


def test_what_the_contest_remembers_has_a_bound(monkeypatch):
    monkeypatch.setattr(reuse, "GHOSTS_MAX", 64)
    judge, sizes = Contest(100, rate_max=1), []
    for number in range(900):
        judge.see(hashes(3 * number, 3), 3, float(number))
        if number % 300 == 299:
            sizes.append(len(pickle.dumps(judge)))
    assert sizes[2] <= 1.05 * sizes[1]


def test_a_prompt_without_blocks_says_nothing():
    judge = Contest(1)
    judge.see([], 0, 0.0)
    judge.see(hashes(0, 3), 0, 0.0)
    assert judge.order is Order.LRU


# ---- the planner -------------------------------------------------------------------------------


def serve_flood(rig: Rig) -> None:
    for number in range(30):
        rig.run_alone(f"shared {number}", rig.prompt(65, 0), max_tokens=1)
        rig.run_alone(f"once {number}", rig.prompt(161, 1 + number), max_tokens=1)
        if not rig.planner.options.is_lazy:  # which stores what the GPU evicts, and it has to
            rig.forget_gpu_cache()
        rig.clock.advance(30.0)


@pytest.mark.parametrize("extra", [{}, {"lazy_offload": True}])
def test_the_default_changes_its_order_and_says_so(make_rig, package_log, monkeypatch, extra):
    monkeypatch.setattr(eviction_order, "RATE_MAX", 1.0)  # the host is small
    rig = make_rig(num_blocks=60, num_slots=40, extra={"min_load_tokens": 0, **extra})
    assert rig.planner.host_labels["eviction_order"] == "lru"
    package_log.clear()
    serve_flood(rig)
    order = feature_of(rig.planner, EvictionOrder).contest.order
    assert order is not Order.LRU
    assert rig.planner.host_labels["eviction_order"] == order
    messages = [message for r in package_log if "evicts in" in (message := r.getMessage())]
    assert f"The host cache now evicts in the order {order}," in messages[-1]


def run(rig: Rig) -> None:
    rig.run_alone("a", rig.prompt(41, 1), max_tokens=1)


def abort(rig: Rig) -> None:
    rig.scheduler.finish_requests("a", RequestStatus.FINISHED_ABORTED)
    rig.drain()


def abort_in_the_queue(rig: Rig) -> None:
    rig.add("a", rig.prompt(41, 1))
    abort(rig)


def abort_after_a_step(rig: Rig) -> None:
    rig.add("a", rig.prompt(41, 1))
    rig.step()
    abort(rig)


def abort_when_preempted(rig: Rig) -> None:
    rig.add("a", rig.prompt(41, 1))
    rig.step()
    assert rig.scheduler.reset_prefix_cache(reset_running_requests=True)
    abort(rig)


def run_on_after_a_reset(rig: Rig) -> None:
    rig.add("a", rig.prompt(41, 1))
    rig.step()
    rig.connector.reset_cache()
    rig.drain()


@pytest.mark.parametrize(
    ("how", "params", "seen"),
    [
        (run, None, [(10, 10)]),
        (run, {"max_offload_tokens": 0}, []),
        (run, {"max_offload_tokens": 17}, [(4, 4)]),
        (run, {"store": "nothing"}, []),
        (run, {"max_load_tokens": 0}, [(10, 0)]),
        (abort_in_the_queue, None, []),
        (abort_after_a_step, None, [(6, 6)]),
        (abort_when_preempted, None, [(6, 6)]),
        (run_on_after_a_reset, None, []),
    ],
)
def test_an_order_is_judged_by_what_ran_and_may_be_stored(make_rig, monkeypatch, how, params, seen):
    monkeypatch.setattr(eviction_order, "RATE_MAX", 1.0)
    found = []
    monkeypatch.setattr(
        Contest, "see", lambda _, hashes, num_asked, *__: found.append((len(hashes), num_asked))
    )
    rig = make_rig(num_slots=60)
    rig.start()
    rig.kv_transfer_params = params
    how(rig)
    assert found == seen


def test_an_order_is_judged_by_no_request_that_ends_while_it_loads(make_rig, monkeypatch):
    monkeypatch.setattr(eviction_order, "RATE_MAX", 1.0)
    rig = make_rig(num_slots=60, extra={"min_load_tokens": 0})
    rig.start()
    prompt = rig.warm(41)
    found = []
    monkeypatch.setattr(Contest, "see", lambda _, hashes, *__: found.append(hashes))
    rig.hold_copies(True)
    rig.add("a", prompt)
    rig.step()
    assert rig.planner.gauges()["loads_in_flight"]
    rig.scheduler.finish_requests("a", RequestStatus.FINISHED_ABORTED)
    rig.hold_copies(False)
    rig.finish()
    assert found == []
