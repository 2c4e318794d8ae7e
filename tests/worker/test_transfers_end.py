"""How the transfer engine ends: by a death of its loop, or because it is closed."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable

import pytest

from safe_offload.protocol import FailureReason
from safe_offload.worker import engine as engine_module
from safe_offload.worker.backends.base import Direction
from safe_offload.worker.engine import TransferEngine
from tests.worker.fake_backend import (
    ONE_COPY,
    PATIENCE_S,
    FakeBackend,
    LoopKilled,
    drained,
    flush,
    join,
    kill_main,
    stop_loop,
    submit,
)

LOAD, STORE = Direction.LOAD, Direction.STORE

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
def test_no_transfer_is_reported_while_its_copy_still_runs_under_a_dead_loop(backend, start, death):
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


def test_a_fence_that_waits_for_an_issue_returns_when_the_loop_dies(backend, start, monkeypatch):
    monkeypatch.setattr(engine_module, "FENCE_TIMEOUT_S", 1000.0)
    engine = start(ONE_COPY)
    submit(engine, STORE, 1, 2)
    backend.wait_for(1)
    entered, held = threading.Event(), threading.Event()

    def die_when_told(copy):
        entered.set()
        assert held.wait(PATIENCE_S)
        raise LoopKilled

    backend.on_issue = die_when_told
    backend.on_close = backend.complete_all
    fenced = threading.Thread(target=engine.fence, args=((2,),), daemon=True)
    fenced.start()
    assert entered.wait(PATIENCE_S), "a fenced store does not wait for its turn"
    held.set()
    fenced.join(PATIENCE_S)
    assert not fenced.is_alive()
    join(engine)
    dead = FailureReason.NOT_RUNNING
    assert sorted(engine.drain()) == [(1, dead), (2, dead)]


def test_a_dead_loop_is_logged_once(backend, start, monkeypatch):
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    monkeypatch.setattr(handler, "emit", records.append)
    monkeypatch.setattr(engine_module.logger, "handlers", [handler])
    engine = start()
    kill_main(engine)
    join(engine)
    submit(engine, STORE, 1)
    engine.drain()
    assert [record.levelname for record in records] == ["ERROR"]
    assert "died" in records[0].getMessage()


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


def test_what_a_closing_loop_takes_and_never_runs_fails(backend, start, monkeypatch):
    closing, taken = threading.Event(), threading.Semaphore(0)

    class Loop(asyncio.SelectorEventLoop):
        """Closes when it has taken two more calls, which it then forgets."""

        def call_soon_threadsafe(self, *args, **kwargs):
            handle = super().call_soon_threadsafe(*args, **kwargs)
            if closing.is_set():
                taken.release()
            return handle

        def close(self) -> None:
            closing.set()
            for _ in range(2):
                assert taken.acquire(timeout=PATIENCE_S)
            super().close()

    monkeypatch.setattr(engine_module, "new_event_loop", Loop)
    engine = start()
    submit(engine, LOAD, 1)
    backend.wait_for(1)
    kill_main(engine)
    assert closing.wait(PATIENCE_S)
    submit(engine, STORE, 2)
    flush(engine)
    assert engine.drain() == [], "the copy still runs"
    backend.complete(1)
    join(engine)
    dead = FailureReason.NOT_RUNNING
    assert sorted(engine.drain()) == [(1, dead), (2, dead)]


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


# ---- other parts die ---------------------------------------------------------------------------


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt(), LoopKilled()])
def test_a_copying_thread_that_ends_by_what_is_no_exception_ends_the_cache(backend, start, error):
    engine = start(ONE_COPY)
    submit(engine, LOAD, 1, 2)
    submit(engine, STORE, 3)
    backend.on_close = backend.complete_all
    backend.fail(1, error)
    join(engine)
    submit(engine, STORE, 4)
    dead = FailureReason.NOT_RUNNING
    assert sorted(engine.drain()) == [(1, dead), (2, dead), (3, dead), (4, dead)]
    assert engine.close()


def test_a_backend_that_raises_on_every_call_fails_every_transfer_and_nothing_else(backend, start):
    engine = start(verify_every=1)

    def fail(*_: object) -> None:
        raise RuntimeError("the device is lost")

    submit(engine, LOAD, 1)
    backend.wait_for(1)
    backend.on_issue = backend.on_fence = backend.on_checksums = backend.on_close = fail
    submit(engine, STORE, 2)
    submit(engine, LOAD, 3)
    backend.complete(1)
    flush(engine)
    engine.fence((1, 2))
    failed = FailureReason.COPY_FAILED
    engine._verifier.executors[LOAD].submit(lambda: None).result(PATIENCE_S)
    assert sorted(drained(engine)) == [(1, failed), (2, failed), (3, failed)]
    assert engine.is_running
    assert engine.close()
