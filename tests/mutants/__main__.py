"""Break our code, statement by statement, and let the simulator find out.

Each mutant is applied in memory, in a process of its own, and runs seeds until a checker fires. It
counts as caught if the checker is the one that the mutant's promise names. What the simulator does
not run, the GPU backend, is left to tests over the stand-in device: one of them must fail.

    python -m tests.mutants [--only TEXT] [--seeds 120]
"""

import argparse
import ast
import contextlib
import importlib.abc
import importlib.util
import logging
import multiprocessing
import multiprocessing.connection
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.mutants.anchors import mutate
from tests.mutants.catalogue import MUTANTS, Mutant

PACKAGE = Path(__file__).parents[2] / "safe_offload"


def mutated(mutant: Mutant) -> ast.Module:
    """Return a file, parsed, with the mutant in it.

    Raises AnchorError if the file does not say what the mutant changes, or says it more than once.
    """
    source = (PACKAGE / mutant.file).read_text()
    return mutate(source, mutant.function, mutant.old, mutant.new)


class MutantLoader(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports one module with a change."""

    def __init__(self, mutant: Mutant) -> None:
        self._path = PACKAGE / mutant.file
        self._name = "safe_offload." + mutant.file.removesuffix(".py").replace("/", ".")
        self._tree = mutated(mutant)

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> Any:
        """See `MetaPathFinder`."""
        if fullname == self._name:
            return importlib.util.spec_from_loader(fullname, self, origin=str(self._path))
        return None

    def exec_module(self, module: ModuleType) -> None:
        """See `Loader`."""
        exec(compile(self._tree, str(self._path), "exec"), module.__dict__)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What the simulator found."""

    mutant: Mutant
    profile: str
    num_seeds: int
    promise: str
    detail: str

    @property
    def is_caught(self) -> bool:
        """Whether the checker that should have fired did."""
        return self.promise == self.mutant.promise


def hunt(mutant: Mutant, num_seeds: int) -> Outcome:
    """Run the simulator on a mutant until a checker fires."""
    for name in list(sys.modules):
        if name.startswith(("safe_offload", "tests.simulator")):
            del sys.modules[name]
    sys.meta_path.insert(0, MutantLoader(mutant))
    if mutant.tests:
        return run_tests(mutant)
    from tests.simulator.run import run

    count = 0
    for profile in mutant.profiles:
        for seed in range(num_seeds):
            count += 1
            finding = run(profile, seed).finding
            if finding is not None:
                return Outcome(mutant, profile, count, finding.promise, finding.detail)
    return Outcome(mutant, mutant.profiles[-1], count, "none", "survived")


def run_tests(mutant: Mutant) -> Outcome:
    """Run the tests that must notice a mutant."""
    os.environ["SAFE_OFFLOAD_TEST_PATIENCE_S"] = "20"  # most mutants that are caught hang a test
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        status = pytest.main(["-x", "-p", "no:cacheprovider", *mutant.tests])
    if status is pytest.ExitCode.TESTS_FAILED:
        return Outcome(mutant, "tests", 0, mutant.promise, "a test failed")
    return Outcome(mutant, "tests", 0, "none", f"survived, or no test was run ({status!r})")


def _hunt_in_child(mutant: Mutant, num_seeds: int, answer: Any) -> None:
    logging.disable(logging.CRITICAL)
    with open(os.devnull, "w") as nowhere:
        sys.stderr = nowhere  # what a mutant breaks is noisy
        try:
            outcome = hunt(mutant, num_seeds)
        except BaseException as error:
            outcome = Outcome(mutant, "", 0, "error", repr(error))
        answer.send(outcome)


def hunt_all(mutants: list[Mutant], num_seeds: int, num_processes: int) -> list[Outcome]:
    """Run all mutants, each in a process forked from this one, which has imported vLLM."""
    import vllm.v1.core.sched.async_scheduler
    import vllm.v1.structured_output  # noqa: F401

    context = multiprocessing.get_context("fork")
    waiting, running, outcomes = list(mutants), {}, {}
    while waiting or running:
        while waiting and len(running) < num_processes:
            mutant = waiting.pop(0)
            receiver, sender = context.Pipe(duplex=False)
            process = context.Process(target=_hunt_in_child, args=(mutant, num_seeds, sender))
            process.start()
            sender.close()
            running[receiver] = (mutant, process)
        for receiver in multiprocessing.connection.wait(list(running)):
            mutant, process = running.pop(receiver)
            try:
                outcome = receiver.recv()
            except EOFError:
                outcome = Outcome(mutant, "", 0, "error", "its process died")
            process.join()
            outcomes[mutant.name] = outcome
            mark = "caught" if outcome.is_caught else "NOT CAUGHT"
            print(
                f"{mark:10} {mutant.promise} {mutant.name}: {outcome.promise} in "
                f"{outcome.profile} after {outcome.num_seeds} seeds: {outcome.detail[:160]}",
                flush=True,
            )
    return [outcomes[mutant.name] for mutant in mutants]


def main() -> int:
    """Run it; return 1 if a mutant survives."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("--only", default="", help="mutants whose name contains this")
    parser.add_argument("--seeds", type=int, default=120, help="seeds for each profile")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    arguments = parser.parse_args()
    mutants = [mutant for mutant in MUTANTS if arguments.only in mutant.name]
    for mutant in mutants:
        mutated(mutant)
    outcomes = hunt_all(mutants, arguments.seeds, arguments.processes)
    caught = sum(outcome.is_caught for outcome in outcomes)
    print(f"{caught} of {len(outcomes)} mutants caught")
    return 0 if caught == len(outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
