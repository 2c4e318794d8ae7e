"""Threads that are all there before the first work comes.

`ThreadPoolExecutor.submit` starts a thread when it needs one, behind the work that it has queued by
then (CPython 3.11, Lib/concurrent/futures/thread.py). If the system refuses the thread, `submit`
raises, and another thread does the work later: a copy that had been reported as failed would write
to blocks that belong to somebody else by then. So no thread is left to be started.
"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

from safe_offload.errors import ConfigError


def start_threads(num_threads: int, name: str) -> ThreadPoolExecutor:
    """A pool of threads that run.

    Raises:
        ConfigError: the system refuses one of them.
    """
    executor = ThreadPoolExecutor(num_threads, name)
    # Each waits for all others, so that none of them is given two of these.
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
