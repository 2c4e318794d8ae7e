"""The dashboard of examples/observability, and the page that explains it."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path

import yaml

from tests.engine.prometheus import EXAMPLES, dashboard_queries
from tests.observe.reference_page import HISTOGRAM_NAMES, NAMES

PAGE = (Path(__file__).parents[2] / "docs" / "operate" / "dashboard.md").read_text()
PANELS = json.loads((EXAMPLES / "dashboard.json").read_text())["panels"]


def test_every_panel_says_what_it_shows() -> None:
    assert sum(panel["type"] == "row" for panel in PANELS) == 5
    assert not [p["title"] for p in PANELS if p["type"] != "row" and not p.get("description")]


def test_the_page_names_the_alerts_that_are_no_warnings() -> None:
    (group,) = yaml.safe_load((EXAMPLES / "alerts.yaml").read_text())["groups"]
    alerts = {
        rule["alert"]: rule["labels"]["severity"] for rule in group["rules"] if "alert" in rule
    }
    named = re.findall(r"`(\w+)`", PAGE.split("All are warnings, except")[1].split("(info)")[0])
    assert alerts == dict.fromkeys(alerts, "warning") | dict.fromkeys(named, "info")


def test_queries_are_about_metrics_that_exist_and_of_what_is_chosen() -> None:
    parts = re.compile(f"({'|'.join(sorted(HISTOGRAM_NAMES))})_(bucket|sum|count)$")
    for title, query in dashboard_queries():
        named = re.findall(r"vllm:safe_offload_(\w+)", query)
        known = {parts.sub(r"\1", name).removesuffix("_total") for name in named}
        assert known <= NAMES, title
        chosen = 'job=~"$job", instance=~"$instance", engine=~"$engine"'
        assert query.count("vllm:") == query.count(chosen), title


def test_panels_do_not_overlap() -> None:
    assert len({panel["id"] for panel in PANELS}) == len(PANELS)
    for a, b in itertools.combinations([panel["gridPos"] for panel in PANELS], 2):
        is_beside = a["x"] + a["w"] <= b["x"] or b["x"] + b["w"] <= a["x"]
        assert is_beside or a["y"] + a["h"] <= b["y"] or b["y"] + b["h"] <= a["y"], (a, b)
    assert all(panel["gridPos"]["x"] + panel["gridPos"]["w"] <= 24 for panel in PANELS)


def test_grafana_is_told_of_this_folder_and_this_prometheus() -> None:
    folder = EXAMPLES / "provisioning"
    script = (EXAMPLES / "run.sh").read_text()
    (source,) = yaml.safe_load((folder / "datasources" / "prometheus.yaml").read_text())[
        "datasources"
    ]
    assert source["url"] == "$SAFE_OFFLOAD_PROMETHEUS"
    assert "SAFE_OFFLOAD_PROMETHEUS=http://localhost:9090\n" in script
    assert "--web.listen-address=localhost:9090" in script
    (provider,) = yaml.safe_load((folder / "dashboards" / "safe_offload.yaml").read_text())[
        "providers"
    ]
    assert provider["options"]["path"] == "$SAFE_OFFLOAD_DASHBOARDS"
    assert "export SAFE_OFFLOAD_DASHBOARDS=$here" in script
