"""Tiny models with real random weights, made on the spot.

Their text has to tell whether the KV cache was right. vLLM's `load_format=dummy` cannot do that:
attention is flat, and every prompt gets the same token again and again. These weights keep
activations at unit scale and make attention sharp: each head reads few tokens, picked by content
from the whole context. So the greedy text depends on tokens anywhere in the prompt.

Token ids 0 to 255 are the bytes themselves. Run the models with `--dtype float32`: a prompt that is
computed in other chunks, as after a cache hit, rounds differently, and in bfloat16 (vLLM's `auto`)
that may flip a greedy choice.
"""

import json
import math
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from safe_offload.errors import ConfigError

ModelKind = Literal["llama", "gemma3", "deepseek"]

NUM_BYTE_TOKENS = 256
SPECIAL_TOKENS = ("<pad>", "<bos>", "<eos>", "<|system|>", "<|user|>", "<|assistant|>")
PAD_ID, BOS_ID, EOS_ID = range(NUM_BYTE_TOKENS, NUM_BYTE_TOKENS + 3)
VOCAB_SIZE = 320  # a multiple of 64: vLLM pads nothing, and tensor parallelism divides it

# The only bytes with a row in the output layer: a greedy answer is readable and never ends early.
ANSWER_BYTES = range(ord(" "), ord("~") + 1)

HIDDEN_SIZE, INTERMEDIATE_SIZE = 128, 256
NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 4, 2, 32
# vLLM's CPU kernel for multi-head latent attention is compiled for a latent of 512 + 64 only.
# Source: vllm/v1/attention/backends/mla/cpu_mla.py (0.32.0).
KV_LORA_RANK = 512
ROPE_DIM = NOPE_DIM = MLA_HEAD_DIM = 64

# Standard deviation s of attention logits. Over n tokens a softmax of such logits spreads over
# about n * exp(-s**2) of them, that is 2 of 16,000: any token of the prompt can decide the next.
ATTENTION_SHARPNESS = 3.0

DEFAULT_SLIDING_WINDOW = 512
MAX_POSITIONS = 131_072

_DEFAULT_NUM_LAYERS: dict[ModelKind, int] = {"llama": 2, "gemma3": 6, "deepseek": 2}

CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)

_Weight = tuple[str, tuple[int, ...], float, float]
"""Name and shape of a tensor: normal of a standard deviation, around a mean."""


def write_tiny_model(
    kind: ModelKind,
    folder: Path,
    *,
    num_layers: int | None = None,
    sliding_window: int = DEFAULT_SLIDING_WINDOW,
    seed: int = 0,
) -> Path:
    """Write a tiny model and its tokenizer into a folder; return the folder, vLLM's model.

    `llama` has plain attention, `deepseek` multi-head latent attention. `gemma3` has two layers
    with a sliding window, in tokens, then one of full attention, so several KV cache groups.
    """
    if kind not in get_args(ModelKind):
        raise ConfigError(f"model kind {kind!r}: expected one of {', '.join(get_args(ModelKind))}")
    num_layers = _DEFAULT_NUM_LAYERS[kind] if num_layers is None else num_layers
    if num_layers < 1:
        raise ConfigError(f"num_layers={num_layers}: expected at least 1")
    folder.mkdir(parents=True, exist_ok=True)
    _write_json(folder / "config.json", _make_config(kind, num_layers, sliding_window))
    _write_weights(folder / "model.safetensors", _list_weights(kind, num_layers), seed)
    _write_tokenizer(folder)
    return folder


def count_prompt_blocks(
    kind: ModelKind,
    num_tokens: int,
    *,
    block_size: int,
    max_num_batched_tokens: int,
    sliding_window: int = DEFAULT_SLIDING_WINDOW,
) -> int:
    """Return how many KV blocks one request holds at most, so that a pool can be made to measure.

    A sliding-window group holds its window and the tokens in flight, rounded up by one block
    because the window may start inside a block. gemma3 has two such groups beside the one of full
    attention if its number of layers is a multiple of 3. Source: `SlidingWindowSpec` in
    vllm/v1/kv_cache_interface.py (0.32.0).
    """
    num_full = math.ceil(num_tokens / block_size)
    if kind != "gemma3":
        return num_full
    num_held = min(sliding_window - 1 + max_num_batched_tokens, num_tokens)
    return num_full + 2 * (math.ceil(num_held / block_size) + 1)


def _make_config(kind: ModelKind, num_layers: int, sliding_window: int) -> dict[str, Any]:
    """Return config.json, with the keys that transformers and vLLM read."""
    common: dict[str, Any] = {
        "dtype": "float32",
        "vocab_size": VOCAB_SIZE,
        "hidden_size": HIDDEN_SIZE,
        "intermediate_size": INTERMEDIATE_SIZE,
        "num_hidden_layers": num_layers,
        "num_attention_heads": NUM_HEADS,
        "num_key_value_heads": NUM_KV_HEADS,
        "head_dim": HEAD_DIM,
        "max_position_embeddings": MAX_POSITIONS,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1_000_000.0,
        "attention_bias": False,
        "tie_word_embeddings": False,
        "bos_token_id": BOS_ID,
        "eos_token_id": EOS_ID,
        "pad_token_id": PAD_ID,
    }
    own: dict[ModelKind, dict[str, Any]] = {
        "llama": {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_act": "silu",
        },
        "gemma3": {
            "architectures": ["Gemma3ForCausalLM"],
            "model_type": "gemma3_text",
            "hidden_activation": "gelu_pytorch_tanh",
            "query_pre_attn_scalar": HEAD_DIM,
            "rope_local_base_freq": 10_000.0,
            "sliding_window": sliding_window,
            "layer_types": [
                "full_attention" if (layer + 1) % 3 == 0 else "sliding_attention"
                for layer in range(num_layers)
            ],
        },
        "deepseek": {
            "architectures": ["DeepseekV2ForCausalLM"],
            "model_type": "deepseek_v2",
            "hidden_act": "silu",
            "num_key_value_heads": NUM_HEADS,
            "head_dim": ROPE_DIM,
            "kv_lora_rank": KV_LORA_RANK,
            "q_lora_rank": None,
            "qk_nope_head_dim": NOPE_DIM,
            "qk_rope_head_dim": ROPE_DIM,
            "v_head_dim": MLA_HEAD_DIM,
            # All layers are dense: experts have nothing to do with the KV cache.
            "first_k_dense_replace": num_layers,
            "n_routed_experts": 2,
            "n_shared_experts": 1,
            "num_experts_per_tok": 1,
            "moe_intermediate_size": INTERMEDIATE_SIZE,
        },
    }
    return common | own[kind]


def _list_weights(kind: ModelKind, num_layers: int) -> Iterator[_Weight]:
    """Yield every tensor of the checkpoint, by its Hugging Face name."""
    # Gemma multiplies embeddings by sqrt(hidden size) and its norms by 1 + weight.
    embedding_std = HIDDEN_SIZE**-0.5 if kind == "gemma3" else 1.0
    unit_norm = 0.0 if kind == "gemma3" else 1.0
    yield "model.embed_tokens.weight", (VOCAB_SIZE, HIDDEN_SIZE), embedding_std, 0.0
    yield "model.norm.weight", (HIDDEN_SIZE,), 0.0, unit_norm
    yield _linear("lm_head", VOCAB_SIZE, HIDDEN_SIZE)
    norms = ["input_layernorm", "post_attention_layernorm"]
    if kind == "gemma3":
        norms += ["pre_feedforward_layernorm", "post_feedforward_layernorm"]
    for layer in range(num_layers):
        prefix = f"model.layers.{layer}"
        for norm in norms:
            yield f"{prefix}.{norm}.weight", (HIDDEN_SIZE,), 0.0, unit_norm
        yield from _list_attention(kind, f"{prefix}.self_attn")
        yield _linear(f"{prefix}.mlp.gate_proj", INTERMEDIATE_SIZE, HIDDEN_SIZE)
        yield _linear(f"{prefix}.mlp.up_proj", INTERMEDIATE_SIZE, HIDDEN_SIZE)
        yield _linear(f"{prefix}.mlp.down_proj", HIDDEN_SIZE, INTERMEDIATE_SIZE)


def _list_attention(kind: ModelKind, prefix: str) -> Iterator[_Weight]:
    """Yield one layer's attention; the sharpness is in q, or in Gemma's norm of q."""
    sharp = ATTENTION_SHARPNESS
    if kind == "deepseek":  # without compression of the query
        q_size, kv_size = NOPE_DIM + ROPE_DIM, NOPE_DIM + MLA_HEAD_DIM
        yield _linear(f"{prefix}.q_proj", NUM_HEADS * q_size, HIDDEN_SIZE, gain=sharp)
        yield _linear(f"{prefix}.kv_a_proj_with_mqa", KV_LORA_RANK + ROPE_DIM, HIDDEN_SIZE)
        yield f"{prefix}.kv_a_layernorm.weight", (KV_LORA_RANK,), 0.0, 1.0
        yield _linear(f"{prefix}.kv_b_proj", NUM_HEADS * kv_size, KV_LORA_RANK)
        yield _linear(f"{prefix}.o_proj", HIDDEN_SIZE, NUM_HEADS * MLA_HEAD_DIM, gain=2.0)
        return
    sharp_q = 1.0 if kind == "gemma3" else sharp
    yield _linear(f"{prefix}.q_proj", NUM_HEADS * HEAD_DIM, HIDDEN_SIZE, gain=sharp_q)
    yield _linear(f"{prefix}.k_proj", NUM_KV_HEADS * HEAD_DIM, HIDDEN_SIZE)
    yield _linear(f"{prefix}.v_proj", NUM_KV_HEADS * HEAD_DIM, HIDDEN_SIZE)
    yield _linear(f"{prefix}.o_proj", HIDDEN_SIZE, NUM_HEADS * HEAD_DIM, gain=2.0)
    if kind == "gemma3":
        yield f"{prefix}.q_norm.weight", (HEAD_DIM,), 0.0, sharp - 1
        yield f"{prefix}.k_norm.weight", (HEAD_DIM,), 0.0, 0.0


def _linear(name: str, num_outputs: int, num_inputs: int, *, gain: float = 1.0) -> _Weight:
    """Return the weight of a linear layer that maps unit scale to `gain`."""
    return f"{name}.weight", (num_outputs, num_inputs), gain * num_inputs**-0.5, 0.0


def _write_weights(path: Path, weights: Iterator[_Weight], seed: int) -> None:
    """Write the checkpoint, each tensor from the seed and its own name."""
    from safetensors.numpy import save_file

    tensors: dict[str, npt.NDArray[np.float32]] = {}
    for name, shape, std, mean in weights:
        rng = np.random.default_rng([seed, zlib.crc32(name.encode())])
        noise = rng.standard_normal(shape, dtype=np.float32)
        tensors[name] = noise * np.float32(std) + np.float32(mean)
    output = tensors["lm_head.weight"]
    output[: ANSWER_BYTES.start] = 0.0
    output[ANSWER_BYTES.stop :] = 0.0
    save_file(tensors, path, metadata={"format": "pt"})


def _write_tokenizer(folder: Path) -> None:
    """Write a tokenizer whose ids 0 to 255 are the bytes of the text, and its chat template."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    vocabulary = {character: byte for byte, character in enumerate(_byte_characters())}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL_TOKENS])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": "<pad>",
        "bos_token": "<bos>",
        "eos_token": "<eos>",
        "additional_special_tokens": list(SPECIAL_TOKENS[3:]),
        "clean_up_tokenization_spaces": False,
        "model_max_length": MAX_POSITIONS,
        "chat_template": CHAT_TEMPLATE,
    }
    _write_json(folder / "tokenizer_config.json", settings)


def _byte_characters() -> list[str]:
    """Return the character that stands for each byte: `bytes_to_unicode` of GPT-2's encoder.py."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    stand_ins = iter(range(256, 512))
    return [chr(byte if byte in printable else next(stand_ins)) for byte in range(256)]


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
