"""The net for tidying up: equal in every process, blind to names, not to what happens."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from safe_offload.scheduler.harvest import Harvest
from tests.digests import digest_of
from tests.simulator import trace

ROOT = Path(__file__).parents[2]
PROFILES = ("all-faults", "swarm", "mamba-gpu", "hybrid-gpu", "foreign-ids")


def _in_a_process(hash_seed: int) -> str:
    options = ["--profile", ",".join(PROFILES), "--seeds", "2", "--no-counts", "--processes", "1"]
    done = subprocess.run(
        [sys.executable, "-m", "tests.digests", *options],
        env={"PYTHONHASHSEED": str(hash_seed), "PATH": "/usr/bin:/bin"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
        timeout=240,
    )
    return done.stdout


def test_digests_are_equal_in_every_process() -> None:
    text = _in_a_process(1)
    assert text == _in_a_process(2)
    lines = text.splitlines()[1:]
    assert [line.split()[0] for line in lines] == list(PROFILES)
    assert all(re.fullmatch(r"\S+ +[0-9a-f]{16} counted [0-9a-f]{8}", line) for line in lines)


def test_a_digest_depends_on_profile_and_seeds() -> None:
    found = [digest_of("plain", range(1)), digest_of("plain", [1]), digest_of("plain", range(2))]
    assert len(set(found)) == 3
    assert digest_of("plain", range(1)) == found[0]


def test_a_digest_changes_with_what_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    _, events, _, counted = digest_of("plain", range(1)).split()
    monkeypatch.setattr(Harvest, "_add_whole", lambda *args: True)  # which stores nothing
    _, other_events, _, other_counted = digest_of("plain", range(1)).split()
    assert (other_events != events, other_counted != counted) == (True, True)


def test_a_digest_does_not_change_with_names(monkeypatch: pytest.MonkeyPatch) -> None:
    before = digest_of("failing", range(2))
    note = trace.Trace.note
    renamed = lambda self, line, *facts: note(self, line.upper(), *facts)  # noqa: E731
    monkeypatch.setattr(trace.Trace, "note", renamed)
    assert digest_of("failing", range(2)) == before


def test_a_broken_promise_shows_in_the_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("safe_offload.scheduler.fences.StoresInFlight.fence", lambda _: [])
    assert "seed 0 breaks I6" in digest_of("late-copies", range(1))
