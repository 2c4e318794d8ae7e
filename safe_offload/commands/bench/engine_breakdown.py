"""Where the time of `safe-offload bench engine` goes.

A request that finds its prompt on the host, or in the GPU's own prefix cache, is a row of spans
that follow one another, so that they add up to its time to first token.
"""

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

from safe_offload.commands.bench.engine_watch import Watched
from safe_offload.commands.bench.report import table

BASELINE, CONNECTOR = "no connector", "connector"
"""The two engines."""
FIRST, HOST_HIT, GPU_HIT = KINDS = ("first pass", "host hit", "GPU hit")
"""What the requests of a round are with the connector: three, three and one."""
NUM_PROMPTS = 3

# The spans, in the order of time; each ends where the next one begins.
SPANS = (
    TO_SCHEDULER := "front end, until the scheduler has it",
    TO_WORKER := "scheduler, until the worker has the load",
    TO_COPY := "our loop, until the copy is issued",
    COPY := "copy, its thread woken",
    TO_STEP := "until a step of the worker collects it",
    TO_FORWARD := "scheduler, until the forward begins",
    FORWARD := "forward of the tokens that are computed",
    TO_TOKEN := "until the scheduler has the token",
    TO_USER := "front end, until the token is told",
)
TTFT = "time to first token"

Rows = dict[str, list[float | None]]
"""Milliseconds by name and column."""


@dataclass(frozen=True, slots=True)
class Observed:
    """One request of a round, and what happened meanwhile.

    Attributes:
        place: from 0 in A, B, C, A, B, C, C.
    """

    engine: str
    round_index: int
    place: int
    watched: Watched

    @property
    def kind(self) -> str:
        return KINDS[self.place // NUM_PROMPTS]

    @property
    def ttft_s(self) -> float:
        return self.watched.answer.ttft_s

    def copied(self, direction: str) -> tuple[int, int, float]:
        """Return the number of copies, their bytes, and the seconds that they took one by one."""
        copies = [copy for copy in self.watched.probe["copies"] if copy[0] == direction]
        seconds = sum(end_s - begin_s for _, begin_s, end_s, _ in copies)
        return len(copies), sum(size_bytes for *_, size_bytes in copies), seconds

    def spans(self) -> dict[str, float]:
        """Take a hit apart: seconds by span, without those that it did not have.

        Whatever the request waits for is in one of them, because each begins where the one before
        ends. A request that is computed in several steps has none at all.
        """
        found, probe = self.watched.answer, self.watched.probe
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
                (COPY, max(end_s for _, _, end_s, _ in loads)),
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

    def to_json(self) -> dict[str, Any]:
        return asdict(self.watched.answer) | {
            "engine": self.engine,
            "round_index": self.round_index,
            "place": self.place,
            "kind": self.kind,
            "spans_s": self.spans(),
            "load": self.copied("load"),
            "store": self.copied("store"),
        }


def select(observed: Sequence[Observed], engine: str, kind: str) -> list[Observed]:
    return [one for one in observed if (one.engine, one.kind) == (engine, kind)]


def hit_rows(observed: Sequence[Observed]) -> Rows:
    """Return medians in ms of a host hit, a GPU hit, and a GPU hit without a connector."""
    columns = [
        [(one.ttft_s, spans) for one in select(observed, engine, kind) if (spans := one.spans())]
        for engine, kind in ((CONNECTOR, HOST_HIT), (CONNECTOR, GPU_HIT), (BASELINE, GPU_HIT))
    ]
    rows: Rows = {}
    for name in SPANS:
        values = [[spans[name] for _, spans in column if name in spans] for column in columns]
        rows[name] = [median_ms(value) for value in values]
    totals = [median_ms([ttft_s for ttft_s, _ in column]) for column in columns]
    rows["rest"] = [
        None if total is None else total - sum(row[place] or 0.0 for row in rows.values())
        for place, total in enumerate(totals)
    ]
    return rows | {TTFT: totals}


def render_breakdown(observed: Sequence[Observed]) -> str:
    """Return the table of a hit, and what was stored; "" if no copy was seen."""
    firsts = [one for one in select(observed, CONNECTOR, FIRST) if one.copied("store")[0]]
    hits = [one for one in select(observed, CONNECTOR, HOST_HIT) if COPY in one.spans()]
    if not hits or not firsts:
        return ""
    return (
        f"A hit, in ms (medians of {len(hits)}): {_describe(hits, 'load')}.\n"
        + render_rows(["", "host", "GPU", "GPU, none"], hit_rows(observed))
        + f"\n\nA prompt that is computed and stored: {_describe(firsts, 'store')}."
    )


def render_rows(head: list[str], rows: Rows) -> str:
    """Return a table of milliseconds."""
    cells = [
        [name, *("" if value is None else f"{value:,.2f}" for value in row)]
        for name, row in rows.items()
    ]
    return table([head, *cells])


def median_ms(values_s: Sequence[float]) -> float | None:
    """Return the median in ms, if there is any."""
    return 1e3 * statistics.median(values_s) if values_s else None


def _describe(observed: Sequence[Observed], direction: str) -> str:
    columns = zip(*(one.copied(direction) for one in observed), strict=True)
    number, size_bytes, copy_s = map(statistics.median, columns)
    size = f"{size_bytes / 1e6:,.1f} MB in {number:.0f} {direction}s"
    return f"{size}, {1e3 * copy_s:.2f} ms from issued to done"
