"""The runbook and docs/reference/log-lines.md know all that the package says without a fix."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import safe_offload
from safe_offload.protocol import FailureReason
from tests.docs.messages import is_said

PACKAGE = Path(safe_offload.__file__).parent
DOCS = PACKAGE.parent / "docs"
LOG_LINES = (DOCS / "reference" / "log-lines.md").read_text()
RUNBOOK = (DOCS / "operate" / "runbook.md").read_text()

NOT_IN_SERVICE = ("commands/bench/", "commands/config.py")
LEVELS = ("warning", "error", "exception", "critical")
NUM_WORDS = 4
PLACEHOLDER = re.compile(r"%[-+ #0-9.]*[a-z]")


def messages() -> Iterator[tuple[str, str]]:
    """Where something is logged or refused without a fix, and the words that it begins with."""
    for path in sorted(PACKAGE.rglob("*.py")):
        name = str(path.relative_to(PACKAGE))
        if name.startswith(NOT_IN_SERVICE):
            continue
        tree = ast.parse(path.read_text())
        texts = {
            node.targets[0].id: node.value
            for node in tree.body
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
        }
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and node.args and _is_message(node.func):
                message = node.args[0]
                if isinstance(message, ast.Name):  # it stands at the top of the file
                    message = texts[message.id]
                if "Fix: " not in ast.unparse(message):
                    yield f"{name}:{node.lineno}", _leading_words(message)


def _is_message(function: ast.expr) -> bool:
    if isinstance(function, ast.Attribute):
        return function.attr in LEVELS and ast.unparse(function.value) in ("logger", "_logger")
    return isinstance(function, ast.Name) and function.id == "ConfigError"


def _leading_words(message: ast.expr) -> str:
    """The first words without a value between them; of a message full of values the longest."""
    if isinstance(message, ast.JoinedStr):
        parts = [str(v.value) for v in message.values if isinstance(v, ast.Constant)]
    else:
        parts = PLACEHOLDER.split(ast.literal_eval(message))
    parts = [part.strip(' ":;.') for part in parts]
    long = [part for part in parts if len(part.split()) >= NUM_WORDS - 1]
    part = long[0] if long else max(parts, key=len)
    return " ".join(part.split()[:NUM_WORDS])


MESSAGES = list(messages())


@pytest.mark.parametrize(("where", "words"), MESSAGES)
def test_every_warning_and_error_is_explained(where, words):
    assert words in RUNBOOK + LOG_LINES, f"{where}: neither page knows this message"


def quoted() -> list[str]:
    """What the page says that a log has: first cells, heads of items, and what is a bug."""
    cells = re.findall(r"^\| (.*?) \|", LOG_LINES.partition("## Why a transfer")[0], re.MULTILINE)
    cells += re.findall(r"^- ((?:`[^`]*`|[^`:])+): ", LOG_LINES, re.MULTILINE)
    cells += re.findall(r"\n\n((?:Follow the|Please report) .*?)\n\n", LOG_LINES, re.DOTALL)
    return [message for cell in cells for message in re.findall(r"`([^`]+)`", cell)]


QUOTED = quoted()


@pytest.mark.parametrize("message", QUOTED)
def test_the_package_says_what_is_explained(message):
    assert is_said(message), "no line of the code says this"


@pytest.mark.parametrize("reason", FailureReason)
def test_every_reason_of_a_failure_is_explained(reason):
    assert f"\n| `{reason.value}` |" in LOG_LINES


def test_no_reason_is_explained_that_does_not_exist():
    rows = set(re.findall(r"^\| `([a-z_]+)` \|", LOG_LINES, re.MULTILINE))
    assert rows == {reason.value for reason in FailureReason}
