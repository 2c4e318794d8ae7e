"""A reset under requests that live: nothing from before it is served or stored after it.

The checkers of the simulator watch the same in every profile with resets. Here it is counted.
"""

from typing import Any

import pytest

from safe_offload.worker.copies.base import Direction
from tests.counts import num_failed
from tests.scheduler.rig import Rig
from tests.simulator.checkers import Checkers

SHAPES: list[dict[str, Any]] = [
    {"num_blocks": 60, "num_slots": 300},
    {"num_blocks": 60, "num_slots": 300, "is_async": True},
    {"num_blocks": 90, "num_slots": 300, "groups": ("window:10", "full")},
    {"num_blocks": 60, "num_slots": 300, "extra": {"lazy_offload": True}},
]
with_shapes = pytest.mark.parametrize("shape", SHAPES, ids=str)


def run_to(rig: Rig, request_id: str, prompt: list[int], num_tokens: int, of: int) -> Any:
    """Start a request for `of` tokens and step until it has answered this many."""
    request = rig.add(request_id, prompt, max_tokens=of)
    rig.step_until(lambda: request.num_output_tokens >= num_tokens)
    return request


@with_shapes
def test_what_a_request_computes_across_a_reset_is_not_kept(make_rig, shape):
    """It attends to what is of before; what others compute meanwhile is kept."""
    rig = make_rig(**shape)
    prompt = rig.prompt(21, 2)
    run_to(rig, "runs on", prompt, 2, of=60)
    rig.planner.reset_cache()
    assert len(rig.planner.outdated) == 1
    rig.step_until(lambda: not len(rig.planner.stores))
    new = rig.prompt(33, 3)
    rig.run_alone("new", new)
    assert "runs on" not in rig.scheduler.requests, "it has ended meanwhile"
    assert len(rig.planner.outdated) == 0
    kept = {key for table in rig.planner.hits.directory.tables for key in table}
    hashes = {bytes(h) for h in rig.add("same", prompt + rig.answers["runs on"]).block_hashes}
    assert not hashes & {key[-32:] for key in kept}
    rig.drain()
    if not shape.get("extra"):
        rig.forget_gpu_cache()
        assert rig.run_alone("new again", new) == 32
    rig.check_idle()


@with_shapes
def test_a_load_that_is_under_way_at_a_reset_is_not_used(make_rig, shape):
    rig = make_rig(**shape)
    prompt = rig.prompt(41, 1)
    rig.run_alone("old", prompt)
    if shape.get("extra"):
        rig.fill_gpu_cache("filler", 9)  # lazy stores keep what is evicted
    rig.forget_gpu_cache()
    rig.counts.clear()
    rig.hold_copies(True)
    rig.add("loads", prompt)
    rig.step_until(lambda: bool(rig.planner.loads.ledger.in_flight))
    rig.planner.reset_cache()
    rig.hold_copies(False)
    rig.drain()
    rig.check_tokens("loads", 4)
    assert rig.counts["hit_tokens"] == 40
    assert rig.counts["loaded_tokens"] == 0, "it was computed"
    assert num_failed(rig.counts, "load") == 0, "and nothing is wrong"
    rig.check_idle()


def beside_a_prefix(rig: Rig, count: int) -> dict[str, list[int]]:
    """Prompts with a prefix that the GPU has, and more that only the host has."""
    prefix = rig.prompt(101, 1)
    prompts = {f"loads {n}": [*prefix[:100], *rig.prompt(21, 2 + n)] for n in range(count)}
    for name, prompt in prompts.items():
        rig.run_alone(f"old {name}", prompt)
    rig.forget_gpu_cache()
    rig.run_alone("prefix", prefix)
    return prompts


def begin_to_load(rig: Rig, prompts: dict[str, list[int]]) -> None:
    rig.hold_copies(True)
    for name, prompt in prompts.items():
        rig.add(name, prompt)
    rig.step_until(lambda: len(rig.planner.loads.ledger.in_flight) == len(prompts))


def test_a_request_whose_load_has_landed_lets_the_one_before_it_go_on_after_a_reset(make_rig):
    rig = make_rig(num_blocks=60, num_slots=300, max_seqs=2)
    prompts = beside_a_prefix(rig, 2)
    run_to(rig, "runs", rig.prompt(5, 8), 2, of=40)
    begin_to_load(rig, prompts)
    run_to(rig, "runs too", rig.prompt(5, 9), 1, of=40)  # so none that has loaded can
    (device,) = rig.devices
    _, last = (copy for copy in device.running if copy.copy.direction is Direction.LOAD)
    device.end(last)
    rig.step_until(lambda: len(rig.planner.loads.ledger.in_flight) == 1)
    rig.planner.reset_cache()
    rig.hold_copies(False)
    rig.finish(**dict.fromkeys(prompts, 4))


@pytest.mark.parametrize("groups", [("full",), ("full", "full@16")], ids=str)
def test_what_is_computed_in_the_same_step_from_a_block_of_before_a_reset_is_not_kept(
    make_rig, groups
):
    """Nor in later steps, when there is room for what the step could not store."""
    settings = {"max_inflight_bytes": 4096}
    rig = make_rig(
        groups=groups, num_blocks=90, num_slots=300, max_batched_tokens=64, extra=settings
    )
    checkers = Checkers(rig)
    rig.add("fills the step", rig.prompt(61, 1), max_tokens=20)
    begun = rig.add("has begun", rig.prompt(35, 2), max_tokens=20)
    rig.step()
    assert begun.num_computed_tokens == 3, "of a block that it has not filled"
    rig.planner.reset_cache()
    rig.add("finds it", [*rig.prompt(35, 2)[:32], *rig.prompt(30, 3)], max_tokens=20)
    rig.step()
    assert len(rig.planner.outdated) == 3
    assert all(block.block_hash is None for block in rig.pool.blocks)
    while rig.scheduler.requests:
        rig.step()
        checkers.after_step()
    rig.drain()
    assert rig.planner.hits.directory.kept() == {}
    rig.check_idle()


def found_on_host(rig: Rig) -> dict[Any, Any]:
    kept: dict[Any, Any] = rig.planner.hits.directory.kept()
    return kept


def load_weights(rig: Rig, checkers: Checkers) -> None:
    """Tell only the model, as a trainer does that runs in the process of the engine."""
    rig.connector.model_loads.count += 1
    checkers.contents.turn_old()


@with_shapes
@pytest.mark.parametrize("is_late", [False, True], ids=["between steps", "in a step"])
def test_weights_that_only_the_model_is_told_of_are_noticed_while_a_request_runs(
    make_rig, shape, is_late
):
    rig = make_rig(**shape)
    checkers = Checkers(rig)
    old = rig.prompt(41, 1)
    rig.run_alone("old", old)
    run_to(rig, "runs on", rig.prompt(21, 2), 2, of=60)
    rig.add("waits", old)
    rig.counts.clear()
    if is_late:
        rig.before_update.append(lambda _: load_weights(rig, checkers))
        rig.step_until(lambda: rig.connector.model_loads.count > 0)
        rig.before_update.pop()
    else:
        load_weights(rig, checkers)
        kept_when_planned = []
        rig.before_update.append(lambda _: kept_when_planned.append(found_on_host(rig)))
        rig.step()
        rig.before_update.pop()
        assert kept_when_planned[-1] == {}, "vLLM schedules nothing more by its old prefix cache"
        assert rig.counts["hit_tokens"] == 0
    assert rig.counts["resets"] == 1
    assert rig.planner.hits.directory.kept() == {}
    while rig.scheduler.requests:
        rig.step()
        checkers.after_step()
    rig.finish(**{"runs on": 60, "waits": 4})
    assert rig.planner.hits.directory.kept() == {}
