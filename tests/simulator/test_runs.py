"""Fixed seeds of every profile, regression seeds, and what a run must be to be worth anything."""

import functools
import itertools
import math
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from safe_offload.compat.engine_core import resets
from safe_offload.scheduler.loads.cost import TierCosts
from safe_offload.scheduler.pending import Store
from safe_offload.scheduler.stores.stores import Stores
from safe_offload.scheduler.tiers.tiered_hits import Stage, TieredHits
from tests.counts import num_failed
from tests.simulator.checkers import Checkers
from tests.simulator.earnings import Earned
from tests.simulator.findings import Finding
from tests.simulator.floors import FLOORS, num_floor_seeds
from tests.simulator.profiles import PROFILES
from tests.simulator.run import Result, findings_of, never_injected, run
from tests.simulator.shrink import shrink
from tests.simulator.swarm import BY_PRIORITY

SEEDS = dict.fromkeys(PROFILES, (0, 1)) | dict.fromkeys(
    ("foreign-ids", "all-faults", "tiers"), (1, 4)
)
SEEDS |= {"resets": (4, 6), "shared-sparse": (4, 5), "tiers-hybrid-lazy": (4, 5)}
SEEDS |= dict.fromkeys(
    (
        "remote-last",
        "mamba-gpu",
        "mamba-large-lazy",
        "repeats",
        "tiers-tenants",
        "node",
    ),
    (1, 0),
)
SEEDS |= {"spoilt": (1, 0), "tiers-shared": (2, 3), "in-step-faults": (3, 4)}
"""Two that earn enough, one of them with our own checks; `make sim` runs more."""
NEED_BOTH = ("loads-fail", "tiers-far", "all-faults", "failing", "flips")
BY_DAY = {name: seeds if name in NEED_BOTH else seeds[-1:] for name, seeds in SEEDS.items()}
"""Of most profiles the last one alone earns enough."""

REGRESSIONS = {
    # After a reset that vLLM refused, a request found its own blocks of before it again.
    "what an outdated request finds again": ("swarm", 5019),
    # It came in the step in which the other filled its first block, and what it could not store of
    # what it computed then was stored later.
    "what is computed from what an outdated request has": ("resets", 22),
    # It was preempted, and another ended before the next step was planned.
    "rescue of what is of before a reset": ("shared-sparse", 1022),
    # finished_sending of a request that was aborted while its load still wrote its blocks.
    "sent while a load writes": ("foreign-ids", 9),
    # Two requests whose loads have landed hold enough blocks that neither can go on.
    "loads starve one another": ("lazy-pressure", 69),
    # A load fails, vLLM frees its blocks, and the request needs more of them than others leave it.
    "a failed load that begins again": ("all-faults", 10059),
    # vLLM reserves for a load that failed, and counts it against the next one of the request.
    "a second load after a failed one": ("loads-fail", 23),
    # Loads failed at a reset, after which no block is shared any more; vLLM came to the first of
    # them, found too few blocks for all that it needs, and never came to those that held the rest.
    "blocks of failed loads that vLLM does not come to": ("loads-fail", 192),
    # A load had landed at a reset; its request gave the blocks back and loaded again, and others
    # waited for it as for one that vLLM has to come to.
    "a second load after one that had landed": ("priority:shared-stalls", 29),
    # A window slid on in a step in which its request found no block; preempted in the next, it had
    # blocks rescued that another request had overwritten.
    "rescue of what was overwritten": ("hybrid-gpu", 2098),
    # The only block that is free is the source of a store, and is given to the same prompt.
    "the same hash in the same block": ("repeats", 54),
    # Blocks stayed reserved for requests that had given theirs back at a reset.
    "reserved for who gave back what had landed": ("shared-stalls", 23),
    "what another engine overwrote before its spill was leased": ("node-tiers", 83),
    "what another engine overwrote before it was pinned": ("node-pins", 132),
    # It had learned its hashes; one that learned the same later took them along when it ended.
    "tokens of what is rescued": ("priority:host-pressure", 1),
    # A store settled into a prefix that was scanned once more later: one slot, leased twice.
    "one slot twice in a prefix": ("plain", 22),
    # Lazy: a step that computes nothing loads into blocks of a request that has just finished; they
    # were rescued a step later.
    "rescue a step too late": ("lazy-pressure", 0),
    # A store that settled after a rank had died waited to be spilled, and no plan came any more.
    "idle with spills that wait": ("swarm", 1827),
    # What a hit inside a block needs was taken for what only the host needs.
    "what vLLM keeps inside a block": ("shared-sparse", 13),
    # Lazy: what woke the engine for a tier that had been silent had blocks stored and spilled anew.
    "woken without end": ("swarm", 40019),
}
"""Seeds that broke a promise once, and what was wrong."""


@functools.cache
def run_checked(profile: str, seed: int) -> Result:
    result = run(profile, seed, internal_checks=bool(seed % 2))
    assert result.finding is None, f"python -m tests.simulator --profile {profile} --seed {seed}"
    return result


@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize(
    "seeds",
    [pytest.param(BY_DAY, id="by day"), pytest.param(SEEDS, id="all", marks=pytest.mark.nightly)],
)
def test_no_promise_is_broken_and_enough_is_earned(profile, seeds):
    earned = Earned()
    for seed in seeds[profile]:
        earned += run_checked(profile, seed).earned
    assert earned.what_is_below(FLOORS[profile]) == ""


@pytest.mark.parametrize(
    "profile",
    [
        pytest.param(
            name, marks=() if name in ("lazy-priority", "mamba-gpu") else pytest.mark.nightly
        )
        for name in PROFILES
    ],
)
def test_of_every_profile_what_no_step_has_computed_is_found_nowhere(profile):
    """By priority vLLM takes requests out of the step in which it has hashed blocks for them."""
    for seed in range(2):
        run_checked(BY_PRIORITY + profile, seed)


@pytest.mark.parametrize(
    "profile",
    [
        pytest.param(name, marks=() if name == "tenants" else pytest.mark.nightly)
        for name in PROFILES
        if PROFILES[name].faults
    ],
)
def test_every_fault_that_a_profile_names_happens(profile):
    seeds, injected = range(num_floor_seeds(profile)), Counter[str]()
    for seed in seeds:
        injected += run_checked(profile, seed).injected
    assert never_injected(profile, seeds, injected) == []


def test_a_connector_that_stores_nothing_is_seen(monkeypatch):
    """No promise is broken by it."""
    monkeypatch.setattr(Stores, "add", lambda *args, **kwargs: 0)
    monkeypatch.setattr(Stores, "add_whole", lambda *args, **kwargs: True)
    result = run("plain", 0)
    assert result.finding is None
    assert "stored 0.00" in result.earned.what_is_below(FLOORS["plain"])


def test_fetches_in_stages_break_no_promise(monkeypatch):
    """The simulator's tiers bring nothing too late for one stage unless it is said so."""
    num_stages = []
    find_stages = TieredHits.stages

    def stages(*args: Any) -> list[Stage]:
        found = find_stages(*args)
        num_stages.append(len(found))
        return found

    monkeypatch.setattr(TierCosts, "is_soon", lambda *_: False)
    monkeypatch.setattr(TieredHits, "stages", stages)
    assert not findings_of(PROFILES["tiers-hybrid-lazy"], range(2))
    assert max(num_stages) > 2


@pytest.mark.parametrize("name", REGRESSIONS)
def test_a_seed_that_broke_a_promise_once_keeps_it(name):
    profile, seed = REGRESSIONS[name]
    assert run(profile, seed).finding is None


def test_every_kind_of_event_happens():
    totals: Counter[str] = Counter()
    for profile, seeds in BY_DAY.items():
        for seed in seeds:
            totals.update(run_checked(profile, seed).counts)
    for name in (
        "stored_blocks",
        "loaded_blocks",
        "hit_tokens",
        "fenced_stores",
        "unpublished_blocks",
        "skipped_blocks",
        "rescued_blocks",
        "duplicate_reports",
        'dropped_ids{reason="unknown"}',
        'dropped_ids{reason="unowned"}',
        'dropped_ids{reason="premature"}',
        "overdue_transfers",
        "checksum_mismatches",
        "given_up_requests",
        "skipped_stores",
    ):
        assert totals[name] > 0, name
    assert num_failed(totals, "load") > 0
    assert num_failed(totals, "store") > 0
    assert totals["contained_errors"] == 0


def test_bits_that_flip_are_read_if_nobody_compares():
    """What the profile `flips` would be worth if its checker saw nothing."""
    flips = PROFILES["flips"]
    shape = replace(flips.shape, extra={"verify": "off"})
    findings = findings_of(replace(flips, shape=shape), range(6))
    assert findings
    assert all(f.promise == "I6" and "reads at" in f.detail for f in findings)


def test_a_finding_in_a_step_before_a_reset_is_not_lost(monkeypatch):
    """The connector contains what these steps raise; vLLM then refuses the reset."""
    settle, after_step, is_settling = resets._settle, Checkers.after_step, []

    def see(engine_core: Any) -> None:
        is_settling.append(True)
        settle(engine_core)
        is_settling.clear()

    def fail(checkers: Checkers) -> None:
        after_step(checkers)
        if is_settling:
            raise Finding("I6", "seen")

    monkeypatch.setattr(resets, "_settle", see)
    monkeypatch.setattr(Checkers, "after_step", fail)
    assert str(run("shared-stalls", 2).finding) == "I6: seen"


def test_a_reset_waits_for_loads_in_steps_however_long_these_take(monkeypatch):
    monkeypatch.setattr(resets, "monotonic", itertools.count(0, 100.0).__next__)
    assert run("shared-stalls", 2).finding is None


def test_a_run_is_shrunk_and_its_events_repeat_it(monkeypatch):
    monkeypatch.setattr(Store, "given_away", lambda _: False)
    failed = _first_failure("late-copies")
    small = shrink(failed, internal_checks=False, seconds_max=math.inf)
    assert small.finding is not None
    assert small.finding.promise == "I6"
    assert len(small.events) <= len(failed.events) // 4
    again = run(small.profile, small.seed, only={event.name for event in small.events})
    assert again.trace == small.trace
    assert str(again.finding) == str(small.finding)


def _first_failure(profile: str) -> Result:
    for seed in range(20):
        result = run(profile, seed)
        if result.finding is not None:
            return result
    raise AssertionError("fences are not planned and nothing is found")
