"""The facts behind a namespace: all that changes the bytes changes them, and nothing else does."""

from __future__ import annotations

import ast
import copy
import dataclasses
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.kv_cache_interface import KVCacheTensor

from safe_offload import compat
from safe_offload.bench.tiny_models import write_tiny_model
from safe_offload.layout import make_geometry
from safe_offload.tier_config import TierConfig
from safe_offload.tier_url import Location
from safe_offload.worker.tiers.meaning import SAMPLE_BYTES, Meaning, meaning_of
from tests.fresh_process import run_script
from tests.simulator.vllm_setup import EngineShape, make_config, make_kv_cache_config

TIER = TierConfig(Location("file", "/mnt/kv"))
SHAPE = EngineShape(groups=("full", "window:8"), extra={"tiers": [{"url": "file:///mnt/kv"}]})


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model("llama", tmp_path_factory.mktemp("model"))


@pytest.fixture
def config(model: Path) -> Any:
    config = make_config(SHAPE)
    config.model_config.model = config.model_config.model_weights = str(model)
    return config


def meaning(config: Any, kv_cache: Any = None, copy_rank: int = 0) -> Meaning:
    kv_cache = kv_cache or make_kv_cache_config(SHAPE)
    size_bytes = kv_cache.kv_cache_tensors[0].size
    geometry = make_geometry(compat.segments(kv_cache), kv_cache.num_blocks, size_bytes)
    return meaning_of(config, kv_cache, geometry, copy_rank)


def changed(before: Meaning, after: Meaning) -> set[str]:
    names = {*before.facts, *after.facts}
    return {name for name in names if before.facts.get(name) != after.facts.get(name)}


def test_equal_engines_mean_the_same(config):
    assert meaning(config).facts == meaning(copy.deepcopy(config)).facts
    assert meaning(config).doubts == ()


def other_dtype(config: Any) -> None:
    import torch

    config.model_config.dtype = torch.float16


def other_config(config: Any) -> None:
    config.model_config.hf_config.rope_theta = 12345.0


def set_field(path: str, value: object) -> Callable[[Any], None]:
    *parents, name = path.split(".")

    def change(config: Any) -> None:
        for parent in parents:
            config = getattr(config, parent)
        setattr(config, name, value)

    return change


@pytest.mark.parametrize(
    ("change", "fact"),
    [
        (set_field("model_config.model", "another"), "model"),
        (set_field("model_config.revision", "v2"), "model_revision"),
        (set_field("model_config.code_revision", "v2"), "model_code_revision"),
        (set_field("model_config.quantization", "fp8"), "model_quantization"),
        (set_field("model_config.max_model_len", 4096), "model_max_len"),
        (set_field("model_config.disable_sliding_window", True), "model_options"),
        (other_dtype, "model_dtype"),
        (other_config, "model_config"),
        (set_field("load_config.load_format", "dummy"), "load_format"),
        (set_field("cache_config.cache_dtype", "fp8"), "kv_cache_dtype"),
        (set_field("cache_config.kv_cache_layout", "BLHNC"), "kv_cache_layout"),
        (set_field("cache_config.mamba_cache_dtype", "float32"), "cache"),
        (set_field("cache_config.prefix_caching_hash_algo", "xxhash_cbor"), "hash"),
        (set_field("parallel_config.tensor_parallel_size", 2), "tensor_parallel_size"),
        (set_field("parallel_config.pipeline_parallel_size", 2), "pipeline_parallel_size"),
        (
            set_field("parallel_config.decode_context_parallel_size", 2),
            "decode_context_parallel_size",
        ),
        (
            set_field("parallel_config.prefill_context_parallel_size", 2),
            "prefill_context_parallel_size",
        ),
    ],
)
def test_what_changes_the_bytes_is_another_meaning(config, change, fact):
    before = meaning(config)
    change(config)
    assert fact in changed(before, meaning(config))


@pytest.mark.parametrize(
    "change",
    [
        set_field("cache_config.gpu_memory_utilization", 0.5),
        set_field("cache_config.num_gpu_blocks", 1000),
        set_field("scheduler_config.max_num_seqs", 99),
        set_field("parallel_config.data_parallel_rank", 3),
        set_field("instance_id", "other"),
        set_field("kv_transfer_config.engine_id", "other"),
    ],
)
def test_what_does_not_change_the_bytes_is_no_other_meaning(config, change):
    before = meaning(config)
    change(config)
    assert changed(before, meaning(config)) == set()


def test_ranks_and_draft_models_have_meanings_of_their_own(config):
    before = meaning(config)
    assert changed(before, meaning(config, copy_rank=2)) == {"rank"}
    draft = copy.deepcopy(config.model_config)
    config.speculative_config = SimpleNamespace(
        method="eagle", num_speculative_tokens=3, draft_model_config=draft
    )
    with_drafts = meaning(config)
    assert {"drafts", "draft_model", "draft_model_weights"} <= changed(before, with_drafts)
    draft.revision = "v2"
    assert changed(with_drafts, meaning(config)) == {"draft_model_revision", "draft_model_options"}


def test_the_seed_of_hashes_counts_and_is_not_told(config, monkeypatch):
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    before = meaning(config)
    monkeypatch.setenv("PYTHONHASHSEED", "secret7")
    after = meaning(config)
    assert changed(before, after) == {"hash"}
    assert "secret7" not in str(after.facts)


# ---- how a slot is laid out ----------------------------------------------------------------------


def test_the_number_of_gpu_blocks_does_not_change_a_slot(config):
    few, many = (
        make_kv_cache_config(dataclasses.replace(SHAPE, num_blocks=count)) for count in (40, 77)
    )
    assert changed(meaning(config, few), meaning(config, many)) == set()


def test_where_a_layer_lies_in_a_slot_does_not_depend_on_the_gpu(config):
    """With layers outermost, where it lies on the GPU does."""
    meanings = []
    for num_blocks in (40, 77):
        kv_cache = make_kv_cache_config(dataclasses.replace(SHAPE, num_blocks=num_blocks))
        page = 48
        size = page * num_blocks * 3
        layers = ["layer.0", "layer.1", "layer.2"]
        tensor = KVCacheTensor(size, layers, page * num_blocks, page)
        kv_cache.kv_cache_tensors = [tensor]
        meanings.append(meaning(config, kv_cache))
    assert changed(*meanings) == set()
    assert meanings[0].facts["layout"] == "layer.0 0+48; layer.1 48+48; layer.2 96+48"


@pytest.mark.parametrize(
    "groups", [("full",), ("window:8", "full"), ("full", "window:12"), ("full", "full")]
)
def test_other_groups_are_another_meaning(config, groups):
    other = make_kv_cache_config(dataclasses.replace(SHAPE, groups=groups))
    assert "groups" in changed(meaning(config), meaning(config, other))


def test_layers_in_another_order_are_another_meaning(config):
    kv_cache = make_kv_cache_config(SHAPE)
    other = copy.deepcopy(kv_cache)
    for tensor in other.kv_cache_tensors:
        tensor.layers.reverse()
        tensor.layers[:] = [f"{layer}b" for layer in tensor.layers]
    assert "layout" in changed(meaning(config, kv_cache), meaning(config, other))


def test_how_a_layer_keeps_its_keys_counts(config):
    before = meaning(config)
    backend = SimpleNamespace(get_name=lambda: "FLASHINFER")
    layer = SimpleNamespace(
        attn_backend=backend, kv_cache_dtype="fp8", _k_scale_float=1.0, _v_scale_float=1.0
    )
    config.compilation_config.static_forward_context = {"layer.0": layer}
    with_backend = meaning(config)
    assert changed(before, with_backend) == {"layers"}
    layer._k_scale_float = 0.5
    assert changed(with_backend, meaning(config)) == {"layers"}


# ---- weights -------------------------------------------------------------------------------------


def weights_of(config: Any, folder: Path) -> str:
    config.model_config.model = config.model_config.model_weights = str(folder)
    return meaning(config).facts["model_weights"]


def test_weights_are_told_by_names_sizes_and_samples(config, tmp_path):
    file = tmp_path / "model.safetensors"
    file.write_bytes(bytes(40 * SAMPLE_BYTES))
    first = weights_of(config, tmp_path)
    assert weights_of(config, tmp_path) == first
    with file.open("r+b") as opened:  # in place: the same name and size
        opened.seek(39 * SAMPLE_BYTES)
        opened.write(b"other weights")
    in_place = weights_of(config, tmp_path)
    os.truncate(file, 41 * SAMPLE_BYTES)
    longer = weights_of(config, tmp_path)
    file.rename(tmp_path / "other.safetensors")
    renamed = weights_of(config, tmp_path)
    assert len({first, in_place, longer, renamed}) == 4
    (tmp_path / "README.md").write_text("no weights")
    assert weights_of(config, tmp_path) == renamed


def test_weights_of_the_hubs_cache_are_told_like_those_of_a_folder(config, tmp_path, monkeypatch):
    snapshot = tmp_path / "models--some--model" / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    (snapshot / "model.safetensors").write_bytes(b"weights")
    refs = tmp_path / "models--some--model" / "refs"
    refs.mkdir()
    (refs / "main").write_text("0" * 40)
    config.load_config.download_dir = str(tmp_path)
    in_cache = weights_of(config, Path("some/model"))
    assert in_cache
    assert in_cache == weights_of(config, snapshot)


def test_weights_that_are_not_here_keep_the_engine_to_itself(config):
    config.model_config.model = config.model_config.model_weights = "s3://bucket/model"
    found = meaning(config)
    assert found.doubts == ('the weights of "s3://bucket/model" are not files of this machine',)
    assert found.is_alone_in(TIER)
    config.load_config.load_format = "dummy"  # the same in every process
    assert not meaning(config).doubts


def test_adapters_keep_the_engine_to_itself_unless_their_version_is_given(config):
    config.lora_config = SimpleNamespace()
    found = meaning(config)
    assert found.doubts == ("LoRA adapters are known by name and path only",)
    assert found.facts_of(TIER)["engine"]
    vouched = dataclasses.replace(TIER, model_version="7")
    assert "engine" not in found.facts_of(vouched)
    assert found.facts_of(vouched)["model_version"] == "7"
    config.instance_id = "next start"
    assert meaning(config).facts_of(TIER)["engine"] != found.facts_of(TIER)["engine"]


def test_the_operators_words_count(config):
    found = meaning(config)
    blue = dataclasses.replace(TIER, namespace="blue")
    assert found.facts_of(blue) != found.facts_of(TIER)
    assert "engine" not in found.facts_of(TIER)


# ---- in another process --------------------------------------------------------------------------

SCRIPT = """
from pathlib import Path
from tests.simulator.vllm_setup import make_config, make_kv_cache_config
from tests.worker.test_meaning import SHAPE, meaning
config = make_config(SHAPE)
config.model_config.model = config.model_config.model_weights = {model!r}
print(sorted(meaning(config).facts.items()))
"""


def test_another_process_finds_the_same_meaning(config, model, tmp_path):
    """No address, no order of a set, no random word is among the facts."""
    script = SCRIPT.format(model=str(model))
    output = run_script(script, tmp_path, {"PYTHONHASHSEED": "1"})
    facts = meaning(config).facts
    told = ast.literal_eval(output.splitlines()[-1])
    # The model was made in another folder, which its options name.
    ignored = ("hash", "model_options")
    assert {name: fact for name, fact in told if name not in ignored} == {
        name: fact for name, fact in facts.items() if name not in ignored
    }
