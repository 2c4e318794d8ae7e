"""The drivers' calls, over libraries that are Python objects: names, arguments, chunks, errors."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from safe_offload.errors import DeviceError
from safe_offload.worker.backends import driver
from safe_offload.worker.backends.base import Direction
from safe_offload.worker.backends.driver import DESCRIPTORS_MAX, CudaDriver, Driver, HipDriver
from safe_offload.worker.backends.ranges import Ranges

CONTEXT, STREAM, LOWEST = 0xC0, 0x5000, 3
HIP_7_2, HIP_7_13 = 70_200_001, 71_300_000


def value(argument: Any) -> Any:
    """What a ctypes argument holds."""
    return getattr(argument, "value", argument)


def put(reference: Any, number: int) -> None:
    """Write through an argument made by `byref`."""
    reference._obj.value = number


class FakeLibrary:
    """Functions of a driver under their own names; every call is kept.

    Attributes:
        calls: name and arguments.
        status: what each call named here answers, 0 if it is not named.
        batches: for each batched copy its sources, sizes, number of attributes and source order.
    """

    def __init__(self, *missing: str) -> None:
        self.calls: list[tuple[str, tuple[Any, ...]]] = []
        self.status: dict[str, int] = {}
        self.batches: list[tuple[list[int], list[int], int, int]] = []
        self._missing = missing

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name in self._missing or not hasattr(type(self), f"do_{name}"):
            raise AttributeError(name)
        do = getattr(self, f"do_{name}")

        def function(*arguments: Any) -> Any:
            self.calls.append((name, tuple(map(value, arguments))))
            return self.status.get(name, 0) or do(*arguments) or 0

        return function

    def see_batch(self, targets, sources, sizes, count, attributes, firsts, num, failed, stream):
        """What both batched copies are told."""
        number = int(value(count))
        words = (ctypes.c_uint64 * number).from_address
        order = attributes._obj.source_order if hasattr(attributes, "_obj") else None
        if order is None:
            order = ctypes.c_uint.from_address(value(attributes)).value
        assert value(stream) == STREAM
        self.batches.append(
            (list(words(value(sources))), list(words(value(sizes))), int(value(num)), order)
        )
        return self.status.get("batch", 0)


class FakeCuda(FakeLibrary):
    def __init__(self, *missing: str) -> None:
        super().__init__(*missing)
        self._batch = driver._BATCH_TYPE(self.see_batch)
        self.batch_address = ctypes.cast(self._batch, ctypes.c_void_p).value

    def do_cuCtxGetStreamPriorityRange(self, lowest, highest):
        put(lowest, LOWEST)
        put(highest, -5)

    def do_cuCtxGetCurrent(self, context):
        put(context, CONTEXT)

    def do_cuCtxSetCurrent(self, context):
        assert value(context) == CONTEXT

    def do_cuGetProcAddress_v2(self, name, address, version, flags, found):
        assert name == b"cuMemcpyBatchAsync"
        assert value(version) == 12080
        put(address, self.batch_address)

    def do_cuStreamCreateWithPriority(self, stream, flags, priority):
        assert (value(flags), value(priority)) == (1, LOWEST)
        put(stream, STREAM)

    def do_cuStreamDestroy_v2(self, stream): ...
    def do_cuMemcpyAsync(self, target, source, size_bytes, stream): ...
    def do_cuMemHostRegister_v2(self, address, size_bytes, flags): ...
    def do_cuMemHostUnregister(self, address): ...

    def do_cuMemHostGetDevicePointer_v2(self, found, address, flags):
        put(found, value(address) + 16)

    def do_cuGetErrorName(self, status, text):
        put(text, b"CUDA_ERROR_TEST")


class FakeHip(FakeLibrary):
    def __init__(self, *missing: str, version: int = HIP_7_2) -> None:
        super().__init__(*missing)
        self._version = version

    def do_hipDeviceGetStreamPriorityRange(self, lowest, highest):
        put(lowest, LOWEST)
        put(highest, -1)

    def do_hipGetDevice(self, device):
        put(device, 2)

    def do_hipSetDevice(self, device):
        assert value(device) == 2

    def do_hipRuntimeGetVersion(self, version):
        put(version, self._version)

    def do_hipStreamCreateWithPriority(self, stream, flags, priority):
        assert (value(flags), value(priority)) == (1, LOWEST)
        put(stream, STREAM)

    def do_hipStreamDestroy(self, stream): ...
    def do_hipMemcpyAsync(self, target, source, size_bytes, kind, stream): ...
    def do_hipMemcpyBatchAsync(self, *arguments):
        return self.see_batch(*arguments)

    def do_hipHostRegister(self, address, size_bytes, flags): ...
    def do_hipHostUnregister(self, address): ...

    def do_hipHostGetDevicePointer(self, found, address, flags):
        put(found, value(address) + 16)

    def do_hipGetErrorName(self, status):
        return b"hipErrorTest"


DRIVERS = [(FakeCuda, CudaDriver), (FakeHip, HipDriver)]


@pytest.fixture(params=DRIVERS, ids=["CUDA", "HIP"])
def both(request: pytest.FixtureRequest) -> tuple[FakeLibrary, Driver]:
    library = request.param[0]()
    return library, request.param[1](library)


def ranges_of(count: int) -> Ranges:
    numbers = np.arange(count, dtype=np.uint64)
    return Ranges(numbers + np.uint64(1 << 40), numbers, numbers % np.uint64(7) + np.uint64(1))


def test_every_call_reaches_the_library_with_its_arguments(both):
    library, subject = both
    assert subject.make_stream() == STREAM
    library.calls.clear()
    subject.destroy_stream(STREAM)
    subject.copy(0x10, 0x20, 300, STREAM)
    subject.lock(0x1000, 4096)
    subject.unlock(0x1000)
    subject.bind_thread()
    arguments = [call[1] for call in library.calls]
    assert arguments[0] == (STREAM,)
    assert arguments[1][:3] == (0x10, 0x20, 300)
    assert arguments[1][-1] == STREAM
    assert arguments[2] == (0x1000, 4096, 3)
    assert arguments[3] == (0x1000,)
    assert subject.device_address(0x1000) == 0x1010


def test_hip_is_told_that_the_addresses_say_where_the_memory_is():
    library = FakeHip()
    HipDriver(library).copy(1, 2, 3, STREAM)
    assert library.calls[-1] == ("hipMemcpyAsync", (1, 2, 3, 4, STREAM))


def test_a_refused_call_says_which_and_why(both):
    library, subject = both
    for name in ("cuMemHostRegister_v2", "hipHostRegister"):
        library.status[name] = 2
    with pytest.raises(DeviceError, match=r"(cuMemHost|hipHost)Register.*(_TEST|Test) \(2\)"):
        subject.lock(0x1000, 4096)


@pytest.mark.parametrize("count", [1, DESCRIPTORS_MAX, DESCRIPTORS_MAX + 1, 20_000])
def test_a_batch_is_cut_where_the_driver_needs_it(both, count):
    library, subject = both
    ranges = ranges_of(count)
    subject.copy_batch(ranges, Direction.STORE, STREAM)
    assert all(len(sources) <= DESCRIPTORS_MAX for sources, *_ in library.batches)
    assert len(library.batches) == -(-count // DESCRIPTORS_MAX)
    assert [s for sources, *_ in library.batches for s in sources] == ranges.sources.tolist()
    assert [n for _, sizes, *_ in library.batches for n in sizes] == ranges.lengths.tolist()


def test_stores_read_in_stream_order_and_loads_at_any_time(both):
    library, subject = both
    subject.copy_batch(ranges_of(2), Direction.STORE, STREAM)
    subject.copy_batch(ranges_of(2), Direction.LOAD, STREAM)
    assert [order for *_, order in library.batches] == [1, 3]


@pytest.mark.parametrize(("version", "expected"), [(HIP_7_2, 0), (HIP_7_13, 1), (0, 0)])
def test_an_old_hip_runtime_is_given_no_attributes(version, expected):
    library = FakeHip(version=version)
    HipDriver(library).copy_batch(ranges_of(2), Direction.LOAD, STREAM)
    assert library.batches[0][2] == expected


def test_cuda_is_always_given_attributes():
    library = FakeCuda()
    CudaDriver(library).copy_batch(ranges_of(2), Direction.LOAD, STREAM)
    assert library.batches[0][2] == 1


def test_a_batch_that_fails_in_the_middle_is_not_gone_on_with(both):
    library, subject = both
    library.status["batch"] = 700
    with pytest.raises(DeviceError, match=r"batched copy: .* \(700\)"):
        subject.copy_batch(ranges_of(3 * DESCRIPTORS_MAX), Direction.STORE, STREAM)
    assert len(library.batches) == 1


@pytest.mark.parametrize(
    ("library", "kind"),
    [
        (FakeHip("hipMemcpyBatchAsync"), HipDriver),
        (FakeCuda("cuGetProcAddress_v2"), CudaDriver),
    ],
    ids=["HIP", "CUDA"],
)
def test_without_the_batched_copy_the_rest_works(library, kind):
    subject = kind(library)
    assert not subject.has_batch
    subject.copy_each(ranges_of(3), STREAM)
    assert len([name for name, _ in library.calls if "emcpyAsync" in name]) == 3


@pytest.mark.parametrize("answer", ["refused", "null"])
def test_a_cuda_driver_that_does_not_know_the_batched_copy_is_believed(answer):
    library = FakeCuda()
    if answer == "refused":
        library.status["cuGetProcAddress_v2"] = 500
    else:
        library.batch_address = 0
    assert not CudaDriver(library).has_batch


def test_a_driver_without_a_call_that_is_needed_says_what_to_install():
    with pytest.raises(DeviceError, match=r"no hipHostRegister; expected CUDA 12\.0 or ROCm 6\.0"):
        HipDriver(FakeHip("hipHostRegister")).lock(1, 1)


def test_a_machine_without_the_library_says_so(monkeypatch):
    def refuse(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(driver.ctypes, "CDLL", refuse)
    with pytest.raises(DeviceError, match=r"could not be loaded: libcuda\.so\.1: cannot open"):
        driver.load_driver(is_hip=False)
    with pytest.raises(DeviceError, match=r"libamdhip64\.so: .*libamdhip64\.so\.7: "):
        driver.load_driver(is_hip=True)


def test_the_first_library_that_is_there_is_taken(monkeypatch):
    def load(name: str) -> FakeLibrary:
        if name == "libamdhip64.so":
            raise OSError(name)
        return FakeHip() if "hip" in name else FakeCuda()

    monkeypatch.setattr(driver.ctypes, "CDLL", load)
    assert driver.load_driver(is_hip=True).name == "HIP"
    assert driver.load_driver(is_hip=False).name == "CUDA"
