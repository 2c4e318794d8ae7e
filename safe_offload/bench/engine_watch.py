"""One request with what happened meanwhile: in the worker, and on every thread of the engine.

Runs in the process of vLLM's front end, whose children the scheduler's and the worker's are.
"""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safe_offload.bench.engine_process import Answer, Question, answer

PROBE = "safe_offload.bench.engine_probe.WorkerProbe"
"""vLLM's engine argument `worker_extension_cls`."""

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


@dataclass(frozen=True, slots=True)
class ThreadUse:
    """What threads of one role have used."""

    cpu_s: float = 0.0
    waited_s: float = 0.0  # ready to run, while another thread had the core
    num_page_faults: int = 0

    def __add__(self, other: "ThreadUse") -> "ThreadUse":
        return ThreadUse(
            self.cpu_s + other.cpu_s,
            self.waited_s + other.waited_s,
            self.num_page_faults + other.num_page_faults,
        )

    def since(self, before: "ThreadUse") -> "ThreadUse":
        """What was used between two readings."""
        return ThreadUse(
            self.cpu_s - before.cpu_s,
            self.waited_s - before.waited_s,
            self.num_page_faults - before.num_page_faults,
        )


@dataclass(frozen=True, slots=True)
class Watched:
    """An answer, and what happened meanwhile."""

    answer: Answer
    probe: dict[str, Any]
    """See `WorkerProbe.take_probe`."""
    uses: dict[str, ThreadUse]
    """By role; of the whole request, to its last token."""


def start_watching(engine: Any, _: None) -> None:
    """Wrap the worker; once."""
    engine.collective_rpc("start_probe")


def answer_watched(engine: Any, question: Question) -> Watched:
    """Run one request alone; reading and recording are outside of the time that it takes."""
    (before,) = engine.collective_rpc("take_probe")
    uses_before = _read_uses(before)
    found = answer(engine, question)
    uses = _read_uses(before)
    (probe,) = engine.collective_rpc("take_probe")
    nothing = ThreadUse()
    return Watched(
        answer=found,
        probe=probe,
        uses={role: use.since(uses_before.get(role, nothing)) for role, use in uses.items()},
    )


def time_memcpy(engine: Any, size: tuple[int, int]) -> float:
    """See `WorkerProbe.time_memcpy`; `size` is in bytes and pieces."""
    (time_s,) = engine.collective_rpc("time_memcpy", args=size)
    assert isinstance(time_s, float)
    return time_s


def _read_uses(probe: dict[str, Any]) -> dict[str, ThreadUse]:
    """What every role has used so far.

    Args:
        probe: knows the worker's process and the names of its threads.
    """
    worker_pid, scheduler_pid = probe["pid"], probe["parent_pid"]
    uses: dict[str, ThreadUse] = {}
    for pid in {os.getpid(), scheduler_pid, worker_pid}:
        for folder in Path(f"/proc/{pid}/task").iterdir():
            role = FRONT_END if pid == os.getpid() else SCHEDULER
            if pid == worker_pid:
                is_first = folder.name == str(pid)
                role = FORWARD if is_first else role_of(probe["thread_names"].get(folder.name, ""))
            uses[role] = uses.get(role, ThreadUse()) + read_thread(folder)
    return uses


def role_of(thread_name: str) -> str:
    """The role of a thread of the worker, by its name in Python; its first thread has its own."""
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
        statistics = (folder / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ThreadUse()
    return ThreadUse(
        int(on_core_ns) / NANOSECONDS_PER_S, int(waited_ns) / NANOSECONDS_PER_S, int(statistics[7])
    )
