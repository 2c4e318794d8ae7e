"""An engine over a backend whose copies end when the test says so."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from safe_offload.worker.engine import TransferEngine
from tests.worker.fake_backend import SLOT_BYTES, FakeBackend, flush, join


@pytest.fixture
def backend() -> FakeBackend:
    return FakeBackend()


@pytest.fixture
def start(backend: FakeBackend) -> Iterator[Callable[..., TransferEngine]]:
    engines: list[TransferEngine] = []

    def start_engine(max_inflight_bytes: int = 10 * SLOT_BYTES, **options: Any) -> TransferEngine:
        engine = TransferEngine(backend, max_inflight_bytes, **options)
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
