"""The five reports that this connector was written for, on vLLM's real scheduler.

tests/simulator/test_faults_of_peers.py runs the same on vLLM's own connectors.
"""

from typing import Any

import pytest
from vllm.v1.request import RequestStatus

from tests.counts import num_failed
from tests.simulator.engine_core import EngineCore, random_prompt
from tests.simulator.host_pool import OtherEngine, contested, evict_host, watch_grants
from tests.simulator.peers import PeerEngine, peer_shape
from tests.simulator.scenes import (
    before_allocation,
    check_answers,
    check_idle,
    forget_gpu_cache,
    hold_copies,
    ids_that,
    run_alone,
    step_until,
    wait_of_second,
    watch_matches,
)
from tests.simulator.vllm_setup import NONE

PLAIN = ("full",)
HYBRID = ("window:16", "full")


# ---- vllm#39702: "Expected 19264 hit tokens, got 0" --------------------------------------------


@pytest.mark.parametrize(("num_ranks", "is_async"), [(1, False), (2, True)])
@pytest.mark.parametrize("groups", [PLAIN, HYBRID])
def test_vllm_39702_a_hit_is_not_evicted_between_match_and_alloc(
    make_engine, groups, num_ranks, is_async
):
    engine = make_engine(groups=groups, tensor_ranks=num_ranks, is_async=is_async)
    prompt = random_prompt(41, 1)
    run_alone(engine, "a", prompt)
    forget_gpu_cache(engine)
    offered = watch_matches(engine)
    before_allocation(engine, "a2", lambda: evict_host(engine))
    run_alone(engine, "a2", prompt, max_tokens=4)
    assert offered["a2"] == [40]
    assert engine.counts["hit_tokens"] == 40, "all that was offered is loaded"
    assert num_failed(engine.counts, "load") == engine.counts["unusable_hits"] == 0
    check_answers(engine, a=1, a2=4)
    check_idle(engine)


# ---- vllm#42085: the second long request -------------------------------------------------------


@pytest.mark.parametrize(
    ("num_held_steps", "num_ranks", "has_streams"), [(0, 1, False), (5, 1, False), (50, 2, True)]
)
@pytest.mark.parametrize("max_batched_tokens", [24, 2048])
@pytest.mark.parametrize(("groups", "num_tokens"), [(PLAIN, 496), (HYBRID, 248)])
def test_vllm_42085_the_second_long_request_waits_no_longer_than_without_a_connector(
    make_engine, groups, num_tokens, max_batched_tokens, num_held_steps, num_ranks, has_streams
):
    what = {
        "groups": groups,
        "num_blocks": 201,
        "num_slots": 400,
        "max_batched_tokens": max_batched_tokens,
    }
    alone = PeerEngine(peer_shape(NONE, **what))
    engine = make_engine(
        tensor_ranks=num_ranks,
        has_streams=has_streams,
        extra={"transfer_timeout_s": 3600},  # idle steps take a second each
        **what,
    )
    hold_copies(engine, num_held_steps > 0)
    assert wait_of_second(engine, num_tokens) == wait_of_second(alone, num_tokens) == 0
    for _ in range(num_held_steps - 1):
        engine.step()
    if num_held_steps:
        assert engine.connector.side.gauges()["stores_in_flight"] > 0, "they are slow"
    hold_copies(engine, False)
    engine.drain()
    check_answers(engine, s0=1, s1=1)
    forget_gpu_cache(engine)
    hits = engine.counts["hit_tokens"]
    run_alone(engine, "s0-again", random_prompt(num_tokens, 1), max_tokens=2)
    assert engine.counts["hit_tokens"] > hits, "what was stored late can be hit"
    check_answers(engine, **{"s0-again": 2})
    check_idle(engine)


# ---- vllm#43226: `assert req_id in self.requests` ----------------------------------------------


KINDS = {
    "run": 'dropped_ids{reason="unowned"}',
    "were freed": 'dropped_ids{reason="unknown"}',
    "never existed": 'dropped_ids{reason="unknown"}',
    "were reported": 'dropped_ids{reason="unowned"}',
    "are loading": 'dropped_ids{reason="premature"}',
    "were aborted while loading": 'dropped_ids{reason="premature"}',
}
"""Ids that are stale in some way, and under what they are counted in finished_recving."""


@pytest.mark.parametrize(
    ("num_ranks", "liars", "is_async"), [(1, 1, False), (2, 1, True), (2, 2, False)]
)
@pytest.mark.parametrize("where", ["finished_recving", "finished_sending"])
@pytest.mark.parametrize("kind", KINDS)
def test_vllm_43226_the_scheduler_is_never_told_of_requests_that(
    make_engine, kind, where, num_ranks, liars, is_async
):
    engine = make_engine(tensor_ranks=num_ranks, is_async=is_async, num_blocks=60, num_slots=90)
    prompts = [random_prompt(41, seed) for seed in range(3)]
    run_alone(engine, "first", prompts[0])
    run_alone(engine, "second", prompts[1])
    forget_gpu_cache(engine)

    def lie(_: int, outputs: list[Any]) -> None:
        for output in outputs[:liars]:
            told = getattr(output, where) or set()
            setattr(output, where, told | ids_that(engine, kind))

    engine.mutate_outputs.append(lie)
    engine.add("live", prompts[2], max_tokens=25)
    hold_copies(engine, True)
    engine.add("again", prompts[0], max_tokens=5)
    engine.add("gone", prompts[1], max_tokens=5)
    for _ in range(4):
        engine.step()
    engine.abort("gone")
    for _ in range(4):
        engine.step()
    hold_copies(engine, False)
    engine.drain()
    assert engine.counts["loaded_blocks"] == 20
    dropped = {name: n for name, n in engine.counts.items() if name.startswith("dropped")}
    if where == "finished_recving":
        assert dropped.get(KINDS[kind], 0) > 0, dropped
    assert sum(dropped.values()) > 0
    check_answers(engine, live=25, again=5)
    check_idle(engine)


# ---- dynamo#6681: abort and stop in one step ---------------------------------------------------


def finish_n_times(engine: EngineCore, num_times: int) -> list[Any]:
    """Call the hook several times wherever vLLM calls it once; collects what it answers."""
    answers: list[Any] = []
    connector, planner = engine.connector, engine.connector.side
    finish = connector.request_finished_all_groups

    def request_finished_all_groups(request: Any, block_ids: Any) -> Any:
        first = finish(request, block_ids)
        answers.append(first)
        gauges, references = planner.gauges(), gpu_references(engine)
        for _ in range(num_times - 1):
            answers.append(finish(request, block_ids))
            assert planner.gauges() == gauges, "the second call had an effect"
            assert gpu_references(engine) == references
        return first

    connector.request_finished_all_groups = request_finished_all_groups
    return answers


def gpu_references(engine: EngineCore) -> list[int]:
    return [block.ref_cnt for block in engine.pool.blocks]


@pytest.mark.parametrize("num_times", [1, 2])
@pytest.mark.parametrize(("num_ranks", "is_async"), [(1, True), (2, False)])
@pytest.mark.parametrize("groups", [PLAIN, HYBRID])
def test_dynamo_6681_abort_and_stop_in_one_step_have_one_effect(
    make_engine, groups, is_async, num_ranks, num_times
):
    engine = make_engine(groups=groups, is_async=is_async, tensor_ranks=num_ranks, num_blocks=60)
    answers = finish_n_times(engine, num_times)
    aborted = []

    def abort_in_the_step_that_stops_it(batch: Any) -> None:
        if "a" in batch.request_ids and not aborted:
            sampled = batch.sampled[batch.request_ids.index("a")]
            if len(engine.answers.get("a", ())) + len(sampled) == 5:
                aborted.append(batch.number)
                engine.abort_before_update("a")

    engine.before_update.append(abort_in_the_step_that_stops_it)
    hold_copies(engine, True)  # its stores are in flight when it ends
    request = engine.add("a", random_prompt(41, 1), max_tokens=5)
    step_until(engine, lambda: "a" not in engine.scheduler.requests)
    assert aborted
    assert request.status == RequestStatus.FINISHED_ABORTED
    assert answers == [(False, None)] * num_times, "vLLM asks once, and is answered the same"
    assert engine.pool.get_num_free_blocks() == 59, "it holds no block when the hook has returned"
    gauges = engine.connector.side.gauges()
    assert engine.connector.request_finished(request, []) == (False, None)
    assert engine.connector.side.gauges() == gauges
    hold_copies(engine, False)
    engine.drain()
    check_answers(engine, a=4)
    forget_gpu_cache(engine)
    run_alone(engine, "a2", random_prompt(41, 1), max_tokens=5)
    assert engine.counts["hit_tokens"] == 40, "it was stored, and once"
    assert engine.counts["stored_blocks"] == 11 * len(groups)
    check_answers(engine, a2=5)
    check_idle(engine)


@pytest.mark.parametrize("num_steps", range(9))
@pytest.mark.parametrize("is_async", [False, True])
def test_dynamo_6681_finishing_twice_is_the_same_as_once_in_every_state(
    make_engine, is_async, num_steps
):
    """Waiting, matched, loading, running and stopped requests are aborted, each hook twice."""
    engine = make_engine(is_async=is_async, num_blocks=24, max_batched_tokens=16)
    prompt = random_prompt(41, 1)
    run_alone(engine, "a", prompt)
    forget_gpu_cache(engine)
    answers = finish_n_times(engine, 2)
    hold_copies(engine, num_steps % 2 == 1)
    engine.add("other", random_prompt(37, 2), max_tokens=6)
    engine.step()
    engine.add("a2", prompt, max_tokens=3)
    engine.add("a3", prompt[:33], max_tokens=3)
    for _ in range(num_steps):
        engine.step()
    engine.abort("a2")
    engine.abort_before_update("a3")
    engine.step()
    hold_copies(engine, False)
    engine.drain()
    assert set(answers) == {(False, None)}
    assert len(answers) == 2 * 3
    check_answers(engine, a=1, other=6)
    for request_id in ("a2", "a3"):
        answer = engine.answers.get(request_id, [])
        assert answer == engine.runner.sequels[request_id].answer(len(answer))
    check_idle(engine)


# ---- kvcached: `available_size()=71 < need_size=76` --------------------------------------------


@pytest.mark.parametrize("left", [0, 3])
@pytest.mark.parametrize("groups", [PLAIN, HYBRID])
def test_kvcached_197_slots_taken_between_match_and_plan_make_a_smaller_grant(
    make_engine, groups, left
):
    engine = make_engine(groups=groups, num_slots=60)
    prompt = random_prompt(41, 1)
    run_alone(engine, "a", prompt)
    forget_gpu_cache(engine)
    stored = engine.counts["stored_blocks"]
    other = OtherEngine(engine, left)
    grants = watch_grants(engine)
    before_allocation(engine, "a2", other.take)
    run_alone(engine, "a2", prompt + random_prompt(40, 3), max_tokens=4)
    assert engine.counts["hit_tokens"] == 40, "what had been offered is loaded"
    asked_last, granted_last = grants[-1]
    assert granted_last < asked_last, "a smaller grant"
    assert engine.counts["skipped_blocks"] > 0, "and it is counted"
    check_answers(engine, a2=4)
    other.give_back()
    stored = engine.counts["stored_blocks"]
    run_alone(engine, "b", random_prompt(41, 4), max_tokens=4)
    assert engine.counts["stored_blocks"] - stored == 11 * len(groups), "with slots it stores again"
    check_idle(engine)


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("groups", [PLAIN, HYBRID])
def test_kvcached_197_slots_taken_while_a_step_is_planned_make_a_smaller_grant(
    make_engine, groups, is_async
):
    engine = make_engine(groups=groups, num_slots=60, is_async=is_async)
    other = OtherEngine(engine, left=2)
    with contested(engine, other):
        engine.add("a", random_prompt(41, 1), max_tokens=4)
        engine.drain()
    assert engine.counts["contained_errors"] == 0
    assert engine.counts["skipped_blocks"] > 0
    check_answers(engine, a=4)
    other.give_back()
    stored = engine.counts["stored_blocks"]
    run_alone(engine, "b", random_prompt(41, 4), max_tokens=4)
    assert engine.counts["stored_blocks"] - stored == 11 * len(groups), "with slots it stores again"
    check_idle(engine)
