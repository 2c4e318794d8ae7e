"""The stand-in for a tier: it does what a tier promises, and what its faults say."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from dataclasses import replace
from typing import Any, TypeVar

import pytest

from safe_offload.worker.tiers.base import Name, Result
from tests.simulator.chance import Chance
from tests.simulator.device import Device, DeviceOptions, Memory
from tests.simulator.profiles import PROFILES
from tests.simulator.run import findings_of
from tests.simulator.tiers import (
    ObjectStore,
    RankTiers,
    SimSlots,
    SimTier,
    TierFault,
    TierOptions,
    namespace_of,
)
from tests.simulator.virtual_loop import Clock, VirtualLoop

T = TypeVar("T")

NUM_SLOTS, NUM_WORDS = 8, 4
NAMES = [Name(namespace_of(0, ""), 0, bytes([index]) * 32) for index in range(NUM_SLOTS)]
TICKS_MAX = 2_000


class Place:
    """A device, one tier, and a loop that is turned by hand."""

    def __init__(self, seed: int = 0, **options: int) -> None:
        self.clock = Clock()
        self.loop = VirtualLoop(self.clock)
        self.store = ObjectStore(TierOptions(**options))
        chance = Chance(seed)
        memory = Memory.empty(1, NUM_SLOTS, NUM_WORDS)
        self.device = Device(0, memory, DeviceOptions(), chance, self.clock)
        self.rank = RankTiers([self.store], self.device, chance)
        self.tier: SimTier = self.rank.tiers[0]
        self.slots = [SimSlots(self.device).buffers(slot_id) for slot_id in range(NUM_SLOTS)]
        self.fill()

    def fill(self) -> None:
        for slot_id, words in enumerate(self.device.memory.host):
            words[:] = [100 * slot_id + index for index in range(NUM_WORDS)]

    def wipe(self) -> None:
        for words in self.device.memory.host:
            words[:] = [None] * NUM_WORDS

    def plan(self, fault: TierFault) -> None:
        self.rank.faults.planned.append((0, fault))

    def start(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = self.loop.create_task(work)
        self.loop.run_once()
        return task

    def finish(self, task: asyncio.Task[T], ticks_max: int = TICKS_MAX) -> T:
        for _ in range(ticks_max):
            self.device.tick()
            self.loop.run_once()
            if task.done():
                return task.result()
        raise AssertionError("it has not ended")

    def do(self, work: Coroutine[Any, Any, T]) -> T:
        return self.finish(self.start(work))

    def spill(self) -> list[Result]:
        return self.do(self.tier.spill(NAMES, self.slots))

    def fetch(self) -> list[Result]:
        self.wipe()
        return self.do(self.tier.fetch(NAMES, self.slots))

    def is_right(self, slot_id: int) -> bool:
        words = self.device.memory.host[slot_id]
        return words == [100 * slot_id + index for index in range(NUM_WORDS)]


def test_what_is_spilled_is_there_and_comes_back_word_for_word() -> None:
    place = Place(ticks_max=20)
    assert place.do(place.tier.probe(NAMES)) == [False] * NUM_SLOTS
    assert place.spill() == [Result.DONE] * NUM_SLOTS
    assert place.spill() == [Result.PRESENT] * NUM_SLOTS
    assert place.do(place.tier.probe(NAMES)) == [True] * NUM_SLOTS
    assert place.fetch() == [Result.DONE] * NUM_SLOTS
    assert all(map(place.is_right, range(NUM_SLOTS)))


def test_words_move_while_time_passes() -> None:
    place = Place(ticks_max=40, seed=3)
    place.spill()
    place.wipe()
    task = place.start(place.tier.fetch(NAMES, place.slots))
    half_done = 0
    while not task.done():
        place.device.tick()
        half_done += any(
            None in words and any(word is not None for word in words)
            for words in place.device.memory.host
        )
        place.loop.run_once()
    assert half_done > 0


@pytest.mark.parametrize(
    ("fault", "spilled", "fetched"),
    [
        (TierFault.LOSE, {Result.DONE, Result.FULL, Result.FAILED}, {Result.DONE, Result.ABSENT}),
        (TierFault.TEAR, {Result.DONE}, {Result.DONE, Result.CORRUPT}),
        (TierFault.SWAP, {Result.DONE}, {Result.DONE, Result.FOREIGN}),
    ],
)
def test_a_fault_of_a_spill_shows_in_its_results_or_in_those_of_a_fetch(
    fault: TierFault, spilled: set[Result], fetched: set[Result]
) -> None:
    seen_spilled, seen_fetched = set(), set()
    for seed in range(8):
        place = Place(seed)
        place.plan(fault)
        seen_spilled.update(place.spill())
        results = place.fetch()
        seen_fetched.update(results)
        for slot_id, result in enumerate(results):
            assert place.is_right(slot_id) == (result is Result.DONE)
        # What is wrong was deleted.
        present = place.do(place.tier.probe(NAMES))
        assert present == [result is Result.DONE for result in results]
    assert (seen_spilled, seen_fetched) == (spilled, fetched)


def test_a_fetch_that_loses_objects_says_which() -> None:
    place = Place()
    place.spill()
    place.plan(TierFault.LOSE)
    results = place.fetch()
    assert set(results) > {Result.DONE}
    for slot_id, result in enumerate(results):
        assert place.is_right(slot_id) == (result is Result.DONE)


def test_a_lie_is_about_presence() -> None:
    place = Place()
    place.plan(TierFault.LIE)
    assert set(place.do(place.tier.probe(NAMES))) == {True, False}
    assert place.do(place.tier.probe(NAMES)) == [False] * NUM_SLOTS


def test_half_of_all_objects_are_gone_between_a_probe_and_its_fetch() -> None:
    place = Place()
    place.spill()
    place.plan(TierFault.EVICT)
    assert all(place.do(place.tier.probe(NAMES)))
    assert place.fetch().count(Result.ABSENT) == NUM_SLOTS // 2


@pytest.mark.parametrize("fault", [TierFault.FAIL, TierFault.DIE])
def test_an_operation_that_fails_raises(fault: TierFault) -> None:
    place = Place()
    place.spill()
    place.plan(fault)
    with pytest.raises(OSError, match="simulator"):
        place.fetch()
    if fault is TierFault.DIE:
        with pytest.raises(OSError, match="dead"):
            place.do(place.tier.probe(NAMES))
    else:
        assert place.fetch() == [Result.DONE] * NUM_SLOTS


def test_what_hangs_ends_when_faults_stop_whether_it_is_cancelled_or_not() -> None:
    outcomes = set()
    for seed in range(8):
        place = Place(seed)
        place.spill()
        place.wipe()
        place.plan(TierFault.HANG)
        task = place.start(place.tier.fetch(NAMES, place.slots))
        for _ in range(2):
            place.device.tick()
        task.cancel()
        place.loop.run_once()
        if place.tier.running[0].opened:
            with pytest.raises(AssertionError, match="not ended"):
                place.finish(task, ticks_max=50)
        place.rank.recover()
        results = place.finish(task)
        outcomes.update(results)
        for slot_id, result in enumerate(results):
            assert place.is_right(slot_id) == (result is Result.DONE)
            if result is Result.CANCELLED:  # it was not begun, and never will be
                assert place.device.memory.host[slot_id] == [None] * NUM_WORDS
    assert outcomes == {Result.DONE, Result.CANCELLED}


def test_a_fetch_goes_on_writing_while_the_loop_stands_still() -> None:
    place = Place(ticks_max=30)
    place.spill()
    place.wipe()
    task = place.start(place.tier.fetch(NAMES, place.slots))
    for _ in range(40):
        place.device.tick()
    assert not task.done()
    assert all(map(place.is_right, range(NUM_SLOTS)))
    place.finish(task)


def test_what_was_used_least_recently_is_evicted_first() -> None:
    place = Place(num_objects_max=3)
    for index in (0, 1, 2):
        place.do(place.tier.spill(NAMES[index : index + 1], place.slots[index : index + 1]))
    place.do(place.tier.fetch(NAMES[:1], place.slots[:1]))
    place.do(place.tier.spill(NAMES[3:4], place.slots[3:4]))
    assert place.do(place.tier.probe(NAMES[:4])) == [True, False, True, True]


def test_an_engine_that_is_started_again_finds_its_own_in_its_first_namespace_only() -> None:
    place = Place()
    place.tier.epoch_of = lambda slot_id: 2
    after_reset = Name(namespace_of(0, "ab12"), 0, bytes(32))
    place.spill()
    place.do(place.tier.spill([after_reset], place.slots[:1]))
    place.store.restart()
    epochs = {name: stored.epoch for name, stored in place.store.objects.items()}
    assert epochs == {**dict.fromkeys(NAMES, 0), after_reset: -1}


# ---- what checkers make of it ------------------------------------------------------------------


def test_wrong_words_that_a_tier_hands_out_as_right_are_found() -> None:
    profile = replace(PROFILES["tiers-faults"], faults={TierFault.SUBVERT: 60})
    findings = findings_of(profile, range(6))
    assert findings
    assert all(f.promise == "I10" and "is published" in f.detail for f in findings), findings


def test_objects_of_before_a_reset_that_are_found_again_are_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tests.simulator.engine_core.namespace_of", lambda rank, word: b"\0")
    profile = PROFILES["tiers-faults"]
    profile = replace(profile, shape=replace(profile.shape, tensor_ranks=1), faults={})
    profile = replace(profile, workload=replace(profile.workload, num_resets=12))
    findings = findings_of(profile, range(6))
    assert findings
    assert all(f.promise == "I10" and "before a reset" in f.detail for f in findings), findings
