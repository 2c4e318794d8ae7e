"""Handing copies to the driver: for each direction a stream and a thread that gives it pieces.

The driver takes 23 ms for 32,000 ranges. No hook and no event loop waits for that, and no other
copy for more than a piece of it: between two pieces a lane turns to the copy that is fenced, and a
copy that is given up ends there, when what its stream has been given has ended.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any, Final

from safe_offload.errors import TransferError
from safe_offload.protocol import FailureReason
from safe_offload.worker.copies.base import Copy, CopyPath
from safe_offload.worker.copies.device import Device

PIECE_RANGES_MIN: Final = 16
PIECE_RANGES: Final = 1024
"""The fewest and most ranges of a piece, as many as are given to the driver within `PIECE_S`."""
PIECE_S: Final = 0.002
FIRST_PIECE_RANGES: Final = 64
"""Maximum of the first piece: the stream starts when the driver has taken it."""


@dataclass(slots=True, eq=False, repr=False)
class GpuCompletion:
    """See `Completion`: a copy that a lane gives to its stream; the lane changes it.

    Attributes:
        after: what the stream waits for before the first piece.
        path: how it is copied, once it has begun.
        used: memory that must stay until the copy has ended.
        failure: why it will not have copied everything, if that is known.
        pieces: an iterator that gives the stream one more piece at each step.
        is_urgent: it is fenced: vLLM waits until all of it has been given.
        has_begun: something may have been given to the stream.
        is_given_up: nothing more will be given.
        given: set when nothing more will be given.
        event: passed when what has been given has ended; None if there is nothing to wait for, or
            the device refuses to record one.
    """

    lane: Lane
    copy: Copy
    after: Any
    path: CopyPath
    used: list[Any] = field(default_factory=list)
    failure: TransferError | None = None
    pieces: Iterator[None] = field(default_factory=lambda: iter(()))
    is_urgent: bool = False
    has_begun: bool = False
    is_given_up: bool = False
    given: threading.Event = field(default_factory=threading.Event)
    event: Any = None
    future: Future[None] = field(default_factory=Future)

    def __post_init__(self) -> None:
        # From here on the future itself cannot be cancelled.
        self.future.set_running_or_notify_cancel()

    def choose(self, path: CopyPath) -> None:
        """Say how it is copied."""
        self.path = path

    def fail(self, text: str) -> None:
        """Say why it will not have copied everything."""
        self.failure = TransferError(FailureReason.COPY_FAILED, text)

    async def wait(self) -> None:
        await asyncio.wrap_future(self.future)

    def cancel(self) -> bool:
        """See `Completion.cancel`; what a stream has been given cannot be taken back."""
        return self.lane.give_up(self)


class Lane:
    """The copies of one direction: a stream, a thread that feeds it, one that waits for each end.

    Args:
        changed: shared with the other lane; guards the queues of both.
        first: the lane whose copies are given before those of this one that nothing waits for.
    """

    def __init__(
        self, device: Device, name: str, changed: threading.Condition, first: Lane | None = None
    ) -> None:
        self.stream = device.make_stream()
        self.num_ranges = PIECE_RANGES  # of the next piece; changed by the thread that feeds
        self._device = device
        self._changed = changed
        self._first = first
        # Both change under the condition.
        self._queue: list[GpuCompletion] = []
        self._is_closed = False
        self._given: SimpleQueue[GpuCompletion | None] = SimpleQueue()
        self._threads = [self._start(self._feed, name), self._start(self._follow, f"{name}-end")]

    def submit(
        self, completion: GpuCompletion, pieces: Callable[[GpuCompletion], Iterator[None]]
    ) -> None:
        """Queue a copy, whose pieces the lane's own thread gives; TransferError once it closes."""
        completion.pieces = pieces(completion)
        with self._changed:
            if self._is_closed:  # nobody would give them
                raise TransferError(FailureReason.NOT_RUNNING, "the copies have ended")
            self._queue.append(completion)
            self._changed.notify_all()

    def submit_now(self, completion: GpuCompletion, timeout_s: float | None) -> bool:
        """Give a copy before all others; return whether all of it was given in time."""
        if completion.given.is_set():
            return True
        with self._changed:
            completion.is_urgent = True
            self._changed.notify_all()
        return completion.given.wait(timeout_s)

    def give_up(self, completion: GpuCompletion) -> bool:
        """Give nothing more of a copy; return whether nothing of it was given, so that it ends."""
        with self._changed:
            if completion.has_begun or completion.is_given_up:
                completion.is_given_up = True
                return False
            completion.is_given_up = True
            self._queue.remove(completion)
            self._changed.notify_all()
        completion.given.set()
        completion.future.set_exception(TransferError(FailureReason.CANCELLED, "not begun"))
        return True

    def keep_pace(self, num_ranges: int, elapsed_s: float) -> None:
        """Learn from a piece how many ranges the next one may have."""
        in_time = int(num_ranges * PIECE_S / max(elapsed_s, 1e-9))
        self.num_ranges = max(PIECE_RANGES_MIN, min(PIECE_RANGES, in_time))

    def close(self) -> None:
        """Wait until all that was submitted has been given, and has ended."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()

    def _start(self, run: Callable[[], None], name: str) -> threading.Thread:
        thread = threading.Thread(target=run, name=f"safe-offload-{name}", daemon=True)
        thread.start()
        return thread

    # ---- the thread that feeds the stream ------------------------------------------------------

    def _feed(self) -> None:
        while (completion := self._next()) is not None:
            try:
                if next(completion.pieces, self) is not self:
                    continue
            except Exception as error:
                completion.fail(str(error))
            self._finish(completion)
        self._given.put(None)

    def _next(self) -> GpuCompletion | None:
        """Wait for the copy whose piece is next: one that is fenced, else the oldest."""
        with self._changed:
            while True:
                self._changed.wait_for(lambda: self._queue or self._is_closed)
                self._changed.wait_for(self._has_way, PIECE_S)
                if self._queue:
                    break
                if self._is_closed:
                    return None
            completion = next((c for c in self._queue if c.is_urgent), self._queue[0])
            completion.has_begun = True
            if completion.is_given_up:
                text = "it was given up half-way"
                completion.failure = TransferError(FailureReason.CANCELLED, text)
                completion.pieces = iter(())
            return completion

    def _has_way(self) -> bool:
        """Return whether no copy of the other lane goes first, or vLLM waits for one of ours."""
        is_urgent = any(completion.is_urgent for completion in self._queue)
        return is_urgent or self._first is None or not self._first._queue

    def _finish(self, completion: GpuCompletion) -> None:
        try:
            completion.event = self._device.record(self.stream)
        except Exception as error:
            completion.fail(str(error))
        completion.pieces = iter(())
        with self._changed:
            self._queue.remove(completion)
            self._changed.notify_all()
        completion.given.set()
        self._given.put(completion)

    # ---- the thread that waits for ends --------------------------------------------------------

    def _follow(self) -> None:
        while (completion := self._given.get()) is not None:
            failure = completion.failure
            try:
                self._device.bind_thread()
                # Without an event, what comes after it is waited for too.
                (completion.event or self.stream).synchronize()
            except Exception as error:
                failure = TransferError(FailureReason.COPY_FAILED, str(error))
            completion.used.clear()
            if failure is None:
                completion.future.set_result(None)
            else:
                completion.future.set_exception(failure)
