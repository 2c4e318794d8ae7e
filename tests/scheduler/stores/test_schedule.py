"""Which requests a step looks at: those that may have filled a block, and few others."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from safe_offload.scheduler.requests import Phase, RequestState
from safe_offload.scheduler.stores.schedule import StoreSchedule
from tests.scheduler.rig import Rig
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


def test_who_computes_a_prompt_is_looked_at_in_every_step():
    schedule = StoreSchedule([BLOCK_TOKENS], 1, None, 0)
    assert looks(schedule, 5, Running(schedule, "a", 100), num_tokens=12) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("num_tokens", range(1, 9))
def test_who_decodes_is_looked_at_when_it_fills_a_block(num_tokens):
    schedule = StoreSchedule([BLOCK_TOKENS], 1, None, 0)
    running = Running(schedule, "a", num_tokens)
    assert looks(schedule, 1, running, num_tokens) == [0], "the end of its prompt"
    fills = [n for n in range(20) if (num_tokens + 1 + n) % BLOCK_TOKENS == 0]
    assert looks(schedule, 20, running) == fills


def test_the_smallest_step_of_all_groups_counts():
    schedule = StoreSchedule([8, 12], 1, None, 0)
    running = Running(schedule, "a", 8)
    schedule.due({"a": 8})
    running.compute(8)
    assert looks(schedule, 12, running) == [3, 7, 11]


def test_who_is_not_scheduled_when_it_is_time_is_looked_at_when_it_is():
    schedule = StoreSchedule([BLOCK_TOKENS], 1, None, 0)
    running = Running(schedule, "a", 4)
    assert schedule.due({"a": 4}) == [running.state]
    running.compute(4)
    for _ in range(10):
        assert schedule.due({"b": 1}) == []
    assert schedule.due({"a": 1}) == [running.state]


def test_who_was_preempted_is_not_looked_at_until_it_runs_again():
    schedule = StoreSchedule([BLOCK_TOKENS], 1, None, 0)
    preempted, finished = Running(schedule, "a", 4), Running(schedule, "b", 40)
    schedule.due({"a": 4, "b": 4})
    preempted.state.move(Phase.WAITING)
    finished.state.move(Phase.FINISHED)
    for _ in range(10):
        assert schedule.due({"a": 1, "b": 1}) == []
    preempted.state.move(Phase.RUNNING)
    schedule.add(preempted.state)
    assert schedule.due({"a": 1}) == [preempted.state]


def test_who_runs_again_before_its_time_is_looked_at_once_in_a_step():
    schedule = StoreSchedule([BLOCK_TOKENS], 1, None, 0)
    running = Running(schedule, "a", 4)
    schedule.due({"a": 4})
    running.compute(4)
    for _ in range(3):
        assert schedule.due({"a": 0}) == []
    running.state.move(Phase.WAITING)
    running.state.move(Phase.RUNNING)
    schedule.add(running.state)
    assert schedule.due({"a": 1}) == [running.state], "it was due twice"


@given(
    num_drafts=st.integers(0, 5),
    num_tokens=st.integers(1, 12),
    steps=st.lists(st.tuples(st.booleans(), st.integers(0, 5)), min_size=20, max_size=60),
)
@settings(max_examples=300, deadline=None)
def test_no_filled_block_waits_for_a_look(num_drafts, num_tokens, steps):
    """Whatever becomes of the drafts, and in whichever steps the request is scheduled."""
    schedule = StoreSchedule([BLOCK_TOKENS], 1 + num_drafts, None, 0)
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


# ---- in an engine ------------------------------------------------------------------------------


class Watch:
    """Counts how often requests are looked at, and sees which hashed blocks wait for it.

    Args:
        rig: an engine that has started.
        num_steps_between: looks at requests that decode; None for what the planner has chosen.
    """

    def __init__(self, rig: Rig, num_steps_between: int | None = 1) -> None:
        self.rig = rig
        if num_steps_between is not None:
            rig.planner.policy.schedule.num_steps_between = num_steps_between
        self.num_looks = 0
        self.num_missed = 0
        self.num_preempted = 0
        self.num_hashed: dict[str, int] = {}
        self._due = rig.planner.policy.schedule.due
        rig.planner.policy.schedule.due = self.due

    def due(self, scheduled: dict[str, int]) -> list[RequestState]:
        found: list[RequestState] = self._due(scheduled)
        self.num_looks += len(found)
        # vLLM hashes blocks when it reads the output, too, which the next step is to see.
        hashed = self.rig.scheduler.kv_cache_manager.coordinator.single_type_managers[0]
        self.num_hashed = {i: hashed.num_cached_block.get(i, 0) for i in scheduled}
        return found

    def step(self) -> None:
        batch = self.rig.step()
        if batch is None:
            return
        self.num_preempted += len(batch.scheduled.preempted_req_ids or ())
        for request_id, num_hashed in self.num_hashed.items():
            state = self.rig.planner.book.get(request_id)
            if state is not None and state.phase is Phase.RUNNING:
                self.num_missed += self.rig.planner.policy.progress[state].cursors[0] < num_hashed


@pytest.mark.parametrize(
    "shape",
    [
        {},
        {"is_async": True},
        {"num_draft_tokens": 2},
        {"num_draft_tokens": 5, "is_async": True},
        {"pipeline_ranks": 3},
        {"groups": ("window:10", "full@8")},
    ],
)
def test_what_vllm_has_hashed_is_looked_at_in_the_same_step(make_rig, shape):
    """With drafts or asynchronous scheduling a block is hashed later than it is computed."""
    rig = make_rig(num_blocks=160, num_slots=400, **shape)
    rig.start()
    watch = Watch(rig)
    for n in range(4):
        rig.add(f"r{n}", rig.prompt(5 + 9 * n, n), max_tokens=40)
    while rig.has_work:
        watch.step()
    assert watch.num_missed == 0
    assert rig.counts["stored_blocks"] >= sum((5 + 9 * n + 39) // BLOCK_TOKENS for n in range(4))
    for n in range(4):
        rig.check_tokens(f"r{n}", 40)
    rig.check_idle()


@pytest.mark.parametrize(
    ("groups", "num_steps_between"),
    [
        (("full",), 16),
        (("full", "window:64"), 16),
        (("full", "window:10"), 4),
        (("full", "window:3"), 1),
        (("full", "chunk:8"), 1),
    ],
)
def test_a_filled_block_is_stored_while_it_is_in_its_table(make_rig, groups, num_steps_between):
    """Those who decode are looked at together, as seldom as no window slides past a block."""
    rig = make_rig(groups=groups, num_blocks=300, num_slots=600)
    rig.start()
    watch = Watch(rig, None)
    assert rig.planner.policy.schedule.num_steps_between == num_steps_between
    for n in range(3):
        rig.add(f"r{n}", rig.prompt(8, n), max_tokens=57)
    rig.drain()
    num_looks_each = 1 + 56 // max(BLOCK_TOKENS, num_steps_between)
    assert abs(watch.num_looks / 3 - num_looks_each) <= 1
    assert rig.counts["stored_blocks"] == len(groups) * 3 * (64 // BLOCK_TOKENS)
    rig.check_idle()


def test_what_a_preempted_request_has_filled_since_the_last_look_is_stored(make_rig):
    """Its blocks are free, and some were given to others in the very step."""
    rig = make_rig(num_blocks=20, num_slots=200)
    rig.start()
    watch = Watch(rig, 1000)
    for n in range(4):
        rig.add(f"r{n}", rig.prompt(9, n), max_tokens=30)
    rig.drain()
    assert watch.num_preempted == 0, "counted by step() only"
    assert rig.counts["rescued_blocks"] > 0
    assert rig.counts["hit_tokens"] > 0
    for n in range(4):
        rig.check_tokens(f"r{n}", 30)
    rig.check_idle()


@pytest.mark.parametrize("is_async", [False, True])
def test_requests_that_decode_are_looked_at_once_for_each_block(make_rig, is_async):
    rig = make_rig(num_blocks=80, num_slots=200, is_async=is_async)
    rig.start()
    watch = Watch(rig)
    for n in range(4):
        rig.add(f"r{n}", rig.prompt(4, n), max_tokens=41)
    rig.drain()
    assert watch.num_looks == 4 * (1 + 40 // BLOCK_TOKENS)


def test_who_is_preempted_and_runs_again_is_not_overlooked(make_rig):
    rig = make_rig(num_blocks=20, num_slots=200)
    rig.start()
    watch = Watch(rig)
    for n in range(4):
        rig.add(f"r{n}", rig.prompt(9, n), max_tokens=30)
    while rig.has_work:
        watch.step()
    assert watch.num_preempted > 0, "or it has shown nothing"
    assert watch.num_missed == 0
    for n in range(4):
        rig.check_tokens(f"r{n}", 30)
    rig.check_idle()
