"""Tables of `safe-offload bench serve`, in the words of `vllm bench serve`."""

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from safe_offload.commands.bench.report import Report, median_and_spread, table
from tests.benchmarks.serve_workload import GROWING, Served, Sizes


@dataclass(frozen=True)
class ServeFound:
    """What `serve.measure` found.

    Attributes:
        passes: by workload and server, one for each round; the first server is the one that the
            others are compared with.
    """

    passes: dict[str, dict[str, list[Served]]]
    limit: str | None  # the server whose KV pool holds everything, if there is one
    sizes: Sizes
    method: str  # how the servers came about
    options: dict[str, Any]
    machine: dict[str, Any]

    def num_different(self, workload: str) -> int:
        """Return how many prompts of a workload got different answers from different servers."""
        answers = [
            [reply.token_ids for one in passes for user in one.replies for reply in user]
            for passes in self.passes[workload].values()
        ]
        return sum(len(set(same_prompt)) > 1 for same_prompt in zip(*answers, strict=True))


def make_report(found: ServeFound) -> Report:
    sections: list[str] = []
    summaries: dict[str, dict[str, float]] = {}
    for workload, servers in found.passes.items():
        first = next(iter(servers))
        titles = ["Request throughput (req/s)", "Median TTFT (ms)", "P99 TTFT (ms)"]
        rows = [["", *titles, f"of {first}", "of the limit", "computed"]]
        for name, passes in servers.items():
            summaries[f"{workload}, {name}"] = summarise(passes)
            against = [_ratios(passes, servers[first]) if name != first else []]
            against.append(_ratios(passes, servers[found.limit]) if found.limit in servers else [])
            rows.append([name, *_cells(passes), *map(_ratio_cell, against), _computed(passes)])
        sections += [
            f"{_describe(workload, found.sizes)}\n\n{table(rows)}",
            _equality(found, workload),
        ]
    samples = {
        w: {n: [asdict(p) for p in ps] for n, ps in s.items()} for w, s in found.passes.items()
    }
    figures = {"summary": summaries, "samples": samples}
    return Report(found.method, sections, figures, found.options, found.machine)


def summarise(passes: Sequence[Served]) -> dict[str, float]:
    """Return the figures under the names of `vllm bench serve --save-result`."""
    ttfts_ms = [1e3 * ttft_s for one in passes for ttft_s in one.ttfts_s]
    return {
        "request_throughput": statistics.median(one.request_throughput for one in passes),
        "median_ttft_ms": statistics.median(ttfts_ms),
        "p99_ttft_ms": float(np.percentile(ttfts_ms, 99)),
    }


def _cells(passes: Sequence[Served]) -> list[str]:
    summary = summarise(passes)
    throughput = median_and_spread([one.request_throughput for one in passes], ".2f")
    return [throughput, f"{summary['median_ttft_ms']:,.0f}", f"{summary['p99_ttft_ms']:,.0f}"]


def _ratios(passes: Sequence[Served], others: Sequence[Served]) -> list[float]:
    """Return the throughput as a multiple of another server's in the same round."""
    pairs = zip(passes, others, strict=True)
    return [one.request_throughput / other.request_throughput for one, other in pairs]


def _ratio_cell(ratios: Sequence[float]) -> str:
    return median_and_spread(ratios, ".3f") if ratios else ""


def _computed(passes: Sequence[Served]) -> str:
    shares = [
        one.num_computed_tokens / one.num_prompt_tokens
        for one in passes
        if one.num_computed_tokens is not None
    ]
    return f"{statistics.median(shares):.0%}" if shares else ""


def _equality(found: ServeFound, workload: str) -> str:
    num_different, sizes = found.num_different(workload), found.sizes
    num_answers = sizes.users * sizes.turns * sizes.rounds
    if len(found.passes[workload]) < 2:
        return ""
    if num_different:
        return f"answers: {num_different} of {num_answers} DIFFER between the servers"
    return f"answers: all {num_answers} equal, {sizes.answer_tokens} greedy tokens each"


def _describe(workload: str, sizes: Sizes) -> str:
    if workload == GROWING:
        last = sizes.context_tokens + (sizes.turns - 1) * sizes.turn_tokens
        lengths = f"{sizes.context_tokens:,} to {last:,} tokens, {sizes.turn_tokens:,} more a turn"
    else:
        lengths = f"{sizes.context_tokens:,} tokens"
    return f"{workload.capitalize()}: {sizes.users} users, {sizes.turns} turns each, {lengths}."
