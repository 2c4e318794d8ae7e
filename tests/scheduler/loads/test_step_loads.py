"""Hits that load in the step that computes the rest of their prompt."""

import pytest

IN_STEP = {"load_in_step": True}
ENGINES = [
    pytest.param({}, id="cpu"),
    pytest.param({"is_async": True, "is_in_process": True}, id="cpu-async"),
    pytest.param({"is_async": True, "has_streams": True, "is_v2": True}, id="gpu-async"),
    pytest.param({"has_streams": True, "tensor_ranks": 2}, id="gpus"),
]


@pytest.fixture(params=ENGINES)
def rig(request, make_rig):
    rig = make_rig(extra=IN_STEP, copy_ticks_max=10, **request.param)
    rig.start()
    return rig


def test_a_hit_computes_in_the_step_that_follows_its_hook(rig):
    prompt = rig.warm()
    rig.add("again", prompt)
    plan = rig.planned_step()
    assert plan.loads == ()
    assert len(plan.loads_in_step) == 1
    assert rig.scheduler.requests["again"].num_computed_tokens == len(prompt)
    rig.finish(again=4)
    assert rig.counts['loads{in_step="true"}'] == 1
    assert rig.counts["loaded_tokens"] == rig.counts["hit_tokens"] == 40


def test_while_a_request_runs_hits_load_ahead_of_their_step(rig):
    prompt = rig.warm()
    rig.add("running", rig.prompt(6, 2), max_tokens=30)
    rig.step()
    rig.add("again", prompt)
    plan = rig.planned_step()
    assert plan.loads_in_step == ()
    assert len(plan.loads) == 1
    rig.finish(again=4, running=30)
    assert rig.counts['loads{in_step="false"}'] == 1


def test_of_two_hits_the_first_loads_in_the_step(rig):
    first, second = rig.warm(seed=1), rig.warm(seed=2)
    rig.add("first", first)
    rig.add("second", second)
    plan = rig.planned_step()
    assert len(plan.loads_in_step) == len(plan.loads) == 1
    rig.finish(first=4, second=4)


@pytest.mark.parametrize("what", ["abort", "reset"])
def test_a_request_may_go_while_its_load_is_copied(rig, what):
    prompt = rig.warm()
    rig.add("again", prompt)
    rig.planned_step()
    if what == "abort":
        rig.abort("again")
    else:
        rig.connector.reset_cache()
    rig.finish(**({"again": 4} if what == "reset" else {}))
    rig.forget_gpu_cache()
    assert rig.run_alone("last", prompt) == (40 if what == "abort" else 0)


def test_slots_stay_leased_until_the_load_is_reported(make_rig):
    rig = make_rig(extra=IN_STEP, has_streams=True)
    rig.start()
    rig.add("again", rig.warm(), max_tokens=1)
    rig.hold_copies(True)
    (load,) = rig.planned_step().loads_in_step
    rig.abort("again")
    assert [list(lease.slots) for lease in rig.planner.leases] == [list(load.slot_ids)]
    rig.hold_copies(False)
    rig.finish()
