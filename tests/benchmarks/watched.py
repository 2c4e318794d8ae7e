"""Our connector, which notes when hooks of its scheduler side end.

The scheduler lives in a process where no worker extension gets. `EngineCore` gets a method for what
was noted; a front end calls it as one of vLLM's utilities. Times are of `time.monotonic`.
"""

from typing import Any

from vllm.v1.engine.core import EngineCore

from safe_offload import connector
from tests.benchmarks.engine_watch import watch_hooks

moments: list[tuple[str, float]] = []
"""What has ended, and when; see `watch_hooks`."""


class SafeCPUOffloadConnector(connector.SafeCPUOffloadConnector):
    """See the module."""

    def __init__(self, *what: Any, **how: Any) -> None:
        super().__init__(*what, **how)
        watch_hooks(self, moments)


def take_moments(_core: Any) -> list[tuple[str, float]]:
    """Return what was noted since the last call."""
    taken = moments[:]
    moments.clear()
    return taken


EngineCore.take_moments = take_moments
