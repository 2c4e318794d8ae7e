"""The stand-in for a tier: it does what a tier promises, and what its faults say."""

import asyncio
import itertools
from collections import Counter
from collections.abc import Coroutine
from dataclasses import replace
from typing import Any, TypeVar

import pytest

from safe_offload.scheduler.tiers.generation import Generation
from safe_offload.tiers.base import Name, Result
from tests.simulator.chance import Chance
from tests.simulator.device import Device, DeviceOptions, Memory
from tests.simulator.events import Abort, FaultKind
from tests.simulator.profiles import PROFILES, Profile
from tests.simulator.run import Fleet, findings_of, make_stores, run
from tests.simulator.tiers import (
    CUT_TICKS_MAX,
    ObjectStore,
    RankTiers,
    SimTier,
    SlotView,
    TierFault,
    TierOptions,
    namespace_of,
)
from tests.simulator.virtual_loop import Clock, VirtualLoop
from tests.simulator.workload import events_of, make_events

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
        self.slots = [(SlotView(self.device, slot_id),) for slot_id in range(NUM_SLOTS)]
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


def test_what_is_spilled_is_there_and_comes_back_word_for_word():
    place = Place(ticks_max=20)
    assert place.do(place.tier.probe(NAMES)) == [False] * NUM_SLOTS
    assert place.spill() == [Result.DONE] * NUM_SLOTS
    assert place.spill() == [Result.PRESENT] * NUM_SLOTS
    assert place.do(place.tier.probe(NAMES)) == [True] * NUM_SLOTS
    assert place.fetch() == [Result.DONE] * NUM_SLOTS
    assert all(map(place.is_right, range(NUM_SLOTS)))


@pytest.mark.parametrize(
    ("fault", "spilled", "fetched"),
    [
        (TierFault.LOSE, {Result.DONE, Result.FULL, Result.FAILED}, {Result.DONE, Result.ABSENT}),
        (TierFault.TEAR, {Result.DONE}, {Result.DONE, Result.CORRUPT}),
        (TierFault.SWAP, {Result.DONE}, {Result.DONE, Result.FOREIGN}),
    ],
)
def test_a_fault_of_a_spill_shows_in_its_results_or_in_those_of_a_fetch(fault, spilled, fetched):
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


def test_a_lie_is_about_presence():
    place = Place()
    place.plan(TierFault.LIE)
    assert set(place.do(place.tier.probe(NAMES))) == {True, False}
    assert place.do(place.tier.probe(NAMES)) == [False] * NUM_SLOTS


def test_half_of_all_objects_are_gone_between_a_probe_and_its_fetch():
    place = Place()
    place.spill()
    place.plan(TierFault.EVICT)
    assert all(place.do(place.tier.probe(NAMES)))
    assert place.fetch().count(Result.ABSENT) == NUM_SLOTS // 2


@pytest.mark.parametrize("fault", [TierFault.FAIL, TierFault.DIE])
def test_an_operation_that_fails_raises(fault):
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


def test_what_hangs_ends_when_faults_stop_whether_it_is_cancelled_or_not():
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


def test_a_fetch_goes_on_writing_while_the_loop_stands_still():
    place = Place(ticks_max=30)
    place.spill()
    place.wipe()
    task = place.start(place.tier.fetch(NAMES, place.slots))
    for _ in range(40):
        place.device.tick()
    assert not task.done()
    assert all(map(place.is_right, range(NUM_SLOTS)))
    place.finish(task)


def test_what_was_used_least_recently_is_evicted_first():
    place = Place(num_objects_max=3)
    for index in (0, 1, 2):
        place.do(place.tier.spill(NAMES[index : index + 1], place.slots[index : index + 1]))
    place.do(place.tier.fetch(NAMES[:1], place.slots[:1]))
    place.do(place.tier.spill(NAMES[3:4], place.slots[3:4]))
    assert place.do(place.tier.probe(NAMES[:4])) == [True, False, True, True]


def test_an_engine_that_is_started_again_finds_its_own_in_its_first_namespace_only():
    place = Place()
    place.tier.epoch_of = lambda slot_id: 2
    after_reset = Name(namespace_of(0, "ab12"), 0, bytes(32))
    place.spill()
    place.do(place.tier.spill([after_reset], place.slots[:1]))
    place.store.restart()
    epochs = {name: stored.epoch for name, stored in place.store.objects.items()}
    assert epochs == {**dict.fromkeys(NAMES, 0), after_reset: -1}


def test_a_lost_connection_ends_what_is_under_way_and_what_comes_soon_after():
    place = Place(ticks_max=40)
    place.spill()
    place.wipe()
    fetch = place.start(place.tier.fetch(NAMES, place.slots))
    for _ in range(3):
        place.device.tick()
    place.plan(TierFault.CUT)
    with pytest.raises(ConnectionError, match="cannot be reached"):
        place.do(place.tier.probe(NAMES))
    written = [list(words) for words in place.device.memory.host]
    with pytest.raises(OSError, match="lost its connection"):
        place.finish(fetch)
    for _ in range(CUT_TICKS_MAX):
        place.device.tick()
    assert place.device.memory.host == written, "nothing is written any more"
    assert place.fetch() == [Result.DONE] * NUM_SLOTS


def test_nothing_happens_before_the_latency_has_passed():
    place = Place(latency_ticks=40)
    place.spill()
    place.wipe()
    fetch = place.start(place.tier.fetch(NAMES, place.slots))
    for _ in range(20):
        place.device.tick()
    assert place.device.memory.host == [[None] * NUM_WORDS] * NUM_SLOTS
    assert place.finish(fetch, ticks_max=60) == [Result.DONE] * NUM_SLOTS
    probe = place.start(place.tier.probe(NAMES))
    with pytest.raises(AssertionError, match="not ended"):
        place.finish(probe, ticks_max=19)
    assert all(place.finish(probe, ticks_max=60))


# ---- engines that share ------------------------------------------------------------------------


def shared_profile(**workload: int) -> Profile:
    profile = PROFILES["tiers-shared"]
    return replace(profile, workload=replace(profile.workload, **workload))


def test_two_engines_answer_what_the_other_has_computed_while_both_run():
    profile = shared_profile(num_aborts=0, num_resets=0)
    seed = 2
    fleet = Fleet(profile, seed, make_events(profile, seed), make_stores(profile))
    fleet.go()
    fleet.close()
    assert [run.earnings.total().blocks_shared > 0 for run in fleet.runs] == [True, True]
    assert all(run.core.answers for run in fleet.runs)
    turns = [line.split("|")[0] for line in fleet.lines]
    assert len(list(itertools.groupby(turns))) > 10, "in turns"
    assert fleet.runs[0].core.clock is fleet.runs[1].core.clock


def test_a_store_is_common_and_a_local_one_is_not():
    first, second = make_stores(PROFILES["tiers-far"])
    assert [a is b for a, b in zip(first, second, strict=True)] == [False, True]


def test_each_event_happens_to_one_engine_and_an_abort_to_that_of_its_request():
    profile = PROFILES["tiers-far"]
    events = make_events(profile, 1)
    parts = [events_of(events, 1, engine, 2) for engine in range(2)]
    assert sorted(e.name for part in parts for e in part) == sorted(e.name for e in events)
    for part in parts:
        names = {event.name for event in part}
        assert len(names) > len(events) // 4
        assert all(event.request in names for event in part if isinstance(event, Abort))


def test_what_an_engine_with_other_weights_has_written_is_noticed(monkeypatch):
    """After a reset of one engine the other one would find what it writes from then on."""
    monkeypatch.setattr(Generation, "reset", lambda *_, **__: None)
    findings = findings_of(shared_profile(num_resets=8), range(6))
    assert findings
    assert all(f.promise == "I10" and "before a reset" in f.detail for f in findings), findings


# ---- what fails is written again ----------------------------------------------------------------


@pytest.mark.parametrize("name", ["tiers", "tiers-hybrid-lazy", "tiers-shared", "tiers-far"])
def test_of_writes_of_which_one_in_thirty_fails_all_are_there_in_the_end(name):
    profile = replace(PROFILES[name], faults={})
    profile = replace(profile, tiers=tuple(replace(t, fails_one_in=30) for t in profile.tiers))
    counts: Counter[str] = Counter()
    for seed in range(3):
        fleet = Fleet(profile, seed, make_events(profile, seed), make_stores(profile))
        fleet.go()
        fleet.close()
        for each in fleet.runs:
            counts.update(each.core.counts)
    assert counts["retried_spill_blocks"] > 0
    assert counts['dropped_spill_blocks{reason="refused"}'] == 0


def test_where_tiers_fail_in_every_way_writes_are_tried_again():
    assert sum(run("tiers-faults", seed).counts["retried_spill_blocks"] for seed in range(3)) > 0


# ---- what checkers make of it ------------------------------------------------------------------


def test_wrong_words_that_a_tier_hands_out_as_right_are_found():
    profile = replace(PROFILES["tiers-faults"], faults={TierFault.SUBVERT: 60})
    findings = findings_of(profile, range(6))
    assert findings
    assert all(f.promise == "I10" and "is published" in f.detail for f in findings), findings


def test_objects_of_before_a_reset_that_are_found_again_are_noticed(monkeypatch):
    monkeypatch.setattr("tests.simulator.engine_core.namespace_of", lambda rank, generation: b"\0")
    profile = PROFILES["tiers-faults"]
    profile = replace(profile, shape=replace(profile.shape, tensor_ranks=1), faults={})
    profile = replace(profile, workload=replace(profile.workload, num_resets=12))
    findings = findings_of(profile, range(6))
    assert findings
    assert all(f.promise == "I10" and "before a reset" in f.detail for f in findings), findings


def test_what_has_changed_in_host_memory_is_not_spilled():
    profile = replace(PROFILES["tiers-hybrid-lazy"], faults={FaultKind.FLIP: 40})
    assert not findings_of(profile, range(2))
