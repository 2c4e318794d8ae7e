"""Host memory that is made ready shortly before it is used."""

import os
import threading
from unittest.mock import Mock

import numpy as np
import pytest

from safe_offload.layout import HostLayout, Segment, make_geometry
from safe_offload.worker.copies import cpu
from safe_offload.worker.memory import first_touch
from safe_offload.worker.memory.first_touch import FirstTouch, Touch
from tests.worker.waiting import PATIENCE_S, wait_until

NEEDS_COMPILED = pytest.mark.skipif(
    cpu.find_touch() is None, reason="the loop was not compiled when this was installed"
)
SLOT_BYTES = 1 << 16
NUM_SLOTS = 1024


class Touched:
    """Notes which bytes were touched."""

    def __init__(self) -> None:
        self.ranges: list[tuple[int, int]] = []

    def __call__(self, address: int, length_bytes: int, step_bytes: int) -> None:
        self.ranges.append((address, address + length_bytes))

    def wait_until(self, end: int) -> None:
        """Wait until the range that ends there was touched."""
        wait_until(lambda: bool(self.ranges) and self.ranges[-1][1] == end)


@pytest.fixture
def start(monkeypatch):
    monkeypatch.setattr(first_touch, "STOP_TIMEOUT_S", PATIENCE_S)  # the thread has no priority
    started: list[FirstTouch] = []

    def start(touch: Touch, address: int, ahead_bytes: int, num_segments: int = 1) -> FirstTouch:
        part = SLOT_BYTES // num_segments
        gap = 2 * part  # so that they stay apart
        segments = [Segment(gap * num_segments, gap * n, part) for n in range(num_segments)]
        geometry = make_geometry(segments, 4, 4 * gap * num_segments)
        layout = HostLayout.in_one_slab(geometry, NUM_SLOTS)
        started.append(FirstTouch(touch, address, layout, ahead_bytes))
        return started[-1]

    yield start
    for one in started:
        assert one.stop()


def ids(*slots: int) -> np.ndarray:
    return np.array(slots, np.int64)


def test_as_much_is_touched_as_is_stored_soon_and_no_more(start):
    touched = Touched()
    first = start(touched, 0, 16 * SLOT_BYTES)
    touched.wait_until(16 * SLOT_BYTES)
    first.will_store(ids(0, 1))
    first.will_store(ids(3, 2))
    touched.wait_until(20 * SLOT_BYTES)
    first.will_store(ids(NUM_SLOTS - 1))  # out of order
    first.will_store(ids(19))
    touched.wait_until(36 * SLOT_BYTES)
    assert [start for start, _ in touched.ranges] == [0, *(end for _, end in touched.ranges[:-1])]


class HeldTouch:
    """A touch that takes as long as the test wants."""

    def __init__(self) -> None:
        self.is_inside, self.may_go_on = threading.Event(), threading.Event()

    def __call__(self, *_: int) -> None:
        self.is_inside.set()
        self.may_go_on.wait(PATIENCE_S)


def test_memory_that_is_still_touched_is_not_unmapped(start, monkeypatch):
    touch = HeldTouch()
    first = start(touch, 0, SLOT_BYTES)
    assert touch.is_inside.wait(PATIENCE_S)
    monkeypatch.setattr(first_touch, "STOP_TIMEOUT_S", 0.01)
    assert not first.stop()
    monkeypatch.setattr(first_touch, "STOP_TIMEOUT_S", PATIENCE_S)
    touch.may_go_on.set()


def test_where_the_lowest_priority_is_not_to_be_had_nothing_is_touched(start, monkeypatch):
    monkeypatch.setattr(os, "sched_setscheduler", Mock(side_effect=PermissionError("not here")))
    touched = Touched()
    first = start(touched, 0, SLOT_BYTES)
    first.will_store(ids(0))
    assert first.stop()
    assert not touched.ranges


def test_where_the_system_has_no_thread_left_nothing_is_touched(start, monkeypatch):
    refuse = Mock(side_effect=RuntimeError("can't start new thread"))
    monkeypatch.setattr(threading.Thread, "start", refuse)
    first = start(Touched(), 0, SLOT_BYTES)
    first.will_store(ids(0))
    assert first.stop()


@NEEDS_COMPILED
def test_touching_never_undoes_what_another_thread_writes():
    touch = cpu.find_touch()
    assert touch is not None
    content = np.zeros(4096, np.uint8)
    is_over = threading.Event()

    def touch_on() -> None:
        while not is_over.is_set():
            touch(content.ctypes.data, content.size, 1)

    toucher = threading.Thread(target=touch_on)
    toucher.start()
    try:
        for value in range(5_000):
            content[:] = value % 251
            assert (content == value % 251).all()
    finally:
        is_over.set()
        toucher.join()
