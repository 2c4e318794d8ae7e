"""`beside`, `breakdown`, `link` and `one_memory`: what of them needs no engine."""

import pytest

from tests.benchmarks.beside import costs, median_step_s
from tests.benchmarks.breakdown import COPY, SPANS, Seen, spans


def seen(*steps: list[float]) -> Seen:
    probe = {
        "steps": list(steps),
        "submits": [(3.0, "load", 7), (3.0, "store", 8)],
        "copies": [("load", 4.0, 6.0, 1), ("store", 1.0, 30.0, 1)],
        "reports": [(7.0, (7,)), (31.0, (8,))],
    }
    return Seen(0.0, 1.0, 14.0, 15.0, probe)


def test_the_spans_of_a_hit_add_up_also_where_the_next_step_begins_before_the_token_is_there():
    """With async scheduling, which is what a GPU has: every table was empty there."""
    found = spans(seen([2.0, 2.5, 0], [9.0, 11.0, 5], [11.5, 12.0, 1], [12.0, 16.0, 1]))
    assert [*found] == [*SPANS]
    assert [*found.values()] == [1.0, 2.0, 1.0, 2.0, 1.0, 2.0, 2.0, 3.0, 1.0]
    assert found[COPY] == 2.0
    assert sum(found.values()) == 15.0


def test_what_is_computed_in_several_steps_has_no_spans():
    assert spans(seen([9.0, 11.0, 64], [11.0, 13.0, 20])) == {}


def test_a_step_lasts_until_the_next_begins_and_the_first_and_last_do_not_count():
    steps = [[0, 0, 0], [1, 9, 64], [11, 12, 16], [13, 14, 16], [15, 18, 16], [20, 21, 3]]
    assert median_step_s(steps) == 2.0


def test_a_cost_is_of_the_same_round():
    samples = {"nothing": {"decode": [1.0, 2.0]}, "load": {"decode": [1.1, 2.2]}}
    assert costs(samples, "load", "decode") == pytest.approx((0.1, 0.0))
