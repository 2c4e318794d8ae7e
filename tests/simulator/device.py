"""One rank's memory, its compute stream, and copies that read and write at adversarial moments.

A copy moves word by word, at moments between its issue and its end that the seed chooses, so that
whatever is not ordered against it tears it. With streams (a GPU) the forward runs later than the
hooks that surround it, in order with what else is on the compute stream; without (vLLM's CPU
engine) it has run when it was called.
"""

from __future__ import annotations

import asyncio
import enum
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from hashlib import blake2b

import numpy as np
import numpy.typing as npt

from safe_offload.errors import TransferError
from safe_offload.protocol import FailureReason, MemoryFacts, MemoryKind
from safe_offload.worker.copies.base import Completion, Copy, CopyPath, Direction, TimedCopy
from tests.simulator.chance import Chance
from tests.simulator.groups import PAGE_BYTES
from tests.simulator.virtual_loop import Clock
from tests.simulator.words import ZEROED, group_of

TICK_S = 0.001
"""Virtual time between two looks at the copies."""
BLOCK_S = 1e-9
"""What a block takes, as the connector is told: loads go in the steps of others where they may."""


class CopyFault(enum.Enum):
    """What can be wrong with a copy."""

    FAIL = "fail"
    """It raises when some of its words have been moved."""
    REFUSE = "refuse"
    """It cannot be issued."""
    STALL = "stall"
    """It stands still for up to a minute."""
    KILL = "kill"
    """Issuing it kills the event loop."""


class LoopKilledError(BaseException):
    """What no frame of a transfer is meant to catch."""


@dataclass(slots=True)
class Memory:
    """Words of the GPU blocks and of the host slots; None where nothing was ever written."""

    gpu: list[list[int | None]]
    host: list[list[int | None]]

    @classmethod
    def empty(cls, num_blocks: int, num_slots: int, block_words: int) -> Memory:
        return cls(
            [[None] * block_words for _ in range(num_blocks)],
            [[None] * block_words for _ in range(num_slots)],
        )


@dataclass(slots=True, eq=False)
class SimCopy:
    """A copy that has been issued; see `Completion`."""

    copy: Copy
    pending: list[tuple[int, int, int]]  # (block, slot, word) still to be moved, the last first
    after: int  # how many operations the compute stream must have done before it begins
    ticks_left: int  # it ends at the first tick at which this has passed and nothing is pending
    stalled_until_s: float  # virtual time before which it does not move
    fails: bool
    ended: asyncio.Future[None]
    take_back: Callable[[SimCopy], bool]
    has_ended: bool = False
    has_begun: bool = False
    path: CopyPath = CopyPath.EACH

    async def wait(self) -> None:
        await self.ended

    def cancel(self) -> bool:
        return self.take_back(self)


@dataclass(slots=True)
class DeviceOptions:
    """How a device behaves."""

    has_streams: bool = False  # whether the forward runs behind the hooks, on a compute stream
    copy_ticks_max: int = 0  # how late a copy may end
    ticks_per_slot: int = 0  # how long one more host slot takes to be made ready; 0: all are


@dataclass(slots=True)
class Device:
    """Memory, compute stream and copies of one rank."""

    rank: int
    memory: Memory
    options: DeviceOptions
    chance: Chance
    clock: Clock
    faults: dict[int, CopyFault] = field(default_factory=dict)
    """By the number of the copy on this rank."""
    hold_copies: bool = False
    """No copy moves by itself; a test's way to choose the moment."""
    is_broken: bool = False
    """Every call of its backend raises; what runs on it goes on."""
    fails_loads: bool = False
    """Every load fails half way."""
    on_host_write: Callable[[int, int], None] = lambda rank, slot_id: None
    injected: Counter[str] = field(default_factory=Counter)
    """How often something has gone wrong, by kinds of faults, of all ranks and their tiers."""
    on_tick: list[Callable[[], None]] = field(default_factory=list)
    """What else goes on as time passes."""
    running: list[SimCopy] = field(default_factory=list)
    num_usable_slots: int = 0
    """Host slots that are ready."""
    num_copies: int = 0
    num_ticks: int = 0
    num_enqueued: int = 0
    num_executed: int = 0
    _compute: deque[Callable[[], bool]] = field(default_factory=deque)

    def __post_init__(self) -> None:
        if not self.options.ticks_per_slot:
            self.num_usable_slots = len(self.memory.host)

    def check_alive(self) -> None:
        """Whatever is asked of a broken device ends here. Raises RuntimeError if it is broken."""
        if self.is_broken:
            self.injected["break"] += 1
            raise RuntimeError(f"the device of rank {self.rank} is lost")

    def recover(self) -> None:
        """No copy fails or stands still any more, and no call raises."""
        self.faults.clear()
        self.is_broken = self.fails_loads = False
        for copy in self.running:
            copy.stalled_until_s = 0.0

    # ---- the compute stream --------------------------------------------------------------------

    def enqueue(self, operation: Callable[[], object]) -> None:
        """Put something on the compute stream; without streams it is done at once."""

        def run() -> bool:
            operation()
            return True

        self._enqueue(run)

    def _enqueue(self, operation: Callable[[], bool]) -> None:
        self._compute.append(operation)
        self.num_enqueued += 1
        if not self.options.has_streams:
            self.synchronize(self.num_enqueued)

    # ---- what a kernel does, on the compute stream ---------------------------------------------

    def zero(self, block_id: int) -> None:
        block = self.memory.gpu[block_id]
        block[:] = [ZEROED] * len(block)

    def copy_block(self, source: int, target: int) -> None:
        self.memory.gpu[target][:] = self.memory.gpu[source]

    def write(self, block_id: int, first: int, words: list[int]) -> None:
        self.memory.gpu[block_id][first : first + len(words)] = words

    def check(
        self, block_id: int, first: int, expected: list[int], report: Callable[[str], None]
    ) -> None:
        found = self.memory.gpu[block_id][first : first + len(expected)]
        if found != expected:
            wrong = [i for i, word in enumerate(found) if word != expected[i]]
            report(
                f"words {wrong} of {len(expected)} are not those of its prefix "
                f"(found {[found[i] for i in wrong][:4]})"
            )

    def strangers(self, block_id: int, num_words: int, group_idx: int) -> list[int]:
        """Which other groups have left words in a block that belongs to this one."""
        words = self.memory.gpu[block_id][:num_words]
        groups = {group_of(word) for word in words if word is not None and word != ZEROED}
        return sorted(groups - {group_idx})

    # ---- the compute stream itself -------------------------------------------------------------

    def advance_compute(self, num_operations: int) -> None:
        """Let the compute stream do up to `num_operations`."""
        for _ in range(num_operations):
            if not self._compute or not self._compute[0]():
                return
            self._compute.popleft()
            self.num_executed += 1

    def synchronize(self, num_operations: int) -> None:
        """Wait until the stream has done its first `num_operations` operations."""
        while self.num_executed < num_operations:
            before = self.num_executed
            self.advance_compute(1)
            if self.num_executed == before:  # it waits for a copy that stands still
                self.clock.advance(1.0)

    # ---- copies --------------------------------------------------------------------------------

    def issue(self, copy: Copy, after: int, ended: asyncio.Future[None]) -> SimCopy:
        """Start a copy; TransferError, LoopKilledError or RuntimeError if a fault says so."""
        self.check_alive()
        number, self.num_copies = self.num_copies, self.num_copies + 1
        fault = self.faults.get(number)
        fails = self.fails_loads and copy.direction is Direction.LOAD
        self.injected["loads-fail"] += fails
        if fault is not None:
            self.injected[fault.value] += 1
        is_on_loop = asyncio._get_running_loop() is not None  # else on vLLM's thread, which lives
        if fault is CopyFault.REFUSE or (fault is CopyFault.KILL and not is_on_loop):
            raise TransferError(FailureReason.COPY_FAILED, "refused by the simulator")
        if fault is CopyFault.KILL:
            raise LoopKilledError(f"by copy {number} of rank {self.rank}")
        stream = self.chance.stream("copy", self.rank, number)
        pending = [
            (block_id, slot_id, word)
            for block_id, slot_id in zip(
                copy.block_ids.tolist(), copy.slot_ids.tolist(), strict=True
            )
            for word in range(len(self.memory.gpu[0]))
        ]
        if stream.random() < 0.5:
            stream.shuffle(pending)
        stalled_until_s = 0.0
        if fault is CopyFault.STALL:
            stalled_until_s = self.clock.now_s + stream.uniform(1.0, 60.0)
        running = SimCopy(
            copy,
            pending,
            after,
            stream.randint(0, self.options.copy_ticks_max),
            stalled_until_s,
            fault is CopyFault.FAIL or fails,
            ended,
            self._take_back,
        )
        self.running.append(running)
        return running

    def _take_back(self, copy: SimCopy) -> bool:
        """Whether a copy is still in the queue of a thread; streams give nothing back."""
        if self.options.has_streams or copy.has_begun or copy.has_ended:
            return False
        self.running.remove(copy)
        copy.has_ended = True
        copy.ended.set_exception(TransferError(FailureReason.CANCELLED, "it was withdrawn"))
        return True

    def tick(self) -> None:
        """Time passes: every copy may move some of its words, and some end."""
        self.num_ticks += 1
        self.clock.advance(TICK_S)
        if self.options.ticks_per_slot and self.num_ticks % self.options.ticks_per_slot == 0:
            self.num_usable_slots = min(self.num_usable_slots + 1, len(self.memory.host))
        for copy in list(self.running):
            if self.hold_copies or not self._may_move(copy):
                continue
            copy.ticks_left -= 1
            if copy.ticks_left < 0:
                self.end(copy)
            else:
                draw = self.chance.bits("tick", self.rank, self.num_ticks, len(copy.pending))
                self._move(copy, draw % (len(copy.pending) + 1))
        for tick in self.on_tick:
            tick()

    def _may_move(self, copy: SimCopy) -> bool:
        return self.num_executed >= copy.after and self.clock.now_s >= copy.stalled_until_s

    def _move(self, copy: SimCopy, count: int) -> None:
        is_store = copy.copy.direction is Direction.STORE
        copy.has_begun = True
        for block_id, slot_id, word in self._take(copy, count):
            block, slot = self.memory.gpu[block_id], self.memory.host[slot_id]
            if is_store:
                slot[word] = block[word]
                self.on_host_write(self.rank, slot_id)
            else:
                block[word] = slot[word]

    @staticmethod
    def _take(copy: SimCopy, count: int) -> Iterator[tuple[int, int, int]]:
        for _ in range(min(count, len(copy.pending))):
            yield copy.pending.pop()

    def end(self, copy: SimCopy) -> None:
        """Move the rest of a copy, or fail."""
        self._move(copy, len(copy.pending) // 2 if copy.fails else len(copy.pending))
        self.running.remove(copy)
        copy.has_ended = True
        if copy.ended.done():
            return
        if copy.fails:
            error = TransferError(FailureReason.COPY_FAILED, "failed by the simulator")
            copy.ended.set_exception(error)
        else:
            copy.ended.set_result(None)

    def fence(self, copy: SimCopy, timeout_s: float) -> bool:
        self.check_alive()
        if self.options.has_streams:
            self._enqueue(lambda: self._finish_reads(copy))
            return True
        if copy.stalled_until_s > self.clock.now_s + timeout_s:
            self.clock.advance(timeout_s)
            return False
        self.clock.now_s = max(self.clock.now_s, copy.stalled_until_s)
        return self._finish_reads(copy)

    def join(self, copy: SimCopy) -> bool:
        """Let the compute stream wait for a copy; a driver refuses a part of it at once."""
        self.check_alive()
        if self.options.has_streams:
            self._enqueue(lambda: self._finish_reads(copy))
            return not copy.fails
        self.clock.now_s = max(self.clock.now_s, copy.stalled_until_s)
        is_taken_back = copy.ended.done() and copy.ended.exception() is not None
        return self._finish_reads(copy) and not (copy.fails or is_taken_back)

    def _finish_reads(self, copy: SimCopy) -> bool:
        """Move what is left of a copy; False while it stands still."""
        if copy.has_ended:
            return True
        if not self._may_move(copy):
            return False
        if copy.fails:
            self.end(copy)
        else:
            self._move(copy, len(copy.pending))
        return True

    def finish_all(self) -> None:
        self.synchronize(self.num_enqueued)
        for copy in list(self.running):
            self.clock.now_s = max(self.clock.now_s, copy.stalled_until_s)
            self.end(copy)


class SimBackend:
    """See `ProvableBackend`: the copies of one device, awaited on a virtual loop."""

    memory = MemoryFacts(MemoryKind.PAGEABLE, "unknown")
    paths: tuple[CopyPath, ...] = (CopyPath.EACH,)
    choices: tuple[CopyPath, ...] = ()
    num_demotions = 0

    def __init__(
        self, device: Device, loop: asyncio.AbstractEventLoop, slot_bytes: int = PAGE_BYTES
    ) -> None:
        self.device = device
        self.load_block_s = BLOCK_S if device.options.has_streams else 0.0
        self.slot_bytes = slot_bytes
        self.num_slots = len(device.memory.host)
        self._loop = loop
        self._is_closed = False

    @property
    def num_usable_slots(self) -> int:
        return self.device.num_usable_slots

    def undisturbed(self) -> AbstractContextManager[None]:
        """See `ProvableBackend.undisturbed`: nothing is prepared."""
        return nullcontext()

    def use(self, paths: tuple[CopyPath, ...], timed: Sequence[TimedCopy] = ()) -> None:
        """See `ProvableBackend.use`: there is one."""

    def mark(self) -> int | None:
        self.device.check_alive()
        return self.device.num_enqueued if self.device.options.has_streams else None

    def issue(self, copy: Copy, after: int | None) -> SimCopy:
        memory = self.device.memory
        is_inside = 0 <= copy.block_ids.min() <= copy.block_ids.max() < len(
            memory.gpu
        ) and 0 <= copy.slot_ids.min() <= copy.slot_ids.max() < len(memory.host)
        if not is_inside:
            raise TransferError(FailureReason.BAD_PLAN, "an id lies outside the memory")
        if self._is_closed:
            raise TransferError(FailureReason.NOT_RUNNING, "the backend was closed")
        after = self.device.num_enqueued if after is None else after
        return self.device.issue(copy, after, self._loop.create_future())

    def fence(self, completion: Completion, timeout_s: float) -> bool:
        assert isinstance(completion, SimCopy)
        return self.device.fence(completion, timeout_s)

    def join(self, completion: Completion) -> bool:
        assert isinstance(completion, SimCopy)
        return self.device.join(completion)

    def checksums(self, slot_ids: npt.NDArray[np.int64]) -> npt.NDArray[np.uint64]:
        self.device.check_alive()
        slots = (self.device.memory.host[slot_id] for slot_id in slot_ids.tolist())
        digests = (blake2b(repr(words).encode(), digest_size=8).digest() for words in slots)
        return np.array([int.from_bytes(digest) for digest in digests], dtype=np.uint64)

    def end_copies(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self.device.finish_all()

    def close(self) -> None:
        """See `Backend.close`; there is nothing to free."""
        self.end_copies()
