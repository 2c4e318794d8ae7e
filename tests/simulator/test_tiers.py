"""The stand-in for a tier: it does what a tier promises, and what its faults say."""

from dataclasses import replace

from safe_offload.scheduler.tiers.tiers import Tiers
from tests.simulator.events import FaultKind
from tests.simulator.profiles import PROFILES
from tests.simulator.run import findings_of
from tests.simulator.tiers import TierFault


def test_what_an_engine_with_other_weights_has_written_is_noticed(monkeypatch):
    """After a reset of one engine the other one would find what it writes from then on."""
    monkeypatch.setattr(Tiers, "reset", lambda tiers, **_: tiers.stop())
    profile = PROFILES["tiers-shared"]
    profile = replace(profile, workload=replace(profile.workload, num_resets=8))
    findings = findings_of(profile, range(6))
    assert findings
    assert all(f.promise == "I10" and "before a reset" in f.detail for f in findings), findings


def test_wrong_words_that_a_tier_hands_out_as_right_are_found():
    profile = replace(PROFILES["tiers-faults"], faults={TierFault.SUBVERT: 60})
    findings = findings_of(profile, range(6))
    assert findings
    assert all(f.promise == "I10" and "is published" in f.detail for f in findings), findings


def test_what_has_changed_in_host_memory_is_not_spilled():
    profile = replace(PROFILES["tiers-hybrid-lazy"], faults={FaultKind.FLIP: 40})
    assert not findings_of(profile, range(2))
