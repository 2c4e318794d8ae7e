"""Deadlines: what has not begun in time fails, what has begun is waited for and told once."""

import functools
import logging
from unittest.mock import Mock

import pytest

from safe_offload.errors import TransferError
from safe_offload.protocol import FailureReason
from safe_offload.worker import transfers as transfers_module
from safe_offload.worker.copies.base import Direction
from tests.worker.driven import drained, flush, submit
from tests.worker.fake_backend import ONE_COPY
from tests.worker.watched_loop import HandClock

LOAD, STORE = Direction.LOAD, Direction.STORE
TIMED_OUT = FailureReason.TIMED_OUT
BEYOND_S = 31.0


@pytest.fixture
def clock():
    return HandClock()


@pytest.fixture
def start(start, clock):
    return functools.partial(start, make_event_loop=clock.new_event_loop)


@pytest.fixture
def errors(monkeypatch):
    """What is logged as an error."""
    messages: list[str] = []
    handler = logging.Handler(logging.ERROR)
    monkeypatch.setattr(handler, "emit", lambda record: messages.append(record.getMessage()))
    monkeypatch.setattr(transfers_module.logger, "handlers", [handler])
    return messages


# ---- what has not begun ------------------------------------------------------------------------


def test_a_transfer_whose_turn_does_not_come_in_time_fails_and_is_never_issued(
    backend, start, clock
):
    transfers = start(ONE_COPY)
    submit(transfers, STORE, 1, 2, 3)
    clock.advance(transfers.loop, 29.0)
    assert drained(transfers) == []
    clock.advance(transfers.loop, 2.0)
    assert sorted(drained(transfers)) == [(2, TIMED_OUT), (3, TIMED_OUT)]
    backend.complete(1)
    assert drained(transfers) == [(1, None)]
    assert backend.names == [1]


def test_a_copy_that_is_still_in_the_queue_of_the_backend_is_taken_back(backend, start, clock):
    transfers = start()
    submit(transfers, LOAD, 1)
    flush(transfers)
    backend.queues = True
    submit(transfers, LOAD, 2)
    clock.advance(transfers.loop, BEYOND_S)
    assert drained(transfers) == [(2, TIMED_OUT)]
    assert transfers.num_overdue == 1, "the one that has begun"
    assert backend.issued[1].future.cancelled()
    backend.complete(1)
    assert drained(transfers) == [(1, None)]


# ---- what has begun ----------------------------------------------------------------------------


@pytest.mark.parametrize("direction", Direction)
@pytest.mark.parametrize("error", [None, TransferError(FailureReason.COPY_FAILED, "no")])
def test_a_copy_that_has_begun_is_not_given_up_before_it_ends(
    backend, start, clock, direction, error
):
    transfers = start()
    submit(transfers, direction, 1)
    for _ in range(5):
        clock.advance(transfers.loop, BEYOND_S)
        assert drained(transfers) == [], "it may still write where it was told to"
    if error is None:
        backend.complete(1)
    else:
        backend.fail(1, error)
    assert drained(transfers) == [(1, error and FailureReason.COPY_FAILED)]


def test_an_overdue_copy_is_counted_and_logged_once_with_what_to_do(backend, start, clock, errors):
    transfers = start(timeout_s=5.0)
    submit(transfers, LOAD, 7)
    submit(transfers, STORE, 8)
    clock.advance(transfers.loop, 6.0)
    clock.advance(transfers.loop, 6.0)
    assert transfers.num_overdue == 2
    assert len(errors) == 2
    assert "Transfer 7 (load by each, 100 bytes) is still running after 5 s" in errors[0]
    assert "transfer_timeout_s" in errors[0]


def test_an_overdue_copy_does_not_hold_up_the_others(backend, start, clock):
    transfers = start(ONE_COPY)
    submit(transfers, STORE, 1)
    clock.advance(transfers.loop, BEYOND_S)
    submit(transfers, LOAD, 2)
    submit(transfers, STORE, 3)
    backend.complete(2)
    backend.complete(3)
    assert drained(transfers) == [(2, None), (3, None)]
    backend.complete(1)
    assert drained(transfers) == [(1, None)]
    submit(transfers, STORE, 4, 5)
    flush(transfers)
    assert backend.names == [1, 2, 3, 4], "its bytes were given back once, not twice"


def test_a_backend_that_cannot_tell_is_waited_for(backend, start, clock, monkeypatch):
    lost = Mock(side_effect=RuntimeError("the device is lost"))
    monkeypatch.setattr("tests.worker.fake_backend.FakeCompletion.cancel", lost)
    transfers = start()
    submit(transfers, LOAD, 1)
    clock.advance(transfers.loop, BEYOND_S)
    assert drained(transfers) == []
    assert transfers.num_overdue == 1
    backend.complete(1)
    assert drained(transfers) == [(1, None)]
