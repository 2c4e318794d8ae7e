"""Tables of `python -m tests.benchmarks agents`, from what aiperf and the servers have counted."""

from __future__ import annotations

import itertools
import json
import re
import statistics
import urllib.request
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from safe_offload.commands.bench.report import median_and_spread, spread, table
from safe_offload.errors import SafeOffloadError

TTFT = "time to first token"
TIMES = {TTFT: "time_to_first_token", "time per token": "inter_token_latency"}
TIMES |= {"end to end": "request_latency"}
"""Tables, and the metrics of aiperf that they show."""
STATISTICS = {"mean": "avg", "median": "p50", "p90": "p90", "p99": "p99"}
SOURCES = {"GPU": "local_cache_hit", "host": "external_kv_transfer", "computed": "local_compute"}
"""Of prompt tokens, by vLLM's names."""

Times = dict[str, dict[str, float]]


@dataclass(frozen=True, slots=True)
class Run:
    """What some users had from one server in one round.

    Attributes:
        throughput: requests a second.
        times_ms: by the names of `TIMES` and `STATISTICS`.
        counters: what the server has counted in the meantime.
    """

    num_requests: int
    throughput: float
    times_ms: Times
    counters: Mapping[str, float]

    def share(self, source: str) -> float:
        """Return the share of the prompts' tokens that came from one of `SOURCES`."""
        total = sum(self.counters.get(one, 0.0) for one in SOURCES.values())
        return self.counters.get(SOURCES[source], 0.0) / total if total else 0.0


Found = dict[int, dict[str, list[Run]]]
"""By users and server, one for each round; the first server is without the connector."""


def read_run(folder: Path, before: Mapping[str, float], after: Mapping[str, float]) -> Run:
    """Return what aiperf has written into a folder (0.13.0, profile_export_aiperf.json)."""
    file = folder / "profile_export_aiperf.json"
    if not file.is_file():
        raise SafeOffloadError(f"{file}: expected aiperf's figures, found none")
    found = json.loads(file.read_text())
    if found.get("error_summary"):
        raise SafeOffloadError(f"{file}: requests failed: {found['error_summary']}")
    return Run(
        round(found["request_count"]["avg"]),
        found["request_throughput"]["avg"],
        {
            name: {what: found[metric][key] for what, key in STATISTICS.items()}
            for name, metric in TIMES.items()
        },
        {name: value - before.get(name, 0.0) for name, value in after.items()},
    )


def make_sections(
    title: str, found: Found, ours: str, limits: Sequence[str], names: Collection[str] = TIMES
) -> list[str]:
    """Return the tables of a model, where ours is late, and how far it is from each limit."""
    sections = []
    for name in names:
        rows = [["users", "server", "requests/s", *(f"{one}, ms" for one in STATISTICS)]]
        rows[0] += SOURCES if name == TTFT else ()
        for users, servers in found.items():
            for server, runs in servers.items():
                throughput = median_and_spread([run.throughput for run in runs], ".2f")
                rows.append([str(users), server, throughput, *_cells(runs, name)])
                rows[-1] += _shares(runs) if name == TTFT else ()
        sections.append(f"{title}: {name}\n\n{table(rows, num_left=2)}")
    for users, servers in found.items():
        sections.append(_verdict(users, servers, ours, limits))
    return sections


def _cells(runs: Sequence[Run], name: str) -> list[str]:
    columns = [[run.times_ms[name][what] for run in runs] for what in STATISTICS]
    return [median_and_spread(values, ",.0f") for values in columns]


def _shares(runs: Sequence[Run]) -> list[str]:
    return [f"{statistics.median(run.share(one) for run in runs):.0%}" for one in SOURCES]


def _verdict(
    users: int, servers: Mapping[str, Sequence[Run]], ours: str, limits: Sequence[str]
) -> str:
    runs, none = servers[ours], next(iter(servers.values()))
    lines = [f"{users} users: {_decisions(runs)}"]
    late = late_figures(runs, none)
    lines.append(f"later than without by more than the rounds' spread: {', '.join(late) or 'none'}")
    for limit, what in itertools.product(limits, ("mean", "median")):
        ratios = [
            one.times_ms[TTFT][what] / other.times_ms[TTFT][what]
            for one, other in zip(runs, servers[limit], strict=True)
        ]
        lines.append(f"{what} {TTFT}, of that of {limit}: {median_and_spread(ratios, '.2f')}")
    return "\n".join(lines)


def late_figures(runs: Sequence[Run], none: Sequence[Run]) -> list[str]:
    """Return the figures of which the least of ours is more than the most of theirs."""
    late = []
    for name in TIMES:
        for what in STATISTICS:
            ours, theirs = ([run.times_ms[name][what] for run in some] for some in (runs, none))
            if min(ours) > max(theirs):
                late.append(f"{what} {name} ({spread(ours, ',.0f')}, {spread(theirs, ',.0f')} ms)")
    return late


_DECISIONS: tuple[str, ...] = ("skipped_hits", "postponed_hits", "unusable_hits", "shared_waits")
_DECISIONS += ("skipped_blocks", "evicted_blocks", "fenced_stores", "num_preemptions")


def _decisions(runs: Sequence[Run]) -> str:
    """Return what may have cost time, in the mean of the rounds."""
    found = {
        name: statistics.fmean(run.counters.get(f"safe_offload_{name}", 0.0) for run in runs)
        for name in _DECISIONS
    }
    preemptions = [run.counters.get("num_preemptions", 0.0) for run in runs]
    found["num_preemptions"] = statistics.fmean(preemptions)
    return ", ".join(f"{name} {value:,.0f}" for name, value in found.items())


def to_figures(found: Found) -> dict[str, Any]:
    """Return every run, for the file of JSON."""
    return {
        str(users): {name: [asdict(run) for run in runs] for name, runs in servers.items()}
        for users, servers in found.items()
    }


_COUNTER = re.compile(
    r"vllm:(?P<name>safe_offload_\w+|prompt_tokens_by_source|num_preemptions)_total"
    r'\{(?:[^}]*source="(?P<source>\w+)")?[^}]*\} (?P<value>\S+)'
)


def read_counters(url: str) -> dict[str, float]:
    """Return counters of a server: of preemptions, prompt tokens by source, and all of ours."""
    try:
        with urllib.request.urlopen(f"{url}/metrics", timeout=30.0) as response:
            return parse_counters(response.read().decode())
    except OSError as error:
        raise SafeOffloadError(f"{url}/metrics: expected vLLM's metrics, found {error}") from error


def parse_counters(text: str) -> dict[str, float]:
    """Return the sums over engines and labels; prompt tokens by `source` alone."""
    counters: defaultdict[str, float] = defaultdict(float)
    for found in _COUNTER.finditer(text):
        is_of_prompts = found["name"] == "prompt_tokens_by_source"
        counters[found["source" if is_of_prompts else "name"]] += float(found["value"])
    return dict(counters)
