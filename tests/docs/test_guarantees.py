"""What docs/guarantees.md names exists: tests, files, profiles; no id and no mutant is missing."""

import re
from collections import Counter
from pathlib import Path

import pytest

import safe_offload
from tests.mutants.catalogue import MUTANTS
from tests.simulator.swarm import NAMES

ROOT = Path(safe_offload.__file__).parent.parent
PAGE = (ROOT / "docs" / "guarantees.md").read_text()
TABLE = PAGE[PAGE.index("## Known faults of other connectors") : PAGE.index("## Mutation testing")]
ROWS = [line for line in TABLE.splitlines() if re.match(r"\| [A-Z]\d", line)]

IDS = [
    *(f"C{n}" for n in range(1, 18)),
    *(f"K{n}" for n in (1, 2, 3, 4, 5, 6, 8, 9, 10, 11)),
    *(f"H{n}" for n in (1, 3, 4, 5, 6, 8)),
    *(f"L{n}" for n in range(1, 6)),
    *("P1", "P2", "P3", "G2", "G3", "G4", "G5", "X1", "X2"),
    *(f"T{n}" for n in range(1, 16)),
]
NUM_PEER_ROWS_MIN = 10


def all_tests() -> set[str]:
    texts = [path.read_text() for path in (ROOT / "tests").rglob("*.py")]  # contract suites too
    return {
        name for text in texts for name in re.findall(r"^ *(?:async )?def (test_\w+)", text, re.M)
    }


def test_every_fault_has_a_row():
    assert [row.split("|")[1].strip() for row in ROWS] == IDS


def test_what_other_connectors_do_was_tried_for_ten_of_them():
    tried = [row for row in ROWS if row.split("|")[-2].strip()]
    assert len(tried) >= NUM_PEER_ROWS_MIN


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.split("|")[1].strip())
def test_a_row_says_what_happens_who_reported_it_and_what_tries_it(row):
    cells = [cell.strip() for cell in row.split("|")[1:-1]]
    assert len(cells) == 5
    assert all(cells[:4])


def test_every_test_that_is_named_exists():
    known = all_tests()
    for name in re.findall(r"`(test_\w+?)(?:_…)?(?:\[[^\]]*\])?`", PAGE):
        assert name in known or any(test.startswith(name) for test in known), name
    for path in re.findall(r"`(tests/[\w/]+\.py)`", PAGE):
        assert (ROOT / path).exists(), path


def test_every_test_file_and_profile_of_a_row_exists():
    for cell in (row.split("|")[4] for row in ROWS):
        for name in re.findall(r"`([^`]+)`", cell):
            assert name.startswith(("test_", "tests/")) or name in NAMES, name


def test_the_table_of_mutants_has_all_of_them():
    broken = PAGE[PAGE.index("## Mutation testing") : PAGE.index("## Not guaranteed")]
    rows = re.findall(r"^\| (I\d+) \| (\d+) \|", broken, re.MULTILINE)
    listed = {promise: int(count) for promise, count in rows}
    assert listed == Counter(mutant.promise for mutant in MUTANTS)
