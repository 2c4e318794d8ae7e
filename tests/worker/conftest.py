"""Transfers over a backend whose copies end when the test says so."""

from typing import Any

import pytest

from tests.worker.driven import DrivenTransfers, flush, join
from tests.worker.fake_backend import SLOT_BYTES, FakeBackend


@pytest.fixture
def backend():
    return FakeBackend()


@pytest.fixture
def start(backend):
    started: list[DrivenTransfers] = []

    def start(max_inflight_bytes: int = 10 * SLOT_BYTES, **options: Any) -> DrivenTransfers:
        started.append(DrivenTransfers(backend, max_inflight_bytes, **options))
        return started[-1]

    yield start
    backend.on_issue = backend.on_close = None
    for transfers in started:
        transfers.close(timeout_s=0.0)
        flush(transfers)
        backend.complete_all()
        join(transfers)
