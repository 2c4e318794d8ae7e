"""Watch a server's metrics in the terminal: is it worth it, healthy, large enough, what it costs.

    safe-offload top http://localhost:8000
    safe-offload top http://localhost:8000 --once

It reads /metrics of a vLLM server every few seconds, until q is pressed; arrows, PgUp and PgDn
scroll. Several engines of one server are added up.
"""

from __future__ import annotations

import contextlib
import errno
import signal
import time
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

from safe_offload.commands import screen
from safe_offload.config.printing import printable, without_secrets
from safe_offload.config.units import MIB, format_bytes
from safe_offload.errors import SafeOffloadError

PREFIX: Final = "vllm:safe_offload_"
PROMPT_TOKENS: Final = "vllm:prompt_tokens_total"
TIMEOUT_S: Final = 5.0
WHOLE_TIMEOUT_S: Final = 10.0
ANSWER_BYTES_MAX: Final = 16 * MIB
INTERVAL_S: Final = 2.0
INTERVAL_S_MAX: Final = 86400
VALUE_MAX: Final = 2.0**63
"""Of a sample: whatever answers may say anything."""
NOTHING: Final = "-"
COLUMN_WIDTH_MIN: Final = 48
"""Two columns, or more, stand side by side from that on."""
_GAP: Final = 2
_RATE_WIDTH: Final = 9

Labels = Mapping[str, str]
Row = tuple[str, str, str]
"""What it is, since the server started, and now."""
Show = Callable[[float], str]


class TopError(SafeOffloadError):
    """The metrics cannot be read."""


def add_arguments(parser: ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument("url", help="a vLLM server, such as http://localhost:8000")
    parser.add_argument("--once", action="store_true", help="print one frame and exit")
    parser.add_argument(
        "--interval",
        type=float,
        default=INTERVAL_S,
        metavar="SECONDS",
        help="seconds between readings (%(default)s); rates cover one interval",
    )


def run_command(arguments: Namespace) -> int:
    """Show the metrics until the user presses q or interrupts; return the exit status."""
    if find_spec("rich") is None or find_spec("prometheus_client") is None:
        raise TopError("`top` needs two more packages. Fix: pip install 'safe-offload[top]'.")
    from rich.console import Console

    if not 0 < arguments.interval <= INTERVAL_S_MAX:  # false too for what is not a number
        raise TopError(
            f"--interval {arguments.interval:g}: expected more than 0 and at most "
            f"{INTERVAL_S_MAX} seconds. Fix: omit it, or write --interval 2."
        )
    watch = Watch(metrics_url(arguments.url))
    watch.read()
    try:
        console = Console(highlight=False)
        if arguments.once or not console.is_terminal:
            time.sleep(arguments.interval)
            watch.read()
            console.print(frame(watch))
        else:
            _show(console, watch, arguments.interval)
    except KeyboardInterrupt:
        pass
    return 0


def metrics_url(url: str) -> str:
    """Return the address of the metrics of a server."""
    parts = urlsplit(url if "://" in url else f"http://{url}")
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise TopError(
            f"{without_secrets(url)} is not the address of a server. Fix: write http://HOST:PORT."
        )
    path = parts.path if parts.path.strip("/") else "/metrics"
    return urlunsplit((parts.scheme, parts.netloc, path, parts.query, ""))


# ---- reading ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Reading:
    """The metrics at a moment.

    Attributes:
        samples: by name and labels, of every engine of the server.
    """

    at_s: float  # of a clock that never goes back
    samples: Mapping[tuple[str, frozenset[tuple[str, str]]], float]
    info: Labels  # labels of the set-up in force

    def _series(self, name: str, labels: Labels) -> Iterator[tuple[Labels, float]]:
        """Yield the series of a name that have these labels."""
        full = name if name == PROMPT_TOKENS else PREFIX + name
        for (key, has), value in self.samples.items():
            if key == full and labels.items() <= has:
                yield dict(has), value

    def total(self, name: str, **labels: str) -> float:
        """Return the sum of the series of a name that have these labels."""
        return sum(value for _, value in self._series(name, labels))

    def largest(self, name: str, **labels: str) -> float:
        """Return the largest of such series: engines that share something all report it."""
        return max((value for _, value in self._series(name, labels)), default=0.0)

    def values_of(self, label: str) -> list[str]:
        """Return the values that a label has."""
        return sorted({value for _, has in self.samples for key, value in has if key == label})

    def by(self, name: str, *labels: str, **having: str) -> dict[str, float]:
        """Return the series of a name that are not 0, by the values of some labels."""
        found: dict[str, float] = defaultdict(float)
        for has, value in self._series(name, having):
            if value:
                found[" ".join(has.get(label, "") for label in labels)] += value
        return dict(found)


def read(url: str) -> Reading:
    """Read the metrics of a server; a TopError says what is wrong, and how to fix it."""
    label = without_secrets(url)
    try:
        with _within(WHOLE_TIMEOUT_S), urllib.request.urlopen(url, timeout=TIMEOUT_S) as answer:
            found: bytes = answer.read(ANSWER_BYTES_MAX + 1)
    except urllib.error.HTTPError as problem:
        reason = printable(str(problem.reason))
        raise TopError(
            f"{label} answers {problem.code} {reason}. Fix: name the address of a vLLM server, "
            "http://HOST:PORT; its metrics are at /metrics."
        ) from None
    except (OSError, ValueError, HTTPException) as problem:
        cause = getattr(problem, "reason", problem)
        # The text of another error may have the address in it, or what the server sent.
        reason = getattr(cause, "strerror", None) or type(cause).__name__
        raise TopError(
            f"{label} cannot be read: {reason}. Fix: check host and port, and that the server has "
            "started."
        ) from None
    if len(found) > ANSWER_BYTES_MAX:
        raise TopError(
            f"{label} answers with more than {format_bytes(ANSWER_BYTES_MAX)}. Fix: name the "
            "address of a vLLM server, http://HOST:PORT; its metrics are at /metrics."
        )
    return parse(found.decode(errors="replace"), label)


@contextlib.contextmanager
def _within(seconds: float) -> Iterator[None]:
    """End what takes longer, also what gets a byte now and then; in the main thread only."""

    def expire(*_: object) -> None:
        raise TimeoutError(errno.ETIMEDOUT, f"no whole answer within {seconds:g} s")

    before = signal.signal(signal.SIGALRM, expire)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def parse(text: str, url: str) -> Reading:
    """Return what a server's metrics say; a TopError if none of ours is among them."""
    from prometheus_client.parser import text_string_to_metric_families

    samples: dict[tuple[str, frozenset[tuple[str, str]]], float] = {}
    info: dict[str, str] = {}
    is_vllm = False
    try:
        for family in text_string_to_metric_families(text):
            is_vllm = is_vllm or family.name.startswith("vllm:")
            for name, found, value in (sample[:3] for sample in family.samples):
                labels = {label: printable(text) for label, text in found.items()}
                if name == f"{PREFIX}info" and value:
                    info = labels
                elif name.startswith(PREFIX) or name == PROMPT_TOKENS:
                    # NaN is not comparable; sums of what is kept are finite.
                    is_number = abs(value) <= VALUE_MAX
                    samples[name, frozenset(labels.items())] = value if is_number else 0.0
    except ValueError as problem:
        raise TopError(
            f"{url} does not answer with metrics ({printable(str(problem))}). Fix: name the "
            "address of a vLLM server, http://HOST:PORT."
        ) from problem
    if not any(name.startswith(PREFIX) for name, _ in samples):
        raise TopError(_no_metrics(url, is_vllm=is_vllm))
    return Reading(time.monotonic(), samples, info)


def _no_metrics(url: str, *, is_vllm: bool) -> str:
    if not is_vllm:
        return f"{url} has no vLLM metrics. Fix: name the address of a vLLM server."
    return (
        f"{url} is a vLLM server without SafeCPUOffloadConnector: no metric begins with {PREFIX}. "
        "Fix: start it with --kv-transfer-config "
        '\'{"kv_connector":"SafeCPUOffloadConnector"}\', without --disable-log-stats.'
    )


@dataclass(slots=True)
class Watch:
    """Reads a server again and again; `read` alone changes it.

    Attributes:
        last, before: the last two readings since the server's start; None if there is none.
        problem_since_s: when the first of the attempts failed that have failed since.
    """

    url: str
    last: Reading | None = None
    before: Reading | None = None
    problem: str = ""  # why the last attempt failed; empty if it did not
    problem_since_s: float = 0.0

    def read(self) -> None:
        """Read once; only the first failure is raised, later ones are noted in `problem`."""
        try:
            reading = read(self.url)
        except TopError as problem:
            if self.last is None:
                raise
            if not self.problem:
                self.problem_since_s = time.monotonic()
            self.problem = str(problem)
            return
        has_restarted = self.last is not None and _has_restarted(self.last, reading)
        self.before = None if has_restarted else self.last
        self.last, self.problem = reading, ""


def _has_restarted(before: Reading, after: Reading) -> bool:
    """Return whether a counter has become smaller, which only a new process makes it."""
    return any(
        after.samples.get(key, 0.0) < value
        for key, value in before.samples.items()
        if key[0].endswith(("_total", "_count"))
    )


# ---- what is shown ----------------------------------------------------------------------------


class View:
    """The last reading and the one before it, if there is one, and what follows from them."""

    def __init__(self, now: Reading, before: Reading | None) -> None:
        self.now = now
        self._before = before

    def grown(self, name: str, **labels: str) -> float | None:
        """Return by how much a counter has grown since the reading before."""
        if self._before is None:
            return None
        return self.now.total(name, **labels) - self._before.total(name, **labels)

    def rate(self, name: str, **labels: str) -> float | None:
        """Return the growth of a counter in a second."""
        grown = self.grown(name, **labels)
        if grown is None or self._before is None:
            return None
        return grown / max(self.now.at_s - self._before.at_s, 1e-9)

    def counter(self, title: str, name: str, show: Show | None = None, **labels: str) -> Row:
        """Return the row of a counter."""
        show, rate = show or _number, self.rate(name, **labels)
        growth = NOTHING if rate is None else f"{show(rate)}/s"
        return title, show(self.now.total(name, **labels)), growth

    @property
    def is_shared(self) -> bool:
        """Return whether the host memory is one that several engines share."""
        return bool(self.now.largest("pool_engines"))

    def pool(self, name: str) -> float:
        """Return a gauge of the host memory: each engine that shares it has all of it."""
        return self.now.largest(name) if self.is_shared else self.now.total(name)

    def mean(self, title: str, name: str, show: Show, **labels: str) -> Row:
        """Return the row of the mean of a histogram."""
        return self.share(title, f"{name}_sum", f"{name}_count", show, **labels)

    def share(self, title: str, part: str, whole: str, show: Show, **labels: str) -> Row:
        """Return the row of one counter divided by another."""
        since_start, now = (
            _quotient(total(part, **labels), total(whole, **labels), show)
            for total in (self.now.total, self.grown)
        )
        return title, since_start, now

    def reasons(self, title: str, name: str, *by: str, **having: str) -> list[Row]:
        """Return the row of a counter, and below it one for each of its reasons that occurred."""
        indent = " " * (len(title) - len(title.lstrip()) + 2)
        series = self.now.by(name, *by, **having)
        rows = [(f"{indent}{what}", _number(count), "") for what, count in series.items()]
        return [self.counter(title, name, None, **having), *rows]


def worth(view: View) -> list[Row]:
    """Is it worth it?"""
    speeds = (
        (f"tokens a second, {done}", _number(speed) if speed else NOTHING, "")
        for done, name in (("computed", "compute"), ("loaded", "load"))
        for speed in [view.now.total(f"{name}_tokens_per_second")]
    )
    return [
        view.share("prompt tokens from host", "loaded_tokens_total", PROMPT_TOKENS, _percent),
        view.counter("tokens from the host", "loaded_tokens_total"),
        view.counter("time saved, at least", "saved_seconds_total", _seconds),
        view.counter("hits", "hit_length_tokens_count"),
        view.mean("mean tokens per hit", "hit_length_tokens", _number),
        view.mean("mean wait for a load", "load_wait_seconds", _seconds),
        view.counter("hits skipped as slower", "skipped_hits_total"),
        *speeds,
    ]


def health(view: View) -> list[Row]:
    """Is it healthy?"""
    is_disabled = bool(view.now.total("is_disabled"))
    return [
        ("state", "SWITCHED OFF: see the log" if is_disabled else "working", ""),
        view.counter("errors contained", "contained_errors_total"),
        view.counter("copies overdue", "overdue_transfers_total"),
        view.counter("checksum mismatches", "checksum_mismatches_total"),
        view.counter("copy path fallbacks", "copy_path_demotions_total"),
        *view.reasons("transfers failed", "transfer_failures_total", "direction", "reason"),
        *view.reasons("ids dropped", "dropped_ids_total", "reason"),
    ]


def size(view: View) -> list[Row]:
    """Is it large enough?"""
    slots, used = view.pool("slots"), view.pool("used_slots")
    leased = view.now.total("leased_slots")
    pinned, pins = view.now.total("pinned_slots"), int(view.now.total("pins"))
    share = _quotient(pinned, slots, _percent)
    present = view.now.largest("estimated_hits_present")
    return [
        ("slots in use", f"{_number(used)} of {_number(slots)}", _quotient(used, slots, _percent)),
        ("slots leased", _number(leased), _quotient(leased, slots, _percent)),
        *([("slots pinned", f"{_number(pinned)}, {pins} prompts", share)] if pins else ()),
        view.counter("blocks stored", "stored_blocks_total"),
        view.counter("evicted after a hit", "evicted_blocks_total", hit="true"),
        view.counter("evicted, never hit", "evicted_blocks_total", hit="false"),
        view.share(
            "age of evicted blocks", "evicted_age_seconds_total", "evicted_blocks_total", _seconds
        ),
        view.counter("blocks not stored", "skipped_blocks_total"),
        *(
            (
                f"hits, memory {what}",
                _quotient(rate, present, "{:.2g} times".format),
                _percent(rate),
            )
            for what, name in (
                ("halved", "half"),
                ("doubled", "double"),
                ("times four", "quadruple"),
                ("unlimited", "everything"),
            )
            if (rate := view.now.largest(f"estimated_hits_{name}"))
        ),
    ]


def cost(view: View) -> list[Row]:
    """What does it cost?"""
    memory = view.now.info.get("memory", "")
    rows: list[Row] = [("host memory", _bytes(view.pool("capacity_bytes")), memory)]
    for direction in ("load", "store"):
        rows.append(view.counter(f"bytes of {direction}s", f"{direction}_bytes_total", _bytes))
    for name, title in (
        ("transfer_seconds", "mean {} time"),
        ("transfer_wait_seconds", "mean {} queueing"),
    ):
        rows += [
            view.mean(title.format(direction), name, _seconds, direction=direction)
            for direction in ("load", "store")
        ]
    in_flight = (f"{_number(view.now.total(f'{d}s_in_flight'))} {d}s" for d in ("load", "store"))
    return [*rows, ("in flight", ", ".join(in_flight), "")]


def tiers(view: View) -> list[Row]:
    """What do tiers do? Nothing if the server has none."""
    rows: list[Row] = []
    # They have samples from the start; a capacity of 0 is that of a tier without a limit.
    for tier in view.now.values_of("tier"):
        stored_bytes, capacity_bytes = (
            view.now.largest(f"tier_{what}_bytes", tier=tier) for what in ("stored", "capacity")
        )
        # A server or bucket does not say what it holds, a directory not before it is counted.
        used = _bytes(stored_bytes) if stored_bytes else "unknown"
        used += f" of {_bytes(capacity_bytes)}" if capacity_bytes else ""
        share = _quotient(stored_bytes, capacity_bytes, _percent) if stored_bytes else ""
        out = [
            f"not {done}"
            for operation, done in (("read", "read"), ("write", "written"))
            if view.now.total("tier_is_out", tier=tier, operation=operation)
        ]
        state = f"CIRCUIT OPEN, {' and '.join(out)}: see the log" if out else "working"
        rows += [
            (f"tier {tier}", state, ""),
            ("  holds", used, share),
            view.counter("  read", "tier_read_bytes_total", _bytes, tier=tier),
            view.counter("  written", "tier_written_bytes_total", _bytes, tier=tier),
            view.mean(
                "  mean fetch time", "tier_call_seconds", _seconds, tier=tier, operation="fetch"
            ),
        ]
        for title, name in (("blocks missed", "misses"), ("blocks not written", "dropped_spills")):
            rows += view.reasons(f"  {title}", f"tier_{name}_total", "reason", tier=tier)
    if rows:
        rows.append(view.mean("mean wait for tiers", "tier_wait_seconds", _seconds))
    return rows


def tenants(view: View) -> list[Row]:
    """Who has what? Nothing without tenants."""
    rows: list[Row] = []
    for tenant in view.now.values_of("tenant"):
        used, guaranteed = (
            _bytes(view.now.total(f"tenant_{what}_bytes", tenant=tenant))
            for what in ("used", "guaranteed")
        )
        rows.append((tenant, f"{used}, quota {guaranteed}", ""))
        for what in ("hit_tokens", "missed_tokens", "evicted_blocks"):
            title = f"  {what.replace('_', ' ')}"
            rows.append(view.counter(title, f"tenant_{what}_total", tenant=tenant))
    return rows


def sharing(view: View) -> list[Row]:
    """What do engines share? Nothing unless the host memory is shared."""
    if not view.is_shared:
        return []
    own, slots = view.now.total("own_slots"), view.pool("slots")
    return [
        ("engines sharing it", _number(view.now.largest("pool_engines")), ""),
        (
            "slots of this server",
            f"{_number(own)} of {_number(slots)}",
            _quotient(own, slots, _percent),
        ),
        view.counter("blocks borrowed", "borrowed_blocks_total"),
        view.counter("blocks lost", "lost_blocks_total"),
    ]


QUESTIONS: Final = {
    "Is it worth it?": worth,
    "Is it healthy?": health,
    "Is it large enough?": size,
    "What does it cost?": cost,
    "Who shares it?": sharing,
    "What do tiers do?": tiers,
    "Who has what?": tenants,
}
"""One without rows is not shown."""


def frame(watch: Watch) -> Any:
    """Return what `rich` prints: how the server is, and a section for each question."""
    from rich.console import Group
    from rich.text import Text

    assert watch.last is not None
    view = View(watch.last, watch.before)
    sections = [(question, rows) for question, ask in QUESTIONS.items() if (rows := ask(view))]
    return Group(_status(watch, Text), Sections(sections))


class Sections:
    """Sections in as many columns as there is room for, of about the same height.

    Nothing is cut off: what is too long for its column goes on in the next line.
    """

    def __init__(self, sections: Sequence[tuple[str, Sequence[Row]]]) -> None:
        self._sections = sections

    def __rich_console__(self, console: Any, options: Any) -> Iterator[Any]:
        from rich.table import Table

        count = max(1, (options.max_width + _GAP) // (COLUMN_WIDTH_MIN + _GAP))
        count = min(count, len(self._sections))
        width = (options.max_width - _GAP * (count - 1)) // count
        columns: list[list[Any]] = [[] for _ in range(count)]
        for question, rows in self._sections:
            columns[min(range(count), key=lambda index: len(columns[index]))] += [
                _rule(question, width),
                *_lines_of(rows, width, console),
            ]
        grid = Table.grid(padding=(0, _GAP, 0, 0), pad_edge=False)
        for _ in columns:
            grid.add_column(width=width)
        grid.add_row(*map(_joined, columns))
        yield grid


def _rule(question: str, width: int) -> Any:
    from rich.text import Text

    return Text(question + " " + "-" * (width - len(question) - 1), style="bold")


def _joined(lines: Sequence[Any]) -> Any:
    from rich.text import Text

    return Text("\n").join(lines)


def _lines_of(rows: Sequence[Row], width: int, console: Any) -> Iterator[Any]:
    """Yield the lines of a section: titles on the left, numbers below each other on the right."""
    from rich.text import Text  # no markup: words of a server are in it

    rates = max([_RATE_WIDTH, *(len(rate) for _, _, rate in rows)])
    for title, count, rate in rows:
        left, right = Text(title), Text(f"{count} {rate:>{rates}}")
        if not rate and left.cell_len + 1 + right.cell_len > width:
            right = Text(count)
        if left.cell_len + 1 + right.cell_len <= width:
            left.pad_right(width - left.cell_len - right.cell_len)
            yield left + right
            continue
        yield from left.wrap(console, width, overflow="fold")
        for line in Text(f"{count} {rate}".rstrip()).wrap(console, width, overflow="fold"):
            line.align("right", width)
            yield line


def _status(watch: Watch, text: Any) -> Any:
    assert watch.last is not None
    if watch.problem:
        gone_s = time.monotonic() - watch.problem_since_s
        return text(
            f"The server has not answered for {gone_s:.0f} s; these are the last figures. "
            f"{watch.problem}",
            style="bold red",
        )
    info = watch.last.info
    version = f"safe-offload {info['version']}, " if "version" in info else ""
    since = "rates follow with the next reading" if watch.before is None else "right column: now"
    return text(f"{version}{without_secrets(watch.url)}: left column: since the start, {since}")


def _show(console: Any, watch: Watch, interval_s: float) -> None:
    from rich.live import Live

    with screen.keyboard() as keys, contextlib.ExitStack() as stack:
        page = screen.Page(frame(watch))
        live = Live(page, console=console, screen=True, auto_refresh=False)
        stack.callback(live.stop)  # also of one that is interrupted while it starts
        live.start(refresh=True)
        while not screen.show(live, page, keys, interval_s):
            watch.read()
            page.turn_to(frame(watch), "NO ANSWER" if watch.problem else "")
            live.refresh()


# ---- words ------------------------------------------------------------------------------------


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


def _quotient(part: float | None, whole: float | None, show: Show) -> str:
    return show(part / whole) if part is not None and whole else NOTHING
