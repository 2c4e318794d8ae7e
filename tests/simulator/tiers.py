"""A tier whose moments and faults the seed chooses: objects by name, as words of a slot.

Like a copy, an operation moves word by word on a thread of the tier's own, which goes on while the
event loop stands still or has died. What a real tier notices by header and checksum, an object that
is torn or another's, is noticed here too: no fault hands out wrong words as right, but `SUBVERT`,
with which a test shows that a checker would see it.
"""

import asyncio
import enum
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import cast

from safe_offload.tiers.base import Buffers, Name, Result
from tests.simulator.chance import Chance
from tests.simulator.device import Device

GARBAGE = -5
"""A word that no prefix has."""


class TierFault(enum.Enum):
    """What can be wrong with an operation of a tier."""

    FAIL = "tier-fail"
    """It raises when some of its words have been moved."""
    LOSE = "tier-lose"
    """It does not do some of its objects, and says so."""
    STALL = "tier-stall"
    """It stands still for up to a minute, cancelled or not."""
    HANG = "tier-hang"
    """It stands still until faults stop."""
    LIE = "tier-lie"
    """A probe says the contrary of some objects."""
    TEAR = "tier-tear"
    """Some of the objects that a spill writes are torn later."""
    SWAP = "tier-swap"
    """Some of the objects that a spill writes are replaced by those of another engine."""
    EVICT = "tier-evict"
    """Half of all objects are evicted as it begins."""
    CUT = "tier-cut"
    """The connection is lost: all that is under way raises, and what begins soon after."""
    DIE = "tier-die"
    """It and every later one raises."""
    SUBVERT = "tier-subvert"
    """A fetch hands out wrong words as right."""


class Task(enum.Enum):
    """What an operation does."""

    PROBE = "probe"
    FETCH = "fetch"
    SPILL = "spill"


_EVERY = frozenset(Task)
APPLIES = {
    TierFault.FAIL: _EVERY,
    TierFault.LOSE: _EVERY,
    TierFault.STALL: _EVERY,
    TierFault.HANG: _EVERY,
    TierFault.LIE: {Task.PROBE},
    TierFault.TEAR: {Task.SPILL},
    TierFault.SWAP: {Task.SPILL},
    TierFault.EVICT: {Task.FETCH},
    TierFault.CUT: _EVERY,
    TierFault.DIE: _EVERY,
    TierFault.SUBVERT: {Task.FETCH},
}
"""Which operations a fault can happen to; it waits for the first of them."""
CUT_TICKS_MAX = 120
"""How long a connection that was lost cannot be made again."""
LOSSES = {
    Task.FETCH: (Result.ABSENT, Result.UNREADABLE, Result.FAILED),
    Task.SPILL: (Result.FULL, Result.FAILED),
}


@dataclass(frozen=True)
class TierOptions:
    """How a tier behaves."""

    ticks_max: int = 12  # how late an operation may end
    num_objects_max: int = 0  # it evicts what was used least recently beyond this many; 0: never
    latency_ticks: int = 0  # nothing happens to an operation before about this many
    is_local: bool = False  # each engine has one of its own
    fails_one_in: int = 0  # of the objects that are written; 0: none


@dataclass(slots=True)
class StoredObject:
    """One object."""

    words: list[int | None]
    epoch: int  # stands for the weights that it was computed with; see `ContentChecker`
    engine: int = 0  # that wrote it
    flaw: Result | None = None  # what a fetch finds wrong with it


class ObjectStore:
    """What a tier holds, which outlives the engines that use it. `options`: see `TierOptions`."""

    def __init__(self, options: TierOptions) -> None:
        self.options = options
        self.objects: dict[Name, StoredObject] = {}  # by name, what was used least recently first

    def put(self, name: Name, stored: StoredObject) -> None:
        """Keep an object, and evict others if there are too many."""
        self.objects[name] = stored
        while 0 < self.options.num_objects_max < len(self.objects):
            del self.objects[next(iter(self.objects))]

    def open(self, name: Name) -> StoredObject | None:
        """Return an object that is read now; it stays readable if it is evicted meanwhile."""
        stored = self.objects.pop(name, None)
        if stored is not None and stored.flaw is None:
            self.objects[name] = stored
        return stored

    def evict(self, stream: Random) -> None:
        for name in stream.sample(list(self.objects), len(self.objects) // 2):
            del self.objects[name]

    def restart(self) -> None:
        """The engine is started again: what it finds under its first namespace is its own."""
        for name, stored in self.objects.items():
            stored.epoch = 0 if name.namespace == namespace_of(name.namespace[0], "") else -1


def namespace_of(rank: int, generation: str) -> bytes:
    """The namespace of a rank, or of the first of those that hold the same, and a generation."""
    return bytes([rank]) + generation.encode()


class SlotView:
    """Stands where a tier has the memory of a slot."""

    def __init__(self, device: Device, slot_id: int) -> None:
        self.device = device
        self.slot_id = slot_id

    @property
    def words(self) -> list[int | None]:
        return self.device.memory.host[self.slot_id]

    def write(self, index: int, word: int | None) -> None:
        self.words[index] = word
        self.device.on_host_write(self.device.rank, self.slot_id)


@dataclass(slots=True, eq=False)
class Operation:
    """A probe, a fetch or a spill that is under way."""

    task: Task
    names: Sequence[Name]
    views: Sequence[SlotView]
    stream: Random
    fault: TierFault | None
    ended: asyncio.Future[None]
    pending: list[tuple[int, int]]  # (object, word) still to be moved, the last first
    ticks_left: int
    stalled_until_s: float
    latency_left: int = 0  # ticks before it is begun
    results: dict[int, Result] = field(default_factory=dict)
    # What is read or written, by object; what has begun is in it.
    opened: dict[int, StoredObject] = field(default_factory=dict)

    def happens(self) -> bool:
        """Whether what its fault does to some objects is done to this one."""
        return self.stream.random() < 0.5


class RankFaults:
    """What goes wrong with the tiers of one rank."""

    def __init__(self, injected: Counter[str]) -> None:
        self._injected = injected  # see `Device`
        # By the number of the operation on this rank.
        self.planned: list[tuple[int, TierFault]] = []
        self.num_operations = 0  # so far
        self.is_dead = False  # every operation raises

    def take(self, task: Task) -> TierFault | None:
        """What goes wrong with the next operation."""
        number, self.num_operations = self.num_operations, self.num_operations + 1
        for planned in sorted(self.planned, key=lambda planned: planned[0]):
            if planned[0] <= number and task in APPLIES[planned[1]]:
                self.planned.remove(planned)
                self._injected[planned[1].value] += 1
                return planned[1]
        return None


class SimTier:
    """See `Tier`: one rank's way to a store."""

    def __init__(
        self,
        label: str,  # see `Tier`
        store: ObjectStore,  # what it finds there
        device: Device,  # of the rank; time passes on it
        faults: RankFaults,  # of the rank
        chance: Chance,  # decides when words are moved
        engine: int = 0,  # whose way it is
    ) -> None:
        self.label = label
        self.used_bytes = -1
        self.num_evicted = 0
        self.num_restarts = 0
        self.store = store
        self.running: list[Operation] = []  # operations under way
        # Told of the rank, the slot and the object whose words are written to it now.
        self.on_fetched: Callable[[int, int, StoredObject], None] = lambda *_: None
        # Of the words of a slot, which are read now.
        self.epoch_of: Callable[[int], int] = lambda _: 0
        # Told of the slot, the name and the words of an object that is there from now on.
        self.on_stored: Callable[[int, Name, list[int | None]], None] = lambda *_: None
        self._device = device
        self._faults = faults
        self._chance = chance
        self._engine = engine
        self._num_ticks = 0
        self._cut_until = 0

    # ---- as a tier -----------------------------------------------------------------------------

    async def probe(self, names: Sequence[Name]) -> list[bool]:
        operation = self._begin(Task.PROBE, names, ())
        await operation.ended
        fault = operation.fault
        answers = [name in self.store.objects for name in names]
        if fault is TierFault.LIE:
            return [answer != operation.happens() for answer in answers]
        if fault is TierFault.LOSE:
            return [answer and operation.happens() for answer in answers]
        return answers

    async def fetch(self, names: Sequence[Name], slots: Sequence[Buffers]) -> list[Result]:
        return await self._carry_out(Task.FETCH, names, slots)

    async def spill(self, names: Sequence[Name], slots: Sequence[Buffers]) -> list[Result]:
        return await self._carry_out(Task.SPILL, names, slots)

    async def close(self) -> None:
        while self.running:
            await asyncio.wait([operation.ended for operation in self.running])

    async def _carry_out(
        self, task: Task, names: Sequence[Name], slots: Sequence[Buffers]
    ) -> list[Result]:
        views = [view for buffers in cast("Sequence[tuple[SlotView]]", slots) for view in buffers]
        assert len(views) == len(names)
        operation = self._begin(task, names, views)
        while not operation.ended.done():
            try:
                await asyncio.wait([operation.ended])
            except asyncio.CancelledError:
                self._give_up(operation)
        operation.ended.result()
        return [operation.results[index] for index in range(len(names))]

    def _begin(self, task: Task, names: Sequence[Name], views: Sequence[SlotView]) -> Operation:
        fault = self._faults.take(task)
        stream = self._chance.stream(
            "tier", self.label, self._device.rank, self._faults.num_operations
        )
        if fault is TierFault.DIE or self._faults.is_dead:
            self._faults.is_dead = True
            raise OSError(f"{self.label} is dead, says the simulator")
        if fault is TierFault.CUT:
            self._cut(stream)
        if self._num_ticks < self._cut_until:
            raise ConnectionError(f"{self.label} cannot be reached, says the simulator")
        if fault is TierFault.EVICT:
            self.store.evict(stream)
        order = list(range(len(views)))
        stream.shuffle(order)
        num_words = len(self._device.memory.gpu[0])
        stalled_until_s = 0.0
        if fault is TierFault.STALL:
            stalled_until_s = self._device.clock.now_s + stream.uniform(1.0, 60.0)
        if fault is TierFault.HANG:
            stalled_until_s = float("inf")
        operation = Operation(
            task,
            names,
            views,
            stream,
            fault,
            asyncio.get_running_loop().create_future(),
            [(index, word) for index in order for word in reversed(range(num_words))],
            stream.randint(0, self.store.options.ticks_max),
            stalled_until_s,
        )
        latency = self.store.options.latency_ticks
        operation.latency_left = stream.randint(latency // 2, latency) if latency else 0
        self.running.append(operation)
        return operation

    def _cut(self, stream: Random) -> None:
        """Lose the connection: nothing is moved any more."""
        self._cut_until = self._num_ticks + stream.randint(1, CUT_TICKS_MAX)
        running, self.running = self.running, []
        for operation in running:
            self._fail(operation, "lost its connection, says the simulator")

    def _give_up(self, operation: Operation) -> None:
        """Cancelled: do not begin what has not been begun."""
        for index in range(len(operation.names)):
            if index not in operation.opened:
                operation.results.setdefault(index, Result.CANCELLED)
        operation.latency_left = 0
        if not operation.opened and operation.stream.random() < 0.5:
            operation.stalled_until_s = 0.0  # no thread of its own stands still

    # ---- as time passes ------------------------------------------------------------------------

    def recover(self) -> None:
        """Nothing stands still any more, and every connection can be made."""
        self._cut_until = 0
        for operation in self.running:
            operation.stalled_until_s = 0.0

    def tick(self) -> None:
        """Time passes: every operation may move some words, and some end."""
        self._num_ticks += 1
        for operation in list(self.running):
            if self._device.clock.now_s < operation.stalled_until_s:
                # One that stands still may have begun, and one that has not can be given up.
                self._move(operation, operation.stream.randint(0, 1))
                continue
            if operation.latency_left > 0:
                operation.latency_left -= 1
                continue
            operation.ticks_left -= 1
            if operation.ticks_left < 0 or not operation.pending:
                self._end(operation)
            else:
                self._move(operation, operation.stream.randint(0, len(operation.pending)))

    def _end(self, operation: Operation) -> None:
        fails = operation.fault is TierFault.FAIL
        self._move(operation, len(operation.pending) // 2 if fails else len(operation.pending))
        self.running.remove(operation)
        if fails:
            self._fail(operation, "failed, says the simulator")
        elif not (operation.ended.done() or operation.ended.get_loop().is_closed()):
            operation.ended.set_result(None)

    @staticmethod
    def _fail(operation: Operation, how: str) -> None:
        if not (operation.ended.done() or operation.ended.get_loop().is_closed()):
            operation.ended.set_exception(OSError(how))

    def _move(self, operation: Operation, count: int) -> None:
        for _ in range(min(count, len(operation.pending))):
            index, word = operation.pending.pop()
            if index in operation.results:
                continue
            if index not in operation.opened:
                self._open(operation, index)
            if index not in operation.results:
                self._move_word(operation, index, word)

    def _open(self, operation: Operation, index: int) -> None:
        """Begin an object, or find out that there is nothing to be done."""
        name, one_in = operation.names[index], self.store.options.fails_one_in
        if operation.fault is TierFault.LOSE and operation.happens():
            operation.results[index] = operation.stream.choice(LOSSES[operation.task])
        elif operation.task is Task.FETCH:
            stored = self.store.open(name)
            if stored is None:
                operation.results[index] = Result.ABSENT
                return
            slot_id = operation.views[index].slot_id
            operation.opened[index] = stored
            self.on_fetched(self._device.rank, slot_id, stored)
        elif name in self.store.objects:
            operation.results[index] = Result.PRESENT
        elif one_in and operation.stream.randrange(one_in) == 0:
            operation.results[index] = Result.FAILED
        else:
            epoch = self.epoch_of(operation.views[index].slot_id)
            operation.opened[index] = StoredObject([], epoch, self._engine)

    def _move_word(self, operation: Operation, index: int, word: int) -> None:
        view, stored = operation.views[index], operation.opened[index]
        is_last = word == len(view.words) - 1
        if operation.task is Task.FETCH:
            is_right = stored.flaw is None and operation.fault is not TierFault.SUBVERT
            view.write(word, stored.words[word] if is_right else GARBAGE)
            if is_last:
                operation.results[index] = stored.flaw or Result.DONE
            return
        stored.words.append(view.words[word])
        if is_last:
            operation.results[index] = Result.DONE
            self.on_stored(view.slot_id, operation.names[index], stored.words)
            if operation.fault is TierFault.TEAR and operation.happens():
                stored.flaw = Result.CORRUPT
            elif operation.fault is TierFault.SWAP and operation.happens():
                stored.flaw = Result.FOREIGN
            self.store.put(operation.names[index], stored)


class RankTiers:
    """The tiers of one rank, nearest first.

    `stores`: of each; `device`: of the rank; `chance`: decides when words are moved; `engine`: of
    the rank.
    """

    def __init__(
        self, stores: Sequence[ObjectStore], device: Device, chance: Chance, engine: int = 0
    ) -> None:
        self.faults = RankFaults(device.injected)
        self.tiers = [
            SimTier(f"sim:{index}", store, device, self.faults, chance, engine)
            for index, store in enumerate(stores)
        ]
        device.on_tick += [tier.tick for tier in self.tiers]

    def recover(self) -> None:
        """Nothing goes wrong any more; what has died stays dead."""
        self.faults.planned.clear()
        for tier in self.tiers:
            tier.recover()

    def running(self) -> list[Operation]:
        return [operation for tier in self.tiers for operation in tier.running]
