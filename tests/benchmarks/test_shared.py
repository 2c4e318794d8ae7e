"""`python -m tests.benchmarks shared`, and what it must show: one load for all who want it."""

import json
from functools import cache

import pytest

from tests.benchmarks.__main__ import main
from tests.benchmarks.shared import (
    CASES,
    COPY_STEPS,
    LAYOUTS,
    Case,
    Served,
    make_report,
    measure,
    serve,
)
from tests.benchmarks.shared_engine import EngineSeconds

OURS = ("ours-eager", "ours-lazy")
LOADED_MAX = {"full attention": 1.05, "full attention and a sliding window": 2.0}
LOAD_STEPS = COPY_STEPS + 1
"""From the plan that names a load to the step that finds it landed."""


@cache
def served(name: str, layout: str, case: Case) -> Served:
    return serve(name, LAYOUTS[layout], case, COPY_STEPS)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: str(case.num_requests))
@pytest.mark.parametrize("name", OURS)
def test_a_hit_that_many_want_is_no_slower_than_none(layout, case, name):
    """FAULTS P3: each loaded a copy of its own, the copies filled the pool, requests preempted."""
    without, ours = served("none", layout, case), served(name, layout, case)
    assert ours.num_steps <= without.num_steps + LOAD_STEPS
    assert ours.num_preemptions <= without.num_preemptions
    assert ours.loaded_prefixes <= LOADED_MAX[layout]


def test_the_other_connector_that_loads_for_each_is_slower():
    """The case is one: without waiting, it looks like this."""
    case = CASES[0]
    simple = served("simple-eager", "full attention", case)
    assert simple.loaded_prefixes > 2
    assert simple.num_steps > 1.5 * served("none", "full attention", case).num_steps


def test_the_figures_are_the_same_every_time(tmp_path, capsys):
    small = Case(3, 60, 10, 4)
    first = measure(["none", "ours-eager"], [small], 1)
    assert first == measure(["none", "ours-eager"], [small], 1)
    report = make_report(first, 1, {}, EngineSeconds(3.0, 2.0))
    assert "3, 60, 10, 4" in report.render()
    assert "ratio 1.50" in report.render()
    assert report.to_json()["engine"]["ratio"] == 1.5
    path = tmp_path / "found.json"
    assert main(["shared", "--connectors", "none", "--json", str(path)]) == 0
    rows = json.loads(path.read_text())["rows"]
    assert len(rows) == len(CASES) * len(LAYOUTS)
    assert "steps until all are answered" in capsys.readouterr().out
