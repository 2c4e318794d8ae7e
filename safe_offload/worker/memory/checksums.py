"""Checksums of slots in host memory, by xxHash (XXH3, 64 bits).

`xxhash` releases the interpreter lock for long ranges and reads about as fast as memory delivers.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import xxhash

from safe_offload.layout import HostLayout


def slot_checksums(
    host: memoryview, layout: HostLayout, slot_ids: npt.NDArray[np.int64]
) -> npt.NDArray[np.uint64]:
    """Return one checksum for each of some slots, of a rank's whole host memory."""
    found = np.empty(len(slot_ids), dtype=np.uint64)
    for index, slot_id in enumerate(slot_ids.tolist()):
        state = xxhash.xxh3_64()
        for offset, length_bytes in layout.ranges_of(slot_id):
            state.update(host[offset : offset + length_bytes])
        found[index] = state.intdigest()
    return found
