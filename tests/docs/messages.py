"""What the package can say: whether a page quotes it as it is."""

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

import safe_offload

PACKAGE = Path(safe_offload.__file__).parent
VALUE = "…"
"""On a page, and here in a message, what is filled in."""
PLACEHOLDER = re.compile(r"%[-+#0-9.]*[a-z]")
EXAMPLE = re.compile(
    r"""[a-z0-9]+://[\w./]+(:\d+)?                             # a url
    | \b\d[\d.]*([ ][KMGT]iB|[ ]blocks[ ]\(…\)|\b) | \[(?:[\d,\ ]+|"[^"]*")\]     # numbers, a key
    | (?<=")[\w.…:/]+(?:",\ "\w+)*(?=")                        # what stands in quotes
    | \b(?:[Ll]oad|[Ss]tore|batch|probe|fetch|spill|read|write|corrupt|copy_failed)\b
    | \bwas\ (?:created|found)\b | \b[A-Z]{3,}\b | VLLM_USE_\w+ | SafeCPUOffloadConnector""",
    re.VERBOSE,
)
"""Values that pages fill in, so that a line is known again."""


@functools.cache
def messages(under: str = "") -> list[str]:
    """Return all strings of the package, or of what is below a path of it, without docstrings."""
    trees = {path: ast.parse(path.read_text()) for path in sorted(PACKAGE.rglob("*.py"))}
    words = {name: text for tree in trees.values() for name, text in _constants(tree)}
    return [
        text
        for path, tree in trees.items()
        if str(path.relative_to(PACKAGE)).startswith(under)
        for text in _strings(tree, words)
    ]


def is_said(quoted: str, under: str = "") -> bool:
    """Return whether each sentence that a page quotes stands in the code, but for its values."""
    return all(
        any(_has_in_order(message, parts) for message in messages(under))
        for parts in _sentences(quoted)
    )


def _sentences(quoted: str) -> Iterator[list[str]]:
    """Yield of each sentence what stands before, between and after its values."""
    for sentence in re.split(r"(?<=[.;:]) ", EXAMPLE.sub(VALUE, quoted)):
        parts = [part.strip(" .:;()") for part in sentence.split(VALUE)]
        if any(parts):
            yield [part for part in parts if part]


def _has_in_order(message: str, parts: list[str]) -> bool:
    begin = 0
    for part in parts:
        begin = message.find(part, begin) + len(part)
        if begin < len(part):
            return False
    return True


def _constants(tree: ast.Module) -> Iterator[tuple[str, str]]:
    for node in tree.body:
        if isinstance(node, ast.AnnAssign | ast.Assign) and isinstance(node.value, ast.Constant):
            target = node.target if isinstance(node, ast.AnnAssign) else node.targets[0]
            if isinstance(target, ast.Name) and isinstance(node.value.value, str):
                yield target.id, node.value.value


def _strings(tree: ast.Module, words: dict[str, str]) -> Iterator[str]:
    formatted = [node for node in ast.walk(tree) if isinstance(node, ast.JoinedStr)]
    known = {id(part) for node in formatted for part in node.values}
    known |= {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in formatted:
        yield "".join(
            str(part.value)
            if isinstance(part, ast.Constant)
            else words.get(ast.unparse(getattr(part, "value", part)), VALUE)
            for part in node.values
        )
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in known:
            yield PLACEHOLDER.sub(VALUE, node.value)
