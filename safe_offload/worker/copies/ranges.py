"""From block and slot ids to the byte ranges of a copy, in one pass of numpy over all segments.

1,000 blocks of a model of 32 layers are 32,000 ranges.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from safe_offload.errors import TransferError
from safe_offload.layout import HostLayout
from safe_offload.protocol import FailureReason
from safe_offload.worker.copies.base import Copy, Direction

Words = npt.NDArray[np.uint64]

BUFFER_WORDS = 64
"""Of numpy. With its usual 8,192 it gathers rows before it adds to them, which takes longer."""


@dataclass(frozen=True, slots=True)
class Ranges:
    """The ranges to copy: addresses and bytes, three arrays of shape (n,), uint64."""

    targets: Words
    sources: Words
    lengths: Words

    def __len__(self) -> int:
        return len(self.lengths)

    def part(self, start: int, stop: int) -> Ranges:
        """Return some of them, of the same memory."""
        return Ranges(self.targets[start:stop], self.sources[start:stop], self.lengths[start:stop])


@dataclass(frozen=True, slots=True)
class Runs:
    """Runs of blocks that go to runs of slots; arrays of shape (n,), uint64.

    Attributes:
        blocks, slots: the first of each run.
        counts: how many blocks each run has; None if all have one.
    """

    direction: Direction
    blocks: Words
    slots: Words
    counts: Words | None

    def __len__(self) -> int:
        return len(self.blocks)


class RangeTable:
    """Where the rows of blocks and slots lie: in a KV cache's storage, and in host memory."""

    def __init__(self, base_address: int, host_address: int, layout: HostLayout) -> None:
        segments = layout.geometry.segments
        self._layout = layout
        self._block_bases = _column(base_address + s.offset_bytes for s in segments)
        self._block_strides = _column(s.stride_bytes for s in segments)
        self._array_bases = _column(host_address + offset for offset in layout.array_offsets())
        self._row_bytes = _column(s.length_bytes for s in segments)
        # Equal rows save a pass over all ranges.
        self._has_one_stride = bool((self._block_strides == self._block_strides[0]).all())
        self._has_one_length = bool((self._row_bytes == self._row_bytes[0]).all())
        self._is_dense = all(s.stride_bytes == s.length_bytes for s in segments)

    def check(self, copy: Copy) -> None:
        """Raise TransferError if an id lies outside the memory."""
        _check_ids(copy.block_ids, self._layout.geometry.num_blocks, "block")
        _check_ids(copy.slot_ids, self._layout.num_slots, "slot")

    def runs(self, copy: Copy) -> Runs:
        """Return the ids of a copy, neighbours joined; they have been checked."""
        order = np.argsort(copy.block_ids, kind="stable")
        blocks = copy.block_ids[order].astype(np.uint64)
        slots = copy.slot_ids[order].astype(np.uint64)
        if not self._is_dense:
            return Runs(copy.direction, blocks, slots, None)
        one = np.uint64(1)
        is_new = (blocks[1:] - blocks[:-1] != one) | (slots[1:] - slots[:-1] != one)
        if self._layout.num_slabs > 1:
            is_new |= slots[1:] % np.uint64(self._layout.slots_per_slab) == 0
        starts = np.concatenate(([0], np.flatnonzero(is_new) + 1))
        if len(starts) == len(blocks):
            return Runs(copy.direction, blocks, slots, None)
        counts = np.diff(starts, append=len(blocks)).astype(np.uint64)
        return Runs(copy.direction, blocks[starts], slots[starts], counts)

    def ranges(self, runs: Runs) -> Ranges:
        """Return the ranges of every run, those of the first segment first."""
        words = np.empty((3, len(self._row_bytes), len(runs)), dtype=np.uint64)
        targets, sources, lengths = words
        is_store = runs.direction is Direction.STORE
        block_side, slot_side = (sources, targets) if is_store else (targets, sources)
        slabs, rows = np.divmod(runs.slots, np.uint64(self._layout.slots_per_slab))
        slabs *= np.uint64(self._layout.slab_bytes)
        before = np.setbufsize(BUFFER_WORDS)
        try:
            if self._has_one_stride:
                blocks = runs.blocks * self._block_strides[0]
                np.add(self._block_bases, blocks, out=block_side)
            else:
                np.multiply(self._block_strides, runs.blocks, out=block_side)
                block_side += self._block_bases
            if self._has_one_length:
                np.add(self._array_bases, rows * self._row_bytes[0] + slabs, out=slot_side)
            else:
                np.multiply(self._row_bytes, rows, out=slot_side)
                slot_side += slabs
                slot_side += self._array_bases
            if runs.counts is None:
                lengths[:] = self._row_bytes
            else:
                np.multiply(self._row_bytes, runs.counts, out=lengths)
        finally:
            np.setbufsize(before)
        return Ranges(*words.reshape(3, -1))


def _check_ids(ids: npt.NDArray[np.int64], count: int, what: str) -> None:
    # One pass: as unsigned numbers, negative ids are the largest.
    if ids.size and int(ids.view(np.uint64).max()) >= count:
        raise TransferError(
            FailureReason.BAD_PLAN,
            f"expected {what} ids from 0 to {count - 1}, "
            f"found {int(ids.min())} to {int(ids.max())}",
        )


def _column(values: object) -> Words:
    """Return one row for each segment, to be broadcast against runs."""
    return np.fromiter(values, dtype=np.uint64)[:, None]  # type: ignore[call-overload,no-any-return]
