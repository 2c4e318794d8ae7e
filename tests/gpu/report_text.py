"""Facts and results as Markdown that fits into an issue."""

from __future__ import annotations

import enum
import json
import os
import re
import shlex
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import safe_offload
from tests.gpu.report_facts import Facts
from tests.gpu.report_tests import TestCase

GOOD_TEST = re.compile(r"\S+\.py::.* (PASSED|SKIPPED)\b")

REPORT_CHARS_MAX = 60_000
"""GitHub takes 65,536 characters as the text of an issue."""
FAILURE_CHARS_MAX = 3_000
FAILURES_CHARS_MAX = 20_000
OWN_LINES_CHARS_MAX = 8_000
TAIL_CHARS_MIN, TAIL_CHARS_MAX = 300, 6_000
READ_CHARS_MAX = 4 << 20
LARGE_BYTES = 16 << 20
"""Smaller copies are mostly submitting and waiting; as in tests/benchmarks/transfer.py."""
SECRET = re.compile(r"TOKEN|KEY|SECRET|PASSWORD|CREDENTIAL", re.IGNORECASE)
SECRET_CHARS_MIN = 6
ESCAPES = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")


class Done(enum.Enum):
    """What became of a part."""

    PASSED = "passed"
    FAILED = "FAILED"
    NOT_RUN = "not run"


@dataclass(frozen=True)
class Result:
    """What became of a part.

    Attributes:
        reason: why it did not pass.
        figures: JSON, if it has come to that.
        engine_logs: folder.
    """

    name: str
    command: tuple[str, ...]
    done: Done = Done.NOT_RUN
    reason: str = "its turn has not come"
    duration_s: float = 0.0
    log: Path | None = None
    tests: list[TestCase] = field(default_factory=list)
    figures: Path | None = None
    engine_logs: Path | None = None

    @property
    def verdict(self) -> str:
        """Return a few words."""
        return self.done.value if self.done is Done.PASSED else f"{self.done.value} ({self.reason})"

    @property
    def logs(self) -> list[Path]:
        """Return what it has left, its own log first."""
        engines = sorted(self.engine_logs.glob("*.log")) if self.engine_logs else []
        return [log for log in (self.log, *engines) if log is not None]


def render(facts: Facts, results: Sequence[Result]) -> str:
    """Return the whole report; the ends of the logs share what room is left."""
    num_passed = sum(result.done is Done.PASSED for result in results)
    head = [
        f"# GPU report of safe_offload: {facts.headline}",
        "",
        f"{num_passed} of {len(results)} parts passed.",
        "",
        "| | |",
        "|---|---|",
        *(f"| {name} | {_cell(value)} |" for name, value in facts.rows if value),
        "",
        *_render_parts(results),
        *_render_failures(results),
        *_render_transfer(results),
        *_render_engine(results),
        *_render_layouts(results),
        *_render_own_lines(results),
    ]
    text = hide_secrets("\n".join(head))[: REPORT_CHARS_MAX - 2000]
    logs = [(result, log) for result in results for log in result.logs]
    room = (REPORT_CHARS_MAX - len(text)) // max(len(logs), 1) - 200
    room = max(TAIL_CHARS_MIN, min(TAIL_CHARS_MAX, room))
    for result, log in logs:
        tail = hide_secrets(_drop_good_tests(read_end(log)) if result.tests else read_end(log))
        block = _fold(f"{result.name}: end of {log.name}", tail[-room:])
        if len(text) + len(block) < REPORT_CHARS_MAX:
            text += "\n" + block
    return text + "\n"


def hide_secrets(text: str) -> str:
    """Return a text without the values of what looks like a secret, and without home's name."""
    for name, value in os.environ.items():
        if SECRET.search(name) and len(value) >= SECRET_CHARS_MIN:
            text = text.replace(value, "***")
    home = os.environ.get("HOME", "")
    return text.replace(home, "~") if len(home) > 1 else text


def read_end(log: Path) -> str:
    """Return the end of a log, without colours."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - READ_CHARS_MAX))
            return ESCAPES.sub("", file.read().decode(errors="replace")).strip()
    except OSError as error:
        return str(error)


def _drop_good_tests(log: str) -> str:
    """Return a log of `pytest -v` without its lines of tests that have not failed."""
    return "\n".join(line for line in log.splitlines() if not GOOD_TEST.match(line))


def _render_parts(results: Sequence[Result]) -> Iterator[str]:
    yield from ("## Parts", "", "| part | result | passed | failed | skipped | time |")
    yield "|---|---|---|---|---|---|"
    for result in results:
        counts = ["", "", ""]
        if result.tests:
            outcomes = [test.outcome for test in result.tests]
            counts = [str(outcomes.count(o)) for o in ("passed", "failed", "skipped")]
        row = (result.name, result.verdict, *counts, f"{result.duration_s:.0f} s")
        yield f"| {' | '.join(_cell(value) for value in row)} |"
    yield ""
    yield _fold("commands", "\n".join(shlex.join(result.command) for result in results))
    yield ""


def _render_failures(results: Sequence[Result]) -> Iterator[str]:
    failed = [test for result in results for test in result.tests if test.outcome == "failed"]
    skipped = [test for result in results for test in result.tests if test.outcome == "skipped"]
    if failed:
        yield from ("## Failed tests", "")
    room = FAILURES_CHARS_MAX
    for place, test in enumerate(failed):
        block = _fold(test.name[:200], test.text[-FAILURE_CHARS_MAX:])
        room -= len(block)
        if room < 0:
            yield from (f"- and {len(failed) - place} more", "")
            break
        yield from (block, "")
    if skipped:
        yield from ("## Skipped tests", "")
        reasons = [test.text for test in skipped]
        for reason in sorted(set(reasons)):
            yield f"- {reasons.count(reason)} tests: {reason}"
        yield ""


def _render_transfer(results: Sequence[Result]) -> Iterator[str]:
    """Yield the share of the limit by direction and bytes per range, medians over the copies."""
    report = _figures_of(results, "measurements")
    if report is None:
        return
    large = [m for m in report["measurements"] if m["size_bytes"] >= LARGE_BYTES]
    ways = sorted({way for m in large for way in m["share_of_limit"]} - {"one copy"})
    yield from ("## Copies against the limit of the hardware", "", str(report["device"]), "")
    if not large:
        yield from (f"No copy was of {LARGE_BYTES >> 20} MiB or more.", "")
    else:
        yield "| | bytes per range | limit | " + " | ".join(f"{way} / limit" for way in ways) + " |"
        yield "|---|---|---|" + "---|" * len(ways)
    for traffic, size in sorted({(m["traffic"], m["case"]["range_bytes"]) for m in large}):
        same = [m for m in large if (m["traffic"], m["case"]["range_bytes"]) == (traffic, size)]
        limits = [m["size_bytes"] / statistics.median(m["seconds"]["one copy"]) for m in same]
        cells = [traffic, f"{size:,}", f"{statistics.median(limits) / 1e9:.1f} GB/s"]
        for way in ways:
            shares = [m["share_of_limit"][way] for m in same if way in m["share_of_limit"]]
            cells.append(
                f"{statistics.median(shares):.2f} (lowest {min(shares):.2f})" if shares else "-"
            )
        yield f"| {' | '.join(cells)} |"
    yield ""
    for latency in report["latencies"]:
        yield f"- {latency['name']}: {latency['median_us']:.1f} us ({latency['what']})"
    for way, reason in report["missing"].items():
        yield f"- not measured: {way} ({reason})"
    yield ""


def _render_engine(results: Sequence[Result]) -> Iterator[str]:
    report = _figures_of(results, "pool")
    if report is None:
        return
    summary = report["summary"]
    yield from ("## In the engine", "", *str(report["method"]).splitlines(), "")
    yield f"- second pass: {summary['hit_speedup']:.1f} times faster with the connector"
    hits, requests = summary["num_host_hits"], summary["num_second_pass_requests"]
    yield f"- host hits on the second pass: {hits} of {requests} requests"
    yield f"- first pass: {summary['first_pass_overhead']:+.1%} time to first token"
    yield f"- answers that differ between the engines: {summary['num_different_answers']}"
    yield ""


def _render_layouts(results: Sequence[Result]) -> Iterator[str]:
    report = _figures_of(results, "layout_ratios")
    if report is None:
        return
    yield from ("## Blocks in one piece, as a multiple of layer by layer", "")
    for what, ratios in report["layout_ratios"].items():
        for name, values in ratios.items():
            lowest, median, highest = min(values), statistics.median(values), max(values)
            yield f"- {what}, {name}: {median:.3f} ({lowest:.3f} to {highest:.3f})"
    yield f"- answers that differ between the engines: {report['num_different_answers']}"
    yield ""


def _render_own_lines(results: Sequence[Result]) -> Iterator[str]:
    """Yield what the connector itself has logged in engines, each line once."""
    files = "|".join(
        sorted({file.name for file in Path(safe_offload.__file__).parent.rglob("*.py")})
    )
    own = re.compile(
        rf"\[(?:{files}):\d+\]|safe[-_]offload\b.*(?:Error|error)".replace(".py", r"\.py")
    )
    logs = [log for result in results if result.engine_logs for log in result.logs[1:]]
    for log in logs:
        lines = dict.fromkeys(line for line in read_end(log).splitlines() if own.search(line))
        if lines:
            title = f"what the connector logged: {log.name}"
            yield _fold(title, "\n".join(lines)[:OWN_LINES_CHARS_MAX])
            yield ""


def _figures_of(results: Sequence[Result], key: str) -> dict[str, Any] | None:
    """Return the JSON of the benchmark that has this key; None if it has not got that far."""
    for result in results:
        try:
            found = json.loads(result.figures.read_text()) if result.figures else {}
        except (OSError, ValueError):
            continue
        if key in found:
            return dict(found)
    return None


def _fold(title: str, text: str) -> str:
    """Return a text that is shown on a click, in a fence that nothing in it can close."""
    longest = max((len(ticks) for ticks in re.findall(r"`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    title = title.replace("<", "&lt;")
    return f"<details><summary>{title}</summary>\n\n{fence}text\n{text}\n{fence}\n</details>"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")[:500]
