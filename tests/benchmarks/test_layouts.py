"""`python -m tests.benchmarks layouts`: both layouts, on engines too, and what is made of them."""

import json

import pytest

from tests.benchmarks.__main__ import main
from tests.benchmarks.layouts import APART, NUM_LAYERS, WHOLE, measure_copies, ratios

FEW = ["--device", "cpu", "--blocks", "2", "--copy-rounds", "2"]


@pytest.mark.engine
@pytest.mark.nightly
@pytest.mark.usefixtures("forked_engines")
@pytest.mark.timeout(3600)
def test_two_engines_are_compared_that_differ_in_the_layout_only(tmp_path):
    sizes = ["--prompt-tokens", "500", "--answer-tokens", "4", "--rounds", "1", *FEW]
    figures = tmp_path / "figures.json"
    assert main(["layouts", *sizes, "--json", str(figures)]) == 0
    found = json.loads(figures.read_text())
    assert found["engines"]["ranges"] == {APART: "2 ranges", WHOLE: "one range"}
    assert found["num_different_answers"] == 0
    told = found["layout_ratios"]["engines"]
    assert set(told) == {
        *("first token, computed", "first token, loaded", "each further token"),
        *("rate of stores", "rate of loads"),
    }
    assert all(len(values) == 1 and values[0] > 0 for values in told.values())


def test_copies_differ_in_the_number_of_ranges_only():
    found = measure_copies("cpu", 5, 2)
    apart, whole = (int(found.ranges[layout].partition(" ")[0]) for layout in (APART, WHOLE))
    assert apart == NUM_LAYERS * whole
    assert set(ratios(found.samples)) == {"store", "load", "both"}
