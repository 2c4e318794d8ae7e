"""`safe-offload bench engine` with a tiny model that is made on the spot."""

from __future__ import annotations

import argparse
import os
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import get_args

from examples.tiny_models import ModelKind, count_prompt_blocks, write_tiny_model
from safe_offload.commands.bench import engine
from safe_offload.commands.bench.engine import BenchOptions
from safe_offload.commands.bench.engine_report import make_report
from safe_offload.commands.bench.report import publish

BLOCK_SIZES: dict[str, int] = {"llama": 32, "gemma3": 32, "deepseek": 16}
"""vLLM's CPU engine takes only 16 with MLA (0.32.0, v1/attention/backends/mla/cpu_mla.py)."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    engine.add_arguments(parser)
    parser.set_defaults(model="llama")


def run_command(arguments: argparse.Namespace) -> int:
    """Run `python -m tests.benchmarks engine`; `--model` is a kind of tiny model."""
    with tempfile.TemporaryDirectory(prefix="safe-offload-tiny-") as folder:
        options = tiny(engine.read_options(arguments), Path(folder))
        found = engine.measure(options, print, arguments.logs)
    publish(make_report(found), arguments)
    return 0 if found.num_different_answers == 0 else 1


def tiny(options: BenchOptions, folder: Path) -> BenchOptions:
    """Return the options with the model made in a folder, if it is a kind of tiny one."""
    if options.model not in get_args(ModelKind):
        return options
    kind: ModelKind = options.model  # type: ignore[assignment]
    block_size = options.block_size or BLOCK_SIZES[kind]
    num_blocks = count_prompt_blocks(
        kind,
        options.prompt_tokens + options.answer_tokens,
        block_size=block_size,
        max_num_batched_tokens=options.max_num_batched_tokens,
    )
    small = {"dtype": "float32", "enforce_eager": True, "gpu_memory_utilization": 0.9}
    kv_space = os.environ.get("VLLM_CPU_KVCACHE_SPACE", "1")
    return replace(
        options,
        model=str(write_tiny_model(kind, folder / kind, seed=options.seed)),
        block_size=block_size,
        num_gpu_blocks=options.num_gpu_blocks or round(options.pool_ratio * num_blocks),
        engine_args=small | options.engine_args,
        environment={"HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": kv_space},
    )
