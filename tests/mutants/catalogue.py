"""The breakages in `catalogue.txt`: what is taken out, which promise then breaks, who notices.

A paragraph each: its name; in one line, so that `grep` finds all of it, the promise, whose checker
must catch it (docs/guarantees.md), in which profiles of the simulator, tried in turn, or by which
tests; the function that is changed, and its file below `safe_offload/`. Lines with a minus say once
in the function what is changed (see `anchors`), those with a plus stand in its place.
"""

import re
from dataclasses import dataclass
from pathlib import Path

_WHERE = re.compile(
    r"(?P<promise>I\d+) (?P<by>in|by) (?P<who>.+): (?P<function>\S+), (?P<file>\S+)"
)


@dataclass(frozen=True, slots=True)
class Mutant:
    """One statement of our code, changed; see above."""

    name: str  # what is broken, in words
    file: str
    function: str
    old: str
    new: str
    promise: str
    profiles: tuple[str, ...] = ()
    tests: tuple[str, ...] = ()  # arguments for pytest, in place of profiles


def _read(paragraph: str) -> Mutant:
    name, *lines = paragraph.splitlines()
    code = {mark: [t[4:] for t in lines if t.startswith(f"  {mark} ")] for mark in "-+"}
    found = _WHERE.fullmatch(lines[0].strip())
    if found is None:
        raise ValueError(f"{name}: expected a promise, who notices, a function and its file")
    file, _, names = found["who"].partition(" -k ")
    is_by_tests = found["by"] == "by"
    return Mutant(
        name,
        found["file"],
        found["function"],
        "\n".join(code["-"]),
        "\n".join(code["+"]),
        found["promise"],
        () if is_by_tests else tuple(found["who"].split(", ")),
        (file, "-k", names) if is_by_tests else (),
    )


_PARAGRAPHS = Path(__file__).with_suffix(".txt").read_text().strip().split("\n\n")
MUTANTS = tuple(_read(paragraph) for paragraph in _PARAGRAPHS if not paragraph.startswith("#"))
