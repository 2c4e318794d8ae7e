"""What docs/reference/metrics.md explains, and what the code has."""

from __future__ import annotations

import re
from pathlib import Path

from safe_offload.observe.counters import (
    BYTES,
    COUNTERS,
    HISTOGRAMS,
    TENANT_COUNTERS,
    TENANT_GAUGES,
    TIER_SERIES,
)
from safe_offload.observe.metrics import GAUGES

PAGE = (Path(__file__).parents[2] / "docs" / "reference" / "metrics.md").read_text()

TIER = TIER_SERIES[0]
COUNTER_NAMES = {
    *(series.metric for series in (*COUNTERS, *TIER.counters)),
    *(f"tenant_{name}" for name in TENANT_COUNTERS),
}
HISTOGRAM_NAMES = {
    *(s.metric for s in HISTOGRAMS.values() if s.buckets is not BYTES),
    *(s.metric for s in TIER.seconds.values()),
}
GAUGE_NAMES = {*GAUGES, *(s.metric for s in TIER.gauges), "info"}
GAUGE_NAMES |= {f"tenant_{name}" for name in TENANT_GAUGES}
NAMES = COUNTER_NAMES | HISTOGRAM_NAMES | GAUGE_NAMES


def rows(kind: str) -> set[str]:
    """Return the names that begin the items of the page's lists of this kind."""
    lists = re.findall(rf"^\*\*{kind}s\*\*.*\n\n((?:- .*\n)+)", PAGE, re.IGNORECASE | re.MULTILINE)
    return {name for items in lists for name in re.findall(r"^- `(\w+)`: ", items, re.MULTILINE)}
