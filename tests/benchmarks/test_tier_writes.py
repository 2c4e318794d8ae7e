"""What is written to a tier, and what it brings, in a model small enough to count by hand."""

import pytest

from tests.benchmarks.__main__ import main
from tests.benchmarks.policy_traces import Trace, make_trace
from tests.benchmarks.tier_writes import KINDS, replay

A, B, C, D = (bytes([n]) for n in range(4))


@pytest.mark.parametrize(
    ("kind", "written", "host", "tier"),
    [("computed", 4, 1, 2), ("evicted", 4, 1, 2), ("hit", 1, 1, 1)],
)
def test_each_kind_writes_what_it_says(kind, written, host, tier):
    """A is hit on the host, and then is B's turn to push both out."""
    trace = Trace("by hand", "", [[A], [A], [B], [C], [D], [A], [B]])
    totals = replay(trace, kind, 2, 10)
    assert (totals.written, totals.host, totals.tier) == (written, host, tier)


def test_the_fewest_are_written_of_what_was_hit():
    trace = make_trace("chat", 400)
    computed, evicted, hit = (replay(trace, kind, 100, 10) for kind in KINDS)
    assert hit.written < evicted.written <= computed.written
    assert hit.host == computed.host == evicted.host
    assert hit.tier < computed.tier


def test_the_command_prints_a_line_for_each_kind(capsys):
    assert main(["tier_writes", "--traces", "agents", "--prompts", "50", "--sizes", "0.1"]) == 0
    assert capsys.readouterr().out.count("written") == 3
