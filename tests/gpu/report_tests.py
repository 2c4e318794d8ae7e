"""Which tests passed, failed and were skipped: from pytest's XML, or else from its output."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

PRINTED = re.compile(r"^(\S+\.py::.+?) (PASSED|FAILED|ERROR|SKIPPED)\b *(?:\((.*)\))?")
STARTED = re.compile(r"^(\S+\.py::.+?) *$")
OUTCOMES = {"failure": "failed", "error": "failed", "skipped": "skipped"}


@dataclass(frozen=True)
class TestCase:
    """One test."""

    __test__ = False  # not for pytest

    name: str
    outcome: str  # passed, failed, skipped
    text: str = ""
    duration_s: float = 0.0


def read_test_cases(junit: Path, log: Path) -> list[TestCase]:
    """Return the tests of a run.

    Args:
        junit: written by `--junitxml` at the end of the run; not there if it was cut off.
        log: what `pytest -v` printed.
    """
    try:
        return _read_xml(junit)
    except (OSError, ElementTree.ParseError):
        return _read_log(log)


def _read_xml(junit: Path) -> list[TestCase]:
    found = []
    for case in ElementTree.parse(junit).getroot().iter("testcase"):
        name = f"{case.get('classname', '').rpartition('.')[2]}::{case.get('name', '')}"
        outcome, text = "passed", ""
        for child in case:
            if child.tag in OUTCOMES:
                outcome = OUTCOMES[child.tag]
                is_short = outcome == "skipped"
                text = (child.get("message") if is_short else child.text) or child.text or ""
        found.append(TestCase(name, outcome, text.strip(), float(case.get("time") or 0)))
    return found


def _read_log(log: Path) -> list[TestCase]:
    """Read the lines of `-v`; a test that was started and has no outcome took the run with it."""
    found: list[TestCase] = []
    running = ""
    for line in log.read_text(encoding="utf-8", errors="replace").splitlines():
        if printed := PRINTED.match(line):
            name, outcome, reason = printed.groups()
            outcome = "failed" if outcome == "ERROR" else outcome.lower()
            found.append(TestCase(_short(name), outcome, reason or ""))
            running = ""
        elif started := STARTED.match(line):
            running = started.group(1)
    if running:
        found.append(TestCase(_short(running), "failed", "the run ended or was ended in this test"))
    return found


def _short(name: str) -> str:
    return name.rpartition("/")[2].replace(".py", "", 1)
