"""Weights that change while the engine runs, by each of vLLM's ways (docs/guides/resets.md).

Answers are compared with those of an engine that has no connector and forgets its own prefix cache
before each of them: what either of the caches brings from before a change shows in the tokens.
"""

import json
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from examples.tiny_models import (
    HEAD_DIM,
    HIDDEN_SIZE,
    NUM_HEADS,
    write_tiny_model,
)
from tests.engine.engines import Job, connector, make_job, num_hit_tokens, run, tier_at

NUM_TOKENS = 641
NUM_HIT = num_hit_tokens(NUM_TOKENS)
RANK = 8
WAYS = (
    *("reload_weights", "apply_model", "call_a_function", "update_weights"),
    *("sleep_and_reload", "load_directly"),
)
"""Of children/live_weights.py."""

Answers = dict[str, dict[str, Any]]


def make(model: Path, folders: list[Path], **arguments: Any) -> tuple[Job, Job]:
    """An engine with our connector, and one that forgets everything."""
    made = make_job(
        model,
        num_blocks=200,
        num_prompt_tokens=NUM_TOKENS,
        prefix_caching_hash_algo="sha256_cbor",
        **arguments,
    )
    made.options["folders"] = [str(folder) for folder in folders]
    plain = {key: v for key, v in made.arguments.items() if key != "kv_transfer_config"}
    return made, replace(made, arguments=plain, options={**made.options, "forget": True})


def answers_of(folder: Path, jobs: tuple[Job, Job]) -> tuple[Answers, Answers]:
    """The answers of both engines."""
    ours, plain = run(folder, *jobs, child="live_weights")
    ours.check_well()
    return ours.data["told"], plain.data["told"]


def tokens_of(answers: Answers) -> dict[str, list[int]]:
    return {what: answer["token_ids"] for what, answer in answers.items()}


@pytest.fixture(scope="module")
def weights(model, tmp_path_factory):
    """Two models by turns in one engine, which has a tier for which its operator has vouched."""
    folder = tmp_path_factory.mktemp("weights")
    other = write_tiny_model("llama", folder / "other", seed=1)
    tier = tier_at(folder / "tier", model_version="the first one")
    jobs = make(
        model("llama"),
        [model("llama"), other],
        kv_transfer_config=connector(tiers=[tier]),
        weight_transfer_config={"backend": "disk"},
    )
    return answers_of(folder / "run", jobs)


@pytest.mark.parametrize("way", WAYS)
def test_nothing_from_before_a_change_of_the_weights_is_served_after_it(way, weights):
    ours, plain = weights
    for name in "AB":
        before, after = ours[f"{name} before {way}"], ours[f"{name} after {way}"]
        assert (after["num_gpu"], after["num_host"]) == (0, 0), f"{name} is computed"
        assert before["token_ids"] == plain[f"{name} before {way}"]["token_ids"]
        assert after["token_ids"] == plain[f"{name} after {way}"]["token_ids"]
        assert after["token_ids"] != before["token_ids"], "or it has shown nothing"


def test_between_changes_there_are_hits_and_calls_that_only_look_keep_them(weights):
    ours, plain = weights
    assert ours["A before apply_model"]["num_host"] == NUM_HIT
    looked = ours["A after calls that only look"]
    assert looked["num_host"] == NUM_HIT
    assert tokens_of(ours) == tokens_of(plain)


def test_an_adapter_that_was_read_again_brings_nothing_back_from_before(model, tmp_path):
    """By `add_lora` in place, by a request in place, after `remove_lora`, under a new number."""
    folders = [write_adapter(tmp_path / f"adapter-{seed}", seed) for seed in (1, 2)]
    lora = {"enable_lora": True, "max_lora_rank": RANK, "max_loras": 2}
    jobs = make(model("llama"), folders, kv_transfer_config=connector(), **lora)
    ours, plain = answers_of(tmp_path / "run", jobs)
    num_hit = {what: (answer["num_gpu"], answer["num_host"]) for what, answer in ours.items()}
    assert num_hit.pop("asked for in place, the same") == (0, NUM_HIT)
    assert set(num_hit.values()) == {(0, 0)}, num_hit
    assert tokens_of(ours) == tokens_of(plain)
    assert ours["first"]["token_ids"] != ours["added in place"]["token_ids"]


def write_adapter(folder: Path, seed: int) -> Path:
    """An adapter for the tiny llama that changes what its answers are."""
    from safetensors.numpy import save_file

    folder.mkdir()
    config = {
        "peft_type": "LORA",
        "r": RANK,
        "lora_alpha": RANK,
        "target_modules": ["q_proj", "k_proj"],
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    tensors = {}
    for layer in range(2):
        name = f"base_model.model.model.layers.{layer}.self_attn.q_proj"
        rng = np.random.default_rng([seed, zlib.crc32(name.encode())])
        for part, shape in (("A", (RANK, HIDDEN_SIZE)), ("B", (NUM_HEADS * HEAD_DIM, RANK))):
            noise = rng.standard_normal(shape, dtype=np.float32)
            tensors[f"{name}.lora_{part}.weight"] = noise * np.float32(RANK**-0.5)
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder
