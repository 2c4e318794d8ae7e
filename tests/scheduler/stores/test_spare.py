"""What no hit needs goes first: host memory that is short holds prompts that can be hit whole."""

from collections.abc import Sequence
from typing import Any

import pytest

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


def make_engine(groups: tuple[str, ...], num_slots: int, **what: Any) -> PeerEngine:
    shape = EngineShape(
        groups=groups,
        num_blocks=130 * len(groups),
        num_slots=num_slots,
        max_batched_tokens=8 * BLOCK,
        **{"retention_interval": 0, **what},
    )
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


def slots_of(groups: tuple[str, ...], **what: Any) -> tuple[int, int]:
    """Slots of one prompt in ample memory, and of those the ones that a hit at its end needs."""
    engine = make_engine(groups, 1000, **what)
    request = ask(engine, "one", prompt(0))
    hits = engine.connector.side.hits
    hit = hits.find_hit(request.block_hashes, 0, request.num_prompt_tokens - 1)
    num_held = len(hits.directory.kept())
    return num_held, len(hit.slots())


@pytest.mark.parametrize("retention", [0, None])
@pytest.mark.parametrize("kind", HYBRIDS)
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
