"""Print the hooks of features: who defines each, and where the planner calls it.

    python -m tests.hooks

A definition is a method of a class that inherits from `Feature`, a call is `feature.HOOK(...)`.
"""

from __future__ import annotations

import ast
from pathlib import Path
from typing import NamedTuple

import safe_offload

SCHEDULER = Path(safe_offload.__file__).parent / "scheduler"


class Hook(NamedTuple):
    """A hook, the classes that define it, and the methods of the planner that call it."""

    name: str
    implementers: list[str]
    callers: list[str]


def _methods(path: Path, base: str = "") -> dict[str, list[ast.FunctionDef]]:
    """Return the methods of each class of a file, of those that inherit from `base`."""
    classes = [each for each in ast.parse(path.read_text()).body if isinstance(each, ast.ClassDef)]
    return {
        each.name: [method for method in each.body if isinstance(method, ast.FunctionDef)]
        for each in classes
        if not base or base in map(ast.unparse, each.bases)
    }


def hooks() -> list[Hook]:
    """Return all hooks, in the order of their definition."""
    features: dict[str, set[str]] = {}
    for path in sorted((SCHEDULER / "features").rglob("*.py")):
        found = _methods(path, "Feature").items()
        features |= {name: {method.name for method in methods} for name, methods in found}
    calls = {m.name: ast.unparse(m) for m in _methods(SCHEDULER / "planner.py")["Planner"]}
    names = [method.name for method in _methods(SCHEDULER / "feature.py")["Feature"]]
    return [
        Hook(
            name,
            [feature for feature, methods in features.items() if name in methods],
            [caller for caller, text in calls.items() if f"feature.{name}(" in text],
        )
        for name in names
    ]


if __name__ == "__main__":
    rows = [(h.name, ", ".join(h.implementers), ", ".join(h.callers)) for h in hooks()]
    for row in [("hook", "defined by", "called by Planner."), *rows]:
        print(f"{row[0]:20} {row[1]:75} {row[2]}")
