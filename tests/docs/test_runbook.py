"""docs/operate/runbook.md: an alert leads to its section, and what a section names exists.

Of each kind of tier: the log line that its code writes, what doctor finds of it, and the command.
"""

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from safe_offload.config.tier_url import BUCKETS, FILE, SERVERS
from tests.docs.messages import PACKAGE, is_said
from tests.docs.test_docs import variants

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
KINDS = {
    "directory": ("files", "directory", (FILE,)),
    "Valkey, Redis": ("valkey", "server", SERVERS),
    "bucket": ("objects", "place", BUCKETS),
}
"""By the word of the tables: where tiers and doctor have them, and the schemes of their urls."""
OF_ALL_TIERS = ("tiers/rare_log.py", "tiers/guarded_tier.py")
OF_ALL_FINDINGS = ("rates", "safety")
UNSEEN_BY_DOCTOR = {"SafeOffloadMemoryErrors"}


def slug(title: str) -> str:
    return re.sub(r"[^\w -]", "", title).lower().replace(" ", "-")


SECTIONS = {
    slug(part.partition("\n")[0]): part.partition("\n")[2] for part in RUNBOOK.split("\n## ")[1:]
}


def section_of(alert: str) -> str:
    return SECTIONS[ALERTS[alert]["runbook_url"].partition("#")[2]]


def rows(section: str) -> list[dict[str, str]]:
    """The rows of the tables of a section, by the heads of their columns."""
    found = []
    for table in re.findall(r"(?:^\|.*\n)+", section, re.MULTILINE):
        head, _, *body = (
            [cell.strip() for cell in line.strip()[1:-1].split("|")] for line in table.splitlines()
        )
        found += [dict(zip(head, cells, strict=True)) for cells in body]
    return found


def code(text: str) -> list[str]:
    return re.findall(r"`([^`]+)`", text)


def findings(modules: tuple[str, ...]) -> set[str]:
    """The ids of findings in modules of doctor."""
    source = "".join((PACKAGE / "commands/doctor" / name).read_text() for name in modules)
    return set(re.findall(r'"([a-z]+\.[a-z-]+)"', source))


ALL_FINDINGS = findings(
    tuple(
        str(path.relative_to(PACKAGE / "commands/doctor"))
        for path in (PACKAGE / "commands/doctor").rglob("*.py")
    )
)
ROWS = [(title, row) for title, section in SECTIONS.items() for row in rows(section)]


# ---- from the alert to the section ---------------------------------------------------------------


@pytest.mark.parametrize("alert", ALERTS)
def test_an_alert_leads_to_a_section_of_its_own(alert):
    page, _, anchor = ALERTS[alert]["runbook_url"].partition("#")
    assert ROOT / page == OPERATE / "runbook.md"
    assert SECTIONS[anchor].strip().startswith(f"`{alert}`: "), "it says whose it is"
    (row,) = re.findall(rf"^- `{alert}` .*", (OPERATE / "dashboard.md").read_text(), re.MULTILINE)
    assert f"](runbook.md#{anchor})" in row


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


def test_a_section_is_of_one_alert():
    assert len({annotations["runbook_url"] for annotations in ALERTS.values()}) == len(ALERTS) == 11


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
    assert any(code(row["log line"]) for row in rows(section))
    assert any("safe-offload " in each for each in code(section))
    named = {id for row in rows(section) for id in code(row.get("`safe-offload doctor`", ""))}
    assert named & ALL_FINDINGS or alert in UNSEEN_BY_DOCTOR


@pytest.mark.parametrize(("title", "row"), ROWS)
def test_what_a_row_names_exists(title, row):
    for message in code(row.get("log line", "")):
        if "_" not in message or " " in message:  # else it is a reason
            assert is_said(message), f"no line of the code says {message!r}"
    for id in code(row.get("`safe-offload doctor`", "")):
        if "." in id and " " not in id:
            assert id in ALL_FINDINGS


@pytest.mark.parametrize("alert", [alert for alert in ALERTS if "Tier" in alert])
@pytest.mark.parametrize("kind", KINDS)
def test_an_alert_on_tiers_is_answered_for_each_kind(alert, kind):
    """With its own log line, its own finding, and a command with a url of that kind."""
    tiers, doctor, schemes = KINDS[kind]
    modules = tuple(f"tiers/{name}.py" for name in (doctor, *OF_ALL_FINDINGS))
    of_kind = [row for row in rows(section_of(alert)) if row["tier"].startswith(kind)]
    assert of_kind
    for row in of_kind:
        lines = [line for line in code(row["log line"]) if " " in line]
        for line in lines:
            assert any(is_said(line, under) for under in (f"tiers/{tiers}", *OF_ALL_TIERS)), line
        assert lines or row["log line"].startswith("none: ")
        ids = {id for id in code(row["`safe-offload doctor`"]) if id.startswith("tiers.")}
        assert ids
        assert ids <= findings(modules)
    commands = [
        variants(each)[0]
        for row in of_kind
        for each in code(row["what to do"])
        if each.startswith("safe-offload ")
    ]
    places = [words[2] for words in commands if words[0] == "cache"]
    assert places
    for place in places:
        scheme = place.partition("://")[0] if "://" in place else FILE
        assert scheme in schemes


def test_a_refused_login_and_a_shared_pool_are_there():
    login = [row for row in rows(section_of("SafeOffloadTierIsOut")) if "login" in row["tier"]]
    assert any("password_file" in row["what to do"] for row in login)
    shared = rows(SECTIONS["a-shared-pool"])
    said = {line for row in shared for line in code(row["log line"])}
    for word in ("and the pool needs", "set by its first engine", "is not shared"):
        assert any(word in line for line in said)
    for row in shared:
        assert row["what to do"]
