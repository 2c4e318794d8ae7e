"""`safe-offload bench hits`: its figures, and that nothing counts that is not what it should be."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from safe_offload.bench.engine import BASELINE
from safe_offload.bench.engine_process import Answer
from safe_offload.bench.hits import LOADED, RULE, Found, HitsReport, check_answers, render_table
from safe_offload.cli import main
from safe_offload.errors import SafeOffloadError

NOTHING = Answer(0.1, 0.2, (1,), 0, 0, 48, 0.0, 0.0, 0.0)
ON_HOST = replace(NOTHING, num_host_tokens=32, num_computed_tokens=16)
ON_GPU = replace(NOTHING, num_gpu_tokens=32, num_computed_tokens=16)


def report() -> HitsReport:
    by_way = {
        BASELINE: Found([0.010, 0.011, 0.5], [0.004] * 3),
        LOADED: Found([0.020] * 3, [0.005] * 3, 3),
        RULE: Found([0.012, 0.012, 0.2], [0.004] * 3, 1),
    }
    return HitsReport({32: by_way}, {})


def test_the_rule_is_held_against_the_better_of_the_other_two_by_medians() -> None:
    assert report().ratio(32) == pytest.approx(12 / 11)


def test_the_table_says_how_often_the_rule_loaded_and_how_alike_the_engines_are() -> None:
    *_, row, last = render_table(report()).splitlines()
    assert row.split() == ["32", "11.00", "20.00", "12.00", "5.00", "1.09", "1", "of", "3"]
    assert last.endswith("1.25.")


def test_the_file_has_every_sample() -> None:
    (row,) = report().to_json()["rows"]
    assert row["hit_tokens"] == 32
    assert row["ways"][RULE]["ttft_s"] == [0.012, 0.012, 0.2]


@pytest.mark.parametrize(
    ("way", "cold"), [(BASELINE, NOTHING), (LOADED, ON_HOST), (RULE, NOTHING), (RULE, ON_HOST)]
)
def test_an_answer_counts_if_its_tokens_come_from_where_they_should(way: str, cold: Answer) -> None:
    check_answers(way, 32, cold, ON_GPU)


@pytest.mark.parametrize(
    ("way", "cold", "warm"),
    [
        (BASELINE, ON_HOST, ON_GPU),
        (BASELINE, ON_GPU, ON_GPU),
        (LOADED, NOTHING, ON_GPU),
        (RULE, replace(ON_HOST, num_host_tokens=16), ON_GPU),
        (RULE, ON_HOST, NOTHING),
    ],
)
def test_an_answer_whose_tokens_come_from_elsewhere_ends_the_run(
    way: str, cold: Answer, warm: Answer
) -> None:
    with pytest.raises(SafeOffloadError, match="32 tokens"):
        check_answers(way, 32, cold, warm)


@pytest.mark.parametrize(
    "arguments", [["--hit-tokens", "33"], ["--hit-tokens", "0"], ["--rounds", "0"]]
)
def test_what_cannot_be_measured_is_refused(
    arguments: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "hits.json"
    assert main(["bench", "hits", "--json", str(path), *arguments]) == 1
    assert arguments[0] in capsys.readouterr().err
    assert not path.exists()
