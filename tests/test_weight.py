"""A limit of the weight is neither exceeded nor left far above the count."""

import pytest

from tests.weight import SLACK, judge


@pytest.mark.parametrize(
    ("count", "verdict"),
    [
        (1000, ""),
        (1001, "EXCEEDED"),
        (1000 - SLACK, ""),
        (1000 - SLACK - 1, "lower it to 699"),
    ],
)
def test_a_limit_is_kept_close_to_the_count(count: int, verdict: str) -> None:
    assert verdict in judge(count, limit=1000)
    assert bool(verdict) == bool(judge(count, limit=1000))
