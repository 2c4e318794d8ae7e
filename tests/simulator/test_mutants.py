"""Breakages of our code that the simulator must catch; `make mutants` runs all of them."""

import ast
import re

import pytest

from tests.mutants.__main__ import hunt_all, mutated
from tests.mutants.anchors import AnchorError, mutate
from tests.mutants.catalogue import MUTANTS

PROMISES = sorted(f"I{number}" for number in range(1, 16))

SOURCE = """
class Desk:
    def take(self, count):
        if (count > len(self.free)
                or self.is_closed):  # or there is nobody
            return []
        elif count < 0:
            raise ValueError
        taken = self.free[:count]
        del self.free[:count]
        self.told(min(count, 1))
        self.told(min(count, 2))
        try:
            self.note(taken)
        except KeyError:
            self.note(None)
        return taken

def take(count):
    del count
"""


@pytest.mark.parametrize(
    ("old", "new", "line"),
    [
        ("del self.free[ : count]", "", None),
        ("del self.free[:count]", "self.free = [\n]", "        self.free = []"),
        ("min(count, 2)", "max(count, 2)", "        self.told(max(count, 2))"),
        ("if count > len(self.free) or self.is_closed: ...", "if 0: ...", "        if 0:"),
        ("if count < 0: ...", "if count < 1: ...", "        elif count < 1:"),
        ("self.note(None)", "pass", "            pass"),
        ("raise ValueError", "", "            pass"),
        ("self.note(taken)", "with self: self.note(taken)", "            with self:"),
    ],
)
def test_a_mutant_changes_one_place_whatever_it_looks_like(old, new, line):
    found = ast.unparse(mutate(SOURCE, "Desk.take", old, new)).splitlines()
    before = ast.unparse(ast.parse(SOURCE)).splitlines()
    added = [text for text in found if text not in before]
    if line is None:
        assert (added, len(found)) == ([], len(before) - 1)
    else:
        assert line in (added or found)


def test_the_body_of_an_open_statement_stays():
    found = ast.unparse(mutate(SOURCE, "Desk.take", "if count < 0: ...", "while count: ..."))
    assert re.search(r"while count:\n +raise ValueError\n", found)


@pytest.mark.parametrize(
    ("function", "old", "new", "why"),
    [
        ("Desk.take", "del self.busy[:count]", "", "0 times"),
        ("Desk.take", "self.told", "self.tell", "2 times"),
        ("Desk.take", "del count", "", "0 times"),
        ("Desk.give", "pass", "", "0 definitions of give"),
        ("take", "del count", "del count  # now", "changes nothing"),
    ],
)
def test_a_place_that_is_not_there_once_is_an_error(function, old, new, why):
    with pytest.raises(AnchorError, match=why):
        mutate(SOURCE, function, old, new)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_the_statement_that_a_mutant_changes_is_there(mutant):
    compile(mutated(mutant), mutant.file, "exec")


def test_there_are_mutants_for_every_promise():
    assert len(MUTANTS) >= 25
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)
    assert sorted({mutant.promise for mutant in MUTANTS}) == PROMISES


def test_one_mutant_of_each_promise_is_caught_by_its_checker():
    chosen = [next(m for m in MUTANTS if m.promise == promise) for promise in PROMISES]
    outcomes = hunt_all(chosen, num_seeds=10, num_processes=2)
    assert [outcome.promise for outcome in outcomes] == PROMISES
