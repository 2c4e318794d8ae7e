"""Tiers, as vLLM's real scheduler meets them: what they have becomes an ordinary host hit."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from safe_offload.config.tier_url import Location
from safe_offload.config.tiers import TierConfig
from safe_offload.protocol import (
    FailureReason,
    HostFacts,
    MemoryFacts,
    MemoryKind,
    Outcome,
    Presence,
    StepReport,
)
from safe_offload.scheduler.loads.cost import KEPT_SAMPLES
from safe_offload.scheduler.tiers.tiers import Tiers
from tests.counts import num_failed
from tests.scheduler.features import tiers_of
from tests.scheduler.rig import times_of_waiting
from tests.scheduler.tiers.tier_rig import WAIT_S, TierRig
from tests.simulator.groups import BLOCK_TOKENS

MakeTierRig = Callable[..., TierRig]
VERSIONED = (TierConfig(Location("file", "/nowhere"), wait_s=WAIT_S, model_version="v1"),)
NUM_BLOCKS = 10
PREFIX_TOKENS = NUM_BLOCKS * BLOCK_TOKENS


@pytest.fixture
def small_pieces(monkeypatch):
    """Fetches are cut into pieces of two blocks."""
    monkeypatch.setattr("safe_offload.scheduler.tiers.fetches.PIECE_BLOCKS_MIN", 2)


def make_warm(make_tiers: MakeTierRig, **options: Any) -> TierRig:
    """An engine that has just been started, on a tier that has the prefix of `prompt`."""
    first = make_tiers(**options)
    first.run_alone("warm", prompt(first, 0), max_tokens=1)
    first.drain()
    assert first.tier.objects
    second = make_tiers(tier=first.tier, **options)
    second.counts.clear()
    return second


def prompt(rig: TierRig, number: int) -> list[int]:
    """The shared prefix and a tail that no other has."""
    return [*rig.prompt(PREFIX_TOKENS, 1), *rig.prompt(3, 100 + number)]


def keys_in(messages: Sequence[Any]) -> list[tuple[int, bytes]]:
    """Groups and hashes that messages name."""
    return [k for m in messages for k in zip(m.keys.group_ids, m.keys.hashes, strict=True)]


def fetch_for(rig: TierRig, name: str) -> None:
    """Add a request, and step until something is fetched for it."""
    rig.add(name, prompt(rig, 1))
    rig.step_until(lambda: bool(rig.fetches))


def status(rig: TierRig, name: str) -> str:
    return str(rig.scheduler.requests[name].status.name)


HYBRIDS = [
    ("window:10", "full"),
    ("window:10@8", "full"),
    ("full", "mamba"),
    ("chunk:16", "full"),
    ("window:10", "window:6"),
]


# ---- what is not all there ---------------------------------------------------------------------


def keys_of(rig: TierRig) -> list[bytes]:
    """Hashes of the shared prefix, in order."""
    request = rig.send("hashes", prompt(rig, 1), 1)
    hashes = list(request.block_hashes)
    rig.abort("hashes")
    rig.step()
    return hashes[:NUM_BLOCKS]


def lose(rig: TierRig, block_hash: bytes, rank: int = 0) -> None:
    """The tier of a rank has a block no more."""
    for place in [p for p in rig.tier.objects if p[0] == rank and p[3] == block_hash]:
        del rig.tier.objects[place]


def test_of_what_is_there_the_first_part_is_hit(make_tiers):
    rig = make_warm(make_tiers)
    lose(rig, keys_of(rig)[6])
    assert rig.run_alone("a", prompt(rig, 1)) == 6 * BLOCK_TOKENS
    assert rig.counts["fetched_blocks"] == 6
    rig.check_idle()


def test_a_request_with_another_salt_does_not_find_it(make_tiers):
    """`cache_salt` keeps tenants apart in tiers too: their blocks have other names."""
    rig = make_warm(make_tiers)
    stored = {place[3] for place in rig.tier.objects}
    for salt in ("s", "t"):
        rig.add(salt, prompt(rig, 1), cache_salt=salt)
        rig.drain()
        assert rig.counts["hit_tokens"] == 0
    asked = [{key for _, key in keys_in([probe])} for probe in rig.probes]
    assert len(asked) == 2
    assert not asked[0] & asked[1]
    assert not (asked[0] | asked[1]) & stored
    assert rig.run_alone("a", prompt(rig, 2)) == PREFIX_TOKENS
    rig.check_idle()


def test_what_one_rank_lacks_nobody_has(make_tiers):
    rig = make_warm(make_tiers, tensor_ranks=3)
    hashes = keys_of(rig)
    lose(rig, hashes[7], rank=2)
    lose(rig, hashes[5], rank=0)
    assert rig.run_alone("a", prompt(rig, 1)) == 5 * BLOCK_TOKENS
    assert rig.counts["missed_blocks"] == 0, "it is not fetched"
    rig.check_idle()


@pytest.mark.parametrize("groups", [("full",), ("window:10", "full")], ids=str)
def test_what_was_there_and_does_not_come_is_computed(make_tiers, groups):
    rig = make_warm(make_tiers, tensor_ranks=2, groups=groups, num_blocks=150)
    hashes = keys_of(rig)
    rig.tier.lost = {(0, hashes[4]), (1, hashes[7])}
    hit_tokens = rig.run_alone("a", prompt(rig, 1))
    assert hit_tokens == (4 * BLOCK_TOKENS if len(groups) == 1 else 0)
    assert rig.counts["missed_blocks"] == (2 if len(groups) == 1 else 3)
    rig.check_idle()


@pytest.mark.parametrize("reason", [FailureReason.COPY_FAILED, FailureReason.TIMED_OUT])
def test_a_fetch_that_fails_is_a_miss(make_tiers, reason):
    rig = make_warm(make_tiers)
    rig.tier.failure = reason
    assert rig.run_alone("a", prompt(rig, 1)) == 0
    assert num_failed(rig.counts, "fetch") == 1
    assert rig.counts["fetched_blocks"] == 0
    rig.tier.failure = None
    rig.forget_gpu_cache()
    assert rig.run_alone("b", prompt(rig, 2)) == PREFIX_TOKENS, "what `a` has computed is stored"
    assert not rig.planner.gauges()["is_disabled"], "it can copy all the same"
    rig.check_idle()


# ---- what does not come in time ----------------------------------------------------------------


@pytest.mark.parametrize("kind", ["probe", "fetch"])
@pytest.mark.parametrize("shape", [{}, {"is_async": True}, {"groups": ("window:10", "full")}])
def test_the_wait_is_bounded_whatever_never_comes(make_tiers, kind, shape):
    """I9; what comes later is of use to the next."""
    rig = make_warm(make_tiers, **{"num_blocks": 150, **shape})
    rig.tier.held = {kind}
    times = times_of_waiting(rig, "a")
    rig.add("a", prompt(rig, 1))
    rig.step_until(lambda: "a" not in rig.scheduler.requests)
    rig.check_tokens("a", 4)
    assert WAIT_S - 2 <= times[-1] - times[0] <= WAIT_S
    assert rig.counts["tier_waits_cut"] == 1
    assert rig.counts["hit_tokens"] == 0
    rig.finish()
    rig.step()
    assert rig.counts["stale_reports"] == 0
    rig.check_idle()


@pytest.mark.usefixtures("small_pieces")
def test_nothing_is_waited_for_behind_a_gap(make_tiers):
    rig = make_warm(make_tiers)
    rig.tier.lost = {(0, keys_of(rig)[3])}
    rig.tier.held = {"fetch"}
    fetch_for(rig, "a")
    rig.answer(rig.fetches[1:2])
    rig.step_until(lambda: rig.counts["missed_blocks"] == 1)
    assert status(rig, "a") == "WAITING", "for what comes before the gap"
    rig.answer(rig.fetches[:1])
    rig.step_until(lambda: status(rig, "a") != "WAITING", max_steps=5)
    assert rig.counts["tier_waits_cut"] == 0
    rig.finish()
    assert rig.counts["hit_tokens"] == 3 * BLOCK_TOKENS
    rig.check_tokens("a", 4)
    rig.check_idle()


# ---- requests with one prefix ------------------------------------------------------------------


@pytest.mark.parametrize("groups", [("full",), ("window:10", "full")], ids=str)
def test_a_prefix_that_eight_want_is_asked_for_and_fetched_once(make_tiers, groups):
    rig = make_warm(make_tiers, groups=groups, num_blocks=150)
    names = [f"r{number}" for number in range(1, 9)]
    for number, name in enumerate(names, 1):
        rig.add(name, prompt(rig, number))
    rig.drain()
    for name in names:
        rig.check_tokens(name, 4)
    asked = keys_in(rig.probes)
    assert len(asked) == len(set(asked))
    fetched = keys_in(rig.fetches)
    assert len(fetched) == len(set(fetched)) == rig.counts["fetched_blocks"]
    assert rig.counts["hit_tokens"] == PREFIX_TOKENS, "one loads, the others wait for it"
    rig.check_idle()


# ---- aborts and resets -------------------------------------------------------------------------


def bring_to(rig: TierRig, moment: str) -> None:
    """Let a request come to a moment of its look-up."""
    rig.tier.held = {"added": {"probe"}, "asked": {"probe"}, "fetching": {"fetch"}}.get(
        moment, set()
    )
    reached: dict[str, Callable[[], bool]] = {
        "added": lambda: True,
        "asked": lambda: bool(rig.probes),
        "fetching": lambda: bool(rig.fetches),
        "landed": lambda: rig.counts["fetched_blocks"] > 0,
    }
    rig.probes.clear()
    rig.add("a", prompt(rig, 1))
    rig.step_until(reached[moment], max_steps=20)


@pytest.mark.parametrize("moment", ["added", "asked", "fetching", "landed"])
@pytest.mark.parametrize("shape", [{}, {"tensor_ranks": 2, "is_async": True}], ids=str)
def test_after_a_reset_nothing_that_tiers_had_is_hit(make_tiers, moment, shape):
    rig = make_warm(make_tiers, **shape)
    bring_to(rig, moment)
    before = rig.counts["fetched_blocks"]
    assert rig.scheduler.reset_prefix_cache(reset_connector=True)
    assert tiers_of(rig.planner).lookups.num_active == 0
    if moment == "landed":
        assert rig.planner.gauges()["leased_slots"] == 0
    rig.finish()
    rig.check_tokens("a", 4)
    assert rig.counts["hit_tokens"] == 0
    assert rig.counts["fetched_blocks"] == before
    rig.check_idle()
    (generation,) = {spill.generation for spill in rig.spills if spill is rig.spills[-1]}
    assert generation
    rig.fill_gpu_cache("filler", seed=77)
    rig.probes.clear()
    rig.run_alone("b", rig.prompt(PREFIX_TOKENS, 55))
    assert {probe.generation for probe in rig.probes} == {generation}
    rig.check_idle()


def test_in_doubt_the_engine_uses_only_what_it_writes_itself(make_tiers, package_log):
    """A rank says so when it has read the model's files; then messages have a generation."""
    rig = make_warm(make_tiers, tiers=VERSIONED)
    facts = HostFacts(0, MemoryFacts(MemoryKind.PAGEABLE, "no"), ("each",), doubts=("who knows",))
    rig.after_report = lambda report: report.aggregate(StepReport(host_facts=(facts,)))
    rig.run_alone("other", rig.prompt(PREFIX_TOKENS, 7))
    generation = tiers_of(rig.planner).generation
    assert len(generation) >= 32, "128 bits"
    assert rig.run_alone("a", prompt(rig, 1)) == 0
    assert rig.scheduler.reset_prefix_cache(reset_connector=True)
    assert tiers_of(rig.planner).generation == generation, (
        "a model_version is for this generation too"
    )
    told = [r.getMessage() for r in package_log if "who knows" in r.getMessage()]
    assert len(told) == 1
    rig.check_idle()


def test_new_weights_in_a_running_engine_have_a_generation_whatever_the_model_version(
    make_tiers, package_log
):
    """It names those that the engine was started with."""
    rig = make_warm(make_tiers, tiers=VERSIONED)
    rig.connector.weights_changed("a test says so")
    assert rig.run_alone("a", prompt(rig, 1)) == 0
    generation = tiers_of(rig.planner).generation
    assert generation
    assert rig.scheduler.reset_prefix_cache(reset_connector=True)
    assert tiers_of(rig.planner).generation == generation, (
        "which the operator vouches for from then on"
    )
    rig.check_idle()
    assert [r for r in package_log if "a test says so" in r.getMessage()] == []
    rig.run_alone("b", prompt(rig, 1))
    rig.connector.weights_changed("a test says so again")
    told = [r.getMessage() for r in package_log if "a test says so again" in r.getMessage()]
    assert len(told) == 1, "what was held is told"


@pytest.mark.parametrize("shape", [{}, {"is_async": True}, {"tiers": VERSIONED}], ids=str)
@pytest.mark.parametrize("is_late", [False, True], ids=["between steps", "in a step"])
def test_what_runs_while_a_trainer_loads_weights_reaches_no_engine_of_the_old_ones(
    make_tiers, shape, is_late
):
    """Only the model is told of them; what the request had computed before is in the tier."""
    rig = make_tiers(**shape)
    text = prompt(rig, 1)
    request = rig.add("runs on", text, max_tokens=61)
    rig.step_until(lambda: bool(rig.tier.objects))

    def load(_: Any = None) -> None:
        rig.connector.model_loads.count += 1

    if is_late:
        rig.before_update.append(load)
    else:
        load()
    rig.step()
    rig.before_update.clear()
    num_before = request.num_computed_tokens
    rig.drain()
    assert num_before < request.num_computed_tokens - BLOCK_TOKENS
    of_new = rig.prompt(PREFIX_TOKENS, 8)
    num_objects = len(rig.tier.objects)
    rig.run_alone("by the new ones", of_new)
    assert len(rig.tier.objects) > num_objects
    rig.check_idle()
    second = make_tiers(tier=rig.tier, **shape)
    num_hit = second.run_alone("b", [*text, *rig.answers["runs on"], *rig.prompt(3, 7)])
    assert PREFIX_TOKENS <= num_hit <= num_before
    assert second.run_alone("c", of_new) == 0


# ---- preemption --------------------------------------------------------------------------------


def test_who_is_preempted_looks_up_again_within_its_bound(make_tiers):
    rig = make_warm(make_tiers)
    rig.tier.held = {"probe"}
    first_times = times_of_waiting(rig, "a")
    request = rig.add("a", prompt(rig, 1), max_tokens=12)
    rig.step_until(lambda: len(first_times) > 40)
    rig.tier.held.clear()
    rig.step_until(lambda: request.num_output_tokens > 2)
    assert rig.counts["tier_lookups"] == 1
    assert rig.counts["tier_waits_cut"] == 0
    waited_s = first_times[-1] - first_times[0]
    rig.tier.held = {"probe"}
    # The host loses what it has, and the GPU too; the tier does not.
    assert rig.scheduler.reset_prefix_cache(reset_running_requests=True)
    rig.planner.hits.slots.forget_all()
    times = times_of_waiting(rig, "a")
    rig.step_until(lambda: status(rig, "a") == "RUNNING")
    assert rig.counts["tier_lookups"] == 2
    assert times
    assert 0 < times[-1] - times[0] <= WAIT_S - waited_s
    rig.finish()
    rig.check_tokens("a", 12)
    rig.check_idle()


# ---- the share of slots ------------------------------------------------------------------------


def test_a_fetch_longer_than_its_share_brings_the_first_part(make_tiers):
    """I11; `check_invariants` compares after every step."""
    rig = make_warm(make_tiers, num_slots=24)
    assert rig.run_alone("a", prompt(rig, 1)) == 6 * BLOCK_TOKENS
    assert rig.counts["fetch_blocks_no_slot"] == NUM_BLOCKS - 6
    rig.check_idle()


def test_who_finds_no_room_waits_for_it_and_not_for_ever(make_tiers):
    first = make_tiers()
    for number in range(2):
        first.run_alone(f"w{number}", first.prompt(33, number), max_tokens=1)
    rig = make_tiers(tier=first.tier, num_slots=32)
    rig.counts.clear()
    rig.tier.held = {"fetch"}
    rig.add("a", rig.prompt(33, 0))
    rig.add("b", rig.prompt(33, 1))
    rig.step_until(lambda: bool(rig.fetches))
    rig.step()
    rig.step()
    assert len(rig.fetches) == 1
    assert status(rig, "b") == "WAITING"
    rig.finish()
    assert rig.counts["hit_tokens"] == 64
    assert rig.counts["fetched_blocks"] == 16
    rig.check_idle()


def test_no_room_is_waited_for_in_a_pool_that_has_none_for_any_fetch(make_tiers):
    """I9; a quarter of three slots is none."""
    rig = make_tiers(tier=make_warm(make_tiers).tier, num_slots=3)
    assert rig.run_alone("a", prompt(rig, 1)) == 0
    assert rig.counts["fetch_blocks_no_slot"] == NUM_BLOCKS
    assert rig.counts["tier_waits_cut"] == 0
    rig.check_idle()


# ---- spills ------------------------------------------------------------------------------------


def stored(rig: TierRig) -> set[bytes]:
    """Hashes that the host has."""
    return {h for table in rig.planner.hits.directory.tables for h in table}


def spilled(rig: TierRig, rank: int = 0) -> set[bytes]:
    """Hashes that the tier of a rank has."""
    return {block_hash for at, _, _, block_hash in rig.tier.objects if at == rank}


def test_few_spills_are_under_way_and_the_host_goes_on(make_tiers):
    rig = make_tiers(num_slots=64)
    rig.tier.held = {"spill"}
    for number in range(12):
        rig.add(f"r{number}", rig.prompt(33, number), max_tokens=1)
        rig.step_until(lambda: f"r{number}" not in rig.scheduler.requests)  # noqa: B023
        rig.step_until(lambda: not len(rig.planner.stores))
        assert rig.planner.gauges()["leased_slots"] <= 2 * 4, "two spills of a 16th of the slots"
    assert len(rig.spills) == 2
    assert rig.counts["stored_blocks"] == 12 * 8, "the spills that wait hold nothing"
    rig.finish()
    rig.step()
    assert spilled(rig) >= stored(rig)
    dropped = rig.counts['dropped_spill_blocks{reason="evicted"}']
    assert 0 < dropped == 12 * 8 - rig.counts["spilled_blocks"]
    rig.check_idle()


# ---- what comes from a far tier ----------------------------------------------------------------

NEAR, FAR = (TierConfig(Location("file", f"/{place}"), wait_s=WAIT_S) for place in ("near", "far"))
KEEPING = replace(NEAR, keep=True), FAR


def make_far(make_tiers: MakeTierRig, **options: Any) -> TierRig:
    """An engine whose second tier has the prefix of `prompt`."""
    rig = make_warm(make_tiers, **{"tiers": KEEPING, **options})
    rig.tier.number = 2
    rig.spills.clear()
    return rig


def kept(rig: TierRig) -> set[bytes]:
    """Hashes that are written to nearer tiers than the one that has them."""
    pairs = (pair for s in rig.spills for pair in zip(s.keys.hashes, s.origins, strict=False))
    return {block_hash for block_hash, origin in pairs if origin}


def test_where_only_what_is_evicted_is_written_it_is_kept_when_it_is(make_tiers):
    evicted = tuple(replace(tier, store="evicted") for tier in KEEPING)
    rig = make_far(make_tiers, num_slots=64)
    rig = make_tiers(tier=rig.tier, tiers=evicted, num_slots=64)
    rig.run_alone("a", prompt(rig, 1), max_tokens=1)
    assert not rig.spills, "there is room"
    rig.forget_gpu_cache()
    hashes = set(keys_of(rig)[:NUM_BLOCKS])
    for number in range(2, 38):
        rig.run_alone(f"r{number}", rig.prompt(9, number), max_tokens=1)
        rig.step()
        rig.step()
    gone = hashes - stored(rig)
    assert gone
    assert gone <= kept(rig) <= hashes
    asked = keys_in(rig.spills)
    assert len(asked) == len(set(asked)), "each once"
    assert rig.counts["kept_blocks"] == len(kept(rig))
    rig.check_idle()


# ---- reports that are late, stale or come twice ------------------------------------------------


def test_reports_of_what_nobody_knows_are_counted_and_nothing_else(make_tiers):
    rig = make_warm(make_tiers)
    strange = StepReport(
        (Outcome(0, 9999), Outcome(7, 9998, FailureReason.COPY_FAILED, (1, 2))),
        presences=(Presence(0, 9999, b"\x01"), Presence(5, 0, b"")),
    )
    rig.after_report = lambda report: report.aggregate(strange)
    assert rig.run_alone("a", prompt(rig, 1)) == PREFIX_TOKENS
    rig.after_report = lambda report: report
    assert rig.counts["stale_reports"] >= 4
    assert rig.counts["contained_errors"] == 0
    rig.check_idle()


# ---- errors inside -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "method",
    [
        *("add_request", "waits", "matched", "plan", "settle", "record", "sent", "end_request"),
        "scheduled",
    ],
)
def test_an_error_in_any_call_is_contained(make_tiers, monkeypatch, method):
    call, calls, is_warm = getattr(Tiers, method), [], []

    def fail(*args: Any, **kwargs: Any) -> Any:
        calls.extend(is_warm)
        if len(calls) == 2:
            raise RuntimeError("on purpose")
        return call(*args, **kwargs)

    monkeypatch.setattr(Tiers, method, fail)
    rig = make_warm(make_tiers)
    is_warm.append(True)
    for number in range(3):
        rig.add(f"r{number}", prompt(rig, number))
        rig.step()
        rig.step()
    rig.drain()
    for number in range(3):
        rig.check_tokens(f"r{number}", 4)
    assert rig.counts["contained_errors"] == 1
    assert rig.planner.gauges()["leased_slots"] == 0
    rig.planner.check_invariants()


# ---- an engine that rests ----------------------------------------------------------------------


def test_an_idle_engine_does_not_step_for_what_is_stuck(make_tiers):
    rig = make_warm(make_tiers)
    rig.tier.held = {"fetch", "spill"}
    fetch_for(rig, "a")
    rig.abort("a")
    began_s = rig.clock.now_s
    rig.step_until(lambda: not rig.scheduler.has_requests(), max_steps=50)
    assert 2 * TierConfig(Location("", "")).timeout_s <= rig.clock.now_s - began_s <= 20
    assert rig.planner.gauges()["leased_slots"] == NUM_BLOCKS
    rig.tier.held.clear()
    rig.run_alone("b", prompt(rig, 2))
    rig.check_idle()


def test_nothing_is_asked_for_that_may_not_be_read(make_tiers):
    rig = make_warm(make_tiers)
    assert rig.run_alone("a", prompt(rig, 1), kv_transfer_params={"max_load_tokens": 0}) == 0
    assert not rig.probes
    limited = {"max_load_tokens": 6 * BLOCK_TOKENS + 1}
    rig.forget_gpu_cache()
    rig.planner.hits.slots.forget_all()
    assert rig.run_alone("b", prompt(rig, 2), kv_transfer_params=limited) == 6 * BLOCK_TOKENS
    assert rig.counts["fetched_blocks"] == 6
    rig.check_idle()


# ---- never slower than computing ---------------------------------------------------------------

AUTO: dict[str, Any] = {"extra": {"min_load_tokens": "auto"}}


def make_measured(make_tiers: MakeTierRig, token_s: float, **options: Any) -> TierRig:
    """An engine that has seen what computing takes, in virtual time."""
    rig = make_warm(make_tiers, **{**AUTO, **options})
    for _ in range(4 * KEPT_SAMPLES):
        for num_tokens in (1, 4, 16, 64, 256):
            rig.planner.costs.steps.add(num_tokens, num_tokens * token_s)
    return rig


def test_a_stalled_tier_costs_a_tenth_of_computing(make_tiers):
    for kind in ("probe", "fetch"):
        rig = make_measured(make_tiers, token_s=1.0)
        rig.tier.held = {kind}
        times = times_of_waiting(rig, "a")
        rig.add("a", prompt(rig, 1))
        rig.step_until(lambda: "a" not in rig.scheduler.requests)  # noqa: B023
        assert 3 <= times[-1] - times[0] <= 0.1 * (PREFIX_TOKENS + 2) + 0.01
        assert rig.counts["tier_waits_cut"] == 1


def make_hybrid(make_tiers: MakeTierRig, fetch_s: float | None) -> TierRig:
    """Of a hybrid model; its tier has always taken so long to bring what is asked for."""
    groups = ("window:10", "full")
    rig = make_measured(make_tiers, token_s=1.0, groups=groups, num_blocks=150)
    if fetch_s is not None:
        for num_slots in (NUM_BLOCKS, 2 * NUM_BLOCKS, 4 * NUM_BLOCKS):
            for _ in range(KEPT_SAMPLES):
                tiers_of(rig.planner).costs.add_fetch(1, num_slots, fetch_s)
    rig.tier.held = {"fetch"}
    return rig


def make_slow_hybrid(make_tiers: MakeTierRig) -> TierRig:
    """Of a hybrid model; its tier takes half of the time that computing takes."""
    return make_hybrid(make_tiers, PREFIX_TOKENS / 2)


def stages_of(rig: TierRig) -> dict[int, list[Any]]:
    """The fetches that plans have named, by the token up to which a request can go without."""
    stages: dict[int, list[Any]] = {}
    for message in rig.fetches:
        fetch = tiers_of(rig.planner).fetches.ledger.get(message.transfer_id)
        assert fetch is not None
        stages.setdefault(fetch.first_token, []).append(message)
    return stages


@pytest.mark.usefixtures("small_pieces")
def test_a_slow_tier_brings_a_hybrid_model_parts_that_can_be_hit(make_tiers):
    """Each with its own window at its end; of the last part nothing comes."""
    rig = make_slow_hybrid(make_tiers)
    times = times_of_waiting(rig, "a")
    fetch_for(rig, "a")
    fetched = keys_in(rig.fetches)
    assert len(set(fetched)) == len(fetched), "each block once"
    window, full = ([group for group, _ in fetched].count(i) for i in range(2))
    assert full == NUM_BLOCKS
    assert 3 < window <= 3 + (NUM_BLOCKS + 3) // 2
    *stages, last = stages_of(rig).items()
    half = PREFIX_TOKENS // 2
    assert (stages[0][0], last[0]) == (0, half)
    rig.answer([fetch for _, fetches in stages for fetch in fetches])
    rig.step_until(lambda: status(rig, "a") != "WAITING")
    waited_s = times[-1] - times[0]
    assert 0.4 * PREFIX_TOKENS <= waited_s <= 0.6 * PREFIX_TOKENS + 0.01
    rig.finish()
    assert rig.counts["hit_tokens"] == half


@pytest.mark.usefixtures("small_pieces")
def test_the_stages_of_others_do_not_count_as_ones_own(make_tiers):
    """Who joins a fetch has not asked what its stages need, and waits for all or for little."""
    rig = make_slow_hybrid(make_tiers)
    rig.add("first", prompt(rig, 2))
    times = times_of_waiting(rig, "a")
    fetch_for(rig, "a")
    fetches = [
        tiers_of(rig.planner).fetches.ledger.get(message.transfer_id) for message in rig.fetches
    ]
    assert any(len(fetch.users) == 2 for fetch in fetches), "it has joined"
    *stages, _ = stages_of(rig).values()
    assert stages
    rig.answer([fetch for stage in stages for fetch in stage])
    rig.step_until(lambda: status(rig, "a") != "WAITING")
    assert times[-1] - times[0] <= 0.1 * (PREFIX_TOKENS + 2) + 0.01
    rig.finish()


def test_a_tier_that_is_slower_than_computing_is_not_asked_for_it(make_tiers):
    rig = make_measured(make_tiers, token_s=0.001)
    for _ in range(8):
        tiers_of(rig.planner).costs.add_fetch(1, NUM_BLOCKS, 10.0)
    assert rig.run_alone("a", prompt(rig, 1)) == 0
    assert not rig.probes, "at best it would not pay"
    rig.check_idle()


FETCH = {
    "protocol_version": "0.1",
    "actions": [{"action_type": "kv.fetch", "action_version": "1.0", "payload": {}}],
}
HINTED: dict[str, Any] = {"extra": {**AUTO["extra"], "kv_hints": True}}


def test_a_request_with_a_hint_waits_until_the_wait_is_over(make_tiers):
    rig = make_measured(make_tiers, token_s=0.001, **HINTED)
    rig.tier.held = {"fetch"}
    times = times_of_waiting(rig, "a")
    rig.add("a", prompt(rig, 1), kv_transfer_params={"kv_hints": FETCH})
    rig.step_until(lambda: "a" not in rig.scheduler.requests)
    assert WAIT_S - 2 <= times[-1] - times[0] <= WAIT_S
    rig.finish()


def test_of_a_request_that_leaves_nothing_tiers_are_asked_nothing(make_tiers):
    rig = make_warm(make_tiers)
    assert rig.run_alone("a", prompt(rig, 1), kv_transfer_params={"store": "nothing"}) == 0
    rig.drain()
    assert not rig.probes
    assert not rig.spills
    assert not stored(rig)


def test_what_was_measured_is_told(make_tiers):
    rig = make_warm(make_tiers, **AUTO)
    gauges = rig.planner.gauges()
    assert gauges["fetch_bytes_per_second"] == gauges["fetch_latency_seconds"] == 0
    rig.run_alone("a", prompt(rig, 1))
    gauges = rig.planner.gauges()
    slots_per_s = 1 / gauges["fetch_latency_seconds"] * NUM_BLOCKS
    slot_bytes = rig.planner.options.slot_bytes
    assert gauges["fetch_bytes_per_second"] == pytest.approx(slot_bytes * slots_per_s, rel=0.5)
