"""docs/guarantees.md and the tests behind it (guarantees.txt): none is missing, all exist."""

import re
from collections import Counter
from pathlib import Path

import pytest

import safe_offload
from tests.mutants.catalogue import MUTANTS
from tests.simulator.swarm import NAMES

ROOT = Path(safe_offload.__file__).parent.parent
PAGE = (ROOT / "docs" / "guarantees.md").read_text()
ROWS = {
    cells[0]: cells
    for line in PAGE.splitlines()
    if re.match(r"\| [A-Z]\d", line)
    for cells in [[cell.strip() for cell in line.split("|")[1:-1]]]
}


def listed(file: str) -> dict[str, list[str]]:
    """What a file beside this one lists of names, below what they are of."""
    text = Path(__file__).with_name(file).read_text()
    return {
        of: re.findall(r"^    (\S+)$", names, re.MULTILINE)
        for of, names in re.findall(r"^(\S.*)\n((?:    .*\n)+)", text, re.MULTILINE)
    }


LISTED = listed("guarantees.txt")

GUARANTEES = [f"I{n}" for n in range(1, 16)]
FAULTS = [
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


def test_every_guarantee_and_fault_has_a_row_and_tests():
    assert [*ROWS] == [*LISTED] == GUARANTEES + FAULTS


def test_what_other_connectors_do_was_tried_for_ten_of_them():
    assert sum(bool(ROWS[fault][-1]) for fault in FAULTS) >= NUM_PEER_ROWS_MIN


@pytest.mark.parametrize("fault", FAULTS)
def test_a_row_says_what_happens_and_who_reported_it(fault):
    assert len(ROWS[fault]) == 4
    assert all(ROWS[fault][:3])


def test_every_test_file_and_profile_that_is_listed_exists():
    known = all_tests()
    for name in (name for names in LISTED.values() for name in names):
        if name.startswith("tests/"):
            assert (ROOT / name).exists(), name
        elif name.endswith("*"):
            assert any(test.startswith(name[:-1]) for test in known), name
        else:
            assert name in known or name in NAMES, name


def test_the_page_counts_all_mutants():
    counts = {id: int(ROWS[id][-1]) for id in GUARANTEES}
    assert counts == Counter(mutant.promise for mutant in MUTANTS)
