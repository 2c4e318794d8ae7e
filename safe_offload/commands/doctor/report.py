"""Findings as text and as an exit status; a check that fails is a finding too."""

from __future__ import annotations

import textwrap
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from safe_offload.config.printing import printable
from safe_offload.findings import Finding, Severity, warning

WIDTH: Final = 100
NOT_CHECKED: Final = "not-checked"
_FOUND_LENGTH_MAX: Final = 2000


def guarded(
    theme: str, check: Callable[..., Iterable[Finding]], *facts: Any, **options: Any
) -> list[Finding]:
    """Return the findings of a check, or that it failed."""
    try:
        return list(check(*facts, **options))
    except Exception as problem:
        what = f"{type(problem).__name__} in {_place_of(problem)}"
        return [
            warning(
                f"{theme}.{NOT_CHECKED}",
                f"the check `{check.__name__}` failed: {what}",
                "a check that runs",
                "if another finding explains it, fix that first; otherwise open an issue with this "
                "line. The other findings hold",
            )
        ]


def _place_of(problem: BaseException) -> str:
    """Return where an error was raised; its text may contain a server's words, or a secret."""
    frames = traceback.extract_tb(problem.__traceback__)
    return ", ".join(f"{Path(each.filename).name}:{each.lineno}" for each in frames[-2:])


def exit_status(findings: Iterable[Finding], least: Severity = Severity.WARNING) -> int:
    """Return 0 if there is nothing to change, 1 otherwise; `least`: an error, or a warning too."""
    counted = {Severity.ERROR, least}
    return int(any(found.severity in counted for found in findings))


def render(findings: Sequence[Finding]) -> str:
    """Return the findings as text, by theme, with a line that sums them up."""
    by_theme: dict[str, list[str]] = {}
    for found in findings:
        theme = found.id.partition(".")[0]
        by_theme.setdefault(theme, [theme]).extend(_lines(found))
    lines = [line for some in by_theme.values() for line in (*some, "")]
    words = [
        _count(sum(found.severity is severity for found in findings), severity.value)
        for severity in (Severity.ERROR, Severity.WARNING)
    ]
    is_well = not exit_status(findings)
    lines.append("Nothing to change." if is_well else f"{', '.join(words)}: see each `fix:` above.")
    return "\n".join(lines)


def _lines(found: Finding) -> Iterator[str]:
    name = found.id.partition(".")[2]
    head = f"  {found.severity.value:<8} {name:<16} "
    yield from _wrapped(head, found.found)
    for label, text in (("expected", found.expected), ("fix", found.fix)):
        if text:
            yield from _wrapped(f"{'':<28}{label}: ", text)


def _wrapped(head: str, text: str) -> list[str]:
    return textwrap.wrap(
        printable(" ".join(text.split()), _FOUND_LENGTH_MAX),
        WIDTH,
        initial_indent=head,
        subsequent_indent=" " * 28,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _count(count: int, word: str) -> str:
    return f"{count} {word}{'' if count == 1 else 's'}"
