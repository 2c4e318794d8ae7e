"""Which of the reported faults vLLM's own connectors still show, by running them.

They run on the same real scheduler as ours in test_reported_faults.py. vLLM 0.31.0, 0.32.0 and
0.33.0 were all seen to do what is asserted here. A test that fails here is good news from vLLM: the
fault is mended, and the test goes.
"""

import contextlib
import traceback
from collections.abc import Iterator
from typing import Any

import pytest
import vllm
from vllm.v1.request import RequestStatus

from tests.simulator.engine_core import random_prompt
from tests.simulator.peers import OFFLOADING, SIMPLE, PeerEngine, peer_shape
from tests.simulator.scenes import (
    before_allocation,
    check_answers,
    check_pools,
    forget_gpu_cache,
    ids_that,
    step_until,
    wait_of_second,
    watch_matches,
)
from tests.simulator.vllm_setup import NONE

PLAIN = ("full",)
HYBRID = ("window:16", "full")


@contextlib.contextmanager
def engine_dies(connector: str, error: type[Exception], *functions: str) -> Iterator[None]:
    """The engine ends with this error, raised in one of these functions of vLLM."""
    found: Exception | None = None
    try:
        yield
    except error as caught:
        found = caught
    if found is None:
        pytest.fail(f"{mended(connector)}: the engine went on")
    where = traceback.extract_tb(found.__traceback__)[-1].name
    assert where in functions, f"{found!r} in {where}"


def mended(connector: str) -> str:
    return f"vLLM {vllm.__version__} may have mended this fault of {connector}"


def make_engine(connector: str, copy_steps: int = 0, **what: Any) -> PeerEngine:
    shape = {"num_blocks": 60, "num_slots": 90, **what}
    return PeerEngine(peer_shape(connector, **shape), copy_steps)


def make_hit(engine: PeerEngine) -> list[int]:
    """A prompt that is on the host and no longer on the GPU."""
    prompt = random_prompt(41, 1)
    engine.add("first", prompt, 1)
    engine.drain()
    forget_gpu_cache(engine)
    return prompt


@pytest.mark.parametrize("connector", [SIMPLE, OFFLOADING])
@pytest.mark.parametrize("copy_steps", [0, 3])
@pytest.mark.parametrize("groups", [PLAIN, HYBRID])
def test_the_stand_in_serves_a_prompt_from_the_host(connector, copy_steps, groups):
    """Without a fault all is well, so that what the other tests see is the connector's doing."""
    engine = make_engine(connector, copy_steps, groups=groups)
    prompt = make_hit(engine)
    offered = watch_matches(engine)
    engine.add("again", prompt)
    engine.drain()
    assert offered["again"] == [40]
    check_answers(engine, first=1, again=4)
    check_pools(engine)


# ---- vllm#39702 --------------------------------------------------------------------------------


@pytest.mark.parametrize("groups", [PLAIN, HYBRID])
def test_vllm_39702_offloading_connector_dies_of_a_hit_evicted_between_match_and_alloc(groups):
    """It holds nothing between the two hooks, and relies on no eviction there."""
    from vllm.v1.kv_offload.base import ReqContext, make_offload_key

    engine = make_engine(OFFLOADING, groups=groups)
    prompt = make_hit(engine)
    manager = engine.connector.connector_scheduler.manager

    def evict_host() -> None:
        keys = [make_offload_key(bytes([i]) * 32, 0) for i in range(engine.shape.num_slots)]
        context = ReqContext(req_id="another")
        manager.on_new_request(context)
        assert manager.prepare_store(keys, context).evicted_keys
        manager.complete_store(keys, context)

    before_allocation(engine, "again", evict_host)
    engine.add("again", prompt)
    with engine_dies(OFFLOADING, AssertionError, "_prepare_load", "prepare_load"):
        engine.drain()


# ---- vllm#42085 --------------------------------------------------------------------------------


@pytest.mark.parametrize("copy_steps", [0, 5, 50])
@pytest.mark.parametrize(("groups", "num_tokens"), [(PLAIN, 496), (HYBRID, 248)])
def test_vllm_42085_simple_cpu_offload_makes_the_second_long_request_wait_for_the_copy(
    groups, num_tokens, copy_steps
):
    """S0's blocks stay referenced until they are copied, so that S1 finds no place."""
    what = {"groups": groups, "num_blocks": 201, "num_slots": 400, "max_batched_tokens": 2048}
    engine = make_engine(SIMPLE, copy_steps, **what)
    waited = wait_of_second(engine, num_tokens)
    assert wait_of_second(make_engine(NONE, **what), num_tokens) == 0
    assert waited == copy_steps + 1, (
        f"{mended(SIMPLE)}: S1 waited {waited} steps for a copy of {copy_steps}"
    )
    engine.drain()
    check_answers(engine, s0=1, s1=1)
    check_pools(engine)


# ---- vllm#43226 --------------------------------------------------------------------------------


@pytest.mark.parametrize("connector", [SIMPLE, OFFLOADING])
@pytest.mark.parametrize("where", ["finished_recving", "finished_sending"])
@pytest.mark.parametrize("kind", ["run", "were freed", "never existed", "were reported"])
def test_vllm_43226_the_engine_dies_when_told_of_requests_that(kind, where, connector):
    engine = make_engine(connector, 3)
    prompt = make_hit(engine)

    def lie(output: Any) -> None:
        setattr(output, where, (getattr(output, where) or set()) | ids_that(engine, kind))

    engine.mutate_output.append(lie)
    engine.add("live", random_prompt(41, 2), 25)
    engine.add("again", prompt, 5)
    with engine_dies(connector, AssertionError, "_update_from_kv_xfer_finished", "_free_blocks"):
        engine.drain()


@pytest.mark.parametrize("connector", [SIMPLE, OFFLOADING])
def test_vllm_43226_a_premature_id_runs_a_request_whose_load_has_not_landed(connector):
    """It computes on blocks that nothing has written, and nothing says so."""
    engine = make_engine(connector, 6)
    prompt = make_hit(engine)
    told: list[str] = []

    def lie(output: Any) -> None:
        if not told and ids_that(engine, "are loading"):
            told.append("again")
            output.finished_recving = {"again"}

    engine.mutate_output.append(lie)
    request = engine.add("again", prompt, 5)
    step_until(engine, lambda: bool(told))
    step_until(engine, lambda: request.status == RequestStatus.RUNNING)
    assert engine.is_loading, f"{mended(connector)}: it waited"


# ---- kvcached: `available_size()=71 < need_size=76` --------------------------------------------


def test_kvcached_197_simple_cpu_offload_dies_of_slots_taken_between_look_and_grant():
    """In vLLM nothing else takes them; kvcached and its like put several engines on a pool."""
    engine = make_engine(SIMPLE)
    manager = engine.connector.scheduler_manager
    look = manager._select_eager_blocks_to_store

    def another_engine_is_faster(*args: Any) -> Any:
        chosen = look(*args)
        pool = manager.cpu_block_pool
        if chosen[0]:
            pool.get_new_blocks(pool.get_num_free_blocks() - 2)
        return chosen

    manager._select_eager_blocks_to_store = another_engine_is_faster
    engine.add("a", random_prompt(41, 1))
    with engine_dies(SIMPLE, ValueError, "get_new_blocks"):
        engine.drain()


def test_kvcached_197_offloading_connector_dies_of_slots_taken_between_look_and_grant():
    engine = make_engine(OFFLOADING)
    manager = engine.connector.connector_scheduler.manager
    look = manager._get_num_free_chunks

    def another_engine_is_faster() -> int:
        seen = look()
        manager._allocate_chunks([b""] * (seen - 2))
        return seen

    manager._get_num_free_chunks = another_engine_is_faster
    engine.add("a", random_prompt(41, 1))
    with engine_dies(OFFLOADING, AssertionError, "_allocate_chunks"):
        engine.drain()


# ---- more of the table in docs/guarantees.md ---------------------------------------------------


@pytest.mark.parametrize("connector", [SIMPLE, OFFLOADING])
def test_c3_the_engine_dies_when_an_aborted_load_is_told_as_received_and_as_sent(connector):
    engine = make_engine(connector, 6)
    engine.add("gone", make_hit(engine), 5)
    engine.step()
    abort(engine, "gone")

    def lie(output: Any) -> None:
        output.finished_recving = {*(output.finished_recving or ()), "gone"}
        output.finished_sending = {*(output.finished_sending or ()), "gone"}

    engine.mutate_output.append(lie)
    engine.add("live", random_prompt(41, 3), 12)
    with engine_dies(connector, AssertionError, "_update_from_kv_xfer_finished", "_free_blocks"):
        engine.drain()


def test_c10_simple_cpu_offload_dies_when_a_block_loses_its_hash_while_it_is_stored():
    """vLLM evicts all hashes (KVCacheManager.evict_blocks does that for a bad load)."""
    engine = make_engine(SIMPLE, 5)
    engine.add("a", random_prompt(41, 1), 8)
    for _ in range(3):
        engine.step()
    engine.pool.evict_blocks({b.block_id for b in engine.pool.blocks if b.block_hash is not None})
    with engine_dies(SIMPLE, AssertionError, "_process_store_completion"):
        engine.drain()


@pytest.mark.parametrize("connector", [SIMPLE, OFFLOADING])
def test_h4_a_load_that_failed_is_offered_again_for_ever(connector):
    engine = make_engine(connector, 2)
    prompt = make_hit(engine)
    offered = watch_matches(engine)

    def fail(output: Any) -> None:
        output.failed_recving = set(output.finished_recving or ())

    engine.mutate_output.append(fail)
    request = engine.add("again", prompt, 3)
    for _ in range(40):
        engine.step()
    assert set(offered["again"]) == {40}, f"{mended(connector)}: {offered}"
    assert len(offered["again"]) > 10
    assert not request.is_finished()


def test_l5_a_reset_under_stores_in_flight_raises_with_simple_cpu_offload():
    """The blocks that it references cannot be reset; pausing and sleeping reset."""
    engine = make_engine(SIMPLE, 5)
    engine.add("a", random_prompt(41, 1), 8)
    for _ in range(3):
        engine.step()
    with engine_dies(SIMPLE, RuntimeError, "reset_prefix_cache"):
        engine.scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector=True)


def abort(engine: PeerEngine, request_id: str) -> None:
    engine.scheduler.finish_requests(request_id, RequestStatus.FINISHED_ABORTED)
