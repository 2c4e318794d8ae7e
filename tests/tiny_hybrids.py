"""Tiny models of several KV cache groups that transformers writes: random weights, sharp enough."""

from pathlib import Path
from typing import Any

from examples.tiny_models import BOS_ID, EOS_ID, PAD_ID, VOCAB_SIZE, _write_tokenizer

COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 256,
    "tie_word_embeddings": False,
    "bos_token_id": BOS_ID,
    "eos_token_id": EOS_ID,
    "pad_token_id": PAD_ID,
    "initializer_range": 0.15,
}
KINDS: dict[str, dict[str, Any]] = {
    "lfm2": {
        "layer_types": ["conv", "full_attention"] * 2,
        "block_auto_adjust_ff_dim": False,
        "conv_dim": 128,
        "block_dim": 128,
        "conv_use_xavier_init": True,
    },
    "gpt_oss": {
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "sliding_window": 128,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
    },
}
"""`lfm2` has states of short convolutions, which vLLM treats as Mamba's; `gpt_oss` has windows."""


def write_tiny_hybrid(kind: str, folder: Path) -> Path:
    """Write a model and its tokenizer into a folder; return the folder, vLLM's model."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(kind, **(COMMON | KINDS[kind]))
    config.dtype = torch.float32
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).float().save_pretrained(folder)
    _write_tokenizer(folder)
    return folder
