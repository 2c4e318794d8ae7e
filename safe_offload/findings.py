"""The findings of `safe-offload doctor`; places report those of their own kind."""

from __future__ import annotations

import enum
from dataclasses import asdict, dataclass


class Severity(enum.Enum):
    """How bad a finding is, the worst first."""

    ERROR = "error"
    """The server would not start, or the connector would be of no use or do harm."""
    WARNING = "warning"
    """It works, but slower or less well than it could, or with a risk."""
    OK = "ok"
    INFO = "info"
    """A fact, not judged."""


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check."""

    id: str  # theme and name, such as "memory.pool"; it stays the same from version to version
    severity: Severity
    found: str  # in one sentence
    expected: str = ""  # empty if it was found
    fix: str = ""  # empty if there is nothing to do

    def to_json(self) -> dict[str, str]:
        """Return the fields as strings."""
        return asdict(self) | {"severity": self.severity.value}


def ok(id: str, found: str) -> Finding:
    """Return a finding that all is well."""
    return Finding(id, Severity.OK, found)


def info(id: str, found: str) -> Finding:
    """Return a finding that judges nothing."""
    return Finding(id, Severity.INFO, found)


def warning(id: str, found: str, expected: str, fix: str) -> Finding:
    """Return a finding of something that could be better."""
    return Finding(id, Severity.WARNING, found, expected, fix)


def error(id: str, found: str, expected: str, fix: str) -> Finding:
    """Return a finding of something that has to be changed."""
    return Finding(id, Severity.ERROR, found, expected, fix)


def refusal(id: str, message: str, expected: str, otherwise: str) -> Finding:
    """Return the error in one of our messages; its fix is `otherwise` if the message has none."""
    found, _, fix = (part.strip().removesuffix(".") for part in message.partition("Fix: "))
    return error(id, found, expected, fix or otherwise)
