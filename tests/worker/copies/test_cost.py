"""What a copy is expected to take, learnt from three that were timed."""

import pytest

from safe_offload.worker.copies.cost import Cost, Timed

MIB = 1 << 20
SMALL = Timed(32, MIB, 100e-6)
MANY = Timed(1024, 32 * MIB, 1092e-6)
LONG = Timed(32, 32 * MIB, 720e-6)


@pytest.fixture
def cost():
    learnt = Cost.learn([SMALL, MANY, LONG])
    assert learnt is not None
    return learnt


@pytest.mark.parametrize("timed", [SMALL, MANY, LONG])
def test_what_was_timed_is_expected_again(cost, timed):
    assert cost.of(timed.num_ranges, timed.size_bytes) == pytest.approx(timed.seconds)


def test_many_short_ranges_take_what_the_driver_takes_for_each(cost):
    assert cost.of(32_032, 62 * MIB) == pytest.approx(100e-6 + 32_000 * 1e-6)


def test_few_long_ranges_take_what_their_bytes_take(cost):
    assert cost.of(64, 1024 * MIB) == pytest.approx(100e-6 + 1023 * MIB * 620e-6 / (31 * MIB))


def test_nothing_is_quicker_than_the_small_copy(cost):
    assert cost.of(1, 4096) == SMALL.seconds


def test_times_that_only_others_on_the_machine_explain_make_no_range_cost_less_than_nothing():
    learnt = Cost.learn([SMALL, Timed(1024, 32 * MIB, 50e-6), Timed(32, 32 * MIB, 50e-6)])
    assert learnt == Cost(SMALL, 0.0, 0.0)


def test_blocks_that_cannot_be_joined_are_learnt_from_too():
    learnt = Cost.learn([SMALL, MANY, MANY])
    assert learnt is not None
    assert learnt.of(MANY.num_ranges, MANY.size_bytes) == pytest.approx(MANY.seconds)


@pytest.mark.parametrize("timed", [[SMALL], [SMALL, SMALL, SMALL], [SMALL, Timed(32, MIB, 1.0)]])
def test_nothing_is_learnt_of_copies_that_are_alike(timed):
    assert Cost.learn(timed) is None
