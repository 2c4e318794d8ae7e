"""Watch a server's metrics in the terminal: is it worth it, healthy, large enough, what it costs.

    safe-offload top http://localhost:8000
    safe-offload top http://localhost:8000 --once

It reads /metrics of a vLLM server every few seconds, until q is pressed; arrows, PgUp and PgDn
scroll. The figures of several engines of one server are added up.
"""

from __future__ import annotations

import contextlib
import os
import re
import select
import sys
import termios
import time
import tty
import urllib.error
import urllib.request
from argparse import ArgumentParser, Namespace
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from http.client import HTTPException
from importlib.util import find_spec
from typing import Any, Final
from urllib.parse import urlsplit, urlunsplit

from safe_offload.config.printing import printable, without_secrets
from safe_offload.config.units import MIB, format_bytes
from safe_offload.errors import SafeOffloadError

PREFIX: Final = "vllm:safe_offload_"
PROMPT_TOKENS: Final = "vllm:prompt_tokens_total"
SILENCE_S: Final = 5.0
RESPONSE_S: Final = 10.0
RESPONSE_BYTES_MAX: Final = 16 * MIB
INTERVAL_S_MAX: Final = 86400
VALUE_MAX: Final = 2.0**63
"""Of a sample: the server is not trusted."""
COLUMN_WIDTH_MIN: Final = 50
RESIZE_S: Final = 0.25
"""At most, a terminal that has changed its size shows what was drawn for the old one."""
KEY: Final = re.compile(rb"\x1b[\[O][0-9;]*[A-Za-z~]|.", re.DOTALL)
KEYS: Final = {
    **dict.fromkeys((b"\x1b[A", b"\x1bOA", b"k"), (-1, "line")),
    **dict.fromkeys((b"\x1b[B", b"\x1bOB", b"j"), (1, "line")),
    **dict.fromkeys((b"\x1b[5~", b"b"), (-1, "page")),
    **dict.fromkeys((b"\x1b[6~", b" "), (1, "page")),
    **dict.fromkeys((b"\x1b[H", b"\x1bOH", b"\x1b[1~", b"g"), (-1, "all")),
    **dict.fromkeys((b"\x1b[F", b"\x1bOF", b"\x1b[4~", b"G"), (1, "all")),
}
_NAME_A_SERVER: Final = "Fix: name the address of a vLLM server, http://HOST:PORT"

Labels = Mapping[str, str]
Row = tuple[str, str, str]
"""A title, the figure since the server's start, and the current one."""
Format = Callable[[float], str]


class TopError(SafeOffloadError):
    """The metrics cannot be read."""


def add_arguments(parser: ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument("url", help="a vLLM server, such as http://localhost:8000")
    parser.add_argument("--once", action="store_true", help="print one frame and exit")
    parser.add_argument(
        "--interval",
        type=float,
        default=2.0,
        metavar="SECONDS",
        help="seconds between readings (%(default)s); rates cover one interval",
    )


def run_command(arguments: Namespace) -> int:
    """Show the metrics until the user presses q or Ctrl-C; return the exit status."""
    if find_spec("rich") is None or find_spec("prometheus_client") is None:
        raise TopError("`top` needs two more packages. Fix: pip install 'safe-offload[top]'.")
    from rich.console import Console

    if not 0 < arguments.interval <= INTERVAL_S_MAX:  # rejects NaN too
        raise TopError(
            f"--interval {arguments.interval:g}: expected more than 0 and at most "
            f"{INTERVAL_S_MAX} seconds. Fix: omit it, or write --interval 2."
        )
    console = Console(markup=False, emoji=False, highlight=False)
    url = metrics_url(arguments.url)
    before = read(url)
    with contextlib.suppress(KeyboardInterrupt):
        if arguments.once or not console.is_terminal:
            time.sleep(arguments.interval)
            console.print(frame(url, read(url), before, console.width))
        else:
            browse(console, url, before, arguments.interval)
    return 0


# ---- reading ----------------------------------------------------------------------------------


def metrics_url(url: str) -> str:
    """Return the address of a server's metrics."""
    parts = urlsplit(url if "://" in url else f"http://{url}")
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise TopError(
            f"{without_secrets(url)} is not the address of a server. Fix: write http://HOST:PORT."
        )
    path = parts.path if parts.path.strip("/") else "/metrics"
    return urlunsplit((parts.scheme, parts.netloc, path, parts.query, ""))


@dataclass(frozen=True, slots=True)
class Reading:
    """The metrics of all engines of a server at one moment; `info` describes its configuration."""

    at_s: float
    samples: Sequence[tuple[str, Labels, float]]
    info: Labels

    def values(self, name: str, **labels: str) -> list[float]:
        """Return the values of a metric's series that have these labels."""
        full = name if name == PROMPT_TOKENS else PREFIX + name
        found = (sample for sample in self.samples if sample[0] == full)
        return [value for _, has, value in found if labels.items() <= has.items()]

    def total(self, name: str, **labels: str) -> float:
        """Return the sum of such series."""
        return sum(self.values(name, **labels))

    def largest(self, name: str, **labels: str) -> float:
        """Return the largest of such series: engines that share something all report it."""
        return max(self.values(name, **labels), default=0.0)

    def label_values(self, label: str) -> list[str]:
        """Return the distinct values of a label."""
        return sorted({has[label] for _, has, _ in self.samples if label in has})


def read(url: str) -> Reading:
    """Read the metrics of a server.

    Raises:
        TopError: they cannot be read, or are not those of the connector.
    """
    label = without_secrets(url)
    try:
        with urllib.request.urlopen(url, timeout=SILENCE_S) as response:
            until_s, text = time.monotonic() + RESPONSE_S, b""
            while piece := response.read1(MIB):
                text += piece
                if len(text) > RESPONSE_BYTES_MAX:
                    size = format_bytes(RESPONSE_BYTES_MAX)
                    raise TopError(f"{label} answers with more than {size}. {_NAME_A_SERVER}.")
                if time.monotonic() > until_s:
                    raise TimeoutError(0, f"no whole answer within {RESPONSE_S:g} s")
    except urllib.error.HTTPError as problem:
        raise TopError(
            f"{label} answers {problem.code} {printable(str(problem.reason))}. {_NAME_A_SERVER}; "
            "its metrics are at /metrics."
        ) from None
    except (OSError, ValueError, HTTPException) as problem:
        cause = getattr(problem, "reason", problem)
        # The text of other errors may contain the address, or what the server sent.
        reason = getattr(cause, "strerror", None) or type(cause).__name__
        raise TopError(
            f"{label} cannot be read: {reason}. Fix: check host and port, and that the server has "
            "started."
        ) from None
    return parse(text.decode(errors="replace"), label)


def parse(text: str, url: str) -> Reading:
    """Return the metrics in a server's response; see `read`."""
    from prometheus_client.parser import text_string_to_metric_families

    samples: list[tuple[str, Labels, float]] = []
    info: Labels = {}
    is_vllm = False
    try:
        for family in text_string_to_metric_families(text):
            is_vllm = is_vllm or family.name.startswith("vllm:")
            for name, has, value in (sample[:3] for sample in family.samples):
                labels = {label: printable(text) for label, text in has.items()}
                if name == f"{PREFIX}info" and value:
                    info = labels
                elif name.startswith(PREFIX) or name == PROMPT_TOKENS:
                    samples.append((name, labels, value if abs(value) <= VALUE_MAX else 0.0))
    except ValueError as problem:
        raise TopError(
            f"{url} does not answer with metrics ({printable(str(problem))}). {_NAME_A_SERVER}."
        ) from problem
    if any(name.startswith(PREFIX) for name, *_ in samples):
        return Reading(time.monotonic(), samples, info)
    if not is_vllm:
        raise TopError(f"{url} has no vLLM metrics. {_NAME_A_SERVER}.")
    raise TopError(
        f"{url} is a vLLM server without SafeCPUOffloadConnector: no metric begins with {PREFIX}. "
        "Fix: start it with --kv-transfer-config "
        '\'{"kv_connector":"SafeCPUOffloadConnector"}\', without --disable-log-stats.'
    )


# ---- figures ----------------------------------------------------------------------------------


class Figures:
    """Rows computed from the last reading and the one before it, if there is one."""

    def __init__(self, now: Reading, before: Reading | None) -> None:
        self.now = now
        self._before = before
        self.is_shared = bool(now.largest("pool_engines"))  # one host memory for several engines

    def growth(self, name: str, **labels: str) -> float | None:
        """Return the growth of a counter between the readings; None across a restart."""
        if self._before is None:
            return None
        grown = self.now.total(name, **labels) - self._before.total(name, **labels)
        return None if grown < 0 else grown

    def counter(self, title: str, name: str, show: Format | None = None, **labels: str) -> Row:
        """Return the row of a counter and its rate."""
        show, rate, grown = show or _number, "-", self.growth(name, **labels)
        if grown is not None and self._before is not None:
            rate = f"{show(grown / max(self.now.at_s - self._before.at_s, 1e-9))}/s"
        return title, show(self.now.total(name, **labels)), rate

    def share(self, title: str, part: str, whole: str, show: Format, **labels: str) -> Row:
        """Return the row of one counter divided by another."""
        since_start, now = (
            _quotient(get(part, **labels), get(whole, **labels), show)
            for get in (self.now.total, self.growth)
        )
        return title, since_start, now

    def mean(self, title: str, name: str, show: Format, **labels: str) -> Row:
        """Return the row of a histogram's mean."""
        return self.share(title, f"{name}_sum", f"{name}_count", show, **labels)

    def reasons(self, title: str, name: str, *by: str, **labels: str) -> Iterator[Row]:
        """Yield the row of a counter, and one for each of its reasons that occurred."""
        yield self.counter(title, name, None, **labels)
        counts: dict[str, float] = defaultdict(float)
        for key, has, value in self.now.samples:
            if key == PREFIX + name and labels.items() <= has.items() and value:
                counts[" ".join(has.get(label, "") for label in by)] += value
        indent = " " * (len(title) - len(title.lstrip()) + 2)
        yield from ((f"{indent}{reason}", _number(count), "") for reason, count in counts.items())

    def part(self, title: str, part: float, whole: float) -> Row:
        """Return the row of a gauge beside the gauge that it is a part of."""
        return title, f"{_number(part)} of {_number(whole)}", _quotient(part, whole, _percent)

    def pool(self, name: str) -> float:
        """Return a gauge of the host memory: each engine that shares it reports all of it."""
        return self.now.largest(name) if self.is_shared else self.now.total(name)


def worth(of: Figures) -> Iterator[Row]:
    """Is it worth it?"""
    yield of.share("prompt tokens from host", "loaded_tokens_total", PROMPT_TOKENS, _percent)
    yield of.counter("tokens from the host", "loaded_tokens_total")
    yield of.counter("time saved, at least", "saved_seconds_total", _seconds)
    yield of.counter("hits", "hit_length_tokens_count")
    yield of.mean("mean tokens per hit", "hit_length_tokens", _number)
    yield of.mean("mean wait for a load", "load_wait_seconds", _seconds)
    yield of.counter("hits skipped as slower", "skipped_hits_total")
    for done, name in (("computed", "compute"), ("loaded", "load")):
        speed = of.now.total(f"{name}_tokens_per_second")
        yield f"tokens a second, {done}", _number(speed) if speed else "-", ""


def health(of: Figures) -> Iterator[Row]:
    """Is it healthy?"""
    yield (
        f"state: {'SWITCHED OFF, see the log' if of.now.total('is_disabled') else 'working'}",
        "",
        "",
    )
    yield of.counter("errors contained", "contained_errors_total")
    yield of.counter("copies overdue", "overdue_transfers_total")
    yield of.counter("checksum mismatches", "checksum_mismatches_total")
    yield of.counter("copy path fallbacks", "copy_path_demotions_total")
    yield from of.reasons("transfers failed", "transfer_failures_total", "direction", "reason")
    yield from of.reasons("ids dropped", "dropped_ids_total", "reason")


def size(of: Figures) -> Iterator[Row]:
    """Is it large enough?"""
    slots = of.pool("slots")
    yield of.part("slots in use", of.pool("used_slots"), slots)
    yield of.part("slots leased", of.now.total("leased_slots"), slots)
    if pins := of.now.total("pins"):
        title = f"slots pinned by {_number(pins)} prompts"
        yield of.part(title, of.now.total("pinned_slots"), slots)
    yield of.counter("blocks stored", "stored_blocks_total")
    yield of.counter("evicted after a hit", "evicted_blocks_total", hit="true")
    yield of.counter("evicted, never hit", "evicted_blocks_total", hit="false")
    age = "evicted_age_seconds_total", "evicted_blocks_total"
    yield of.share("age of evicted blocks", *age, _seconds)
    yield of.counter("blocks not stored", "skipped_blocks_total")
    present = of.now.largest("estimated_hits_present")
    for memory, name in (
        ("halved", "half"),
        ("doubled", "double"),
        ("times four", "quadruple"),
        ("unlimited", "everything"),
    ):
        if rate := of.now.largest(f"estimated_hits_{name}"):
            times = _quotient(rate, present, "{:.2g} times".format)
            yield f"hits, memory {memory}", times, _percent(rate)


def cost(of: Figures) -> Iterator[Row]:
    """What does it cost?"""
    yield "host memory", _bytes(of.pool("capacity_bytes")), of.now.info.get("memory", "")
    for direction in ("load", "store"):
        yield of.counter(f"bytes of {direction}s", f"{direction}_bytes_total", _bytes)
        for what, name in (("time", "transfer_seconds"), ("queueing", "transfer_wait_seconds")):
            yield of.mean(f"mean {direction} {what}", name, _seconds, direction=direction)
        yield f"{direction}s in flight", _number(of.now.total(f"{direction}s_in_flight")), ""


def sharing(of: Figures) -> Iterator[Row]:
    """Who shares it?"""
    if of.is_shared:
        yield "engines sharing it", _number(of.now.largest("pool_engines")), ""
        yield of.part("slots of this server", of.now.total("own_slots"), of.pool("slots"))
        yield of.counter("blocks borrowed", "borrowed_blocks_total")
        yield of.counter("blocks lost", "lost_blocks_total")


def tiers(of: Figures) -> Iterator[Row]:
    """What do tiers do?"""
    for tier in of.now.label_values("tier"):
        out = [
            done
            for operation, done in (("read", "not read"), ("write", "not written"))
            if of.now.total("tier_is_out", tier=tier, operation=operation)
        ]
        state = f"CIRCUIT OPEN, {' and '.join(out)}" if out else "working"
        yield f"tier {tier}: {state}", "", ""
        stored, capacity = (
            of.now.largest(f"tier_{what}_bytes", tier=tier) for what in ("stored", "capacity")
        )
        # A server or bucket does not report what it holds, a directory not before it is counted.
        holds = _bytes(stored) if stored else "unknown"
        holds += f" of {_bytes(capacity)}" if capacity else ""
        yield "  holds", holds, _quotient(stored, capacity, _percent) if stored else ""
        yield of.counter("  read", "tier_read_bytes_total", _bytes, tier=tier)
        yield of.counter("  written", "tier_written_bytes_total", _bytes, tier=tier)
        fetch = {"tier": tier, "operation": "fetch"}
        yield of.mean("  mean fetch time", "tier_call_seconds", _seconds, **fetch)
        yield from of.reasons("  blocks missed", "tier_misses_total", "reason", tier=tier)
        dropped = "tier_dropped_spills_total"
        yield from of.reasons("  blocks not written", dropped, "reason", tier=tier)
    if of.now.label_values("tier"):
        yield of.mean("mean wait for tiers", "tier_wait_seconds", _seconds)


def tenants(of: Figures) -> Iterator[Row]:
    """Who has what?"""
    for tenant in of.now.label_values("tenant"):
        used, quota = (
            _bytes(of.now.total(f"tenant_{what}_bytes", tenant=tenant))
            for what in ("used", "guaranteed")
        )
        yield tenant, used, f"quota {quota}"
        for what in ("hit_tokens", "missed_tokens", "evicted_blocks"):
            title = f"  {what.replace('_', ' ')}"
            yield of.counter(title, f"tenant_{what}_total", tenant=tenant)


SECTIONS: Final = (worth, health, size, cost, sharing, tiers, tenants)
"""In the order of the screen, each headed by its docstring; one without rows is not shown."""


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 or value == int(value) else f"{value:.3g}"


def _percent(value: float) -> str:
    return f"{100 * value:.1f} %"


def _seconds(value: float) -> str:
    if value >= 120:
        return f"{value / 60:,.1f} min" if value < 7200 else f"{value / 3600:,.1f} h"
    return f"{value:.3g} s" if value >= 1 or not value else f"{value * 1000:.3g} ms"


def _bytes(value: float) -> str:
    return format_bytes(int(value))


def _quotient(part: float | None, whole: float | None, show: Format) -> str:
    return show(part / whole) if part is not None and whole else "-"


# ---- the screen -------------------------------------------------------------------------------


def frame(url: str, now: Reading, before: Reading | None, width: int, problem: str = "") -> Any:
    """Return for `rich` the state of the server, and the sections in as many columns as fit."""
    from rich.columns import Columns
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    head = Text(f"{without_secrets(url)}: left column: since the start, right column: now")
    if problem:
        age_s = time.monotonic() - now.at_s
        head = Text(f"NO ANSWER; these figures are {age_s:.0f} s old. {problem}", style="bold red")
    elif "version" in now.info:
        head = Text(f"safe-offload {now.info['version']}, ") + head
    sections = []
    for section in SECTIONS:
        table = Table.grid(padding=(0, 1, 0, 0), expand=True)
        table.add_column(ratio=1, overflow="fold")
        for _ in ("since the start", "now"):
            table.add_column(justify="right", overflow="fold")
        for row in section(Figures(now, before)):
            table.add_row(*row)
        if table.row_count:
            sections.append(Group(Text(section.__doc__ or "", style="bold"), table))
    count = max(1, width // COLUMN_WIDTH_MIN)
    return Group(head, Columns(sections, width=width // count - 1))


def browse(console: Any, url: str, last: Reading, interval_s: float) -> None:
    """Show a page of the frame, which keys scroll, until q is pressed or the terminal is gone."""
    from rich.console import Group
    from rich.live import Live
    from rich.segment import SegmentLines
    from rich.text import Text

    before, problem, first = None, "", 0
    due_s, pressed = time.monotonic() + interval_s, list[bytes]()
    with _keyboard(), Live(console=console, screen=True, auto_refresh=False) as live:
        while not {b"q", b"Q"} & {*pressed}:
            if time.monotonic() >= due_s:
                try:
                    last, before, problem = read(url), last, ""
                except TopError as failure:
                    problem = str(failure)
                due_s = time.monotonic() + interval_s
            size = console.size
            height = max(1, size.height - 1)
            shown = frame(url, last, before, size.width, problem)
            lines = console.render_lines(shown, console.options.update(height=None), pad=False)
            steps = {"line": 1, "page": max(1, height - 1), "all": len(lines)}
            for direction, step in (KEYS[key] for key in pressed if key in KEYS):
                first = max(0, min(first + direction * steps[step], len(lines) - height))
            first = max(0, min(first, len(lines) - height))
            below = max(0, len(lines) - first - height)
            keys = f"{first} lines above, {below} below; q ends; arrows, PgUp, PgDn scroll"
            page = (lines + [[]] * height)[first : first + height]
            last_line = Text(keys, style="reverse", no_wrap=True)
            live.update(Group(SegmentLines(page, new_lines=True), last_line), refresh=True)
            pressed = []
            while not pressed and console.size == size and (left_s := due_s - time.monotonic()) > 0:
                pressed = _pressed(min(left_s, RESIZE_S))


@contextlib.contextmanager
def _keyboard() -> Iterator[None]:
    """Let keys be read as they are pressed."""
    if not sys.stdin.isatty():
        yield
        return
    before = termios.tcgetattr(sys.stdin)
    try:
        tty.setcbreak(sys.stdin)
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)


def _pressed(wait_s: float) -> list[bytes]:
    """Return the keys that are pressed first within a time; q if the terminal is gone."""
    if not sys.stdin.isatty():
        time.sleep(wait_s)
        return []
    if not select.select([sys.stdin], [], [], wait_s)[0]:
        return []
    return KEY.findall(os.read(sys.stdin.fileno(), 64)) or [b"q"]
