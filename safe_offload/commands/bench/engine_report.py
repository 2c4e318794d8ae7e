"""The figures of `safe-offload bench engine`, computed from its requests, and their report."""

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from safe_offload.commands.bench.engine_process import Answer, Started
from safe_offload.commands.bench.report import Report, median_and_spread, spread, table

BASELINE, CONNECTOR = "no connector", "connector"
"""The two engines."""
FIRST, HOST_HIT, GPU_HIT = KINDS = ("first pass", "host hit", "GPU hit")
"""The requests of a round with the connector: three, three and one."""
NUM_PROMPTS = 3
PLACES = range(2 * NUM_PROMPTS)
FIRST_PASS_SPREAD_MAX, SECOND_PASS_SPREAD_MAX = 1.10, 1.5
"""Limits of an undisturbed run: its rounds' highest figure divided by their lowest."""


@dataclass(frozen=True, slots=True)
class Observed:
    """One request of a round; its place is from 0 in A, B, C, A, B, C, C."""

    engine: str
    round_index: int
    place: int
    answer: Answer

    @property
    def kind(self) -> str:
        return KINDS[self.place // NUM_PROMPTS]


def select(observed: Sequence[Observed], engine: str, kind: str) -> list[Observed]:
    return [one for one in observed if (one.engine, one.kind) == (engine, kind)]


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
            if one.kind != GPU_HIT:
                key = one.round_index, one.place
                answers.setdefault(key, set()).add(one.answer.token_ids)
        return sum(len(found) > 1 for found in answers.values())

    @property
    def num_host_hits(self) -> int:
        """Return the number of second-pass requests that loaded more than they computed."""
        answers = [one.answer for one in select(self.observed, CONNECTOR, HOST_HIT)]
        return sum(found.num_host_tokens > found.num_computed_tokens for found in answers)

    @property
    def first_pass_overheads(self) -> list[float]:
        """Return the cost of storing by round: 0.03 is 3 % more time to first token."""
        return [ratio - 1 for ratio in self._round_ratios(CONNECTOR, BASELINE, FIRST)]

    @property
    def hit_speedups(self) -> list[float]:
        """Return the speedup of the second pass with the connector, by round."""
        return self._round_ratios(BASELINE, CONNECTOR, HOST_HIT)

    @property
    def doubts(self) -> list[str]:
        """Return why the figures reflect the machine rather than the connector; usually none."""
        overheads, speedups = self.first_pass_overheads, self.hit_speedups
        doubts = []
        if 1 + max(overheads) > FIRST_PASS_SPREAD_MAX * (1 + min(overheads)):
            doubts.append(f"the rounds of the first pass disagree: {spread(overheads, '+.1%')}")
        if max(speedups) > SECOND_PASS_SPREAD_MAX * min(speedups):
            doubts.append(
                f"the rounds of the second pass disagree: {spread(speedups, '.1f')} times"
            )
        return doubts

    def at(self, engine: str, place: int) -> list[Observed]:
        return [one for one in self.observed if (one.engine, one.place) == (engine, place)]

    def _round_ratios(self, above: str, below: str, kind: str) -> list[float]:
        """Return the ratio of two engines' mean time to first token in a pass, by round."""

        def mean_ttft_s(engine: str, round_index: int) -> float:
            requests = select(self.observed, engine, kind)
            return statistics.fmean(
                o.answer.ttft_s for o in requests if o.round_index == round_index
            )

        rounds = range(1, self.num_rounds + 1)
        return [mean_ttft_s(above, number) / mean_ttft_s(below, number) for number in rounds]


def make_report(found: EngineFound) -> Report:
    doubts = [f"  {doubt}" for doubt in found.doubts]
    if doubts:
        doubts.insert(0, "DISTURBED, repeat it on an idle machine:")
    return Report(
        method=_describe_method(found),
        sections=[
            _render_places(found),
            "\n".join(_render_sums(found)),
            "\n".join(doubts),
        ],
        figures={
            "pool": asdict(found.started),
            "summary": {
                "hit_speedup": statistics.median(found.hit_speedups),
                "hit_speedup_by_round": found.hit_speedups,
                "first_pass_overhead": statistics.median(found.first_pass_overheads),
                "first_pass_overhead_by_round": found.first_pass_overheads,
                "doubts": found.doubts,
                "num_host_hits": found.num_host_hits,
                "num_second_pass_requests": found.num_rounds * NUM_PROMPTS,
                "num_different_answers": found.num_different_answers,
            },
            "samples": [asdict(one) | {"kind": one.kind} for one in found.observed],
        },
        options=found.options,
        machine=found.machine,
    )


def _render_places(found: EngineFound) -> str:
    rows = [["", "", BASELINE, found.connector, "ratio", "on GPU", "on host", "computed"]]
    for place in PLACES:
        baseline, ours = (found.at(engine, place) for engine in (BASELINE, CONNECTOR))
        times = [[one.answer.ttft_s for one in column] for column in (baseline, ours)]
        answers = [one.answer for one in ours]
        counts = (
            [answer.num_gpu_tokens for answer in answers],
            [answer.num_host_tokens for answer in answers],
            [answer.num_computed_tokens for answer in answers],
        )
        rows.append(
            [
                "ABC"[place % NUM_PROMPTS],
                "first" if place < NUM_PROMPTS else "second",
                *(median_and_spread(column, ".3f") for column in times),
                f"{statistics.median(times[0]) / statistics.median(times[1]):.2f}x",
                *(f"{round(statistics.median(count)):,}" for count in counts),
            ]
        )
    return table(rows, num_left=2)


def _render_sums(found: EngineFound) -> Sequence[str]:
    speedups, overheads = found.hit_speedups, found.first_pass_overheads
    gpu_hits_s = [one.answer.ttft_s for one in select(found.observed, CONNECTOR, GPU_HIT)]
    num_answers, num_different = found.num_rounds * len(PLACES), found.num_different_answers
    equality = f"all {num_answers} equal, {found.options['answer_tokens']} greedy tokens each"
    if num_different:
        equality = f"{num_different} of {num_answers} DIFFER between the engines"
    return [
        f"second pass: {statistics.median(speedups):.1f} times faster with the connector"
        f" ({spread(speedups, '.1f')});"
        f" {found.num_host_hits} of {found.num_rounds * NUM_PROMPTS} requests were host hits",
        f"first pass:  {statistics.median(overheads):+.1%} time to first token with the connector"
        f" ({spread(overheads, '+.1%')})",
        f"GPU hit:     {statistics.median(gpu_hits_s):.3f} s, from vLLM's own prefix cache",
        f"answers:     {equality}",
    ]


def _describe_method(found: EngineFound) -> str:
    options, started = found.options, found.started
    return (
        f"Model {options['model']}; prompts A, B, C, A, B, C of {options['prompt_tokens']:,}"
        f" random tokens, one by one.\nKV pool: {started.num_gpu_blocks:,} blocks of"
        f" {started.block_size} tokens, room for {started.max_concurrency:.2f} requests.\n"
        f"{found.num_rounds} rounds after a warm-up, new prompts in each; both engines alive, one"
        " timed at a time,\nthe order changes each round. Time to first token in s, as vLLM"
        " measures it from the request's arrival:\nmedian (lowest to highest) over the rounds."
        " Prompt tokens found on the GPU, on the host, and computed:\nwith the connector, median."
        " Below, medians of the rounds' figures (lowest to highest)."
    )
