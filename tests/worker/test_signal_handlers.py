"""Signals that reach an idle engine although a library has had its hands on them."""

import queue
import signal
import threading

import pytest

from tests.worker.copies.fake_device import FakeGpu
from tests.worker.waiting import PATIENCE_S


class EndedError(Exception):
    """The handler of the signal has run."""


def test_an_engine_that_waits_for_work_ends_on_sigterm_after_a_kernel_was_compiled():
    """Else the wait is begun again, and the handler runs only after it."""
    work: queue.Queue[None] = queue.Queue()
    is_late = []

    def end(*_: object) -> None:
        raise EndedError

    def give_up() -> None:
        is_late.append(True)
        work.put(None)

    def wait_for_work() -> None:
        for timer in timers:
            timer.start()
        work.get()

    def signal_this_thread(ident: int = threading.get_ident()) -> None:
        signal.pthread_kill(ident, signal.SIGTERM)

    before = signal.signal(signal.SIGTERM, end)
    gpu = FakeGpu()
    timers = [threading.Timer(0.1, signal_this_thread), threading.Timer(PATIENCE_S / 10, give_up)]
    try:
        gpu.open().load_kernel(16)
        with pytest.raises(EndedError):
            wait_for_work()
    finally:
        signal.signal(signal.SIGTERM, before)
        for timer in timers:
            timer.cancel()
        gpu.close()
    assert not is_late
