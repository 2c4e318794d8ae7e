"""Print the hooks of features: who defines each, and where the planner calls it.

    python -m tests.hooks

Both are read from the source, as a type checker reads it: a definition is a method of a class that
inherits from `Feature`, a call is `feature.HOOK(...)` in planner.py.
"""

from __future__ import annotations

import ast
from pathlib import Path
from typing import NamedTuple

import safe_offload

SCHEDULER = Path(safe_offload.__file__).parent / "scheduler"


class Hook(NamedTuple):
    """A hook, the classes that define it, and the methods that call it."""

    name: str
    implementers: list[str]
    callers: list[str]


def _methods(node: ast.ClassDef) -> list[ast.FunctionDef]:
    return [each for each in node.body if isinstance(each, ast.FunctionDef)]


def _classes(path: Path) -> list[ast.ClassDef]:
    return [node for node in ast.parse(path.read_text()).body if isinstance(node, ast.ClassDef)]


def _calls(function: ast.FunctionDef, name: str) -> bool:
    return any(
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == name
        and ast.unparse(node.func.value) == "feature"
        for node in ast.walk(function)
    )


def hooks() -> list[Hook]:
    """Return all hooks, in the order of their definition."""
    (base,) = (node for node in _classes(SCHEDULER / "feature.py") if node.name == "Feature")
    files = sorted((SCHEDULER / "features").rglob("*.py"))
    features = [
        node
        for path in files
        for node in _classes(path)
        if "Feature" in map(ast.unparse, node.bases)
    ]
    methods = [m for node in _classes(SCHEDULER / "planner.py") for m in _methods(node)]
    return [
        Hook(
            name,
            [node.name for node in features if name in {m.name for m in _methods(node)}],
            [method.name for method in methods if _calls(method, name)],
        )
        for name in (method.name for method in _methods(base))
    ]


def main() -> None:
    """Print the table."""
    rows = [(h.name, ", ".join(h.implementers), ", ".join(h.callers)) for h in hooks()]
    rows = [("hook", "defined by", "called by Planner."), *rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(map(str.ljust, row, widths)).rstrip())


if __name__ == "__main__":
    main()
