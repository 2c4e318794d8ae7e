"""A GPU of threads: streams that do their work in order and late, events, a driver, the kernel.

Device memory is host memory. Each stream is a thread, so that what is not ordered really races. The
row kernel is the real one, its source compiled by the C++ compiler and run thread by thread.
"""

from __future__ import annotations

import ctypes
import functools
import queue
import subprocess
import tempfile
import threading
from collections.abc import Callable
from dataclasses import astuple
from pathlib import Path

import numpy as np

from safe_offload.errors import DeviceError
from safe_offload.worker.backends import row_kernel
from safe_offload.worker.backends.base import Direction
from safe_offload.worker.backends.device import Buffer
from safe_offload.worker.backends.driver import Driver
from safe_offload.worker.backends.ranges import Ranges
from safe_offload.worker.backends.row_kernel import RowArguments

PATIENCE_S = 20.0

CPP_PRELUDE = """
#define __global__
struct uint4 { unsigned int x, y, z, w; };
struct Index { int x; };
static thread_local Index blockIdx, blockDim, gridDim, threadIdx;
"""
CPP_LAUNCH = """
extern "C" void launch(
    int num_blocks, int num_threads,
    const Segment* segments, const long long* block_ids, const long long* slot_ids,
    long long num_pairs, long long num_segments, long long pieces_per_row,
    long long slots_per_slab, unsigned long long slab_bytes, int is_store)
{
    gridDim.x = num_blocks;
    blockDim.x = num_threads;
    for (blockIdx.x = 0; blockIdx.x < num_blocks; blockIdx.x++)
        for (threadIdx.x = 0; threadIdx.x < num_threads; threadIdx.x++)
            copy_rows(segments, block_ids, slot_ids, num_pairs, num_segments, pieces_per_row,
                      slots_per_slab, slab_bytes, is_store);
}
"""


@functools.cache
def compile_kernel(word_bytes: int) -> Callable[..., None]:
    """The row kernel as a function of the host."""
    with tempfile.TemporaryDirectory() as folder:
        source, library = Path(folder, "kernel.cpp"), Path(folder, "kernel.so")
        source.write_text(CPP_PRELUDE + row_kernel.make_source(word_bytes) + CPP_LAUNCH)
        command = ["g++", "-O1", "-Wall", "-Werror", "-shared", "-fPIC", "-fno-strict-aliasing"]
        subprocess.run([*command, str(source), "-o", str(library)], check=True)
        launch = ctypes.CDLL(str(library)).launch
    wide = [ctypes.c_ulonglong] * 8
    launch.argtypes = [ctypes.c_int, ctypes.c_int, *wide, ctypes.c_int]
    launch.restype = None
    return launch


class FakeStream:
    """See `Stream`; a thread."""

    def __init__(self, handle: int) -> None:
        self.cuda_stream = handle
        self._work: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def enqueue(self, operation: Callable[[], object]) -> None:
        """Do something behind everything so far."""
        self._work.put(operation)

    def wait_event(self, event: FakeEvent) -> None:
        point = event.point
        assert point is not None, "waiting for an event that was never recorded does nothing"
        self.enqueue(lambda: point.wait(PATIENCE_S))

    def synchronize(self) -> None:
        """Wait until everything so far is done."""
        done = threading.Event()
        self.enqueue(done.set)
        assert done.wait(PATIENCE_S)

    def end(self) -> None:
        """End the thread, everything done."""
        self._work.put(None)
        self._thread.join(PATIENCE_S)

    def _run(self) -> None:
        while (operation := self._work.get()) is not None:
            operation()


class FakeEvent:
    """See `Event`."""

    def __init__(self, device: FakeDevice) -> None:
        self.point: threading.Event | None = None
        self._device = device

    def record(self, stream: FakeStream) -> None:
        self.point = threading.Event()
        stream.enqueue(self.point.set)

    def synchronize(self) -> None:
        assert self.point is not None
        assert self.point.wait(PATIENCE_S)
        if self._device.is_broken:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")


class FakeDriver(Driver):
    """See `Driver`.

    Attributes:
        calls: names of the copying calls so far.
        num_lockable: calls of `lock` that succeed.
        locked: address and size of what is locked.
    """

    name = "fake"

    def __init__(self, *, has_batch: bool = True) -> None:
        self.has_batch = has_batch
        self.streams: dict[int, FakeStream] = {}
        self.calls: list[str] = []
        self.num_lockable = 1 << 30
        self.locked: dict[int, int] = {}
        self.refuses_copies = False
        self.may_lock = threading.Event()
        self.may_lock.set()
        self.device_offset = 0
        self.bound_threads: set[int] = set()

    def bind_thread(self) -> None:
        self.bound_threads.add(threading.get_ident())

    def make_stream(self) -> int:
        handle = len(self.streams) + 1
        self.streams[handle] = FakeStream(handle)
        return handle

    def destroy_stream(self, stream: int) -> None:
        self.streams[stream].end()

    def copy(self, target: int, source: int, size_bytes: int, stream: int) -> None:
        assert threading.get_ident() in self.bound_threads or size_bytes < 4096
        self.calls.append("copy")
        self._move(target, source, size_bytes, stream)

    def copy_batch(self, ranges: Ranges, direction: Direction, stream: int) -> None:
        self.calls.append("copy_batch")
        if self.refuses_copies:
            raise DeviceError("batched copy: CUDA_ERROR_INVALID_VALUE (1)")
        for target, source, length in zip(
            ranges.targets.tolist(), ranges.sources.tolist(), ranges.lengths.tolist(), strict=True
        ):
            self._move(target, source, length, stream)

    def lock(self, address: int, size_bytes: int) -> None:
        assert self.may_lock.wait(PATIENCE_S)
        if len(self.locked) >= self.num_lockable:
            raise DeviceError("cuMemHostRegister_v2: CUDA_ERROR_OUT_OF_MEMORY (2)")
        self.locked[address] = size_bytes

    def unlock(self, address: int) -> None:
        del self.locked[address]

    def device_address(self, address: int) -> int:
        return address + self.device_offset

    def _move(self, target: int, source: int, size_bytes: int, stream: int) -> None:
        self.streams[stream].enqueue(lambda: ctypes.memmove(target, source, size_bytes))


class FakeDevice:
    """See `Device`.

    Attributes:
        compute: the compute stream.
        is_broken: events report an error of the device's.
    """

    def __init__(self, *, has_batch: bool = True, has_kernel: bool = True) -> None:
        self.driver = FakeDriver(has_batch=has_batch)
        self.compute = FakeStream(0)
        self.is_broken = False
        self._has_kernel = has_kernel
        self._launch: Callable[..., None] | None = None

    def compute_stream(self) -> FakeStream:
        return self.compute

    def make_stream(self) -> FakeStream:
        return self.driver.streams[self.driver.make_stream()]

    def make_event(self) -> FakeEvent:
        return FakeEvent(self)

    def make_buffer(self, num_words: int) -> Buffer:
        host, partner = np.zeros((2, num_words), np.int64)
        return Buffer(host, host.ctypes.data, partner.ctypes.data, (host, partner))

    def load_kernel(self, word_bytes: int) -> bool:
        if self._has_kernel:
            self._launch = compile_kernel(word_bytes)
        return self._has_kernel

    def launch(self, arguments: RowArguments, stream: FakeStream) -> None:
        self.driver.calls.append("launch")
        launch = self._launch
        assert launch is not None
        shape = row_kernel.NUM_BLOCKS, row_kernel.THREADS_PER_BLOCK
        stream.enqueue(lambda: launch(*shape, *astuple(arguments)))

    def close(self) -> None:
        """End the compute stream."""
        self.compute.end()
