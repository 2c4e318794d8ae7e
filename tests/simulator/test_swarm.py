"""Profiles drawn from seeds, and the last phase of their runs, which must settle within a bound."""

from dataclasses import fields, replace

import pytest

from safe_offload.scheduler.planner import Planner
from tests.simulator.device import CopyFault, Device
from tests.simulator.earnings import Earned
from tests.simulator.events import FaultKind
from tests.simulator.findings import Finding
from tests.simulator.floors import FLOORS, SWARM_SEEDS
from tests.simulator.profiles import PROFILES, Profile, Workload
from tests.simulator.run import Run, run
from tests.simulator.swarm import SWARM, draw
from tests.simulator.tiers import TierFault
from tests.simulator.vllm_setup import EngineShape
from tests.simulator.workload import make_events

NUM_DRAWS = 300
NOT_DRAWN = {"connector", "max_model_len", "page_bytes", "recipe", "remote", "remote_failures"}
NOT_DRAWN |= {"is_eagle", "max_chunk_tokens"}
"""Fields of a shape: another connector than ours, what follows from the workload, what only a
benchmark sets, a model, another connector beside ours, which has profiles of its own; what models
with drafts have, and what only tests of single requests set."""


def options(part: EngineShape | Workload) -> set[str]:
    usual = type(part)()
    names = [option.name for option in fields(part)]
    return {name for name in names if getattr(part, name) != getattr(usual, name)}


def go(profile: Profile, seed: int) -> Run:
    current = Run(profile, seed, make_events(profile, seed))
    try:
        current.go()
    finally:
        current.core.close()
    return current


# ---- what is drawn -----------------------------------------------------------------------------


def test_every_option_is_drawn():
    """But tenants, pins, hints and engines that share, which have profiles of their own."""
    drawn = [draw(seed) for seed in range(NUM_DRAWS)]
    shapes = set().union(*(options(profile.shape) for profile in drawn))
    workloads = set().union(*(options(profile.workload) for profile in drawn))
    assert {option.name for option in fields(EngineShape)} - shapes <= NOT_DRAWN
    assert {option.name for option in fields(Workload)} - workloads == {"has_wishes"}
    faults = {kind for profile in drawn for kind in profile.faults}
    elsewhere = {TierFault.SUBVERT, FaultKind.TENANTS, FaultKind.DIE}
    assert faults == {*CopyFault, *FaultKind, *TierFault} - elsewhere
    keys = {key for profile in drawn for key in profile.shape.extra}
    assert keys == {
        "lazy_offload",
        "eviction_policy",
        "verify",
        "min_load_tokens",
        "max_inflight_bytes",
        "transfer_timeout_s",
        "check_invariants",
        "load_in_step",
        "tiers",
    }


def test_vllm_dies_of_chunks_in_blocks_of_several_sizes():
    profile = Profile("", EngineShape(groups=("chunk:16", "full@8"), num_blocks=60, num_slots=90))
    with pytest.raises(Finding, match="AssertionError"):
        go(profile, 0)


def earned_by_swarm(num_seeds: int) -> Earned:
    earned = Earned()
    for seed in range(num_seeds):
        result = run(SWARM, seed)
        assert result.finding is None, f"python -m tests.simulator --profile swarm --seed {seed}"
        earned += result.earned
    return earned


def test_no_promise_is_broken_by_what_is_drawn():
    earned_by_swarm(12)


@pytest.mark.nightly
def test_enough_is_earned_by_what_is_drawn():
    assert earned_by_swarm(SWARM_SEEDS).what_is_below(FLOORS[SWARM]) == ""


# ---- the last phase ----------------------------------------------------------------------------

SETTLES = replace(
    PROFILES["late-copies"],
    shape=replace(PROFILES["late-copies"].shape, num_blocks=400),  # for all at once
    copy_ticks_max=0,
    settles=True,
)


def test_faults_and_aborts_stop_with_the_last_request():
    faults = {CopyFault.STALL: 200, FaultKind.SQUEEZE: 8, FaultKind.REPORT_LATE: 8}
    profile = replace(SETTLES, faults=faults, workload=Workload(num_steps=20, num_aborts=40))
    current = go(profile, 1)
    calm = next(n for n, line in enumerate(current.trace.lines) if "no more faults" in line)
    assert not any(line.endswith("later") for line in current.trace.lines[calm:])
    assert any("step" in line for line in current.trace.lines[calm:])
    assert all(not worker.device.faults for worker in current.core.workers)


def test_an_engine_that_never_goes_idle_is_found(monkeypatch):
    monkeypatch.setattr(Planner, "has_pending_push_work", lambda planner: True)
    with pytest.raises(Finding, match=r"I7: (not settled|nothing has moved)"):
        go(SETTLES, 0)


def test_a_copy_that_goes_on_standing_still_is_found(monkeypatch):
    monkeypatch.setattr(Device, "recover", lambda device: None)
    shape = PROFILES["late-copies"].shape
    profile = replace(SETTLES, shape=shape, faults={CopyFault.STALL: 200})
    findings = []
    for seed in range(4):
        try:
            go(profile, seed)
        except Finding as finding:
            findings.append(str(finding))
    assert any("not settled" in finding for finding in findings)
