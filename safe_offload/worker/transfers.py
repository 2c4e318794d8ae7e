"""Every transfer of a rank, from vLLM's hooks to its end.

A transfer is a coroutine in one TaskGroup: it waits for its turn, issues its copy, waits for it,
has checksums recorded or compared, settles. No exception leaves it: it becomes a `FailureReason`.
If the event loop dies, every transfer that has not settled fails, and so does every later one.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from safe_offload.config.options import DEFAULT_TRANSFER_TIMEOUT_S
from safe_offload.errors import TransferError
from safe_offload.protocol import FailureReason, Transfer
from safe_offload.worker.copies.base import Backend, Completion, Copy, Direction
from safe_offload.worker.gate import Gate, Turn
from safe_offload.worker.loop_thread import Loop
from safe_offload.worker.tier_runner import TierRunner
from safe_offload.worker.verify import Verifier

logger = logging.getLogger(f"vllm.{__name__}")

FENCE_TIMEOUT_S = 10.0
"""A store that has not read its source by then is given up, so that vLLM is not held up."""
FREE_TIMEOUT_S = 60.0
"""Unlocking and freeing host memory is left to the process's end then."""
COPIED_MAX = 10_000
"""Copies whose times are kept until they are taken; vLLM takes them after every step."""


@dataclass(frozen=True, slots=True)
class Copied:
    """The times of one copy.

    Attributes:
        queued_s: from `submit` until it could begin: it was issued, and the one before it in the
            same direction had ended.
        copying_s: from then until it had ended; on a GPU a store may wait in this time for the
            forward whose results it copies.
    """

    direction: Direction
    size_bytes: int
    queued_s: float
    copying_s: float


@dataclass(slots=True, eq=False, repr=False)
class PendingTransfer:
    """A transfer that has been submitted and not drained.

    The loop's thread changes it; vLLM's sets `is_poisoned`, and settles it if the loop has ended.

    Attributes:
        mark: the point of the compute stream that its copy waits for.
        submitted_s: by the clock of the loop.
        decided: set when its copy has been issued, or it has settled without.
        completion: of its copy, once issued.
        is_taken_back: its deadline has passed, its copy had not begun and never will.
        is_settled: it has ended, as `failure` says.
        is_poisoned: its source may have changed under it: it fails even if the copy succeeds.
    """

    transfer_id: int
    copy: Copy
    mark: Any
    turn: Turn
    submitted_s: float
    decided: threading.Event = field(default_factory=threading.Event)
    completion: Completion | None = None
    is_taken_back: bool = False
    is_settled: bool = False
    failure: FailureReason | None = None
    is_poisoned: bool = False

    def __repr__(self) -> str:
        state = "settled" if self.is_settled else "issued" if self.completion else "queued"
        return f"<{self.copy.direction.value} {self.transfer_id}, {state}>"


@dataclass(frozen=True, slots=True)
class TransferStatistics:
    """Transfers that are not drained, not settled, or neither issued nor given up."""

    pending_ids: tuple[int, ...]
    unsettled_ids: tuple[int, ...]
    undecided_ids: tuple[int, ...]


class Transfers:
    """The transfers of one rank, which run from when this is made.

    Its public methods belong to one thread, the one that vLLM calls its hooks on. Backend, verifier
    and tiers are closed when the loop ends.

    Args:
        max_inflight_bytes: see `Gate`, of which each direction has one.
        timeout_s: a transfer that has not been issued by then fails.
    """

    def __init__(
        self,
        backend: Backend,
        loop: Loop,
        max_inflight_bytes: int,
        *,
        timeout_s: float = DEFAULT_TRANSFER_TIMEOUT_S,
        verifier: Verifier | None = None,
        tiers: TierRunner | None = None,
    ) -> None:
        self._backend = backend
        self._loop = loop
        self._timeout_s = timeout_s
        self._verifier = verifier
        self._tiers = tiers
        # On vLLM's thread: submitted and not drained.
        self._pending: dict[int, PendingTransfer] = {}
        # On the loop's thread, but for the other ends of the two queues.
        self._gates = {direction: Gate(max_inflight_bytes) for direction in Direction}
        self._group = asyncio.TaskGroup()
        self._closing = asyncio.Event()
        self._settled: deque[PendingTransfer] = deque()
        self._bad_slot_ids: deque[int] = deque()
        self._copied: deque[Copied] = deque(maxlen=COPIED_MAX)
        self._last_end_s = dict.fromkeys(Direction, 0.0)
        self._num_overdue = 0
        self._ended = threading.Event()
        loop.start(self._main, self._end)

    def __repr__(self) -> str:
        state = "ended" if self._ended.is_set() else "running"
        return f"<Transfers {state}: {list(self._pending.values())}, {self._gates!r}>"

    def statistics(self) -> TransferStatistics:
        """Return what is held now."""
        pending = self._pending.values()
        return TransferStatistics(
            tuple(self._pending),
            tuple(p.transfer_id for p in pending if not p.is_settled),
            tuple(p.transfer_id for p in pending if not p.decided.is_set()),
        )

    @property
    def num_overdue(self) -> int:
        """Return how many copies have become overdue since the start."""
        return self._num_overdue

    def mark(self) -> Any:
        """Mark the current end of the compute stream, for `submit`."""
        return self._backend.mark()

    def submit(self, direction: Direction, transfer: Transfer, mark: Any = None) -> None:
        """Queue a transfer behind a mark of the compute stream; None marks its current end."""
        pending = self._add(direction, transfer, self.mark() if mark is None else mark)
        self._loop.call(self._spawn, pending)

    def load_now(self, transfer: Transfer, mark: Any) -> bool:
        """Load before everything that vLLM does next; return whether that is certain.

        Skips the queue, needs no loop, and tries the next copy path when one fails.
        """
        pending = self._add(Direction.LOAD, transfer, mark)
        is_certain, has_next_path = False, True
        while has_next_path:
            num_demotions = self._backend.num_demotions
            try:
                pending.completion = self._backend.issue(pending.copy, pending.mark)
                is_certain = self._backend.join(pending.completion)
            except Exception as error:
                logger.warning("Transfer %d failed: %s", transfer.transfer_id, error)
            has_next_path = not is_certain and self._backend.num_demotions > num_demotions
        pending.is_poisoned = not is_certain
        if pending.completion is None:
            self._settle(pending, FailureReason.COPY_FAILED)
        else:
            pending.decided.set()
            self._loop.call(self._spawn, pending)
        return is_certain

    def _add(self, direction: Direction, transfer: Transfer, mark: Any) -> PendingTransfer:
        copy = Copy(
            direction,
            np.array(transfer.block_ids, dtype=np.int64),
            np.array(transfer.slot_ids, dtype=np.int64),
        )
        size_bytes = len(transfer.block_ids) * self._backend.slot_bytes
        assert transfer.transfer_id not in self._pending
        now_s = self._loop.now_s()
        pending = PendingTransfer(transfer.transfer_id, copy, mark, Turn(size_bytes), now_s)
        self._pending[transfer.transfer_id] = pending
        return pending

    def fence(self, transfer_ids: tuple[int, ...]) -> None:
        """Order what vLLM does next after the reads of these stores, or give a late store up."""
        fenced = [self._pending[i] for i in transfer_ids if i in self._pending]
        for pending in fenced:
            if not pending.decided.is_set():
                self._loop.call(self._gate_of(pending).skip_ahead, pending.turn)
        deadline_s = self._loop.now_s() + FENCE_TIMEOUT_S
        for pending in fenced:
            if self._ended.is_set():
                return
            left_s = max(0.0, deadline_s - self._loop.now_s())
            if not self._loop.wait(pending.decided, left_s):
                pending.is_poisoned = True
            elif pending.completion is not None and not pending.is_settled:
                left_s = max(0.0, deadline_s - self._loop.now_s())
                pending.is_poisoned |= not self._fence(pending.completion, left_s)

    def drain(self) -> list[tuple[int, FailureReason | None]]:
        """Return transfers settled since the last call: id, and why it failed or None."""
        self._loop.news.clear()
        if self._ended.is_set():
            for pending in self._pending.values():
                if not pending.is_settled:
                    self._settle(pending, FailureReason.NOT_RUNNING)
        drained = []
        while self._settled:
            pending = self._settled.popleft()
            del self._pending[pending.transfer_id]
            poison = FailureReason.FENCE_TIMEOUT if pending.is_poisoned else None
            drained.append((pending.transfer_id, pending.failure or poison))
        return drained

    def wait_for_news(self, timeout_s: float) -> None:
        """Wait until there is something to drain, of transfers or tiers; not if nothing is due."""
        if self._pending or (self._tiers is not None and self._tiers.is_busy):
            self._loop.wait(self._loop.news, timeout_s)

    def take_bad_slots(self) -> tuple[int, ...]:
        """Return slots that were found changed: after `drain`, all that made a load of it fail."""
        return tuple(self._bad_slot_ids.popleft() for _ in range(len(self._bad_slot_ids)))

    def take_copied(self) -> list[Copied]:
        """Return what copies took that have ended well since the last call."""
        return [self._copied.popleft() for _ in range(len(self._copied))]

    def close(self, timeout_s: float = 5.0) -> bool:
        """Cancel what has not been issued, wait for the rest, end the loop, free the memory.

        Return whether all copies and tiers ended in time. If not, the loop goes on until they have.
        """
        self._loop.call(self._closing.set)
        if not self._loop.wait(self._ended, timeout_s):
            return False
        self._loop.join(FREE_TIMEOUT_S)
        return True

    def _fence(self, completion: Completion, timeout_s: float) -> bool:
        try:
            return self._backend.fence(completion, timeout_s)
        except Exception:
            # Not a reason to leave the other stores of the step without their fences.
            logger.exception("A store could not be fenced and was dropped")
            return False

    # ---- on the loop's thread ------------------------------------------------------------------

    async def _main(self) -> None:
        async with self._group:
            if self._tiers is not None:
                self._group.create_task(self._tiers.run())
            await self._closing.wait()
            for gate in self._gates.values():
                gate.cancel_waiting()
            if self._tiers is not None:
                self._tiers.close()

    def _end(self) -> None:
        """End the copies, then let every transfer fail: vLLM gives their blocks to others then."""
        is_free = self._tiers is None or self._tiers.end()
        try:
            if self._verifier is not None:
                self._verifier.close()  # it reads the memory that the backend frees
            self._backend.end_copies()
        except Exception:
            logger.exception("The copies of this worker did not shut down cleanly")
        finally:
            self._ended.set()
            for pending in list(self._pending.values()):
                pending.decided.set()
        if not is_free:
            logger.error("A tier still uses the host memory of this worker, which is not freed.")
            return
        try:
            self._backend.close()
        except Exception:
            logger.exception("The host memory of this worker was not freed cleanly")

    def _spawn(self, pending: PendingTransfer) -> None:
        if not self._closing.is_set():
            running = self._run(pending)
            try:
                self._group.create_task(running)
                return
            except RuntimeError:  # the group is shutting down
                running.close()
        if pending.completion is None:  # else when `_end` has ended the copy
            self._settle(pending, FailureReason.NOT_RUNNING)

    async def _run(self, pending: PendingTransfer) -> None:
        """Run a transfer from its turn to its end; no exception leaves this frame."""
        failure: FailureReason | None = None
        deadline_s = asyncio.get_running_loop().time() + self._timeout_s
        try:
            completion, issued_s = pending.completion, pending.submitted_s  # of `load_now`
            if completion is None:
                await self._enter(pending, deadline_s)
            try:
                if completion is None:
                    completion = self._backend.issue(pending.copy, pending.mark)
                    pending.completion = completion
                    pending.decided.set()
                    issued_s = self._loop.now_s()
                await self._wait_for_copy(pending, completion, deadline_s)
                self._record_times(pending, issued_s)
            finally:
                self._gate_of(pending).leave(pending.turn)
            if self._verifier is not None:
                bad = await self._verifier.check(pending.transfer_id, pending.copy)
                self._bad_slot_ids.extend(bad)
                if bad:
                    detail = f"checksum mismatch in slots {bad}"
                    raise TransferError(FailureReason.CHECKSUM_MISMATCH, detail)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                # The loop dies, and the copy may go on: `drain` lets the transfer fail once the
                # backend has ended its copies.
                raise
            failure = FailureReason.CANCELLED
        except TransferError as error:
            logger.warning("Transfer %d failed: %s", pending.transfer_id, error)
            reason = error.reason
            failure = reason if isinstance(reason, FailureReason) else FailureReason.COPY_FAILED
        except Exception:
            logger.exception("Transfer %d failed", pending.transfer_id)
            failure = FailureReason.COPY_FAILED
        self._settle(pending, failure)

    def _gate_of(self, pending: PendingTransfer) -> Gate:
        return self._gates[pending.copy.direction]

    async def _enter(self, pending: PendingTransfer, deadline_s: float) -> None:
        """Wait for a turn; raise TransferError, with nothing touched, if it is late."""
        try:
            async with asyncio.timeout_at(deadline_s):
                await self._gate_of(pending).enter(pending.turn)
        except TimeoutError:
            raise TransferError(
                FailureReason.TIMED_OUT, f"it was still queued after {self._timeout_s:g} s"
            ) from None

    async def _wait_for_copy(
        self, pending: PendingTransfer, completion: Completion, deadline_s: float
    ) -> None:
        """Wait until a copy has ended, however long it takes; raise TransferError if it failed."""
        loop = asyncio.get_running_loop()
        timer = loop.call_at(deadline_s, self._pass_deadline, pending, completion)
        try:
            await completion.wait()
        except TransferError:
            if not pending.is_taken_back:
                raise
            raise TransferError(
                FailureReason.TIMED_OUT, f"its copy had not started after {self._timeout_s:g} s"
            ) from None
        finally:
            timer.cancel()

    def _record_times(self, pending: PendingTransfer, issued_s: float) -> None:
        """A copy has ended; those of one direction run one after the other."""
        now_s, direction = self._loop.now_s(), pending.copy.direction
        begin_s = max(issued_s, self._last_end_s[direction])
        self._last_end_s[direction] = now_s
        queued_s = begin_s - pending.submitted_s
        self._copied.append(Copied(direction, pending.turn.size_bytes, queued_s, now_s - begin_s))

    def _pass_deadline(self, pending: PendingTransfer, completion: Completion) -> None:
        """Take back an issued copy that has not ended in time, or say that it is overdue.

        A copy that may have begun is never given up: a load is recomputed in the very blocks that
        it writes, and the slots of a store would be granted to another (I6). It goes on until it
        ends, without its share of the bytes in flight, so that it does not hold up all others.
        """
        try:
            pending.is_taken_back = completion.cancel()
        except Exception:
            logger.exception("Transfer %d could not be cancelled", pending.transfer_id)
        if pending.is_taken_back:
            return  # `wait` ends now, and the transfer with it
        self._num_overdue += 1
        self._gate_of(pending).leave(pending.turn)
        logger.error(
            "Transfer %d (%s by %s, %d bytes) is still running after %g s. It blocks its request "
            "or its host slots until it ends. If it hangs, check the device and swapping (dmesg, "
            'nvidia-smi, vmstat) and restart the server, on a GPU with another "copy_path". If '
            'copies are merely slow, raise "transfer_timeout_s".',
            pending.transfer_id,
            pending.copy.direction.value,
            completion.path.value,
            pending.turn.size_bytes,
            self._timeout_s,
        )

    def _settle(self, pending: PendingTransfer, failure: FailureReason | None) -> None:
        assert not pending.is_settled
        pending.failure = failure
        pending.is_settled = True
        pending.decided.set()
        self._settled.append(pending)
        self._loop.news.set()
