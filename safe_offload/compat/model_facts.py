"""What gives the bytes of a block their meaning, for the namespace of tiers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from vllm import envs

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def variable_names() -> tuple[str, ...]:
    """Return the environment variables that vLLM knows."""
    return tuple(envs.environment_variables)


def cache_root() -> str:
    """Return the folder where vLLM keeps what it makes and needs again."""
    return str(envs.VLLM_CACHE_ROOT)


def layer_facts(vllm_config: VllmConfig, layer_names: Iterable[str]) -> dict[str, str]:
    """Return by layer how attention keeps its keys and values; the model must have been loaded.

    Some CPUs have layouts of their own (vLLM 0.32.0, v1/attention/backends/cpu_attn.py, `isa`).
    """
    layers = getattr(vllm_config.compilation_config, "static_forward_context", {})
    facts = {}
    for name in layer_names:
        layer = layers.get(name)
        backend = getattr(layer, "attn_backend", None)
        told = [type(layer).__name__, "" if backend is None else f"{backend.get_name()}"]
        for field in ("kv_cache_dtype", "_k_scale_float", "_v_scale_float", "isa"):
            told.append(f"{getattr(layer, field, '')}")
        facts[name] = " ".join(told)
    return facts
