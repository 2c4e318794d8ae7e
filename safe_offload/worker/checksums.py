"""Checksums of slots in host memory, by xxHash (XXH3, 64 bits).

`xxhash` releases the interpreter lock for ranges of some length and reads about as fast as memory
delivers. It is asked for only where `verify` is switched on.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from safe_offload.errors import ConfigError
from safe_offload.layout import HostLayout


class SlotChecksums:
    """Reads the slots of one rank.

    Args:
        host: the whole host memory, shape (size_bytes,), uint8.
        layout: where the slots lie in it.
    """

    def __init__(self, host: npt.NDArray[np.uint8], layout: HostLayout) -> None:
        self._host = host.data
        self._layout = layout

    def of(self, slot_ids: npt.NDArray[np.int64]) -> npt.NDArray[np.uint64]:
        """One checksum for each slot."""
        import xxhash

        found = np.empty(len(slot_ids), dtype=np.uint64)
        for index, slot_id in enumerate(slot_ids.tolist()):
            state = xxhash.xxh3_64()
            for view in self._views(slot_id):
                state.update(view)
            found[index] = state.intdigest()
        return found

    def _views(self, slot_id: int) -> Iterator[memoryview]:
        """Every byte of one slot."""
        for offset, length_bytes in self._layout.ranges_of(slot_id):
            yield self._host[offset : offset + length_bytes]


def require_xxhash() -> None:
    """Find out at start whether checksums can be computed.

    Raises:
        ConfigError: the package is not there.
    """
    try:
        import xxhash  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            f'kv_connector_extra_config["verify"] needs the Python package xxhash: {error}. Fix: '
            'pip install "xxhash>=3.4,<4" where vLLM runs, or set "verify": "off".'
        ) from error
