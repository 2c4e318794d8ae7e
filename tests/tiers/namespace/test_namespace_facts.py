"""The facts behind a namespace: all that changes the bytes changes them, and nothing else does."""

import ast
import copy
import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.config import MultiModalConfig
from vllm.v1.kv_cache_interface import KVCacheTensor

from examples.tiny_models import write_tiny_model
from safe_offload.compat import engine_config, specs
from safe_offload.config.tiers import TierConfig
from safe_offload.layout import make_geometry
from safe_offload.tiers.namespace.namespace_facts import Doubt, NamespaceFacts, namespace_facts_of
from tests.fresh_process import run_script
from tests.simulator.vllm_setup import EngineShape, make_config, make_kv_cache_config

TIER = TierConfig.at("file:///mnt/kv")
VOUCHED = dataclasses.replace(TIER, model_version="7")
SHAPE = EngineShape(groups=("full", "window:8"), extra={"tiers": [{"url": "file:///mnt/kv"}]})


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_tiny_model("llama", tmp_path_factory.mktemp("model"))


@pytest.fixture
def config(model, tmp_path, monkeypatch):
    monkeypatch.setattr(engine_config, "cache_root", lambda: str(tmp_path / "cache"))
    config = make_config(SHAPE)
    config.model_config.model = config.model_config.tokenizer = str(model)
    return config


def unread(config: Any, kv_cache: Any = None, copy_rank: int = 0) -> NamespaceFacts:
    kv_cache = kv_cache or make_kv_cache_config(SHAPE)
    size_bytes = kv_cache.kv_cache_tensors[0].size
    geometry = make_geometry(specs.segments(kv_cache), kv_cache.num_blocks, size_bytes)
    return namespace_facts_of(config, kv_cache, geometry, copy_rank)


def known(config: Any, kv_cache: Any = None, copy_rank: int = 0) -> NamespaceFacts:
    """What is known when the files have been read; they were all there before."""
    found = unread(config, kv_cache, copy_rank)
    learned = found.learn(lambda: False)
    assert learned is not None
    new = [doubt for doubt in learned.doubts if "after this process started" not in doubt.text]
    found.take(dataclasses.replace(learned, doubts=tuple(new)))
    return found


def changed(before: NamespaceFacts, after: NamespaceFacts) -> set[str]:
    names = {*before.facts, *after.facts}
    return {name for name in names if before.facts.get(name) != after.facts.get(name)}


def test_equal_engines_have_the_same_facts(config):
    assert known(config).facts == known(copy.deepcopy(config)).facts
    assert known(config).doubts == ()


def set_field(path: str, value: object) -> Callable[[Any], None]:
    part, name = path.split(".")
    return lambda config: setattr(getattr(config, part), name, value)


def with_images(**fields: Any) -> Callable[[Any], None]:
    return set_field("model_config.multimodal_config", MultiModalConfig(**fields))


def test_ranks_and_draft_models_have_namespaces_of_their_own(config, tmp_path):
    before = known(config)
    assert changed(before, known(config, copy_rank=2)) == {"rank"}
    draft = copy.deepcopy(config.model_config)
    draft.model = str(tmp_path / "draft")
    Path(draft.model).mkdir()
    (tmp_path / "draft" / "model.safetensors").write_bytes(b"drafts")
    config.speculative_config = SimpleNamespace(
        method="eagle", num_speculative_tokens=3, draft_model_config=draft
    )
    with_drafts = known(config)
    assert {"files.draft_model.weights"} <= changed(before, with_drafts)
    (tmp_path / "draft" / "model.safetensors").write_bytes(b"drafts, others")
    assert changed(with_drafts, known(config)) == {"files.draft_model.weights"}


def test_the_seed_of_hashes_is_not_told(config, monkeypatch):
    """It has 32 bits, so that a digest of it tells it. With other seeds keys are others anyway."""
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    before = known(config)
    monkeypatch.setenv("PYTHONHASHSEED", "2222")
    assert known(config).facts == before.facts


# ---- how a slot is laid out ----------------------------------------------------------------------


def test_the_number_of_gpu_blocks_does_not_change_a_slot(config):
    few, many = (
        make_kv_cache_config(dataclasses.replace(SHAPE, num_blocks=count)) for count in (40, 77)
    )
    assert changed(known(config, few), known(config, many)) == set()


def test_where_a_layer_lies_in_a_slot_does_not_depend_on_the_gpu(config):
    """With layers outermost, where it lies on the GPU does."""
    all_facts = []
    for num_blocks in (40, 77):
        kv_cache = make_kv_cache_config(dataclasses.replace(SHAPE, num_blocks=num_blocks))
        page = 48
        size = page * num_blocks * 3
        layers = ["layer.0", "layer.1", "layer.2"]
        tensor = KVCacheTensor(size, layers, page * num_blocks, page)
        kv_cache.kv_cache_tensors = [tensor]
        all_facts.append(known(config, kv_cache))
    assert changed(*all_facts) == set()
    assert all_facts[0].facts["layout"] == "layer.0 0+48; layer.1 48+48; layer.2 96+48"


@pytest.mark.parametrize(
    "groups", [("full",), ("window:8", "full"), ("full", "window:12"), ("full", "full")]
)
def test_other_groups_are_another_namespace(config, groups):
    other = make_kv_cache_config(dataclasses.replace(SHAPE, groups=groups))
    assert "groups" in changed(known(config), known(config, other))


def test_layers_in_another_order_are_another_namespace(config):
    kv_cache = make_kv_cache_config(SHAPE)
    other = copy.deepcopy(kv_cache)
    for tensor in other.kv_cache_tensors:
        tensor.layers.reverse()
        tensor.layers[:] = [f"{layer}b" for layer in tensor.layers]
    assert "layout" in changed(known(config, kv_cache), known(config, other))


def test_how_a_layer_keeps_its_keys_counts(config):
    before = known(config)
    backend = SimpleNamespace(get_name=lambda: "FLASHINFER")
    layer = SimpleNamespace(
        attn_backend=backend, kv_cache_dtype="fp8", _k_scale_float=1.0, _v_scale_float=1.0
    )
    config.compilation_config.static_forward_context = {"layer.0": layer}
    with_backend = known(config)
    assert changed(before, with_backend) == {"layers"}
    layer._k_scale_float = 0.5
    assert changed(with_backend, known(config)) == {"layers"}


# ---- files ---------------------------------------------------------------------------------------


def files_of(config: Any, folder: Path | str) -> str:
    config.model_config.model = config.model_config.tokenizer = str(folder)
    return known(config).facts["files.model.weights"]


def test_the_commit_that_vllm_has_found_counts(config, tmp_path):
    """Where the branch of a hub's model is now is no matter: what was loaded was resolved."""

    class Resolved(str):
        resolved = "1" * 40

    hub = tmp_path / "hub" / "models--some--model"
    for number in "01":
        snapshot = hub / "snapshots" / (number * 40)
        snapshot.mkdir(parents=True)
        (snapshot / "model.safetensors").write_text(number)
    config.load_config.download_dir = str(tmp_path / "hub")
    config.model_config.revision = "0" * 40
    first = files_of(config, "some/model")
    config.model_config.revision = Resolved("0" * 40)
    assert first != files_of(config, "some/model") != ""


def test_a_tokenizer_elsewhere_and_a_file_that_a_field_names_count(config, tmp_path):
    elsewhere, scales = tmp_path / "tokenizer", tmp_path / "scales.json"
    elsewhere.mkdir()
    (elsewhere / "tokenizer.json").write_text("1")
    scales.write_text("1")
    config.model_config.tokenizer = str(elsewhere)
    with_images(mm_encoder_fp8_scale_path=str(scales), mm_encoder_attn_dtype="fp8")(config)
    first = known(config)
    (elsewhere / "tokenizer.json").write_text("2")
    scales.write_text("2")
    assert changed(first, known(config)) == {
        "files.model.tokenizer",
        "files.model_config.multimodal_config.mm_encoder_fp8_scale_path",
    }


def test_code_of_another_repository_counts_or_is_doubted(config, tmp_path, monkeypatch):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(b"1")
    auto_map = {"AutoImageProcessor": "other/code--processing.Processor"}
    (folder / "preprocessor_config.json").write_text(json.dumps({"auto_map": auto_map}))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    files_of(config, folder)
    assert not known(config).doubts
    config.model_config.trust_remote_code = True
    (doubt,) = known(config).doubts
    assert "other/code" in doubt.text
    code = tmp_path / "hub" / "models--other--code" / "snapshots" / ("0" * 40)
    code.mkdir(parents=True)
    (code / "processing.py").write_text("1")
    config.model_config.code_revision = "0" * 40
    first = known(config)
    assert not first.doubts
    (code / "processing.py").write_text("2")
    assert changed(first, known(config)) == {"files.model.code.other/code"}


def test_weights_that_are_not_here_can_be_vouched_for(config, model):
    config.model_config.model_weights = "s3://bucket/model"
    found = known(config)
    assert found.doubts_of(TIER) == (
        "the weights of 's3://bucket/model' are not files of this machine",
    )
    assert not found.doubts_of(VOUCHED)
    assert found.facts_of(VOUCHED) != found.facts_of(TIER)
    assert found.facts["files.model"], "what is here counts all the same"
    config.load_config.load_format = "dummy"  # the same in every process
    assert not known(config).doubts


def test_nobody_can_vouch_for_files_that_changed_while_the_engine_started(config, tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "model.safetensors").write_bytes(b"1")  # by this very process
    config.model_config.model = str(tmp_path / "model")
    found = unread(config)
    learned = found.learn(lambda: False)
    assert learned is not None
    found.take(learned)
    assert any("after this process started" in text for text in found.doubts_of(VOUCHED))


def test_scales_that_follow_from_requests_are_a_doubt_and_adapters_are_none(config):
    """What is computed with an adapter stays out of tiers (features/private_blocks.py)."""
    config.lora_config = SimpleNamespace()
    assert not known(config).doubts
    object.__setattr__(config.cache_config, "calculate_kv_scales", True)
    assert known(config).doubts_of(VOUCHED)


def test_reading_can_be_cancelled(config):
    assert unread(config).learn(lambda: True) is None


def test_a_tier_knows_what_was_learned_after_it_was_opened():
    found = NamespaceFacts({"a": "1"})
    facts = found.facts_of(TIER)
    found.facts |= {"files.model": "2"}
    assert dict(facts) == {"a": "1", "files.model": "2", "namespace": "", "model_version": ""}
    blue = dataclasses.replace(TIER, namespace="blue")
    assert dict(found.facts_of(blue)) == {**facts, "namespace": "blue"}
    assert not dataclasses.replace(found, doubts=(Doubt("x"),)).doubts_of(VOUCHED)


# ---- in another process --------------------------------------------------------------------------

SCRIPT = """
from pathlib import Path
from tests.simulator.vllm_setup import make_config, make_kv_cache_config
from tests.tiers.namespace.test_namespace_facts import SHAPE, known
config = make_config(SHAPE)
config.model_config.model = config.model_config.tokenizer = {model!r}
print(sorted(known(config).facts.items()))
"""


@pytest.mark.nightly
def test_another_process_finds_the_same_namespace(config, model, tmp_path):
    """No address, no order of a set, no random word is among the facts."""
    script = SCRIPT.format(model=str(model))
    output = run_script(script, tmp_path, {"PYTHONHASHSEED": "1"})
    facts = known(config).facts
    told = ast.literal_eval(output.splitlines()[-1])
    assert dict(told) == facts
