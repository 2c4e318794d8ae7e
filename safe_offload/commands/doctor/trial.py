"""Copies on trial: the self-test that an engine makes at its start, on each device of this machine.

The same code runs on the CPU backend and, where torch sees a GPU, on the GPU backend.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from typing import Final

import torch

from safe_offload.config.options import OffloadConfig
from safe_offload.config.units import KIB
from safe_offload.layout import Geometry, HostLayout, Segment
from safe_offload.protocol import MemoryKind
from safe_offload.worker.copies.choice import OpenBackend, open_backend
from safe_offload.worker.copies.cpu import find_move, move_each
from safe_offload.worker.loop_thread import LoopThread
from safe_offload.worker.memory.host_memory import HostMemory
from safe_offload.worker.self_test import SelfTest
from safe_offload.worker.transfers import Transfers

NUM_BLOCKS: Final = 16
RANGE_BYTES: Final = 4 * KIB
LAYERS: Final = tuple(
    Segment(RANGE_BYTES, layer * NUM_BLOCKS * RANGE_BYTES, RANGE_BYTES) for layer in range(4)
)
LAYOUT: Final = HostLayout.in_one_slab(Geometry(LAYERS, NUM_BLOCKS), NUM_BLOCKS)


@dataclass(slots=True)
class Trial:
    """The results of the trial of one device.

    `problems` are of copy paths that failed; `failure`, why there was no test. `is_pageable`: the
    driver of a GPU did not page-lock host memory.
    """

    device: str  # "cpu", or of a GPU such as "cuda:0"
    name: str  # with the product's
    has_compiled_loop: bool = True  # of the CPU backend
    passed: tuple[str, ...] = ()
    problems: dict[str, str] = field(default_factory=dict)
    is_pageable: bool = False
    failure: str = ""

    @property
    def is_gpu(self) -> bool:
        """Return whether the device is a GPU."""
        return self.device != "cpu"


def devices() -> list[torch.device]:
    """Return every GPU that torch sees, else the CPU."""
    gpus = range(torch.cuda.device_count() if torch.cuda.is_available() else 0)
    return [torch.device("cuda", index) for index in gpus] or [torch.device("cpu")]


def run_trial(
    device: torch.device, config: OffloadConfig, *, open: OpenBackend = open_backend
) -> Trial:
    """Try the copies of a device."""
    trial = Trial(str(device), "cpu", has_compiled_loop=find_move() is not move_each)
    try:
        with torch.cuda.device(device) if trial.is_gpu else contextlib.nullcontext():
            if trial.is_gpu:
                trial.name = f"{device} ({torch.cuda.get_device_name(device)})"
            _try_copies(trial, device, config, open)
    except Exception as problem:
        trial.failure = f"{type(problem).__name__}: {problem}"
    return trial


def _try_copies(
    trial: Trial, device: torch.device, config: OffloadConfig, open: OpenBackend
) -> None:
    storage = torch.zeros(LAYOUT.size_bytes, dtype=torch.uint8, device=device)
    memory = HostMemory.allocate(LAYOUT.size_bytes)
    host = memory.tensor.numpy()
    backend, rows = open(storage.untyped_storage(), device, LAYOUT, memory, config)
    transfers = Transfers(backend, LoopThread(), config.max_inflight_bytes)
    try:
        test = SelfTest(transfers, backend, rows, host, LAYOUT)
        is_sound = test.run()
        trial.problems = {path.value: problem for path, problem in test.problems.items()}
        trial.passed = tuple(path.value for path in backend.paths) if is_sound else ()
        trial.is_pageable = trial.is_gpu and backend.memory.kind is MemoryKind.PAGEABLE
    finally:
        transfers.close()
