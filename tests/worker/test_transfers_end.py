"""How transfers end: by a death of their loop, or because they are closed."""

import asyncio
import logging
import threading
from collections.abc import Callable

import pytest

from safe_offload.protocol import FailureReason
from safe_offload.worker import loop_thread
from safe_offload.worker import transfers as transfers_module
from safe_offload.worker.copies.base import Direction
from tests.worker.driven import (
    DrivenTransfers,
    drained,
    flush,
    hurry,
    join,
    looked_at,
    serves,
    submit,
)
from tests.worker.fake_backend import ONE_COPY, PATIENCE_S, FakeBackend, LoopKilled, transfer

LOAD, STORE = Direction.LOAD, Direction.STORE

# ---- the loop dies -----------------------------------------------------------------------------


def kill_by_issue(error: BaseException) -> Callable[[DrivenTransfers, FakeBackend], None]:
    def kill(transfers: DrivenTransfers, backend: FakeBackend) -> None:
        def raise_it(copy):
            raise error

        backend.on_issue = raise_it
        hurry(transfers, 100)

    return kill


DEATHS = {
    "the main coroutine raises": lambda transfers, backend: transfers.loop.kill(),
    "the loop is stopped": lambda transfers, backend: transfers.loop.stop(),
    "a transfer raises what is no Exception": kill_by_issue(LoopKilled()),
    "a transfer raises SystemExit": kill_by_issue(SystemExit(3)),
    "a transfer raises KeyboardInterrupt": kill_by_issue(KeyboardInterrupt()),
}


@pytest.mark.parametrize("death", DEATHS)
def test_when_the_loop_dies_every_transfer_fails_once_and_nothing_hangs(backend, start, death):
    transfers = start(ONE_COPY)
    submit(transfers, STORE, 1, 100, 3, 4)
    backend.wait_for(1)
    DEATHS[death](transfers, backend)
    assert backend.closing.wait(PATIENCE_S)
    # The loop has ended; the copy has not, and vLLM would give its blocks to others.
    found = transfers.drain()
    assert 1 not in dict(found)
    backend.complete(1)
    join(transfers)
    submit(transfers, LOAD, 5)
    transfers.fence((1, 3, 100, 5, 4))
    submit(transfers, STORE, 6)
    assert sorted(found + transfers.drain()) == [
        (transfer_id, FailureReason.NOT_RUNNING) for transfer_id in (1, 3, 4, 5, 6, 100)
    ]
    submit(transfers, STORE, 7)
    assert transfers.drain() == [(7, FailureReason.NOT_RUNNING)]
    assert transfers.drain() == []
    assert transfers.close()


def test_a_fence_that_waits_for_an_issue_returns_when_the_loop_dies(backend, start, monkeypatch):
    monkeypatch.setattr(transfers_module, "FENCE_TIMEOUT_S", 1000.0)
    transfers = start(ONE_COPY)
    submit(transfers, STORE, 1, 2)
    backend.wait_for(1)
    entered, held = threading.Event(), threading.Event()

    def die_when_told(copy):
        entered.set()
        assert held.wait(PATIENCE_S)
        raise LoopKilled

    backend.on_issue = die_when_told
    backend.on_close = backend.complete_all
    fenced = threading.Thread(target=transfers.fence, args=((2,),), daemon=True)
    fenced.start()
    assert entered.wait(PATIENCE_S), "a fenced store does not wait for its turn"
    held.set()
    fenced.join(PATIENCE_S)
    assert not fenced.is_alive()
    join(transfers)
    dead = FailureReason.NOT_RUNNING
    assert sorted(transfers.drain()) == [(1, dead), (2, dead)]


def test_a_dead_loop_is_logged_once(backend, start, monkeypatch):
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    monkeypatch.setattr(handler, "emit", records.append)
    monkeypatch.setattr(loop_thread.logger, "handlers", [handler])
    transfers = start()
    transfers.loop.kill()
    join(transfers)
    submit(transfers, STORE, 1)
    transfers.drain()
    assert [record.levelname for record in records] == ["ERROR"]
    assert "died" in records[0].getMessage()


def test_without_a_loop_every_transfer_fails_once(backend):
    def refuse() -> asyncio.AbstractEventLoop:
        raise OSError("no file descriptors left")

    transfers = DrivenTransfers(backend, ONE_COPY, make_event_loop=refuse)
    join(transfers)
    submit(transfers, LOAD, 1)
    transfers.fence((1,))
    assert transfers.drain() == [(1, FailureReason.NOT_RUNNING)]
    assert transfers.close()
    assert backend.is_closed


def test_a_backend_that_cannot_be_closed_does_not_leave_transfers_unreported(backend, start):
    transfers = start()
    submit(transfers, LOAD, 1)
    backend.wait_for(1)

    def fail() -> None:
        raise RuntimeError("the device is lost")

    backend.on_close = fail
    transfers.loop.kill()
    join(transfers)
    assert transfers.drain() == [(1, FailureReason.NOT_RUNNING)]
    transfers.fence((1,))
    assert transfers.close()


def test_what_a_closing_loop_takes_and_never_runs_fails(backend, start):
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

    transfers = start(make_event_loop=Loop)
    submit(transfers, LOAD, 1)
    backend.wait_for(1)
    transfers.loop.kill()
    assert closing.wait(PATIENCE_S)
    submit(transfers, STORE, 2)
    flush(transfers)
    assert transfers.drain() == [], "the copy still runs"
    backend.complete(1)
    join(transfers)
    dead = FailureReason.NOT_RUNNING
    assert sorted(transfers.drain()) == [(1, dead), (2, dead)]


# ---- the end -----------------------------------------------------------------------------------


def test_close_cancels_what_is_queued_and_waits_for_what_is_issued(backend, start):
    transfers = start(ONE_COPY)
    submit(transfers, STORE, 1, 2, 3)
    backend.wait_for(1)
    assert not transfers.close(timeout_s=0.0)
    assert sorted(drained(transfers)) == [
        (2, FailureReason.CANCELLED),
        (3, FailureReason.CANCELLED),
    ]
    assert not backend.is_closed
    backend.complete(1)
    assert transfers.close(PATIENCE_S)
    assert backend.is_closed
    assert transfers.drain() == [(1, None)]
    assert backend.names == [1]


def test_a_copy_that_the_loop_takes_no_more_fails_when_it_has_ended(backend, start, monkeypatch):
    """Of a step that was planned before the end; the device orders it, as on a GPU."""
    transfers = start()
    submit(transfers, LOAD, 1)
    assert not transfers.close(timeout_s=0.0)
    monkeypatch.setattr(backend, "join", lambda completion: True)
    assert transfers.load_now(transfer(2), backend.mark())
    assert drained(transfers) == [], "vLLM would give its blocks to others"
    backend.complete_all()
    join(transfers)
    assert sorted(transfers.drain()) == [(1, None), (2, FailureReason.NOT_RUNNING)]


# ---- other parts die ---------------------------------------------------------------------------


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt(), LoopKilled()])
def test_a_copying_thread_that_ends_by_what_is_no_exception_ends_the_cache(backend, start, error):
    transfers = start(ONE_COPY)
    submit(transfers, LOAD, 1, 2)
    submit(transfers, STORE, 3)
    backend.on_close = backend.complete_all
    backend.fail(1, error)
    join(transfers)
    submit(transfers, STORE, 4)
    dead = FailureReason.NOT_RUNNING
    assert sorted(transfers.drain()) == [(1, dead), (2, dead), (3, dead), (4, dead)]
    assert transfers.close()


def test_a_backend_that_raises_on_every_call_fails_every_transfer_and_nothing_else(backend, start):
    transfers = start(verify_every=1)

    def fail(*_: object) -> None:
        raise RuntimeError("the device is lost")

    submit(transfers, LOAD, 1)
    backend.wait_for(1)
    backend.on_issue = backend.on_fence = backend.on_checksums = backend.on_close = fail
    submit(transfers, STORE, 2)
    submit(transfers, LOAD, 3)
    backend.complete(1)
    flush(transfers)
    transfers.fence((1, 2))
    failed = FailureReason.COPY_FAILED
    looked_at(transfers.threads)
    assert sorted(drained(transfers)) == [(1, failed), (2, failed), (3, failed)]
    backend.on_issue = backend.on_fence = backend.on_checksums = None
    assert serves(transfers, backend)
    assert transfers.close()
