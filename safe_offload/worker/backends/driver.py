"""The calls of the CUDA and HIP drivers that torch and cupy do not offer.

Batched copies, page-locking in place, streams that nobody shares. They go through `ctypes`, which
lets other threads run during each call; the Python bindings of CUDA turn arrays of descriptors into
lists, which costs more than the copy. Both drivers have the same face here.

Source: CUDA Driver API 12.8, sections Memory Management, Stream Management and Driver Entry Point
Access; HIP 7.1 runtime API, the same sections.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from safe_offload.errors import DeviceError
from safe_offload.worker.backends.base import Direction
from safe_offload.worker.backends.ranges import Ranges

DESCRIPTORS_MAX = 8192
"""Ranges of one batched copy: HIP faults beyond (vllm#53860), CUDA hung at 50,000 (vllm#49276)."""

STREAM_NON_BLOCKING = 1
LOCK_PORTABLE_AND_MAPPED = 3
COPY_ANY_TO_ANY = 4
"""hipMemcpyDefault: the addresses say where the memory is."""

CUDA_BATCH_VERSION = 12080
"""CUDA version whose `cuMemcpyBatchAsync` is asked for; 13.0 changed its arguments."""
HIP_VERSION_OF_ATTRIBUTES = (7, 13)
"""HIP runtimes before it refuse attributes (vLLM 0.32.0, simple_kv_offload/cuda_mem_ops.py)."""

# When a source may be read: see CUmemcpySrcAccessOrder.
IN_STREAM_ORDER, AT_ANY_TIME = 1, 3
SOURCE_ORDER = {
    Direction.STORE: IN_STREAM_ORDER,
    # Slots do not change under a load: they are leased (I1).
    Direction.LOAD: AT_ANY_TIME,
}

HIP_LIBRARIES = ("libamdhip64.so", "libamdhip64.so.7", "libamdhip64.so.6")


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_uint), ("id", ctypes.c_int))


class _CopyAttributes(ctypes.Structure):
    """CUmemcpyAttributes; HIP's is the same."""

    _fields_ = (
        ("source_order", ctypes.c_uint),
        ("source_hint", _Location),
        ("target_hint", _Location),
        ("flags", ctypes.c_uint),
    )


_pointer, _size, _int, _uint = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_uint
# Targets, sources, sizes, count, attributes, first indices of these, their count, failed, stream.
_BATCH_TYPE = ctypes.CFUNCTYPE(
    _uint, _pointer, _pointer, _pointer, _size, _pointer, _pointer, _size, _pointer, _pointer
)


class Driver:
    """A driver's calls, under one name for both.

    Every method raises `DeviceError` if the driver refuses the call.

    Args:
        library: the loaded library; the calling thread has made the device current.

    Attributes:
        name: for messages.
        has_batch: whether `copy_batch` works: not with a driver that is too old.
    """

    name: str
    _names: Mapping[str, str]
    """What each call is named in the library."""
    _num_attributes = 1

    def __init__(self, library: Any) -> None:
        self._library = library
        lowest = _int()
        highest = _int()
        self._call("priorities", ctypes.byref(lowest), ctypes.byref(highest))
        self._priority = lowest.value
        self._batch = self._find_batch()
        self.has_batch = self._batch is not None

    def bind_thread(self) -> None:
        """Make the device current in the calling thread; costs next to nothing the second time."""
        raise NotImplementedError

    def make_stream(self) -> int:
        """A stream of the lowest priority that nobody else uses; returns its handle."""
        stream = _pointer()
        arguments = _uint(STREAM_NON_BLOCKING), _int(self._priority)
        self._call("make_stream", ctypes.byref(stream), *arguments)
        return int(stream.value or 0)

    def destroy_stream(self, stream: int) -> None:
        """Give a stream back; what it still has to do is done."""
        self._call("destroy_stream", _pointer(stream))

    def copy(self, target: int, source: int, size_bytes: int, stream: int) -> None:
        """Copy one range in the stream's order. With pageable memory it may wait."""
        self._call("copy", _pointer(target), _pointer(source), _size(size_bytes), _pointer(stream))

    def copy_each(self, ranges: Ranges, stream: int) -> None:
        """Copy range by range."""
        for target, source, length in zip(
            ranges.targets.tolist(), ranges.sources.tolist(), ranges.lengths.tolist(), strict=True
        ):
            self.copy(target, source, length, stream)

    def copy_batch(self, ranges: Ranges, direction: Direction, stream: int) -> None:
        """Copy all ranges by as few calls as the driver stands, in no order among them.

        The arrays may be used again when this returns.
        """
        assert self._batch is not None
        attributes = _CopyAttributes(source_order=SOURCE_ORDER[direction])
        first, failed = _size(0), _size(0)
        for start in range(0, len(ranges), DESCRIPTORS_MAX):
            status = self._batch(
                _pointer(ranges.targets[start:].ctypes.data),
                _pointer(ranges.sources[start:].ctypes.data),
                _pointer(ranges.lengths[start:].ctypes.data),
                _size(min(DESCRIPTORS_MAX, len(ranges) - start)),
                ctypes.byref(attributes),
                ctypes.byref(first),
                _size(self._num_attributes),
                ctypes.byref(failed),
                _pointer(stream),
            )
            self._check("batched copy", status)

    def lock(self, address: int, size_bytes: int) -> None:
        """Page-lock memory in place, mapped for the device."""
        flags = _uint(LOCK_PORTABLE_AND_MAPPED)
        self._call("lock", _pointer(address), _size(size_bytes), flags)

    def unlock(self, address: int) -> None:
        """Undo `lock`."""
        self._call("unlock", _pointer(address))

    def device_address(self, address: int) -> int:
        """The address under which kernels find locked memory."""
        found = _pointer()
        self._call("device_address", ctypes.byref(found), _pointer(address), _uint(0))
        return int(found.value or 0)

    def _find_batch(self) -> Callable[..., int] | None:
        raise NotImplementedError

    def _describe(self, status: int) -> bytes | None:
        raise NotImplementedError

    def _call(self, what: str, *arguments: object) -> None:
        name = self._names[what]
        try:
            function = getattr(self._library, name)
        except AttributeError as error:
            fix = "expected CUDA 12.0 or ROCm 6.0, or later"
            raise DeviceError(f"this driver has no {name}; {fix}") from error
        self._check(name, function(*arguments))

    def _check(self, name: str, status: int) -> None:
        if status:
            text = (self._describe(status) or b"error").decode()
            raise DeviceError(f"{name}: {text} ({status})")


class CudaDriver(Driver):
    """libcuda; see `Driver`."""

    name = "CUDA"
    _names = MappingProxyType(
        {
            "priorities": "cuCtxGetStreamPriorityRange",
            "make_stream": "cuStreamCreateWithPriority",
            "destroy_stream": "cuStreamDestroy_v2",
            "copy": "cuMemcpyAsync",
            "lock": "cuMemHostRegister_v2",
            "unlock": "cuMemHostUnregister",
            "device_address": "cuMemHostGetDevicePointer_v2",
            "get_context": "cuCtxGetCurrent",
            "set_context": "cuCtxSetCurrent",
            "find": "cuGetProcAddress_v2",
        }
    )

    def __init__(self, library: Any) -> None:
        super().__init__(library)
        self._context = _pointer()
        self._call("get_context", ctypes.byref(self._context))

    def bind_thread(self) -> None:
        """See `Driver`."""
        self._call("set_context", self._context)

    def _find_batch(self) -> Callable[..., int] | None:
        """Look the call up by version: under this name newer drivers export other arguments."""
        address, found = _pointer(), _int()
        try:
            self._call(
                "find",
                b"cuMemcpyBatchAsync",
                ctypes.byref(address),
                _int(CUDA_BATCH_VERSION),
                ctypes.c_uint64(0),
                ctypes.byref(found),
            )
        except DeviceError:
            return None
        return _BATCH_TYPE(address.value) if address.value else None

    def _describe(self, status: int) -> bytes | None:
        text = ctypes.c_char_p()
        self._library.cuGetErrorName(_int(status), ctypes.byref(text))
        return text.value


class HipDriver(Driver):
    """libamdhip64; see `Driver`."""

    name = "HIP"
    _names = MappingProxyType(
        {
            "priorities": "hipDeviceGetStreamPriorityRange",
            "make_stream": "hipStreamCreateWithPriority",
            "destroy_stream": "hipStreamDestroy",
            "copy": "hipMemcpyAsync",
            "lock": "hipHostRegister",
            "unlock": "hipHostUnregister",
            "device_address": "hipHostGetDevicePointer",
            "get_device": "hipGetDevice",
            "set_device": "hipSetDevice",
            "version": "hipRuntimeGetVersion",
        }
    )

    def __init__(self, library: Any) -> None:
        super().__init__(library)
        self._device, version = _int(), _int()
        self._call("get_device", ctypes.byref(self._device))
        self._call("version", ctypes.byref(version))
        # 7.13.0 is written 71300000.
        major, minor = version.value // 10_000_000, version.value // 100_000 % 100
        self._num_attributes = int((major, minor) >= HIP_VERSION_OF_ATTRIBUTES)

    def bind_thread(self) -> None:
        """See `Driver`."""
        self._call("set_device", self._device)

    def copy(self, target: int, source: int, size_bytes: int, stream: int) -> None:
        """See `Driver`."""
        arguments = _size(size_bytes), _int(COPY_ANY_TO_ANY), _pointer(stream)
        self._call("copy", _pointer(target), _pointer(source), *arguments)

    def _find_batch(self) -> Callable[..., int] | None:
        try:
            found: Callable[..., int] = self._library.hipMemcpyBatchAsync
        except AttributeError:  # before ROCm 7.1
            return None
        return found

    def _describe(self, status: int) -> bytes | None:
        describe = self._library.hipGetErrorName
        describe.restype = ctypes.c_char_p
        text: bytes | None = describe(_int(status))
        return text


def load_driver(*, is_hip: bool) -> Driver:
    """The driver of the calling thread's device.

    Args:
        is_hip: whether torch was built for HIP; CUDA otherwise.

    Raises:
        DeviceError: it cannot be loaded, or is too old.
    """
    problems = []
    # torch has mapped the library already, so that any of its names will do.
    for name in HIP_LIBRARIES if is_hip else ("libcuda.so.1",):
        try:
            library = ctypes.CDLL(name)
        except OSError as error:
            problems.append(str(error))
        else:
            return HipDriver(library) if is_hip else CudaDriver(library)
    raise DeviceError("the device's driver could not be loaded: " + "; ".join(problems))
