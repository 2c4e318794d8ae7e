"""A block in one piece: which layout vLLM settles on, by its own code and its own backends."""

import dataclasses
import importlib
import logging
from typing import Any

import pytest
import torch
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.attention.backends.utils import resolve_kv_cache_layout
from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.worker.worker_base import WorkerBase

from safe_offload.compat import whole_blocks
from safe_offload.start.plugin import register
from tests.simulator.vllm_setup import EngineShape, make_config

BACKENDS = {
    "FLASH_ATTN": "flash_attn.FlashAttentionBackend",
    "TRITON_ATTN": "triton_attn.TritonAttentionBackend",
    "CPU_ATTN": "cpu_attn.CPUAttentionBackend",
    "CPU_MLA": "mla.cpu_mla.CPUMLABackend",
    "FLEX_ATTENTION": "flex_attention.FlexAttentionBackend",
    "MAMBA2_ATTN": "mamba2_attn.Mamba2AttentionBackend",
}
"""Of vLLM, in `vllm.v1.attention.backends`."""
WISH = {"enable_cross_layers_blocks": True}

Layer = tuple[Any, Any]
"""A backend, and the specification of the layer's cache."""


def keys(block_size: int = 16) -> FullAttentionSpec:
    return FullAttentionSpec(
        block_size=block_size, num_kv_heads=2, head_size=64, dtype=torch.bfloat16
    )


def state(page_bytes: int) -> MambaSpec:
    shapes, dtypes = ((4, 8), (16,)), (torch.float32, torch.float32)
    return MambaSpec(block_size=64, shapes=shapes, dtypes=dtypes, page_size_padded=page_bytes)


def backend(name: str, *layouts: str, sizes: tuple[int, ...] = ()) -> Any:
    """One of vLLM's backends; `layouts` are what it says it reads, `sizes` its kernel's blocks."""
    module, _, class_name = BACKENDS[name].rpartition(".")
    found = getattr(importlib.import_module(f"vllm.v1.attention.backends.{module}"), class_name)
    changed: dict[str, Any] = {}
    if layouts:
        changed["supported_kv_cache_layouts"] = classmethod(
            lambda _: tuple(KVCacheLayout[layout] for layout in layouts)
        )
    if sizes:
        changed["get_supported_kernel_block_sizes"] = staticmethod(lambda *_: list(sizes))
    return type(found.__name__, (found,), changed)


class CacheLayer(AttentionLayerBase):
    """A layer of a model that is loaded, as a worker asks it."""

    def __init__(self, backend: Any, spec: Any) -> None:
        self._backend, self._spec = backend, spec

    def get_attn_backend(self) -> Any:
        return self._backend

    def get_kv_cache_spec(self, vllm_config: Any) -> Any:
        return self._spec


@pytest.fixture
def warned(caplog, monkeypatch):
    """What vLLM and the connector have warned of."""
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    return lambda: [r.message for r in caplog.records if r.levelno >= logging.WARNING]


def resolved(extra: dict[str, Any], *layers: Layer, transfer_config: Any = None) -> str:
    """The layout that an engine of two workers settles on, by vLLM's own code."""
    register()
    config = make_config(EngineShape(extra=extra))
    if transfer_config is not None:
        transfer = config.kv_transfer_config
        config.kv_transfer_config = dataclasses.replace(transfer, **transfer_config)
    forward_context = {f"layer.{index}": CacheLayer(*layer) for index, layer in enumerate(layers)}
    config.compilation_config.static_forward_context = forward_context
    worker = WorkerBase.__new__(WorkerBase)
    worker.vllm_config = config
    told = worker.get_supported_kv_cache_layouts()
    return str(resolve_kv_cache_layout(config, [told, list(told)], [s for _, s in layers]).name)


@pytest.mark.parametrize("written", [True, "true", "True", "TRUE"])
@pytest.mark.parametrize("name", ["FLASH_ATTN", "TRITON_ATTN"])
def test_a_model_whose_attention_goes_by_strides_gets_blocks_in_one_piece(name, written):
    extra = {"enable_cross_layers_blocks": written}
    assert resolved(extra, (backend(name), keys()), (backend(name), keys())) == "BLNHC"


@pytest.mark.parametrize("extra", [{}, {"enable_cross_layers_blocks": "false"}])
def test_without_the_setting_the_layout_is_vllms_own(extra):
    assert resolved(extra, (backend("FLASH_ATTN"), keys())) == "LBNHC"


def test_a_kernel_that_wants_heads_outside_tokens_gets_the_layout_that_has_them_so():
    """As FlashInfer does on Blackwell."""
    blackwell = backend("TRITON_ATTN", "LBHNC", "BLHNC")
    assert resolved(WISH, (blackwell, keys())) == "BLHNC"
    assert resolved({}, (blackwell, keys())) == "LBHNC"


def test_states_beside_attention_have_blocks_in_one_piece_too():
    attention = (backend("FLASH_ATTN"), keys(64))
    states = (backend("MAMBA2_ATTN"), state(keys(64).page_size_bytes))
    assert resolved(WISH, attention, states) == "BLNHC"


@pytest.mark.parametrize(
    "layers",
    [
        pytest.param([(backend("CPU_ATTN"), keys(32))], id="reads one layout"),
        pytest.param([(backend("FLEX_ATTENTION"), keys())], id="reads one other layout"),
        pytest.param([(backend("CPU_MLA"), keys())], id="says it reads all, and fails"),
        pytest.param(
            [(backend("FLASH_ATTN"), keys()), (backend("FLEX_ATTENTION"), keys())],
            id="one of two does not",
        ),
        pytest.param(
            [(backend("FLASH_ATTN", sizes=(16, 32)), keys(256))], id="a kernel of smaller blocks"
        ),
        pytest.param([(backend("FLASH_ATTN", sizes=(48,)), keys())], id="no block size at all"),
        pytest.param(
            [(backend("FLASH_ATTN"), keys(64)), (backend("MAMBA2_ATTN"), state(1024))],
            id="pages of two sizes",
        ),
    ],
)
def test_a_layout_that_cannot_be_had_is_not_asked_for(layers, warned):
    """vLLM would warn, or fail when it makes the KV cache, or at the first request."""
    assert resolved(WISH, *layers) == resolved({}, *layers)
    assert warned() == []


def multi(*connectors: dict[str, Any]) -> dict[str, Any]:
    return {
        "kv_connector": "MultiConnector",
        "kv_connector_extra_config": {"connectors": list(connectors)},
    }


OURS = {
    "kv_connector": "SafeCPUOffloadConnector",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {"num_cpu_blocks": 1, **WISH},
}
OFFLOADING = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}
EXAMPLE = {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}


@pytest.mark.parametrize(("other", "layout"), [(EXAMPLE, "BLNHC"), (OFFLOADING, "LBHNC")])
def test_what_another_connector_asks_for_goes_first(warned, other, layout):
    """MultiConnector ends the engine where two connectors name different layouts."""
    layer = (backend("FLASH_ATTN"), keys())
    assert resolved({}, layer, transfer_config=multi(OURS, other)) == layout
    assert warned() == []


@pytest.mark.parametrize("layout", ["LBNHC", "LBHNC", "BLHNC"])
def test_what_the_environment_says_goes_first(monkeypatch, layout):
    monkeypatch.setenv("VLLM_KV_CACHE_LAYOUT", layout)
    assert resolved(WISH, (backend("FLASH_ATTN"), keys())) == layout


def test_workers_are_wrapped_once_and_a_failure_leaves_the_layout_to_vllm(monkeypatch):
    register()
    wrapped = WorkerBase.get_supported_kv_cache_layouts
    whole_blocks.wrap_worker(WorkerBase)
    assert WorkerBase.get_supported_kv_cache_layouts is wrapped

    class Broken(CacheLayer):
        def get_kv_cache_spec(self, vllm_config: Any) -> Any:
            raise RuntimeError("not as expected")

    monkeypatch.setattr("tests.compat.test_whole_blocks.CacheLayer", Broken)
    assert resolved(WISH, (backend("FLASH_ATTN"), keys())) == "LBNHC"
