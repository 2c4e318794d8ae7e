"""Threads that move and read the bytes of copies, some for each direction."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from safe_offload.threads import start_threads
from safe_offload.worker.copies.base import Direction

T = TypeVar("T")


class DirectionThreads:
    """Threads for each direction, so that no load waits for a store; see `start_threads`."""

    def __init__(self, name: str, num_threads: int = 1) -> None:
        self._executors = {
            direction: start_threads(num_threads, f"{name}-{direction.value}")
            for direction in Direction
        }

    def submit(self, direction: Direction, function: Callable[..., T], *args: object) -> Future[T]:
        """Queue a function for the threads of a direction; raises RuntimeError once closed."""
        return self._executors[direction].submit(function, *args)

    async def run(self, direction: Direction, function: Callable[..., T], *args: object) -> T:
        """Return what a function returns, run by a thread of a direction."""
        return await asyncio.wrap_future(self.submit(direction, function, *args))

    def close(self) -> None:
        """Cancel queued functions, wait for running ones; a second call does nothing."""
        # All queues first: one direction must not go on while the other is waited for.
        for executor in self._executors.values():
            executor.shutdown(wait=False, cancel_futures=True)
        for executor in self._executors.values():
            executor.shutdown(wait=True)
