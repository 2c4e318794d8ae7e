"""Weights that make answers tell whether the KV cache was right, and a block that is not.

vLLM's `load_format=dummy` cannot do that: its weights are so small that attention hardly counts.
These keep activations at unit scale and make attention sharp, as `examples/tiny_models.py` says.
They are drawn on the device, by the name of each parameter, so that all engines have the same ones
within a second or two, and no file is written.
"""

from __future__ import annotations

import zlib
from dataclasses import replace
from typing import Any

import torch
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

from examples.tiny_models import ATTENTION_SHARPNESS
from safe_offload.protocol import Transfer
from tests.benchmarks.engine_watch import WorkerProbe
from tests.gpu.shapes import LOAD_FORMAT

QUERIES = ("q_proj", "q_b_proj")


@register_model_loader(LOAD_FORMAT)
class SeededLoader(DummyModelLoader):
    """Fills a model's parameters; buffers stay as the model has made them."""

    def load_weights(self, model: torch.nn.Module, model_config: Any) -> None:
        with torch.no_grad():
            for name, module in model.named_modules():
                for own_name, parameter in module.named_parameters(name, recurse=False):
                    fill(module, own_name, parameter)


def fill(module: Any, name: str, parameter: torch.Tensor) -> None:
    """Fill one parameter of a layer: ranks of tensor parallelism draw alike, too."""
    *_, layer, kind = ("", *name.split("."))
    if parameter.dim() > 1:
        generator = torch.Generator(parameter.device).manual_seed(zlib.crc32(name.encode()))
        parameter.normal_(0.0, parameter.shape[-1] ** -0.5, generator=generator)
        if layer in QUERIES:
            parameter.mul_(ATTENTION_SHARPNESS)
        elif layer == "qkv_proj":
            parameter[: module.num_heads * module.head_size].mul_(ATTENTION_SHARPNESS)
    elif kind == "weight":
        # Of a norm, which Gemma adds 1 to.
        scale = ATTENTION_SHARPNESS if layer == "q_norm" else 1.0
        parameter.fill_(scale - type(module).__name__.startswith("Gemma"))
    elif kind == "A":
        # Of a state-space model: how fast each head forgets, which is never.
        parameter.fill_(-0.01)
    else:
        parameter.zero_()


class Spoiler:
    """Becomes part of vLLM's worker, which imports this module for it.

    Source: `worker_extension_cls` in vllm/v1/worker/worker_base.py (0.32.0).
    """

    def spoil_next_load(self) -> None:
        """Have one block of the next load get what belongs to another one."""
        from safe_offload.worker.copies.base import Direction
        from safe_offload.worker.transfers import Transfers

        add = Transfers._add

        def spoil(self: Transfers, direction: Direction, transfer: Transfer, mark: Any) -> Any:
            if direction is Direction.LOAD and len(transfer.slot_ids) > 1:
                Transfers._add = add  # type: ignore[method-assign]
                slot_ids = transfer.slot_ids[:]
                slot_ids[len(slot_ids) // 2] = slot_ids[0]
                transfer = replace(transfer, slot_ids=slot_ids)
            return add(self, direction, transfer, mark)

        Transfers._add = spoil  # type: ignore[method-assign]


class Probe(WorkerProbe, Spoiler):
    """For benchmarks that watch a model with these weights."""
