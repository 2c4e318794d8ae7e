"""What happens in the worker of an engine, with times: steps, copies, and the memcpy limit.

`WorkerProbe` is a worker extension of vLLM's: its methods become methods of the worker, and
`LLM.collective_rpc` calls them. It wraps methods on the instances that it finds there, so that
nothing in the connector is there for the benchmark's sake. Times are of `time.monotonic`, which is
one clock for all processes of a machine on Linux, and vLLM's own for `queued_ts` and
`first_token_ts`.
"""

import functools
import os
import statistics
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from safe_offload.worker.backends.base import Direction
from safe_offload.worker.backends.cpu import CpuBackend, find_move
from safe_offload.worker.backends.ranges import Ranges

MEMCPY_BUFFER_BYTES_MIN = 128 << 20
"""Several times the last cache of most machines, so that what is read has to come from memory."""
NUM_MEMCPY_ROUNDS = 9


class WorkerProbe:
    """Becomes part of vLLM's worker; every name here has to be new to it.

    Source: `worker_extension_cls` in vllm/v1/worker/worker_base.py (0.32.0).
    """

    def start_probe(self) -> None:
        """Wrap the worker, and the connector's worker side if it is ours and copies by threads."""
        self._probe = _Recorder()
        for name in ("execute_model", "sample_tokens"):
            setattr(self, name, self._probe.watch_step(getattr(self, name)))
        bridge = _find_bridge()
        if bridge is not None:
            self._probe.watch_bridge(bridge)

    def take_probe(self) -> dict[str, Any]:
        """What was recorded since the last call: plain numbers and words, in the order of time."""
        return self._probe.take()

    def kv_cache_bytes(self: Any) -> int:
        """Return the size of this worker's KV pool.

        Source: `KVCacheTensor.size` in vllm/v1/kv_cache_interface.py (0.32.0), the allocation that
        all tensors are places in.
        """
        tensors = self.model_runner.kv_cache_config.kv_cache_tensors
        return max(int(tensor.size) for tensor in tensors)

    def time_memcpy(self, size_bytes: int, num_pieces: int) -> float:
        """Return the seconds that one thread needs to copy so many bytes, in pieces of one size.

        The median of a few copies; each begins where the last has ended, in a buffer of which the
        cache holds a part at most, and no page is touched for the first time.
        """
        return _time_memcpy(size_bytes, num_pieces)


class _Recorder:
    def __init__(self) -> None:
        self._steps: list[list[Any]] = []
        self._submits: list[tuple[float, str, int]] = []
        self._copies: list[tuple[str, float, float, Any]] = []
        self._reports: list[tuple[float, tuple[int, ...]]] = []
        self._backend: CpuBackend | None = None

    def watch_step(self, method: Callable[..., Any]) -> Callable[..., Any]:
        """Note begin, end and tokens of a step; `sample_tokens` ends what `execute_model` began."""

        @functools.wraps(method)
        def watched(*args: Any, **kwargs: Any) -> Any:
            begin_s = time.monotonic()
            result = method(*args, **kwargs)
            num_tokens = getattr(args[0], "total_num_scheduled_tokens", None) if args else None
            if num_tokens is not None:
                self._steps.append([begin_s, time.monotonic(), num_tokens])
            elif self._steps:
                self._steps[-1][1] = time.monotonic()
            return result

        return watched

    def watch_bridge(self, bridge: Any) -> None:
        """Note when transfers are submitted, copied and reported."""
        transfers, backend = bridge.opened.transfers, bridge.opened.backend
        submit, report, run = transfers.submit, bridge.report, backend._run
        self._backend = backend

        def watched_submit(direction: Direction, transfer: Any) -> None:
            self._submits.append((time.monotonic(), direction.value, transfer.transfer_id))
            submit(direction, transfer)

        def watched_run(copy: Any) -> None:
            begin_s = time.monotonic()
            run(copy)
            self._copies.append((copy.direction.value, begin_s, time.monotonic(), copy))

        def watched_report() -> Any:
            found = report()
            if found is not None:
                ids = tuple(outcome.transfer_id for outcome in found.outcomes)
                self._reports.append((time.monotonic(), ids))
            return found

        transfers.submit, bridge.report, backend._run = watched_submit, watched_report, watched_run

    def take(self) -> dict[str, Any]:
        """See `WorkerProbe.take_probe`."""
        taken = {
            "steps": self._steps,
            "submits": self._submits,
            "copies": [
                (name, begin_s, end_s, *self._size_of(copy))
                for name, begin_s, end_s, copy in self._copies
            ],
            "reports": self._reports,
            "pid": os.getpid(),
            "parent_pid": os.getppid(),
            "thread_names": {str(t.native_id): t.name for t in threading.enumerate()},
        }
        self._steps, self._submits, self._copies, self._reports = [], [], [], []
        return taken

    def _size_of(self, copy: Any) -> tuple[int, int]:
        """Bytes and pieces of a copy."""
        assert self._backend is not None
        ranges = self._backend._table.ranges(self._backend._table.runs(copy))
        return int(ranges.lengths.sum()), len(ranges)


def _find_bridge() -> Any:
    from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

    if not has_kv_transfer_group():
        return None
    bridge = getattr(get_kv_transfer_group(), "_worker", None)
    opened = getattr(bridge, "opened", None)
    return bridge if isinstance(getattr(opened, "backend", None), CpuBackend) else None


@functools.cache
def _buffers(size_bytes: int) -> tuple[Any, Any]:
    """Source and target, all pages touched."""
    return np.ones(size_bytes, dtype=np.uint8), np.ones(size_bytes, dtype=np.uint8)


def _time_memcpy(size_bytes: int, num_pieces: int) -> float:
    num_copies = -(-MEMCPY_BUFFER_BYTES_MIN // size_bytes)
    source, target = _buffers(num_copies * size_bytes)
    piece_bytes = size_bytes // num_pieces
    move = find_move()
    times_s = []
    for number in range(NUM_MEMCPY_ROUNDS):
        begins = (number % num_copies) * size_bytes + piece_bytes * np.arange(
            num_pieces, dtype=np.uint64
        )
        ranges = Ranges(
            begins + np.uint64(target.ctypes.data),
            begins + np.uint64(source.ctypes.data),
            np.full(num_pieces, piece_bytes, dtype=np.uint64),
        )
        begin_s = time.monotonic()
        move(ranges)
        times_s.append(time.monotonic() - begin_s)
    return statistics.median(times_s)
