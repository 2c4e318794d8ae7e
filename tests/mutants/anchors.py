"""Where a mutant changes the code: a statement of a function, found by what it says.

Code is compared as it is parsed, so that formatting, line breaks and comments do not matter. What
stands nowhere in the function, or more than once, is an error.

    if load.failed: ...         the statement whatever its body is; in the replacement, ... is that
    self._demote(path, error)   a statement, or several in a row
    min(counts.values())        if no statement is that: a part of one
"""

import ast
from collections.abc import Iterator
from typing import Any, cast

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
BODIES = ("body", "orelse", "handlers", "finalbody")


class AnchorError(ValueError):
    """What a mutant changes is not there, or is there more than once."""


def mutate(source: str, function: str, old: str, new: str) -> ast.Module:
    """Return a file as it is parsed, with one change.

    `source`: of the file; `function`: that is changed, with its class: `Stores.plan`; `old`: what
    it says now; see above; `new`: what stands there instead; empty takes it out. Raises AnchorError
    if there is no such place, or more than one, or nothing would change.
    """
    tree = ast.parse(source)
    inside = _find(tree, function)
    before = ast.dump(inside)
    wanted = ast.parse(old).body
    runs = list(_runs(inside, wanted))
    is_part = not runs and len(wanted) == 1 and isinstance(wanted[0], ast.Expr)
    places = list(_parts(inside, cast("ast.Expr", wanted[0]).value)) if is_part else runs
    if len(places) != 1:
        raise AnchorError(f"{function} says {old!r} {len(places)} times; expected once")
    body, start = places[0]
    if is_part:
        _replace_part(body, start, ast.parse(new, mode="eval").body)
    else:
        found = body[start : start + len(wanted)]
        body[start : start + len(wanted)] = _statements(new, wanted, found)
        body[:] = body or [ast.Pass()]
    if ast.dump(inside) == before:
        raise AnchorError(f"{function}: {new!r} changes nothing")
    return ast.fix_missing_locations(tree)


def _find(tree: ast.Module, qualified_name: str) -> ast.AST:
    node: Any = tree
    for name in qualified_name.split("."):
        found = [n for n in node.body if isinstance(n, Definition) and n.name == name]
        if len(found) != 1:
            raise AnchorError(f"{qualified_name}: {len(found)} definitions of {name}; expected one")
        node = found[0]
    return cast("ast.AST", node)


def _runs(inside: ast.AST, wanted: list[ast.stmt]) -> Iterator[tuple[list[Any], int]]:
    """Yield each place where these statements stand in a row: a body, and where in it."""
    for node in ast.walk(inside):
        for name in BODIES:
            body = getattr(node, name, None)
            if not isinstance(body, list):
                continue
            for start in range(len(body) - len(wanted) + 1):
                if all(map(_is_like, wanted, body[start:])):
                    yield body, start


def _is_like(wanted: ast.stmt, statement: ast.stmt) -> bool:
    if _is_open(wanted):
        return _header(wanted) == _header(statement)
    return ast.dump(wanted) == ast.dump(statement)


def _is_open(statement: ast.AST) -> bool:
    """Whether the body is `...`, which stands for whatever it is."""
    body = getattr(statement, "body", None)
    return isinstance(body, list) and [ast.unparse(child) for child in body] == ["..."]


def _header(statement: ast.stmt) -> list[str]:
    fields = [getattr(statement, name) for name in statement._fields if name not in BODIES]
    parts = [part for field in fields for part in (field if isinstance(field, list) else [field])]
    said = [ast.dump(part) if isinstance(part, ast.AST) else repr(part) for part in parts]
    return [type(statement).__name__, *said]


def _statements(new: str, wanted: list[ast.stmt], found: list[ast.stmt]) -> list[ast.stmt]:
    """Return the replacement, with what `...` stands for in its place."""
    statements = ast.parse(new).body
    for node in [node for statement in statements for node in ast.walk(statement)]:
        ast.copy_location(node, found[0])
        if _is_open(node) and _is_open(wanted[0]):
            for name in BODIES:
                if hasattr(node, name) and hasattr(found[0], name):
                    setattr(node, name, getattr(found[0], name))
    return statements


def _parts(inside: ast.AST, wanted: ast.expr) -> Iterator[tuple[Any, Any]]:
    """Yield each place where an expression stands: what it is part of, and where in that."""
    said = ast.dump(wanted)
    for node in ast.walk(inside):
        for name, value in ast.iter_fields(node):
            if isinstance(value, ast.expr) and ast.dump(value) == said:
                yield node, name
            for index, part in enumerate(value if isinstance(value, list) else ()):
                if isinstance(part, ast.expr) and ast.dump(part) == said:
                    yield value, index


def _replace_part(whole: Any, place: Any, new: ast.expr) -> None:
    is_list = isinstance(whole, list)
    old = whole[place] if is_list else getattr(whole, place)
    for node in ast.walk(new):
        ast.copy_location(node, old)
    if is_list:
        whole[place] = new
    else:
        setattr(whole, place, new)
