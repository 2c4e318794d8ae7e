"""vLLM's scheduler over real copies: tensors, the transfers' own thread, a real backend.

The same engine as the simulator's, with its content checks, but nothing here is stepped by hand:
the loop runs on its thread, the backend copies when it likes, and the forward writes and checks
words in the order of a compute stream. So a run is not repeatable; what it finds is real.
"""

import random
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from safe_offload.layout import Geometry, Segment, make_geometry
from safe_offload.worker.copies.base import Backend, Direction
from safe_offload.worker.loop_thread import LoopThread
from safe_offload.worker.memory.shared_memory import Share
from safe_offload.worker.opening import Opened
from safe_offload.worker.transfers import Transfers
from tests.simulator.engine_core import EngineCore, random_prompt
from tests.simulator.vllm_setup import EngineShape

NUM_LAYERS = 5
WORD_BYTES = 8
Report = Callable[[str], None]


class Machine(Protocol):
    """What a run needs of the place it runs on."""

    storage: torch.Tensor  # the KV cache, shape (layers, blocks, words), int64, all bytes defined
    backend: Backend  # copies between it and host memory

    def enqueue(self, operation: Callable[[], object]) -> Callable[[], None]:
        """Put work on the compute stream; returns what waits until it is done."""

    def delay(self, where: Direction | None, amount: float) -> None:
        """Hold up the stream of a direction, or the compute stream: 0 not at all, 1 for long."""

    def to_device(self, numbers: list[int]) -> torch.Tensor:
        """Numbers for a kernel, without waiting for the device."""

    def close(self) -> None:
        """After the backend has been closed."""


def geometry_of(shape: EngineShape) -> Geometry:
    """Layers one behind the other."""
    row = shape.block_words * WORD_BYTES
    layer = shape.num_blocks * row
    segments = [Segment(row, layer * index, row) for index in range(NUM_LAYERS)]
    return make_geometry(segments, shape.num_blocks, NUM_LAYERS * layer)


@dataclass(slots=True)
class Operation:
    """Reads or writes of one kind: positions within a layer, and the words for them."""

    kind: str
    positions: list[int] = field(default_factory=list)
    words: list[int] = field(default_factory=list)
    reports: list[tuple[int, Report]] = field(default_factory=list)
    """Up to which word, and who wants to know."""


class TensorDevice:
    """What the simulated model runner does, recorded and then played on a compute stream."""

    hold_copies = False
    num_ticks = 0

    def __init__(self, rank: int, machine: Machine) -> None:
        self.rank = rank
        self.machine = machine
        self.num_enqueued = 0
        self._operations: list[Operation] = []
        self._waits: list[Callable[[], None]] = []
        self._checks: list[tuple[torch.Tensor, Operation]] = []
        self._salts = torch.arange(NUM_LAYERS, device=machine.storage.device)[:, None]

    # ---- recorded ------------------------------------------------------------------------------

    def zero(self, block_id: int) -> None:
        self._operations.append(Operation("zero", [block_id]))

    def copy_block(self, source: int, target: int) -> None:
        self._operations.append(Operation("copy", [source, target]))

    def write(self, block_id: int, first: int, words: list[int]) -> None:
        self._add("write", block_id, first, words)

    def check(self, block_id: int, first: int, expected: list[int], report: Report) -> None:
        operation = self._add("check", block_id, first, expected)
        operation.reports.append((len(operation.words), report))

    def strangers(self, block_id: int, num_words: int, group_idx: int) -> list[int]:
        """None: the simulator's device looks for them; here nothing is read beside the stream."""
        return []

    def _add(self, kind: str, block_id: int, first: int, words: list[int]) -> Operation:
        if not self._operations or self._operations[-1].kind != kind:
            self._operations.append(Operation(kind))
        operation = self._operations[-1]
        start = block_id * self.machine.storage.shape[2] + first
        operation.positions += range(start, start + len(words))
        operation.words += words
        return operation

    # ---- played --------------------------------------------------------------------------------

    def enqueue(self, record: Callable[[], object]) -> None:
        """Record what a function does, and put it on the compute stream."""
        self._operations = []
        record()
        played = [
            (o, self.machine.to_device(o.positions), self.machine.to_device(o.words))
            for o in self._operations
            if o.positions
        ]

        def play() -> None:
            for operation, positions, words in played:
                self._play(operation, positions, words)

        self._waits.append(self.machine.enqueue(play))
        self.num_enqueued += 1

    def _play(self, operation: Operation, positions: torch.Tensor, words: torch.Tensor) -> None:
        storage = self.machine.storage
        flat = storage.view(NUM_LAYERS, -1)
        if operation.kind == "zero":
            storage[:, positions] = 0
        elif operation.kind == "copy":
            storage[:, positions[1]] = storage[:, positions[0]]
        elif operation.kind == "write":
            flat[:, positions] = words ^ self._salts
        else:
            wrong = (flat[:, positions] != (words ^ self._salts)).any(dim=0)
            self._checks.append((wrong, operation))

    def synchronize(self, num_operations: int) -> None:
        """Wait until the stream has done this many operations, and look at what it has checked."""
        while self._waits and self.num_enqueued - len(self._waits) < num_operations:
            self._waits.pop(0)()
        checks, self._checks = self._checks, []
        for wrong, operation in checks:
            indices = wrong.cpu().nonzero().ravel().tolist()
            for index in indices[:4]:
                report = next(report for end, report in operation.reports if index < end)
                report(f"{len(indices)} words of this step are not those of their prefix")

    def advance_compute(self, num_operations: int) -> None:
        """Nothing: the stream goes on by itself."""

    def tick(self) -> None:
        """Nothing: time passes by itself."""


class RunningLoop(LoopThread):
    """The product's loop; it turns by itself."""

    def turn(self) -> None:
        """Nothing."""


class TensorCore(EngineCore):
    """An engine whose ranks copy for real."""

    def __init__(
        self,
        shape: EngineShape,
        seed: int,
        make_machine: Callable[[EngineShape, Geometry, int], Machine],  # a machine for each rank
    ) -> None:
        self._make_machine = make_machine
        self.machines: list[Machine] = []
        super().__init__(shape, seed)

    def _open(self, rank: int, copy_ticks_max: int) -> Any:
        shape = self.shape
        machine = self._make_machine(shape, geometry_of(shape), shape.slots_of(rank))
        self.machines.append(machine)
        loop = RunningLoop()
        transfers = Transfers(machine.backend, loop, self.config.max_inflight_bytes)
        share = Share.of_rank(rank, self.config.ranks_per_copy)
        return TensorDevice(rank, machine), loop, Opened(transfers, machine.backend, share, None)

    def step(self) -> Any:
        """See `EngineCore.step`; an engine with nothing to compute lets the copies go on."""
        batch = super().step()
        if batch is None or not batch.works:
            threading.Event().wait(0.0005)
        return batch

    def close(self) -> None:
        """End the engines, then the machines."""
        super().close()
        for machine in self.machines:
            machine.close()


def run_random_requests(core: TensorCore, seed: int, num_requests: int = 60) -> None:
    """Requests with shared beginnings, aborts and resets, while streams are held up at random."""
    rng = random.Random(seed)
    stems = [random_prompt(rng.randint(20, 90), seed * 100 + i) for i in range(6)]
    live: list[str] = []
    sent: dict[str, int] = {}
    num_steps = 0
    while len(sent) < num_requests or core.has_work:
        if len(sent) < num_requests and rng.random() < 0.3:
            name = f"r{len(sent)}"
            tail = random_prompt(rng.randint(1, 30), rng.randrange(1 << 30))
            sent[name] = rng.randint(1, 12)
            core.add(name, rng.choice(stems) + tail, sent[name])
            live.append(name)
        if live and rng.random() < 0.03:
            core.abort(aborted := live.pop(rng.randrange(len(live))))
            sent[aborted] = 0
        if rng.random() < 0.02:
            core.scheduler.reset_prefix_cache()
        for machine in core.machines:
            where = rng.choice([None, *Direction])
            machine.delay(where, rng.choice([0.0, 0.0, rng.random(), 1.0]))
        core.step()
        live = [name for name in live if name not in core.finish_reasons]
        num_steps += 1
        assert num_steps < 100_000, "not idle"
    for name, num_tokens in sent.items():
        if num_tokens:
            assert core.answers[name] == core.runner.sequels[name].answer(num_tokens), name
