"""Copies for a KV cache in host memory: vLLM's CPU engine.

There is no stream: the forward has finished when vLLM's hook returns, and what a GPU orders on the
device is a wait on the host. Each direction has threads of its own.

One loop moves all ranges of a copy with the interpreter lock released: a thread that took it back
for every block would hinder vLLM, and vLLM it. The loop is a few lines of C (`_move.c`), compiled
when this package is installed; without a compiler it is interpreted.
"""

from __future__ import annotations

import asyncio
import ctypes
import functools
import importlib.util
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError as FutureCancelledError
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import AbstractContextManager, nullcontext

from safe_offload.errors import TransferError
from safe_offload.layout import HostLayout
from safe_offload.protocol import FailureReason, MemoryFacts, MemoryKind
from safe_offload.worker.copies.base import Completion, Copy, CopyPath, Direction, TimedCopy
from safe_offload.worker.copies.ranges import Ranges, RangeTable
from safe_offload.worker.copies.threads import DirectionThreads
from safe_offload.worker.memory.checksums import slot_checksums
from safe_offload.worker.memory.first_touch import FirstTouch, Touch
from safe_offload.worker.memory.host_memory import HostMemory

logger = logging.getLogger(f"vllm.{__name__}")

MOVE_MODULE = "safe_offload.worker.copies._move"
"""Not a module of Python's: a library that lies where one would."""


class CpuCompletion:
    """See `Completion`: a copy that a thread runs."""

    def __init__(self, path: CopyPath, copy: Copy, future: Future[None]) -> None:
        self.path = path
        self.copy = copy
        self.future = future

    async def wait(self) -> None:
        try:
            await asyncio.wrap_future(self.future)
        except asyncio.CancelledError:
            if not self.future.cancelled():
                raise
            raise TransferError(FailureReason.CANCELLED, "it was withdrawn") from None

    def cancel(self) -> bool:
        """See `Completion.cancel`: a copy that no thread has taken can be taken back."""
        return self.future.cancel()


class CpuBackend:
    """See `Backend` and `ProvableBackend`: the compiled loop, then the interpreted one.

    `use` changes `paths` and `_move`, while nothing is being copied; nothing else changes. `close`
    closes `host`, the slots, and `end_copies` the threads.
    """

    def __init__(
        self, base_address: int, layout: HostLayout, host: HostMemory, threads: DirectionThreads
    ) -> None:
        self.slot_bytes = layout.geometry.slot_bytes
        self.choices: tuple[CopyPath, ...] = ()
        self.load_block_s = 0.0
        self.num_slots = self.num_usable_slots = layout.num_slots
        self.memory = MemoryFacts(
            MemoryKind.PAGEABLE, "requested" if host.has_huge_pages else "refused"
        )
        self.host = host
        self._threads = threads
        self._table = RangeTable(base_address, host.tensor.data_ptr(), layout)
        self.checksums = functools.partial(slot_checksums, host.tensor.numpy().data, layout)
        self._moves = {CopyPath.BATCH: find_move(), CopyPath.EACH: move_each}
        if self._moves[CopyPath.BATCH] is move_each:
            del self._moves[CopyPath.BATCH]
        self.num_demotions = 0
        self.use(tuple(self._moves))
        touch = find_touch()
        self._first_touch = touch and FirstTouch(touch, host.tensor.data_ptr(), layout)

    def __repr__(self) -> str:
        return f"<CpuBackend: {self.num_slots} slots, {[path.value for path in self.paths]}>"

    def undisturbed(self) -> AbstractContextManager[None]:
        return nullcontext()

    def use(self, paths: tuple[CopyPath, ...], timed: Sequence[TimedCopy] = ()) -> None:
        self.paths = paths
        self._move = self._moves[paths[0]]

    def mark(self) -> None:
        """Mark nothing: what vLLM computed is in memory when a hook is called."""

    def issue(self, copy: Copy, after: None) -> CpuCompletion:
        self._table.check(copy)
        if self._first_touch is not None and copy.direction is Direction.STORE:
            self._first_touch.will_store(copy.slot_ids)
        try:
            future = self._threads.submit(copy.direction, self._run, copy)
        except RuntimeError as error:
            raise TransferError(FailureReason.NOT_RUNNING, str(error)) from error
        return CpuCompletion(self.paths[0], copy, future)

    def fence(self, completion: Completion, timeout_s: float) -> bool:
        """Wait until the copy has ended, one way or the other."""
        assert isinstance(completion, CpuCompletion)
        try:
            completion.future.exception(timeout_s)
        except FutureTimeoutError:
            return False
        except FutureCancelledError:  # not asyncio's: they are two classes
            pass
        return True

    def join(self, completion: Completion) -> bool:
        """See `Backend.join`; waits until the copy has ended.

        Runs the copy itself if no thread has taken it: this core would be idle, while the others
        have vLLM's scheduler, which spins until the step has ended.
        """
        assert isinstance(completion, CpuCompletion)
        queued = completion.future
        if queued.cancelled():
            return False
        if queued.cancel():
            completion.future = Future()
            try:
                self._run(completion.copy)
            except Exception as error:
                completion.future.set_exception(error)
            else:
                completion.future.set_result(None)
        return completion.future.exception() is None

    def end_copies(self) -> None:
        self._threads.close()

    def close(self) -> None:
        self.end_copies()
        if self._first_touch is None or self._first_touch.stop():
            self.host.close()

    def _run(self, copy: Copy) -> None:
        self._move(self._table.ranges(self._table.runs(copy)))


@functools.cache
def find_move() -> Callable[[Ranges], None]:
    """Return the compiled loop, the interpreted one if it was not compiled at installation."""
    try:
        move = _library().move_ranges
    except (OSError, AttributeError) as error:
        logger.warning(
            "Small blocks are copied by an interpreted loop, which is slower and delays the "
            "engine (%s). Fix: install a C compiler, then reinstall safe-offload.",
            error,
        )
        return move_each
    move.argtypes, move.restype = [ctypes.c_void_p] * 3 + [ctypes.c_uint64], None

    def move_all(ranges: Ranges) -> None:
        addresses = (part.ctypes.data for part in (ranges.targets, ranges.sources, ranges.lengths))
        move(*addresses, len(ranges))

    return move_all


@functools.cache
def find_touch() -> Touch | None:
    """Return what `FirstTouch` needs, None if it was not compiled at installation."""
    try:
        touch = _library().touch_pages
    except (OSError, AttributeError):
        return None  # `find_move` has logged it
    touch.argtypes, touch.restype = [ctypes.c_uint64] * 3, None
    return touch


def _library() -> ctypes.CDLL:
    """Return the library of `_move.c`; raise OSError if there is none."""
    spec = importlib.util.find_spec(MOVE_MODULE)
    if spec is None or spec.origin is None:
        raise OSError(f"{MOVE_MODULE} was not compiled")
    return ctypes.CDLL(spec.origin)


def move_each(ranges: Ranges) -> None:
    """Copy each range by a call of its own."""
    for target, source, length in zip(
        ranges.targets.tolist(), ranges.sources.tolist(), ranges.lengths.tolist(), strict=True
    ):
        ctypes.memmove(target, source, length)
