"""The stand-in for a tier: it does what a tier promises, and what its faults say."""

import itertools
from collections import Counter
from collections.abc import Coroutine
from dataclasses import replace
from typing import Any, TypeVar

import pytest

from safe_offload.scheduler.tiers.tiers import Tiers
from safe_offload.tiers.base import Name, Result
from tests.simulator.chance import Chance
from tests.simulator.device import Device, DeviceOptions, Memory
from tests.simulator.events import Abort, FaultKind
from tests.simulator.profiles import PROFILES, Profile
from tests.simulator.run import Fleet, findings_of, make_stores, run
from tests.simulator.tiers import (
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

    def do(self, work: Coroutine[Any, Any, T]) -> T:
        task = self.loop.create_task(work)
        for _ in range(TICKS_MAX):
            self.device.tick()
            self.loop.run_once()
            if task.done():
                return task.result()
        raise AssertionError("it has not ended")

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
    monkeypatch.setattr(Tiers, "reset", lambda tiers, **_: tiers.stop())
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
