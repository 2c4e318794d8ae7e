"""The net for tidying up: equal in every process, blind to names, not to what happens."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from safe_offload.scheduler.cache import directory
from safe_offload.scheduler.pending import Store
from safe_offload.scheduler.stores.stores import Stores
from tests.digests import digest_of

ROOT = Path(__file__).parents[2]
PROFILES = ("all-faults", "spoilt", "swarm")


def _in_another_process() -> str:
    options = ["--profile", ",".join(PROFILES), "--seeds", "1", "--no-counts", "--processes", "1"]
    done = subprocess.run(
        [sys.executable, "-m", "tests.digests", *options],
        env={"PYTHONHASHSEED": "1", "PATH": "/usr/bin:/bin"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
        timeout=900,
    )
    return done.stdout


@pytest.mark.nightly
def test_digests_are_equal_in_every_process():
    lines = _in_another_process().splitlines()[1:]
    assert lines == [digest_of(profile, range(1)) for profile in PROFILES]
    assert all(re.fullmatch(r"\S+ +[0-9a-f]{16} counted [0-9a-f]{8}", line) for line in lines)


def test_a_digest_changes_with_what_happens(monkeypatch):
    _, events, _, counted = digest_of("plain", range(1)).split()
    # Nothing is stored.
    monkeypatch.setattr(Stores, "add_whole", lambda *args, **kwargs: True)
    _, other_events, _, other_counted = digest_of("plain", range(1)).split()
    assert (other_events != events, other_counted != counted) == (True, True)


def test_a_broken_promise_shows_in_the_line(monkeypatch):
    monkeypatch.setattr(Store, "given_away", lambda _: False)
    assert "seed 0 breaks I6" in digest_of("late-copies", range(1))


def test_a_table_that_is_split_finds_what_a_dictionary_finds(monkeypatch):
    before = digest_of("all-faults", range(1))
    monkeypatch.setattr(directory, "SPLIT_FROM", 0)
    assert digest_of("all-faults", range(1)) == before
