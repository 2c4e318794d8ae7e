"""Checksums of slots in host memory, by xxHash (XXH3, 64 bits).

`xxhash` releases the interpreter lock for long ranges and reads about as fast as memory delivers.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import xxhash

from safe_offload.layout import HostLayout


class SlotChecksums:
    """Reads the slots of one rank in its whole host memory, shape (size_bytes,)."""

    def __init__(self, host: npt.NDArray[np.uint8], layout: HostLayout) -> None:
        self._host = host.data
        self._layout = layout

    def of(self, slot_ids: npt.NDArray[np.int64]) -> npt.NDArray[np.uint64]:
        """Return one checksum for each slot."""
        found = np.empty(len(slot_ids), dtype=np.uint64)
        for index, slot_id in enumerate(slot_ids.tolist()):
            state = xxhash.xxh3_64()
            for offset, length_bytes in self._layout.ranges_of(slot_id):
                state.update(self._host[offset : offset + length_bytes])
            found[index] = state.intdigest()
        return found
