"""The tiny models are complete, what vLLM expects by name and shape, and follow from the seed."""

from examples.tiny_models import (
    count_prompt_blocks,
    write_tiny_model,
)


def test_the_weights_follow_from_the_seed(tmp_path):
    first, again, other = (
        (write_tiny_model("llama", tmp_path / f"{index}", seed=seed) / "model.safetensors")
        for index, seed in enumerate((1, 1, 2))
    )
    assert first.read_bytes() == again.read_bytes() != other.read_bytes()


def test_a_hybrid_prompt_holds_a_window_in_each_sliding_group():
    sizes = {"block_size": 32, "max_num_batched_tokens": 2048}
    assert count_prompt_blocks("llama", 16_001, **sizes) == 501
    # 512 - 1 + 2048 tokens are 80 blocks, and one more as the window may start inside a block.
    assert count_prompt_blocks("gemma3", 16_001, **sizes) == 501 + 2 * 81
    assert count_prompt_blocks("gemma3", 64, **sizes) == 2 + 2 * 3
