"""The benchmark `hits`: its figures, and that nothing counts that is not what it should be."""

from dataclasses import replace

import pytest

from safe_offload.commands.bench.engine_process import Answer
from safe_offload.errors import SafeOffloadError
from tests.benchmarks.hits import (
    LOADED,
    RULE,
    Answers,
    Found,
    FoundByLength,
    check_answers,
    make_report,
)

COMPUTED = Answer(0.1, 0.2, (1,), 0, 0, 48)
ON_HOST = replace(COMPUTED, num_host_tokens=32, num_computed_tokens=16)
ON_GPU = replace(COMPUTED, num_gpu_tokens=32, num_computed_tokens=16)


def found(loaded_s: float) -> FoundByLength:
    """Of an engine that computes in 10 ms, and of one with the rule that does in 20."""
    by_way = {
        LOADED: Found([loaded_s, loaded_s, 0.5], [0.010] * 3, [0.004] * 3, 3),
        RULE: Found([0.021, 0.021, 0.2], [0.020] * 3, [0.005] * 3, 1),
    }
    return {32: by_way}


def test_the_table_and_the_file():
    report = make_report(found(loaded_s=0.012), {})
    row = report.render().splitlines()[-1].split()
    assert row[:5] == ["32", "10.00", "12.00", "1.20", "4.00"]
    assert row[5:] == ["20.00", "21.00", "1.05", "5.00", "1", "of", "3", "1.05"]
    (row,) = report.to_json()["rows"]
    assert row["engines"][RULE]["hit_s"] == [0.021, 0.021, 0.2]


@pytest.mark.parametrize(("way", "hit"), [(LOADED, ON_HOST), (RULE, COMPUTED), (RULE, ON_HOST)])
def test_an_answer_counts_if_its_tokens_come_from_where_they_should(way, hit):
    check_answers(way, 32, Answers(hit, COMPUTED, ON_GPU))


@pytest.mark.parametrize(
    ("way", "answers"),
    [
        (LOADED, Answers(COMPUTED, COMPUTED, ON_GPU)),
        (RULE, Answers(ON_GPU, COMPUTED, ON_GPU)),
        (RULE, Answers(replace(ON_HOST, num_host_tokens=16), COMPUTED, ON_GPU)),
        (RULE, Answers(ON_HOST, ON_HOST, ON_GPU)),
        (RULE, Answers(ON_HOST, COMPUTED, COMPUTED)),
    ],
)
def test_an_answer_whose_tokens_come_from_elsewhere_ends_the_run(way, answers):
    with pytest.raises(SafeOffloadError, match="32 tokens"):
        check_answers(way, 32, answers)
