"""What no hit needs goes first: host memory that is short holds prompts that can be hit whole."""

from collections.abc import Sequence
from typing import Any

import pytest

from safe_offload.compat.versions import installed_version
from tests.simulator.models import MODELS, Recipe
from tests.simulator.peers import PeerEngine
from tests.simulator.vllm_setup import EngineShape

BLOCK = 16
PROMPT_TOKENS = 40 * BLOCK
HYBRIDS = {
    "window": ("full@16", "window:96@16"),
    "chunks": ("full@16", "chunk:128@16"),
    "states": ("full@16", "mamba@16"),
    "all": ("full@16", "window:96@16", "mamba@16"),
}

NO_STATES = ("window", "chunks")
IS_031 = installed_version().startswith("0.31.")
"""It keeps no state near the end of a prompt, so a hit needs others."""


def make_engine(groups: tuple[str, ...], num_slots: int, **what: Any) -> PeerEngine:
    usual = {"num_blocks": 130 * len(groups), "retention_interval": 0}
    sizes = {"num_slots": num_slots, "max_batched_tokens": 8 * BLOCK}
    shape = EngineShape(groups=groups, **{**usual, **sizes, **what})
    engine = PeerEngine(shape, tokens=lambda request_id, position: position % 97)
    engine.add("start", [1], 1)
    engine.drain()
    return engine


def prompt(number: int, num_tokens: int = PROMPT_TOKENS) -> list[int]:
    return [number + 100, *(position % 89 for position in range(1, num_tokens))]


def ask(engine: PeerEngine, name: str, token_ids: Sequence[int]) -> Any:
    request = engine.add(name, token_ids, 1)
    engine.drain()
    return request


def hit_tokens(engine: PeerEngine, request: Any) -> int:
    end_max = request.num_prompt_tokens - 1
    hit = engine.connector.side.hits.find_hit(request.block_hashes, 0, end_max)
    return hit.num_tokens if hit else 0


def crowd(engine: PeerEngine, num_more: int = 2) -> None:
    """Let something else take all empty slots and some more."""
    num_empty = engine.connector.side.hits.slots.num_empty
    ask(engine, "other", prompt(7, (num_empty + num_more) * BLOCK))


def slots_of(groups: tuple[str, ...], **what: Any) -> tuple[int, int]:
    """Slots of one prompt in ample memory, and of those the ones that a hit at its end needs."""
    engine = make_engine(groups, 1000, **what)
    request = ask(engine, "one", prompt(0))
    hits = engine.connector.side.hits
    hit = hits.find_hit(request.block_hashes, 0, request.num_prompt_tokens - 1)
    num_held = len(hits.directory.kept())
    return num_held, len(hit.slots())


@pytest.mark.parametrize("retention", [0, None])
@pytest.mark.parametrize("kind", [kind for kind in HYBRIDS if not IS_031 or kind in NO_STATES])
def test_memory_that_is_short_holds_what_hits_need_and_nothing_else(kind, retention):
    groups = HYBRIDS[kind]
    num_held, num_needed = slots_of(groups, retention_interval=retention)
    assert num_held > num_needed + 2, "there are windows or states before the end"
    num_whole = 4
    num_slots = num_whole * (num_needed + 2) + num_held - num_needed
    engine = make_engine(groups, num_slots, retention_interval=retention)
    requests = [ask(engine, str(number), prompt(number)) for number in range(2 * num_whole)]
    whole = [hit_tokens(engine, request) >= PROMPT_TOKENS - 2 * BLOCK for request in requests]
    assert sum(whole) >= num_whole


@pytest.mark.parametrize("retention", [0, None])
@pytest.mark.parametrize("kind", HYBRIDS)
@pytest.mark.parametrize("num_lost", [-1, 0])
def test_what_is_spare_is_what_no_search_finds(kind, retention, num_lost):
    """What hits read is told without a search where that is possible."""
    engine = make_engine(HYBRIDS[kind], 1000, retention_interval=retention)
    hits = engine.connector.side.hits
    request = ask(engine, "one", prompt(0, PROMPT_TOKENS - 5))
    at_ends = [slot for slot, key in hits.directory.kept().items() if key.group_idx]
    hits.slots.forget([at_ends.pop(num_lost)])
    for end in range(request.num_tokens + 1):
        found = {-1}
        for last in (end, request.num_prompt_tokens - 1, request.num_tokens):
            hit = hits.find_hit(request.block_hashes, 0, last)
            found.update(hit.slots() if hit else ())
        spare, needed = hits.at_ends(request, [end], [*at_ends, *at_ends])
        assert sorted(spare) == sorted({*at_ends} - found)
        assert not needed
        assert set(hits.at_ends(request, [end], at_ends[:-1]).needed) <= {at_ends[-1]}


@pytest.mark.parametrize("model", ["deepseek-v4", "deepseek-v4.1"])
def test_the_block_that_a_hit_drops_with_drafts_is_not_spare(model):
    """Its drafter computes it again, but without it vLLM finds no hit that ends before it."""
    recipe = Recipe(model, MODELS[model].drafts[-1], 2)
    num_tokens = 6 * MODELS[model].small_tokens
    engine = make_engine(
        (),
        3000,
        **{"recipe": recipe, "num_draft_tokens": 2, "num_blocks": 3000, "retention_interval": None},
    )
    hits = engine.connector.side.hits
    request = ask(engine, "one", prompt(0, num_tokens + 3))
    before = hit_tokens(engine, request)
    kept = sorted(hits.directory.kept())
    hits.slots.forget(hits.at_ends(request, [num_tokens // 2], kept).spare)
    assert hit_tokens(engine, request) == before > 0


def test_where_prompts_were_seen_to_part_the_windows_stay():
    """The third prompt that begins so hits them, however short memory was meanwhile."""
    groups = HYBRIDS["all"]
    num_held, num_needed = slots_of(groups)
    engine = make_engine(groups, 2 * num_needed + 2 * (num_held - num_needed))
    stem = prompt(0, 20 * BLOCK)
    for number in range(2):  # the second parts from the first
        ask(engine, f"stem {number}", [*stem, *prompt(number, 15 * BLOCK)])
    crowd(engine)
    third = engine.make_request([*stem, *prompt(2, 5 * BLOCK)], "third")
    assert hit_tokens(engine, third) == len(stem)


@pytest.mark.parametrize(("kind", "num_more"), [("all", 2), ("states", 14)])
def test_windows_and_states_stay_where_others_begin_on_the_gpu(kind, num_more):
    """No load reads them as long as the GPU has them."""
    groups = HYBRIDS[kind]
    num_held, num_needed = slots_of(groups)
    engine = make_engine(groups, 2 * num_needed + 2 * (num_held - num_needed))
    engine.scheduler.reset_prefix_cache(reset_connector=True)
    stem = prompt(0, 20 * BLOCK)
    ask(engine, "stem", [*stem, 1])
    for number in range(3):
        num_before = engine.num_computed
        ask(engine, f"on the GPU {number}", [*stem, *prompt(number, 15 * BLOCK)])
        assert engine.num_computed - num_before == 15 * BLOCK
    assert not engine.counts["hit_tokens"]
    crowd(engine, num_more)
    last = engine.make_request([*stem, *prompt(9, 5 * BLOCK)], "last")
    assert hit_tokens(engine, last) == len(stem)


@pytest.mark.skipif(IS_031, reason="vLLM 0.31 keeps no state near the end of a prompt")
def test_the_state_of_a_prompt_is_kept_as_long_as_the_prompt():
    """It used to be evicted while its request was answered, and the prompt was held in vain."""
    groups = HYBRIDS["states"]
    engine = make_engine(groups, 100)
    request = engine.add("long answer", prompt(0), 200)
    number = 0
    while not request.is_finished():
        number += 1
        engine.add(str(number), prompt(number, 20 * BLOCK), 1)
        for _ in range(8):
            engine.step()
    assert number > 10
    assert hit_tokens(engine, request) >= PROMPT_TOKENS - 2 * BLOCK


# ---- one budget for all kinds (sglang#39436) ----------------------------------------------------

MIX_GROUPS = ("full@16", "window:64@16", "mamba@16")
MIX_SLOTS = 450
MIXES = {"few and long": (4, 100 * BLOCK), "many and short": (40, 4 * BLOCK)}
"""Prompts, and tokens of each: in the first nearly all is full attention, in the second a half."""


def num_hit(mix: str) -> int:
    """How many of the prompts are hit when all have come once."""
    num_prompts, num_tokens = MIXES[mix]
    engine = make_engine(MIX_GROUPS, MIX_SLOTS)
    requests = [
        ask(engine, str(number), prompt(number, num_tokens + 1)) for number in range(num_prompts)
    ]
    return sum(hit_tokens(engine, request) >= num_tokens - 2 * BLOCK for request in requests)


@pytest.mark.parametrize("mix", MIXES)
def test_a_host_is_full_of_whatever_hits_need(mix):
    """With a share for each kind one is full while the other is not, and there are no hits."""
    assert num_hit(mix) == MIXES[mix][0]
