"""The models of public recipes: what vLLM makes of them, and whether all of it can be hit."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest

from safe_offload.compat import cache_hits, specs
from safe_offload.compat.cache_hits import GroupGeometry
from safe_offload.compat.versions import installed_version
from safe_offload.connector import SafeCPUOffloadConnector
from safe_offload.scheduler.loads.admission import Admission, Need
from safe_offload.scheduler.loads.boundaries import Boundaries
from tests.simulator.engine_core import EngineCore, random_prompt
from tests.simulator.events import FaultKind
from tests.simulator.floors import FLOORS, MODEL_SEEDS
from tests.simulator.model_runner import ModelRunner
from tests.simulator.models import MODELS, Recipe
from tests.simulator.profiles import PROFILES
from tests.simulator.recipes import SEGMENT_BLOCKS, draw, refusal
from tests.simulator.run import findings_of, run
from tests.simulator.vllm_setup import EngineShape, cache_of, real_cache

SERVED = [(name, drafts) for name, model in MODELS.items() for drafts in model.drafts]
NUM_POOL_BYTES = 60 << 30
"""KV cache of one GPU."""
IS_031 = installed_version().startswith("0.31.")
"""With states and drafts it counts blocks twice when a request goes on, and may never take it."""


def recipe_of(name: str, drafts: str = "", **more: Any) -> Recipe:
    """A recipe; windows are computed again where vLLM does so."""
    replays = more.get("prefill_ranks", 1) == 1
    return Recipe(name, drafts, 2 if drafts else 0, replays=replays, **more)


# ---- everything that vLLM's own cache would hit -------------------------------------------------


def hit_lengths(
    recipe: Recipe, retention: int | None, *, is_lazy: bool, chunk_blocks: int = 2
) -> tuple[dict[str, int], dict[str, int]]:
    """How much of some prompts vLLM's own cache hits after a first one, and the host when it has
    lost all of it to others."""
    groups = cache_of(recipe).groups(recipe.decode_ranks)
    block = max(group.block_tokens for group in groups if group.kind != "ring")
    num_tokens = 5 * block + block // 3
    longest = num_tokens + 2 * block
    num_blocks = 2 * sum(-(-longest // g.block_tokens) for g in groups if g.kind != "ring")
    shape = EngineShape(
        recipe=recipe,
        tensor_ranks=recipe.decode_ranks * recipe.prefill_ranks,
        num_draft_tokens=recipe.num_draft_tokens,
        retention_interval=None if retention is None else retention * block,
        num_blocks=num_blocks,
        num_slots=8000,
        max_batched_tokens=chunk_blocks * block,
        max_model_len=10 * block,
        has_streams=recipe.replays,
        is_v2=recipe.replays,
        extra={"lazy_offload": True} if is_lazy else {},
    )
    core = EngineCore(shape)
    try:
        core.add("first", [1, 2], 1)  # until the ranks have said how many slots they have
        core.drain()
        prompt = random_prompt(num_tokens, 1)
        core.add("a", prompt, 12)
        core.drain()
        later = {
            "again": prompt,
            "longer": [*prompt, *core.answers["a"], *random_prompt(2 * block, 2)],
            "another end": [*prompt[: 3 * block + block // 2], *random_prompt(2 * block, 3)],
            "its first blocks": prompt[: 4 * block],
        }
        requests = {name: core.make_request(tokens) for name, tokens in later.items()}
        coordinator = core.scheduler.kv_cache_manager.coordinator

        def on_gpu() -> dict[str, int]:
            return {
                name: coordinator.find_longest_cache_hit(r.block_hashes, r.num_tokens - 1)[1]
                for name, r in requests.items()
            }

        own = on_gpu()
        for number in itertools.count(10):
            if not any(on_gpu().values()):
                break
            core.add(f"r{number}", random_prompt(num_tokens, number), 2)
            core.drain()
        host = core.connector.side.hits
        size = host.geometry.hash_block_size  # the last block of a whole prompt: the host's only
        hits = {
            name: host.find_hit(r.block_hashes, 0, (r.num_tokens - 1) // size * size)
            for name, r in requests.items()
        }
        core.add("b", prompt, 1)
        core.drain()
        assert core.counts["hit_tokens"] == own["again"]
        return own, {name: hit.num_tokens if hit else 0 for name, hit in hits.items()}
    finally:
        core.close()


@pytest.mark.parametrize(("retention", "is_lazy"), [(None, False), (0, True)])
@pytest.mark.parametrize(("name", "drafts"), SERVED)
def test_the_host_hits_what_vllms_own_cache_would_have(name, drafts, retention, is_lazy):
    own, host = hit_lengths(recipe_of(name, drafts), retention, is_lazy=is_lazy)
    assert own["again"] > 0
    assert host == own


FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "8 bits": {"is_fp8": True},
    "DCP": {"decode_ranks": 2},
    "PCP": {"prefill_ranks": 2},
    "checkpoints": {"checkpoints": True},
    "inside blocks": {"match_units": 4},
    "checkpoints inside blocks": {"checkpoints": True, "match_units": 4},
}


@pytest.mark.nightly
@pytest.mark.parametrize("is_lazy", [False, True], ids=["eager", "lazy"])
@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize(("name", "drafts"), SERVED)
def test_the_host_hits_it_however_a_model_is_served(name, drafts, feature, is_lazy):
    recipe = recipe_of(name, drafts, **FEATURES[feature])
    has_states = MODELS[name].page_bytes is not None
    if (recipe.checkpoints or recipe.match_units > 1) and not has_states:
        return  # the same as without
    for retention, chunk_blocks in itertools.product((None, 0, SEGMENT_BLOCKS), (2, 7)):
        block = MODELS[name].small_tokens * recipe.decode_ranks
        if not refusal(recipe, retention and retention * block):
            own, host = hit_lengths(recipe, retention, is_lazy=is_lazy, chunk_blocks=chunk_blocks)
            assert own["again"] > 0
            assert host == own


@pytest.mark.parametrize("name", MODELS)
def test_loads_of_long_prompts_run_beside_one_another(name):
    """Blocks of a window, of a state and of a ring are few however long a prompt is."""
    cache, config = real_cache(recipe_of(name), NUM_POOL_BYTES)
    kv_cache_config = cache.kv_cache_config
    num_tokens = config.model_config.max_model_len = 1 << 10
    while specs.num_blocks_of_longest_request(config, kv_cache_config) * 5 < (
        kv_cache_config.num_blocks
    ):  # there is room for five at once, by vLLM's own count
        num_tokens = config.model_config.max_model_len
        config.model_config.max_model_len += num_tokens // 8
    sizes = specs.resolve_block_sizes(kv_cache_config, config)
    one_block = replace(kv_cache_config, num_blocks=1)
    coordinator = cache_hits.make_coordinator(config, one_block, *sizes)
    geometry = GroupGeometry(config, kv_cache_config, coordinator)
    admission = Admission(geometry, kv_cache_config.num_blocks)
    for _ in range(3):
        state: Any = Waiting(SimpleNamespace(num_tokens=num_tokens))
        assert geometry.is_plain or admission.admits(state, num_tokens - 1000)
        admission.hold(state, num_tokens - 1000)


@pytest.mark.parametrize("replays", [False, True])
@pytest.mark.parametrize("name", ["deepseek-v4", "deepseek-v4.1", "glm-5.3-flash", "gpt-oss"])
def test_windows_and_states_at_positions_take_a_fourth_of_the_rest(name, replays):
    """A ring has one block however long a prompt is, and is not stored."""
    cache, config = real_cache(replace(recipe_of(name), replays=replays), NUM_POOL_BYTES)
    kv_cache_config = replace(cache.kv_cache_config, prefix_cache_retention_interval=0)
    sizes = specs.resolve_block_sizes(kv_cache_config, config)
    one_block = replace(kv_cache_config, num_blocks=1)
    coordinator = cache_hits.make_coordinator(config, one_block, *sizes)
    boundaries = Boundaries(GroupGeometry(config, kv_cache_config, coordinator), coordinator, 1)
    groups = cache.groups(1)
    rest = sum(boundaries.every / g.block_tokens for g in groups if g.kind in ("full", "mla"))
    windows = sum(-(-(g.size - 1) // g.block_tokens) for g in groups if g.kind == "window")
    stored = windows + sum(g.kind == "mamba" for g in groups)
    assert rest / 4 - 1 < stored <= rest / 4


@dataclass(eq=False)
class Waiting:
    """What of a request's state matters to whoever waits for a load."""

    request: Any
    finished: bool = False
    need: Need | None = None


# ---- runs ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name in MODELS if not IS_031 or name != "glm-5.3-flash"])
@pytest.mark.parametrize("seed", [pytest.param(0, marks=pytest.mark.nightly), 1])
def test_no_promise_is_broken_however_a_model_is_served(name, seed):
    result = run(name, seed, internal_checks=bool(seed))
    assert result.finding is None, f"python -m tests.simulator --profile {name} --seed {seed}"


@pytest.mark.nightly
@pytest.mark.parametrize("name", MODELS)
def test_enough_is_earned_however_a_model_is_served(name):
    results = [run(name, seed) for seed in range(MODEL_SEEDS)]
    assert [result.finding for result in results] == [None] * MODEL_SEEDS
    earned = sum((result.earned for result in results[1:]), results[0].earned)
    assert earned.what_is_below(FLOORS[name]) == ""


@pytest.mark.parametrize("num_left_out", [None, 1])
@pytest.mark.parametrize("name", ["deepseek-v4.1", "qwen3.5", "gpt-oss"])
def test_vllm_may_cut_a_hit_or_take_none_of_it(monkeypatch, name, num_left_out):
    """As vLLM 0.33 does for auxiliary outputs (`cap_external_hit`), and 0.32 for windows."""
    match, num_cut = SafeCPUOffloadConnector.get_num_new_matched_tokens, []

    def cut(connector: Any, request: Any, num_computed: int) -> tuple[int | None, bool]:
        num_tokens, is_async = match(connector, request, num_computed)
        if not num_tokens or len(request.request_id) % 2:
            return num_tokens, is_async
        block = 2 * MODELS[name].small_tokens  # whole blocks with DCP too
        num_cut.append(request.request_id)
        num_kept = 0 if num_left_out is None else max(num_tokens - num_left_out * block, 0)
        return num_kept - num_kept % block, num_kept >= block

    monkeypatch.setattr(SafeCPUOffloadConnector, "get_num_new_matched_tokens", cut)
    for seed in itertools.count():
        assert not findings_of(draw(name, seed), [seed])
        if len(num_cut) > 2:
            break


# ---- blocks that nobody has zeroed --------------------------------------------------------------

LOADS_FAIL = replace(
    PROFILES["loads-fail"],
    shape=EngineShape(groups=("full", "mamba"), num_blocks=40, max_seqs=4, num_slots=100),
)


def test_blocks_of_loads_that_fail_are_zeroed_before_they_are_read():
    assert LOADS_FAIL.faults == {FaultKind.LOADS_FAIL: 4}
    assert not findings_of(LOADS_FAIL, range(2))


def test_blocks_that_nobody_has_zeroed_are_found(monkeypatch):
    prepare = ModelRunner.prepare

    def without_zeroing(runner: ModelRunner, scheduled: Any) -> Any:
        batch = prepare(runner, scheduled)
        batch.zeroed = ()
        return batch

    monkeypatch.setattr(ModelRunner, "prepare", without_zeroing)
    found = findings_of(LOADS_FAIL, range(2))
    assert found
    assert all("have left there" in finding.detail for finding in found)
