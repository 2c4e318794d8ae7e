"""Asking vLLM for a KV cache in which a block lies in one piece, not in one for each layer.

vLLM names a layout by its dimensions, the outermost first: in LBNHC each layer (L) has a region in
which its blocks (B) follow one another, in BLNHC all layers of a block lie side by side. Workers
tell which ones their attention backends can read, the preferred first, and vLLM takes the first
that nobody objects to. So the wish goes there. A connector may also name a layout itself
(`get_required_kvcache_layout`), but it is asked without being told which ones there are: vLLM warns
of one that cannot be had, and MultiConnector refuses two.

Source: vLLM 0.31 to 0.33, v1/attention/backends/utils.py, resolve_kv_cache_layout.
"""

import functools
import logging
from typing import Any, Final

from safe_offload.config.options import OffloadConfig
from safe_offload.config.transfer_config import ours_of

_WRAPPED: Final = "_safe_offload_asks_for_whole_blocks"

logger = logging.getLogger(f"vllm.{__name__}")


def wrap_worker(worker_class: Any) -> None:
    """Let vLLM's workers name layouts with blocks in one piece first, if a setting asks for it."""
    if hasattr(worker_class, _WRAPPED):
        return
    original = worker_class.get_supported_kv_cache_layouts

    @functools.wraps(original)
    def get_supported_kv_cache_layouts(self: Any) -> list[str]:
        layouts: list[str] = original(self)
        try:
            return _in_order(self.vllm_config, layouts)
        except Exception:
            logger.debug("The KV cache layout is left to vLLM", exc_info=True)
            return layouts

    worker_class.get_supported_kv_cache_layouts = get_supported_kv_cache_layouts
    setattr(worker_class, _WRAPPED, True)


def _in_order(vllm_config: Any, layouts: list[str]) -> list[str]:
    extras = [w.get("kv_connector_extra_config") for w in ours_of(vllm_config.kv_transfer_config)]
    configs = [OffloadConfig.from_extra_config(extra, world_size=1) for extra in extras]
    if not any(config.enable_cross_layers_blocks for config in configs):
        return layouts
    from safe_offload import compat

    if not compat.reads_whole_blocks(vllm_config):
        return layouts
    return sorted(layouts, key=lambda layout: not layout.startswith("BL"))
