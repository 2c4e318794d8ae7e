"""The benchmark `scheduler`: every connector serves every trace, and what ours executes."""

import functools

import pytest

from tests.benchmarks import scheduler
from tests.benchmarks.__main__ import main
from tests.benchmarks.scheduler_engine import CONTESTANTS
from tests.benchmarks.scheduler_measure import Answers, Facts, count_hooks, observe
from tests.benchmarks.scheduler_probe import Counts
from tests.benchmarks.scheduler_traces import LAYOUTS, TRACES, make_trace

TINY_SHARE = 16
COPY_STEPS = 1
OURS = ("ours-eager", "ours-lazy")
WITH_HOOKS = [name for name in CONTESTANTS if name != "none"]

BY_DAY = ("chats",)


def nightly(trace: str) -> tuple[pytest.MarkDecorator, ...]:
    return () if trace in BY_DAY else (pytest.mark.nightly,)


EVERY_TRACE = [pytest.param(trace, marks=nightly(trace)) for trace in TRACES]

INSTRUCTIONS_MAX = {
    ("ours-eager", "simple-eager", "chats"): 0.35,
    ("ours-eager", "simple-eager", "turns"): 0.36,
    ("ours-eager", "simple-eager", "long"): 0.16,
    ("ours-eager", "simple-eager", "pressure"): 0.27,
    ("ours-eager", "simple-eager", "documents"): 0.28,
    ("ours-eager", "simple-eager", "churn"): 0.44,
    ("ours-eager", "offloading", "chats"): 0.28,
    ("ours-eager", "offloading", "turns"): 0.26,
    ("ours-eager", "offloading", "long"): 0.12,
    ("ours-eager", "offloading", "pressure"): 0.32,
    ("ours-eager", "offloading", "documents"): 0.21,
    ("ours-eager", "offloading", "churn"): 0.36,
    ("ours-lazy", "simple-lazy", "chats"): 0.36,
    ("ours-lazy", "simple-lazy", "turns"): 0.45,
    ("ours-lazy", "simple-lazy", "long"): 0.45,
    ("ours-lazy", "simple-lazy", "pressure"): 0.38,
    ("ours-lazy", "simple-lazy", "documents"): 0.44,
    ("ours-lazy", "simple-lazy", "churn"): 0.60,
}
"""What ours may execute at most, as a multiple of what the other does: a tenth more than now."""


@functools.cache
def observed(trace: str, layout: str, name: str) -> tuple[Facts, Answers]:
    return observe(make_trace(trace, layout, share=TINY_SHARE), name, COPY_STEPS)


@functools.cache
def instructions_of(name: str, trace: str) -> int:
    observed(trace, "plain", name)  # fills caches that live as long as the process
    counts = count_hooks(make_trace(trace, "plain", share=TINY_SHARE), name, COPY_STEPS)
    return sum(counts.values(), Counts()).instructions


# ---- traces ------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("trace", EVERY_TRACE)
def test_every_connector_answers_every_request_with_the_same_tokens(trace, layout):
    _, expected = observed(trace, layout, "none")
    assert len(expected) == make_trace(trace, layout, share=TINY_SHARE).num_requests
    for name in WITH_HOOKS if layout == "plain" else OURS:  # a run compares them all
        assert observed(trace, layout, name)[1] == expected


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("trace", EVERY_TRACE)
@pytest.mark.parametrize("name", OURS)
def test_ours_keeps_no_block_from_the_pool(name, trace, layout):
    assert observed(trace, layout, name)[0].kept_max == 0


# ---- instructions ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mine", "other", "trace"),
    [pytest.param(*case, marks=nightly(case[-1])) for case in INSTRUCTIONS_MAX],
)
def test_ours_executes_at_most_a_fixed_share_of_what_the_other_does(mine, other, trace):
    ratio = instructions_of(mine, trace) / instructions_of(other, trace)
    assert ratio <= INSTRUCTIONS_MAX[mine, other, trace]


@pytest.mark.nightly
def test_a_small_run_times_the_hooks(monkeypatch, capsys):
    monkeypatch.setattr(scheduler, "QUICK_SHARE", TINY_SHARE)
    command = ["scheduler", "--quick", "--rounds", "1", "--traces", "long"]
    assert main([*command, "--connectors", "none", "simple-eager", "ours-eager"]) == 0
    words = capsys.readouterr().out.split()
    assert {"hooks", "ours-eager/simple-eager"} <= {*words}
