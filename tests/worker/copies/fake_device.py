"""A GPU of threads, as torch, cupy and the driver's library show it.

Device memory is host memory. Each stream is a thread, so that what is not ordered really races. The
row kernel is the real one, its source compiled by the C++ compiler and run thread by thread. What
has hidden defects of GPU code is modelled too: contexts and capture modes belong to threads, calls
that are unsafe in a capture are refused and invalidate it, allocations know their stream and may be
used until they are freed, driver calls can be refused, and libraries lack symbols.

Source: CUDA C++ Programming Guide 12.8, CUDA Graphs, Prohibited and Unhandled Operations; CUDA
Driver API 12.8, cuThreadExchangeStreamCaptureMode; torch 2.13, c10/cuda/CUDAFunctions.cpp.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import os
import queue
import signal
import subprocess
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from safe_offload.worker.copies.base import CopyPath
from safe_offload.worker.copies.device import Device
from safe_offload.worker.copies.driver import (
    _BATCH_TYPE,
    CAPTURE_RELAXED,
    CAPTURE_UNSUPPORTED,
    IN_STREAM_ORDER,
)
from safe_offload.worker.copies.rows import Bytes, Rows
from tests.worker.waiting import PATIENCE_S

INDEX = 1
"""Of the device: a thread that has not chosen one would use device 0."""
OUT_OF_MEMORY, INVALID_CONTEXT = 2, 201

CALLS = {CopyPath.KERNEL: "launch", CopyPath.BATCH: "copy_batch", CopyPath.EACH: "copy"}
"""What `FakeGpu.calls` and `refused` name the call of each way to copy."""

LIBC = ctypes.CDLL(None)
LIBC.signal.restype = ctypes.c_void_p
LIBC.signal.argtypes = (ctypes.c_int, ctypes.c_void_p)

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
def compile_kernel(kernel_source: str) -> Callable[..., None]:
    """The row kernel as a function of the host."""
    with tempfile.TemporaryDirectory() as folder:
        source, library = Path(folder, "kernel.cpp"), Path(folder, "kernel.so")
        source.write_text(CPP_PRELUDE + kernel_source + CPP_LAUNCH)
        command = ["g++", "-O1", "-Wall", "-Werror", "-shared", "-fPIC", "-fno-strict-aliasing"]
        subprocess.run([*command, str(source), "-o", str(library)], check=True)
        launch = ctypes.CDLL(str(library)).launch
    wide = [ctypes.c_ulonglong] * 8
    launch.argtypes = [ctypes.c_int, ctypes.c_int, *wide, ctypes.c_int]
    launch.restype = None
    return launch


def value(argument: Any) -> Any:
    """What a ctypes argument holds."""
    return getattr(argument, "value", argument)


class FakeStream:
    """A stream as torch shows it; a thread."""

    def __init__(self, gpu: FakeGpu, handle: int) -> None:
        self.cuda_stream = handle
        self.gpu = gpu
        self._has_ended = False
        self._work: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def enqueue(self, operation: Callable[[], object]) -> None:
        """Do something after everything so far."""
        if self._has_ended:
            self.gpu.violations.append("a stream is given work after its end")
        self._work.put(operation)

    def wait_event(self, event: FakeEvent) -> None:
        point = event.point
        assert point is not None, "waiting for an event that was never recorded does nothing"
        self.gpu.runtime_call("wait_event")
        self.enqueue(lambda: self.gpu.wait(point, "a stream"))

    def query(self) -> bool:
        self.gpu.runtime_call("query", is_unsafe=True)
        return True

    def synchronize(self) -> None:
        """Wait until everything so far is done."""
        done = threading.Event()
        self.enqueue(done.set)
        assert done.wait(PATIENCE_S)

    def end(self) -> None:
        """End the thread, everything done."""
        self._has_ended = True
        self._work.put(None)
        self._thread.join(PATIENCE_S)
        if self._thread.is_alive():
            self.gpu.violations.append("a stream does not end")

    def _run(self) -> None:
        while (operation := self._work.get()) is not None:
            operation()


class FakeEvent:
    """An event as torch shows it."""

    def __init__(self, gpu: FakeGpu) -> None:
        self.point: threading.Event | None = None
        self._gpu = gpu

    def record(self, stream: FakeStream) -> None:
        self._gpu.runtime_call("record")
        self.point = threading.Event()
        stream.enqueue(self.point.set)

    def synchronize(self) -> None:
        assert self.point is not None
        self._gpu.runtime_call("synchronize", is_unsafe=True)
        self._gpu.wait(self.point, "a thread")
        if self._gpu.is_broken:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")


class Capture:
    """A CUDA graph that is being captured."""

    invalidated_by = ""  # the first unsafe call of a thread that was not relaxed


class ThreadState(threading.local):
    """What the driver keeps for each thread."""

    device = 0
    has_context = False
    capture_mode = 0  # CU_STREAM_CAPTURE_MODE_GLOBAL
    is_in_pool = False
    stream: FakeStream | None = None
    cupy_stream: FakeStream | None = None
    cupy_device = 0


class FakeGpu:
    """One GPU. The thread that makes it has used it already, as vLLM's has.

    `may_lock`, `may_unlock`: held back while they are not set, the first lock excepted; `delay_s`,
    `lock_delay_s`: how long every copy, and every lock, takes.
    """

    def __init__(
        self,
        *missing: str,  # symbols that the driver's library lacks
        is_hip: bool = False,  # HIP instead of CUDA
        hip_version: int = 71_300_000,  # as the runtime numbers itself
        architecture: str = "gfx942:sramecc+:xnack-",  # of a HIP device
        has_cupy: bool = True,  # whether cupy is installed
    ) -> None:
        self.calls: list[str] = []  # names of the copying calls so far
        # Calls that fail, with their status: copy, copy_batch, launch, lock, empty.
        self.refused: dict[str, int] = {}
        self.num_lockable = 1 << 30  # calls of `lock` that succeed
        self.locked: dict[int, int] = {}  # address and size of what is locked
        self.may_lock, self.may_unlock = threading.Event(), threading.Event()
        self.may_lock.set()
        self.may_unlock.set()
        # (call, is it a store) whose last byte arrives changed.
        self.corrupted: set[tuple[str, bool]] = set()
        self.is_broken = False  # events report an error of the device's
        self.delay_s = self.lock_delay_s = 0.0
        # How much longer calls of a name take, on the stream.
        self.call_delays_s: dict[str, float] = {}
        self.device_offset = 0  # between a host address and the one that kernels see
        self.has_read_only_home = False  # cupy cannot keep compiled kernels there
        # What a real device would have taken for an access of freed or foreign memory, and waits
        # that did not end and would have lasted for ever there.
        self.violations: list[str] = []
        # Sizes of device memory that was allocated from the pool of a caller (`pool`).
        self.pooled: list[int] = []
        # Called with the stream by a thread that gives it a copy, before the driver answers.
        self.on_give: Callable[[FakeStream], None] = lambda stream: None
        self.capture: Capture | None = None
        self.streams: dict[int, FakeStream] = {}
        self.missing = missing
        self.is_hip = is_hip
        self.hip_version = hip_version
        self.has_cupy = has_cupy
        self.thread = ThreadState()
        self.thread.device, self.thread.has_context = INDEX, True
        self.allocations: dict[int, tuple[int, FakeStream]] = {}
        self._kept: list[Any] = []
        self.compute = self.make_stream()  # the compute stream
        self.properties = SimpleNamespace(
            gcnArchName=architecture, pci_domain_id=0, pci_bus_id=7, pci_device_id=0
        )
        self.torch = make_torch(self)
        self.library = (FakeHip if is_hip else FakeCuda)(self)

    def open(self) -> Device:
        """The device as the backend uses it."""
        return Device(
            torch.device("cuda", INDEX),
            torch_module=self.torch,
            library=self.library,
            import_cupy=self.import_cupy,
        )

    def wait(self, point: threading.Event, waiting: str) -> None:
        """Wait for an event. A real device waits for ever: all that comes after is out of order."""
        if not point.wait(PATIENCE_S):
            self.violations.append(f"{waiting} waits for an event that does not come")

    def close(self) -> None:
        """End all streams, when nothing uses them any more."""
        for stream in self.streams.values():
            stream.end()

    def make_stream(self) -> FakeStream:
        handle = len(self.streams) + 1
        self.streams[handle] = FakeStream(self, handle)
        return self.streams[handle]

    def synchronize(self) -> None:
        """Wait until every stream has done everything so far."""
        for stream in list(self.streams.values()):
            stream.synchronize()

    @contextlib.contextmanager
    def capturing(self) -> Iterator[Capture]:
        """A graph is being captured, in torch's and vLLM's mode: global."""
        self.capture = Capture()
        try:
            yield self.capture
        finally:
            self.capture = None

    @contextlib.contextmanager
    def pool(self) -> Iterator[None]:
        """What the calling thread allocates comes from a pool, as in vLLM's sleep mode."""
        self.thread.is_in_pool = True
        try:
            yield
        finally:
            self.thread.is_in_pool = False

    # ---- what every call meets -----------------------------------------------------------------

    def status(self, name: str, *, is_unsafe: bool = False) -> int:
        """What a call is answered for reasons of its thread, or because a test wants it refused."""
        is_relaxed = self.thread.capture_mode == CAPTURE_RELAXED
        if is_unsafe and self.capture is not None and not is_relaxed:
            self.capture.invalidated_by = self.capture.invalidated_by or name
            return CAPTURE_UNSUPPORTED
        return self.refused.get(name, 0)

    def driver_call(self, name: str) -> int:
        """A call of the driver: it needs a context."""
        return self.status(name) if self.thread.has_context else INVALID_CONTEXT

    def runtime_call(self, name: str, *, is_unsafe: bool = False, raises: bool = True) -> int:
        """A call of the runtime: it takes the context of the thread's device, which may be 0."""
        self.thread.has_context = True
        if self.thread.device != INDEX:
            self.violations.append(f"{name} on device {self.thread.device}")
        status = self.status(name, is_unsafe=is_unsafe)
        if status and raises:
            raise RuntimeError(f"CUDA error {status} in {name}")
        return status

    # ---- memory --------------------------------------------------------------------------------

    def empty(self, size: int, *, dtype: torch.dtype, device: Any = None, **_: Any) -> torch.Tensor:
        """Memory of the device, or of the host if none is named; never given out twice."""
        tensor = torch.zeros(size, dtype=dtype)
        if device is not None:
            self.runtime_call("empty", is_unsafe=True)
            if self.thread.is_in_pool:
                self.pooled.append(tensor.nbytes)
        self._kept.append(tensor.untyped_storage())  # so that no address comes twice
        address = tensor.data_ptr()
        self.allocations[address] = (tensor.nbytes, self.thread.stream or self.compute)
        weakref.finalize(tensor, self.allocations.pop, address)
        return tensor

    def check_cupy_device(self, name: str) -> None:
        """cupy works on the device that is current in its own eyes."""
        if self.thread.cupy_device != INDEX:
            self.violations.append(f"{name} on cupy's device {self.thread.cupy_device}")

    def is_allocated(self, address: int) -> bool:
        """Whether a buffer lies there."""
        return any(a <= address < a + size for a, (size, _) in list(self.allocations.items()))

    def is_locked(self, address: int) -> bool:
        """Whether page-locked memory lies there."""
        return any(a <= address < a + size for a, size in list(self.locked.items()))

    def check_use(self, address: int, stream: FakeStream | None = None) -> None:
        """Note it if an address of ours is not allocated, or belongs to another stream."""
        for start, (size_bytes, owner) in list(self.allocations.items()):
            if start <= address < start + size_bytes:
                if stream is not None and owner is not stream:
                    self.violations.append("a buffer is used on another stream than its own")
                return
        self.violations.append("a buffer is used after it was freed")

    def finish(self, name: str, is_store: bool, target: int) -> None:
        """End a copy, and change a byte that it has written if that is wanted."""
        if (name, is_store) in self.corrupted:
            byte = ctypes.c_uint8.from_address(target)
            byte.value ^= 0x80

    # ---- page-locking, as torch shows it -------------------------------------------------------

    def host_register(self, address: int, size_bytes: int, flags: int) -> int:
        assert flags == 3
        time.sleep(self.lock_delay_s)
        if self.locked:
            assert self.may_lock.wait(PATIENCE_S)
        status = self.runtime_call("lock", is_unsafe=True, raises=False)
        if not status and len(self.locked) >= self.num_lockable:
            status = OUT_OF_MEMORY
        if not status:
            self.locked[address] = size_bytes
        return status

    def host_unregister(self, address: int) -> int:
        assert self.may_unlock.wait(PATIENCE_S)
        if status := self.runtime_call("unlock", is_unsafe=True, raises=False):
            return status
        del self.locked[address]
        return 0

    # ---- cupy ----------------------------------------------------------------------------------

    def import_cupy(self) -> Any:
        if not self.has_cupy:
            raise ImportError("No module named 'cupy'")
        stream = SimpleNamespace(from_external=self._cupy_stream)
        runtime = SimpleNamespace(
            pointerGetAttributes=lambda address: SimpleNamespace(
                devicePointer=address + self.device_offset if self.locked else 0
            )
        )
        cuda = SimpleNamespace(Device=self._cupy_device, Stream=stream, runtime=runtime)
        return SimpleNamespace(RawKernel=functools.partial(FakeKernel, self), cuda=cuda)

    @contextlib.contextmanager
    def _cupy_device(self, index: int) -> Iterator[None]:
        before, self.thread.cupy_device = self.thread.cupy_device, index
        yield
        self.thread.cupy_device = before

    @contextlib.contextmanager
    def _cupy_stream(self, stream: FakeStream) -> Iterator[None]:
        self.thread.cupy_stream = stream
        yield
        self.thread.cupy_stream = None


class FakeKernel:
    """cupy's RawKernel."""

    def __init__(self, gpu: FakeGpu, source: str, name: str) -> None:
        self._gpu = gpu
        self._source = source

    def compile(self) -> None:
        """Compile; as NVRTC does, take signals and give them back another way."""
        self._gpu.check_cupy_device("compile")
        self._gpu.runtime_call("compile", is_unsafe=True)
        if self._gpu.has_read_only_home and os.environ.get("CUPY_CACHE_IN_MEMORY") != "1":
            raise PermissionError(errno.EACCES, "Permission denied", "/home/nobody/.cupy")
        for number in (signal.SIGINT, signal.SIGTERM):
            LIBC.signal(number, LIBC.signal(number, ctypes.c_void_p(signal.SIG_IGN)))
        compile_kernel(self._source)

    def __call__(self, grid: tuple[int], block: tuple[int], arguments: tuple[Any, ...]) -> None:
        gpu, stream = self._gpu, self._gpu.thread.cupy_stream
        assert stream is not None
        gpu.calls.append("launch")
        gpu.check_cupy_device("launch")
        gpu.on_give(stream)
        gpu.runtime_call("launch")
        numbers = [int(argument) for argument in arguments]
        launch, ids = compile_kernel(self._source), numbers[1:3]

        def run() -> None:
            time.sleep(gpu.delay_s + gpu.call_delays_s.get("launch", 0.0))
            for address in ids:
                gpu.check_use(address, stream)
            launch(grid[0], block[0], *numbers)
            self._finish(numbers)

        stream.enqueue(run)

    def _finish(self, numbers: list[int]) -> None:
        segments, block_ids, slot_ids, *_, slots_per_slab, slab_bytes, is_store = numbers
        words = (ctypes.c_uint64 * 4).from_address(segments)
        block, slot = (ctypes.c_int64.from_address(ids).value for ids in (block_ids, slot_ids))
        slab, row = divmod(slot, slots_per_slab)
        in_slot = words[2] + slab * slab_bytes + row * words[3]
        target = in_slot if is_store else words[0] + block * words[1]
        self._gpu.finish("launch", bool(is_store), target)


class FakeLibrary:
    """Functions of a driver's library under their own names."""

    def __init__(self, gpu: FakeGpu) -> None:
        self._gpu = gpu

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name in self._gpu.missing or not hasattr(type(self), f"do_{name}"):
            raise AttributeError(name)
        return getattr(self, f"do_{name}")

    def copy(self, target: Any, source: Any, size_bytes: Any, stream: Any) -> int:
        gpu, lane = self._gpu, self._gpu.streams[value(stream)]
        gpu.calls.append("copy")
        if status := gpu.driver_call("copy"):
            return status
        numbers = value(target), value(source), value(size_bytes)
        is_upload = gpu.is_allocated(numbers[0]) or gpu.is_allocated(numbers[1])
        if not is_upload:
            gpu.on_give(lane)

        def run() -> None:
            time.sleep(gpu.delay_s)
            if is_upload:
                gpu.check_use(numbers[0], lane)
                gpu.check_use(numbers[1])
            ctypes.memmove(*numbers)
            if not is_upload:
                gpu.finish("copy", gpu.is_locked(numbers[0]), numbers[0])

        lane.enqueue(run)
        return 0

    def batch(self, targets, sources, sizes, count, attributes, firsts, num, failed, stream) -> int:
        gpu = self._gpu
        gpu.calls.append("copy_batch")
        gpu.on_give(gpu.streams[value(stream)])
        if status := gpu.driver_call("copy_batch"):
            return status
        assert value(num) == 1
        assert not any((ctypes.c_uint64 * value(count)).from_address(value(firsts)))
        pointer = getattr(attributes, "_obj", None)
        address = value(attributes) if pointer is None else ctypes.addressof(pointer)
        is_store = ctypes.c_uint.from_address(address).value == IN_STREAM_ORDER
        words = [
            list((ctypes.c_uint64 * value(count)).from_address(value(a)))
            for a in (targets, sources, sizes)
        ]

        def run() -> None:
            time.sleep(gpu.delay_s + gpu.call_delays_s.get("copy_batch", 0.0))
            for numbers in zip(*words, strict=True):
                ctypes.memmove(*numbers)
            gpu.finish("copy_batch", is_store, words[0][0])

        gpu.streams[value(stream)].enqueue(run)
        return 0

    def exchange_mode(self, mode: Any) -> int:
        mode._obj.value, self._gpu.thread.capture_mode = (
            self._gpu.thread.capture_mode,
            mode._obj.value,
        )
        return 0


class FakeCuda(FakeLibrary):
    """libcuda."""

    def __init__(self, gpu: FakeGpu) -> None:
        super().__init__(gpu)
        self._batch = _BATCH_TYPE(self.batch)

    def do_cuGetProcAddress_v2(self, name, address, version, flags, found):
        assert (name, value(version)) == (b"cuMemcpyBatchAsync", 12080)
        if "cuMemcpyBatchAsync" in self._gpu.missing:
            return 500
        address._obj.value = ctypes.cast(self._batch, ctypes.c_void_p).value
        return 0

    def do_cuMemcpyAsync(self, *arguments):
        return self.copy(*arguments)

    def do_cuThreadExchangeStreamCaptureMode(self, mode):
        return self.exchange_mode(mode)

    def do_cuGetErrorName(self, status, text):
        text._obj.value = b"CUDA_ERROR_FAKE"
        return 0


class FakeHip(FakeLibrary):
    """libamdhip64."""

    def do_hipMemcpyAsync(self, target, source, size_bytes, kind, stream):
        assert value(kind) == 4
        return self.copy(target, source, size_bytes, stream)

    def do_hipMemcpyBatchAsync(self, *arguments):
        return self.batch(*arguments)

    def do_hipThreadExchangeStreamCaptureMode(self, mode):
        return self.exchange_mode(mode)

    def do_hipRuntimeGetVersion(self, version):
        version._obj.value = self._gpu.hip_version
        return 0

    @property
    def do_hipGetErrorName(self):
        return lambda status: b"hipErrorFake"


class FakeRows:
    """See `Rows`: what is done to blocks is done in the order of the compute stream."""

    def __init__(self, gpu: FakeGpu, device: Device, rows: Rows) -> None:
        self._gpu = gpu
        self._device = device
        self._rows = rows

    def bind_thread(self) -> None:
        self._device.bind_thread()
        self._gpu.synchronize()

    def read(self, block_ids: Sequence[int]) -> Bytes:
        self._gpu.compute.synchronize()
        return self._rows.read(block_ids)

    def prepare(self, block_ids: Sequence[int], content: Bytes) -> Callable[[], None]:
        write = self._rows.prepare(block_ids, content)
        return lambda: self._gpu.compute.enqueue(write)


def make_torch(gpu: FakeGpu) -> Any:
    """torch, as far as a device uses it."""

    def set_device(device: torch.device) -> None:
        # As torch does: nothing if it is the current one, which in a new thread is device 0.
        if gpu.thread.device != device.index:
            gpu.thread.device, gpu.thread.has_context = device.index, True

    @contextlib.contextmanager
    def use_stream(stream: FakeStream) -> Iterator[None]:
        before, gpu.thread.stream = gpu.thread.stream, stream
        yield
        gpu.thread.stream = before

    cudart = SimpleNamespace(
        cudaHostRegister=gpu.host_register, cudaHostUnregister=gpu.host_unregister
    )
    cuda = SimpleNamespace(
        Stream=lambda device: gpu.make_stream(),
        Event=lambda **_: FakeEvent(gpu),
        stream=use_stream,
        set_device=set_device,
        current_stream=lambda device: gpu.thread.stream or gpu.compute,
        cudart=lambda: cudart,
        get_device_properties=lambda device: gpu.properties,
        synchronize=lambda device=None: gpu.synchronize(),
    )
    version = SimpleNamespace(
        hip="7.13" if gpu.is_hip else None, cuda=None if gpu.is_hip else "13.0"
    )
    return SimpleNamespace(cuda=cuda, version=version, empty=gpu.empty)
