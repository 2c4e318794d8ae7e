"""The transfer engine, driven by a backend whose copies end when the test says so."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Callable, Iterator

import pytest

from safe_offload.errors import TransferError
from safe_offload.protocol import FailureReason
from safe_offload.worker import engine as engine_module
from safe_offload.worker.backends.base import Direction
from safe_offload.worker.engine import TransferEngine
from tests.worker.fake_backend import (
    PATIENCE_S,
    SLOT_BYTES,
    FakeBackend,
    LoopKilled,
    flush,
    join,
    kill_main,
    stop_loop,
    submit,
)

LOAD, STORE = Direction.LOAD, Direction.STORE
ONE_COPY = SLOT_BYTES
"""A bound that lets one copy of one block run at a time."""

Outcomes = list[tuple[int, FailureReason | None]]
Start = Callable[..., TransferEngine]


@pytest.fixture
def backend() -> FakeBackend:
    return FakeBackend()


@pytest.fixture
def start(backend: FakeBackend) -> Iterator[Start]:
    engines: list[TransferEngine] = []

    def start_engine(max_inflight_bytes: int = 10 * SLOT_BYTES) -> TransferEngine:
        engine = TransferEngine(backend, max_inflight_bytes)
        engine.start()
        engines.append(engine)
        return engine

    yield start_engine
    backend.on_issue = backend.on_close = None
    for engine in engines:
        engine.close(timeout_s=0.0)
        flush(engine)
        backend.complete_all()
        join(engine)
    gc.collect()  # a coroutine that was never awaited warns in the test that made it


def drained(engine: TransferEngine) -> Outcomes:
    flush(engine)
    return engine.drain()


# ---- turns -------------------------------------------------------------------------------------


def test_a_transfer_is_issued_behind_its_mark_and_settles_when_its_copy_ends(backend, start):
    engine = start()
    engine.submit(STORE, _transfer_of(7, blocks=(4, 2), slots=(9, 1)))
    completion = backend.wait_for(4)
    assert completion.copy.direction is STORE
    assert completion.copy.block_ids.tolist() == [4, 2]
    assert completion.copy.slot_ids.tolist() == [9, 1]
    assert completion.after == 0
    assert drained(engine) == []
    backend.complete(4)
    assert drained(engine) == [(7, None)]
    assert drained(engine) == []


def test_the_mark_is_taken_when_the_transfer_is_submitted_not_when_it_is_issued(backend, start):
    engine = start(ONE_COPY)
    submit(engine, STORE, 1, 2)
    assert backend.mark() == 2
    backend.complete(1)
    assert backend.wait_for(2).after == 1


def test_loads_go_before_stores_that_wait_for_their_turn(backend, start):
    engine = start(ONE_COPY)
    submit(engine, STORE, 1, 2, 3)
    submit(engine, LOAD, 4, 5)
    flush(engine)
    assert backend.names == [1]
    for name in (1, 4, 5, 2, 3):
        backend.complete(name)
    flush(engine)
    assert backend.names == [1, 4, 5, 2, 3]


def test_a_store_that_would_fit_does_not_overtake_a_load_that_waits(backend, start):
    engine = start(2 * SLOT_BYTES)
    submit(engine, STORE, 1)
    submit(engine, LOAD, 10, num_blocks=2)
    submit(engine, STORE, 20)
    flush(engine)
    assert backend.names == [1]
    backend.complete(1)
    flush(engine)
    assert backend.names == [1, 10]


def test_bytes_in_flight_stay_within_the_bound(backend, start):
    engine = start(5 * SLOT_BYTES)
    submit(engine, STORE, 10, 20, 30, num_blocks=2)
    flush(engine)
    assert backend.names == [10, 20]
    backend.complete(20)
    flush(engine)
    assert backend.names == [10, 20, 30]


def test_a_transfer_larger_than_the_bound_runs_alone(backend, start):
    engine = start(2 * SLOT_BYTES)
    submit(engine, STORE, 1)
    submit(engine, STORE, 10, num_blocks=5)
    submit(engine, STORE, 20)
    flush(engine)
    assert backend.names == [1]
    backend.complete(1)
    flush(engine)
    assert backend.names == [1, 10]
    backend.complete(10)
    flush(engine)
    assert backend.names == [1, 10, 20]


@pytest.mark.parametrize("error", [TransferError("x", "y"), ValueError("z")])
def test_a_copy_that_cannot_be_issued_gives_its_bytes_back(backend, start, error):
    engine = start(ONE_COPY)

    def refuse_odd(copy):
        if copy.block_ids[0] % 2:
            raise error

    backend.on_issue = refuse_odd
    submit(engine, STORE, 1, 3, 4, 5, 6)
    backend.complete(4)
    backend.complete(6)
    outcomes = dict(drained(engine))
    assert {i for i, failure in outcomes.items() if failure is None} == {4, 6}
    assert outcomes[1] is outcomes[3] is outcomes[5] is FailureReason.COPY_FAILED


# ---- fences ------------------------------------------------------------------------------------


def test_a_fenced_store_is_issued_at_once_in_spite_of_the_bound(backend, start):
    engine = start(ONE_COPY)
    submit(engine, STORE, 1, 2, 3)
    flush(engine)
    backend.on_fence = lambda completion: True
    engine.fence((3,))
    assert backend.names == [1, 3]
    assert backend.fenced == [3]
    backend.complete(1)
    flush(engine)
    assert backend.names == [1, 3], "what was let in early still counts"
    backend.complete(3)
    backend.complete(2)
    assert drained(engine) == [(1, None), (3, None), (2, None)]


def test_a_store_fenced_in_the_call_after_its_submission_is_issued(backend, start):
    engine = start(ONE_COPY)
    submit(engine, STORE, 1)
    backend.on_fence = lambda completion: True
    for transfer_id in range(2, 30):
        submit(engine, STORE, transfer_id)
        engine.fence((transfer_id,))
    assert sorted(backend.names) == list(range(1, 30))


def test_a_fence_returns_when_the_copy_has_read(backend, start):
    engine = start()
    submit(engine, STORE, 1)
    backend.wait_for(1)
    fenced = threading.Thread(target=engine.fence, args=((1,),))
    fenced.start()
    fenced.join(0.02)
    assert fenced.is_alive()
    backend.complete(1)
    fenced.join(PATIENCE_S)
    assert not fenced.is_alive()
    assert drained(engine) == [(1, None)]


def test_a_fence_on_what_has_settled_or_never_was_returns_at_once(backend, start):
    engine = start()
    submit(engine, STORE, 1, 2)
    backend.complete(1)
    backend.complete(2)
    flush(engine)
    engine.fence((1, 2, 77))
    assert backend.fenced == []
    assert sorted(engine.drain()) == [(1, None), (2, None)]
    engine.fence((1, 2))
    assert engine.drain() == []


def test_a_store_that_cannot_be_fenced_in_time_fails_though_its_copy_succeeds(
    backend, start, monkeypatch
):
    monkeypatch.setattr(engine_module, "FENCE_TIMEOUT_S", 0.01)
    engine = start()
    submit(engine, STORE, 1, 2)
    backend.wait_for(2)
    backend.complete(2)
    flush(engine)
    engine.fence((1, 2))
    backend.complete(1)
    assert sorted(drained(engine)) == [(1, FailureReason.FENCE_TIMEOUT), (2, None)]


def test_a_store_that_is_not_issued_in_time_fails_though_its_copy_succeeds(
    backend, start, monkeypatch
):
    monkeypatch.setattr(engine_module, "FENCE_TIMEOUT_S", 0.01)
    engine = start()
    release = threading.Event()
    backend.on_issue = lambda copy: release.wait(PATIENCE_S)
    submit(engine, STORE, 1)
    engine.fence((1,))
    release.set()
    backend.complete(1)
    assert drained(engine) == [(1, FailureReason.FENCE_TIMEOUT)]


def test_a_fence_that_is_not_kept_once_stays_not_kept(backend, start):
    engine = start()
    submit(engine, STORE, 1)
    backend.wait_for(1)
    answers = iter((False, True))
    backend.on_fence = lambda completion: next(answers)
    engine.fence((1,))
    engine.fence((1,))
    backend.complete(1)
    assert drained(engine) == [(1, FailureReason.FENCE_TIMEOUT)]


def test_all_fences_of_a_call_share_one_deadline(backend, start, monkeypatch):
    monkeypatch.setattr(engine_module, "FENCE_TIMEOUT_S", 5.0)
    clock = iter((100.0, 101.0, 104.0, 109.0))
    monkeypatch.setattr(engine_module.time, "monotonic", lambda: next(clock))
    engine = start()
    submit(engine, STORE, 1, 2, 3)
    flush(engine)
    left: list[float] = []
    fence = backend.fence
    monkeypatch.setattr(backend, "fence", lambda completion, t: left.append(t) or True)
    # Each copy asks the clock once for `decided` and once for the fence.
    clock = iter((100.0, 101.0, 101.0, 104.0, 104.0, 109.0, 109.0))
    engine.fence((1, 2, 3))
    assert left == [4.0, 1.0, 0.0]
    monkeypatch.setattr(backend, "fence", fence)


def test_a_fence_that_raises_fails_its_store_and_the_others_are_still_fenced(backend, start):
    engine = start()
    submit(engine, STORE, 1, 2, 3)
    flush(engine)

    def fence(completion):
        if completion.name == 2:
            raise RuntimeError("the device is lost")
        return True

    backend.on_fence = fence
    engine.fence((1, 2, 3))
    assert backend.fenced == [1, 2, 3]
    backend.complete_all()
    assert sorted(drained(engine)) == [(1, None), (2, FailureReason.FENCE_TIMEOUT), (3, None)]


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
    engine = start()

    def raise_for_two(copy):
        if copy.block_ids[0] == 2 and when == "issued":
            raise error

    backend.on_issue = raise_for_two
    submit(engine, LOAD, 1, 2, 3)
    backend.complete(1)
    if when == "ends":
        backend.fail(2, error)
    backend.complete(3)
    assert sorted(drained(engine)) == [(1, None), (2, reason), (3, None)]
    assert engine.is_running


def test_a_failure_of_the_copy_is_told_before_the_fence_that_was_not_kept(backend, start):
    engine = start()
    submit(engine, STORE, 1)
    backend.wait_for(1)
    backend.on_fence = lambda completion: False
    engine.fence((1,))
    backend.fail(1, TransferError(FailureReason.COPY_FAILED, "no"))
    assert drained(engine) == [(1, FailureReason.COPY_FAILED)]


def test_a_mark_that_raises_leaves_nothing_behind(backend, start):
    engine = start()

    def fail() -> None:
        raise RuntimeError("no event")

    backend.on_mark = fail
    with pytest.raises(RuntimeError, match="no event"):
        submit(engine, STORE, 1)
    backend.on_mark = None
    assert drained(engine) == []
    assert engine.is_running


# ---- the loop dies -----------------------------------------------------------------------------


def kill_by_issue(error: BaseException) -> Callable[[TransferEngine, FakeBackend], None]:
    def kill(engine: TransferEngine, backend: FakeBackend) -> None:
        def raise_it(copy):
            raise error

        backend.on_issue = raise_it
        engine._call(engine._turnstile.hurry, engine._jobs[100])

    return kill


DEATHS = {
    "the main coroutine raises": lambda engine, backend: kill_main(engine),
    "the main coroutine raises SystemExit": lambda engine, backend: kill_main(engine, SystemExit()),
    "the loop is stopped": lambda engine, backend: stop_loop(engine),
    "a transfer raises what is no Exception": kill_by_issue(LoopKilled()),
    "a transfer raises SystemExit": kill_by_issue(SystemExit(3)),
    "a transfer raises KeyboardInterrupt": kill_by_issue(KeyboardInterrupt()),
}


@pytest.mark.parametrize("death", DEATHS)
def test_when_the_loop_dies_every_transfer_fails_once_and_nothing_hangs(backend, start, death):
    engine = start(ONE_COPY)
    submit(engine, STORE, 1, 100, 3)
    submit(engine, LOAD, 4)
    backend.wait_for(1)
    DEATHS[death](engine, backend)
    assert backend.closing.wait(PATIENCE_S)
    backend.complete(1)
    join(engine)
    assert not engine.is_running
    submit(engine, LOAD, 5)
    engine.fence((1, 3, 100, 5, 4))
    submit(engine, STORE, 6)
    assert sorted(engine.drain()) == [
        (transfer_id, FailureReason.NOT_RUNNING) for transfer_id in (1, 3, 4, 5, 6, 100)
    ]
    submit(engine, STORE, 7)
    assert engine.drain() == [(7, FailureReason.NOT_RUNNING)]
    assert engine.drain() == []
    assert engine.close()


@pytest.mark.parametrize("death", DEATHS)
def test_no_transfer_is_reported_while_its_copy_still_runs_under_a_dead_loop(
    backend, start, death
):
    engine = start(ONE_COPY)
    submit(engine, LOAD, 1)
    submit(engine, STORE, 100)
    backend.wait_for(1)
    DEATHS[death](engine, backend)
    assert backend.closing.wait(PATIENCE_S)
    # The loop has ended; the copy has not, and vLLM would give its blocks to somebody else.
    assert 1 not in dict(engine.drain())
    backend.complete(1)
    join(engine)
    assert (1, FailureReason.NOT_RUNNING) in engine.drain()


def test_a_transfer_that_had_settled_before_the_loop_died_keeps_its_outcome(backend, start):
    engine = start()
    submit(engine, LOAD, 1, 2)
    backend.complete(1)
    flush(engine)
    kill_main(engine)
    assert backend.closing.wait(PATIENCE_S)
    backend.complete(2)
    join(engine)
    assert sorted(engine.drain()) == [(1, None), (2, FailureReason.NOT_RUNNING)]


def test_a_fence_that_waits_returns_when_the_loop_dies(backend, start):
    engine = start(ONE_COPY)
    submit(engine, STORE, 1, 2)
    backend.wait_for(1)
    held = threading.Event()
    backend.on_issue = lambda copy: held.wait(PATIENCE_S)
    fenced = threading.Thread(target=engine.fence, args=((2,),))
    fenced.start()
    backend.on_close = backend.complete_all

    def die(copy):
        raise LoopKilled

    engine._call(setattr, backend, "on_issue", die)
    held.set()
    fenced.join(PATIENCE_S)
    assert not fenced.is_alive()
    join(engine)
    assert {i for i, _ in engine.drain()} == {1, 2}


def test_a_dead_loop_is_logged_once(backend, start, caplog, monkeypatch):
    monkeypatch.setattr(engine_module.logger, "handlers", [caplog.handler])
    engine = start()
    kill_main(engine)
    join(engine)
    submit(engine, STORE, 1)
    engine.drain()
    assert [r.levelname for r in caplog.records] == ["ERROR"]
    assert "died" in caplog.text


def test_an_engine_whose_loop_cannot_be_made_fails_every_transfer_once(backend, monkeypatch):
    def refuse() -> asyncio.AbstractEventLoop:
        raise OSError("no file descriptors left")

    monkeypatch.setattr(engine_module, "new_event_loop", refuse)
    engine = TransferEngine(backend, ONE_COPY)
    engine.start()
    join(engine)
    assert not engine.is_running
    submit(engine, LOAD, 1)
    engine.fence((1,))
    assert engine.drain() == [(1, FailureReason.NOT_RUNNING)]
    assert engine.close()
    assert backend.is_closed


def test_a_backend_that_cannot_be_closed_does_not_leave_transfers_unreported(backend, start):
    engine = start()
    submit(engine, LOAD, 1)
    backend.wait_for(1)

    def fail() -> None:
        raise RuntimeError("the device is lost")

    backend.on_close = fail
    kill_main(engine)
    join(engine)
    assert not engine.is_running
    assert engine.drain() == [(1, FailureReason.NOT_RUNNING)]
    engine.fence((1,))
    assert engine.close()


# ---- the end -----------------------------------------------------------------------------------


def test_close_cancels_what_is_queued_and_waits_for_what_is_issued(backend, start):
    engine = start(ONE_COPY)
    submit(engine, STORE, 1, 2)
    submit(engine, LOAD, 3)
    backend.wait_for(1)
    assert not engine.close(timeout_s=0.0)
    assert sorted(drained(engine)) == [
        (2, FailureReason.CANCELLED),
        (3, FailureReason.CANCELLED),
    ]
    assert not backend.is_closed
    backend.complete(1)
    assert engine.close(PATIENCE_S)
    assert backend.is_closed
    assert engine.drain() == [(1, None)]
    assert backend.names == [1]


def test_close_returns_false_if_a_copy_hangs(backend, start):
    engine = start()
    submit(engine, STORE, 1)
    backend.wait_for(1)
    assert not engine.close(timeout_s=0.01)
    assert not backend.is_closed
    assert engine.drain() == []


def test_nothing_starts_after_close_even_if_a_copy_hangs(backend, start):
    engine = start()
    submit(engine, STORE, 1)
    backend.wait_for(1)
    assert not engine.close(timeout_s=0.0)
    submit(engine, STORE, 2)
    flush(engine)
    assert backend.names == [1]
    backend.complete(1)
    join(engine)
    assert dict(engine.drain())[2] in (FailureReason.NOT_RUNNING, FailureReason.CANCELLED)


def test_closing_ends_the_thread_and_a_second_time_does_nothing(backend, start):
    before = set(threading.enumerate())
    engine = start()
    submit(engine, STORE, 1)
    backend.complete(1)
    flush(engine)
    assert engine.close()
    assert engine.close()
    assert backend.is_closed
    assert set(threading.enumerate()) <= before
    assert not engine.is_running
    assert engine.drain() == [(1, None)]


def test_what_is_submitted_after_close_is_not_running(backend, start):
    engine = start()
    assert engine.close()
    submit(engine, LOAD, 1)
    engine.fence((1,))
    assert engine.drain() == [(1, FailureReason.NOT_RUNNING)]


def test_it_runs_on_the_loop_of_the_standard_library(backend, start, monkeypatch):
    loops: list[asyncio.AbstractEventLoop] = []

    def new_event_loop() -> asyncio.AbstractEventLoop:
        loops.append(asyncio.new_event_loop())
        return loops[-1]

    monkeypatch.setattr(engine_module, "new_event_loop", new_event_loop)
    engine = start(ONE_COPY)
    assert isinstance(loops[0], asyncio.SelectorEventLoop)
    submit(engine, STORE, 1, 2)
    submit(engine, LOAD, 3)
    flush(engine)
    for name in (1, 3, 2):
        backend.complete(name)
    assert drained(engine) == [(1, None), (3, None), (2, None)]
    assert engine.close()


def _transfer_of(transfer_id: int, blocks: tuple[int, ...], slots: tuple[int, ...]):
    from safe_offload.protocol import Transfer

    return Transfer(transfer_id, blocks, slots)
