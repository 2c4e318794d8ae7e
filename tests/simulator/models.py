"""Models of the public agentic recipes, without weights: the KV cache that vLLM gives them.

From facts of a model's public config.json come the specs of its layers, as the model's code in vLLM
0.32.0 makes them (`Model.source` says where both are), and from these vLLM's own code makes the KV
cache groups. Only then are tokens divided, so that a block has few words.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

import torch
from vllm.model_executor.layers.mamba.mamba_utils import MambaStateShapeCalculator
from vllm.v1 import kv_cache_interface as kv
from vllm.v1.core.kv_cache_utils import generate_scheduler_kv_cache_config

try:
    from vllm.v1.core.kv_cache_planning import kv_cache_groups_tp_replicas
except ImportError:  # up to vLLM 0.32
    from vllm.v1.core.kv_cache_utils import kv_cache_groups_tp_replicas

from safe_offload.compat import specs
from tests.simulator.groups import Group

TENSOR_RANKS = 8
"""Of the recipes: with it come the sizes of pages, and with those the sizes of blocks."""

MODEL_TYPE = str.maketrans("-", "_", ".")

Layers = Iterator[tuple[str, Any]]
"""Names of layers and their specs, a drafter's last, as vLLM registers them."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """A model as it is served."""

    model: str  # a name of `MODELS`
    drafts: str = ""  # vLLM's method of speculative decoding; empty for none
    num_draft_tokens: int = 0  # of it
    is_fp8: bool = False  # the KV cache holds 8-bit floats
    decode_ranks: int = 1  # over which the KV cache of a token is spread (DCP)
    prefill_ranks: int = 1  # over which a prompt is spread (PCP)
    # Sliding windows are computed again after a hit, where the model's code can do so.
    replays: bool = False
    checkpoints: bool = False  # a step may leave a Mamba state in its middle, as FlashKDA does
    match_units: int = 1  # hits may end at so many places inside a block, where there are states
    tensor_ranks: int = TENSOR_RANKS  # of each pipeline stage
    is_small: bool = True  # tokens are divided, for the simulator


@dataclass(frozen=True, slots=True)
class Model:
    """What of a model decides its KV cache."""

    source: str  # where its facts are public; where vLLM makes specs of them
    layers: Callable[[Recipe, int], Layers]  # from a recipe and the tokens of a block to the layers
    block_tokens: int  # of the largest block; with states the least, which vLLM makes larger
    small_tokens: int  # the same in the simulator
    drafts: tuple[str, ...] = ("", "mtp")  # methods of speculative decoding that it is served with
    # With states: of a state, and of one token of a layer with attention.
    page_bytes: Callable[[Recipe], tuple[int, int]] | None = None

    def real_block_tokens(self, recipe: Recipe) -> int:
        """As large as a state, in whole kernel blocks (Platform._align_hybrid_block_size)."""
        if self.page_bytes is None:
            return self.block_tokens
        state_bytes, token_bytes = self.page_bytes(recipe)
        return self.block_tokens * -(-state_bytes // (self.block_tokens * token_bytes))


# ---- specs, as the classes of vLLM's models make them ------------------------------------------


def _attention(recipe: Recipe, block: int, heads: int, size: int, window: int = 0) -> Any:
    """`Attention.get_kv_cache_spec`."""
    what: dict[str, Any] = {
        "block_size": block,
        "num_kv_heads": max(1, heads // recipe.tensor_ranks),
        "head_size": size,
        "dtype": torch.float8_e4m3fn if recipe.is_fp8 else torch.bfloat16,
        "kv_quant_mode": kv.get_kv_quant_mode("fp8" if recipe.is_fp8 else "auto"),
    }
    if window:
        return kv.SlidingWindowSpec(**what, sliding_window=window)
    return kv.FullAttentionSpec(**what)


def _packed(recipe: Recipe, packed_bytes: int) -> dict[str, Any]:
    """16 bits, or the bytes of a token with 8 bits."""
    if not recipe.is_fp8:
        return {"dtype": torch.bfloat16}
    return {"dtype": torch.uint8, "state_content_bytes": packed_bytes}


def _mla(recipe: Recipe, block: int, size: int, packed_bytes: int = 656, **more: Any) -> Any:
    """`MLAAttention.get_kv_cache_spec`."""
    return _one_head(kv.MLAAttentionSpec, block, size, **_packed(recipe, packed_bytes), **more)


def _indexer(block: int, **more: Any) -> Any:
    """`DeepseekV32IndexerCache.get_kv_cache_spec`: 128 bytes and a scale of each token."""
    role = kv.SparseCacheRole.INDEXER
    what = {"dtype": torch.uint8, "size": 132, "cache_role": role, **more}
    return _one_head(kv.MLAAttentionSpec, block, **what)


def _window(block: int, size: int, window: int, **more: Any) -> Any:
    return _one_head(kv.SlidingWindowMLASpec, block, size, sliding_window=window, **more)


def _one_head(make: Any, block: int, size: int, **more: Any) -> Any:
    what = {"max_tp_shards": 1, **more}
    return make(block_size=block, num_kv_heads=1, head_size=size, **what)


def _ring(block: int, heads: int, size: int, **more: Any) -> Any:
    what = {"block_size": block, "num_kv_heads": heads, "head_size": size, "head_size_v": 0}
    return kv.CircularBufferSpec(**what, **more)


def _state(recipe: Recipe, block: int, shapes: Sequence[Any], page_bytes: int | None) -> Any:
    """`MambaBase.get_kv_cache_spec`, with what Kimi's `KDA` adds."""
    return kv.MambaSpec(
        block_size=block,
        shapes=tuple(shapes),
        dtypes=(torch.bfloat16, torch.float32),
        page_size_padded=page_bytes,
        mamba_cache_mode="align",
        num_speculative_blocks=recipe.num_draft_tokens,
        num_prefill_checkpoint_blocks=int(recipe.checkpoints),
        prefill_checkpoint_alignment=16 if recipe.checkpoints else None,
    )


def _kda(recipe: Recipe, heads: int) -> Any:
    num_spec = recipe.num_draft_tokens
    sizes = (recipe.tensor_ranks, heads, 128)
    return MambaStateShapeCalculator.kda_state_shape(*sizes, num_spec=num_spec)


def _gdn(recipe: Recipe, value_heads: int) -> Any:
    sizes = (recipe.tensor_ranks, 16, value_heads, 128, 128, 4, recipe.num_draft_tokens)
    return MambaStateShapeCalculator.gated_delta_net_state_shape(*sizes)


# ---- layers -------------------------------------------------------------------------------------


def _deepseek_v4(recipe: Recipe, block: int) -> Layers:
    align = {"alignment": 576 if recipe.is_fp8 else 512}
    version = {"model_version": "deepseek_v4"}
    swa = _window(64, 512, 128, **_packed(recipe, 584), **align, **version)
    ratios = [0, 0, *itertools.islice(itertools.cycle((4, 128)), 41)]
    for layer, ratio in enumerate(ratios + [0] * (recipe.drafts == "mtp")):
        name = f"layers.{layer}"
        if ratio:
            more: dict[str, Any] = {"tokens_per_state": ratio, **align}
            yield name, _mla(recipe, block, 512, 584, **version, **more)
            state: dict[str, Any] = {"dtype": torch.float32, **align}
            if ratio == 4:
                yield f"{name}.indexer", _indexer(block, **more)
                yield f"{name}.indexer.state", _window(4, 4 * 128, 8, **state)
                yield f"{name}.state", _window(4, 4 * 512, 8, **state)
            else:
                yield f"{name}.state", _window(8, 2 * 512, 128, **state)
        yield f"{name}.swa", swa


def _deepseek_v41(recipe: Recipe, block: int) -> Layers:
    align = {"alignment": 576 if recipe.is_fp8 else 512}
    version = {"model_version": "deepseek_v4"}
    replays = {"bounded_replay": recipe.replays}
    swa = _window(32, 512, 128, **_packed(recipe, 584), **align, **version, **replays)
    rows = max(8, 1 << (recipe.num_draft_tokens + 1).bit_length())
    for layer in range(40 + 3 * (recipe.drafts == "dspark")):
        name = f"layers.{layer}"
        if ratio := {2: 2, 8: 2, 14: 2, 20: 1}.get(layer):
            more: dict[str, Any] = {"tokens_per_state": ratio, **align}
            yield name, _mla(recipe, block, 512, 584, **version, **more)
            yield f"{name}.indexer", _indexer(block, **more)
            if ratio > 1:
                yield f"{name}.state", _ring(rows, 1, 2 * 512, dtype=torch.float32)
        yield f"{name}.swa", swa


def _kimi(recipe: Recipe, block: int) -> Layers:
    mla = _mla(recipe, block, 576)
    state = _state(recipe, block, _kda(recipe, 96), mla.page_size_bytes)
    for layer in range(1, 94):
        yield f"layers.{layer}", mla if layer % 4 == 0 or layer == 93 else state
    if recipe.drafts:
        is_dspark = recipe.drafts == "dspark"
        yield "draft", replace(mla, non_causal_multi_token_decode=is_dspark)


def _minimax_m3(recipe: Recipe, block: int) -> Layers:
    attention = _attention(recipe, block, 4, 128)
    index = _indexer(block, dtype=torch.bfloat16, size=128, max_tp_shards=None)
    for layer in range(60 + (recipe.drafts == "mtp")):
        yield f"layers.{layer}", attention
        if layer >= 3:
            yield f"layers.{layer}.indexer", index
    if recipe.drafts == "eagle3":
        yield "draft", _attention(recipe, block, 8, 128)


def _qwen(recipe: Recipe, block: int) -> Layers:
    attention = _attention(recipe, block, 2, 256)
    state = _state(recipe, block, _gdn(recipe, 64), attention.page_size_bytes)
    for layer in range(60):
        yield f"layers.{layer}", attention if layer % 4 == 3 else state
    if recipe.drafts:
        yield "draft", attention


def _glm_5(recipe: Recipe, block: int) -> Layers:
    for layer in range(78 + (recipe.drafts == "mtp")):
        has_indexer = layer < 3 or layer % 4 == 2
        yield f"layers.{layer}", _mla(recipe, block, 576, is_index_group_leader=has_indexer)
        if has_indexer:
            yield f"layers.{layer}.indexer", _indexer(block)


def _glm_53_flash(recipe: Recipe, block: int) -> Layers:
    mla = _mla(recipe, block, 512, 528)
    state = _state(recipe, block, _kda(recipe, 64), mla.page_size_bytes)
    pools = 1 << (-(-(16 + recipe.num_draft_tokens) // 16) - 1).bit_length()
    tail = _ring(16 * pools, 2, 128, dtype=torch.bfloat16, dcp_sharded=False)
    for layer in range(45 + (recipe.drafts == "mtp")):
        name = f"layers.{layer}"
        if layer % 4 == 3 or layer == 45:
            yield f"{name}.indexer", _indexer(block, tokens_per_state=16)
            yield f"{name}.tail", tail
        yield name, mla if layer % 4 == 3 or layer == 45 else state


def _gpt_oss(recipe: Recipe, block: int) -> Layers:
    for layer in range(36):
        yield f"layers.{layer}", _attention(recipe, block, 8, 64, 128 if layer % 2 == 0 else 0)
    if recipe.drafts == "eagle3":
        yield "draft", _attention(recipe, block, 8, 64)


def _pages(shapes: Callable[[Recipe, int], Any], heads: int, token: Callable[[Recipe], Any]) -> Any:
    """See `Model.page_bytes`."""
    return lambda recipe: (
        _state(recipe, 1, shapes(recipe, heads), None).page_size_bytes,
        token(recipe).page_size_bytes,
    )


MODELS = {
    "deepseek-v4": Model(
        "deepseek-ai/DeepSeek-V4-Flash; vllm/models/deepseek_v4/{attention,compressor}.py",
        _deepseek_v4,
        256,
        64,
    ),
    "deepseek-v4.1": Model(
        "deepseek-ai/DeepSeek-V4.1-Flash; vllm/models/deepseek_v41/{attention,compressor}.py",
        _deepseek_v41,
        256,
        16,
        ("", "dspark"),
    ),
    "kimi-k3": Model(
        "moonshotai/Kimi-K3; vllm/models/kimi_k3/nvidia/{mla,kda}.py",
        _kimi,
        128,
        16,
        ("", "mtp", "dspark"),
        _pages(_kda, 96, lambda r: _mla(r, 1, 576)),
    ),
    "minimax-m3": Model(
        "MiniMaxAI/MiniMax-M3; vllm/models/minimax_m3/{nvidia/model,common/indexer}.py",
        _minimax_m3,
        128,
        8,
        ("", "mtp", "eagle3"),
    ),
    "qwen3.5": Model(
        "Qwen/Qwen3.5-397B-A17B; vllm/model_executor/models/qwen3_5.py",
        _qwen,
        16,
        16,
        page_bytes=_pages(_gdn, 64, lambda r: _attention(r, 1, 2, 256)),
    ),
    "glm-5": Model(
        "zai-org/GLM-5.2; vllm/models/deepseek_v32, DeepseekV32IndexerCache",
        _glm_5,
        64,
        8,
    ),
    "glm-5.3-flash": Model(
        "zai-org/GLM-5.3-Flash; vllm/models/glm5next/common/{attention,kda}.py",
        _glm_53_flash,
        128,
        32,
        page_bytes=_pages(_kda, 64, lambda r: _mla(r, 1, 512, 528)),
    ),
    "gpt-oss": Model(
        "openai/gpt-oss-120b; vllm/model_executor/models/gpt_oss.py",
        _gpt_oss,
        16,
        8,
        ("", "eagle3"),
    ),
}


# ---- groups -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ModelCache:
    """The KV cache of a model."""

    kv_cache_config: Any  # as vLLM's scheduler gets it
    block_tokens: int  # `block_size` of the engine
    hash_tokens: int  # of one hash of a request
    num_replicas: int  # ranks of `TENSOR_RANKS` that hold the same

    def groups(self, decode_ranks: int) -> tuple[Group, ...]:
        return tuple(_group(spec, decode_ranks) for spec in self.specs)

    @property
    def specs(self) -> list[Any]:
        return [group.kv_cache_spec for group in self.kv_cache_config.kv_cache_groups]


def make_cache(recipe: Recipe, config: Any, num_bytes: int = 0) -> ModelCache:
    """Let vLLM make the KV cache of a model.

    Args:
        config: vLLM's, of any model; what of it matters is set.
        num_bytes: of it; as much as there can be if not given.

    Raises:
        Exception: what vLLM raises where it refuses the model.
    """
    model = MODELS[recipe.model]
    block = model.real_block_tokens(recipe)
    config.model_config.hf_config.model_type = recipe.model.translate(MODEL_TYPE)
    config.cache_config.block_size = block
    # The DeepSeek-V4 indexer can be read in these only; for the others it is one of several.
    config.cache_config.kv_cache_layout = "BLHNC"
    layers = dict(model.layers(recipe, block))
    targets = dict(model.layers(replace(recipe, drafts=""), block))
    for name in layers.keys() - targets.keys():
        if hasattr(layers[name], "is_draft"):  # since vLLM 0.33, whose model runner sets it
            layers[name] = replace(layers[name], is_draft=True)
    worker_config = specs.plan_kv_cache(config, layers, num_bytes or 1 << 50)
    kv_cache_config = generate_scheduler_kv_cache_config([worker_config])
    groups = kv_cache_config.kv_cache_groups
    cacheable = [g.kv_cache_spec for g in groups if g.kv_cache_spec.prefix_cacheable]
    return ModelCache(
        kv_cache_config,
        block,
        math.gcd(*(s.block_size * _ranks(s, recipe) for s in cacheable)) // recipe.match_units,
        kv_cache_groups_tp_replicas(groups, recipe.tensor_ranks, recipe.decode_ranks),
    )


def small_cache(recipe: Recipe, cache: ModelCache) -> ModelCache:
    """The same, with the tokens of blocks and windows divided by one number."""
    small_tokens = MODELS[recipe.model].small_tokens
    by = Fraction(small_tokens, cache.block_tokens)
    groups = [
        replace(group, kv_cache_spec=_divided(group.kv_cache_spec, by))
        for group in cache.kv_cache_config.kv_cache_groups
    ]
    kv_cache_config = replace(cache.kv_cache_config, kv_cache_groups=groups)
    hash_tokens = int(cache.hash_tokens * by * recipe.match_units) // recipe.match_units
    return replace(
        cache,
        kv_cache_config=kv_cache_config,
        block_tokens=small_tokens,
        hash_tokens=hash_tokens,
    )


def _ranks(spec: Any, recipe: Recipe) -> int:
    return recipe.decode_ranks if spec.dcp_sharded else 1


def _divided(spec: Any, by: Fraction) -> Any:
    """A spec with fewer tokens; a ring of the tokens of one request stays as large as it is."""
    if isinstance(spec, kv.CircularBufferSpec):
        return spec
    less = {"block_size": int(spec.block_size * by)}
    for name in ("sliding_window", "tokens_per_state", "prefill_checkpoint_alignment"):
        tokens = getattr(spec, name, None)
        if isinstance(tokens, int) and tokens > 0:
            less[name] = max(1, int(tokens * by))
    return replace(spec, page_size_padded=None, **less)


def _group(spec: Any, decode_ranks: int) -> Group:
    block = spec.block_size * (decode_ranks if spec.dcp_sharded else 1)
    if isinstance(spec, kv.CircularBufferSpec):
        return Group("ring", RING_POOL[spec.num_kv_heads], block)
    if isinstance(spec, kv.MambaSpec):
        return Group("mamba", 0, block)
    if isinstance(spec, kv.SlidingWindowSpec):
        kind = "window" if spec.prefix_cacheable else "replay"
        return Group(kind, spec.sliding_window, block)
    return Group("mla" if isinstance(spec, kv.MLAAttentionSpec) else "full", 0, block)


RING_POOL = {1: 2, 2: 8}
"""Tokens that a ring collects before they are one, by its heads: of DeepSeek-V4.1, and of GLM-5.3,
whose 16 are half as many, since hits end at a multiple of them."""
