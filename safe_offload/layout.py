"""The byte ranges of a GPU block, and their places in host memory.

Cache groups share ranges, so vLLM may describe one several times; a `Geometry` lists each once. In
host memory, each range has an array with one row per slot, so that a run of blocks and a run of
slots form one contiguous copy.
"""

from __future__ import annotations

import itertools
import mmap
from collections.abc import Iterable
from dataclasses import dataclass

from safe_offload.errors import ConfigError

PAGE_BYTES = mmap.PAGESIZE


@dataclass(frozen=True, slots=True, order=True)
class Segment:
    """One byte range of every block: block `b` has `length_bytes` at `offset + b * stride`."""

    stride_bytes: int  # distance between the ranges of consecutive blocks
    offset_bytes: int  # of block 0, from the start of the KV cache's storage
    length_bytes: int  # at most `stride_bytes`, if there is more than one block

    def end_bytes(self, num_blocks: int) -> int:
        """Return the first byte after the last block's range."""
        return self.offset_bytes + (num_blocks - 1) * self.stride_bytes + self.length_bytes


@dataclass(frozen=True, slots=True)
class Geometry:
    """The bytes of a block, each once: disjoint segments of `num_blocks` GPU blocks."""

    segments: tuple[Segment, ...]
    num_blocks: int

    @property
    def slot_bytes(self) -> int:
        """Return the size of one block, and so of one host slot."""
        return sum(segment.length_bytes for segment in self.segments)


@dataclass(frozen=True, slots=True)
class HostLayout:
    """The layout of slots in host memory.

    Consecutive slabs, so that memory becomes ready slab by slab, each with an array per segment of
    the geometry. The last slab may be partly used; its arrays have full size.
    """

    geometry: Geometry
    num_slots: int
    slots_per_slab: int

    @classmethod
    def in_one_slab(cls, geometry: Geometry, num_slots: int) -> HostLayout:
        """Return a layout with all slots in one slab, which gives the longest runs."""
        return cls(geometry, num_slots, num_slots)

    @classmethod
    def in_slabs(cls, geometry: Geometry, num_slots: int, slab_bytes: int) -> HostLayout:
        """Return a layout in slabs of equal size, about `slab_bytes` each."""
        num_slabs = max(1, num_slots * geometry.slot_bytes // slab_bytes)
        return cls(geometry, num_slots, -(-num_slots // num_slabs))

    @property
    def num_slabs(self) -> int:
        """Return the number of slabs, the last one included."""
        return -(-self.num_slots // self.slots_per_slab)

    @property
    def slab_bytes(self) -> int:
        """Return the size of a slab: whole pages if there are several, so each can be locked."""
        size_bytes = self.slots_per_slab * self.geometry.slot_bytes
        return size_bytes if self.num_slabs == 1 else -(-size_bytes // PAGE_BYTES) * PAGE_BYTES

    @property
    def size_bytes(self) -> int:
        """Return the size of all slabs."""
        return self.num_slabs * self.slab_bytes

    def array_offsets(self) -> tuple[int, ...]:
        """Return the offset of each segment's array in its slab, in bytes."""
        lengths = (self.slots_per_slab * segment.length_bytes for segment in self.geometry.segments)
        return tuple(itertools.accumulate(lengths, initial=0))[:-1]

    def num_slots_within(self, num_slabs: int) -> int:
        """Return the number of slots in the first `num_slabs` slabs."""
        return min(num_slabs * self.slots_per_slab, self.num_slots)

    def ranges_of(self, slot: int) -> tuple[tuple[int, int], ...]:
        """Return (offset in host memory, length) of each segment's row of a slot, in bytes."""
        slab, row = divmod(slot, self.slots_per_slab)
        return tuple(
            (slab * self.slab_bytes + offset + row * segment.length_bytes, segment.length_bytes)
            for segment, offset in zip(self.geometry.segments, self.array_offsets(), strict=True)
        )


def make_geometry(segments: Iterable[Segment], num_blocks: int, storage_bytes: int) -> Geometry:
    """Merge adjacent and repeated segments of a storage of `storage_bytes`, in any order.

    Raises ConfigError if a segment lies outside the storage, or if two blocks share bytes.
    """
    joined: list[Segment] = []
    for segment in sorted(set(segments)):
        last = joined[-1] if joined else segment
        stride, start, end = last.stride_bytes, last.offset_bytes, last.end_bytes(1)
        if joined and segment.stride_bytes == stride and segment.offset_bytes <= end:
            joined[-1] = Segment(stride, start, max(end, segment.end_bytes(1)) - start)
        else:
            joined.append(segment)
    if not joined or num_blocks < 1:
        raise ConfigError("the KV cache has no blocks or no layers, so there is nothing to offload")
    _check(joined, num_blocks, storage_bytes)
    return Geometry(tuple(joined), num_blocks)


def _check(segments: list[Segment], num_blocks: int, storage_bytes: int) -> None:
    by_offset = sorted(segments, key=lambda segment: segment.offset_bytes)
    for index, segment in enumerate(by_offset):
        end = segment.end_bytes(num_blocks)
        overlaps_itself = num_blocks > 1 and segment.length_bytes > segment.stride_bytes
        is_inside = 0 <= segment.offset_bytes < end <= storage_bytes
        if overlaps_itself or not is_inside or segment.length_bytes < 1:
            raise ConfigError(
                f"unsupported KV cache layout: {segment} does not fit {num_blocks} blocks in a "
                f"storage of {storage_bytes} bytes"
            )
        for following in itertools.islice(by_offset, index + 1, None):
            if following.offset_bytes >= end:
                break
            if _shares_bytes(segment, following):
                raise ConfigError(
                    f"unsupported KV cache layout: {segment} and {following} share bytes, so a "
                    "block cannot be copied without another"
                )


def _shares_bytes(segment: Segment, following: Segment) -> bool:
    """Return whether two segments overlap; the second begins before the first ends.

    Different strides count as overlapping. With the same stride, the second is in the gaps of the
    first, or overlaps the block in which it begins, or the next one.
    """
    stride = segment.stride_bytes
    if following.stride_bytes != stride:
        return True
    rest = (following.offset_bytes - segment.offset_bytes) % stride
    return rest < segment.length_bytes or rest + following.length_bytes > stride
