"""What tests of several folders use."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tests.scheduler.rig import MakeRig, Rig


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With `-n 2`, one process runs all engines, one after the other, and both share the rest."""
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            is_engine = nodeid.startswith("tests/engine/")
            return "tests/engine" if is_engine else super()._split_scope(nodeid)

    config.option.loadscopereorder = False  # engines take longest and come early
    return Scheduling(config, log)


@pytest.fixture
def package_log() -> Iterator[list[logging.LogRecord]]:
    """All that the package logs, DEBUG included, whatever vLLM does with its loggers."""
    from tests.simulator.vllm_setup import EngineShape, make_config

    make_config(EngineShape())  # vLLM's first one takes away all handlers below its own logger
    records: list[logging.LogRecord] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            records.append(record)

    handler, logger = Keep(), logging.getLogger("vllm.safe_offload")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    yield records
    logger.setLevel(level)
    logger.removeHandler(handler)


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
