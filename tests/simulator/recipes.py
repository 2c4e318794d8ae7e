"""Profiles of the models of `models.py`: how a model is served is drawn from the seed.

What vLLM refuses is drawn again, so that a run is of what a user can start.
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import replace
from typing import Any

from tests.simulator.chance import Chance
from tests.simulator.events import FaultKind
from tests.simulator.models import MODELS, TENSOR_RANKS, Recipe
from tests.simulator.profiles import COPY_FAULTS, PEER_FAULTS, FaultCounts, Profile, Workload
from tests.simulator.vllm_setup import (
    NONE,
    EngineShape,
    as_model_runner,
    cache_of,
    make_config,
    make_kv_cache_config,
    make_scheduler,
)

SEGMENT_BLOCKS = 2
"""A retention interval, in largest blocks: 32,768 tokens are longer than any simulated prompt."""

LONG_TOKENS = 64
"""With blocks of so many tokens there are fewer requests and shorter ones: words take time."""


@functools.cache
def refusal(recipe: Recipe, retention_interval: int | None = None) -> str:
    """What vLLM says to a model served so; empty if it starts."""
    try:
        shape = EngineShape(
            recipe=recipe,
            tensor_ranks=recipe.decode_ranks * recipe.prefill_ranks,
            num_draft_tokens=recipe.num_draft_tokens,
            retention_interval=retention_interval,
            num_blocks=1000,
            connector=NONE,
        )
        with as_model_runner(shape):
            make_scheduler(shape)
    except (AssertionError, ValueError, NotImplementedError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def is_wrong_without_us(recipe: Recipe) -> bool:
    """Whether vLLM's own prefix cache finds what is not there, where hits end inside blocks.

    A step that begins inside a block and leaves a checkpoint runs on into further blocks, and
    vLLM 0.32.0 caches the block that it began in with the state of its beginning. With drafts a
    hit that is cut inside a block of full attention copies it, also from a request of the same
    step, before it is computed.
    """
    return recipe.match_units > 1 and bool(recipe.checkpoints or recipe.drafts)


def draw(model: str, seed: int | str) -> Profile:
    """The profile of a seed: the first that is drawn and vLLM does not refuse."""
    for attempt in itertools.count():
        profile = _draw(model, Chance(f"{model}/{seed}/{attempt}"))
        recipe = profile.shape.recipe
        assert recipe is not None
        if is_wrong_without_us(recipe) or refusal(recipe, profile.shape.retention_interval):
            continue
        return profile
    raise AssertionError("not reached")


def _draw(model: str, chance: Chance) -> Profile:
    has_streams = chance.happens(0.6, "streams")
    is_v2 = has_streams and chance.happens(0.5, "v2")
    recipe = _recipe(model, chance, is_v2=is_v2)
    has_states = MODELS[model].page_bytes is not None
    extra: dict[str, Any] = {"lazy_offload": True} if chance.happens(0.4, "lazy") else {}
    if chance.happens(0.25, "verify"):
        extra["verify"] = "load"
    num_ranks = recipe.decode_ranks * recipe.prefill_ranks
    tensor_ranks = num_ranks if num_ranks > 1 else chance.choose((1, 1, 2), "ranks")
    block = MODELS[model].small_tokens
    shape = EngineShape(
        recipe=recipe,
        tensor_ranks=tensor_ranks,
        # Drafts leave their states where only a synchronous step is sure to find them.
        is_async=chance.happens(0.5, "async") and not (has_states and recipe.drafts),
        is_v2=is_v2,
        has_streams=has_streams,
        num_draft_tokens=recipe.num_draft_tokens,
        max_batched_tokens=chance.choose((block, 2 * block, 5 * block), "batched tokens"),
        max_seqs=chance.choose((3, 6), "seqs"),
        has_events=chance.happens(0.3, "events"),
        extra=extra,
    )
    shares = 1 if block < LONG_TOKENS else 2
    workload = Workload(
        num_requests=chance.between(10, 24, "requests") // shares,
        num_steps=chance.between(60, 160, "steps"),
        num_stems=chance.between(1, 4, "stems"),
        num_tails=chance.between(1, 8, "tails"),
        stem_tokens=6 * block // shares,
        tail_tokens=3 * block // 2,
        output_tokens=chance.choose((1, 12, 40), "output tokens"),
        num_aborts=chance.choose((0, 8), "aborts"),
        num_resets=chance.choose((0, 2), "resets"),
        num_reused_ids=chance.choose((0, 4), "reused ids"),
    )
    faults: FaultCounts = {**COPY_FAULTS, **PEER_FAULTS} if chance.happens(0.4, "faults") else {}
    if chance.happens(0.125, "failing loads"):
        faults = {**faults, FaultKind.LOADS_FAIL: 2}
    return Profile(
        f"{MODELS[model].source.partition(';')[0]}: served in another way for each seed",
        _with_pools(shape, workload, chance),
        workload,
        copy_ticks_max=chance.choose((0, 12, 40), "copy ticks"),
        faults=faults,
        settles=True,
    )


def _recipe(model: str, chance: Chance, *, is_v2: bool) -> Recipe:
    drafts = chance.choose(MODELS[model].drafts, "drafts")
    decode_ranks = chance.choose((1, 1, 2), "dcp")
    prefill_ranks = 1 if decode_ranks > 1 else chance.choose((1, 1, 2), "pcp")
    return Recipe(
        model,
        drafts,
        chance.between(1, 3, "draft tokens") if drafts else 0,
        is_fp8=chance.happens(0.5, "fp8"),
        decode_ranks=decode_ranks,
        prefill_ranks=prefill_ranks,
        replays=is_v2 and prefill_ranks == 1,
        checkpoints=model.startswith(("kimi", "glm-5.3")) and chance.happens(0.5, "checkpoints"),
        match_units=chance.choose((1, 1, 4), "units") if MODELS[model].page_bytes else 1,
    )


def _with_pools(shape: EngineShape, workload: Workload, chance: Chance) -> EngineShape:
    """Both pools, and what follows from the groups that vLLM makes, if it makes any."""
    recipe = shape.recipe
    assert recipe is not None
    try:
        cache = cache_of(recipe)
    except (AssertionError, ValueError, NotImplementedError):
        return shape
    longest = workload.stem_tokens + workload.tail_tokens + workload.output_tokens
    is_same = cache.num_replicas == TENSOR_RANKS and shape.tensor_ranks > 1
    kept = chance.choose((None, 0, SEGMENT_BLOCKS), "retention")
    largest = max(group.block_tokens for group in shape.parsed_groups if group.kind != "ring")
    shape = replace(
        shape,
        max_model_len=longest + shape.num_draft_tokens,
        is_replicated=is_same and recipe.prefill_ranks == 1,
        retention_interval=None if kept is None else kept * largest,
    )
    with as_model_runner(shape):
        config, kv_cache_config = make_config(shape), make_kv_cache_config(shape)
        specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
        try:
            least = sum(-(-s.max_memory_usage_bytes(config) // s.page_size_bytes) for s in specs)
        except AssertionError:  # a window that vLLM does not spread over ranks
            return shape
    if recipe.match_units > 1:
        least += len(specs)  # copies of shared blocks, for which vLLM sees no room itself
    num_blocks = 1 + round(least * chance.choose((1.1, 1.5, 3.0), "blocks"))
    num_slots = round(num_blocks * chance.choose((0.7, 2.0, 4.0), "slots"))
    return replace(shape, num_blocks=num_blocks, num_slots=num_slots)
