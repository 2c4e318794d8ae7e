"""The scheduler side on vLLM's real Scheduler, one promise at a time."""

from unittest.mock import Mock

import pytest
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import RequestStatus

from safe_offload.protocol import Outcome, StepReport
from safe_offload.scheduler.cache.leases import LeaseKind
from tests.counts import num_failed
from tests.simulator.model_runner import Batch
from tests.simulator.remote import BROUGHT


@pytest.mark.parametrize("groups", [("window:10", "full"), ("mamba", "full")])
def test_a_prompt_with_a_sliding_window_comes_back_from_the_host(make_rig, groups):
    rig = make_rig(num_blocks=60, groups=groups, num_slots=200)
    a = rig.warm()
    assert rig.run_alone("a2", a) == rig.counts["loaded_tokens"] == 40
    rig.check_idle()


def test_what_a_worker_beside_the_scheduler_has_finished_is_known_without_a_step_between(
    make_rig,
):
    """With asynchronous scheduling vLLM reads a report when one more step was given away."""
    rig = make_rig(is_async=True, has_streams=True, is_in_process=True)
    prompt = rig.warm()
    rig.hold_copies(True)
    rig.add("again", prompt)
    rig.step_until(lambda: rig.plans and rig.plans[-1].loads)
    rig.step()
    (worker,) = rig.workers
    rig.hold_copies(False)
    while worker.transfers.statistics().unsettled_ids:
        worker.pause(worker.rank)
    steps = [rig.step(), rig.step()]
    assert ["again" in step.scheduled.num_scheduled_tokens for step in steps] == [False, True]
    rig.finish(again=4)


# ---- I1: a reported hit stays ------------------------------------------------------------------


def test_matching_twice_is_the_same_as_once(make_rig):
    rig = make_rig()
    a = rig.prompt(33, 1)
    rig.run_alone("a", a)
    rig.scheduler.reset_prefix_cache()
    request = rig.add("a2", a)
    answers = [rig.connector.get_num_new_matched_tokens(request, 0) for _ in range(5)]
    assert answers == [(32, True)] * 5
    assert rig.planner.gauges()["leased_slots"] == 8
    rig.abort("a2")
    assert rig.planner.gauges()["leased_slots"] == 0


# ---- a prompt of whole blocks ------------------------------------------------------------------


@pytest.mark.parametrize("shape", [{}, {"is_async": True, "num_draft_tokens": 2}])
@pytest.mark.parametrize("num_gpu", [0, 20, 32])
def test_only_the_last_token_of_a_whole_prompt_is_computed(make_rig, num_gpu, shape):
    rig = make_rig(num_blocks=60, num_slots=200, **shape)
    a = rig.warm(40)
    rig.run_alone("gpu", a[: num_gpu + 1], max_tokens=1)
    before = dict(rig.counts)
    rig.add("a2", a, max_tokens=4)
    (load,) = rig.planned_step().loads
    last, batch = rig.pool.blocks[load.block_ids[-1]], None
    while batch is None or not batch.works:
        assert last.block_hash is None, "it is written, so none may read it"
        batch = rig.step()
    assert last.block_hash is not None
    assert batch.works[0].start == 39
    rig.finish(a2=4)
    assert rig.counts["hit_tokens"] - before.get("hit_tokens", 0) == 39 - num_gpu
    assert rig.counts["stored_blocks"] == before["stored_blocks"], "the host has the last block"


# ---- I2: no block is held for us ---------------------------------------------------------------


@pytest.mark.parametrize("groups", [("full",), ("window:8", "full")])
def test_no_block_is_held_after_a_request_finishes_with_stores_in_flight(make_rig, groups):
    rig = make_rig(groups=groups, num_blocks=56, num_slots=300, max_batched_tokens=12)
    rig.start()
    rig.hold_copies(True)
    a = rig.prompt(41, 1)
    rig.add("a", a, max_tokens=4)
    rig.run_until_finished("a")
    assert rig.planner.gauges()["stores_in_flight"] > 0
    rig.check_no_block_is_held()
    rig.add("b", rig.prompt(48 * 4, 2), max_tokens=1)  # takes blocks while they are being read
    rig.run_until_finished("b")
    rig.hold_copies(False)
    rig.drain()
    assert rig.counts["fenced_stores"] > 0
    rig.forget_gpu_cache()
    assert rig.run_alone("a2", a) == 40, "what was stored late must be right"
    rig.check_idle()


# ---- I3: stale, duplicate and foreign ids ------------------------------------------------------


def test_an_id_that_comes_again_before_the_request_runs_is_dropped(make_rig):
    rig = make_rig(num_blocks=30)
    a = rig.prompt(41, 1)
    rig.run_alone("a", a)
    rig.fill_gpu_cache("b", 2)
    rig.add("a2", a)
    rig.step_until(lambda: bool(rig.scheduler.finished_recving_kv_req_ids))
    assert rig.scheduler.finished_recving_kv_req_ids == {"a2"}
    state = rig.planner.book.get("a2")
    assert state.is_announced
    again = _output(received={"a2"})
    rig.connector.update_connector_output(again)
    assert again.finished_recving is None
    rig.drain()
    rig.check_tokens("a2", 4)


def test_ids_of_another_connector_pass(make_rig):
    """Under MultiConnector the sets hold ids that are not ours, and vLLM needs them."""
    rig = make_rig()
    request = rig.add("theirs", rig.prompt(21, 1), max_tokens=30)
    rig.step()
    request.status = RequestStatus.WAITING_FOR_REMOTE_KVS
    output = _output(received={"theirs"})
    rig.connector.update_connector_output(output)
    assert output.finished_recving == {"theirs"}
    request.status = RequestStatus.RUNNING
    sent = _output(sent={"theirs"})
    rig.connector.update_connector_output(sent)
    assert sent.finished_sending is None, "the request is running"
    request.status = RequestStatus.FINISHED_STOPPED
    both = _output(received={"theirs"}, sent={"theirs"})
    rig.connector.update_connector_output(both)
    assert (both.finished_recving, both.finished_sending) == ({"theirs"}, None)


def _output(received: set[str] | None = None, sent: set[str] | None = None) -> KVConnectorOutput:
    return KVConnectorOutput(finished_recving=received, finished_sending=sent)


# ---- completion is decided by rank and transfer ------------------------------------------------


def test_a_load_completes_when_every_rank_has_reported_it(make_rig):
    """docs/guarantees.md, X2: a rank that reports twice must not stand in for the other."""
    rig = make_rig(num_blocks=30, tensor_ranks=2)
    a = rig.prompt(41, 1)
    rig.run_alone("a", a)
    rig.fill_gpu_cache("b", 2)
    rig.devices[1].hold_copies = True
    rig.add("a2", a)
    (load,) = rig.planned_step().loads
    rig.step_until(lambda: not rig.devices[0].running)
    again = _output()
    again.kv_connector_worker_meta = StepReport((Outcome(0, load.transfer_id),) * 3)
    rig.connector.update_connector_output(again)
    for _ in range(3):
        rig.step()
    assert rig.scheduler.requests["a2"].status == RequestStatus.WAITING_FOR_REMOTE_KVS
    rig.devices[1].hold_copies = False
    rig.drain()
    rig.check_tokens("a2", 4)
    assert rig.counts["duplicate_reports"] == 3
    rig.check_idle()


@pytest.mark.parametrize("groups", [("full",), ("window:8", "full")])
def test_a_failed_load_is_recomputed_and_not_offered_again(make_rig, groups):
    rig = make_rig(num_blocks=60, groups=groups, tensor_ranks=2, num_slots=200)
    a = rig.warm()
    rig.fail_copies()
    assert rig.run_alone("a2", a) == 40  # offered, and failed on both ranks
    assert num_failed(rig.counts, "load") == 1
    assert rig.counts["loaded_blocks"] == rig.counts["loaded_tokens"] == 0
    rig.forget_gpu_cache()
    assert rig.run_alone("a3", a) == 0, "a hit that failed must not be offered again"
    rig.check_idle()


# ---- I4: finishing twice -----------------------------------------------------------------------


def test_an_id_that_is_used_again_starts_a_new_life(make_rig):
    """sglang#37026: jobs keyed by request id."""
    rig = make_rig(copy_ticks_max=45, num_blocks=60)
    for seed in range(5):
        rig.add("same", rig.prompt(41, seed), max_tokens=30)
        for _ in range(4):
            rig.step()
        rig.abort("same")
    prompt = rig.prompt(41, 99)
    rig.add("same", prompt, max_tokens=5)
    rig.finish(same=5)


# ---- I5: full is normal ------------------------------------------------------------------------


def test_a_host_pool_that_is_too_small_keeps_the_head_of_the_prompt(make_rig):
    rig = make_rig(num_blocks=40, num_slots=6)
    a = rig.prompt(61, 1)
    rig.run_alone("a", a)
    rig.scheduler.reset_prefix_cache()
    assert rig.run_alone("a2", a) == 24
    assert rig.counts["skipped_blocks"] > 0
    rig.check_idle()


def test_no_slot_is_used_before_every_rank_has_told_its_capacity(make_rig):
    """docs/guarantees.md, X1: ranks that have different numbers of slots."""
    rig = make_rig(tensor_ranks=2, num_slots=30)
    rig.devices[1].num_usable_slots = 0
    rig.run_alone("a", rig.prompt(41, 1))
    assert rig.counts["stored_blocks"] == 0
    rig.devices[1].num_usable_slots = 7
    rig.run_alone("b", rig.prompt(61, 2))
    rig.run_alone("c", rig.prompt(61, 3))
    assert max(max(t.slot_ids) for p in rig.plans for t in p.stores_after_forward) == 6
    rig.check_idle()


# ---- preemption, reset, idling -----------------------------------------------------------------


def test_a_preempted_request_comes_back_from_the_host(make_rig):
    rig = make_rig(num_blocks=24, num_slots=100, max_batched_tokens=48)
    prompts = {f"r{i}": rig.prompt(29, i) for i in range(3)}
    for request_id, prompt in prompts.items():
        rig.add(request_id, prompt, max_tokens=30)
    rig.drain()
    for request_id in prompts:
        rig.check_tokens(request_id, 30)
    assert rig.counts["hit_tokens"] > 0
    rig.check_idle()


def test_blocks_that_found_no_slot_and_lose_their_hashes_are_not_stored_later(make_rig):
    rig = make_rig(num_blocks=40, num_slots=100)
    rig.start()
    everything = rig.planner.leases.grant(LeaseKind.STORE, 100)
    rig.add("a", rig.prompt(41, 1), max_tokens=30)
    for _ in range(3):
        rig.step()
    table = rig.planner.gpu.tables_of(0)[0]["a"]
    rig.planner.stores.lose_hashes({block.block_id for block in table[:4]})
    (state,) = rig.planner.stores.left_over
    assert [block for blocks in state.left_over for block in blocks.blocks] == table[4:10]
    rig.planner.stores.lose_hashes({block.block_id for block in table})
    assert not rig.planner.stores.left_over
    everything.release()
    rig.drain()
    rig.check_idle()


@pytest.mark.parametrize("extra", [{}, {"max_inflight_bytes": 4096}], ids=["no slot", "no room"])
def test_blocks_that_found_no_room_are_stored_while_their_request_runs(make_rig, extra):
    rig = make_rig(num_blocks=60, num_slots=100, extra=extra)
    rig.start()
    everything = None if extra else rig.planner.leases.grant(LeaseKind.STORE, 100)
    prompt = rig.prompt(41, 1)
    request = rig.add("a", prompt, max_tokens=100)
    rig.step_until(lambda: bool(rig.planner.stores.left_over))
    if everything is not None:
        everything.release()
    rig.step_until(lambda: not rig.planner.stores.left_over and not len(rig.planner.stores))
    assert not request.is_finished()
    found = rig.planner.hits.directory.find_run(0, request.block_hashes)
    assert len(found) >= 10, "the whole prompt"
    rig.finish(a=100)


def test_blocks_that_found_no_slot_are_rescued_at_preemption(make_rig):
    rig = make_rig(num_blocks=40, num_slots=100)
    rig.start()
    everything = rig.planner.leases.grant(LeaseKind.STORE, 100)
    a = rig.prompt(41, 1)
    rig.add("a", a, max_tokens=30)
    for _ in range(3):
        rig.step()
    (state,) = rig.planner.stores.left_over
    assert sum(len(sources.blocks) for sources in state.left_over) == 10, (
        "no slot was free for them"
    )
    everything.release()
    rig.scheduler.reset_prefix_cache(reset_running_requests=True)  # preempts
    plan = rig.planned_step()
    assert len(plan.stores_before_forward[0].block_ids) == 10
    assert plan.stores_before_forward[0].transfer_id in plan.fences
    rig.drain()
    rig.check_tokens("a", 30)
    assert rig.counts["rescued_blocks"] == 10
    rig.forget_gpu_cache()
    assert rig.run_alone("a2", a) == 40
    rig.check_idle()


def test_an_idle_engine_keeps_stepping_until_stores_have_settled(make_rig):
    """LMCache#4998, vllm#45595: the engine goes idle and stores never settle."""
    rig = make_rig()
    rig.start()
    rig.hold_copies(True)
    rig.add("a", rig.prompt(41, 1), max_tokens=1)
    rig.run_until_finished("a")
    rig.step()
    assert not rig.scheduler.has_unfinished_requests()
    assert rig.scheduler.has_requests()
    rig.hold_copies(False)
    rig.drain()
    assert not rig.scheduler.has_requests()
    rig.check_idle()


def test_stores_are_dropped_when_another_connectors_load_was_bad(make_rig):
    """docs/guarantees.md, K4: what is computed from garbage must not be published."""
    rig = make_rig(num_blocks=30)
    rig.start()
    rig.hold_copies(True)
    a = rig.prompt(41, 1)
    rig.add("a", a, max_tokens=1)
    rig.run_until_finished("a")
    output = _output()
    output.invalid_block_ids = {3}
    rig.connector.update_connector_output(output)
    rig.hold_copies(False)
    rig.drain()
    assert rig.counts["stored_blocks"] == 0
    assert num_failed(rig.counts, "store") > 0


@pytest.mark.parametrize("is_bad", [False, True])
def test_k4_what_a_step_has_stored_is_found_when_its_output_is_read_and_names_no_bad_block(
    make_rig, is_bad
):
    """A worker beside the scheduler reports with the output of a step what the next has loaded."""
    rig = make_rig(num_blocks=60, is_async=True, has_streams=True, is_in_process=True)
    prompt = rig.warm()
    rig.hold_copies(True)
    rig.add("again", prompt)
    rig.step_until(lambda: rig.plans and rig.plans[-1].loads)
    hashes = rig.add("a", rig.prompt(21, 2), max_tokens=1).block_hashes
    (worker,) = rig.workers

    def end_copies(_: Batch) -> None:
        rig.hold_copies(False)
        while worker.transfers.statistics().unsettled_ids:
            worker.pause(worker.rank)

    def num_found() -> int:
        directory = rig.planner.hits.directory
        return sum(directory.find(0, each) is not None for each in hashes)

    rig.before_update.append(end_copies)
    (store,) = rig.planned_step().stores_after_forward  # reads the output of the step that loads
    assert not rig.planner.statistics().loads
    assert num_found() == 0
    bad = {*store.block_ids} if is_bad else set()
    rig.mutate_outputs.append(lambda _, outputs: outputs[0].invalid_block_ids.update(bad))
    rig.step()
    assert num_found() == (0 if is_bad else 5)


def test_k4_what_a_request_leaves_that_began_with_a_bad_load_is_found_by_nobody(make_rig):
    """It is aborted while its step is computed, so vLLM keeps its blocks in its own cache."""
    rig = make_rig(num_blocks=30, max_batched_tokens=64)
    rig.start()
    prompt = rig.prompt(41, 1)
    rig.add("a", prompt, max_tokens=1)
    tables, _ = rig.planner.gpu.tables_of(0)
    rig.mutate_outputs.append(
        lambda _, outputs: outputs[0].invalid_block_ids.add(tables["a"][0].block_id)
    )
    rig.abort_before_update("a")
    rig.step()
    rig.mutate_outputs.clear()
    rig.add("again", prompt, max_tokens=1)
    assert rig.step().works[0].start == 0
    rig.finish(again=1)


def test_a_hit_that_can_never_be_loaded_is_not_offered_for_ever(make_rig):
    rig = make_rig(num_blocks=30)
    a = rig.warm()
    rig.planner.loads.pair = lambda *_: ([], [])
    assert rig.run_alone("a2", a) == 0
    assert rig.counts["unusable_hits"] == 1
    assert num_failed(rig.counts, "load") == 0, "none was made"
    rig.check_idle()


def test_what_nixl_writes_meanwhile_is_not_kept_as_what_was_there(make_rig):
    """A block is given, while its store runs, to a prompt that another machine writes.

    A fence lets the GPU's own streams wait, and no stream writes this block.
    """
    rig = make_rig(num_blocks=12, remote="first", has_streams=True)
    rig.chance.choose = Mock(return_value=None)  # what `b` asks of the other machine
    rig.start()
    rig.hold_copies(True)
    rig.add("a", rig.prompt(33, 1), max_tokens=1)
    rig.run_until_finished("a")
    assert rig.planner.gauges()["stores_in_flight"]
    rig.add("b", rig.prompt(41, 2), max_tokens=1, kv_transfer_params={BROUGHT: True})
    rig.step_until(lambda: rig.scheduler.requests["b"].status.name == "WAITING_FOR_REMOTE_KVS")
    rig.hold_copies(False)
    rig.finish(b=1)
    assert num_failed(rig.counts, "store") >= 1
    assert rig.run_alone("again", rig.prompt(33, 1)) == 0, "torn words were kept"
