"""docs/reference/metrics.md knows every metric, and no other."""

from __future__ import annotations

import re

import pytest

from safe_offload.observe.counters import COUNTERS, HISTOGRAMS
from safe_offload.observe.metrics import INFO
from safe_offload.protocol import FailureReason
from tests.observe.reference_page import (
    COUNTER_NAMES,
    GAUGE_NAMES,
    HISTOGRAM_NAMES,
    NAMES,
    PAGE,
    TIER,
    rows,
)


@pytest.mark.parametrize(
    ("kind", "names"),
    [("counter", COUNTER_NAMES), ("histogram", HISTOGRAM_NAMES), ("gauge", GAUGE_NAMES)],
)
def test_every_metric_is_explained_in_a_row_of_its_own_and_no_other(
    kind: str, names: set[str]
) -> None:
    assert rows(kind) == names


def test_every_metric_that_is_named_exists() -> None:
    named = re.findall(r"vllm:safe_offload_([a-z_]+)", PAGE)
    assert {name.removesuffix("_total") for name in named} <= NAMES


@pytest.mark.parametrize("label", INFO)
def test_every_label_of_the_set_up_is_explained(label: str) -> None:
    assert f"`{label}`" in PAGE


OF_A_TIER = (*TIER.counters, *TIER.gauges, *TIER.seconds.values())
LABELS = {
    label for series in (*COUNTERS, *HISTOGRAMS.values(), *OF_A_TIER) for label in series.labels
}


@pytest.mark.parametrize("name", sorted({name for name, _ in LABELS}))
def test_every_label_is_named(name: str) -> None:
    assert f"`{name}`" in PAGE or f'`{name}="' in PAGE


REASONS = {reason.value for reason in FailureReason}
"""Those are in docs/reference/log-lines.md, under *Why a transfer failed*."""
PLAIN = ("direction", "tier")
"""Labels whose values need no explanation."""


@pytest.mark.parametrize(
    ("name", "value"), sorted(x for x in LABELS if x[0] not in PLAIN and x[1] not in REASONS)
)
def test_every_value_of_a_label_is_explained(name: str, value: str) -> None:
    assert f"`{value}` (" in PAGE or f'`{name}="{value}"`:' in PAGE
