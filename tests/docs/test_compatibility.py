"""docs/reference/compatibility.md and the tests behind it (compatibility.txt)."""

from tests.docs.test_guarantees import ROOT, all_tests, listed
from tests.simulator.swarm import NAMES

PAGE = (ROOT / "docs/reference/compatibility.md").read_text()
HEAD, _, *ROWS = (
    [cell.strip() for cell in line.split("|")[1:-1]]
    for line in PAGE.splitlines()
    if line.startswith("|")
)
LISTED = listed("compatibility.txt")


def test_every_cell_that_is_tested_has_tests_that_exist():
    tested = [
        f"{row[0]} / {column}"
        for row in ROWS
        for column, cell in zip(HEAD[1:], row[1:], strict=True)
        if not cell.startswith("not tested")
    ]
    assert tested == [*LISTED]
    known = all_tests() | {*NAMES}
    assert [name for names in LISTED.values() for name in names if name not in known] == []


def test_what_real_engines_test_is_in_their_folder():
    engines = "".join(path.read_text() for path in (ROOT / "tests/engine").glob("*.py"))
    for row in ROWS:
        for column, cell in zip(HEAD[1:], row[1:], strict=True):
            if not cell.startswith("not tested"):
                names = LISTED[f"{row[0]} / {column}"]
                assert (cell == "E") == any(f"def {name}(" in engines for name in names), row
