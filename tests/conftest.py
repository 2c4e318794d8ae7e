"""What tests of several folders use."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tests.scheduler.rig import MakeRig, Rig
    from tests.worker.copies.fake_device import FakeGpu


def pytest_configure(config: pytest.Config) -> None:
    """Let `make test` draw the same examples every time; `make test-nightly` draws others."""
    if "not nightly" in config.option.markexpr:
        from hypothesis import settings

        settings.register_profile("the same", derandomize=True, database=None)
        settings.load_profile("the same")


def _engine_file(nodeid: str) -> str | None:
    """Return the name of a file of tests that run real engines."""
    path = nodeid.partition("::")[0]
    return path.rpartition("/")[2] if path.startswith("tests/engine/") else None


def _is_last(nodeid: str) -> bool:
    """Return whether it is of the second half of the engine tests."""
    return (_engine_file(nodeid) or "") > "test_m"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the second half of the engine tests last, where two processes share what is left."""
    items.sort(key=lambda item: _is_last(item.nodeid))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With `-n 2`, one process begins with the engines of the first half, one after the other."""
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            if _engine_file(nodeid) and not _is_last(nodeid):
                return "tests/engine"
            return super()._split_scope(nodeid)

    config.option.loadscopereorder = False  # engines take longest and come early
    return Scheduling(config, log)


@contextlib.contextmanager
def _records(level: int) -> Iterator[list[logging.LogRecord]]:
    """What the package logs from this level on, whatever vLLM does with its loggers."""
    from tests.simulator.vllm_setup import EngineShape, make_config

    make_config(EngineShape())  # vLLM's first one takes away all handlers below its own logger
    records: list[logging.LogRecord] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            records.append(record)

    handler, logger = Keep(), logging.getLogger("vllm.safe_offload")
    level_before = logger.level
    logger.addHandler(handler)
    logger.setLevel(level)
    yield records
    logger.setLevel(level_before)
    logger.removeHandler(handler)


@pytest.fixture
def package_log() -> Iterator[list[logging.LogRecord]]:
    """All that the package logs, DEBUG included."""
    with _records(logging.DEBUG) as records:
        yield records


@pytest.fixture
def logged() -> Iterator[list[logging.LogRecord]]:
    """What the package warns of, and its errors."""
    with _records(logging.WARNING) as records:
        yield records


@pytest.fixture
def forked_engines() -> Iterator[None]:
    """Engines that the test starts are forks of a process that has imported vLLM."""
    from tests.fresh_process import engine_server

    with engine_server():
        yield


@pytest.fixture
def make_rig() -> Iterator[MakeRig]:
    """Engines of the simulator to step by hand; see `tests.scheduler.rig`."""
    from tests.scheduler.rig import Rig

    rigs: list[Rig] = []

    def make(**options: Any) -> Rig:
        rigs.append(Rig(**options))
        return rigs[-1]

    yield make
    for rig in rigs:
        rig.close()


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeGpu]:
    """A GPU of threads, on a machine that does not tell where pages lie."""
    from safe_offload.worker.memory import placement
    from tests.worker.copies.fake_device import FakeGpu

    monkeypatch.setattr(placement, "pages_of", lambda *_: placement.Pages(None, {}))
    made = FakeGpu()
    yield made
    made.close()
    assert made.violations == []
