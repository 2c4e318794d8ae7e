"""What threads of an engine use: CPU time, time spent waiting for a core, page faults.

All is read in the process of vLLM's front end, whose children the other two are.
"""

from __future__ import annotations

import os
import threading
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.benchmarks.engine_watch import WorkerProbe

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
PROBE = f"{__name__}.ThreadProbe"

ThreadNames = tuple[int, int, dict[str, str]]
"""The worker's process, its parent, and the names of its threads by id."""


@dataclass(frozen=True, slots=True)
class ThreadUse:
    """What threads of one role have used."""

    cpu_s: float = 0.0
    waited_s: float = 0.0  # ready to run, while another thread had the core
    num_page_faults: int = 0

    def plus(self, other: ThreadUse, sign: int = 1) -> ThreadUse:
        mine, others = asdict(self), asdict(other)
        return ThreadUse(**{name: mine[name] + sign * others[name] for name in mine})


class ThreadProbe(WorkerProbe):
    """What `engine_watch` loads into vLLM's workers, which tells the names of its threads, too."""

    def thread_names(self) -> ThreadNames:
        names = {str(thread.native_id): thread.name for thread in threading.enumerate()}
        return os.getpid(), os.getppid(), names


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
