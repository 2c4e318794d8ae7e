"""The drivers' calls, over libraries that are Python objects: names, arguments, chunks, errors."""

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from safe_offload.errors import CaptureError, DeviceError
from safe_offload.worker.copies import driver
from safe_offload.worker.copies.base import Direction
from safe_offload.worker.copies.driver import DESCRIPTORS_MAX, CudaDriver, HipDriver
from safe_offload.worker.copies.lane import PIECE_RANGES
from safe_offload.worker.copies.ranges import Ranges
from tests.worker.copies.fake_device import FakeGpu, value

STREAM = 0x5000
HIP_7_2_3, HIP_7_13, HIP_8_0 = 70_200_003, 71_300_000, 80_000_000


class FakeLibrary:
    """Functions of both drivers under their own names; every call is kept."""

    def __init__(self, *missing: str, hip_version: int = HIP_7_13) -> None:
        self.calls: list[tuple[str, tuple[Any, ...]]] = []  # name and arguments
        self.status: dict[str, int] = {}  # what each call named here answers, 0 if it is not named
        # For each batched copy its sources, sizes, source order and indices of attributes.
        self.batches: list[tuple[list[int], list[int], int, list[int]]] = []
        self.batch_address: int | None = None
        self._missing = missing
        self._hip_version = hip_version
        self._batch = driver._BATCH_TYPE(self._see_batch)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name in self._missing or not name.startswith(("cu", "hip")):
            raise AttributeError(name)

        def function(*arguments: Any) -> Any:
            self.calls.append((name, tuple(map(value, arguments))))
            if name == "cuGetProcAddress_v2":
                assert (arguments[0], value(arguments[2])) == (b"cuMemcpyBatchAsync", 12080)
                found = ctypes.cast(self._batch, ctypes.c_void_p).value
                arguments[1]._obj.value = found if self.batch_address is None else 0
            if name == "cuGetErrorName":
                arguments[1]._obj.value = b"CUDA_ERROR_TEST"
            if name == "hipRuntimeGetVersion":
                arguments[0]._obj.value = self._hip_version
            if name == "hipGetErrorName":
                return b"hipErrorTest"
            if name == "hipMemcpyBatchAsync":
                return self._see_batch(*arguments)
            return self.status.get(name, 0)

        return function

    def _see_batch(self, targets, sources, sizes, count, attributes, firsts, num, failed, stream):
        number = int(value(count))
        words = (ctypes.c_uint64 * number).from_address
        order = getattr(attributes, "_obj", None)
        if order is None:
            order = driver._CopyAttributes.from_address(value(attributes))
        assert (value(stream), value(num)) == (STREAM, 1)
        lists = (list(words(value(array))) for array in (sources, sizes, firsts))
        source, size, first = lists
        self.batches.append((source, size, order.source_order, first))
        return self.status.get("batch", 0)


DRIVERS = [CudaDriver, HipDriver]


@pytest.fixture(params=DRIVERS, ids=["CUDA", "HIP"])
def both(request):
    library = FakeLibrary()
    return library, request.param(library)


def ranges_of(count: int) -> Ranges:
    numbers = np.arange(count, dtype=np.uint64)
    return Ranges(numbers + np.uint64(1 << 40), numbers, numbers % np.uint64(7) + np.uint64(1))


def test_a_copy_reaches_the_library_with_its_arguments():
    """HIP is told that the addresses say where the memory is."""
    library = FakeLibrary()
    CudaDriver(library).copy(1, 2, 3, STREAM)
    HipDriver(library).copy(1, 2, 3, STREAM)
    cuda, hip = (call for call in library.calls if "MemcpyAsync" in call[0])
    assert cuda == ("cuMemcpyAsync", (1, 2, 3, STREAM))
    assert hip == ("hipMemcpyAsync", (1, 2, 3, 4, STREAM))


def test_a_thread_is_relaxed_by_the_mode_of_that_name(both):
    library, subject = both
    subject.relax_thread()
    name, arguments = library.calls[-1]
    assert name.endswith("ThreadExchangeStreamCaptureMode")
    assert arguments[0]._obj.value == 2


@pytest.mark.parametrize(("status", "is_capture"), [(2, False), (900, True)])
def test_a_refused_call_says_which_and_why(both, status, is_capture):
    """What is refused because of a capture may work later."""
    library, subject = both
    library.status |= {"cuMemcpyAsync": status, "hipMemcpyAsync": status}
    why = rf"(cu|hip)MemcpyAsync: .*(_TEST|Test) \({status}\)"
    with pytest.raises(DeviceError, match=why) as caught:
        subject.copy(1, 2, 3, STREAM)
    assert isinstance(caught.value, CaptureError) is is_capture


@pytest.mark.parametrize("count", [1, DESCRIPTORS_MAX])
def test_a_batch_is_one_call(both, count):
    library, subject = both
    ranges = ranges_of(count)
    subject.copy_batch(ranges, Direction.STORE, STREAM)
    ((sources, sizes, _, _),) = library.batches
    assert sources == ranges.sources.tolist()
    assert sizes == ranges.lengths.tolist()


def test_a_piece_is_no_longer_than_what_the_driver_takes():
    assert PIECE_RANGES <= DESCRIPTORS_MAX


def test_each_range_has_an_index_and_stores_read_in_stream_order(both):
    """Whether one index is enough or each range needs one is not agreed upon (vllm#53860)."""
    library, subject = both
    subject.copy_batch(ranges_of(2), Direction.STORE, STREAM)
    subject.copy_batch(ranges_of(5), Direction.LOAD, STREAM)
    assert [(order, first) for _, _, order, first in library.batches] == [(1, [0, 0]), (3, [0] * 5)]


@pytest.mark.parametrize(
    ("version", "architecture", "expected"),
    [
        (0, "gfx942", False),
        (HIP_7_2_3, "gfx942", False),
        (HIP_7_13, "gfx942:sramecc+:xnack-", True),
        (HIP_7_13, "gfx908:sramecc+:xnack-", False),
        (HIP_8_0, "gfx942", False),
    ],
)
def test_hip_copies_by_batch_only_where_that_is_known_to_be_sound(version, architecture, expected):
    library = FakeLibrary(hip_version=version)
    assert HipDriver(library, architecture).has_batch is expected


def test_a_batch_that_is_refused_raises_what_the_status_means(both):
    library, subject = both
    library.status["batch"] = 700
    with pytest.raises(DeviceError, match=r"batched copy: .* \(700\)"):
        subject.copy_batch(ranges_of(3), Direction.STORE, STREAM)


@pytest.mark.parametrize(
    ("missing", "kind"),
    [
        ("hipMemcpyBatchAsync", HipDriver),
        ("hipRuntimeGetVersion", HipDriver),
        ("cuGetProcAddress_v2", CudaDriver),
    ],
)
def test_without_the_batched_copy_the_rest_works(missing, kind):
    library = FakeLibrary(missing)
    subject = kind(library)
    assert not subject.has_batch
    subject.copy_each(ranges_of(3), STREAM)
    assert len([name for name, _ in library.calls if "emcpyAsync" in name]) == 3


@pytest.mark.parametrize("answer", ["refused", "null"])
def test_a_cuda_driver_that_does_not_know_the_batched_copy_is_believed(answer):
    library = FakeLibrary()
    if answer == "refused":
        library.status["cuGetProcAddress_v2"] = 500
    else:
        library.batch_address = 0
    assert not CudaDriver(library).has_batch


@pytest.mark.parametrize(
    ("kind", "missing"),
    [
        (CudaDriver, "cuMemcpyAsync"),
        (CudaDriver, "cuThreadExchangeStreamCaptureMode"),
        (HipDriver, "hipMemcpyAsync"),
        (HipDriver, "hipThreadExchangeStreamCaptureMode"),
    ],
)
def test_a_driver_without_a_call_that_is_needed_says_at_start_what_to_install(kind, missing):
    with pytest.raises(DeviceError, match=rf"no {missing}; expected CUDA 12\.0 or ROCm 6\.0"):
        kind(FakeLibrary(missing))


# ---- finding the library -------------------------------------------------------------------------


def maps_of(tmp_path: Path, *files: str) -> Path:
    """A memory map of a process with these files."""
    lines = [
        f"7f00-7f01 r-xp 00000000 08:01 42   {file}\n" for file in ("/usr/lib/libc.so", *files)
    ]
    path = tmp_path / "maps"
    path.write_text("".join(lines) + "7f02-7f03 rw-p 00000000 00:00 0\n")
    return path


@pytest.mark.parametrize(
    ("other", "mapped"),
    [
        ("/opt/rocm/lib/libamdhip64_extras.so", "/opt/rocm/lib/libamdhip64.so.7.1.70101"),
        ("/opt/rocm/lib/libamdhip64_extras.so", "/venv/torch/lib/libamdhip64-2c8f4e1d.so"),
        ("/opt/rocm/lib/libamdhip64_extras.so", "/venv/torch/lib/libamdhip64.so"),
        ("/usr/lib/libcudart.so.12", "/usr/lib/libcuda.so.550.54.14"),
    ],
)
def test_the_library_that_torch_has_mapped_is_taken_whatever_its_name(
    tmp_path, monkeypatch, other, mapped
):
    monkeypatch.setattr(driver.ctypes, "CDLL", lambda name: name)
    maps = maps_of(tmp_path, other, mapped)
    assert driver.load_library(is_hip="hip" in mapped, maps_path=maps) == mapped


def cannot_open(name: str) -> None:
    raise OSError(f"{name}: cannot open shared object file")


def test_names_with_a_version_come_first_where_nothing_is_mapped(tmp_path, monkeypatch):
    tried = []

    def load(name: str) -> str:
        tried.append(name)
        return name if name == "libamdhip64.so" else cannot_open(name)

    monkeypatch.setattr(driver.ctypes, "CDLL", load)
    assert driver.load_library(is_hip=True, maps_path=maps_of(tmp_path)) == "libamdhip64.so"
    assert tried == ["libamdhip64.so.7", "libamdhip64.so.6", "libamdhip64.so"]


def test_a_machine_without_the_library_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(driver.ctypes, "CDLL", cannot_open)
    maps = maps_of(tmp_path)
    with pytest.raises(DeviceError, match=r"could not be loaded: libcuda\.so\.1: cannot open"):
        driver.load_library(is_hip=False, maps_path=maps)
    with pytest.raises(DeviceError, match=r"libamdhip64\.so\.7: .*libamdhip64\.so: "):
        driver.load_library(is_hip=True, maps_path=maps)


# ---- the device ----------------------------------------------------------------------------------


def test_where_a_gpu_is_on_the_bus_is_empty_if_torch_does_not_tell():
    gpu = FakeGpu()
    assert gpu.open().pci_address == "0000:07:00.0"
    del gpu.properties.pci_domain_id
    assert gpu.open().pci_address == ""
    gpu.close()
