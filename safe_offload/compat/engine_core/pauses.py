"""Lets EngineCore plan a loaded request without its pause after a step without a forward pass.

vLLM's loop sleeps for 1 ms after such a step, for threads of transfers. A request whose load has
just been reported needs only the next step, which then comes at once: once for each report, so the
loop does not spin. With data parallelism, where engines step together, and with a vLLM whose loop
is another one, the pause stays.

Source: vLLM 0.32.0, EngineCoreProc._process_engine_step of v1/engine/core.py.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from time import sleep
from typing import Any, Final

from safe_offload.compat.wrapping import is_wrapped, wrap

METHOD: Final = "_process_engine_step"
PAUSE_S: Final = 0.001
NAMES: Final = (
    *("step_fn", "items", "output_queue", "put_nowait", "post_step"),
    *("scheduler", "has_requests", "time", "sleep"),
)
"""What the method reads and calls, in this order."""

logger = logging.getLogger(f"vllm.{__name__}")

REPORTED: Final[deque[str]] = deque(maxlen=1)
"""The last request whose load this step has reported; empty if there is none."""


def skip_pauses() -> None:
    """Replace the method, if it is the known one; a second call does nothing."""
    from vllm.v1.engine.core import EngineCoreProc

    if is_wrapped(EngineCoreProc, METHOD):
        return
    if fits(getattr(EngineCoreProc, METHOD)):
        wrap(EngineCoreProc, METHOD, step)
    else:
        logger.debug("vLLM's loop is another one: it pauses after each step without a forward")


def fits(method: Any) -> bool:
    """Return whether `step` does what a method does."""
    code = getattr(method, "__code__", None)
    return code is not None and code.co_names == NAMES and PAUSE_S in code.co_consts


def step(original: Callable[[Any], bool], core: Any) -> bool:
    """Take a step as vLLM does, and pause only if it has reported no load."""
    if core.vllm_config.parallel_config.data_parallel_size > 1:
        return original(core)
    REPORTED.clear()
    outputs, model_executed = core.step_fn()
    for output in outputs.items() if outputs else ():
        core.output_queue.put_nowait(output)
    core.post_step(model_executed)
    if not model_executed and not REPORTED and core.scheduler.has_requests():
        sleep(PAUSE_S)
    return bool(model_executed)
