"""The tiny models are complete, what vLLM expects by name and shape, and follow from the seed."""

from typing import get_args

import pytest
from safetensors.numpy import load_file

from examples.tiny_models import (
    BOS_ID,
    EOS_ID,
    NUM_BYTE_TOKENS,
    SPECIAL_TOKENS,
    ModelKind,
    count_prompt_blocks,
    write_tiny_model,
)

KINDS = get_args(ModelKind)


@pytest.mark.parametrize("kind", KINDS)
def test_the_checkpoint_has_the_tensors_that_transformers_expects(kind, tmp_path):
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


def test_the_weights_follow_from_the_seed(tmp_path):
    first, again, other = (
        (write_tiny_model("llama", tmp_path / f"{index}", seed=seed) / "model.safetensors")
        for index, seed in enumerate((1, 1, 2))
    )
    assert first.read_bytes() == again.read_bytes() != other.read_bytes()


def test_a_token_id_is_the_byte(tmp_path):
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(write_tiny_model("llama", tmp_path))
    text = "Long context,\n\ttwice: 日本 é \0 ~"
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    assert bytes(token_ids) == text.encode()
    assert tokenizer.decode(token_ids) == text
    assert len(tokenizer) == NUM_BYTE_TOKENS + len(SPECIAL_TOKENS)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (BOS_ID, EOS_ID)


def test_the_chat_template_names_the_roles(tmp_path):
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


def test_a_hybrid_prompt_holds_a_window_in_each_sliding_group():
    sizes = {"block_size": 32, "max_num_batched_tokens": 2048}
    assert count_prompt_blocks("llama", 16_001, **sizes) == 501
    # 512 - 1 + 2048 tokens are 80 blocks, and one more as the window may start inside a block.
    assert count_prompt_blocks("gemma3", 16_001, **sizes) == 501 + 2 * 81
    assert count_prompt_blocks("gemma3", 64, **sizes) == 2 + 2 * 3
