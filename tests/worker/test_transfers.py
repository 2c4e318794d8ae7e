"""Transfers, driven by a backend whose copies end when the test says so."""

import asyncio
import threading

import pytest

from safe_offload.errors import TransferError
from safe_offload.protocol import FailureReason, Transfer
from safe_offload.worker import transfers as transfers_module
from safe_offload.worker.copies.base import Direction
from safe_offload.worker.transfers import Copied
from tests.worker.driven import drained, flush, serves, submit
from tests.worker.fake_backend import ONE_COPY, PATIENCE_S, SLOT_BYTES, transfer

LOAD, STORE = Direction.LOAD, Direction.STORE


# ---- turns -------------------------------------------------------------------------------------


def test_a_transfer_is_issued_behind_its_mark_and_settles_when_its_copy_ends(backend, start):
    transfers = start()
    transfers.submit(STORE, Transfer(7, (4, 2), (9, 1)))
    completion = backend.wait_for(4)
    assert completion.copy.direction is STORE
    assert completion.copy.block_ids.tolist() == [4, 2]
    assert completion.copy.slot_ids.tolist() == [9, 1]
    assert completion.after == 0
    assert drained(transfers) == []
    backend.complete(4)
    assert drained(transfers) == [(7, None)]
    assert drained(transfers) == []
    assert transfers.statistics().pending_ids == (), "what was drained is kept no longer"


def test_the_mark_is_taken_when_the_transfer_is_submitted_not_when_it_is_issued(backend, start):
    transfers = start(ONE_COPY)
    submit(transfers, STORE, 1, 2)
    assert backend.mark() == 2
    backend.complete(1)
    assert backend.wait_for(2).after == 1


@pytest.mark.parametrize(
    ("bound", "sizes", "turns"),
    [
        pytest.param(5, (2, 2, 2), {0: [0, 1, 2]}, id="while bytes in flight are below the bound"),
        pytest.param(2, (1, 1, 1), {0: [0, 1], 1: [0, 1, 2]}, id="none at the bound"),
        pytest.param(2, (1, 5, 1), {0: [0, 1], 1: [0, 1], 2: [0, 1, 2]}, id="one that is larger"),
        pytest.param(1, (1, 6, 5, 2), {0: [0], 1: [0, 3], 2: [0, 3, 1]}, id="small ones first"),
        pytest.param(1, (1, 4, 4, 4), {0: [0], 1: [0, 1], 2: [0, 1, 2]}, id="equal ones in order"),
        pytest.param(1, (1, 3, 2, 2), {0: [0], 1: [0, 2], 2: [0, 2, 1]}, id="none passes twice"),
    ],
)
def test_transfers_are_issued_while_bytes_in_flight_are_below_the_bound(
    backend, start, bound, sizes, turns
):
    """`turns` says which have been issued after this many of them have ended, in this order."""
    transfers = start(bound * SLOT_BYTES)
    for index, num_blocks in enumerate(sizes):
        submit(transfers, STORE, 10 * index, num_blocks=num_blocks)
    for num_ended, issued in turns.items():
        if num_ended:
            backend.complete(backend.names[num_ended - 1])
        flush(transfers)
        assert backend.names == [10 * index for index in issued]


# ---- fences ------------------------------------------------------------------------------------


def test_a_fenced_store_is_issued_at_once_in_spite_of_the_bound(backend, start):
    transfers = start(ONE_COPY)
    submit(transfers, STORE, 1, 2, 3)
    flush(transfers)
    backend.on_fence = lambda completion: True
    transfers.fence((3,))
    assert backend.names == [1, 3]
    assert backend.fenced == [3]
    backend.complete(1)
    flush(transfers)
    assert backend.names == [1, 3], "what was let in early still counts"
    backend.complete(3)
    backend.complete(2)
    assert drained(transfers) == [(1, None), (3, None), (2, None)]


def test_a_fence_on_what_has_settled_asks_nothing_of_the_backend(backend, start):
    transfers = start()
    submit(transfers, STORE, 1)
    backend.complete(1)
    flush(transfers)
    transfers.fence((1, 77))
    assert backend.fenced == []


def test_a_store_that_is_not_issued_in_time_fails_though_its_copy_succeeds(
    backend, start, monkeypatch
):
    monkeypatch.setattr(transfers_module, "FENCE_TIMEOUT_S", 0.01)
    transfers = start()
    release = threading.Event()
    backend.on_issue = lambda copy: release.wait(PATIENCE_S)
    submit(transfers, STORE, 1)
    transfers.fence((1,))
    release.set()
    backend.complete(1)
    assert drained(transfers) == [(1, FailureReason.FENCE_TIMEOUT)]


def test_all_fences_of_a_call_share_one_deadline(backend, start, monkeypatch):
    monkeypatch.setattr(transfers_module, "FENCE_TIMEOUT_S", 5.0)
    transfers = start()
    submit(transfers, STORE, 1, 2, 3)
    flush(transfers)
    now_s = [100.0]
    left_s: list[float] = []

    def fence_for_three_seconds(completion, timeout_s):
        left_s.append(timeout_s)
        now_s[0] += 3.0
        return True

    monkeypatch.setattr(transfers.loop, "now_s", lambda: now_s[0])
    monkeypatch.setattr(backend, "fence", fence_for_three_seconds)
    transfers.fence((1, 2, 3))
    assert left_s == [5.0, 2.0, 0.0]


def test_a_fence_that_raises_fails_its_store_and_the_others_are_still_fenced(backend, start):
    transfers = start()
    submit(transfers, STORE, 1, 2, 3)
    flush(transfers)

    def fence(completion):
        if completion.name == 2:
            raise RuntimeError("the device is lost")
        return True

    backend.on_fence = fence
    transfers.fence((1, 2, 3))
    assert backend.fenced == [1, 2, 3]
    backend.complete_all()
    assert sorted(drained(transfers)) == [(1, None), (2, FailureReason.FENCE_TIMEOUT), (3, None)]


# ---- failures ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (TransferError(FailureReason.BAD_PLAN, "no such block"), FailureReason.BAD_PLAN),
        (TransferError(FailureReason.CANCELLED, "closed"), FailureReason.CANCELLED),
        (TransferError("a word", "not a FailureReason"), FailureReason.COPY_FAILED),
        (ValueError("unforeseen"), FailureReason.COPY_FAILED),
        (asyncio.CancelledError(), FailureReason.CANCELLED),
    ],
)
@pytest.mark.parametrize("when", ["issued", "ends"])
def test_a_copy_that_raises_fails_with_its_reason_and_no_other_does(
    backend, start, error, reason, when
):
    transfers = start()

    def raise_for_two(copy):
        if copy.block_ids[0] == 2 and when == "issued":
            raise error

    backend.on_issue = raise_for_two
    submit(transfers, LOAD, 1, 2, 3)
    backend.complete(1)
    if when == "ends":
        backend.fail(2, error)
    backend.complete(3)
    assert sorted(drained(transfers)) == [(1, None), (2, reason), (3, None)]
    assert serves(transfers, backend)


def test_a_mark_that_raises_leaves_nothing_behind(backend, start):
    transfers = start()

    def fail() -> None:
        raise RuntimeError("no event")

    backend.on_mark = fail
    with pytest.raises(RuntimeError, match="no event"):
        submit(transfers, STORE, 1)
    backend.on_mark = None
    assert drained(transfers) == []
    assert transfers.statistics().pending_ids == ()
    assert serves(transfers, backend)


# ---- what copies take --------------------------------------------------------------------------


def complete_at(backend, transfers, clock, name, seconds):
    """End a copy at a time."""
    clock[0] = seconds
    backend.complete(name)
    flush(transfers)


def test_a_copy_waits_for_its_turn_and_for_the_one_before_it(backend, start, monkeypatch):
    """The queue ends where a copy could begin; from there on it copies."""
    transfers, clock = start(2 * SLOT_BYTES), [100.0]
    monkeypatch.setattr(transfers.loop, "now_s", lambda: clock[0])
    submit(transfers, LOAD, 1, 2, 3)
    flush(transfers)
    complete_at(backend, transfers, clock, 1, 103.0)
    complete_at(backend, transfers, clock, 2, 104.0)
    complete_at(backend, transfers, clock, 3, 109.0)
    assert transfers.take_copied() == [
        Copied(LOAD, SLOT_BYTES, queued_s=0.0, copying_s=3.0),
        Copied(LOAD, SLOT_BYTES, queued_s=3.0, copying_s=1.0),
        Copied(LOAD, SLOT_BYTES, queued_s=4.0, copying_s=5.0),
    ]
    assert transfers.take_copied() == []


def test_the_copies_of_one_direction_do_not_wait_for_the_other(backend, start, monkeypatch):
    transfers, clock = start(), [100.0]
    monkeypatch.setattr(transfers.loop, "now_s", lambda: clock[0])
    submit(transfers, STORE, 1)
    submit(transfers, LOAD, 2)
    flush(transfers)
    complete_at(backend, transfers, clock, 1, 102.0)
    complete_at(backend, transfers, clock, 2, 104.0)
    assert [(c.queued_s, c.copying_s) for c in transfers.take_copied()] == [(0.0, 2.0), (0.0, 4.0)]


def test_a_load_in_the_step_is_timed_from_its_issue(backend, start, monkeypatch):
    """Without streams it has ended before the loop knows it."""
    transfers, clock = start(), [100.0]
    monkeypatch.setattr(transfers.loop, "now_s", lambda: clock[0])

    def join(_completion):
        complete_at(backend, transfers, clock, 1, 103.0)
        return True

    monkeypatch.setattr(backend, "join", join)
    assert transfers.load_now(transfer(1), backend.mark())
    flush(transfers)
    assert [(c.queued_s, c.copying_s) for c in transfers.take_copied()] == [(0.0, 3.0)]


def test_a_copy_that_failed_is_not_timed(backend, start):
    transfers = start()
    submit(transfers, LOAD, 1)
    backend.fail(1, RuntimeError("injected"))
    assert drained(transfers) == [(1, FailureReason.COPY_FAILED)]
    assert transfers.take_copied() == []
