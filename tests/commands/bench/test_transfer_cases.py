"""Which sizes are measured, and where their bytes lie."""

import pytest

from safe_offload.commands.bench.transfer_cases import USUAL_SIZES, Case, Traffic, select_cases
from safe_offload.worker.copies.base import Direction


def test_combinations_that_are_too_large_are_left_out() -> None:
    cases = select_cases(((4096, 8192), (1, 10), (1,)), 40_960)
    assert [(case.range_bytes, case.num_blocks) for case in cases] == [
        (4096, 1),
        (4096, 10),
        (8192, 1),
    ]


def test_the_usual_sizes_span_what_is_promised() -> None:
    cases = select_cases(USUAL_SIZES, 512 << 20)
    assert {case.range_bytes for case in cases} == set(USUAL_SIZES[0])
    assert {case.num_blocks for case in cases} == {1, 64, 1000, 4096}
    assert {case.num_layers for case in cases} == {1, 32, 80}


@pytest.mark.parametrize("case", [Case(64, 1, 8), Case(64, 5, 1), Case(64, 5, 3)])
def test_each_layer_of_each_block_is_a_range_of_its_own(case: Case) -> None:
    layout = case.make_layout()
    assert len(layout.geometry.segments) == case.num_layers
    assert layout.size_bytes == case.size_bytes
    ends = [segment.end_bytes(case.num_blocks) for segment in layout.geometry.segments]
    assert max(ends) == case.size_bytes


def test_one_block_is_not_copied_both_ways() -> None:
    assert Traffic.BOTH not in Case(64, 1, 8).traffics
    assert Traffic.BOTH in Case(64, 2, 8).traffics


def test_both_ways_means_half_of_the_blocks_each() -> None:
    case = Case(64, 5, 2)
    store, load = case.make_copies(Traffic.BOTH)
    assert (store.direction, load.direction) == (Direction.STORE, Direction.LOAD)
    assert case.moved_bytes(Traffic.BOTH) == 4 * 64 * 2
    assert case.moved_bytes(Traffic.STORE) == case.size_bytes
    for first, second in ((store.block_ids, load.block_ids), (store.slot_ids, load.slot_ids)):
        assert len(first) == len(second) == 2
        assert not set(first) & set(second)


def test_blocks_are_scattered() -> None:
    (copy,) = Case(64, 100, 1).make_copies(Traffic.LOAD)
    assert sorted(copy.block_ids) == sorted(copy.slot_ids) == list(range(100))
    assert abs(copy.block_ids[1:] - copy.block_ids[:-1]).mean() > 10
