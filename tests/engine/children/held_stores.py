"""Holds each of the worker's store copies back until the engine fences it.

That is the last moment at which it may still read its source.
"""

import threading
import time
from typing import Any

from tests.engine.children import engine

WAIT_S = 600
COPY_S = 0.05
"""A copy takes so long once its gate is open: a fence that does not wait for it loses the race."""


class Gates:
    """One gate for each store copy; replaces methods of the backend by ones that wait."""

    def __init__(self) -> None:
        self._gates: dict[int, threading.Event] = {}
        self._all_open = threading.Event()
        self.opened_by_fence = 0

    def install(self) -> None:
        """Hold every store from now on."""
        import vllm.config  # noqa: F401  (first: the plugin's default of kv_role comes with it)

        from safe_offload.worker.copies.base import Direction
        from safe_offload.worker.copies.cpu import CpuBackend

        run, issue, fence = CpuBackend._run, CpuBackend.issue, CpuBackend.fence

        def held_run(backend: Any, copy: Any) -> None:
            gate = self._gates.get(id(copy))
            if gate is not None and not self._all_open.is_set():
                assert gate.wait(WAIT_S), "the gate of a store was not opened"
                time.sleep(COPY_S)
            run(backend, copy)

        def issue_held(backend: Any, copy: Any, after: Any) -> Any:
            gate = threading.Event()
            if copy.direction is Direction.STORE and not self._all_open.is_set():
                self._gates[id(copy)] = gate
            completion = issue(backend, copy, after)
            completion.gate, completion.copy = gate, copy  # keeps the copy's id its own
            return completion

        def fence_and_open(backend: Any, completion: Any, timeout_s: float) -> bool:
            self.opened_by_fence += not completion.gate.is_set()
            completion.gate.set()
            return fence(backend, completion, timeout_s)

        CpuBackend._run, CpuBackend.issue = held_run, issue_held
        CpuBackend.fence = fence_and_open

    def open_all(self) -> None:
        """Hold nothing any more."""
        self._all_open.set()
        for gate in self._gates.values():
            gate.set()


def scenario(job: dict[str, Any]) -> dict[str, Any]:
    """See the module's docstring."""
    gates = Gates()
    gates.install()
    try:
        return run(job, gates)
    finally:
        gates.open_all()  # else this process waits for the copies before it ends


def run(job: dict[str, Any], gates: Gates) -> dict[str, Any]:
    """Do the turns of the job under held stores."""
    llm = engine.start(job)
    report: dict[str, Any] = {"answers": engine.take_turns(llm, job)}
    report["opened_by_fence"] = gates.opened_by_fence
    gates.open_all()
    engine.drain(llm)
    report["audit"] = engine.audit(llm)
    report["metrics"] = engine.connector_metrics(llm)
    return report
