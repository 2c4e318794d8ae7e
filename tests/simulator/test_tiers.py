"""The stand-in for a tier: it does what a tier promises, and what its faults say."""

from collections import Counter
from dataclasses import replace

import pytest

from safe_offload.scheduler.tiers.tiers import Tiers
from tests.simulator.events import FaultKind
from tests.simulator.profiles import PROFILES, Profile
from tests.simulator.run import Fleet, findings_of, make_stores
from tests.simulator.tiers import (
    TierFault,
)
from tests.simulator.workload import make_events

# ---- engines that share ------------------------------------------------------------------------


def shared_profile(**workload: int) -> Profile:
    profile = PROFILES["tiers-shared"]
    return replace(profile, workload=replace(profile.workload, **workload))


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
