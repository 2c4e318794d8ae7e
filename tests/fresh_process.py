"""Processes of their own, without waiting seconds for what they import.

One process imports it once, and each of these is a fork of it. There are two such servers: those of
`start` have imported most of what vLLM imports, but neither vLLM nor this package; those of
`start_engine` have imported all that an engine needs.
"""

import contextlib
import faulthandler
import multiprocessing
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
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

ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    # Bound to cores of its own choice an engine starves beside another one.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "PYTHONFAULTHANDLER": "1",
}
"""Of engines: with one thread each, two of them can run beside each other on two cores."""

SCRIPT_TIMEOUT_S = 1000.0

_starting = threading.Lock()
"""Held while a thread starts a process: multiprocessing's own functions are replaced meanwhile."""
_engine_server = forkserver.ForkServer()
_engine_server.set_forkserver_preload(["tests.engine.preloaded"])


def start(
    function: Callable[..., object], *arguments: Any, log: Path, environment: Mapping[str, str]
) -> Any:
    """Start a process that leads a session of its own; return its `multiprocessing.Process`.

    `function`: of a module; `log`: what the process writes goes there; `environment`: all
    variables; but torch has read `OMP_NUM_THREADS`, which is 1.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    process: Any = context.Process(target=_run, args=(function, arguments, log, dict(environment)))
    with _starting:
        with mock.patch.dict(os.environ, OMP_NUM_THREADS="1"):
            forkserver.ensure_running()
        process.start()
    return process


def start_engine(
    function: Callable[..., object], *arguments: Any, log: Path, environment: Mapping[str, str]
) -> Any:
    """Do as `start` does; vLLM is imported, and the processes that it starts are forks, too."""
    context = multiprocessing.get_context("forkserver")
    process: Any = context.Process(target=_run, args=(function, arguments, log, dict(environment)))
    with _starting, _forks_of_engines():
        process.start()
    return process


@contextlib.contextmanager
def engine_server() -> Iterator[None]:
    """Let whatever multiprocessing starts, by any method, be such a process."""
    context = multiprocessing.get_context("forkserver")
    with (
        _forks_of_engines(),
        mock.patch.object(multiprocessing, "get_context", return_value=context),
    ):
        yield


@contextlib.contextmanager
def _forks_of_engines() -> Iterator[None]:
    with mock.patch.dict(os.environ, ENVIRONMENT):
        _engine_server.ensure_running()
    connect = _engine_server.connect_to_new_process
    with mock.patch.object(forkserver, "connect_to_new_process", connect):
        yield


def run_script(script: str, folder: Path, environment: Mapping[str, str]) -> str:
    """Run a script in a folder, which is also the first place it imports from; return its output.

    `environment`: on top of ours. Raises AssertionError if it failed or took too long; the message
    has what it printed.
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
