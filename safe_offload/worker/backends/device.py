"""What the GPU backend needs of a device, and how torch, cupy and the driver give it.

Streams and events are torch's, because the stream that they order against is torch's. The one
kernel is compiled and launched by cupy, which does it for CUDA and HIP alike; without cupy there
is no kernel, and copies go through the driver alone.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from safe_offload.worker.backends import row_kernel
from safe_offload.worker.backends.driver import Driver, load_driver
from safe_offload.worker.backends.row_kernel import RowArguments

logger = logging.getLogger(f"vllm.{__name__}")


class Event(Protocol):
    """A point in a stream's work."""

    def record(self, stream: Any) -> None:
        """Move the point to what the stream has been given so far."""

    def synchronize(self) -> None:
        """Let the calling thread sleep until the point has been passed, the lock released."""


class Stream(Protocol):
    """Work that the device does in order.

    Attributes:
        cuda_stream: the driver's handle, under torch's name for it.
    """

    cuda_stream: int

    def wait_event(self, event: Any) -> None:
        """What the stream is given from now on is done behind the event, on the device."""


@dataclass(frozen=True, slots=True)
class Buffer:
    """Page-locked host memory with a partner of the same size on the device.

    Attributes:
        host: shape (n,), int64.
        host_address: of `host`.
        device_address: of the partner.
        owners: what keeps both alive.
    """

    host: npt.NDArray[np.int64]
    host_address: int
    device_address: int
    owners: tuple[object, ...]


class Device(Protocol):
    """One GPU.

    Attributes:
        driver: its calls.
    """

    driver: Driver

    def compute_stream(self) -> Stream:
        """The stream that the engine gives its work to, asked on the engine's thread."""

    def make_stream(self) -> Stream:
        """A stream of the lowest priority that nobody else uses."""

    def make_event(self) -> Event:
        """An event without timing, whose `synchronize` sleeps."""

    def make_buffer(self, num_words: int) -> Buffer:
        """A buffer for `num_words` numbers of 8 bytes."""

    def load_kernel(self, word_bytes: int) -> bool:
        """Compile the row kernel for words of a size.

        Returns:
            False, with the reason logged, if it cannot be had.
        """

    def launch(self, arguments: RowArguments, stream: Stream) -> None:
        """Launch the row kernel."""


class TorchDevice:
    """See `Device`.

    Args:
        device: of the KV cache; the calling thread has used it.

    Raises:
        DeviceError: its driver cannot be used.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        with torch.cuda.device(device):
            # A call of the runtime's, so that the device is current for the driver too.
            torch.cuda.current_stream(device).query()
            self.driver = load_driver(is_hip=torch.version.hip is not None)
        self._kernel: Any = None
        self._cupy_streams: dict[int, Any] = {}

    def compute_stream(self) -> Any:
        """See `Device`."""
        return torch.cuda.current_stream(self._device)

    def make_stream(self) -> Any:
        """See `Device`; not one of torch's pool, which hands the same stream to several users."""
        return torch.cuda.ExternalStream(self.driver.make_stream(), self._device)

    def make_event(self) -> Any:
        """See `Device`."""
        return torch.cuda.Event(enable_timing=False, blocking=True)

    def make_buffer(self, num_words: int) -> Buffer:
        """See `Device`."""
        host = torch.empty(num_words, dtype=torch.int64, pin_memory=True)
        partner = torch.empty(num_words, dtype=torch.int64, device=self._device)
        return Buffer(host.numpy(), host.data_ptr(), partner.data_ptr(), (host, partner))

    def load_kernel(self, word_bytes: int) -> bool:
        """See `Device`."""
        try:
            import cupy

            source = row_kernel.make_source(word_bytes)
            with cupy.cuda.Device(self._device.index):
                kernel = cupy.RawKernel(source, row_kernel.KERNEL_NAME)
                kernel.compile()
        except Exception as error:
            # A missing package, a compiler that is not there, a driver that it does not know: all
            # mean the same, and the copies do not depend on it.
            logger.warning(
                "Small blocks are copied without a kernel of their own, which is slower (%s: %s). "
                "Fix: pip install 'safe-offload[cuda12]' (or cuda13, rocm).",
                type(error).__name__,
                error,
            )
            return False
        self._kernel = kernel
        return True

    def launch(self, arguments: RowArguments, stream: Any) -> None:
        """See `Device`."""
        found = self._cupy_streams.get(stream.cuda_stream)
        if found is None:
            found = _cupy_stream(stream, self._device.index)
            self._cupy_streams[stream.cuda_stream] = found
        with found:
            self._kernel(
                (row_kernel.NUM_BLOCKS,), (row_kernel.THREADS_PER_BLOCK,), arguments.as_scalars()
            )


def _cupy_stream(stream: Any, device_index: int | None) -> Any:
    """A stream of torch's, for cupy."""
    import cupy

    try:
        return cupy.cuda.Stream.from_external(stream)
    except (AttributeError, TypeError):  # cupy before 14, or a torch without the protocol
        return cupy.cuda.ExternalStream(stream.cuda_stream, device_index)
