"""The event loop that drives every transfer of a rank.

One thread runs one event loop (uvloop where there is one). Each transfer is a coroutine in one
TaskGroup: it waits for its turn, issues its copy, waits for the copy, settles. Deadlines,
cancellation and failure are those of asyncio. vLLM's hooks reach the loop through four calls that
do not wait for it: `submit`, `fence` (which waits for the copy where there is no stream to wait for
it), `drain` and `close`.

The outermost frame of a transfer turns every exception into a `FailureReason`. If the loop itself
dies, every transfer that has not settled fails, and so does every later one: the connector goes on
as a cache that always misses.
"""

from __future__ import annotations

import asyncio
import enum
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np

from safe_offload.errors import TransferError
from safe_offload.protocol import FailureReason, Transfer
from safe_offload.worker.backends.base import Backend, Completion, Copy, Direction

try:
    import uvloop

    new_event_loop: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
except ImportError:
    new_event_loop = asyncio.new_event_loop

logger = logging.getLogger(f"vllm.{__name__}")

FENCE_TIMEOUT_S = 10.0
"""A store that has not read its source by then is given up, so that the engine is not held up."""


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
        "is_urgent",
        "mark",
        "poisoned",
        "size_bytes",
        "state",
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
                if job.turn.cancelled():
                    raise
                self.leave(job)
                raise
        else:
            self._bytes += job.size_bytes

    def leave(self, job: Job) -> None:
        """The job's bytes are no longer in flight."""
        self._bytes -= job.size_bytes
        self._let_in()

    def hurry(self, job: Job) -> None:
        """Let a job in now, whatever is in flight: somebody waits for it."""
        job.is_urgent = True
        if job.turn is not None and not job.turn.done():
            self._bytes += job.size_bytes
            job.turn.set_result(None)

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
                    self._bytes += job.size_bytes
                    job.turn.set_result(None)
                waiting.popleft()


class TransferEngine:
    """Runs transfers on a thread of its own.

    `submit`, `fence`, `drain` and `close` belong to one thread, the one vLLM calls its hooks on.
    The simulator (sim/worker.py) replaces that thread by explicit steps: `start`, `close`, `_call`,
    `_wait` and `_now_s` are all that knows about threads and clocks.

    Args:
        backend: copies and orders; closed when the engine ends.
        max_inflight_bytes: bytes of the copies that are issued at one time.
    """

    def __init__(self, backend: Backend, max_inflight_bytes: int) -> None:
        self._backend = backend
        self._turnstile = Turnstile(max_inflight_bytes)
        self._jobs: dict[int, Job] = {}
        self._settled: deque[tuple[int, FailureReason | None]] = deque()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._group: asyncio.TaskGroup | None = None
        self._closing: asyncio.Event | None = None
        self._started = threading.Event()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="safe-offload-loop", daemon=True)

    @property
    def is_running(self) -> bool:
        """Whether transfers can succeed."""
        return self._started.is_set() and not self._ended.is_set()

    @property
    def num_usable_slots(self) -> int:
        """Host slots that are ready by now."""
        return self._backend.num_usable_slots

    def start(self) -> None:
        """Start the thread and wait until its loop runs."""
        self._thread.start()
        self._started.wait()

    def submit(self, direction: Direction, transfer: Transfer) -> None:
        """Queue a transfer behind what the compute stream has been given so far."""
        copy = Copy(
            direction,
            np.array(transfer.block_ids, dtype=np.int64),
            np.array(transfer.slot_ids, dtype=np.int64),
        )
        size_bytes = len(transfer.block_ids) * self._backend.slot_bytes
        job = Job(copy, self._backend.mark(), size_bytes)
        self._jobs[transfer.transfer_id] = job
        self._call(self._spawn, transfer.transfer_id, job)

    def fence(self, transfer_ids: tuple[int, ...]) -> None:
        """Order what the engine does next behind the reads of these stores.

        A store that does not get there in time is given up: it fails, whatever its copy says.
        """
        jobs = [job for i in transfer_ids if (job := self._jobs.get(i)) is not None]
        waiting = [job for job in jobs if not job.decided.is_set()]
        for job in waiting:
            self._call(self._turnstile.hurry, job)
        deadline_s = self._now_s() + FENCE_TIMEOUT_S
        for job in jobs:
            if self._ended.is_set():
                return
            if not self._wait(job.decided, max(0.0, deadline_s - self._now_s())):
                job.poisoned = True
            elif job.completion is not None and job.state is not JobState.SETTLED:
                left_s = max(0.0, deadline_s - self._now_s())
                job.poisoned |= not self._fence(job.completion, left_s)

    def drain(self) -> list[tuple[int, FailureReason | None]]:
        """What has settled since the last call: transfer id, and why it failed or None."""
        if self._ended.is_set():
            for transfer_id, job in self._jobs.items():
                if job.state is not JobState.SETTLED:
                    job.state = JobState.SETTLED
                    self._settled.append((transfer_id, FailureReason.NOT_RUNNING))
        drained = []
        while self._settled:
            transfer_id, failure = self._settled.popleft()
            job = self._jobs.pop(transfer_id)
            if failure is None and job.poisoned:
                failure = FailureReason.FENCE_TIMEOUT
            drained.append((transfer_id, failure))
        return drained

    def close(self, timeout_s: float = 5.0) -> bool:
        """Cancel what has not been issued, wait for the rest, end the thread, free the memory.

        Returns:
            False if a copy did not end in time; its thread is left behind, as a daemon.
        """
        if self._thread.is_alive() and self._closing is not None:
            self._call(self._closing.set)
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _fence(self, completion: Completion, timeout_s: float) -> bool:
        try:
            return self._backend.fence(completion, timeout_s)
        except Exception:
            # Not a reason to leave the other stores of the step without their fences.
            logger.exception("A store could not be fenced; it is given up")
            return False

    # ---- threads and clocks --------------------------------------------------------------------

    def _now_s(self) -> float:
        return time.monotonic()

    def _wait(self, event: threading.Event, timeout_s: float) -> bool:
        """Wait for the loop to set an event; False if it did not in time."""
        return event.wait(timeout_s)

    def _call(self, function: Callable[..., object], *args: object) -> None:
        """Run a function on the loop; if the loop has ended, `drain` fails the job."""
        if self._loop is None:
            return  # it could not be made
        try:
            self._loop.call_soon_threadsafe(function, *args)
        except RuntimeError:
            logger.debug("The transfer engine has ended; %s is not run.", function.__name__)

    def _run(self) -> None:
        try:
            with asyncio.Runner(loop_factory=new_event_loop) as runner:
                runner.run(self._main())
        except BaseException:
            logger.exception(
                "The transfer engine of this worker died. The connector goes on as a cache that "
                "always misses; restart the server to have it back, and report this."
            )
        finally:
            self._end()

    # ---- on the loop thread --------------------------------------------------------------------

    def _end(self) -> None:
        """The loop has ended: end the copies, then let every transfer fail.

        Nothing may still be copying when the transfers are reported as failed: vLLM then gives
        their blocks to somebody else.
        """
        try:
            self._backend.close()
        except Exception:
            logger.exception("The copies of this worker could not be ended in good order")
        finally:
            self._ended.set()
            for job in list(self._jobs.values()):
                job.decided.set()
            self._started.set()

    async def _main(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._closing = asyncio.Event()
        async with asyncio.TaskGroup() as self._group:
            self._started.set()
            await self._closing.wait()
            for job in list(self._jobs.values()):
                if job.turn is not None and not job.turn.done():
                    job.turn.cancel()

    def _spawn(self, transfer_id: int, job: Job) -> None:
        assert self._group is not None
        assert self._closing is not None
        if not self._closing.is_set():
            running = self._transfer(transfer_id, job)
            try:
                self._group.create_task(running)
                return
            except RuntimeError:  # the group is shutting down
                running.close()
        self._settle(transfer_id, job, FailureReason.NOT_RUNNING)

    async def _transfer(self, transfer_id: int, job: Job) -> None:
        """A transfer from its turn to its end; no exception leaves this frame."""
        failure: FailureReason | None = None
        try:
            await self._turnstile.enter(job)
            try:
                job.completion = self._backend.issue(job.copy, job.mark)
                job.state = JobState.ISSUED
                job.decided.set()
                await job.completion.wait()
            finally:
                self._turnstile.leave(job)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                # The loop dies, and the copy may go on: `drain` fails the job once the backend has
                # been closed and nothing is copying any more.
                raise
            failure = FailureReason.CANCELLED
        except TransferError as error:
            logger.warning("Transfer %d failed: %s", transfer_id, error)
            reason = error.reason
            failure = reason if isinstance(reason, FailureReason) else FailureReason.COPY_FAILED
        except Exception:
            logger.exception("Transfer %d failed", transfer_id)
            failure = FailureReason.COPY_FAILED
        self._settle(transfer_id, job, failure)

    def _settle(self, transfer_id: int, job: Job, failure: FailureReason | None) -> None:
        job.state = JobState.SETTLED
        job.decided.set()
        self._settled.append((transfer_id, failure))
