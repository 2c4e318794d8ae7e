"""One GPU as the backend uses it: torch, cupy and the driver behind one face."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib
import logging
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any, Final

import torch

from safe_offload.threads import switched_on
from safe_offload.worker.copies import row_kernel
from safe_offload.worker.copies.driver import CudaDriver, Driver, HipDriver, load_library
from safe_offload.worker.copies.row_kernel import RowArguments

logger = logging.getLogger(f"vllm.{__name__}")

IN_MEMORY: Final = "CUPY_CACHE_IN_MEMORY"
"""Source: cupy 13, reference/environment.html; read at each compiling."""
LOCK_PORTABLE_AND_MAPPED = 3  # cudaHostRegisterPortable, cudaHostRegisterMapped, and HIP's
_LIBC = ctypes.CDLL(None)
_LIBC.sigaction.argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)
IMPORT_THREAD: Final = "safe-offload-import"
_ACTION_BYTES = 256  # at least a struct sigaction, whatever is in it; 152 with glibc


def import_ahead(name: str = "cupy") -> None:
    """Import a module on a thread, while vLLM loads its model; see `import_cupy`.

    The interpreter waits for the thread before it ends, as one that is stopped while a library is
    loaded may crash. Nothing is compiled: `keep_signal_handlers` would undo what vLLM's thread
    changes meanwhile.
    """

    def run() -> None:
        with contextlib.suppress(Exception):  # `import_cupy` meets it again
            importlib.import_module(name)

    threading.Thread(target=run, name=IMPORT_THREAD, daemon=False).start()


@functools.cache
def import_cupy(name: str = "cupy") -> Any:
    """Import cupy, once that thread has ended.

    Python returns a module half-made if its import fails on another thread meanwhile.
    """
    for thread in threading.enumerate():
        if thread.name == IMPORT_THREAD:
            thread.join()
    return importlib.import_module(name)


class Device:
    """One GPU. Every method raises `DeviceError`, or what torch or cupy raise, if it is refused.

    Only `load_kernel` changes it, before the first copy. `library` is the driver's, by default the
    one that torch uses. `pci_address` is empty if torch does not provide it.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        torch_module: Any = torch,
        library: Any = None,
        import_cupy: Callable[[], Any] = import_cupy,
    ) -> None:
        self._device = device
        self._torch = torch_module
        self._cuda = torch_module.cuda
        self._import_cupy = import_cupy
        self._thread = threading.local()
        is_hip = torch_module.version.hip is not None
        properties = self._cuda.get_device_properties(device)
        library = library or load_library(is_hip=is_hip)
        self.driver: Driver = (
            HipDriver(library, properties.gcnArchName) if is_hip else CudaDriver(library)
        )
        self.pci_address = _pci_address(properties)
        self._own_stream = self._cuda.Stream(device)
        self._kernel: Any = None

    def bind_thread(self) -> None:
        """Let the calling thread, one of ours, use the device also while vLLM captures a graph."""
        if "is_bound" in vars(self._thread):
            return
        self.driver.relax_thread()
        self._cuda.set_device(self._device)
        # In a new thread torch takes device 0 for the current one and does nothing. A call of the
        # runtime binds it, which the driver's own calls need (pytorch/pytorch#155668).
        self._own_stream.query()
        self._thread.is_bound = True

    def compute_stream(self) -> Any:
        """Return the stream that the calling thread gives its work to."""
        return self._cuda.current_stream(self._device)

    def make_stream(self) -> Any:
        """Make a stream of the lowest priority, from torch's pool; sharing one costs time only."""
        return self._cuda.Stream(self._device)

    def record(self, stream: Any) -> Any:
        """Return an event at the end of what a stream has been given; waiting for it sleeps."""
        event = self._cuda.Event(enable_timing=False, blocking=True)
        event.record(stream)
        return event

    def make_buffer(self, num_words: int, stream: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Return page-locked host memory and device memory, each of shape (num_words,), int64.

        Only this stream may use it: torch's allocator hands memory on in the stream's order.
        """
        host = self._torch.empty(num_words, dtype=torch.int64, pin_memory=True)
        with self._cuda.stream(stream):
            return host, self._torch.empty(num_words, dtype=torch.int64, device=self._device)

    def upload(self, buffer: tuple[torch.Tensor, torch.Tensor], stream: Any) -> None:
        """Copy the host memory of a buffer to its device memory, in the stream's order."""
        host, partner = buffer
        self.driver.copy(partner.data_ptr(), host.data_ptr(), host.nbytes, stream.cuda_stream)

    def load_kernel(self, word_bytes: int) -> None:
        """Compile the row kernel for words of a size."""
        cupy = self._import_cupy()
        source = row_kernel.make_source(word_bytes)
        with keep_signal_handlers(), cupy.cuda.Device(self._device.index):
            try:
                self._kernel = cupy.RawKernel(source, row_kernel.KERNEL_NAME)
                self._kernel.compile()
            except OSError as error:
                logger.info(
                    "cupy cannot cache compiled kernels (%s), so each start recompiles them. Fix: "
                    "set CUPY_CACHE_DIR to a directory that this user can write.",
                    error,
                )
                with switched_on(IN_MEMORY):
                    self._kernel = cupy.RawKernel(source, row_kernel.KERNEL_NAME)
                    self._kernel.compile()

    def kernel_fix(self) -> str:
        """Return what to do where there is no kernel."""
        version = self._torch.version
        misfit = row_kernel.cupy_misfit(version.cuda, version.hip, row_kernel.installed_cupy())
        if misfit is not None:
            return f"{misfit.fix} ({misfit.problem})"
        return "python -c 'import cupy; cupy.show_config()' shows what cupy lacks"

    def launch(self, arguments: RowArguments, stream: Any) -> None:
        """Launch the row kernel."""
        cuda = self._import_cupy().cuda
        with cuda.Device(self._device.index), cuda.Stream.from_external(stream):
            self._kernel(
                (row_kernel.NUM_BLOCKS,), (row_kernel.THREADS_PER_BLOCK,), arguments.as_scalars()
            )

    def sees(self, address: int) -> bool:
        """Return whether kernels find locked memory under the host's own address."""
        attributes = self._import_cupy().cuda.runtime.pointerGetAttributes(address)
        return bool(attributes.devicePointer == address)

    def lock(self, address: int, size_bytes: int) -> None:
        """Page-lock host memory in place, mapped for the device."""
        register = self._cuda.cudart().cudaHostRegister
        status = register(address, size_bytes, LOCK_PORTABLE_AND_MAPPED)
        self.driver.check("cudaHostRegister", int(status))

    def unlock(self, address: int) -> None:
        """Undo `lock`."""
        status = self._cuda.cudart().cudaHostUnregister(address)
        self.driver.check("cudaHostUnregister", int(status))


@contextlib.contextmanager
def keep_signal_handlers() -> Iterator[None]:
    """Undo what the body does to signal handlers, on whatever thread and from whatever language.

    CUDA's run-time compiler (NVRTC 13.0) takes SIGINT and SIGTERM for itself and gives them back by
    `signal`, which sets SA_RESTART. Then a thread that waits for a lock goes on waiting when such a
    signal comes, Python's handler does not run, and an idle engine ends only when it is killed.
    """
    before = {number: _action_of(number) for number in signal.valid_signals()}
    try:
        yield
    finally:
        for number, action in before.items():
            if _action_of(number) != action:
                _LIBC.sigaction(number, action, None)


def _action_of(number: int) -> bytes:
    action = ctypes.create_string_buffer(_ACTION_BYTES)
    _LIBC.sigaction(number, None, action)
    return action.raw


def _pci_address(properties: Any) -> str:
    try:
        domain, bus = properties.pci_domain_id, properties.pci_bus_id
        return f"{domain:04x}:{bus:02x}:{properties.pci_device_id:02x}.0"
    except AttributeError:
        return ""
