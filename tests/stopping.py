"""Stop processes as SIGSTOP does, and return when they have stopped.

The kernel stops a process only once one of its threads has run to take the signal. Until then the
others go on: on a busy machine for tens of milliseconds, time enough for a transfer.
"""

import os
import signal
import time
from collections.abc import Collection
from pathlib import Path


def stop(*pids: int) -> None:
    """Stop processes; none of their threads runs when this returns."""
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    while not all(_has_stopped(pid) for pid in pids):
        time.sleep(0.001)


def go_on(*pids: int) -> None:
    """Let stopped processes go on."""
    for pid in pids:
        os.kill(pid, signal.SIGCONT)


def is_running(pid: int) -> bool:
    """Whether there is such a process, and not all of its threads have ended."""
    return any(state not in "ZX" for state in _thread_states(pid))


def _has_stopped(pid: int) -> bool:
    """Whether all threads have stopped, or have ended."""
    return all(state in "TtZX" for state in _thread_states(pid))


def _thread_states(pid: int) -> Collection[str]:
    states = []
    try:
        for path in Path(f"/proc/{pid}/task").glob("*/stat"):
            states.append(path.read_text().rpartition(")")[2].split()[0])
    except (FileNotFoundError, ProcessLookupError):
        return ["R"]  # a thread has just ended: look again
    return states
