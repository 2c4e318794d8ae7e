"""What `python -m tests.benchmarks transfer` copies: sizes, directions, and where the bytes lie."""

import enum
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from safe_offload.layout import Geometry, HostLayout, Segment
from safe_offload.worker.copies.base import Copy, Direction

KIB, MIB = 1 << 10, 1 << 20

Sizes = tuple[Sequence[int], Sequence[int], Sequence[int]]
"""Bytes of one block in one layer, blocks, layers."""
USUAL_SIZES: Sizes = (
    (4 * KIB, 16 * KIB, 64 * KIB, 256 * KIB, 1 * MIB, 4 * MIB),
    (1, 64, 1000, 4096),
    (1, 32, 80),
)
QUICK_SIZES: Sizes = ((4 * KIB, 64 * KIB, 1 * MIB), (1, 64), (1, 32))


class Traffic(enum.Enum):
    """Which copies run at the same time."""

    STORE = "store"
    LOAD = "load"
    BOTH = "both"
    """Half of the blocks stored while the other half is loaded."""


@dataclass(frozen=True, slots=True)
class Case:
    """One size of copy; blocks and slots are in random order."""

    range_bytes: int  # of one block in one layer
    num_blocks: int
    num_layers: int

    @property
    def size_bytes(self) -> int:
        return self.range_bytes * self.num_blocks * self.num_layers

    @property
    def traffics(self) -> tuple[Traffic, ...]:
        """One block cannot be stored and loaded at once."""
        return tuple(Traffic) if self.num_blocks > 1 else (Traffic.STORE, Traffic.LOAD)

    def moved_bytes(self, traffic: Traffic) -> int:
        if traffic is Traffic.BOTH:
            return self.size_bytes // self.num_blocks * (self.num_blocks // 2 * 2)
        return self.size_bytes

    def make_layout(self) -> HostLayout:
        """Return a KV cache as large as the copy, layers outermost, and host slots in one slab."""
        row, layer_bytes = self.range_bytes, self.range_bytes * self.num_blocks
        segments = (Segment(row, index * layer_bytes, row) for index in range(self.num_layers))
        return HostLayout.in_one_slab(Geometry(tuple(segments), self.num_blocks), self.num_blocks)

    def make_copies(self, traffic: Traffic) -> list[Copy]:
        """Return the copy of all blocks, or the two of half of them each."""
        generator = np.random.default_rng(0)
        blocks = generator.permutation(np.arange(self.num_blocks, dtype=np.int64))
        slots = generator.permutation(np.arange(self.num_blocks, dtype=np.int64))
        if traffic is not Traffic.BOTH:
            return [Copy(Direction(traffic.value), blocks, slots)]
        half = self.num_blocks // 2
        return [
            Copy(Direction.STORE, blocks[:half], slots[:half]),
            Copy(Direction.LOAD, blocks[half : 2 * half], slots[half : 2 * half]),
        ]


def select_cases(sizes: Sizes, size_bytes_max: int) -> list[Case]:
    """Return every combination that is not too large."""
    cases = (Case(*numbers) for numbers in itertools.product(*sizes))
    return [case for case in cases if case.size_bytes <= size_bytes_max]
