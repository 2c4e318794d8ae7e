"""Engines of the tiny Llama, for benchmarks that run rounds of their own."""

import argparse
import random
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

from examples.tiny_models import ModelKind
from safe_offload.commands.bench import engine as bench_engine
from safe_offload.commands.bench.engine import OURS, PROMPT_TOKEN_IDS, BenchOptions
from tests.benchmarks.engine import tiny
from tests.gpu import shapes

TIMEOUT_S = 600.0


def ours(**extra: Any) -> dict[str, Any]:
    return {"kv_connector": OURS, "kv_connector_extra_config": extra}


@contextmanager
def with_model(
    options: BenchOptions, arguments: argparse.Namespace, **engine_args: Any
) -> Iterator[tuple[BenchOptions, Path]]:
    """Yield the options with the model of a run, which goes with it, and the folder of its logs.

    A pool whose bytes are given has the blocks that vLLM makes of them. No engine is asked then,
    nor measures what is free while others start.
    """
    with tempfile.TemporaryDirectory(prefix="safe-offload-bench-") as name:
        logs = arguments.logs or Path(name)
        logs.mkdir(parents=True, exist_ok=True)
        options = shapes.take_shape(options, arguments.shape, Path(name))
        seeded = shapes.SEEDED if options.model in get_args(ModelKind) else {}
        options = replace(options, engine_args=seeded | options.engine_args | engine_args)
        yield sized(options, Path(name), logs), logs


def sized(options: BenchOptions, folder: Path, logs: Path) -> BenchOptions:
    """Return the options with the sizes of their model; a tiny one is made in the folder."""
    options = tiny(options, folder)
    is_sized = "kv_cache_memory_bytes" in options.engine_args
    return options if is_sized else bench_engine.fit_to_model(options, logs, print)


def random_prompt(generator: random.Random, num_tokens: int) -> tuple[int, ...]:
    return tuple(generator.choices(PROMPT_TOKEN_IDS, k=num_tokens))
