"""What `layouts` loads into vLLM's workers."""

from vllm.platforms import current_platform

from tests.gpu.weights import Probe


class LayoutProbe(Probe):
    """What `engine_watch` loads into vLLM's workers."""


if current_platform.is_cpu():
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
    from vllm.v1.kv_cache_layout import KVCacheLayout

    # Its kernels go by strides: tests/engine/test_layouts.py compares the tokens.
    CPUAttentionBackend.supported_kv_cache_layouts = classmethod(
        lambda _: (KVCacheLayout.LBHNC, KVCacheLayout.BLHNC)
    )
