"""Answers the prompts of a job one after the other."""

from __future__ import annotations

from typing import Any

import engine
import psutil

END_TIMEOUT_S = 60


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
    if not job["in_process"]:
        report["left_processes"] = shut_down(llm)
    return report


def shut_down(llm: Any) -> list[list[str]]:
    """End the engine; the command lines of its processes that are still there."""
    processes = [
        process
        for process in psutil.Process().children(recursive=True)
        if "resource_tracker" not in " ".join(process.cmdline())  # Python's own, ends with us
    ]
    assert processes, "the engine was to run in processes of its own"
    llm.llm_engine.engine_core.shutdown()
    _, alive = psutil.wait_procs(processes, END_TIMEOUT_S)
    return [process.cmdline() for process in alive]


if __name__ == "__main__":
    engine.main(scenario)
