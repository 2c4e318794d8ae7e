"""Transfers that wait for their turn: loads before stores, bounded bytes in flight."""

from __future__ import annotations

import asyncio
import enum
import threading
from collections import deque
from typing import Any

from safe_offload.worker.backends.base import Completion, Copy, Direction


class JobState(enum.Enum):
    """Where a transfer is on this rank: QUEUED, then ISSUED or at once SETTLED."""

    QUEUED = "queued"
    ISSUED = "issued"
    SETTLED = "settled"


class Job:
    """One transfer on this rank."""

    __slots__ = (
        "completion",
        "copy",
        "decided",
        "is_counted",
        "is_urgent",
        "mark",
        "poisoned",
        "size_bytes",
        "state",
        "taken_back",
        "turn",
    )

    def __init__(self, copy: Copy, mark: Any, size_bytes: int) -> None:
        self.copy = copy
        self.mark = mark
        self.size_bytes = size_bytes
        self.state = JobState.QUEUED
        self.completion: Completion | None = None
        self.decided = threading.Event()
        """Set when the copy has been issued, or has settled without."""
        self.turn: asyncio.Future[None] | None = None
        self.is_urgent = False
        """Somebody waits for it: it does not wait for its turn."""
        self.is_counted = False
        """Its bytes are in flight."""
        self.taken_back = False
        """Its deadline has passed, and its copy had not begun and never will."""
        self.poisoned = False
        """Its source may have changed under it: it fails whatever the copy says."""


class Turnstile:
    """Lets transfers through while their bytes are within bounds, loads before stores.

    One transfer is always let through, so that a transfer that is larger than the bound still runs.
    Used on the loop thread only.
    """

    def __init__(self, max_inflight_bytes: int) -> None:
        self._max_bytes = max_inflight_bytes
        self._bytes = 0
        self._waiting: dict[Direction, deque[Job]] = {
            Direction.LOAD: deque(),
            Direction.STORE: deque(),
        }

    async def enter(self, job: Job) -> None:
        """Wait for the job's turn."""
        if not job.is_urgent and (not self._fits(job) or any(self._waiting.values())):
            job.turn = asyncio.get_running_loop().create_future()
            self._waiting[job.copy.direction].append(job)
            self._let_in()
            try:
                await job.turn
            except asyncio.CancelledError:
                self.leave(job)
                raise
        else:
            self._count(job)

    def leave(self, job: Job) -> None:
        """The job's bytes are no longer in flight, or it waits no longer; may come twice."""
        if job.is_counted:
            job.is_counted = False
            self._bytes -= job.size_bytes
        self._let_in()

    def hurry(self, job: Job) -> None:
        """Let a job in now, whatever is in flight: somebody waits for it."""
        job.is_urgent = True
        if job.turn is not None and not job.turn.done():
            self._count(job)
            job.turn.set_result(None)

    def _count(self, job: Job) -> None:
        job.is_counted = True
        self._bytes += job.size_bytes

    def _fits(self, job: Job) -> bool:
        return not self._bytes or self._bytes + job.size_bytes <= self._max_bytes

    def _let_in(self) -> None:
        for waiting in self._waiting.values():
            while waiting:
                job = waiting[0]
                assert job.turn is not None
                if not job.turn.done():
                    if not self._fits(job):
                        return
                    self._count(job)
                    job.turn.set_result(None)
                waiting.popleft()
