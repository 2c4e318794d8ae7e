"""Requests a KV cache layout from vLLM in which each block is contiguous over all layers.

vLLM names a layout by its dimensions, the outermost first: in LBNHC each layer (L) has a region of
consecutive blocks (B), in BLNHC the layers of a block are adjacent. Workers list the supported
layouts in order of preference, and vLLM takes the first that all support. So this order is changed.
A connector may also require a layout (`get_required_kvcache_layout`), but without knowing the
supported ones: vLLM warns of an unsupported one, and MultiConnector refuses two.

Source: vLLM 0.31 to 0.33, v1/attention/backends/utils.py, resolve_kv_cache_layout.
"""

from __future__ import annotations

import inspect
import itertools
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from safe_offload.compat.wrapping import wrap
from safe_offload.config.transfer_config import settings_of

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_GO_BY_STRIDES: Final = frozenset(("FLASH_ATTN", "FLASHINFER", "TRITON_ATTN"))

logger = logging.getLogger(f"vllm.{__name__}")


def wrap_worker(worker_class: Any) -> None:
    """Let vLLM's workers prefer layouts with contiguous blocks, if configured."""

    def around(supported: Callable[[Any], list[str]], worker: Any) -> list[str]:
        layouts = supported(worker)
        try:
            return _in_order(worker.vllm_config, layouts)
        except Exception:
            logger.debug("The KV cache layout is left to vLLM", exc_info=True)
            return layouts

    wrap(worker_class, "get_supported_kv_cache_layouts", around)


def _in_order(vllm_config: Any, layouts: list[str]) -> list[str]:
    configs = settings_of(vllm_config.kv_transfer_config)
    if not any(config.enable_cross_layers_blocks for config in configs):
        return layouts
    if not _reads_whole_blocks(vllm_config):
        return layouts
    return sorted(layouts, key=lambda layout: not layout.startswith("BL"))


def _reads_whole_blocks(vllm_config: VllmConfig) -> bool:
    """Return whether the attention backends of a loaded model support contiguous blocks.

    A backend that lists no layouts claims to support all, but some view the blocks of a layer as
    one array (CPU_MLA, AMX_MLA, ROCM_AITER_MLA of vLLM 0.32.0), so only those known to honor
    strides count. Mamba states are adjacent in any layout. vLLM refuses to split such blocks for a
    kernel, so none may need that. All pages must have one size; otherwise the layout would change
    the KV cache groups.
    """
    from vllm.config import get_layers_from_vllm_config, set_current_vllm_config
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
    from vllm.v1.kv_cache_interface import AttentionSpec
    from vllm.v1.worker.utils import select_common_block_size

    takes_specs = len(inspect.signature(select_common_block_size).parameters) > 2  # not in 0.31

    def reads(backend: Any, spec: Any) -> bool:
        names = backend.supported_kv_cache_layouts()
        if names is None and not (backend.is_ssm() or backend.get_name() in _GO_BY_STRIDES):
            return False
        if not isinstance(spec, AttentionSpec):
            return True
        specs = ([spec],) if takes_specs else ()
        return bool(select_common_block_size(spec.block_size, [backend], *specs) == spec.block_size)

    layers: Any = get_layers_from_vllm_config(vllm_config, AttentionLayerBase)
    with set_current_vllm_config(vllm_config):
        pairs = [
            (one.get_attn_backend(), one.get_kv_cache_spec(vllm_config)) for one in layers.values()
        ]
        page_sizes = {spec.page_size_bytes for _, spec in pairs if spec is not None}
        return len(page_sizes) == 1 and all(itertools.starmap(reads, pairs))


def settle_kv_cache_layout(vllm_config: VllmConfig) -> None:
    """Set a KV cache layout for a configuration without workers, which EngineCore would ask.

    The bytes of a block are the same in all layouts. Source: vLLM 0.31 to 0.33, EngineCore.
    """
    cache_config = vllm_config.cache_config
    if getattr(cache_config, "kv_cache_layout", "") is None:
        cache_config.kv_cache_layout = "LBNHC"
