"""The tiny models are complete, what vLLM expects by name and shape, and follow from the seed."""

import json
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
from safetensors.numpy import load_file

from safe_offload.commands.bench.tiny_models import (
    ANSWER_BYTES,
    BOS_ID,
    EOS_ID,
    NUM_BYTE_TOKENS,
    SPECIAL_TOKENS,
    ModelKind,
    count_prompt_blocks,
    write_tiny_model,
)
from safe_offload.errors import ConfigError

KINDS = get_args(ModelKind)


@pytest.mark.parametrize("kind", KINDS)
def test_the_checkpoint_has_the_tensors_that_transformers_expects(
    kind: ModelKind, tmp_path: Path
) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    write_tiny_model(kind, tmp_path)
    config = transformers.AutoConfig.from_pretrained(tmp_path)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    expected = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    found = {
        name: tensor.shape for name, tensor in load_file(tmp_path / "model.safetensors").items()
    }
    assert found == expected


@pytest.mark.parametrize("kind", KINDS)
def test_the_weights_follow_from_the_seed(kind: ModelKind, tmp_path: Path) -> None:
    def weights(folder: str, seed: int) -> bytes:
        return (
            write_tiny_model(kind, tmp_path / folder, seed=seed) / "model.safetensors"
        ).read_bytes()

    assert weights("first", 1) == weights("again", 1)
    assert weights("first", 1) != weights("other", 2)


def test_adding_a_layer_changes_no_other_layer(tmp_path: Path) -> None:
    small = load_file(write_tiny_model("llama", tmp_path / "2", num_layers=2) / "model.safetensors")
    large = load_file(write_tiny_model("llama", tmp_path / "3", num_layers=3) / "model.safetensors")
    assert len(large) > len(small)
    assert all(np.array_equal(tensor, large[name]) for name, tensor in small.items())


def test_only_readable_bytes_can_be_answered(tmp_path: Path) -> None:
    output = load_file(write_tiny_model("llama", tmp_path) / "model.safetensors")["lm_head.weight"]
    assert set(np.flatnonzero(output.any(axis=1)).tolist()) == set(ANSWER_BYTES)


def test_gemma3_mixes_sliding_window_and_full_attention(tmp_path: Path) -> None:
    write_tiny_model("gemma3", tmp_path, sliding_window=256)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["layer_types"].count("sliding_attention") == 4
    assert config["layer_types"].count("full_attention") == 2
    assert config["sliding_window"] == 256


def test_a_token_id_is_the_byte(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(write_tiny_model("llama", tmp_path))
    text = "Long context,\n\ttwice: 日本 é \0 ~"
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    assert bytes(token_ids) == text.encode()
    assert tokenizer.decode(token_ids) == text
    assert len(tokenizer) == NUM_BYTE_TOKENS + len(SPECIAL_TOKENS)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (BOS_ID, EOS_ID)


def test_the_chat_template_names_the_roles(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(write_tiny_model("llama", tmp_path))
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], add_generation_prompt=True, tokenize=False
    )
    assert prompt == "<bos><|user|>Hi<|assistant|>"
    user, assistant = (SPECIAL_TOKENS.index(f"<|{role}|>") for role in ("user", "assistant"))
    assert tokenizer.encode(prompt, add_special_tokens=False) == [
        BOS_ID,
        NUM_BYTE_TOKENS + user,
        *b"Hi",
        NUM_BYTE_TOKENS + assistant,
    ]


def test_an_unknown_kind_names_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="llama, gemma3, deepseek"):
        write_tiny_model("gpt", tmp_path)  # type: ignore[arg-type]


def test_a_model_without_layers_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="num_layers=0"):
        write_tiny_model("llama", tmp_path, num_layers=0)


def test_a_hybrid_prompt_holds_a_window_in_each_sliding_group() -> None:
    sizes = {"block_size": 32, "max_num_batched_tokens": 2048}
    assert count_prompt_blocks("llama", 16_001, **sizes) == 501
    # 512 - 1 + 2048 tokens are 80 blocks, and one more as the window may start inside a block.
    assert count_prompt_blocks("gemma3", 16_001, **sizes) == 501 + 2 * 81
    assert count_prompt_blocks("gemma3", 64, **sizes) == 2 + 2 * 3
