"""The event loop that drives every transfer of a rank.

One thread runs one event loop (uvloop where there is one). Each transfer is a coroutine in one
TaskGroup: it waits for its turn, issues its copy, waits for the copy, looks at checksums if that
was asked for, settles. Deadlines, cancellation and failure are those of asyncio. vLLM's hooks reach
the loop through four calls that do not wait for it: `submit`, `fence` (which waits for the copy
where there is no stream to wait for it), `drain` and `close`.

The outermost frame of a transfer turns every exception into a `FailureReason`. If the loop itself
dies, every transfer that has not settled fails, and so does every later one: the connector goes on
as a cache that always misses.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from safe_offload.config import DEFAULT_TRANSFER_TIMEOUT_S
from safe_offload.errors import TransferError
from safe_offload.protocol import FailureReason, Transfer
from safe_offload.worker.backends.base import Backend, Completion, Copy, Direction
from safe_offload.worker.turnstile import Job, JobState, Turnstile
from safe_offload.worker.verify import Verifier

try:
    import uvloop

    new_event_loop: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
except ImportError:
    new_event_loop = asyncio.new_event_loop

logger = logging.getLogger(f"vllm.{__name__}")

T = TypeVar("T")

FENCE_TIMEOUT_S = 10.0
"""A store that has not read its source by then is given up, so that the engine is not held up."""

FREE_TIMEOUT_S = 60.0
"""Unlocking and freeing host memory is given up by then; the process's end does the rest."""


class TransferEngine:
    """Runs transfers on a thread of its own.

    `submit`, `fence`, `drain` and `close` belong to one thread, the one vLLM calls its hooks on.
    The simulator (sim/worker.py) replaces that thread by explicit steps: `start`, `close`, `_call`,
    `_wait`, `_in_thread` and `_now_s` are all that knows about threads and clocks.

    Args:
        backend: copies and orders; closed when the engine ends.
        max_inflight_bytes: bytes of the copies that are issued at one time.
        timeout_s: a transfer that has not been issued by then fails.
        verify_every: one in so many loaded slots is compared with its checksum; 0 for none.
        checksums: where they are kept, if several ranks store the slots.
    """

    def __init__(
        self,
        backend: Backend,
        max_inflight_bytes: int,
        *,
        timeout_s: float = DEFAULT_TRANSFER_TIMEOUT_S,
        verify_every: int = 0,
        checksums: npt.NDArray[np.uint64] | None = None,
    ) -> None:
        self._backend = backend
        self._turnstile = Turnstile(max_inflight_bytes)
        self._timeout_s = timeout_s
        self._verifier = Verifier(backend, verify_every, checksums) if verify_every else None
        self._jobs: dict[int, Job] = {}
        self._settled: deque[tuple[int, FailureReason | None]] = deque()
        self._bad_slot_ids: deque[int] = deque()
        self._num_overdue = 0
        self._num_overdue_told = 0
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

    def take_bad_slots(self) -> tuple[int, ...]:
        """Slots that were found changed since the last call.

        Asked for behind `drain`, it knows of every slot that made one of those transfers fail.
        """
        return tuple(self._bad_slot_ids.popleft() for _ in range(len(self._bad_slot_ids)))

    def take_num_overdue(self) -> int:
        """How many copies have become overdue since the last call."""
        num_new = self._num_overdue - self._num_overdue_told
        self._num_overdue_told += num_new
        return num_new

    def close(self, timeout_s: float = 5.0) -> bool:
        """Cancel what has not been issued, wait for the rest, end the thread, free the memory.

        Args:
            timeout_s: for the copies. Freeing memory takes longer the more of it is page-locked.

        Returns:
            False if a copy did not end in time; its thread is left behind, as a daemon.
        """
        if self._thread.is_alive() and self._closing is not None:
            self._call(self._closing.set)
            if not self._wait(self._ended, timeout_s):
                return False
            self._thread.join(FREE_TIMEOUT_S)
        return True

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

    async def _in_thread(self, executor: Executor, function: Callable[..., T], *args: object) -> T:
        """Run a function that takes its time beside the loop."""
        return await asyncio.get_running_loop().run_in_executor(executor, function, *args)

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
            if self._verifier is not None:
                self._verifier.close()  # it reads the memory that the backend frees
            self._backend.end_copies()
        except Exception:
            logger.exception("The copies of this worker could not be ended in good order")
        finally:
            self._ended.set()
            for job in list(self._jobs.values()):
                job.decided.set()
            self._started.set()
        try:
            self._backend.close()
        except Exception:
            logger.exception("The host memory of this worker could not be freed in good order")

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
        deadline_s = asyncio.get_running_loop().time() + self._timeout_s
        try:
            await self._enter(job, deadline_s)
            try:
                job.completion = self._backend.issue(job.copy, job.mark)
                job.state = JobState.ISSUED
                job.decided.set()
                await self._wait_for_copy(transfer_id, job, deadline_s)
            finally:
                self._turnstile.leave(job)
            if self._verifier is not None:
                await self._verify(self._verifier, transfer_id, job.copy)
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

    async def _enter(self, job: Job, deadline_s: float) -> None:
        """Wait for the job's turn, but not for ever.

        Raises:
            TransferError: its turn did not come in time; it has not touched anything.
        """
        try:
            async with asyncio.timeout_at(deadline_s):
                await self._turnstile.enter(job)
        except TimeoutError:
            raise TransferError(
                FailureReason.TIMED_OUT, f"its turn did not come within {self._timeout_s:g} s"
            ) from None

    async def _wait_for_copy(self, transfer_id: int, job: Job, deadline_s: float) -> None:
        """Wait until an issued copy has ended, however long that takes.

        Raises:
            TransferError: it failed, or it had not begun in time and was taken back.
        """
        assert job.completion is not None
        loop = asyncio.get_running_loop()
        timer = loop.call_at(deadline_s, self._pass_deadline, transfer_id, job)
        try:
            await job.completion.wait()
        except TransferError:
            if not job.taken_back:
                raise
            raise TransferError(
                FailureReason.TIMED_OUT, f"its copy had not begun within {self._timeout_s:g} s"
            ) from None
        finally:
            timer.cancel()

    def _pass_deadline(self, transfer_id: int, job: Job) -> None:
        """An issued copy has not ended in time: take it back, or say that it is overdue.

        A copy that may have begun is never given up. A load is recomputed in the very blocks that
        it writes, and the slots of a store would be granted to another: it would tear both (I6).
        So it stays what it is until it ends. What it does not keep is its share of the bytes in
        flight, or one copy that hangs would hold up all others.
        """
        assert job.completion is not None
        try:
            job.taken_back = job.completion.cancel()
        except Exception:
            logger.exception("Transfer %d could not be taken back", transfer_id)
        if job.taken_back:
            return  # `wait` ends now, and the transfer with it
        self._num_overdue += 1
        self._turnstile.leave(job)
        logger.error(
            "Transfer %d (%s, %d bytes) was started and has not ended within %g s. Until it ends, "
            "the request or the host memory that it belongs to waits for it. If it does not end, "
            "look for a hanging device or a machine that swaps (dmesg, nvidia-smi, vmstat) and "
            'restart the server, on a GPU with another "copy_path"; if copies are only slow, raise '
            '"transfer_timeout_s".',
            transfer_id,
            job.copy.direction.value,
            job.size_bytes,
            self._timeout_s,
        )

    async def _verify(self, verifier: Verifier, transfer_id: int, copy: Copy) -> None:
        """Note the checksums of what was stored, or compare what was loaded with them.

        Raises:
            TransferError: slots have changed since they were stored.
        """
        executor = verifier.executors[copy.direction]
        bad = await self._in_thread(executor, verifier.look, transfer_id, copy)
        if bad:
            self._bad_slot_ids.extend(bad)
            raise TransferError(
                FailureReason.CHECKSUM_MISMATCH, f"slots {bad} are not what was stored in them"
            )

    def _settle(self, transfer_id: int, job: Job, failure: FailureReason | None) -> None:
        job.state = JobState.SETTLED
        job.decided.set()
        self._settled.append((transfer_id, failure))
