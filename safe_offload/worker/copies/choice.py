"""Which backend copies the KV cache of a device."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch

from safe_offload.config.options import OffloadConfig
from safe_offload.errors import ConfigError, DeviceError
from safe_offload.layout import HostLayout
from safe_offload.worker.copies.base import CopyPath, ProvableBackend
from safe_offload.worker.copies.cpu import CpuBackend
from safe_offload.worker.copies.device import Device, import_ahead
from safe_offload.worker.copies.gpu import GpuBackend
from safe_offload.worker.copies.rows import Rows
from safe_offload.worker.copies.threads import DirectionThreads
from safe_offload.worker.memory.host_memory import HostMemory


def prepare(device_type: str, config: OffloadConfig) -> None:
    """Begin what `open_backend` needs and what does not depend on the KV cache; never raises.

    `device_type` is that of vLLM's device, as in torch.
    """
    if device_type == "cuda" and config.copy_path in ("auto", CopyPath.KERNEL.value):
        with contextlib.suppress(RuntimeError):  # no thread can be started
            import_ahead()


def open_backend(
    storage: Any, device: torch.device, layout: HostLayout, host: HostMemory, config: OffloadConfig
) -> tuple[ProvableBackend, Rows]:
    """Return the backend for a KV cache, and the blocks that it copies."""
    address, geometry = storage.data_ptr(), layout.geometry
    try:
        if device.type == "cpu":
            threads = DirectionThreads("safe-offload", config.copy_threads)
            return CpuBackend(address, layout, host, threads), Rows(storage, device, geometry)
        if device.type == "cuda":  # torch's word for ROCm too
            path = CopyPath(config.copy_path) if config.copy_path != "auto" else None
            gpu = Device(device)
            rows = Rows(storage, device, geometry, gpu.bind_thread)
            return GpuBackend(gpu, address, layout, host, path), rows
        problem = f"expected a KV cache on 'cpu' or 'cuda', found one on {device.type!r}"
    except DeviceError as error:
        problem = f"the GPU's driver cannot be used: {error}"
    host.close()
    raise ConfigError(f"{problem}. Fix: remove --kv-transfer-config on this machine.")


OpenBackend = Callable[
    [Any, "torch.device", HostLayout, HostMemory, OffloadConfig], tuple[ProvableBackend, Rows]
]
