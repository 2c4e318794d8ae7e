"""Which requests a step looks at: those that may have filled a block, and few others."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from safe_offload.scheduler.requests import Phase, RequestState
from safe_offload.scheduler.stores.policy import StoreSchedule
from tests.simulator.groups import BLOCK_TOKENS


class Running:
    """A request that runs, with as much of vLLM's object as the schedule reads."""

    def __init__(self, schedule: StoreSchedule, request_id: str, num_tokens: int) -> None:
        self.request: Any = SimpleNamespace(
            request_id=request_id, num_computed_tokens=0, num_tokens=num_tokens
        )
        self.state = RequestState(self.request)
        self.state.move(Phase.RUNNING)
        schedule.add(self.state)

    @property
    def num_filled(self) -> int:
        """Tokens of blocks that vLLM has hashed when a step is planned that computes all."""
        return int(self.request.num_tokens) // BLOCK_TOKENS * BLOCK_TOKENS

    def compute(self, num_tokens: int, num_accepted: int = 0) -> None:
        """What a step does to it: its drafts but the first `num_accepted` are rejected."""
        request = self.request
        num_computed = request.num_computed_tokens + num_tokens
        if num_computed < request.num_tokens:
            request.num_computed_tokens = num_computed
        else:
            request.num_computed_tokens = request.num_tokens + num_accepted
            request.num_tokens += 1 + num_accepted


def looks(
    schedule: StoreSchedule, num_steps: int, running: Running, num_tokens: int = 1
) -> list[int]:
    """The steps, counted from 0, in which a request is looked at that is scheduled in all."""
    found = []
    for step in range(num_steps):
        if schedule.due({running.request.request_id: num_tokens}):
            found.append(step)
        running.compute(num_tokens)
    return found


@pytest.mark.parametrize("num_tokens", range(1, 9))
def test_who_decodes_is_looked_at_when_it_fills_a_block(num_tokens):
    schedule = StoreSchedule([BLOCK_TOKENS], 1, 0)
    running = Running(schedule, "a", num_tokens)
    assert looks(schedule, 1, running, num_tokens) == [0], "the end of its prompt"
    fills = [n for n in range(20) if (num_tokens + 1 + n) % BLOCK_TOKENS == 0]
    assert looks(schedule, 20, running) == fills


def test_the_smallest_step_of_all_groups_counts():
    schedule = StoreSchedule([8, 12], 1, 0)
    running = Running(schedule, "a", 8)
    schedule.due({"a": 8})
    running.compute(8)
    assert looks(schedule, 12, running) == [3, 7, 11]


@given(
    num_drafts=st.integers(0, 5),
    num_tokens=st.integers(1, 12),
    steps=st.lists(st.tuples(st.booleans(), st.integers(0, 5)), min_size=20, max_size=60),
)
@settings(max_examples=120, deadline=None)
def test_no_filled_block_waits_for_a_look(num_drafts, num_tokens, steps):
    """Whatever becomes of the drafts, and in whichever steps the request is scheduled."""
    schedule = StoreSchedule([BLOCK_TOKENS], 1 + num_drafts, 0)
    running = Running(schedule, "a", num_tokens)
    num_seen = 0
    num_scheduled = num_tokens
    for is_scheduled, num_accepted in steps:
        if not is_scheduled:
            assert schedule.due({"b": 1}) == []
            continue
        if schedule.due({"a": num_scheduled}):
            num_seen = running.num_filled
        assert num_seen == running.num_filled
        running.compute(num_scheduled, min(num_accepted, num_scheduled - 1, num_drafts))
        num_scheduled = 1 + num_drafts
