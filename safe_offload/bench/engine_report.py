"""What `safe-offload bench engine` found: figures from samples, as a table, JSON and a picture."""

import statistics
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from safe_offload.bench.engine_breakdown import FIRST, Breakdown, render_breakdown, waited_share

NUM_PROMPTS = 3
PROMPT_NAMES = "ABC"
# What an undisturbed run stays below: the figures of its rounds, highest to lowest, and the share
# of a request's time in which the forward's thread was ready and had no core.
FIRST_PASS_SPREAD_MAX = 1.10
SECOND_PASS_SPREAD_MAX = 1.5  # times of a few milliseconds
WAITED_SHARE_MAX = 0.05


@dataclass(frozen=True, slots=True)
class Sample:
    """One timed request: prompt A, B or C, on the first or the second pass."""

    engine: str  # the report's `baseline`, or "connector"
    round_index: int
    place: int  # 0 to 5 in A, B, C, A, B, C
    ttft_s: float
    total_s: float
    num_gpu_tokens: int
    num_host_tokens: int
    num_computed_tokens: int
    token_ids: tuple[int, ...]

    @property
    def is_first_pass(self) -> bool:
        return self.place < NUM_PROMPTS


@dataclass(frozen=True, slots=True)
class EngineReport:
    """All samples of a run, and under what conditions they were taken."""

    connector: str
    baseline: str
    samples: list[Sample]
    breakdown: Breakdown
    pool_prompts: float  # the engine's own figure of how many requests its KV pool holds
    num_gpu_blocks: int
    options: dict[str, Any]
    machine: dict[str, Any]

    @property
    def num_rounds(self) -> int:
        return max(sample.round_index for sample in self.samples)

    @property
    def num_different_answers(self) -> int:
        """Return in how many requests the two engines' tokens differ."""
        expected = {
            (sample.round_index, sample.place): sample.token_ids
            for sample in self._select(self.baseline)
        }
        return sum(
            sample.token_ids != expected[sample.round_index, sample.place]
            for sample in self._select("connector")
        )

    @property
    def num_host_hits(self) -> int:
        """Return how many requests of the second pass found more on the host than they computed."""
        return sum(
            sample.num_host_tokens > sample.num_computed_tokens
            for sample in self._select("connector")
            if not sample.is_first_pass
        )

    @property
    def first_pass_overhead(self) -> float:
        """Return what storing costs: 0.03 is 3 % more time to first token on the first pass."""
        return statistics.median(self.first_pass_overheads)

    @property
    def first_pass_overheads(self) -> list[float]:
        """Return the same for each round."""
        ratios = self._round_ratios("connector", self.baseline, is_first_pass=True)
        return [ratio - 1 for ratio in ratios]

    @property
    def hit_speedup(self) -> float:
        """Return how many times faster the second pass is with the connector."""
        return statistics.median(self.hit_speedups)

    @property
    def hit_speedups(self) -> list[float]:
        """Return the same for each round."""
        return self._round_ratios(self.baseline, "connector", is_first_pass=False)

    @property
    def doubts(self) -> list[str]:
        """Return why the figures say more of the machine than of the connector; as a rule none."""
        overheads, speedups = self.first_pass_overheads, self.hit_speedups
        doubts = []
        if 1 + max(overheads) > FIRST_PASS_SPREAD_MAX * (1 + min(overheads)):
            doubts.append(f"the rounds of the first pass disagree: {_range(overheads, '+.1%')}")
        if max(speedups) > SECOND_PASS_SPREAD_MAX * min(speedups):
            doubts.append(
                f"the rounds of the second pass disagree: {_range(speedups, '.1f')} times"
            )
        for engine, name in ((self.baseline, self.baseline), ("connector", self.connector)):
            shares = self._waited_shares(engine)
            if shares and max(shares) > WAITED_SHARE_MAX:
                doubts.append(
                    f"with {name}, the forward's thread waited for its core for up to"
                    f" {max(shares):.0%} of a request of the first pass"
                )
        return doubts

    def ttft_of(self, engine: str, place: int) -> list[float]:
        """Return the time to first token at one place of A, B, C, A, B, C, by round, in s."""
        return [s.ttft_s for s in self._select(engine) if s.place == place]

    def median_of(self, engine: str, place: int, value: Callable[[Sample], int]) -> int:
        """Return the median of a count over the rounds."""
        return round(statistics.median(value(s) for s in self._select(engine) if s.place == place))

    def to_json(self) -> dict[str, Any]:
        """Return everything, samples included, for a file."""
        return {
            "method": _describe_method(self),
            "machine": self.machine,
            "options": self.options,
            "pool": {"num_gpu_blocks": self.num_gpu_blocks, "prompts": self.pool_prompts},
            "summary": {
                "hit_speedup": self.hit_speedup,
                "hit_speedup_by_round": self.hit_speedups,
                "first_pass_overhead": self.first_pass_overhead,
                "first_pass_overhead_by_round": self.first_pass_overheads,
                "doubts": self.doubts,
                "num_host_hits": self.num_host_hits,
                "num_second_pass_requests": self.num_rounds * NUM_PROMPTS,
                "num_different_answers": self.num_different_answers,
            },
            "breakdown": self.breakdown.to_json(),
            "samples": [asdict(sample) for sample in self.samples],
        }

    def _waited_shares(self, engine: str) -> list[float]:
        """Return for each request of the first pass the share of its time without a core."""
        return [waited_share(observed) for observed in self.breakdown.select(engine, FIRST)]

    def _select(self, engine: str) -> Iterable[Sample]:
        return (sample for sample in self.samples if sample.engine == engine)

    def _round_ratios(self, above: str, below: str, *, is_first_pass: bool) -> list[float]:
        """Return for each round the ratio of two engines' mean time to first token on one pass."""

        def mean_ttft_s(engine: str, round_index: int) -> float:
            return statistics.fmean(
                sample.ttft_s
                for sample in self._select(engine)
                if sample.round_index == round_index and sample.is_first_pass == is_first_pass
            )

        rounds = range(1, self.num_rounds + 1)
        return [mean_ttft_s(above, number) / mean_ttft_s(below, number) for number in rounds]


def render_table(report: EngineReport) -> str:
    """Return the report as text: a line for each of A, B, C, A, B, C, then the sums."""
    head = (
        f"{'':10} {report.baseline:>24} {report.connector:>28} {'ratio':>7}"
        f" {'on GPU':>8} {'on host':>8} {'computed':>9}"
    )
    lines = [_describe_method(report), "", head]
    for place in range(2 * NUM_PROMPTS):
        baseline = report.ttft_of(report.baseline, place)
        connector = report.ttft_of("connector", place)
        ratio = statistics.median(baseline) / statistics.median(connector)
        counts = [
            report.median_of("connector", place, value)
            for value in (
                lambda sample: sample.num_gpu_tokens,
                lambda sample: sample.num_host_tokens,
                lambda sample: sample.num_computed_tokens,
            )
        ]
        pass_name = "first" if place < NUM_PROMPTS else "second"
        lines.append(
            f"{PROMPT_NAMES[place % NUM_PROMPTS]} {pass_name:8}"
            f" {_render_times(baseline):>24} {_render_times(connector):>28} {ratio:6.2f}x"
            f" {counts[0]:8,} {counts[1]:8,} {counts[2]:9,}"
        )
    num_second = report.num_rounds * NUM_PROMPTS
    lines += [
        "",
        f"second pass: {report.hit_speedup:.1f} times faster with the connector"
        f" ({_range(report.hit_speedups, '.1f')});"
        f" {report.num_host_hits} of {num_second} requests were host hits",
        f"first pass:  {report.first_pass_overhead:+.1%} time to first token with the connector"
        f" ({_range(report.first_pass_overheads, '+.1%')})",
        _render_equality(report),
    ]
    if report.doubts:
        lines += ["", "DISTURBED, repeat it on an idle machine:"]
        lines += [f"  {doubt}" for doubt in report.doubts]
    if breakdown := render_breakdown(report.breakdown):
        lines += ["", breakdown]
    return "\n".join(lines)


def draw_plot(report: EngineReport, path: Path) -> None:
    """Draw the median times to first token as bars, with the range over the rounds, into a PNG."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    places = range(2 * NUM_PROMPTS)
    for offset, engine, label, colour in (
        (-0.2, report.baseline, report.baseline, "#9aa5b1"),
        (0.2, "connector", report.connector, "#1f77b4"),
    ):
        times = [report.ttft_of(engine, place) for place in places]
        medians = [statistics.median(row) for row in times]
        below = [median - min(row) for median, row in zip(medians, times, strict=True)]
        above = [max(row) - median for median, row in zip(medians, times, strict=True)]
        positions = [place + offset for place in places]
        bars = axes.bar(
            positions, medians, 0.38, label=label, color=colour, yerr=[below, above], capsize=2
        )
        axes.bar_label(bars, labels=[f"{median:.3g}" for median in medians], padding=3, fontsize=8)
    axes.set_xticks(
        list(places),
        [
            f"{PROMPT_NAMES[place % NUM_PROMPTS]}\n{'first' if place < NUM_PROMPTS else 'again'}"
            for place in places
        ],
    )
    axes.set_ylabel("time to first token [s]")
    axes.margins(y=0.15)
    axes.set_title(
        f"{report.options['model']}, prompts of {report.options['num_prompt_tokens']:,} tokens, "
        f"KV pool of {report.pool_prompts:.2f} prompts, {report.num_rounds} rounds",
        fontsize=10,
    )
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def _describe_method(report: EngineReport) -> str:
    options = report.options
    return (
        f"Model {options['model']}; prompts A, B, C, A, B, C of {options['num_prompt_tokens']:,}"
        f" random tokens, one by one.\nKV pool: {report.num_gpu_blocks:,} blocks of"
        f" {options['block_size']} tokens, room for {report.pool_prompts:.2f} requests.\n"
        f"{report.num_rounds} rounds after a warm-up, new prompts in each; both engines alive, one"
        " timed at a time,\nthe order changes each round. Time to first token in s, as vLLM"
        " measures it from the request's arrival:\nmedian (lowest to highest) over the rounds."
        " Prompt tokens found on the GPU, on the host, and computed:\nwith the connector, median."
        " Below, medians of the rounds' figures (lowest to highest)."
    )


def _range(values: list[float], form: str) -> str:
    return f"{min(values):{form}} to {max(values):{form}}"


def _render_times(times_s: list[float]) -> str:
    return f"{statistics.median(times_s):.3f} ({min(times_s):.3f} to {max(times_s):.3f})"


def _render_equality(report: EngineReport) -> str:
    num_answers = report.num_rounds * 2 * NUM_PROMPTS
    num_tokens = report.options["num_answer_tokens"]
    if report.num_different_answers == 0:
        return f"answers:     all {num_answers} equal, {num_tokens} greedy tokens each"
    return (
        f"answers:     {report.num_different_answers} of {num_answers} DIFFER between the engines"
    )
