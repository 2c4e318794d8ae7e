"""Processes that have not imported vLLM yet, without waiting seconds for what vLLM itself imports.

One process imports that once, and each of these is a fork of it.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import sys
from collections.abc import Callable, Mapping
from multiprocessing import forkserver
from pathlib import Path
from typing import Any
from unittest import mock

PRELOADED = [
    "torch._inductor.lowering",
    "torch._inductor.standalone_compile",
    "transformers.modeling_gguf_pytorch_utils",
    "openai.types.responses",
]
"""Most of what `import vllm` takes. Those that do not exist are left out."""

SCRIPT_TIMEOUT_S = 240.0


def start(
    function: Callable[..., object], *arguments: Any, log: Path, environment: Mapping[str, str]
) -> Any:
    """Start a process that leads a session of its own; return its `multiprocessing.Process`.

    Args:
        function: of a module.
        log: what the process writes goes there.
        environment: all variables; but torch has read `OMP_NUM_THREADS`, which is 1.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    with mock.patch.dict(os.environ, OMP_NUM_THREADS="1"):
        forkserver.ensure_running()
    process: Any = context.Process(target=_run, args=(function, arguments, log, dict(environment)))
    process.start()
    return process


def run_script(script: str, folder: Path, environment: Mapping[str, str]) -> str:
    """Run a script in a folder, which is also the first place it imports from; return its output.

    Args:
        environment: on top of ours.

    Raises:
        AssertionError: it failed or took too long; the message has what it printed.
    """
    log = folder / "log"
    environment = {**os.environ, **environment}
    process = start(_run_script, script, folder, log=log, environment=environment)
    process.join(SCRIPT_TIMEOUT_S)
    process.kill()
    process.join()
    text = log.read_text()
    assert process.exitcode == 0, text
    return text


def _run(
    function: Callable[..., object], arguments: Any, log: Path, environment: dict[str, str]
) -> None:
    os.setsid()
    with log.open("wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    faulthandler.enable()
    os.environ.clear()
    os.environ.update(environment)
    function(*arguments)


def _run_script(script: str, folder: Path) -> None:
    os.chdir(folder)
    sys.path.insert(0, str(folder))
    exec(compile(script, "<script>", "exec"), {"__name__": "__main__"})
