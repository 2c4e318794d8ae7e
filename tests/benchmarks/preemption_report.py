"""What the benchmark `preemption` found: figures from each recovery, as a table and JSON."""

import textwrap
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from safe_offload.commands.bench.report import Report, table

BASELINE = "no connector"


@dataclass(slots=True)
class Recovery:
    """What became of the tokens that one request had computed when it was preempted."""

    num_computed: int  # tokens whose KV cache it had then
    num_gpu: int = 0  # of them, given back by the GPU's prefix cache when it ran again
    num_host: int = 0  # of them, loaded from the host
    # Tokens computed that had been computed before, until it ended or was preempted once more.
    # What it had not come to by then is lost again and counts for the next.
    num_again: int = 0


@dataclass(frozen=True, slots=True)
class EngineRun:
    """One engine's run of the workload."""

    num_steps: int
    num_scheduled: int  # tokens that the scheduler scheduled, of all steps
    num_once: int  # tokens that have to be computed: prompts that no cache had, and answers
    recoveries: tuple[Recovery, ...]  # one for each preemption
    token_ids: tuple[tuple[int, ...], ...]  # of the answers, in the order of the prompts
    # Of the connector, without their prefix.
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


def num_different_answers(cases: Sequence[CaseRuns]) -> int:
    """Return how many answers differ from the baseline's, of all cases and engines."""
    return sum(runs.num_different_answers(name) for runs in cases for name in runs.runs)


def make_report(
    cases: Sequence[CaseRuns], options: dict[str, Any], machine: dict[str, Any]
) -> Report:
    return Report(
        method=_describe_method(options),
        sections=[
            *(
                f"{runs.case}, pool of {runs.num_gpu_blocks:,} blocks\n{_case_table(runs)}"
                for runs in cases
            ),
            _equality(cases, options),
        ],
        figures={
            "cases": [
                {
                    "case": runs.case,
                    "num_gpu_blocks": runs.num_gpu_blocks,
                    "engines": {name: _run_json(runs, name) for name in runs.runs},
                }
                for runs in cases
            ]
        },
        options=options,
        machine=machine,
    )


def _run_json(runs: CaseRuns, name: str) -> dict[str, Any]:
    run = runs.runs[name]
    return {
        "num_preemptions": len(run.recoveries),
        "num_again": run.num_again,
        "saved_share": runs.saved_share(name),
        "host_share": run.host_share,
        "num_different_answers": runs.num_different_answers(name),
    } | asdict(run)


def _case_table(runs: CaseRuns) -> str:
    titles = ["preemptions", "computed", "from GPU", "from host", "again", "host share", "saved"]
    rows = [["", *titles, "rescued", "postponed"]]
    for name, run in runs.runs.items():
        shares = ["", "", "", ""]
        if name != BASELINE:
            shares = [
                _share(run.host_share),
                _share(runs.saved_share(name)),
                f"{run.counters.get('rescued_blocks', 0):,.0f}",
                f"{run.counters.get('postponed_hits', 0):,.0f}",
            ]
        counts = (
            len(run.recoveries),
            run.sum(lambda recovery: recovery.num_computed),
            run.sum(lambda recovery: recovery.num_gpu),
            run.sum(lambda recovery: recovery.num_host),
            run.num_again,
        )
        rows.append([name, *(f"{count:,}" for count in counts), *shares])
    return table(rows)


def _share(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}"


def _equality(cases: Sequence[CaseRuns], options: dict[str, Any]) -> str:
    num_different = num_different_answers(cases)
    num_answers = sum(len(runs.runs) - 1 for runs in cases) * int(options["num_requests"])
    if num_different:
        return f"answers: {num_different} of {num_answers} DIFFER from the baseline's"
    return f"answers: all {num_answers} equal the baseline's"


def _describe_method(options: dict[str, Any]) -> str:
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
        "preempted; postponed: hits put off because too many blocks waited for loads."
    )
    return "\n".join(textwrap.fill(paragraph, 100) for paragraph in text.split("\n"))
