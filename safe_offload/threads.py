"""Starting threads and processes: their cores, environment, titles."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from safe_offload.errors import ConfigError

logger = logging.getLogger(f"vllm.{__name__}")

_OPENMP: Final = ("OMP_", "GOMP", "KMP_")


def environment() -> dict[str, str]:
    """Return the environment of a child process that may run on any core.

    With OpenMP's variables, the libgomp that vLLM's CPU engine preloads would bind the process. A
    relative path would let it import code from the working directory.
    """
    found = {key: value for key, value in os.environ.items() if key[:4] not in _OPENMP}
    paths = filter(os.path.isabs, found.pop("PYTHONPATH", "").split(os.pathsep))
    return found | {"PYTHONPATH": os.pathsep.join(paths)}


def set_title(title: str) -> None:
    """Set the process title that ps and top show, if setproctitle is installed."""
    with contextlib.suppress(ImportError):
        import setproctitle

        setproctitle.setproctitle(title)


@contextlib.contextmanager
def switched_on(variable: str) -> Iterator[None]:
    """Set an environment variable to 1 temporarily."""
    before = os.environ.get(variable)
    os.environ[variable] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[variable]
        else:
            os.environ[variable] = before


@contextlib.contextmanager
def on_other_cores() -> Iterator[None]:
    """Let threads started meanwhile run on the parent process's cores, except this thread's.

    vLLM's CPU engine binds a worker's first thread to the cores where it computes, and new threads
    inherit that. The engine's own process, the parent, is not bound, and vLLM leaves a core idle
    for the threads of a connector.

    Source: `configure_omp_envs` and `reserve_cpu_num` in vllm/utils/ompmultiprocessing.py (0.32.0);
    Linux, sched_setaffinity(2).
    """
    own: set[int] | None = None
    try:
        own = os.sched_getaffinity(0)
        cores = os.sched_getaffinity(os.getppid())
        if own < cores:
            os.sched_setaffinity(0, cores - own)
    except (AttributeError, OSError) as error:  # not on Linux, or not permitted
        logger.debug("Threads stay on the cores that they inherit: %s", error)
    try:
        yield
    finally:
        if own is not None:
            os.sched_setaffinity(0, own)


def start_threads(num_threads: int, name: str) -> ThreadPoolExecutor:
    """Return a thread pool whose threads all run already.

    `ThreadPoolExecutor.submit` queues the work before it starts a thread (CPython 3.11). If the
    system refuses the thread, `submit` raises, but another thread does the work later: a copy
    reported as failed would write to another request's blocks.

    Raises:
        ConfigError: the system refuses one of them.
    """
    executor = ThreadPoolExecutor(num_threads, name)
    # Each thread waits for all others, so that none runs two of these.
    gate = threading.Barrier(num_threads + 1)
    try:
        for _ in range(num_threads):
            executor.submit(gate.wait)
    except RuntimeError as error:
        gate.abort()
        executor.shutdown(wait=True, cancel_futures=True)
        raise ConfigError(
            f"the system refused a thread ({name}): {error}. Fix: raise the limit on processes and "
            "threads (ulimit -u, pids.max of the container)."
        ) from error
    gate.wait()
    return executor
