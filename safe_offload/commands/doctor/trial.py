"""Copies on trial: the self-test, the order of fenced overwrites, rates, making memory ready.

The same code runs on the CPU backend and, where torch sees a GPU, on the GPU backend.
"""

from __future__ import annotations

import contextlib
import functools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import torch

from safe_offload.config.options import OffloadConfig
from safe_offload.config.units import KIB, MIB
from safe_offload.errors import DeviceError, SafeOffloadError, TransferError
from safe_offload.layout import Geometry, HostLayout, Segment
from safe_offload.protocol import FailureReason, MemoryKind, Transfer, ids_of
from safe_offload.worker.copies.base import Copy, CopyPath, Direction, ProvableBackend
from safe_offload.worker.copies.choice import OpenBackend, open_backend
from safe_offload.worker.copies.cpu import find_move, find_touch, move_each
from safe_offload.worker.copies.device import Device
from safe_offload.worker.copies.rows import Rows
from safe_offload.worker.loop_thread import LoopThread
from safe_offload.worker.memory import placement
from safe_offload.worker.memory.host_memory import HostMemory
from safe_offload.worker.memory.page_lock import SLAB_BYTES
from safe_offload.worker.self_test import SelfTest
from safe_offload.worker.transfers import Transfers


def make_layout(range_bytes: int, num_blocks: int, num_layers: int) -> HostLayout:
    """Return a KV cache, layers outermost, and as many host slots as blocks, in one slab."""
    layer_bytes = range_bytes * num_blocks
    starts = range(0, num_layers * layer_bytes, layer_bytes)
    segments = tuple(Segment(range_bytes, start, range_bytes) for start in starts)
    return HostLayout.in_one_slab(Geometry(segments, num_blocks), num_blocks)


ROUNDS: Final = 1000
"""Fenced overwrites of each way to copy."""
ORDER_S_MAX: Final = 20.0
"""No further round begins after that."""
COPY_TIMEOUT_S: Final = 30.0
POLL_S: Final = 0.0001
LOCK_TIMEOUT_S: Final = 120.0
SMALL: Final = make_layout(4 * KIB, 16, 4)
LARGE: Final = make_layout(64 * KIB, 32, 32)
TRAFFICS: Final = {"store": (Direction.STORE,), "load": (Direction.LOAD,), "both": tuple(Direction)}
"""Which copies run at once; both: half of the blocks each way."""
TIMED_COPIES: Final = 5
READY_BYTES: Final = 256 * MIB  # touched on trial; a GPU locks a slab of SLAB_BYTES


@dataclass(slots=True)
class Trial:
    """What the trial of one device found; each part may fail alone.

    Attributes:
        passed: ways to copy that passed the self-test; None if there was no test.
        rounds: by way to copy, fenced overwrites that were tried.
        torn: of these, in how many the overwrite reached a store.
        gbps: by way to copy and kind of traffic, 10^9 bytes a second.
        failures: parts of the trial that could not be done, by their name.
    """

    device: str  # "cpu", or of a GPU such as "cuda:0"
    name: str  # with the product's
    node: int | None = None  # NUMA node of a GPU
    has_compiled_loop: bool = True  # of the CPU backend
    passed: tuple[str, ...] | None = None
    problems: dict[str, str] = field(default_factory=dict)  # of the ways that did not pass
    rounds: dict[str, int] = field(default_factory=dict)
    torn: dict[str, int] = field(default_factory=dict)
    gbps: dict[str, dict[str, float]] = field(default_factory=dict)
    ready_bytes_per_s: float = 0.0  # at which host memory is touched, or page-locked for a GPU
    pages: str = ""  # that the memory on trial has got
    failures: dict[str, str] = field(default_factory=dict)

    @property
    def is_gpu(self) -> bool:
        """Return whether it is one."""
        return self.device != "cpu"


def devices() -> list[torch.device]:
    """Return every GPU that torch sees, else the CPU."""
    gpus = range(torch.cuda.device_count() if torch.cuda.is_available() else 0)
    return [torch.device("cuda", index) for index in gpus] or [torch.device("cpu")]


def run_trial(
    device: torch.device,
    config: OffloadConfig,
    *,
    open: OpenBackend = open_backend,
    rounds: int = ROUNDS,
) -> Trial:
    """Try the copies of a device, with as many fenced overwrites of each way to copy."""
    trial = Trial(str(device), _name_of(device), has_compiled_loop=find_move() is not move_each)
    parts: Mapping[str, Callable[[], None]] = {
        "self-test": functools.partial(_try_copies, trial, device, config, open, rounds),
        "rates": functools.partial(_measure_rates, trial, device, config, open),
        "ready": functools.partial(_make_ready, trial, device),
    }
    is_cpu = device.type == "cpu"
    # Torch's threads wait for one another in a loop, which takes long where others use the cores.
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    for name, part in parts.items():
        try:
            with contextlib.nullcontext() if is_cpu else torch.cuda.device(device):
                part()
        except Exception as problem:
            trial.failures[name] = f"{type(problem).__name__}: {problem}"
    torch.set_num_threads(num_threads)
    return trial


def _name_of(device: torch.device) -> str:
    if device.type == "cpu":
        return "cpu"
    return f"{device} ({torch.cuda.get_device_name(device)})"


# ---- right ------------------------------------------------------------------------------------


def _try_copies(
    trial: Trial, device: torch.device, config: OffloadConfig, open: OpenBackend, rounds: int
) -> None:
    storage = torch.zeros(SMALL.size_bytes, dtype=torch.uint8, device=device)
    memory = HostMemory.allocate(SMALL.size_bytes)
    host = memory.tensor.numpy()
    backend, rows = open(storage.untyped_storage(), device, SMALL, memory, config)
    transfers = Transfers(backend, LoopThread(), config.max_inflight_bytes)
    try:
        test = SelfTest(transfers, backend, rows, host, SMALL)
        is_sound = test.run()
        trial.problems = {path.value: problem for path, problem in test.problems.items()}
        trial.passed = tuple(path.value for path in backend.paths) if is_sound else ()
        order = Order(transfers, rows, host, SMALL)
        for path in backend.paths if is_sound else ():
            backend.use((path,))
            trial.rounds[path.value], trial.torn[path.value] = order.count_torn(rounds)
    finally:
        transfers.close()


class Order:
    """Stores whose block is overwritten right after a fence, round after round.

    `host` is the host memory, shape (size_bytes,), uint8.
    """

    def __init__(self, transfers: Transfers, rows: Rows, host: Any, layout: HostLayout) -> None:
        self._transfers = transfers
        self._rows = rows
        self._host = host
        self._layout = layout
        self._last_id = 1 << 40  # beyond those of the self-test

    def count_torn(self, rounds: int, *, is_fenced: bool = True) -> tuple[int, int]:
        """Return how many rounds there was time for, and in how many of them a store was torn.

        It is torn if a slot got what its block held only after the fence.
        """
        self._rows.bind_thread()
        end_s = time.monotonic() + ORDER_S_MAX
        count = min(self._layout.geometry.num_blocks, self._layout.num_slots)
        blocks, slots = list(range(count)), list(range(count))
        num_torn = 0
        for index in range(rounds):
            if time.monotonic() > end_s:
                return index, num_torn
            slots.append(slots.pop(0))
            before, after = 2 * index % 256, (2 * index + 1) % 256
            self._rows.prepare(blocks, self._filled(count, before))()
            overwrite = self._rows.prepare(blocks, self._filled(count, after))
            self._last_id += 1
            store = Transfer(self._last_id, ids_of(blocks), ids_of(slots))
            self._transfers.submit(Direction.STORE, store)
            if is_fenced:
                self._transfers.fence((self._last_id,))
            overwrite()
            self._wait()
            ranges = (self._layout.ranges_of(slot) for slot in slots)
            parts = (self._host[at : at + length] for each in ranges for at, length in each)
            num_torn += any(np.any(part != before) for part in parts)
        return rounds, num_torn

    def _filled(self, count: int, value: int) -> Any:
        return np.full((count, self._layout.geometry.slot_bytes), value, dtype=np.uint8)

    def _wait(self) -> None:
        end_s = time.monotonic() + COPY_TIMEOUT_S
        while not (drained := self._transfers.drain()):
            if time.monotonic() > end_s:
                raise TransferError(FailureReason.TIMED_OUT, "a store on trial did not end")
            time.sleep(POLL_S)
        for _, failure in drained:
            if failure is not None:
                raise TransferError(failure, "a store on trial failed")


# ---- fast -------------------------------------------------------------------------------------


def _measure_rates(
    trial: Trial, device: torch.device, config: OffloadConfig, open: OpenBackend
) -> None:
    """Time every sound way to copy in each direction, and in both at once."""
    if trial.is_gpu:
        trial.node = placement.numa_node_of(Device(device).pci_address)
    if not trial.passed:
        return
    # Ones: pages that were never written are all one page of zeros.
    storage = torch.ones(LARGE.size_bytes, dtype=torch.uint8, device=device)
    memory = HostMemory.allocate(LARGE.size_bytes)
    opened, _ = open(storage.untyped_storage(), device, LARGE, memory, config)
    backend: Any = opened  # whose completions have a future
    with closing(backend):
        if trial.is_gpu:
            _wait_until_locked(backend)
        for path in trial.passed:
            backend.use((CopyPath(path),))
            for traffic, directions in TRAFFICS.items():
                copies = _scattered_copies(directions)
                seconds = [time_copies(backend, copies) for _ in range(TIMED_COPIES + 1)]
                gbps = LARGE.size_bytes / statistics.median_low(seconds[1:]) / 1e9
                trial.gbps.setdefault(path, {})[traffic] = round(gbps, 2)


def _wait_until_locked(backend: ProvableBackend) -> None:
    end_s = time.monotonic() + LOCK_TIMEOUT_S
    while backend.num_usable_slots < backend.num_slots and time.monotonic() < end_s:
        time.sleep(POLL_S)
    is_ready = backend.num_usable_slots == backend.num_slots
    if not is_ready or backend.memory.kind is MemoryKind.PAGEABLE:
        raise SafeOffloadError(
            f"the driver does not page-lock {LARGE.size_bytes} bytes; fix: ulimit -l unlimited"
        )


def _scattered_copies(directions: Sequence[Direction]) -> list[Copy]:
    """Return copies of all blocks, an equal part in each direction."""
    generator = np.random.default_rng(0)
    blocks, slots = (
        np.array_split(generator.permutation(LARGE.num_slots), len(directions)) for _ in range(2)
    )
    return [Copy(*parts) for parts in zip(directions, blocks, slots, strict=True)]


def time_copies(backend: Any, copies: Sequence[Copy]) -> float:
    """Return the seconds from giving copies to the backend until all have ended."""
    start_s = time.perf_counter()
    completions = [backend.issue(copy, backend.mark()) for copy in copies]
    for completion in completions:
        completion.future.result(COPY_TIMEOUT_S)
    return time.perf_counter() - start_s


def _make_ready(trial: Trial, device: torch.device) -> None:
    """Time how host memory is made ready: touched for the CPU, page-locked for a GPU."""
    gpu = None if device.type == "cpu" else Device(device)
    with closing(HostMemory.allocate(READY_BYTES if gpu is None else SLAB_BYTES)) as host:
        address = host.tensor.data_ptr()
        start_s = time.perf_counter()
        if gpu is not None:
            _lock(gpu, address, host.size_bytes)
        elif touch := find_touch():
            touch(address, host.size_bytes, 4 * KIB)
        else:
            host.tensor.fill_(0)
        trial.ready_bytes_per_s = host.size_bytes / (time.perf_counter() - start_s)
        trial.pages = str(placement.pages_of(address, host.size_bytes))
        if gpu is not None:
            gpu.unlock(address)


def _lock(gpu: Device, address: int, size_bytes: int) -> None:
    gpu.bind_thread()
    try:
        gpu.lock(address, size_bytes)
    except DeviceError as problem:
        raise SafeOffloadError(f"the driver did not page-lock a slab: {problem}") from None


# ---- computing, to compare with ---------------------------------------------------------------


def weight_seconds(device: str, dtype: str) -> dict[int, float]:
    """Return by number of tokens the seconds that computing them takes for each weight.

    A matrix as those of a layer is multiplied with that many rows; the median counts.
    """
    width, sizes = (1024, (1, 64, 256)) if device == "cpu" else (8192, (1, 256, 4096))
    kind = getattr(torch, dtype)
    weights = torch.ones(width, width, dtype=kind, device=device)
    found = {}
    for num_tokens in sizes:
        rows = torch.ones(num_tokens, width, dtype=kind, device=device)
        seconds = sorted(_time_product(rows, weights) for _ in range(TIMED_COPIES + 1))
        found[num_tokens] = seconds[TIMED_COPIES // 2] / weights.numel()
    return found


def _time_product(rows: torch.Tensor, weights: torch.Tensor) -> float:
    start_s = time.perf_counter()
    product = rows @ weights
    product[:1, :1].cpu()  # and wait for it
    return time.perf_counter() - start_s
