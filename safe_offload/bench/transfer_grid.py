"""What `safe-offload bench transfer` copies: sizes, ways, and where the bytes lie."""

import enum
import itertools
from collections.abc import Iterable
from dataclasses import dataclass

from safe_offload.layout import Geometry, HostLayout, Segment

KIB, MIB = 1 << 10, 1 << 20

RANGE_BYTES = (4 * KIB, 16 * KIB, 64 * KIB, 256 * KIB, 1 * MIB, 4 * MIB)
NUM_BLOCKS = (1, 64, 1000, 4096)
NUM_LAYERS = (1, 32, 80)
QUICK_RANGE_BYTES = (4 * KIB, 64 * KIB, 1 * MIB)
QUICK_NUM_BLOCKS = (1, 64)
QUICK_NUM_LAYERS = (1, 32)


class Traffic(enum.Enum):
    """Which copies run at the same time."""

    STORE = "store"
    LOAD = "load"
    BOTH = "both"
    """Half of the blocks stored while the other half is loaded."""


class Way(enum.Enum):
    """How the same bytes are moved."""

    OURS = "safe_offload"
    LIMIT = "one copy"
    """All bytes in one contiguous copy: what the hardware gives."""
    LOOP = "loop"
    """One call for each range, the ranges worked out beforehand."""
    VLLM_BATCH = "vLLM batch"
    """vLLM's batched call; see vllm_copies.py."""
    VLLM_KERNEL = "vLLM kernel"
    """vLLM's Triton kernel, for the short loads that vLLM uses it for."""


@dataclass(frozen=True, slots=True)
class Case:
    """One size of copy.

    Attributes:
        range_bytes: bytes of one block in one layer.
        is_contiguous: block i goes to slot i; otherwise both are in random order.
    """

    range_bytes: int
    num_blocks: int
    num_layers: int
    is_contiguous: bool = False

    @property
    def size_bytes(self) -> int:
        """Bytes of all blocks."""
        return self.range_bytes * self.num_blocks * self.num_layers

    @property
    def traffics(self) -> tuple[Traffic, ...]:
        """One block cannot be stored and loaded at once."""
        return tuple(Traffic) if self.num_blocks > 1 else (Traffic.STORE, Traffic.LOAD)

    def moved_bytes(self, traffic: Traffic) -> int:
        """Bytes that one copy, or the two at once, move."""
        if traffic is Traffic.BOTH:
            return self.size_bytes // self.num_blocks * (self.num_blocks // 2 * 2)
        return self.size_bytes

    def make_layout(self) -> HostLayout:
        """A KV cache that is as large as the copy, layers outermost, and host slots in one slab."""
        row, layer_bytes = self.range_bytes, self.range_bytes * self.num_blocks
        segments = (Segment(row, index * layer_bytes, row) for index in range(self.num_layers))
        return HostLayout.in_one_slab(Geometry(tuple(segments), self.num_blocks), self.num_blocks)


def select_cases(
    sizes: tuple[Iterable[int], Iterable[int], Iterable[int]],
    *,
    size_bytes_max: int,
    is_contiguous: bool,
) -> list[Case]:
    """Return every combination that is not too large.

    Args:
        sizes: bytes per range, blocks, layers.
        size_bytes_max: of one copy.
        is_contiguous: see `Case`.
    """
    cases = (Case(*numbers, is_contiguous=is_contiguous) for numbers in itertools.product(*sizes))
    return [case for case in cases if case.size_bytes <= size_bytes_max]
