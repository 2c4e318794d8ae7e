"""Our connector, which notes when hooks of its scheduler side end.

The scheduler lives in a process where no worker extension gets. `EngineCore` gets a method for what
was noted; a front end calls it as one of vLLM's utilities. Times are of `time.monotonic`.
"""

import time
from typing import Any

from vllm.v1.engine.core import EngineCore

from safe_offload import connector
from safe_offload.protocol import StepReport
from tests.benchmarks.breakdown import MATCHED, PLANNED, SETTLED

moments: list[tuple[str, float]] = []
"""What has ended, and when; `SETTLED` if the workers have told of a transfer's end."""


class SafeCPUOffloadConnector(connector.SafeCPUOffloadConnector):
    """See the module."""

    def get_num_new_matched_tokens(self, *what: Any) -> tuple[int | None, bool]:
        found = super().get_num_new_matched_tokens(*what)
        moments.append((MATCHED, time.monotonic()))
        return found

    def build_connector_meta(self, *what: Any) -> Any:
        plan = super().build_connector_meta(*what)
        moments.append((PLANNED, time.monotonic()))
        return plan

    def update_connector_output(self, connector_output: Any) -> None:
        super().update_connector_output(connector_output)
        report = connector_output.kv_connector_worker_meta
        if isinstance(report, StepReport) and report.outcomes:
            moments.append((SETTLED, time.monotonic()))


def take_moments(_core: Any) -> list[tuple[str, float]]:
    """Return what was noted since the last call."""
    taken = moments[:]
    moments.clear()
    return taken


EngineCore.take_moments = take_moments
