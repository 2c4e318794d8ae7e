"""Deadlines: what has not begun in time fails, what has begun is waited for and told once."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest

from safe_offload.errors import TransferError
from safe_offload.protocol import FailureReason
from safe_offload.worker import engine as engine_module
from safe_offload.worker.backends.base import Direction
from safe_offload.worker.engine import TransferEngine
from tests.worker.fake_backend import (
    ONE_COPY,
    SLOT_BYTES,
    FakeBackend,
    drained,
    flush,
    submit,
)
from tests.worker.hand_clock import HandClock

LOAD, STORE = Direction.LOAD, Direction.STORE
TIMED_OUT = FailureReason.TIMED_OUT
BEYOND_S = 31.0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> HandClock:
    hand_clock = HandClock()
    monkeypatch.setattr(engine_module, "new_event_loop", hand_clock.new_event_loop)
    return hand_clock


@pytest.fixture
def errors(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the engine logs as an error."""
    messages: list[str] = []
    handler = logging.Handler(logging.ERROR)
    monkeypatch.setattr(handler, "emit", lambda record: messages.append(record.getMessage()))
    monkeypatch.setattr(engine_module.logger, "handlers", [handler])
    return messages


# ---- what has not begun ------------------------------------------------------------------------


def test_a_transfer_whose_turn_does_not_come_in_time_fails_and_is_never_issued(
    backend, start, clock
):
    engine = start(ONE_COPY)
    submit(engine, STORE, 1, 2)
    submit(engine, LOAD, 3)
    clock.advance(engine, 29.0)
    assert drained(engine) == []
    clock.advance(engine, 2.0)
    assert sorted(drained(engine)) == [(2, TIMED_OUT), (3, TIMED_OUT)]
    backend.complete(1)
    assert drained(engine) == [(1, None)]
    assert backend.names == [1]


def test_a_copy_that_is_still_in_the_queue_of_the_backend_is_taken_back(backend, start, clock):
    engine = start()
    submit(engine, LOAD, 1)
    flush(engine)
    backend.queues = True
    submit(engine, LOAD, 2)
    clock.advance(engine, BEYOND_S)
    assert drained(engine) == [(2, TIMED_OUT)]
    assert engine.take_num_overdue() == 1, "the one that has begun"
    assert backend.issued[1].future.cancelled()
    backend.complete(1)
    assert drained(engine) == [(1, None)]


def test_the_deadline_counts_from_the_submission_not_from_the_issue(backend, start, clock):
    engine = start(ONE_COPY)
    submit(engine, STORE, 1, 2)
    clock.advance(engine, 20.0)
    backend.queues = True
    backend.complete(1)
    backend.wait_for(2)
    assert drained(engine) == [(1, None)]
    clock.advance(engine, 11.0)
    assert drained(engine) == [(2, TIMED_OUT)]


def test_those_behind_one_that_timed_out_have_their_turn(backend, start, clock):
    engine = start(2 * SLOT_BYTES)
    submit(engine, STORE, 1)
    submit(engine, LOAD, 10, num_blocks=2)
    clock.advance(engine, 20.0)
    submit(engine, STORE, 20)
    flush(engine)
    assert backend.names == [1]
    clock.advance(engine, 11.0)
    assert dict(drained(engine)) == {10: TIMED_OUT}
    assert backend.names == [1, 20]


# ---- what has begun ----------------------------------------------------------------------------


@pytest.mark.parametrize("direction", Direction)
@pytest.mark.parametrize("error", [None, TransferError(FailureReason.COPY_FAILED, "no")])
def test_a_copy_that_has_begun_is_not_given_up_before_it_ends(
    backend, start, clock, direction, error
):
    engine = start()
    submit(engine, direction, 1)
    for _ in range(5):
        clock.advance(engine, BEYOND_S)
        assert drained(engine) == [], "it may still write where it was told to"
    if error is None:
        backend.complete(1)
    else:
        backend.fail(1, error)
    assert drained(engine) == [(1, error and FailureReason.COPY_FAILED)]


def test_an_overdue_copy_is_counted_and_logged_once_with_what_to_do(backend, start, clock, errors):
    engine = start(timeout_s=5.0)
    submit(engine, LOAD, 7)
    submit(engine, STORE, 8)
    clock.advance(engine, 6.0)
    clock.advance(engine, 6.0)
    assert engine.take_num_overdue() == 2
    assert engine.take_num_overdue() == 0
    assert len(errors) == 2
    assert "Transfer 7 (load, 100 bytes) was started and has not ended within 5 s" in errors[0]
    assert "transfer_timeout_s" in errors[0]


def test_a_copy_that_ends_in_time_is_not_overdue(backend, start, clock, errors):
    engine = start()
    submit(engine, LOAD, 1)
    backend.complete(1)
    flush(engine)
    clock.advance(engine, BEYOND_S)
    assert drained(engine) == [(1, None)]
    assert engine.take_num_overdue() == 0
    assert errors == []


def test_an_overdue_copy_does_not_hold_up_the_others(backend, start, clock):
    engine = start(ONE_COPY)
    submit(engine, STORE, 1)
    clock.advance(engine, BEYOND_S)
    submit(engine, LOAD, 2)
    submit(engine, STORE, 3)
    backend.complete(2)
    backend.complete(3)
    assert drained(engine) == [(2, None), (3, None)]
    backend.complete(1)
    assert drained(engine) == [(1, None)]
    submit(engine, STORE, 4, 5)
    flush(engine)
    assert backend.names == [1, 2, 3, 4], "its bytes were given back once, not twice"


def test_a_backend_that_cannot_tell_is_waited_for(backend, start, clock, monkeypatch):
    def fail(completion) -> bool:
        raise RuntimeError("the device is lost")

    monkeypatch.setattr("tests.worker.fake_backend.FakeCompletion.cancel", fail)
    engine = start()
    submit(engine, LOAD, 1)
    clock.advance(engine, BEYOND_S)
    assert drained(engine) == []
    assert engine.take_num_overdue() == 1
    backend.complete(1)
    assert drained(engine) == [(1, None)]


# ---- with the rest of an engine ----------------------------------------------------------------


def test_a_fence_on_what_timed_out_has_nothing_to_wait_for(
    backend: FakeBackend, start: Callable[..., TransferEngine], clock: HandClock
):
    engine = start(ONE_COPY)
    submit(engine, STORE, 1, 2)
    clock.advance(engine, BEYOND_S)
    engine.fence((2,))
    assert backend.fenced == []
    assert drained(engine) == [(2, TIMED_OUT)]


def test_a_store_that_is_fenced_in_time_does_not_time_out(backend, start, clock):
    engine = start(ONE_COPY)
    submit(engine, STORE, 1, 2)
    backend.on_fence = lambda completion: True
    engine.fence((2,))
    clock.advance(engine, BEYOND_S)
    backend.complete(1)
    backend.complete(2)
    assert drained(engine) == [(1, None), (2, None)]


def test_an_engine_with_an_overdue_copy_can_be_closed(backend, start, clock):
    engine = start(ONE_COPY)
    submit(engine, STORE, 1)
    clock.advance(engine, BEYOND_S)
    submit(engine, LOAD, 2)
    backend.wait_for(2)
    submit(engine, LOAD, 3)
    assert not engine.close(timeout_s=0.0)
    assert drained(engine) == [(3, FailureReason.CANCELLED)]
    backend.complete_all()
    assert engine.close(20.0)
    assert sorted(engine.drain()) == [(1, None), (2, None)]
