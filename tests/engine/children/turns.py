"""Answers the prompts of a job one after the other."""

from __future__ import annotations

from typing import Any

import engine


def scenario(job: dict[str, Any]) -> dict[str, Any]:
    """The answers, the connector's metrics, and what is held in the end."""
    llm = engine.start(job)
    report: dict[str, Any] = {"answers": engine.take_turns(llm, job)}
    if job["in_process"]:
        if engine.planner_of(engine.scheduler_of(llm).connector) is not None:
            engine.drain(llm)
        report["audit"] = engine.audit(llm)
    report["metrics"] = engine.connector_metrics(llm)
    return report


if __name__ == "__main__":
    engine.main(scenario)
