"""What is noticed of weights that may change; tests/engine has real engines."""

import inspect
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.lora.request import LoRARequest
from vllm.v1.engine.core import EngineCore

from safe_offload.compat.engine_core.live_weights import Adapters, ModelLoads, watch

CALLS = ("collective_rpc", "add_lora", "remove_lora", "sleep")


class Connector:
    """Notes why weights may have changed."""

    def __init__(self) -> None:
        self.adapters = Adapters()
        self.causes: list[str] = []

    def weights_changed(self, cause: str) -> None:
        self.causes.append(cause)


@pytest.fixture
def watched():
    """EngineCore as it is in the process of one of our engines."""
    originals = {name: getattr(EngineCore, name) for name in CALLS}
    watch()
    watch()
    yield
    for name, original in originals.items():
        setattr(EngineCore, name, original)


def engine_core(connector: Any, *, is_multimodal: bool = False, is_busy: bool = False) -> Any:
    """vLLM's EngineCore over an executor that answers by what it was asked."""
    core = EngineCore.__new__(EngineCore)
    core.scheduler = SimpleNamespace(
        connector=connector, has_unfinished_requests=lambda: is_busy, set_pause_state=lambda _: None
    )
    core.vllm_config = SimpleNamespace(
        model_config=SimpleNamespace(is_multimodal_model=is_multimodal)
    )
    core.model_executor = SimpleNamespace(
        collective_rpc=lambda *call: call, add_lora=lambda lora: lora, remove_lora=lambda i: i
    )
    core.forgotten = []
    core.reset_encoder_cache = lambda: core.forgotten.append("embeddings")
    return core


def adapter(path: Path, name: str = "a", *, in_place: bool = False) -> LoRARequest:
    return LoRARequest(name, 1, str(path), load_inplace=in_place)


@pytest.mark.usefixtures("watched")
def test_any_method_that_is_not_known_to_leave_weights_alone_may_change_them():
    connector = Connector()
    core = engine_core(connector)
    assert core.collective_rpc("list_loras") == ("list_loras", None, (), None)
    assert core.collective_rpc("update_weights", 3.0, (1,), {}) == ("update_weights", 3.0, (1,), {})
    core.collective_rpc(method="one of a user", kwargs={"a": 1})
    core.collective_rpc(engine_core)
    assert connector.causes == [
        "collective_rpc of 'update_weights'",
        "collective_rpc of 'one of a user'",
        "collective_rpc of engine_core",
    ]


@pytest.mark.usefixtures("watched")
def test_a_call_that_fails_half_way_counts_and_its_error_is_vllms():
    connector = Connector()
    core = engine_core(connector)
    core.model_executor.collective_rpc = lambda *_: 1 // 0
    with pytest.raises(ZeroDivisionError):
        core.collective_rpc("reload_weights")
    assert len(connector.causes) == 1


@pytest.mark.usefixtures("watched")
@pytest.mark.parametrize("connector", [None, object()])
def test_an_engine_without_our_connector_keeps_its_calls_as_they_are(connector):
    core = engine_core(connector, is_multimodal=True)
    assert core.collective_rpc("reload_weights", 1.0) == ("reload_weights", 1.0, (), None)
    assert core.forgotten == []
    signature = inspect.signature(EngineCore.collective_rpc)  # vLLM decodes arguments by it
    assert list(signature.parameters) == ["self", "method", "timeout", "args", "kwargs"]


@pytest.mark.usefixtures("watched")
def test_under_a_multi_connector_ours_is_told():
    connector = Connector()
    core = engine_core(SimpleNamespace(sub_connectors=[object(), connector]))
    core.remove_lora(1)
    assert len(connector.causes) == 1


@pytest.mark.usefixtures("watched")
@pytest.mark.parametrize(("is_busy", "forgotten"), [(False, ["embeddings"]), (True, [])])
def test_what_an_encoder_made_of_images_is_forgotten_when_nothing_runs(is_busy, forgotten):
    core = engine_core(Connector(), is_multimodal=True, is_busy=is_busy)
    core.collective_rpc("reload_weights")
    core.collective_rpc("list_loras")
    assert core.forgotten == forgotten


@pytest.mark.usefixtures("watched")
def test_an_adapter_may_be_another_when_it_is_loaded_again(tmp_path):
    connector = Connector()
    core = engine_core(connector)
    core.add_lora(adapter(tmp_path))
    core.add_lora(adapter(tmp_path, "b"))
    assert connector.causes == []
    core.add_lora(adapter(tmp_path))
    assert len(connector.causes) == 1
    assert not connector.adapters.is_other(adapter(tmp_path, "c"), "1")
    core.add_lora(adapter(tmp_path, "c"))
    assert len(connector.causes) == 2, "requests have used it"


def test_a_load_into_a_model_counts_when_it_begins_and_when_it_ends_well_or_not(monkeypatch):
    """Another thread may have the engine step meanwhile."""
    loads, seen = ModelLoads(), []

    class Model:
        def load_weights(self, weights: Any) -> int:
            seen.append(loads.count)
            return 1 // weights

    known = {1: (Model, "Model")}
    monkeypatch.setattr("vllm.model_executor.model_loader.utils._MODEL_ARCH_BY_HASH", known)
    loads.watch()
    assert Model().load_weights(1) == 1
    with pytest.raises(ZeroDivisionError):
        Model().load_weights(0)
    assert (seen, loads.count) == ([1, 3], 4)


def test_a_request_in_place_finds_a_change_that_keeps_size_and_mtime(tmp_path):
    adapters = Adapters()
    file = tmp_path / "adapter_model.safetensors"
    file.write_bytes(b"old")
    asked = adapter(tmp_path, in_place=True)
    assert not adapters.is_other(asked, "1")
    assert not adapters.is_other(asked, "2")
    before = file.stat()
    file.write_bytes(b"new")
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert adapters.is_other(asked, "3")
    assert not adapters.is_other(asked, "4")


def test_an_adapter_whose_files_cannot_be_seen_is_another_for_each_request_in_place():
    adapters = Adapters()
    asked = adapter(Path("/nowhere"), in_place=True)
    assert [adapters.is_other(asked, name) for name in "123"] == [False, True, True]
