"""Answers the prompts of a job one after the other."""

from pathlib import Path
from typing import Any

import psutil

from tests.engine.children import engine

END_TIMEOUT_S = 600


def scenario(job: dict[str, Any]) -> dict[str, Any]:
    """The answers, the connector's metrics, and what is held or left in the end."""
    llm = engine.start(job)
    report: dict[str, Any] = {"answers": engine.take_turns(llm, job)}
    if job["in_process"]:
        if engine.planner_of(engine.scheduler_of(llm).connector) is not None:
            engine.drain(llm)
        report["audit"] = engine.audit(llm)
    report["metrics"] = engine.connector_metrics(llm)
    report["info"] = engine.connector_info(llm)
    if job["options"].get("kill_rank"):
        report["shared"] = shared_memory(engine_processes())
        report["left_processes"] = kill_rank()
        report["left_shared"] = shared_memory(psutil.process_iter())
    elif not job["in_process"]:
        report["left_processes"] = shut_down(llm)
    return report


def engine_processes() -> list[psutil.Process]:
    """The processes of the engine."""
    processes = [
        process
        for process in psutil.Process().children(recursive=True)
        if "resource_tracker" not in " ".join(process.cmdline())  # Python's own, ends with us
    ]
    assert processes, "the engine was to run in processes of its own"
    return processes


def shut_down(llm: Any) -> list[list[str]]:
    """End the engine; the command lines of its processes that are still there."""
    processes = engine_processes()
    llm.llm_engine.engine_core.shutdown()
    return wait_for(processes)


def kill_rank() -> list[list[str]]:
    """Kill a worker; the command lines of the engine's processes that do not end with it."""
    processes = engine_processes()
    inodes = shared_memory(processes)
    workers = [p for p in processes if set(shared_memory([p])) & set(inodes)]
    workers[-1].kill()
    return wait_for(processes)


def wait_for(processes: list[psutil.Process]) -> list[list[str]]:
    _, alive = psutil.wait_procs(processes, END_TIMEOUT_S)
    return [process.cmdline() for process in alive]


def shared_memory(processes: Any) -> dict[str, list[int]]:
    """Bytes of each of our shared memories that are resident in processes, by its inode.

    Those that several of them have are counted once: their proportional shares are added up.
    """
    found: dict[str, list[int]] = {}
    for process in processes:
        try:
            lines = Path(f"/proc/{process.pid}/smaps").read_text().splitlines()
        except (OSError, psutil.Error):
            continue
        inode = None
        for line in lines:
            fields = line.split()
            if not fields[0].endswith(":"):
                inode = fields[4] if "memfd:safe-offload" in line else None
            elif fields[0] == "Pss:" and inode is not None:
                found.setdefault(inode, []).append(int(fields[1]) * 1024)
    return found
