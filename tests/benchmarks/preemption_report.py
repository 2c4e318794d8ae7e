"""What the benchmark `preemption` found: figures from each recovery, as a table and JSON."""

import textwrap
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

BASELINE = "no connector"


@dataclass(slots=True)
class Recovery:
    """What became of the tokens that one request had computed when it was preempted.

    Attributes:
        num_computed: tokens whose KV cache it had then.
        num_gpu: of them, given back by the GPU's prefix cache when it ran again.
        num_host: of them, loaded from the host.
        num_again: tokens computed that had been computed before, until it ended or was preempted
            once more. What it had not come to by then is lost again and counts for the next.
    """

    num_computed: int
    num_gpu: int = 0
    num_host: int = 0
    num_again: int = 0


@dataclass(frozen=True, slots=True)
class EngineRun:
    """One engine's run of the workload.

    Attributes:
        num_scheduled: tokens that the scheduler scheduled, of all steps.
        num_once: tokens that have to be computed: prompts that no cache had, and answers.
        recoveries: one for each preemption.
        token_ids: of the answers, in the order of the prompts.
        counters: of the connector, without their prefix.
    """

    num_steps: int
    num_scheduled: int
    num_once: int
    recoveries: tuple[Recovery, ...]
    token_ids: tuple[tuple[int, ...], ...]
    counters: dict[str, float] = field(default_factory=dict)

    @property
    def num_again(self) -> int:
        """Return how many tokens were computed once more."""
        return self.num_scheduled - self.num_once

    @property
    def host_share(self) -> float | None:
        """Return what came back from the host, of what the GPU's cache did not have.

        None if the GPU's cache had everything.
        """
        num_host = self.sum(lambda recovery: recovery.num_host)
        num_missing = num_host + self.num_again
        return num_host / num_missing if num_missing else None

    def sum(self, value: Callable[[Recovery], int]) -> int:
        """Return the sum of a count over all recoveries."""
        return sum(map(value, self.recoveries))


@dataclass(frozen=True, slots=True)
class CaseRuns:
    """The runs of one case, by the engine's name; the baseline is one of them."""

    case: str
    num_gpu_blocks: int
    runs: dict[str, EngineRun]

    def saved_share(self, name: str) -> float | None:
        """Return 1 - again(engine) / again(baseline); None if the baseline computed nothing."""
        num_baseline = self.runs[BASELINE].num_again
        return 1 - self.runs[name].num_again / num_baseline if num_baseline else None

    def num_different_answers(self, name: str) -> int:
        """Return how many answers differ from the baseline's."""
        expected = self.runs[BASELINE].token_ids
        found = self.runs[name].token_ids
        return sum(a != b for a, b in zip(expected, found, strict=True))


@dataclass(frozen=True, slots=True)
class PreemptionReport:
    """All runs, and under what conditions they were made."""

    cases: list[CaseRuns]
    options: dict[str, Any]
    machine: dict[str, Any]

    @property
    def num_different_answers(self) -> int:
        """Return how many answers differ from the baseline's, of all cases and engines."""
        return sum(runs.num_different_answers(name) for runs in self.cases for name in runs.runs)

    def to_json(self) -> dict[str, Any]:
        """Return everything for a file, every preemption included."""
        return {
            "method": describe_method(self.options),
            "machine": self.machine,
            "options": self.options,
            "cases": [
                {
                    "case": runs.case,
                    "num_gpu_blocks": runs.num_gpu_blocks,
                    "engines": {name: _describe_run(runs, name) for name in runs.runs},
                }
                for runs in self.cases
            ],
        }


def _describe_run(runs: CaseRuns, name: str) -> dict[str, Any]:
    run = runs.runs[name]
    return {
        "num_preemptions": len(run.recoveries),
        "num_again": run.num_again,
        "saved_share": runs.saved_share(name),
        "host_share": run.host_share,
        "num_different_answers": runs.num_different_answers(name),
    } | asdict(run)


def render_table(report: PreemptionReport) -> str:
    """Return the report as text: for each case a line for each engine."""
    lines = [describe_method(report.options)]
    for runs in report.cases:
        lines += ["", f"{runs.case}, pool of {runs.num_gpu_blocks:,} blocks", _HEAD]
        lines += [_render_run(runs, name) for name in runs.runs]
    lines += ["", _render_equality(report)]
    return "\n".join(lines)


_COLUMNS = (
    ("preemptions", 11),
    ("computed", 10),
    ("from GPU", 10),
    ("from host", 10),
    ("again", 9),
    ("host share", 10),
    ("saved", 7),
    ("rescued", 8),
    ("postponed", 9),
)


def _render_cells(first: str, cells: Iterable[str]) -> str:
    padded = (f"{cell:>{width}}" for cell, (_, width) in zip(cells, _COLUMNS, strict=True))
    return " ".join([f"{first:14}", *padded])


_HEAD = _render_cells("", (title for title, _ in _COLUMNS))


def _render_run(runs: CaseRuns, name: str) -> str:
    run = runs.runs[name]
    is_baseline = name == BASELINE
    cells: Sequence[str] = (
        f"{len(run.recoveries):,}",
        f"{run.sum(lambda recovery: recovery.num_computed):,}",
        f"{run.sum(lambda recovery: recovery.num_gpu):,}",
        f"{run.sum(lambda recovery: recovery.num_host):,}",
        f"{run.num_again:,}",
        "" if is_baseline else _render_share(run.host_share),
        "" if is_baseline else _render_share(runs.saved_share(name)),
        "" if is_baseline else f"{run.counters.get('rescued_blocks', 0):,.0f}",
        "" if is_baseline else f"{run.counters.get('postponed_hits', 0):,.0f}",
    )
    return _render_cells(name, cells)


def _render_share(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}"


def _render_equality(report: PreemptionReport) -> str:
    num_different = report.num_different_answers
    num_compared = sum(len(runs.runs) - 1 for runs in report.cases)
    num_answers = num_compared * int(report.options["num_requests"])
    if num_different:
        return f"answers: {num_different} of {num_answers} DIFFER from the baseline's"
    return f"answers: all {num_answers} equal the baseline's"


def describe_method(options: dict[str, Any]) -> str:
    """Return in words what was done and what the columns are."""
    text = (
        f"{options['num_requests']} requests at once, each of up to "
        f"{options['num_prompt_tokens']:,} random tokens and up to "
        f"{options['num_answer_tokens']:,} greedy ones as the answer, no less than half of that, "
        f"in a KV pool for {options['pool_ratio']:.0%} of what they hold together at their ends, "
        f"in blocks of {options['block_size']}; the prefix cache is on in all engines. Counted in "
        "vLLM's scheduler: every token that it schedules, and whether that request had computed "
        "it before; no clock is read.\n"
        "computed: tokens that requests had when they were preempted, of all preemptions. Of "
        "them: from GPU, still in vLLM's own prefix cache when the request ran again; from host, "
        "loaded; again, computed once more, which is all that was scheduled without prompts and "
        "answers once; the rest was lost to another preemption before it was computed again.\n"
        "host share: from host, of what the GPU did not have (from host and again). saved: 1 - "
        "again / again without connector. rescued: blocks stored because their request was "
        "preempted; postponed: hits not used because too many blocks waited for loads."
    )
    return "\n".join(textwrap.fill(paragraph, 100) for paragraph in text.split("\n"))
