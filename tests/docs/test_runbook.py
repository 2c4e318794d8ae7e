"""docs/operate/runbook.md: an alert leads to its section, and what a section names exists.

Of each kind of tier: the log line that its code writes, what doctor finds of it, and the command.
"""

import re
import shutil
import subprocess
from pathlib import Path
from typing import NamedTuple

import pytest
import yaml

from safe_offload.protocol import FailureReason
from tests.docs.messages import PACKAGE, is_said

ROOT = Path(__file__).parents[2]
OPERATE = ROOT / "docs" / "operate"
RUNBOOK = (OPERATE / "runbook.md").read_text()
ALERTS = {
    rule["alert"]: rule["annotations"]
    for rule in yaml.safe_load((ROOT / "examples" / "observability" / "alerts.yaml").read_text())[
        "groups"
    ][0]["rules"]
    if "alert" in rule
}
UNSEEN_BY_DOCTOR = {"SafeOffloadMemoryErrors", "SafeOffloadLoadsFail", "SafeOffloadCopiesHang"}
REASONS = {reason.value for reason in FailureReason}
"""Why a load failed, which stands in the line."""


def slug(title: str) -> str:
    return re.sub(r"[^\w -]", "", title).lower().replace(" ", "-")


SECTIONS = {
    slug(part.partition("\n")[0]): part.partition("\n")[2] for part in RUNBOOK.split("\n## ")[1:]
}


def section_of(alert: str) -> str:
    return SECTIONS[ALERTS[alert]["runbook_url"].partition("#")[2]]


ITEM = re.compile(r"^- (?:No line|`)(?:[^\n]|\n(?=  ))*$", re.MULTILINE)
HEAD = re.compile(r"- ((?:`[^`]*`|\[[^]]*\]\([^)]*\)|[^`:[(])*)(\((?:`[^`]*`|[^`)])*\))?[^`:]*: ")


class Row(NamedTuple):
    """An item of a section: log lines, doctor's findings in brackets, and what to do."""

    lines: list[str]
    findings: list[str]


def rows(section: str) -> list[Row]:
    """The items of a section that begin with a log line, or with "No line"."""
    heads = [HEAD.match(" ".join(item.split())) for item in ITEM.findall(section)]
    assert all(heads), "log lines, findings in brackets, a colon, what to do"
    return [Row(code(head[1]), code(head[2] or "")) for head in heads if head]


def code(text: str) -> list[str]:
    return re.findall(r"`([^`]+)`", text)


ALL_FINDINGS = {
    id
    for path in PACKAGE.rglob("*.py")
    for id in re.findall(r'"([a-z]+\.[a-z-]+)"', path.read_text())
}
"""The ids of doctor's findings, which each kind of tier has some of."""
ROWS = [
    (title, row)
    for title, section in SECTIONS.items()
    if title != "how-to-report-a-problem"
    for row in rows(section)
]


# ---- from the alert to the section ---------------------------------------------------------------


@pytest.mark.parametrize("alert", ALERTS)
def test_an_alert_leads_to_a_section_of_its_own(alert):
    page, _, anchor = ALERTS[alert]["runbook_url"].partition("#")
    assert ROOT / page == OPERATE / "runbook.md"
    assert SECTIONS[anchor].strip().startswith(f"`{alert}`: "), "it says whose it is"


def test_make_writes_alerts_that_link_to_the_repository(tmp_path):
    for name in ("Makefile", "examples/observability", "examples/kubernetes"):
        target = tmp_path / name
        target.parent.mkdir(exist_ok=True)
        (shutil.copytree if (ROOT / name).is_dir() else shutil.copy)(ROOT / name, target)

    def make(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["make", "-C", tmp_path, "alerts", *words], capture_output=True, text=True
        )

    assert "make alerts REPOSITORY=https://" in make().stderr
    assert make("REPOSITORY=https://git.example/team/repo/").returncode == 0
    for name in ("alerts.yaml", "prometheusrule.yaml"):
        urls = re.findall(r"runbook_url: (.*)", (tmp_path / "build/alerts" / name).read_text())
        assert urls == [
            f"https://git.example/team/repo/blob/main/{annotations['runbook_url']}"
            for annotations in ALERTS.values()
        ]


@pytest.mark.parametrize("alert", ALERTS)
def test_what_an_alert_tells_to_look_for_or_to_run_exists(alert):
    for quoted in re.findall(r'"([^"]+)"', ALERTS[alert]["description"]):
        if quoted.startswith("safe-offload "):
            assert f"`{quoted}" in section_of(alert), "the section says with which arguments"
        else:
            assert is_said(quoted)


# ---- what a section names ------------------------------------------------------------------------


@pytest.mark.parametrize("alert", ALERTS)
def test_the_section_of_an_alert_has_a_log_line_a_finding_and_a_command(alert):
    section = section_of(alert)
    assert any(row.lines for row in rows(section))
    if alert not in UNSEEN_BY_DOCTOR:
        assert any("safe-offload " in each for each in code(section))
        assert {id for row in rows(section) for id in row.findings} & ALL_FINDINGS


@pytest.mark.parametrize(("title", "row"), ROWS)
def test_what_a_row_names_exists(title, row):
    for message in row.lines:
        if message not in REASONS:
            assert is_said(message), f"no line of the code says {message!r}"
    assert {id for id in row.findings if " " not in id} <= ALL_FINDINGS
