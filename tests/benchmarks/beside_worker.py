"""What `beside` loads into vLLM's workers: copies without end beside the forward."""

from __future__ import annotations

import threading
import time
from collections import deque
from concurrent.futures import Future
from contextlib import ExitStack

from safe_offload.worker.copies.base import CopyPath
from tests.benchmarks.fake_gpu_rig import gpu_rigs
from tests.benchmarks.transfer_cases import Case, Traffic
from tests.benchmarks.transfer_rigs import PATIENCE_S, GpuRig
from tests.gpu.weights import Probe

NUM_IN_FLIGHT = 2


class Stream:
    """Copies by one way, one after another, from a thread of its own."""

    def __init__(self, rig: GpuRig, traffic: Traffic) -> None:
        self._rig = rig
        (self._copy,) = rig.case.make_copies(traffic)
        # One point of the compute stream, long passed: a copy waits for no forward.
        self._mark = rig.backend.mark()
        self._stopping = threading.Event()
        self._size_bytes, self._begin_s = 0, time.monotonic()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def end(self) -> float:
        """Wait for what is under way; return the bytes a second."""
        self._stopping.set()
        self._thread.join()
        return self._size_bytes / (time.monotonic() - self._begin_s)

    def _run(self) -> None:
        under_way = deque(self._issue() for _ in range(NUM_IN_FLIGHT))
        while under_way:
            under_way.popleft().result(PATIENCE_S)
            self._size_bytes += self._rig.case.size_bytes
            if not self._stopping.is_set():
                under_way.append(self._issue())

    def _issue(self) -> Future[None]:
        future: Future[None] = self._rig.backend.issue(self._copy, self._mark).future
        return future


class BesideProbe(Probe):
    """Every name is new to vLLM's worker. The copies have memory of their own."""

    def make_beside(self, range_bytes: int, num_blocks: int, num_layers: int) -> list[str]:
        """Make memory and streams; return the ways to copy that there are."""
        self.start_probe()
        make = ExitStack().enter_context(gpu_rigs())
        self._rig = make(Case(range_bytes, num_blocks, num_layers))
        self._rig.check()
        self._paths = self._rig.backend.paths
        return [path.value for path in self._paths]

    def begin_beside(self, path: str, traffic: str) -> None:
        """Copy from here on; with "" nothing."""
        self._beside = None
        if path:
            self._rig.backend.use((CopyPath(path),))
            self._beside = Stream(self._rig, Traffic(traffic))
        self.take_probe()

    def end_beside(self) -> tuple[list[list[float]], float]:
        """Return the steps (see `Recorder`), and the bytes copied a second."""
        steps = self.take_probe()["steps"]
        return steps, self._beside.end() if self._beside else 0.0
