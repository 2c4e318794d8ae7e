"""Engines that are measured in turns."""

from unittest.mock import MagicMock

import pytest

from safe_offload.commands.bench.engine_process import (
    SPIN_S,
    EngineOptions,
    Turns,
    _answer_calls,
)
from safe_offload.compat.engine_config import is_worker_beside_scheduler


class Clock:
    """A clock that only `sleep` and the test move."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def monotonic(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


def test_an_engine_waits_until_the_one_before_it_has_stopped_spinning():
    clock = Clock()
    turns = Turns(clock)
    turns.begin("a")
    turns.end("a")
    turns.begin("a")
    assert clock.now_s == 100.0, "an engine does not wait for itself"
    clock.now_s = 105.0
    turns.end("a")
    clock.now_s = 105.5
    turns.begin("b")
    assert clock.now_s == pytest.approx(105.0 + SPIN_S)
    turns.end("b")
    clock.now_s = 120.0
    turns.begin("a")
    assert clock.now_s == 120.0, "it has stopped long ago"
    turns.end("a", spin_s=0.0)
    turns.begin("b")
    assert clock.now_s == 120.0, "it has no worker that spins"


def test_only_workers_in_processes_of_their_own_spin():
    """On one GPU the worker is the engine itself: a turn began 1.2 s late for nothing."""
    config = MagicMock(distributed_executor_backend="uni")
    assert is_worker_beside_scheduler(config)
    config.distributed_executor_backend = "mp"
    assert not is_worker_beside_scheduler(config)


@pytest.mark.parametrize(
    "gone",
    [
        {"recv.side_effect": EOFError},
        {"recv.side_effect": ConnectionResetError},  # it had not read what was sent last
        {"send.side_effect": BrokenPipeError},
    ],
    ids=str,
)
def test_an_engine_ends_when_the_benchmark_is_gone(monkeypatch, gone):
    make_engine = MagicMock()
    monkeypatch.setattr("vllm.LLM", make_engine)
    _answer_calls(MagicMock(**gone), EngineOptions({}))
    make_engine.return_value.llm_engine.engine_core.shutdown.assert_called_once()
