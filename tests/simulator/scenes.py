"""What the scenarios have in common: engines that are closed again, an idle end."""

from collections.abc import Callable
from typing import Any

from vllm.v1.request import RequestStatus

from tests.simulator.engine_core import EngineCore, random_prompt


def run_alone(engine: EngineCore, request_id: str, prompt: list[int], max_tokens: int = 1) -> None:
    engine.add(request_id, prompt, max_tokens)
    engine.drain()


def step_until(engine: Any, is_reached: Callable[[], bool], max_steps: int = 200) -> int:
    for count in range(max_steps):
        if is_reached():
            return count
        engine.step()
    raise AssertionError(f"not reached in {max_steps} steps")


def wait_of_second(engine: Any, num_tokens: int) -> int:
    """Steps that S1 waits, which arrives when S0 has finished; each takes 62 % of the pool."""
    engine.add("s0", random_prompt(num_tokens, 1), 1)
    step_until(engine, lambda: "s0" not in engine.scheduler.requests)
    request = engine.add("s1", random_prompt(num_tokens, 2), 1)
    is_served = [False]

    def is_scheduled() -> bool:
        is_served[0] |= request.num_computed_tokens > 0 or request.is_finished()
        return is_served[0]

    return step_until(engine, is_scheduled) - 1


def forget_gpu_cache(engine: Any) -> None:
    assert engine.scheduler.reset_prefix_cache()


def hold_copies(engine: EngineCore, held: bool) -> None:
    """Whether the copies of all ranks stand still."""
    for worker in engine.workers:
        worker.device.hold_copies = held


def before_allocation(engine: Any, request_id: str, act: Callable[[], None]) -> None:
    """Act between vLLM's match of a request and its update_state_after_alloc, whenever it tries."""
    manager = engine.scheduler.kv_cache_manager
    allocate = manager.allocate_slots

    def allocate_slots(request: Any, *args: Any, **kwargs: Any) -> Any:
        if request.request_id == request_id:
            act()
        return allocate(request, *args, **kwargs)

    manager.allocate_slots = allocate_slots


def watch_matches(engine: Any) -> dict[str, list[int]]:
    """The tokens that the connector offers, by request, as vLLM asks for them."""
    offered: dict[str, list[int]] = {}
    connector = engine.connector
    match = connector.get_num_new_matched_tokens

    def get_num_new_matched_tokens(request: Any, num_computed_tokens: int) -> Any:
        answer = match(request, num_computed_tokens)
        offered.setdefault(request.request_id, []).append(answer[0])
        return answer

    connector.get_num_new_matched_tokens = get_num_new_matched_tokens
    return offered


def ids_that(engine: Any, kind: str) -> set[str]:
    """Ids of requests that a worker must not report now."""
    scheduler = engine.scheduler
    again = scheduler.requests.get("again")
    is_reported = again is None or "again" in scheduler.finished_recving_kv_req_ids
    is_waiting = again is not None and again.status == RequestStatus.WAITING_FOR_REMOTE_KVS
    if kind == "run":
        return {request.request_id for request in scheduler.running}
    if kind == "were freed":
        return {"first"}
    if kind == "never existed":
        return {"nobody"}
    if kind == "are loading":
        return {"again"} if is_waiting and not is_reported else set()
    if kind == "were aborted while loading":
        return {"gone"}
    assert kind == "were reported"
    return {"again"} if is_reported or not is_waiting else set()


def check_answers(engine: Any, **num_tokens: int) -> None:
    for request_id, count in num_tokens.items():
        expected = engine.runner.sequels[request_id].answer(count)
        assert engine.answers.get(request_id) == expected, request_id


def check_pools(engine: Any) -> None:
    """Every GPU block is free and no request is left."""
    assert not engine.scheduler.requests
    in_use = {b.block_id: b.ref_cnt for b in engine.pool.blocks if b.ref_cnt and not b.is_null}
    assert not in_use, "GPU blocks with references"
    assert engine.pool.get_num_free_blocks() == engine.shape.num_blocks - 1


def check_idle(engine: EngineCore) -> None:
    """Nothing was found, nothing was contained, and both pools are as they were at the start."""
    engine.findings.raise_first()
    check_pools(engine)
    planner = engine.connector.side
    planner.check_invariants()
    gauges = planner.gauges()
    assert gauges["slots"] == engine.shape.num_slots
    assert gauges["leased_slots"] == gauges["stores_in_flight"] == gauges["loads_in_flight"] == 0
    assert not planner.has_pending_push_work()
    assert len(planner.leases) == 0
    assert all(not worker.device.running for worker in engine.workers)
    assert engine.counts["contained_errors"] == 0
