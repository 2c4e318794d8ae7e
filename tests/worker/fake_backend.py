"""A backend that copies nothing: the test says when each copy ends, and how.

Every wait in here ends in an error after `PATIENCE_S`, so that a test that would hang says why.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import threading
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Any

import numpy as np
import numpy.typing as npt

from safe_offload.errors import TransferError
from safe_offload.protocol import FailureReason, MemoryFacts, MemoryKind, Transfer
from safe_offload.worker.copies.base import Completion, Copy, CopyPath
from tests.worker.waiting import PATIENCE_S

SLOT_BYTES = 100
ONE_COPY = SLOT_BYTES
"""A bound that lets one copy of one block run at a time."""


class LoopKilled(BaseException):
    """What no transfer catches: it ends the loop."""


class FakeCompletion:
    """A copy that the test ends; it has begun unless it is `queued`."""

    path = CopyPath.EACH

    def __init__(self, copy: Copy, after: Any, *, queued: bool = False) -> None:
        self.copy = copy
        self.after = after
        self.future: Future[None] = Future()
        if not queued:
            self.future.set_running_or_notify_cancel()

    @property
    def name(self) -> int:
        """The first block, by which a test tells copies apart."""
        return int(self.copy.block_ids[0])

    @property
    def size_bytes(self) -> int:
        """What it counts against the bound."""
        return len(self.copy.block_ids) * SLOT_BYTES

    async def wait(self) -> None:
        try:
            await asyncio.wrap_future(self.future)
        except asyncio.CancelledError:
            if not self.future.cancelled():
                raise
            raise TransferError(FailureReason.CANCELLED, "it was withdrawn") from None

    def cancel(self) -> bool:
        return self.future.cancel()


class FakeBackend:
    """See `Backend`; without streams, as the CPU's is."""

    slot_bytes = SLOT_BYTES
    num_slots = num_usable_slots = 1_000_000
    paths = (CopyPath.EACH,)
    choices = ()
    load_block_s = 0.0
    memory = MemoryFacts(MemoryKind.PAGEABLE, "refused")
    undisturbed = staticmethod(contextlib.nullcontext)

    def __init__(self) -> None:
        self.num_demotions = 0
        self.issued: list[FakeCompletion] = []  # every copy so far, in the order of issue
        self.fenced: list[int] = []  # first blocks of the copies that were fenced
        # Called for a mark in place of the count; may raise.
        self.on_mark: Callable[[], Any] | None = None
        # Called on the loop thread before a copy is issued; may raise.
        self.on_issue: Callable[[Copy], None] | None = None
        # Called on the test's thread with a copy that is fenced, answers for `fence`; without it
        # the fence waits for the copy, as the CPU backend's does.
        self.on_fence: Callable[[FakeCompletion], bool] | None = None
        # Called on the loop thread when `close` begins; may raise.
        self.on_close: Callable[[], None] | None = None
        # Called on a thread of its own with slots; may raise.
        self.on_checksums: Callable[[list[int]], None] | None = None
        self.queues = False  # copies that are issued from now on have not begun
        # What the slots hold, for their checksums; 0 where nothing is said.
        self.slots: dict[int, int] = {}
        self.closing = threading.Event()  # set when `close` begins
        self.is_closed = False  # whether `close` has returned
        self._marks = itertools.count()
        self._changed = threading.Condition()

    def mark(self) -> int:
        """A number that grows."""
        return next(self._marks) if self.on_mark is None else self.on_mark()

    def issue(self, copy: Copy, after: int) -> FakeCompletion:
        """See `Backend.issue`; the copy runs until the test ends it."""
        if self.on_issue is not None:
            self.on_issue(copy)
        completion = FakeCompletion(copy, after, queued=self.queues)
        with self._changed:
            self.issued.append(completion)
            self._changed.notify_all()
        return completion

    def join(self, completion: Completion) -> bool:
        assert isinstance(completion, FakeCompletion)
        return completion.future.exception(PATIENCE_S) is None

    def fence(self, completion: Completion, timeout_s: float) -> bool:
        assert isinstance(completion, FakeCompletion)
        self.fenced.append(completion.name)
        if self.on_fence is not None:
            return self.on_fence(completion)
        try:
            completion.future.exception(timeout_s)
        except FutureTimeoutError:
            return False
        return True

    def checksums(self, slot_ids: npt.NDArray[np.int64]) -> npt.NDArray[np.uint64]:
        assert not self.is_closed, "the memory is gone"
        if self.on_checksums is not None:
            self.on_checksums(slot_ids.tolist())
        return np.array([self.slots.get(i, 0) for i in slot_ids.tolist()], dtype=np.uint64)

    def end_copies(self) -> None:
        """See `Backend.end_copies`: waits for the copies that run."""
        self.closing.set()
        if self.on_close is not None:
            self.on_close()
        for completion in self.issued:
            if not completion.future.cancel():
                completion.future.exception(PATIENCE_S)

    def close(self) -> None:
        self.is_closed = True

    # ---- what the test does --------------------------------------------------------------------

    @property
    def names(self) -> list[int]:
        """The first block of every copy, in the order of issue."""
        return [completion.name for completion in self.issued]

    @property
    def running(self) -> list[FakeCompletion]:
        """The copies that have not ended."""
        return [completion for completion in self.issued if not completion.future.done()]

    def wait_for(self, name: int) -> FakeCompletion:
        """Wait until the copy whose first block is `name` has been issued."""
        with self._changed:
            found = self._changed.wait_for(lambda: name in self.names, PATIENCE_S)
        assert found, f"copy {name} was not issued; issued: {self.names}"
        return self.issued[self.names.index(name)]

    def complete(self, name: int) -> None:
        """Wait for a copy to be issued, then end it well."""
        self.wait_for(name).future.set_result(None)

    def fail(self, name: int, error: BaseException) -> None:
        """Wait for a copy to be issued, then end it by an error."""
        self.wait_for(name).future.set_exception(error)

    def complete_all(self) -> None:
        """End every copy that runs."""
        for completion in self.running:
            completion.future.set_result(None)


def transfer(transfer_id: int, num_blocks: int = 1) -> Transfer:
    """A transfer of `num_blocks * SLOT_BYTES` bytes, whose copy is named as it is."""
    ids = tuple(range(transfer_id, transfer_id + num_blocks))
    return Transfer(transfer_id, ids, ids)
