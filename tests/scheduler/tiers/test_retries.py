"""Writes to a tier that failed, and are tried again while the host has their blocks."""

import itertools
from collections import Counter
from dataclasses import replace
from random import Random
from typing import Any

import pytest

from safe_offload.config.tier_url import Location
from safe_offload.config.tiers import TierConfig
from safe_offload.protocol import ALL_TIERS, FailureReason, StepReport
from safe_offload.scheduler.pending import Write
from safe_offload.scheduler.tiers.spills import AWAKE_S, PAUSES_S, Retries
from tests.counts import num_failed
from tests.scheduler.features import tiers_of
from tests.scheduler.tiers.tier_rig import WAIT_S, StandInTier, TierRig
from tests.simulator.groups import BLOCK_TOKENS

NUM_TRIES = 1 + len(PAUSES_S)
TIER = TierConfig(Location("file", "/nowhere"), wait_s=WAIT_S)
LARGE: dict[str, Any] = {"num_blocks": 600, "num_slots": 1600, "max_model_len": 2048}
REFUSED = 'dropped_spill_blocks{reason="refused"}'
EVICTED = 'dropped_spill_blocks{reason="evicted"}'


def tries(rig: TierRig) -> Counter[bytes]:
    """How often each block was written."""
    return Counter(h for spill in rig.spills for h in spill.keys.hashes)


def settle(rig: TierRig) -> None:
    """Let all pauses pass."""
    rig.drain()
    retries = tiers_of(rig.planner).spills.retries
    for number in range(200):
        if not len(retries):
            break
        rig.clock.advance(max(0.0, retries.due_s - rig.clock.now_s) + 0.1)
        rig.run_alone(f"wake{number}", [1, 2], max_tokens=1)
        rig.drain()


def test_one_write_in_thirty_fails_and_another_engine_hits_all_of_a_prompt(make_tiers):
    for seed in range(8):
        stream, num_tokens = Random(seed), 300 * BLOCK_TOKENS
        tier = StandInTier(fails=lambda *_, stream=stream: stream.random() < 1 / 30)
        first = make_tiers(tier=tier, **LARGE)
        first.run_alone("a", first.prompt(num_tokens + 1, 1), max_tokens=1)
        first.drain()
        assert first.counts["retried_spill_blocks"] > 0
        assert first.counts[REFUSED] == 0
        second = make_tiers(tier=tier, **LARGE)
        assert second.run_alone("b", second.prompt(num_tokens + 1, 1)) == num_tokens


@pytest.mark.parametrize("failure", [None, FailureReason.COPY_FAILED])
def test_a_block_that_no_tier_takes_has_so_many_tries_and_then_no_more(make_tiers, failure):
    rig = make_tiers()
    rig.tier.failure, rig.tier.fails = failure, lambda *_: True
    rig.run_alone("a", rig.prompt(33, 1), max_tokens=1)
    settle(rig)
    assert set(tries(rig).values()) == {NUM_TRIES}
    assert rig.counts["retried_spill_blocks"] == 8 * len(PAUSES_S)
    assert rig.counts[REFUSED] == 8
    assert rig.counts["spilled_blocks"] == 0
    assert num_failed(rig.counts, "spill") == (NUM_TRIES if failure else 0)
    rig.check_idle()
    assert rig.planner.gauges()["leased_slots"] == 0


def test_what_a_tier_refuses_is_written_once(make_tiers):
    rig = make_tiers()
    rig.tier.refused = True
    rig.run_alone("a", rig.prompt(33, 1), max_tokens=1)
    settle(rig)
    assert set(tries(rig).values()) == {1}
    assert rig.counts[REFUSED] == 8
    assert rig.counts["retried_spill_blocks"] == 0


def test_what_failed_first_is_written_before_what_is_new(make_tiers):
    """Of a prompt, so, the head; while few spills are under way there is time for it."""
    rig = make_tiers(num_slots=64)
    failing = iter([True])
    rig.tier.fails = lambda *_: next(failing, False)
    rig.add("a", rig.prompt(65, 1), max_tokens=1)
    rig.finish()
    head, second, *later = rig.spills
    assert second.keys.hashes[0] == head.keys.hashes[0]
    assert len(second.keys.hashes) > 1
    assert not {*head.keys.hashes}.intersection(*(spill.keys.hashes for spill in later))
    assert rig.counts["spilled_blocks"] == 16


def test_while_a_tier_takes_nothing_each_block_is_tried_before_one_is_tried_twice(make_tiers):
    rig = make_tiers(num_slots=64)
    rig.tier.fails = lambda *_: True
    rig.run_alone("a", rig.prompt(65, 1), max_tokens=1)
    rig.drain()
    tried = [h for spill in rig.spills for h in spill.keys.hashes]
    assert len({*tried[:16]}) == 16
    assert len(tried) > 16


def test_what_the_host_evicts_meanwhile_is_not_written(make_tiers):
    rig = make_tiers(num_slots=16)
    rig.tier.fails = lambda *_: True
    rig.run_alone("a", rig.prompt(33, 1), max_tokens=1)
    for number in range(3):
        rig.step()
        rig.run_alone(f"b{number}", rig.prompt(65, 10 + number), max_tokens=1)
    settle(rig)
    assert rig.counts[EVICTED] > 0
    assert max(tries(rig).values()) <= NUM_TRIES
    assert rig.counts[EVICTED] + rig.counts[REFUSED] == rig.counts["stored_blocks"]
    rig.check_idle()


@pytest.mark.parametrize("under_way", [False, True])
def test_after_a_reset_nothing_of_before_is_written(make_tiers, under_way):
    rig = make_tiers()
    rig.tier.fails = lambda *_: True
    rig.add("a", rig.prompt(33, 1), max_tokens=1)
    rig.step_until(lambda: bool(rig.spills))
    if under_way:
        rig.tier.held = {"spill"}
        rig.step_until(lambda: len(rig.spills) == 2)
    rig.step_until(lambda: not rig.scheduler.requests)
    rig.scheduler.reset_prefix_cache(reset_connector=True)
    num_before = len(rig.spills)
    rig.finish()
    settle(rig)
    assert len(rig.spills) == num_before
    rig.check_idle()


def test_when_a_rank_has_died_nothing_waits_for_another_try(make_tiers):
    rig = make_tiers()
    rig.tier.fails, rig.tier.held = lambda *_: True, {"spill"}
    rig.add("a", rig.prompt(33, 1), max_tokens=1)
    rig.step_until(lambda: bool(rig.spills))
    died = StepReport(lost_ranks=(0,))
    rig.mutate_outputs.append(lambda _, outputs: rig.add_report(outputs[0], died))
    rig.step()
    rig.step()
    assert rig.planner.statistics().is_disabled
    rig.tier.held.clear()
    rig.step_until(lambda: not rig.scheduler.has_requests(), max_steps=20)
    assert len(rig.spills) == 1
    rig.check_idle()


def test_an_idle_engine_does_not_step_long_for_a_tier_that_takes_nothing(make_tiers):
    rig = make_tiers()
    rig.tier.fails = lambda *_: True
    rig.add("a", rig.prompt(33, 1), max_tokens=1)
    rig.step_until(lambda: bool(rig.spills))
    began_s = rig.clock.now_s
    rig.step_until(lambda: not rig.scheduler.has_requests(), max_steps=50)
    assert AWAKE_S <= rig.clock.now_s - began_s < AWAKE_S + 5
    assert set(tries(rig).values()) == {4}
    rig.tier.fails = lambda *_: False
    rig.clock.advance(PAUSES_S[3])
    rig.run_alone("b", rig.prompt(5, 2), max_tokens=1)
    rig.drain()
    assert rig.counts["spilled_blocks"] == 8 + 1
    rig.check_idle()


def test_only_the_tiers_that_failed_are_written_to_again(make_tiers):
    rig = make_tiers(tiers=(TIER, replace(TIER, location=Location("file", "/far"))))
    turn = itertools.count()
    rig.tier.fails, rig.tier.again = lambda *_: next(turn) < 3, 0b10
    rig.run_alone("a", rig.prompt(33, 1), max_tokens=1)
    rig.drain()
    first, second = rig.spills
    assert (first.targets, second.targets) == (b"", bytes([0b10] * 3))
    assert second.keys.hashes == first.keys.hashes[:3]


def test_a_block_that_one_rank_could_not_write_is_written_by_all_again(make_tiers):
    rig = make_tiers(tensor_ranks=2)
    turn = itertools.count()
    rig.tier.fails = lambda rank, _: rank == 1 and next(turn) < 3
    rig.run_alone("a", rig.prompt(33, 1), max_tokens=1)
    rig.drain()
    assert sorted(tries(rig).values()) == [1] * 5 + [2] * 3
    assert rig.counts["spilled_blocks"] == 8


def test_a_slot_whose_write_failed_is_not_evicted_first(make_tiers):
    rig = make_tiers(num_slots=64, tiers=(replace(TIER, store="evicted"),))
    stream = Random(1)
    rig.tier.fails = lambda *_: stream.random() < 0.3
    for number in range(40):
        rig.run_alone(f"r{number}", rig.prompt(17, number), max_tokens=1)
        rig.step()
        rig.step()
    rig.drain()
    assert rig.counts["retried_spill_blocks"] > 0
    assert rig.counts[EVICTED] == rig.counts[REFUSED] == 0
    rig.check_idle()


# ---- what waits --------------------------------------------------------------------------------


def write(slot: int, num_failures: int = 0) -> Write:
    return Write(slot, 0, bytes([slot]), 0, ALL_TIERS, num_failures)


def test_what_waits_is_bounded_and_the_first_stay(monkeypatch):
    monkeypatch.setattr("safe_offload.scheduler.tiers.spills.WAITING_MAX", 2)
    retries = Retries()
    assert [retries.add(write(slot), ALL_TIERS, 0.0) for slot in (1, 2, 3)] == [True, True, False]
    assert retries.discard([2, 3]) == 1
    assert [each.slot for each in retries.take(9, 0.0)] == [1]
