"""The benchmark `fleet`: a sample of it, and that it tells wrong, missing and late answers."""

import random
from dataclasses import replace

import pytest

from safe_offload.tiers.base import Buffers, Name, Result
from safe_offload.tiers.breaker import FAILURES_MAX
from safe_offload.tiers.tier import SealedTier
from tests.benchmarks import fleet_engine
from tests.benchmarks.fleet import MIDDLE, START, VOCABULARY, Fleet, Row, make_prompts
from tests.benchmarks.fleet_engine import FleetCore, Sample
from tests.benchmarks.slow_tier import ALLOWED_S, ALLOWED_SHARE

GOOD = Sample(
    num_tokens=2_000,
    begin_s=10.0,
    first_s=0.1,
    starved_s=0.0,
    is_right=True,
    num_hit=1_600,
    is_cut=False,
)
LATE = replace(GOOD, first_s=1.0)


def make_row(*samples: Sample, begun_s: float = 0.0, **opened_s: float) -> Row:
    return Row("a trouble", MIDDLE, begun_s, (list(samples),), (opened_s,), ())


# ---- a sample of what the command runs ----------------------------------------------------------


@pytest.mark.nightly
def test_engines_answer_rightly_whatever_becomes_of_their_server(tmp_path):
    prompts = make_prompts(40, 1)
    with Fleet(tmp_path) as fleet:
        refused = fleet.run("wrong password", START, prompts)
        killed = fleet.run("server killed", MIDDLE, prompts)
    for row in (refused, killed):
        assert len(row.all_samples) == len(prompts)
        assert all(one.is_right for one in row.all_samples)
        assert not [one.problem for one in row.all_samples if one.problem]
        assert any(one.num_hit for one in row.all_samples)
    assert all(opened for opened in refused.opened_s), "a breaker of each engine has opened"
    said = f"has failed {FAILURES_MAX} times in a row"
    assert any("the password" in line for line in refused.log_lines), refused.log_lines
    assert any(said in line for line in refused.log_lines), refused.log_lines


# ---- can it find anything? ----------------------------------------------------------------------


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(fleet_engine, "TOKENS_PER_S", 100_000)


@pytest.fixture
def engines(tmp_path, quick):
    """Two on one directory."""
    tiers = [{"url": f"file://{tmp_path}/tier", "wait_s": 30}]
    found = [FleetCore(tiers) for _ in range(2)]
    yield found
    for engine in found:
        engine.close()


def random_tokens(number: int) -> list[int]:
    chance = random.Random(1)
    return [chance.randrange(VOCABULARY) for _ in range(number)]


def settle(engine: FleetCore) -> None:
    """All that it has stored is in the tier."""
    while engine.has_work:
        engine.step()


def test_wrong_bytes_of_a_tier_are_found(engines, monkeypatch):
    fetch = SealedTier.fetch

    async def spoil(self: SealedTier, names: list[Name], slots: list[Buffers]) -> list[Result]:
        results = await fetch(self, names, slots)
        slots[0][0][3] ^= 1
        return results

    monkeypatch.setattr(SealedTier, "fetch", spoil)
    one, other = engines
    one.serve("a", random_tokens(1_000))
    settle(one)
    found = other.serve("a", random_tokens(1_000))
    assert not found.is_right
    assert "wrong bytes" in found.problem


# ---- what is late -------------------------------------------------------------------------------


def test_what_is_allowed_follows_from_what_computing_takes():
    assert GOOD.computing_s == pytest.approx(0.005 + 0.2)
    allowed_s = ALLOWED_SHARE * GOOD.computing_s + ALLOWED_S
    assert replace(GOOD, first_s=allowed_s).ratio == pytest.approx(1.0)
    starved = replace(GOOD, first_s=allowed_s + 0.1, starved_s=0.1)
    assert starved.ratio == pytest.approx(1.0)


def test_late_is_a_breach_once_a_breaker_is_open():
    assert make_row(GOOD, GOOD).is_kept
    assert not make_row(GOOD, LATE).is_kept
    assert make_row(LATE, GOOD).is_kept, "the first of a new engine"
    early = replace(LATE, begin_s=5.0)
    assert make_row(GOOD, early, GOOD, read=6.0).is_kept
    assert not make_row(GOOD, early, LATE, read=6.0).is_kept
    assert make_row(GOOD, early, GOOD, begun_s=8.0).is_kept, "before the trouble"
    assert not make_row(GOOD, replace(GOOD, is_right=False)).is_kept
