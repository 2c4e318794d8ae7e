"""Breakages of our code that the simulator must catch; `make mutants` runs all of them."""

import pytest

from tests.mutants.__main__ import hunt_all, mutated
from tests.mutants.catalogue import MUTANTS

PROMISES = sorted(f"I{number}" for number in range(1, 16))


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
