"""Slots of a pool that several engines share, all of them in this process."""

import multiprocessing
import os
import signal
import time
from functools import partial

import numpy as np
import pytest

from safe_offload.errors import InvariantError
from safe_offload.node import table as table_module
from safe_offload.node.table import reserved_slots
from safe_offload.observe.counters import Count
from safe_offload.scheduler.cache.leases import LeaseKind
from tests.benchmarks.growth import EXPONENT_MAX, fitted
from tests.benchmarks.scheduler_probe import HookCounter
from tests.node.engines import Engine, hash_of, pools_in
from tests.node.storm import account, storm

SLOTS = 256
"""In lots of four."""
USABLE = SLOTS - reserved_slots(SLOTS)
A, B, C = (hash_of(9, number) for number in range(3))


@pytest.fixture
def start(start_engine):
    return partial(start_engine, SLOTS)


def many(count, prompt=1):
    return [hash_of(prompt, number) for number in range(count)]


def die(engine, *others):
    """An engine dies, and others notice."""
    engine.close()
    for other in others:
        other.table.bury(100.0)


def test_what_is_being_stored_is_not_found(start):
    one, other = start(), start()
    lease = one.begin(A)
    assert other.find(A) == []
    one.end(lease)
    assert other.find(A) == lease.slots or other.find(A)


def test_what_is_overwritten_while_it_is_read_is_not_found(start, monkeypatch):
    one, other = start(), start()
    one.store(A)

    def overwrite():
        monkeypatch.undo()
        one.begin(*many(USABLE))

    monkeypatch.setattr(table_module, "fence", overwrite)
    assert other.find(A) == []
    assert other.table.num_damaged == 0


def test_groups_are_told_apart(start):
    one, other = start(num_groups=2), start(num_groups=2)
    (slot,) = one.store(A, group=1)
    assert other.find(A, group=1) == [slot]
    assert other.find(A, group=0) == []


def test_an_engine_overwrites_nothing_that_a_guest_has_leased(start):
    one, other = start(), start()
    slots = one.store(*many(USABLE))
    lease = other.hit(*many(3))
    granted = one.slots.grant(SLOTS)
    assert set(granted) == set(slots) - set(lease.slots)
    assert other.counters == {Count.BORROWED_BLOCKS: 3}
    assert (one.lots.num_own, other.lots.num_own) == (USABLE, 0)
    one.slots.release(granted)
    assert one.slots.num_leased == 0  # what waits for guests is no leak
    one.check()
    lease.release()
    assert set(one.slots.grant(SLOTS)) == set(slots)


def test_what_guests_read_is_found_by_all_when_its_owner_needs_room(start):
    one, guest, third = start(), start(), start()
    slots = one.store(*many(USABLE))
    lease = guest.hit(*many(3))
    granted = one.leases.grant(LeaseKind.STORE, SLOTS).slots
    for engine in (one, guest, third):
        assert engine.find(*many(3)) == lease.slots
        engine.check()
    mine = one.hit(*many(3))
    assert one.slots.num_leased == USABLE
    lease.release()
    assert one.leases.grant(LeaseKind.STORE, SLOTS) is None
    mine.release()
    assert {*granted, *one.leases.grant(LeaseKind.STORE, SLOTS).slots} == set(slots)
    assert third.find(*many(3)) == []


def test_a_guest_that_comes_while_the_owner_looks_keeps_what_it_has_found(start, monkeypatch):
    one, guest = start(), start()
    one.store(*many(USABLE))
    lease = guest.hit(*many(3))
    look = one.table._are_held
    looks = []

    def see_it_late(slots):
        looks.append(slots)
        return look(slots) & (len(looks) > 2)

    monkeypatch.setattr(one.table, "_are_held", see_it_late)
    granted = one.leases.grant(LeaseKind.STORE, SLOTS).slots
    assert set(granted).isdisjoint(lease.slots)
    assert one.find(*many(3)) == []
    assert guest.find(*many(3)) == lease.slots
    guest.check()
    lease.release()
    assert guest.find(*many(3)) == [], "now it may be overwritten"
    assert set(one.leases.grant(LeaseKind.STORE, SLOTS).slots) == set(lease.slots)
    for engine in (one, guest):
        engine.check()


def test_a_slot_that_was_overwritten_since_it_was_seen_is_not_leased(start):
    one, other = start(), start()
    one.store(*many(USABLE))
    other.find(*many(3))
    one.store(*many(USABLE, prompt=2))
    num_lost = other.lots.num_lost
    found = other.slots.directory.find_run(0, many(3))
    lease = other.leases.lease(LeaseKind.MATCH, found)
    assert other.lots.num_lost == num_lost + 3
    assert other.counters[Count.LOST_BLOCKS] == 3
    assert other.slots.directory.find_run(0, many(3)) == []
    other.check()
    lease.release()
    other.check()


def test_a_guest_keeps_its_lease_when_the_owner_dies_and_another_takes_over(start):
    one, guest = start(), start()
    one.store(*many(USABLE))
    lease = guest.hit(*many(3))
    third = start()
    die(one, third)
    granted = third.slots.grant(SLOTS)
    assert granted
    assert set(granted).isdisjoint(lease.slots)
    lease.release()
    assert set(lease.slots) <= {*third.slots.grant(SLOTS), *granted}


def test_what_a_dead_engine_has_stored_is_found_and_what_it_was_storing_is_not(start):
    one, other = start(), start()
    slots = one.store(A)
    one.begin(B)
    die(one, other)
    assert other.find(A) == slots
    assert other.find(B) == []
    later = start()
    assert later.find(A, B) == slots


def test_the_marks_of_a_dead_guest_are_cleared(start):
    one, guest = start(), start()
    one.store(*many(USABLE))
    assert guest.hit(*many(5)) is not None
    die(guest, one)
    assert len(one.slots.grant(SLOTS)) == USABLE


def test_an_engine_whose_worker_lives_is_not_dead(start):
    one, other = start(), start()
    one.begin(*many(USABLE))
    one.table.close()
    other.table.bury(0.0)
    other.table.bury(100.0)
    assert other.slots.grant(1) == []
    die(one, other)
    assert len(other.slots.grant(SLOTS)) == USABLE


def test_a_block_that_is_stored_while_a_lot_brings_it_is_there_once(start):
    """Both store it at the same time; then one dies, and the other takes its lots over."""
    one, other = start(), start()
    lease = other.begin(A)
    one.store(A, B)
    other.lots.sync()
    other.check()
    other.end(lease)
    die(one, other)
    mine = other.leases.lease(LeaseKind.MATCH, other.find(A, B))
    assert mine.slots[0] == lease.slots[0]
    taken = other.leases.grant(LeaseKind.STORE, SLOTS)
    assert len(taken.slots) == USABLE - 2
    other.check()


def test_a_block_that_a_lot_brings_when_it_is_claimed_to_store_it_is_there_once(start):
    one, other = start(), start()
    other.store(A)
    die(other, one)  # which has not looked since
    lease = one.begin(A, *many(USABLE - 2))
    one.check()
    slots = one.end(lease)
    assert one.find(A) == slots[:1]
    one.check()
    assert len(one.slots.grant(USABLE)) == USABLE


def test_after_a_reset_nothing_of_before_is_found_nor_given(start):
    one, other = start(), start()
    one.store(A)
    other.store(B)
    one.slots.forget_all()
    assert one.find(A) == one.find(B) == []
    assert other.find(A) == []
    slots = one.store(C)
    assert one.find(C) == slots
    assert other.find(C) == []
    assert other.find(B)


def test_private_blocks_are_found_by_their_engine_only(start):
    one, other = start(), start()
    one.slots.directory.private.add(A)
    slots = one.store(A, B)
    assert one.find(A, B) == slots
    assert other.find(A) == []
    assert other.find(B) == slots[1:]


def test_an_engine_that_needs_room_gets_its_share_of_one_that_works(start):
    one, other = start(), start()
    one.store(*many(USABLE))
    assert other.slots.grant(1) == []
    granted = []
    for _ in range(USABLE):
        one.lots.balance()
        one.check()
        granted += other.slots.grant(USABLE // 2 - len(granted))
    assert len(granted) == USABLE // 2
    other.slots.release(granted)
    other.check()
    one.lots.balance()
    assert len(one.slots.grant(SLOTS)) == USABLE // 2


def test_an_engine_that_naps_gives_its_surplus_without_running(start):
    one, other = start(), start()
    one.store(*many(USABLE))
    assert other.slots.grant(1) == []
    one.table.nap()
    granted = other.slots.grant(SLOTS)
    assert len(granted) == USABLE // 2
    assert one.lots.wake()
    one.check()
    assert len(one.slots.grant(SLOTS)) == USABLE - USABLE // 2


def test_an_engine_that_lost_many_lots_asleep_goes_through_its_empty_slots_once(tmp_path):
    def work(num_slots):
        folder = tmp_path / str(num_slots)
        folder.mkdir(exist_ok=True)
        with pools_in(folder):
            one, other = Engine(num_slots), Engine(num_slots)
            num_usable = len(one.slots.grant(num_slots))
            one.slots.release(range(num_slots - num_usable, num_slots))
            one.table.nap()
            assert len(other.slots.grant(num_slots)) >= num_usable // 2
            counter = HookCounter()
            assert counter.wrap("wake", one.lots.wake)()
            for engine in (one, other):
                engine.close()
            return counter.total.instructions

    assert fitted((512, 4096), (work(512), work(4096))) <= EXPONENT_MAX


def test_an_engine_that_naps_writes_nothing(start):
    one = start()
    one.table.nap()
    assert one.slots.grant(1) == []


def test_a_lot_is_not_given_while_something_is_stored_in_it(start):
    one, other = start(), start()
    one.store(*many(USABLE - 1))
    lease = one.begin(A)
    one.leases.lease(LeaseKind.MATCH, one.find(*many(USABLE - 4)))
    other.slots.grant(1)
    for _ in range(3):  # the last lot has slots that are evictable
        one.lots.balance()
        one.check()
        assert other.slots.grant(1) == []
    one.end(lease)


def test_what_is_leased_in_a_lot_that_is_given_stays(start):
    one, other = start(), start()
    slots = one.store(*many(USABLE))
    lease = one.leases.lease(LeaseKind.MATCH, slots[-1:])  # its lot is the first to go
    other.slots.grant(1)
    granted = []
    for _ in range(USABLE):
        one.lots.balance()
        one.check()
        granted += other.slots.grant(USABLE // 2 - len(granted))
    assert slots[-2] in granted
    assert set(granted).isdisjoint(lease.slots)
    lease.release()
    one.check()


def test_a_bad_slot_is_used_by_no_engine(start):
    one, other = start(), start()
    slots = one.store(A, B)
    other.find(A, B)
    one.slots.forget(one.slots.retire(slots[:1]))
    lease = other.hit(A, B)
    assert lease is None or slots[0] not in lease.slots
    die(one, other)
    lease = other.leases.grant(LeaseKind.STORE, SLOTS)
    assert slots[0] not in lease.slots
    other.check()


def test_a_bad_slot_of_another_is_used_by_no_engine(start):
    one, other = start(), start()
    slots = one.store(A)
    other.find(A)
    other.slots.forget(other.slots.retire(slots))
    other.check()
    assert one.hit(A) is not None  # which fails when its checksum is compared
    assert slots[0] not in one.slots.grant(SLOTS)


def test_what_others_use_outlasts_what_nobody_does(start):
    one, other = start(), start()
    one.store(*many(USABLE))
    other.hit(*many(4)).release()
    one.store(*many(USABLE - 4, prompt=2))
    assert len(other.find(*many(4))) == 4


def test_leases_that_are_not_the_tables_are_found_out(start):
    one, other = start(), start()
    one.store(A)
    lease = other.hit(A)
    other.table.leave(np.array(lease.slots))
    with pytest.raises(InvariantError, match="I1"):
        other.check()


def _read(path, slot, rounds, wrong):
    guest = Engine(SLOTS, tokens=[1 << 50])
    while rounds.value < 20_000:
        lease = guest.hit(A)
        if lease is not None and lease.slots:
            before = path[:4].copy()
            time.sleep(0)
            wrong.value += int((path[:4] != before).any())
        if lease is not None:
            lease.release()


def test_a_guest_and_an_owner_never_both_have_a_slot(start):
    """The owner writes a shared word whenever it may, and the guest sees whether it changes."""
    context = multiprocessing.get_context("fork")
    memory = np.frombuffer(context.RawArray("q", 8), np.int64)
    rounds, wrong = context.Value("q", 0, lock=False), context.Value("q", 0, lock=False)
    owner = start()
    guest = context.Process(target=_read, args=(memory, 0, rounds, wrong))
    guest.start()
    slot = owner.store(A)[0]
    while rounds.value < 20_000 and guest.is_alive():
        rounds.value += 1
        array = np.array([slot])
        if not len(owner.table.retract(array)):
            memory[:4] += 1
        owner.table.publish(array, [0], [A], [0])
    guest.join(30)
    assert guest.exitcode == 0
    assert wrong.value == 0
    assert memory[0] > 100


@pytest.mark.slow
def test_a_storm_of_engines_that_are_killed_leaves_no_wrong_word(tmp_path):
    with pools_in(tmp_path):
        found = storm(8.0, kill_every_s=0.25)
    assert found["stores"] > 1000
    assert found["foreign"] > 1000
    assert found["ended by themselves"] == 0
    assert found["stopped"] > 0
    wrong = ("wrong", "torn", "marks", "owned", "not grantable")
    assert {name: found[name] for name in wrong} == dict.fromkeys(wrong, 0)


def test_a_process_that_is_killed_leaves_its_slots_to_others(tmp_path):
    def fill() -> None:
        Engine(SLOTS).store(*many(USABLE))
        os.kill(os.getpid(), signal.SIGKILL)

    with pools_in(tmp_path):
        process = multiprocessing.get_context("fork").Process(target=fill)
        process.start()
        process.join()
        assert process.exitcode == -signal.SIGKILL
        heir = Engine(SLOTS)
        assert len(heir.find(*many(USABLE))) == USABLE
        heir.close()
        assert account(SLOTS) == dict.fromkeys(("torn", "marks", "owned", "not grantable"), 0)
