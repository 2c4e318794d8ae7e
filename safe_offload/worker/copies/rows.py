"""The blocks of a KV cache as rows of bytes, for the self-test."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from safe_offload.layout import Geometry

Bytes = npt.NDArray[np.uint8]


class Rows:
    """The blocks of a KV cache as rows of bytes, in the order of the calling thread's work.

    `bind_thread` is None for host memory.
    """

    def __init__(
        self,
        storage: Any,
        device: torch.device,
        geometry: Geometry,
        bind_thread: Callable[[], None] | None = None,
    ) -> None:
        self._device = device
        self._bind_thread = bind_thread
        flat = torch.empty(0, dtype=torch.uint8, device=device).set_(storage)
        self._rows = [
            flat.as_strided(
                (geometry.num_blocks, s.length_bytes), (s.stride_bytes, 1), s.offset_bytes
            )
            for s in geometry.segments
        ]

    def bind_thread(self) -> None:
        """Let the calling thread use the memory, after all that was done to it so far."""
        if self._bind_thread is not None:
            self._bind_thread()
            torch.cuda.synchronize(self._device)

    def read(self, block_ids: Sequence[int]) -> Bytes:
        """Return the bytes of blocks; shape (n, slot_bytes)."""
        ids = torch.tensor(block_ids, device=self._device)
        return np.concatenate([rows[ids].cpu().numpy() for rows in self._rows], axis=1)

    def prepare(self, block_ids: Sequence[int], content: Bytes) -> Callable[[], None]:
        """Return a function that overwrites blocks without waiting."""
        ids = torch.tensor(block_ids, device=self._device)
        lengths = [rows.shape[1] for rows in self._rows]
        parts = torch.from_numpy(content).to(self._device).split(lengths, dim=1)

        def write() -> None:
            for rows, part in zip(self._rows, parts, strict=True):
                rows[ids] = part

        return write
