"""`safe-offload bench engine`, and what every thread uses while a prompt is computed and stored.

CPU time, time spent waiting for a core, and page faults of each process and kind of thread, over
whole requests, answers included.
"""

from __future__ import annotations

import argparse
import os
import statistics
import threading
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from safe_offload.commands.bench import engine as bench_engine
from safe_offload.commands.bench.engine_breakdown import (
    BASELINE,
    CONNECTOR,
    FIRST,
    TTFT,
    Observed,
    Rows,
    median_ms,
    render_rows,
    select,
)
from safe_offload.commands.bench.engine_process import Question
from safe_offload.commands.bench.engine_report import EngineFound, make_report
from safe_offload.commands.bench.engine_watch import Watched, WorkerProbe, answer_watched
from safe_offload.commands.bench.report import Report, publish

FRONT_END, SCHEDULER = "front end", "scheduler's process"
FORWARD, OTHERS = "worker, the forward's thread", "worker, vLLM's other threads"
LOOP, STORES, LOADS = "worker, our loop", "worker, our stores", "worker, our loads"
FIRST_TOUCH = "worker, our first touch of memory"
ROLES = (FRONT_END, SCHEDULER, FORWARD, OTHERS, LOOP, STORES, LOADS, FIRST_TOUCH)
_ROLE_OF_NAME = {
    "safe-offload-loop": LOOP,
    "safe-offload-store": STORES,
    "safe-offload-load": LOADS,
    "safe-offload-touch": FIRST_TOUCH,
}
NANOSECONDS_PER_S = 1e9
WAITED_SHARE_MAX = 0.05
"""Of a request, on a machine that nothing else disturbs."""

PROBE = f"{__name__}.ThreadProbe"

ThreadNames = tuple[int, int, dict[str, str]]
"""The worker's process, its parent, and the names of its threads by id."""

add_arguments = bench_engine.add_arguments


@dataclass(frozen=True, slots=True)
class ThreadUse:
    """What threads of one role have used."""

    cpu_s: float = 0.0
    waited_s: float = 0.0  # ready to run, while another thread had the core
    num_page_faults: int = 0

    def plus(self, other: ThreadUse, sign: int = 1) -> ThreadUse:
        mine, others = asdict(self), asdict(other)
        return ThreadUse(**{name: mine[name] + sign * others[name] for name in mine})


@dataclass(frozen=True)
class WatchedThreads(Watched):
    """A request, and what every role has used during it."""

    uses: dict[str, ThreadUse]


class ThreadProbe(WorkerProbe):
    """The worker extension of `bench engine`, which tells the names of its threads, too."""

    def thread_names(self) -> ThreadNames:
        names = {str(thread.native_id): thread.name for thread in threading.enumerate()}
        return os.getpid(), os.getppid(), names


def run_command(arguments: argparse.Namespace) -> int:
    """Run `python -m tests.benchmarks first_pass`; return 1 if the engines disagree on a token."""
    options = bench_engine.read_options(arguments)
    options = replace(options, engine_args={"worker_extension_cls": PROBE} | options.engine_args)
    found = bench_engine.measure(options, print, arguments.logs, answer_with_uses)
    publish(with_threads(make_report(found), found), arguments)
    return 0 if found.num_different_answers == 0 else 1


def with_threads(report: Report, found: EngineFound) -> Report:
    """Return the report of `bench engine` with what the threads have used."""
    rows = first_pass_rows(found.observed)
    faults = [use_of(one, STORES).num_page_faults for one in _firsts(found, CONNECTOR)]
    title = (
        f"A prompt that is computed and stored, in ms: {statistics.median(faults):,.0f} page faults"
        " in our copying threads.\n"
    )
    uses = [{role: asdict(use_of(one, role)) for role in ROLES} for one in found.observed]
    more = {"first_pass_ms": rows, "waiting": waiting(found), "uses": uses}
    return replace(
        report,
        sections=[
            *report.sections,
            title + render_rows(["", "none", "ours", "more"], rows),
            "\n".join(waiting(found)),
        ],
        figures=report.figures | more,
    )


def waiting(found: EngineFound) -> list[str]:
    """Return for which engine forwards had to wait for their core, a sign of a disturbed run."""
    lines = []
    for engine, name in ((BASELINE, BASELINE), (CONNECTOR, found.connector)):
        share = max(
            use_of(one, FORWARD).waited_s / one.watched.answer.total_s
            for one in _firsts(found, engine)
        )
        if share > WAITED_SHARE_MAX:
            lines.append(
                f"DISTURBED: with {name}, the forward's thread waited for its core for up to"
                f" {share:.0%} of a request of the first pass"
            )
    return lines


def first_pass_rows(observed: Sequence[Observed]) -> Rows:
    """Return medians in ms of a computed prompt without a connector, with it, the difference."""
    columns = [select(observed, engine, FIRST) for engine in (BASELINE, CONNECTOR)]
    values = {
        TTFT: [[one.ttft_s for one in column] for column in columns],
        **{
            f"CPU: {role}": [[use_of(one, role).cpu_s for one in column] for column in columns]
            for role in ROLES
        },
        "the forward's thread waits for its core": [
            [use_of(one, FORWARD).waited_s for one in column] for column in columns
        ],
    }
    rows: Rows = {}
    for name, (none_s, ours_s) in values.items():
        none, ours = median_ms(none_s), median_ms(ours_s)
        rows[name] = [none, ours, None if none is None or ours is None else ours - none]
    return rows


def use_of(observed: Observed, role: str) -> ThreadUse:
    assert isinstance(observed.watched, WatchedThreads)
    return observed.watched.uses.get(role, ThreadUse())


def _firsts(found: EngineFound, engine: str) -> list[Observed]:
    return select(found.observed, engine, FIRST)


# ---- in the process of vLLM's front end, whose children the other two are ----------------------


def answer_with_uses(engine: Any, question: Question) -> WatchedThreads:
    """Run one request alone; the threads are read before and after it."""
    (names,) = engine.collective_rpc("thread_names")
    uses_before = read_uses(names)
    watched = answer_watched(engine, question)
    uses = read_uses(names)
    nothing = ThreadUse()
    during = {role: use.plus(uses_before.get(role, nothing), -1) for role, use in uses.items()}
    return WatchedThreads(watched.answer, watched.probe, during)


def read_uses(worker: ThreadNames) -> dict[str, ThreadUse]:
    """Return what every role has used so far."""
    worker_pid, scheduler_pid, names = worker
    uses: dict[str, ThreadUse] = {}
    for pid in {os.getpid(), scheduler_pid, worker_pid}:
        for folder in Path(f"/proc/{pid}/task").iterdir():
            role = FRONT_END if pid == os.getpid() else SCHEDULER
            if pid == worker_pid:
                is_first = folder.name == str(pid)
                role = FORWARD if is_first else role_of(names.get(folder.name, ""))
            uses[role] = uses.get(role, ThreadUse()).plus(read_thread(folder))
    return uses


def role_of(thread_name: str) -> str:
    """Return the role of a thread of the worker by its name; its first thread has its own."""
    for prefix, role in _ROLE_OF_NAME.items():
        if thread_name.startswith(prefix):
            return role
    return OTHERS


def read_thread(folder: Path) -> ThreadUse:
    """Read what a thread has used since it started; nothing if it has gone.

    Source: Linux kernel, Documentation/scheduler/sched-stats.rst (schedstat: time on the core and
    time waiting for one, in ns), and proc_pid_stat(5) (minflt is the eighth after the name).
    """
    try:
        on_core_ns, waited_ns, _ = (folder / "schedstat").read_text().split()
        fields = (folder / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ThreadUse()
    return ThreadUse(
        int(on_core_ns) / NANOSECONDS_PER_S, int(waited_ns) / NANOSECONDS_PER_S, int(fields[7])
    )
