"""What processes of engines have imported when they are forked: vLLM and this package."""

import atexit
import gc
import multiprocessing
from typing import Any

import vllm.entrypoints.launchers.api_server.entry
import vllm.entrypoints.llm
import vllm.v1.worker.cpu_worker  # noqa: F401

import safe_offload.connector
import safe_offload.scheduler.planner
import safe_offload.worker.opening  # noqa: F401

_get_context = multiprocessing.get_context


def _forking_context(method: str | None = None) -> Any:
    """Let vLLM fork: it asks for "spawn" on a CPU, and each process would import for seconds."""
    return _get_context("fork" if method == "spawn" else method)


multiprocessing.get_context = _forking_context

gc.collect()
atexit.register(gc.unfreeze)
gc.freeze()  # a collection in a fork neither looks at it nor copies its pages
