"""A prefix that many want at once is loaded once."""

from functools import cache

import pytest
from vllm.config import SpeculativeConfig

from tests.scheduler.loads.prefixes import (
    CASES,
    COPY_STEPS,
    LAYOUTS,
    TAIL_TOKENS,
    TURN_TOKENS,
    Case,
    Served,
    serve,
    take_turns,
)

OURS = ("ours-eager", "ours-lazy")
SPARSE = [layout for layout in LAYOUTS if "window" in layout or "Mamba" in layout]
LOAD_STEPS = COPY_STEPS + 1
"""From the plan that names a load to the step that finds it landed."""


@cache
def served(name: str, layout: str, case: Case, num_before: int = 0) -> Served:
    return serve(name, LAYOUTS[layout], case, COPY_STEPS, num_before)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "case",
    [CASES[0], *(pytest.param(case, marks=pytest.mark.nightly) for case in CASES[1:])],
    ids=lambda case: str(case.num_requests),
)
@pytest.mark.parametrize("name", OURS)
def test_a_hit_that_many_want_is_no_slower_than_none(layout, case, name):
    """FAULTS P3: each loaded a copy of its own, the copies filled the pool, requests preempted."""
    compare(served("none", layout, case), served(name, layout, case), layout)


def compare(without: Served, ours: Served, layout: str) -> None:
    has_states = "Mamba" in layout  # what is behind the load begins at the end of a block
    assert ours.num_steps <= without.num_steps + LOAD_STEPS + has_states
    assert ours.num_preemptions <= without.num_preemptions
    assert 0.97 <= ours.loaded_prefixes <= 1, "once, but for the block with the last token"


@pytest.mark.parametrize("layout", SPARSE)
@pytest.mark.parametrize("name", OURS)
def test_where_two_prompts_were_seen_to_part_all_others_begin(layout, name):
    """Of windows and states vLLM keeps what the end of a prompt needs, which no other has."""
    case = CASES[0]
    assert served(name, layout, case, 1).loaded_prefixes == 0, "none has parted from the first"
    compare(served("none", layout, case, 2), served(name, layout, case, 2), layout)


@pytest.mark.parametrize("layout", SPARSE)
def test_a_longer_request_that_stands_first_costs_one_load_more(layout):
    """Its load brings windows and states to its own end alone: the others share a second one."""
    what, own = (LAYOUTS[layout], CASES[0], COPY_STEPS, 0, 10), 10 / CASES[0].prefix_blocks
    without, ours = serve("none", *what), serve("ours-eager", *what)
    assert ours.num_steps <= without.num_steps + LOAD_STEPS
    assert (ours.num_preemptions, without.num_preemptions) == (0, 0)
    assert 2 < ours.loaded_prefixes <= 2 + own, "less than twice what is needed"


@pytest.mark.parametrize("drops_block", [False, True], ids=["drafts", "as EAGLE"])
@pytest.mark.parametrize("layout", SPARSE)
def test_with_drafts_it_is_the_same(layout, drops_block, monkeypatch):
    """For EAGLE vLLM drops the last block of each hit."""
    for method in ("use_eagle", "use_eagle_block_drop"):
        monkeypatch.setattr(SpeculativeConfig, method, lambda _: drops_block, raising=False)
    what = LAYOUTS[layout], CASES[0], COPY_STEPS
    for num_before in (0, 2):
        ours = serve("ours-eager", *what, num_before, num_draft_tokens=2)
        compare(serve("none", *what, num_before, num_draft_tokens=2), ours, layout)


@pytest.mark.parametrize("name", OURS)
def test_long_prefixes_that_come_in_turns_come_back(name):
    """vllm#42948: each with another tail, and too many for the GPU."""
    first, second, third = take_turns(name, LAYOUTS["full attention and a sliding window"])
    assert first == TURN_TOKENS + TAIL_TOKENS
    assert second < 1024 + TAIL_TOKENS, "positions are 1,024 tokens apart"
    assert third <= (second if "lazy" in name else TAIL_TOKENS), "all behind where two have parted"
