"""Where the time of `safe-offload bench engine` goes: what was observed, taken apart.

A request that finds its prompt on the host, or in the GPU's own prefix cache, is a row of spans
that follow one another, so that they add up to its time to first token. A request that finds
nothing computes all the time; what matters there is who else wants the cores.
"""

import functools
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

from safe_offload.bench.engine_watch import FORWARD as FORWARD_THREAD
from safe_offload.bench.engine_watch import ROLES, STORES, ThreadUse, Watched

FIRST, HOST_HIT, GPU_HIT = "first pass", "host hit", "GPU hit"

# The spans, in the order of time; each ends where the next one begins.
TO_SCHEDULER = "front end, until the scheduler has it"
TO_WORKER = "scheduler, until the worker has the load"
TO_COPY = "our loop, until a thread copies"
COPY = "copy"
TO_STEP = "until a step of the worker collects it"
TO_FORWARD = "scheduler, until the forward begins"
FORWARD = "forward of the tokens that are computed"
TO_TOKEN = "until the scheduler has the token"
TO_USER = "front end, until the token is told"
SPANS = (
    TO_SCHEDULER,
    TO_WORKER,
    TO_COPY,
    COPY,
    TO_STEP,
    TO_FORWARD,
    FORWARD,
    TO_TOKEN,
    TO_USER,
)
MEMCPY = "  memcpy of as many bytes, one thread"
TTFT = "time to first token"
_MS_PER_S = 1e3


@dataclass(frozen=True, slots=True)
class Observed:
    """One request of a round, and what happened meanwhile."""

    engine: str
    kind: str  # FIRST, HOST_HIT or GPU_HIT
    round_index: int
    watched: Watched

    @property
    def ttft_s(self) -> float:
        return self.watched.answer.ttft_s


@dataclass(frozen=True, slots=True)
class Row:
    """A line of a table."""

    name: str
    values_ms: tuple[float | None, ...]


@dataclass(frozen=True, slots=True)
class CopySums:
    """The copies in one direction of one request."""

    num_transfers: int
    num_pieces: int
    size_bytes: int
    copy_s: float  # all of them, one by one


@dataclass(frozen=True, slots=True)
class Breakdown:
    """What was observed of both engines.

    Attributes:
        memcpy_s: of as many bytes in as many pieces as a prompt's loads ("load") and stores
            ("store") have; several for each.
    """

    baseline: str
    observed: list[Observed]
    memcpy_s: dict[str, list[float]]

    def select(self, engine: str, kind: str) -> list[Observed]:
        """Requests of one engine and kind."""
        return [o for o in self.observed if o.engine == engine and o.kind == kind]

    def to_json(self) -> dict[str, Any]:
        """Return medians and everything that they are of."""
        return {
            "hit_ms": {row.name.strip(): row.values_ms for row in hit_rows(self)},
            "first_pass_ms": {row.name.strip(): row.values_ms for row in first_pass_rows(self)},
            "memcpy_s": self.memcpy_s,
            "requests": [
                {
                    "engine": o.engine,
                    "kind": o.kind,
                    "round_index": o.round_index,
                    "ttft_s": o.ttft_s,
                    "spans_s": spans_of(o.watched),
                    "load": asdict(copies_of(o.watched, "load")),
                    "store": asdict(copies_of(o.watched, "store")),
                    "uses": {role: asdict(use) for role, use in o.watched.uses.items()},
                }
                for o in self.observed
            ],
        }


def copies_of(watched: Watched, direction: str) -> CopySums:
    """Sum up the copies in one direction."""
    copies = [copy for copy in watched.probe["copies"] if copy[0] == direction]
    return CopySums(
        num_transfers=len(copies),
        num_pieces=sum(num_pieces for *_, num_pieces in copies),
        size_bytes=sum(size_bytes for *_, size_bytes, _ in copies),
        copy_s=sum(end_s - begin_s for _, begin_s, end_s, *_ in copies),
    )


def spans_of(watched: Watched) -> dict[str, float]:
    """Take a hit apart: seconds by span, none that its request did not have.

    Whatever the request waits for is in one of them, because each begins where the one before
    ends. A request that is computed in several steps has none at all.
    """
    found, probe = watched.answer, watched.probe
    forwards = [(begin_s, end_s) for begin_s, end_s, tokens in probe["steps"] if tokens > 0]
    before_token = [step for step in forwards if step[0] < found.scheduler_token_s]
    if len(before_token) != 1:
        return {}
    ((forward_s, forwarded_s),) = before_token
    moments: list[tuple[str, float]] = [(TO_SCHEDULER, found.queued_s)]
    loads = [copy for copy in probe["copies"] if copy[0] == "load"]
    if loads:
        submits = {key: at_s for at_s, name, key in probe["submits"] if name == "load"}
        reports_s = [at_s for at_s, keys in probe["reports"] if submits.keys() & set(keys)]
        moments += [
            (TO_WORKER, min(submits.values())),
            (TO_COPY, min(begin_s for _, begin_s, *_ in loads)),
            (COPY, max(end_s for _, _, end_s, *_ in loads)),
            (TO_STEP, max(reports_s)),
        ]
    moments += [
        (TO_FORWARD, forward_s),
        (FORWARD, forwarded_s),
        (TO_TOKEN, found.scheduler_token_s),
        (TO_USER, found.arrival_s + found.ttft_s),
    ]
    ends = [("", found.arrival_s), *moments]
    return {name: end_s - begin_s for (_, begin_s), (name, end_s) in pairwise(ends)}


def hit_rows(breakdown: Breakdown) -> list[Row]:
    """Medians in ms of a host hit, a GPU hit, and a GPU hit without a connector."""
    columns = [
        [
            (o.ttft_s, spans)
            for o in breakdown.select(engine, kind)
            if (spans := spans_of(o.watched))
        ]
        for engine, kind in (
            ("connector", HOST_HIT),
            ("connector", GPU_HIT),
            (breakdown.baseline, GPU_HIT),
        )
    ]
    rows = []
    for name in SPANS:
        values = [[spans[name] for _, spans in column if name in spans] for column in columns]
        rows.append(Row(name, tuple(_median_ms(value) for value in values)))
    totals = [_median_ms([ttft_s for ttft_s, _ in column]) for column in columns]
    rests = [
        None if total is None else total - sum(row.values_ms[place] or 0.0 for row in rows)
        for place, total in enumerate(totals)
    ]
    memcpy = Row(MEMCPY, (_median_ms(breakdown.memcpy_s.get("load", [])), None, None))
    rows.insert(SPANS.index(COPY) + 1, memcpy)
    return [*rows, Row("rest", tuple(rests)), Row(TTFT, tuple(totals))]


def first_pass_rows(breakdown: Breakdown) -> list[Row]:
    """Medians in ms of a computed prompt without a connector and with it, and the difference."""
    columns = [breakdown.select(engine, FIRST) for engine in (breakdown.baseline, "connector")]

    def row(name: str, value: Callable[[Observed], float]) -> Row:
        none, ours = (_median_ms([value(o) for o in column]) for column in columns)
        more = None if none is None or ours is None else ours - none
        return Row(name, (none, ours, more))

    stores_s = [copies_of(o.watched, "store").copy_s for o in columns[1]]
    return [
        row(TTFT, lambda o: o.ttft_s),
        *(row(f"CPU: {role}", functools.partial(_cpu_s, role)) for role in ROLES),
        row("the forward's thread waits for its core", _waited_s),
        Row("copies of the stores, begin to end", (None, _median_ms(stores_s), None)),
        Row(MEMCPY, (None, _median_ms(breakdown.memcpy_s.get("store", [])), None)),
    ]


def render_breakdown(breakdown: Breakdown) -> str:
    """Return both tables as text; "" if the connector's copies could not be watched."""
    hits = breakdown.select("connector", HOST_HIT)
    loads = [copies_of(o.watched, "load") for o in hits if spans_of(o.watched).get(COPY)]
    stores = [copies_of(o.watched, "store") for o in breakdown.select("connector", FIRST)]
    if not loads or not stores:
        return ""
    faults = [o.watched.uses[STORES].num_page_faults for o in breakdown.select("connector", FIRST)]
    return "\n".join(
        [
            f"A hit, in ms (medians of {len(loads)}): {_describe(loads)} loaded.",
            _line("", ("host", "GPU", "GPU, none")),
            *(_line(row.name, map(_number, row.values_ms)) for row in hit_rows(breakdown)),
            "",
            f"A prompt that is computed and stored, in ms (medians of {len(stores)}):"
            f" {_describe(stores)} stored,",
            f"{statistics.median(faults):,.0f} page faults in our copying threads.",
            _line("", ("none", "ours", "more")),
            *(_line(row.name, map(_number, row.values_ms)) for row in first_pass_rows(breakdown)),
        ]
    )


def waited_share(observed: Observed) -> float:
    """Return the share of a request's time in which the forward's thread had to wait for a core."""
    return _waited_s(observed) / observed.watched.answer.total_s


def _describe(sums: list[CopySums]) -> str:
    size_bytes = statistics.median(copies.size_bytes for copies in sums)
    num_pieces = statistics.median(copies.num_pieces for copies in sums)
    num_transfers = statistics.median(copies.num_transfers for copies in sums)
    return f"{size_bytes / 1e6:,.1f} MB in {num_pieces:,.0f} pieces, {num_transfers:.0f} transfers,"


def _cpu_s(role: str, observed: Observed) -> float:
    return observed.watched.uses.get(role, ThreadUse()).cpu_s


def _waited_s(observed: Observed) -> float:
    return observed.watched.uses.get(FORWARD_THREAD, ThreadUse()).waited_s


def _median_ms(values_s: Sequence[float]) -> float | None:
    return _MS_PER_S * statistics.median(values_s) if values_s else None


def _number(value_ms: float | None) -> str:
    return "" if value_ms is None else f"{value_ms:,.2f}"


def _line(name: str, cells: Iterable[str]) -> str:
    return (f"{name:44}" + "".join(f"{cell:>12}" for cell in cells)).rstrip()
