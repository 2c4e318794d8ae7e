"""Engines of the tiny Llama, for benchmarks that run rounds of their own."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from safe_offload.commands.bench.engine import OURS, PROMPT_TOKEN_IDS, BenchOptions, engine_options
from safe_offload.commands.bench.engine_breakdown import BASELINE
from safe_offload.commands.bench.engine_process import EngineProcess
from safe_offload.errors import SafeOffloadError

TIMEOUT_S = 600.0


def ours(**extra: Any) -> dict[str, Any]:
    """Return vLLM's `kv_transfer_config` for our connector."""
    return {"kv_connector": OURS, "kv_connector_extra_config": extra}


def make_tiny_engine(
    name: str, config: dict[str, Any] | None, folder: Path, **options: Any
) -> EngineProcess:
    """Return an engine that is starting.

    Args:
        name: of the engine and its log.
        config: of its connector; None for no connector.
        folder: takes model and log.
        options: those of `BenchOptions`.
    """
    choices = engine_options(BenchOptions(kv_transfer_config=config or ours(), **options), folder)
    chosen = choices[BASELINE if config is None else config["kv_connector"]]
    return EngineProcess(name, chosen, folder / f"{name.replace(' ', '-')}.log")


def random_prompt(generator: random.Random, num_tokens: int) -> tuple[int, ...]:
    """Return a prompt that no other begins like."""
    return tuple(generator.choices(PROMPT_TOKEN_IDS, k=num_tokens))


def forget_prefix_cache(engine: Any) -> None:
    """Empty the GPU's own prefix cache.

    Raises:
        SafeOffloadError: requests still use it.
    """
    if not engine.reset_prefix_cache():
        raise SafeOffloadError("expected vLLM to forget its prefix cache, it did not")
