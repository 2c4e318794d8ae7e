"""The figures of `safe-offload bench engine`, computed from its requests, and their report."""

import statistics
from dataclasses import asdict, dataclass
from typing import Any

from safe_offload.commands.bench.engine_process import Answer, Started
from safe_offload.commands.bench.report import Report, spread

BASELINE, CONNECTOR = "no connector", "connector"
"""The two engines."""
FIRST, SECOND = "first pass", "second pass"
NUM_PROMPTS = 3


@dataclass(frozen=True, slots=True)
class Observed:
    """One request of a round; its place is from 0 in A, B, C, A, B, C."""

    engine: str
    round_index: int
    place: int
    answer: Answer

    @property
    def kind(self) -> str:
        return FIRST if self.place < NUM_PROMPTS else SECOND


@dataclass(frozen=True, slots=True)
class EngineFound:
    """All requests, and the engine that served them."""

    connector: str
    observed: list[Observed]
    started: Started
    options: dict[str, Any]
    machine: dict[str, Any]

    @property
    def num_rounds(self) -> int:
        return max(one.round_index for one in self.observed)

    @property
    def num_different_answers(self) -> int:
        """Return the number of requests whose tokens differ between the engines."""
        answers: dict[tuple[int, int], set[tuple[int, ...]]] = {}
        for one in self.observed:
            answers.setdefault((one.round_index, one.place), set()).add(one.answer.token_ids)
        return sum(len(found) > 1 for found in answers.values())

    @property
    def num_host_hits(self) -> int:
        """Return the number of second-pass requests that loaded more than they computed."""
        second = [one for one in self.observed if (one.engine, one.kind) == (CONNECTOR, SECOND)]
        return sum(one.answer.num_host_tokens > one.answer.num_computed_tokens for one in second)

    @property
    def first_pass_overheads(self) -> list[float]:
        """Return the cost of storing by round: 0.03 is 3 % more time to first token."""
        return [1 / speedup - 1 for speedup in self._speedups(FIRST)]

    @property
    def hit_speedups(self) -> list[float]:
        """Return the speedup of the second pass with the connector, by round."""
        return self._speedups(SECOND)

    def mean_ttfts_s(self, engine: str, kind: str) -> list[float]:
        """Return the mean time to first token of an engine in a pass, by round."""
        by_round: dict[int, list[float]] = {}
        for one in self.observed:
            if (one.engine, one.kind) == (engine, kind):
                by_round.setdefault(one.round_index, []).append(one.answer.ttft_s)
        return list(map(statistics.fmean, by_round.values()))

    def _speedups(self, kind: str) -> list[float]:
        baseline, ours = (self.mean_ttfts_s(engine, kind) for engine in (BASELINE, CONNECTOR))
        return [before_s / after_s for before_s, after_s in zip(baseline, ours, strict=True)]


def make_report(found: EngineFound) -> Report:
    return Report(
        method=_describe_method(found),
        sections=[_render(found)],
        figures={
            "pool": asdict(found.started),
            "summary": {
                "hit_speedup": statistics.median(found.hit_speedups),
                "hit_speedup_by_round": found.hit_speedups,
                "first_pass_overhead": statistics.median(found.first_pass_overheads),
                "first_pass_overhead_by_round": found.first_pass_overheads,
                "num_host_hits": found.num_host_hits,
                "num_second_pass_requests": found.num_rounds * NUM_PROMPTS,
                "num_different_answers": found.num_different_answers,
            },
            "samples": [asdict(one) | {"kind": one.kind} for one in found.observed],
        },
        options=found.options,
        machine=found.machine,
    )


def _render(found: EngineFound) -> str:
    overheads, speedups = found.first_pass_overheads, found.hit_speedups
    num_requests = found.num_rounds * NUM_PROMPTS
    num_answers, num_different = 2 * num_requests, found.num_different_answers
    equality = f"all {num_answers} equal, {found.options['answer_tokens']} greedy tokens each"
    if num_different:
        equality = f"{num_different} of {num_answers} DIFFER between the engines"
    return (
        f"{_times(found, FIRST)}:"
        f" {statistics.median(overheads):+.1%} ({spread(overheads, '+.1%')})\n"
        f"{_times(found, SECOND)}:"
        f" {statistics.median(speedups):.1f} times faster ({spread(speedups, '.1f')}),"
        f" {found.num_host_hits} of {num_requests} requests were host hits\n"
        f"answers:     {equality}"
    )


def _times(found: EngineFound, kind: str) -> str:
    baseline_s, ours_s = (
        statistics.median(found.mean_ttfts_s(engine, kind)) for engine in (BASELINE, CONNECTOR)
    )
    return f"{kind + ':':<12} {baseline_s:.3f} s, with {found.connector} {ours_s:.3f} s"


def _describe_method(found: EngineFound) -> str:
    options, started = found.options, found.started
    return (
        f"Model {options['model']}; prompts A, B, C, A, B, C of {options['prompt_tokens']:,}"
        f" random tokens, one by one.\nKV pool: {started.num_gpu_blocks:,} blocks of"
        f" {started.block_size} tokens, room for {started.max_concurrency:.2f} requests.\n"
        f"{found.num_rounds} rounds after a warm-up, new prompts in each; both engines alive, one"
        " timed at a time,\nthe order changes each round. Time to first token, as vLLM measures it"
        " from the request's\narrival: medians over the rounds (lowest to highest). If the rounds"
        " disagree, repeat it on an\nidle machine."
    )
