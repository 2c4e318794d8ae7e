"""Hits that load in the step that computes the rest of their prompt."""

import contextlib
import functools

import pytest

from tests.simulator import device
from tests.simulator.device import SimBackend

IN_STEP = {"load_in_step": True}
ENGINES = [
    pytest.param({}, id="cpu"),
    pytest.param({"is_async": True, "is_in_process": True}, id="cpu-async"),
    pytest.param({"is_async": True, "has_streams": True, "is_v2": True}, id="gpu-async"),
    pytest.param({"has_streams": True, "tensor_ranks": 2}, id="gpus"),
]

GPUS = ENGINES[2:]


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


def busy(make_rig, **shape):
    """Return a rig whose only request decodes, and two prompts that the host has."""
    rig = make_rig(extra=IN_STEP, num_blocks=120, num_slots=200, copy_ticks_max=10, **shape)
    rig.start()
    prompts = [rig.warm(seed=seed) for seed in (1, 2)]
    rig.add("running", rig.prompt(14, 3), max_tokens=60)
    for _ in range(6):
        rig.step()
    return rig, *prompts


@pytest.mark.parametrize("shape", GPUS)
def test_on_a_gpu_a_hit_loads_in_the_step_of_others(make_rig, shape):
    rig, prompt, _ = busy(make_rig, **shape)
    rig.add("again", prompt)
    plan = rig.planned_step()
    assert (len(plan.loads_in_step), len(plan.loads)) == (1, 0)
    assert rig.scheduler.requests["again"].num_computed_tokens == len(prompt)
    rig.finish(running=60, again=4)


@pytest.mark.parametrize("shape", GPUS)
@pytest.mark.parametrize("why", ["no time", "dear", "another waits", "just started", "the last"])
def test_it_loads_ahead_where_that_would_cost_the_others_more(make_rig, monkeypatch, shape, why):
    monkeypatch.setattr(device, "BLOCK_S", {"no time": 0.0, "dear": 1.0}.get(why, device.BLOCK_S))
    rig, prompt, other = busy(make_rig, **shape)
    num_ahead = 1
    if why == "just started":
        rig.abort("running")
        rig.drain()
        rig.add("running", rig.prompt(14, 4), max_tokens=60)
        rig.step()
    elif why == "another waits":
        rig.add("other", other)
        num_ahead = 2
    elif why == "the last":
        rig.add("other", other)
        assert rig.planned_step().loads_in_step
        rig.step_until(lambda: not rig.planner.loads.is_loading)
    rig.add("again", prompt)
    plan = rig.planned_step()
    assert (len(plan.loads_in_step), len(plan.loads)) == (0, num_ahead)
    rig.finish(running=60, again=4)


@pytest.mark.parametrize("shape", GPUS)
@pytest.mark.parametrize("is_reported", [True, False])
def test_by_priority_a_request_is_preempted_only_after_the_step_that_loads_it(
    make_rig, shape, is_reported
):
    """vLLM preempts before it admits, and nothing that is in flight; a report may be later."""
    rig, prompt, _ = busy(make_rig, is_priority=True, **shape)
    low = rig.add("again", prompt, priority=1)
    (load,) = rig.planned_step().loads_in_step
    late, preempted_in_flight = [], []
    if not is_reported:
        rig.mutate_outputs.append(lambda _, outputs: withhold(outputs, late))
    preempt = rig.scheduler._preempt_request

    def see(request, *args, **kwargs):
        preempted_in_flight.append((request, rig.is_in_flight("again")))
        preempt(request, *args, **kwargs)

    rig.scheduler._preempt_request = see
    held = rig.pool.get_new_blocks(rig.pool.get_num_free_blocks())
    rig.step_until(lambda: low.num_preemptions)
    assert preempted_in_flight == [(low, False)]
    leased = {slot for lease in rig.planner.leases for slot in lease.slots}
    assert is_reported or leased.issuperset(load.slot_ids)
    rig.pool.free_blocks(held)
    rig.mutate_outputs[:] = [lambda _, outputs: deliver(outputs, late)]
    rig.finish(running=60, again=4)


def withhold(outputs, late):
    """Keep back what the ranks report."""
    for output in outputs:
        if output.kv_connector_worker_meta is not None:
            late.append(output.kv_connector_worker_meta)
            output.kv_connector_worker_meta = None


def deliver(outputs, late):
    """Report it after all."""
    withhold(outputs[:1], late)
    if late:
        outputs[0].kv_connector_worker_meta = functools.reduce(lambda a, b: a.aggregate(b), late)
        late.clear()


@pytest.mark.parametrize("shape", GPUS)
def test_a_late_report_of_a_load_in_the_step_ends_no_load_ahead(make_rig, shape):
    """Its request was preempted meanwhile, and waits for another load of the same hit."""
    rig, prompt, _ = busy(make_rig, is_priority=True, **shape)
    low = rig.add("again", prompt, priority=1)
    assert rig.planned_step().loads_in_step
    late = []
    rig.mutate_outputs.append(lambda _, outputs: withhold(outputs, late))
    held = rig.pool.get_new_blocks(rig.pool.get_num_free_blocks())
    rig.step_until(lambda: low.num_preemptions)
    held += rig.pool.get_new_blocks(rig.pool.get_num_free_blocks())
    rig.pool.free_blocks(held)
    rig.hold_copies(True)
    rig.step_until(lambda: low.status.name == "WAITING_FOR_REMOTE_KVS")
    rig.mutate_outputs[:] = [lambda _, outputs: deliver(outputs, late)]
    for _ in range(4):
        rig.step()
    assert low.status.name == "WAITING_FOR_REMOTE_KVS"
    rig.hold_copies(False)
    rig.finish(running=60, again=4)


def test_by_priority_no_request_is_admitted_in_a_step_that_preempts(make_rig):
    """So none is scheduled with a load and preempted by the same call of vLLM's scheduler."""
    rig, prompt, _ = busy(make_rig, is_priority=True, has_streams=True)
    low = rig.add("low", rig.prompt(14, 5), max_tokens=40, priority=1)
    rig.step_until(lambda: low.num_output_tokens > 1)
    held = rig.pool.get_new_blocks(rig.pool.get_num_free_blocks())
    rig.scheduler.max_num_active_reqs = 2  # until then nobody else fits
    rig.add("again", prompt)
    rig.step_until(lambda: low.num_preemptions)
    assert rig.plans[-1].loads_in_step == rig.plans[-1].loads == ()
    rig.pool.free_blocks(held)
    rig.scheduler.max_num_active_reqs = rig.shape.max_seqs
    rig.finish(running=60, again=4, low=40)


def test_of_two_hits_the_first_loads_in_the_step(rig):
    first, second = rig.warm(seed=1), rig.warm(seed=2)
    rig.add("first", first)
    rig.add("second", second)
    plan = rig.planned_step()
    assert len(plan.loads_in_step) == len(plan.loads) == 1
    rig.finish(first=4, second=4)


def test_of_two_hits_the_second_loads_ahead_although_the_first_has_gone(make_rig):
    rig = make_rig(extra=IN_STEP, has_streams=True)
    rig.start()
    first, second = rig.warm(seed=1), rig.warm(seed=2)
    rig.hold_copies(True)
    rig.add("first", first)
    assert rig.planned_step().loads_in_step
    rig.abort("first")
    rig.add("second", second)
    plan = rig.planned_step()
    assert (len(plan.loads_in_step), len(plan.loads)) == (0, 1)
    rig.hold_copies(False)
    rig.finish(second=4)


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


def with_stem(make_rig, **shape):
    """Return a rig, a prompt, and two others: the host has all of them, and they begin alike."""
    rig = make_rig(extra=IN_STEP, num_blocks=80, num_slots=200, **shape)
    rig.start()
    stem = rig.prompt(40, 1)
    longer = {f"longer {n}": stem + rig.prompt(41, n) for n in (2, 3)}
    for number, prompt in enumerate(longer.values()):
        rig.run_alone(f"warm {number}", prompt)
    rig.forget_gpu_cache()
    return rig, stem + rig.prompt(6, 4), longer


@pytest.fixture
def failing(monkeypatch):
    """Within it, each load in the step fails."""
    join = SimBackend.join

    def fail(backend, completion):
        completion.fails = True
        return join(backend, completion)

    @contextlib.contextmanager
    def fail_loads():
        with monkeypatch.context() as patch:
            patch.setattr(SimBackend, "join", fail)
            yield

    return fail_loads


@pytest.mark.parametrize("shape", ENGINES)
@pytest.mark.parametrize("is_aborted", [False, True])
def test_nobody_waits_for_a_load_beside_blocks_of_one_in_the_step(
    make_rig, failing, shape, is_aborted
):
    """If that fails, vLLM lets only the first of the waiting requests recompute its blocks."""
    rig, first, longer = with_stem(make_rig, **shape)
    with failing():
        for name, prompt in {"first": first, **longer}.items():
            rig.add(name, prompt)
        plan = rig.planned_step()
        assert (len(plan.loads_in_step), len(plan.loads)) == (1, 0)
        if is_aborted:
            rig.abort("first")
    rig.finish(**dict.fromkeys(longer, 4), **({} if is_aborted else {"first": 4}))


@pytest.mark.parametrize("shape", ENGINES)
def test_nobody_finds_what_was_computed_behind_a_load_whose_plan_failed(
    make_rig, monkeypatch, shape
):
    """The planner does not know that step, in which vLLM has hashed the blocks behind, too."""
    extra = IN_STEP | {"check_invariants": False}
    rig = make_rig(num_blocks=80, num_slots=200, **shape, extra=extra)
    rig.start()
    prompt = rig.warm() + rig.prompt(40, 2)

    def fail(*_):
        raise RuntimeError("injected")

    request = rig.add("again", prompt)
    with monkeypatch.context() as patch:
        patch.setattr(rig.planner, "build_connector_meta", fail)
        assert rig.planned_step().unloaded
    (block_ids,) = rig.scheduler.kv_cache_manager.get_block_ids("again")
    rig.step_until(lambda: request.num_preemptions)
    assert [i for i in block_ids if rig.pool.blocks[i].block_hash is not None] == []
    rig.finish(again=4)


@pytest.mark.parametrize("has_streams", [False, True])
@pytest.mark.parametrize("num_steps", [2, 3])
def test_nobody_waits_beside_blocks_of_one_that_fails_before_its_output(
    make_rig, failing, has_streams, num_steps
):
    """Beside the scheduler, the failure may be known with the output of an earlier step."""
    uni = {"is_async": True, "is_in_process": True, "has_streams": has_streams}
    rig, first, longer = with_stem(make_rig, **uni)
    rig.add("gone", rig.prompt(14, 9), max_tokens=20)
    for _ in range(num_steps):  # one of which is in flight, and has something to report
        rig.step()
    rig.abort("gone")
    with failing():
        rig.add("first", first)
        assert rig.planned_step().loads_in_step
        for name, prompt in longer.items():
            rig.add(name, prompt)
        assert rig.planned_step().loads == ()
    rig.finish(**dict.fromkeys(("first", *longer), 4))
