"""A tiny vision model: Idefics3's tower before the tiny llama, with real random weights.

The greedy answer depends on the image, as that of a tiny llama depends on any token of its prompt.
A prompt has `IMAGE_ID` once for each image. Without further arguments of the processor an image has
`NUM_IMAGE_TOKENS` tokens and some that surround them; with `do_image_splitting` and a larger `size`
it has more. vLLM's other small models need torchvision.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image
from safetensors.numpy import load_file, save_file
from tokenizers import AddedToken, Tokenizer

from examples.tiny_models import (
    HIDDEN_SIZE,
    NUM_BYTE_TOKENS,
    SPECIAL_TOKENS,
    write_tiny_model,
)

IMAGE_TOKENS = ("<fake_token_around_image>", "<image>", "<end_of_utterance>")
IMAGE_ID = NUM_BYTE_TOKENS + len(SPECIAL_TOKENS) + IMAGE_TOKENS.index("<image>")
IMAGE_SIZE, PATCH_SIZE, SCALE_FACTOR = 112, 14, 2
NUM_IMAGE_TOKENS = (IMAGE_SIZE // PATCH_SIZE // SCALE_FACTOR) ** 2
TOWER_SIZE = 64


def write_tiny_vision_model(folder: Path, *, seed: int = 0) -> Path:
    """Write the model, its tokenizer and its processor; return the folder, vLLM's model.

    `seed`: the weights follow from it and from nothing else.
    """
    write_tiny_model("llama", folder, seed=seed)
    text = json.loads((folder / "config.json").read_text())
    del text["architectures"]
    tower = {
        "model_type": "idefics3_vision",
        "hidden_size": TOWER_SIZE,
        "intermediate_size": 2 * TOWER_SIZE,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": IMAGE_SIZE,
        "patch_size": PATCH_SIZE,
    }
    written = {
        "config.json": {
            "architectures": ["Idefics3ForConditionalGeneration"],
            "model_type": "idefics3",
            "dtype": "float32",
            "image_token_id": IMAGE_ID,
            "scale_factor": SCALE_FACTOR,
            "tie_word_embeddings": False,
            "pad_token_id": text["pad_token_id"],
            "text_config": text,
            "vision_config": tower,
        },
        "preprocessor_config.json": {
            "processor_class": "Idefics3Processor",
            "image_processor_type": "Idefics3ImageProcessor",
            "do_image_splitting": False,
            "size": {"longest_edge": IMAGE_SIZE},
            "max_image_size": {"longest_edge": IMAGE_SIZE},
        },
        "processor_config.json": {
            "processor_class": "Idefics3Processor",
            "image_seq_len": NUM_IMAGE_TOKENS,
        },
    }
    for name, content in written.items():
        (folder / name).write_text(json.dumps(content, indent=2) + "\n")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in IMAGE_TOKENS])
    assert tokenizer.token_to_id("<image>") == IMAGE_ID
    tokenizer.save(str(folder / "tokenizer.json"))
    path = folder / "model.safetensors"
    tensors = {
        name.replace("model.", "model.text_model."): tensor
        for name, tensor in load_file(path).items()
    }
    save_file(tensors | dict(_tower(tower, seed)), path, metadata={"format": "pt"})
    return folder


def make_image(seed: int) -> Image.Image:
    """Return an image of random pixels, the same for the same seed."""
    shape = (IMAGE_SIZE, IMAGE_SIZE, 3)
    pixels = np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)
    return Image.fromarray(pixels)


def _tower(tower: dict[str, Any], seed: int) -> Iterator[tuple[str, npt.NDArray[np.float32]]]:
    """Yield the tensors of the tower and of what connects it, by their names in a checkpoint."""
    import torch
    from transformers.models.idefics3 import Idefics3VisionConfig, Idefics3VisionTransformer

    with torch.device("meta"):
        state = Idefics3VisionTransformer(Idefics3VisionConfig(**tower)).state_dict()
    shapes = {f"model.vision_model.{name}": tensor.shape for name, tensor in state.items()}
    projection = (HIDDEN_SIZE, TOWER_SIZE * SCALE_FACTOR**2)
    shapes["model.connector.modality_projection.proj.weight"] = torch.Size(projection)
    for name, shape in shapes.items():
        if name.endswith("bias"):
            yield name, np.zeros(shape, dtype=np.float32)
        elif "norm" in name:
            yield name, np.ones(shape, dtype=np.float32)
        else:
            rng = np.random.default_rng([seed, zlib.crc32(name.encode())])
            noise = rng.standard_normal(shape, dtype=np.float32)
            yield name, noise * np.float32(np.prod(shape[1:]) ** -0.5)
