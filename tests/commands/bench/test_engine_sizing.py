"""Sizes of the pools for a model that is not tiny."""

from pathlib import Path

import pytest

from safe_offload.commands.bench import engine
from safe_offload.commands.bench.engine import BenchOptions, scale
from safe_offload.commands.bench.engine_process import EngineOptions, Started
from safe_offload.commands.cli import main
from safe_offload.errors import SafeOffloadError


def started(*, num_gpu_blocks: int, max_concurrency: float, max_model_len: int = 1016) -> Started:
    return Started(
        start_s=1.0,
        num_gpu_blocks=num_gpu_blocks,
        max_concurrency=max_concurrency,
        max_model_len=max_model_len,
        block_size=16,
    )


@pytest.mark.parametrize(
    ("cpu_bytes", "expected"),
    [(None, {"num_cpu_blocks": 400}), ("1GiB", {"cpu_bytes_to_use": "1GiB"})],
)
def test_the_pools_hold_as_many_requests_as_asked_for(cpu_bytes, expected):
    """1,000 blocks hold 10 requests, so 1.6 take 160, and four on the host 400."""
    asked = started(num_gpu_blocks=1000, max_concurrency=10.0)
    found = scale(BenchOptions(cpu_bytes=cpu_bytes), asked)
    assert (found.prompt_tokens, found.num_gpu_blocks, found.block_size) == (1000, 160, 16)
    assert found.host_size == expected


class Asked(SafeOffloadError):
    """The engine was started; nothing more of it is needed."""


def engines_started(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> list[EngineOptions]:
    """Run the command until its first engine for measuring would start."""
    asked: list[EngineOptions] = []

    def answer(options: EngineOptions, log_path: Path, _: float) -> Started:
        asked.append(options)
        return started(num_gpu_blocks=1000, max_concurrency=10.0)

    def start(name: str, options: EngineOptions, log_path: Path) -> None:
        asked.append(options)
        raise Asked(name)

    monkeypatch.setattr(engine, "ask_for_sizes", answer)
    monkeypatch.setattr(engine, "EngineProcess", start)
    assert main(["bench", "engine", *arguments]) == 1
    return asked


def test_a_model_that_is_not_tiny_is_asked_for_its_sizes(monkeypatch):
    sizing, measured = engines_started(monkeypatch, "--model", "some/model")
    assert sizing.arguments["max_model_len"] == 16_016
    assert sizing.arguments["block_size"] is None, "vLLM chooses"
    assert sizing.arguments["gpu_memory_utilization"] < 0.5, "two engines live on the GPU"
    assert measured.arguments["max_model_len"] == 1016
    assert measured.arguments["num_gpu_blocks_override"] == 160
    assert measured.arguments["block_size"] == 16
