"""Ids to byte ranges: what is joined, and that nothing is lost or doubled."""

import numpy as np
import pytest

from safe_offload.layout import Geometry, HostLayout
from safe_offload.worker.copies.base import Copy, Direction
from safe_offload.worker.copies.ranges import Ranges, RangeTable
from tests.worker.copies.contract import GEOMETRIES, NUM_SLOTS, random_pairs

BASE, HOST = 1 << 40, 1 << 44
THREE_LAYERS = GEOMETRIES["layers outermost"]


def copy_of(blocks: list[int], slots: list[int], direction: Direction = Direction.STORE) -> Copy:
    return Copy(direction, np.array(blocks, np.int64), np.array(slots, np.int64))


def lengths_of(
    blocks: list[int],
    slots: list[int],
    geometry: Geometry = THREE_LAYERS,
    slots_per_slab: int = NUM_SLOTS,
) -> list[int]:
    """Lengths of the ranges of a store, longest first."""
    table = RangeTable(BASE, HOST, HostLayout(geometry, NUM_SLOTS, slots_per_slab))
    return sorted(map(int, table.ranges(table.runs(copy_of(blocks, slots))).lengths), reverse=True)


def test_a_run_of_blocks_to_a_run_of_slots_is_one_range_for_each_layer():
    assert lengths_of([4, 5, 6], [1, 2, 3]) == [3 * 96] * 3


def test_a_run_is_found_in_any_order():
    assert lengths_of([6, 4, 5], [3, 1, 2]) == [3 * 96] * 3


def test_a_run_ends_where_blocks_or_slots_jump():
    assert lengths_of([4, 5, 7, 8], [1, 2, 3, 4]) == [2 * 96] * 6
    assert lengths_of([4, 5, 6, 7], [1, 2, 4, 5]) == [2 * 96] * 6
    assert lengths_of([4, 5, 6], [3, 2, 1]) == [96] * 9


def test_a_run_ends_at_the_end_of_a_slab():
    assert lengths_of([4, 5, 6, 7], [2, 3, 4, 5], slots_per_slab=4) == [2 * 96] * 6


def test_a_block_in_one_piece_is_one_range():
    assert lengths_of([4, 9, 2], [1, 7, 3], GEOMETRIES["blocks outermost"]) == [256] * 3
    assert lengths_of([4, 5, 6], [1, 2, 3], GEOMETRIES["blocks outermost"]) == [3 * 256]


def test_blocks_with_gaps_between_them_are_not_joined():
    gaps = GEOMETRIES["blocks outermost with gaps"]
    assert lengths_of([4, 5], [1, 2], gaps) == [128, 128, 48, 48, 24, 24]


def bytes_of(ranges: Ranges) -> dict[int, int]:
    """Source address of every target byte."""
    moved: dict[int, int] = {}
    for target, source, length in zip(
        ranges.targets.tolist(), ranges.sources.tolist(), ranges.lengths.tolist(), strict=True
    ):
        for i in range(length):
            assert target + i not in moved
            moved[target + i] = source + i
    return moved


@pytest.mark.parametrize("direction", Direction)
@pytest.mark.parametrize("slots_per_slab", [NUM_SLOTS, 7])
@pytest.mark.parametrize("geometry", GEOMETRIES.values(), ids=GEOMETRIES)
def test_every_byte_of_every_block_goes_where_the_layout_says(geometry, slots_per_slab, direction):
    layout = HostLayout(geometry, NUM_SLOTS, slots_per_slab)
    table = RangeTable(BASE, HOST, layout)
    for seed in range(6):
        blocks, slots = random_pairs(seed)
        expected = {}
        for block, slot in zip(blocks, slots, strict=True):
            for segment, (row, length) in zip(
                geometry.segments, layout.ranges_of(slot), strict=True
            ):
                start = BASE + segment.offset_bytes + block * segment.stride_bytes
                for i in range(length):
                    pair = (HOST + row + i, start + i)
                    target, source = pair if direction is Direction.STORE else pair[::-1]
                    expected[target] = source
        assert bytes_of(table.ranges(table.runs(copy_of(blocks, slots, direction)))) == expected
