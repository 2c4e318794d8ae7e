"""Engines of the tiny Llama, for benchmarks that run rounds of their own."""

import random
from pathlib import Path
from typing import Any

from safe_offload.commands.bench.engine import OURS, PROMPT_TOKEN_IDS, BenchOptions, engine_options
from safe_offload.commands.bench.engine_process import EngineProcess
from safe_offload.commands.bench.engine_report import BASELINE
from safe_offload.errors import SafeOffloadError
from tests.benchmarks.engine import tiny

TIMEOUT_S = 600.0


def ours(**extra: Any) -> dict[str, Any]:
    return {"kv_connector": OURS, "kv_connector_extra_config": extra}


def make_tiny_engine(
    name: str, config: dict[str, Any] | None, folder: Path, **options: Any
) -> EngineProcess:
    how = BenchOptions("llama", kv_transfer_config=config or ours(), **options)
    choices = engine_options(tiny(how, folder))
    chosen = choices[BASELINE if config is None else config["kv_connector"]]
    return EngineProcess(name, chosen, folder / f"{name.replace(' ', '-')}.log")


def random_prompt(generator: random.Random, num_tokens: int) -> tuple[int, ...]:
    return tuple(generator.choices(PROMPT_TOKEN_IDS, k=num_tokens))


def forget_prefix_cache(engine: Any) -> None:
    """Empty the GPU's own prefix cache."""
    if not engine.reset_prefix_cache():
        raise SafeOffloadError("expected vLLM to forget its prefix cache, it did not")
