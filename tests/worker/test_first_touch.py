"""Host memory is touched ahead of the copies, and holds what was written to it meanwhile."""

from __future__ import annotations

import logging
import time

import pytest

from safe_offload.config import MIB
from safe_offload.worker import first_touch
from safe_offload.worker.first_touch import PIECE_BYTES, FirstTouch
from safe_offload.worker.host_memory import HostMemory
from tests.worker.backends.test_cpu import refuse_threads
from tests.worker.test_host_memory import resident_bytes


def touch_all(memory: HostMemory) -> FirstTouch:
    touch = FirstTouch(memory.tensor.data_ptr(), memory.size_bytes)
    touch._thread.join()
    return touch


def test_every_page_is_there_before_a_copy_wants_it() -> None:
    size_bytes = 2 * PIECE_BYTES + 5 * MIB + 12
    memory = HostMemory.allocate(size_bytes)
    before = resident_bytes()
    assert touch_all(memory).num_touched_bytes == size_bytes
    assert resident_bytes() - before >= size_bytes - MIB
    memory.close()


def test_what_is_written_meanwhile_stays() -> None:
    memory = HostMemory.allocate(8 * PIECE_BYTES)
    touch = FirstTouch(memory.tensor.data_ptr(), memory.size_bytes)
    values = memory.tensor[:: 3 * MIB]
    values.fill_(7)
    touch._thread.join()
    assert bool((values == 7).all())
    assert int(memory.tensor.max()) == 7
    memory.close()


def test_closing_waits_for_one_piece_at_most() -> None:
    memory = HostMemory.allocate(64 * PIECE_BYTES)
    touch = FirstTouch(memory.tensor.data_ptr(), memory.size_bytes)
    while not touch.num_touched_bytes:
        time.sleep(0.001)
    touch.close()
    assert touch.num_touched_bytes < memory.size_bytes
    memory.close()
    touch.close()


def test_a_kernel_that_does_not_know_it_is_no_error(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(first_touch, "_MADV_POPULATE_WRITE", 9999)
    memory = HostMemory.allocate(MIB)
    with caplog.at_level(logging.INFO, logger="vllm"):
        assert touch_all(memory).num_touched_bytes == 0
    assert "1.00 MiB of 1.00 MiB of host memory are not touched ahead" in caplog.text
    memory.close()


def test_a_system_that_refuses_the_thread_is_no_error(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    refuse_threads(monkeypatch)
    with caplog.at_level(logging.INFO, logger="vllm"):
        touch = FirstTouch(0, MIB)
    touch.close()
    assert "not touched ahead" in caplog.text
