"""Models of the shapes that people run, with weights that are drawn when an engine starts.

Fewer layers than the real ones, so that four engines fit on one GPU: what a layer computes and what
it copies stay in proportion.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from safe_offload.commands.bench.engine import BenchOptions

COMMON = {
    "dtype": "bfloat16",
    "vocab_size": 32_768,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000.0,
    "attention_bias": False,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
SHAPES: dict[str, dict[str, Any]] = {
    "llama": {
        # Llama-3.1-8B has 32 layers.
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
    },
    "gemma3": {
        # Gemma-3-12B has 48 layers.
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size": 3840,
        "intermediate_size": 15_360,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 256,
        "query_pre_attn_scalar": 256,
        "rope_local_base_freq": 10_000.0,
        "sliding_window": 1024,
        "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 4,
    },
    "gpt-oss": {
        # gpt-oss-20b has 24 layers, 32 experts and weights of 4 bits.
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "hidden_act": "silu",
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "num_hidden_layers": 12,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "attention_bias": True,
        "sliding_window": 128,
        "layer_types": ["sliding_attention", "full_attention"] * 6,
        "num_local_experts": 8,
        "num_experts_per_tok": 4,
        "swiglu_limit": 7.0,
    },
    "mamba": {
        # Granite-4.0-H-Micro has 40 layers, four of them of attention.
        "architectures": ["GraniteMoeHybridForCausalLM"],
        "model_type": "granitemoehybrid",
        "hidden_act": "silu",
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "shared_intermediate_size": 8192,
        "num_local_experts": 0,
        "num_experts_per_tok": 0,
        "num_hidden_layers": 20,
        "layer_types": (["mamba"] * 9 + ["attention"]) * 2,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "position_embedding_type": "nope",
        "embedding_multiplier": 12.0,
        "attention_multiplier": 0.015625,
        "residual_multiplier": 0.22,
        "logits_scaling": 8.0,
        "mamba_n_heads": 64,
        "mamba_d_head": 64,
        "mamba_d_state": 128,
        "mamba_n_groups": 1,
        "mamba_d_conv": 4,
        "mamba_expand": 2,
        "mamba_chunk_size": 256,
    },
    "mla": {
        # DeepSeek-V2-Lite has 27 layers and experts, which have nothing to do with the KV cache.
        "architectures": ["DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v2",
        "hidden_act": "silu",
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "head_dim": 64,
        "kv_lora_rank": 512,
        "q_lora_rank": None,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "first_k_dense_replace": 16,
        "n_routed_experts": 2,
        "n_shared_experts": 1,
        "num_experts_per_tok": 1,
        "moe_intermediate_size": 256,
    },
}
LOAD_FORMAT = "seeded"
SEEDED = {"load_format": LOAD_FORMAT, "worker_extension_cls": "tests.gpu.weights.Spoiler"}
"""Weights of a real scale; what takes the place of `Spoiler` is in that module, or imports it."""
ENGINE_ARGS = SEEDED | {"skip_tokenizer_init": True, "generation_config": "vllm"}

GPU_SHARE = 0.22
"""Of each engine, as four live on one GPU."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--shape", choices=list(SHAPES), help="drawn; instead of --model")


def take_shape(options: BenchOptions, shape: str | None, folder: Path) -> BenchOptions:
    """Return the options with a model of this shape, written into the folder."""
    if shape is None:
        return options
    model = folder / shape
    model.mkdir(parents=True, exist_ok=True)
    (model / "config.json").write_text(json.dumps(COMMON | SHAPES[shape], indent=1) + "\n")
    how = {"gpu_memory_utilization": GPU_SHARE} | ENGINE_ARGS | options.engine_args
    return replace(options, model=str(model), engine_args=how)
