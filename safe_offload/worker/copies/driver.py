"""The calls of the CUDA and HIP drivers that neither torch nor cupy offers.

They go through `ctypes`, which lets other threads run during each call. CUDA's Python bindings turn
arrays of descriptors into lists, which costs more than the copy, and HIP has none.

Source: CUDA Driver API 12.8, sections Memory Management, Stream Management and Driver Entry Point
Access (cuda.h); HIP 7.1 runtime API, the same sections (hip_runtime_api.h).
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from safe_offload.errors import CaptureError, DeviceError
from safe_offload.worker.copies.base import Direction
from safe_offload.worker.copies.ranges import Ranges

DESCRIPTORS_MAX = 8192
"""Ranges of one batched copy: HIP faults beyond (vllm#43018), CUDA hung at 50,000 (vllm#49276)."""

CAPTURE_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED, hipStreamCaptureModeRelaxed
CAPTURE_UNSUPPORTED = 900  # CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED and HIP's
COPY_ANY_TO_ANY = 4  # hipMemcpyDefault: the addresses say where the memory is

CUDA_BATCH_VERSION = 12080
"""CUDA version of the requested `cuMemcpyBatchAsync`; 13.0 changed its arguments."""
HIP_BATCH_VERSIONS = range(71_300_000, 80_000_000)
"""HIP runtimes, as they number themselves, whose `hipMemcpyBatchAsync` is used: 7.13 to 7.x.
Before, it only loops over single copies; later, its arguments may change (rocm-systems#9098)."""
HIP_BATCH_CORRUPTS = ("gfx908",)
"""Batched device-to-host copies corrupt memory on an MI100 (rocm-systems#11662)."""

IN_STREAM_ORDER, AT_ANY_TIME = 1, 3  # CUmemcpySrcAccessOrder; slots are leased under a load (I1)
SOURCE_ORDER = {Direction.STORE: IN_STREAM_ORDER, Direction.LOAD: AT_ANY_TIME}

HIP_NAMES = ("libamdhip64.so.7", "libamdhip64.so.6", "libamdhip64.so")


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
    """A driver's calls, under one name for CUDA and HIP; an old driver has no `copy_batch`.

    Every method raises `DeviceError` if the driver lacks or refuses the call, and its kind
    `CaptureError` if a CUDA graph is being captured.
    """

    _copy_name: str
    _mode_name: str

    def __init__(self, library: Any) -> None:
        self._library = library
        self._copy = self._find(self._copy_name)
        self._exchange_mode = self._find(self._mode_name)
        self._batch = self._find_batch()
        self.has_batch = self._batch is not None
        # One entry for each range: some drivers are said to read that many (vllm#53860).
        self._first_ranges = np.zeros(DESCRIPTORS_MAX, dtype=np.uint64)

    def relax_thread(self) -> None:
        """Keep the calling thread from invalidating a capture of another one by its calls.

        `CUresult cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode *mode)`, CUDA 10.1;
        `hipError_t hipThreadExchangeStreamCaptureMode(hipStreamCaptureMode *mode)`, ROCm 4.3.
        """
        mode = _int(CAPTURE_RELAXED)
        self.check(self._mode_name, self._exchange_mode(ctypes.byref(mode)))

    def copy(self, target: int, source: int, size_bytes: int, stream: int) -> None:
        """Copy one range in the stream's order. With pageable memory it may wait.

        `CUresult cuMemcpyAsync(CUdeviceptr dst, CUdeviceptr src, size_t ByteCount, CUstream
        hStream)`, CUDA 4.0.
        """
        arguments = _pointer(target), _pointer(source), _size(size_bytes), _pointer(stream)
        self.check(self._copy_name, self._copy(*arguments))

    def copy_each(self, ranges: Ranges, stream: int) -> None:
        """Copy range by range."""
        for target, source, length in zip(
            ranges.targets.tolist(), ranges.sources.tolist(), ranges.lengths.tolist(), strict=True
        ):
            self.copy(target, source, length, stream)

    def copy_batch(self, ranges: Ranges, direction: Direction, stream: int) -> None:
        """Copy ranges, in no order among them; the arrays may be used again afterwards.

        There are at most `DESCRIPTORS_MAX`.

        `CUresult cuMemcpyBatchAsync(CUdeviceptr *dsts, CUdeviceptr *srcs, size_t *sizes, size_t
        count, CUmemcpyAttributes *attrs, size_t *attrsIdxs, size_t numAttrs, size_t *failIdx,
        CUstream hStream)`, CUDA 12.8; `hipMemcpyBatchAsync` takes the same, ROCm 7.1.
        """
        assert self._batch is not None
        assert len(ranges) <= DESCRIPTORS_MAX
        attributes = _CopyAttributes(source_order=SOURCE_ORDER[direction])
        failed = _size(0)
        status = self._batch(
            _pointer(ranges.targets.ctypes.data),
            _pointer(ranges.sources.ctypes.data),
            _pointer(ranges.lengths.ctypes.data),
            _size(len(ranges)),
            ctypes.byref(attributes),
            _pointer(self._first_ranges.ctypes.data),
            _size(1),
            ctypes.byref(failed),
            _pointer(stream),
        )
        self.check("batched copy", status)

    def check(self, what: str, status: int) -> None:
        """Raise what a status of `what` means; the runtime's numbers are the driver's."""
        if status:
            kind = CaptureError if status == CAPTURE_UNSUPPORTED else DeviceError
            raise kind(f"{what}: {(self._describe(status) or b'error').decode()} ({status})")

    def _find(self, name: str) -> Callable[..., int]:
        try:
            found: Callable[..., int] = getattr(self._library, name)
        except AttributeError as error:
            fix = "expected CUDA 12.0 or ROCm 6.0, or later"
            raise DeviceError(f"this driver has no {name}; {fix}") from error
        return found

    def _find_batch(self) -> Callable[..., int] | None:
        raise NotImplementedError

    def _describe(self, status: int) -> bytes | None:
        raise NotImplementedError


class CudaDriver(Driver):
    """libcuda; see `Driver`."""

    _copy_name = "cuMemcpyAsync"
    _mode_name = "cuThreadExchangeStreamCaptureMode"

    def _find_batch(self) -> Callable[..., int] | None:
        """Look the call up by version: under this name newer drivers export other arguments.

        `CUresult cuGetProcAddress_v2(const char *symbol, void **pfn, int cudaVersion, cuuint64_t
        flags, CUdriverProcAddressQueryResult *symbolStatus)`, CUDA 12.0.
        """
        address, found = _pointer(), _int()
        try:
            status = self._find("cuGetProcAddress_v2")(
                b"cuMemcpyBatchAsync",
                ctypes.byref(address),
                _int(CUDA_BATCH_VERSION),
                ctypes.c_uint64(0),
                ctypes.byref(found),
            )
        except DeviceError:
            return None
        return _BATCH_TYPE(address.value) if address.value and not status else None

    def _describe(self, status: int) -> bytes | None:
        """`CUresult cuGetErrorName(CUresult error, const char **pStr)`, CUDA 6.0."""
        text = ctypes.c_char_p()
        self._library.cuGetErrorName(_int(status), ctypes.byref(text))
        return text.value


class HipDriver(Driver):
    """libamdhip64, for an architecture such as "gfx942:sramecc+:xnack-"; see `Driver`."""

    _copy_name = "hipMemcpyAsync"
    _mode_name = "hipThreadExchangeStreamCaptureMode"

    def __init__(self, library: Any, architecture: str = "") -> None:
        self._architecture = architecture.partition(":")[0]
        super().__init__(library)

    def copy(self, target: int, source: int, size_bytes: int, stream: int) -> None:
        """See `Driver`.

        `hipError_t hipMemcpyAsync(void *dst, const void *src, size_t sizeBytes, hipMemcpyKind kind,
        hipStream_t stream)`, ROCm 1.6.
        """
        arguments = _size(size_bytes), _int(COPY_ANY_TO_ANY), _pointer(stream)
        self.check(self._copy_name, self._copy(_pointer(target), _pointer(source), *arguments))

    def _find_batch(self) -> Callable[..., int] | None:
        """`hipError_t hipRuntimeGetVersion(int *runtimeVersion)`, ROCm 1.6."""
        version = _int()
        try:
            self._find("hipRuntimeGetVersion")(ctypes.byref(version))
            found = self._find("hipMemcpyBatchAsync")
        except DeviceError:  # before ROCm 7.1
            return None
        is_sound = version.value in HIP_BATCH_VERSIONS
        return found if is_sound and self._architecture not in HIP_BATCH_CORRUPTS else None

    def _describe(self, status: int) -> bytes | None:
        """`const char *hipGetErrorName(hipError_t hip_error)`, ROCm 1.6."""
        describe = self._library.hipGetErrorName
        describe.restype = ctypes.c_char_p
        text: bytes | None = describe(_int(status))
        return text


def load_library(*, is_hip: bool, maps_path: Path = Path("/proc/self/maps")) -> Any:
    """Load the driver that torch uses: the file that is mapped, else by name; or raise DeviceError.

    A second copy of HIP's runtime in the process would know nothing of torch's device.
    """
    stem, names = ("libamdhip64", HIP_NAMES) if is_hip else ("libcuda", ("libcuda.so.1",))
    mapped = re.search(
        rf"/\S*/{stem}(?:-[^/\s]*)?\.so[^/\s]*$", maps_path.read_text(), re.MULTILINE
    )
    problems = []
    for name in (mapped[0], *names) if mapped else names:
        try:
            return ctypes.CDLL(name)
        except OSError as error:
            problems.append(str(error))
    raise DeviceError("the device's driver could not be loaded: " + "; ".join(problems))
