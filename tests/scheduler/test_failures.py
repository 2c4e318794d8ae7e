"""Failures as vLLM's real scheduler meets them: bounded, counted, and never its problem."""

import logging

import pytest
from vllm.v1.outputs import KVConnectorOutput

from safe_offload.compat.specs import block_bytes
from safe_offload.protocol import (
    HostFacts,
    MemoryFacts,
    MemoryKind,
    StepReport,
)
from safe_offload.scheduler import ranks
from safe_offload.scheduler.loads.loads import FAILED_LOADS_MAX
from tests.counts import num_failed
from tests.scheduler.rig import Rig
from tests.simulator.device import CopyFault


@pytest.fixture
def errors(monkeypatch):
    """What the planner logs as an error."""
    messages: list[str] = []
    handler = logging.Handler(logging.ERROR)
    monkeypatch.setattr(handler, "emit", lambda record: messages.append(record.getMessage()))
    monkeypatch.setattr(ranks.logger, "handlers", [handler])
    return messages


def fail_next_copy(rig: Rig) -> None:
    """Let the next copy of every rank fail, and no other."""
    for device in rig.devices:
        device.faults = {device.num_copies: CopyFault.FAIL}


# ---- a load fails ------------------------------------------------------------------------------


@pytest.mark.parametrize("groups", [("full",), ("window:10", "full")])
def test_with_fail_a_failed_load_ends_its_request_with_an_error_and_nothing_else(make_rig, groups):
    rig = make_rig(groups=groups, num_blocks=60, num_slots=90, failure_policy="fail")
    a = rig.warm()
    rig.fail_copies()
    rig.add("a2", a)
    rig.add("b", rig.prompt(30, 2))
    rig.drain()
    assert num_failed(rig.counts, "load") == 1
    assert rig.finish_reasons["a2"].name == "ERROR"
    assert not rig.answers.get("a2")
    rig.check_tokens("b", 4)
    for device in rig.devices:
        device.faults = {}
    rig.run_alone("a3", a)
    assert rig.counts["contained_errors"] == 0
    rig.check_idle()


def test_a_request_whose_loads_keep_failing_is_offered_no_more_hits(make_rig):
    """docs/guarantees.md, H4: it must not be the same for ever."""
    rig = make_rig(num_blocks=30)
    a = rig.prompt(41, 1)
    rig.run_alone("a", a)
    request = rig.add("a2", a, max_tokens=40)
    num_begun = 0
    for _ in range(3 * FAILED_LOADS_MAX):
        assert rig.scheduler.reset_prefix_cache(reset_running_requests=True)  # preempts
        fail_next_copy(rig)
        rig.step_until(lambda: bool(rig.plans[-1].loads) or request in rig.scheduler.running)
        num_begun += bool(rig.plans[-1].loads)
        before = request.num_output_tokens
        # It computes what it lost, stores it, and is preempted again.
        rig.step_until(lambda: request.num_output_tokens > before)  # noqa: B023
        rig.step_until(lambda: not len(rig.planner.stores))
    progress = rig.planner.book.get("a2").load
    assert progress.num_failed == num_begun == FAILED_LOADS_MAX
    rig.drain()
    rig.check_tokens("a2", 40)
    assert num_failed(rig.counts, "load") == FAILED_LOADS_MAX
    assert rig.counts["given_up_requests"] == 1
    rig.forget_gpu_cache()
    assert rig.run_alone("a3", a) == 40, "others are served from the host"
    rig.check_idle()


# ---- host memory that changes ------------------------------------------------------------------


def flip(rig: Rig, slot: int, rank: int = 0) -> None:
    """Flip a bit of a slot on one rank."""
    rig.devices[rank].memory.host[slot][0] ^= 1 << 5


def test_a_slot_whose_bytes_changed_is_recomputed_and_never_used_again(make_rig, errors):
    rig = make_rig(num_blocks=30, num_slots=20, tensor_ranks=2, extra={"verify": "load"})
    a = rig.prompt(41, 1)
    rig.run_alone("a", a)
    stores = [t for plan in rig.plans for t in plan.stores_after_forward]
    bad = stores[0].slot_ids[3]
    rig.forget_gpu_cache()
    flip(rig, bad, rank=1)
    rig.run_alone("a2", a)
    assert num_failed(rig.counts, "load") == 1
    assert rig.counts["checksum_mismatches"] == 1
    assert rig.planner.gauges()["retired_slots"] == 1
    (message,) = errors
    assert f"rank 1 was corrupted in slots [{bad}]" in message
    assert "dmesg" in message
    seen = len(rig.plans)
    for seed in range(2, 8):
        rig.run_alone(f"r{seed}", rig.prompt(61, seed))
        rig.forget_gpu_cache()
    used = {s for plan in rig.plans[seen:] for t in plan.stores_after_forward for s in t.slot_ids}
    assert used == set(range(20)) - {bad}
    assert rig.counts["checksum_mismatches"] == 1
    rig.check_idle()


# ---- too much waits ----------------------------------------------------------------------------


def blocks_in_flight(rig: Rig) -> int:
    return int(rig.planner.stores.num_blocks)


def test_what_finds_no_room_when_its_request_ends_is_lost_and_counted(make_rig):
    rig = make_rig(num_blocks=60, num_slots=100)
    rig.start()
    rig.planner.stores.num_blocks_max = 4
    rig.hold_copies(True)
    a = rig.prompt(41, 1)
    rig.add("a", a, max_tokens=1)
    rig.run_until_finished("a")
    assert blocks_in_flight(rig) == 4
    rig.hold_copies(False)
    rig.drain()
    assert rig.counts["skipped_blocks"] == 6
    rig.forget_gpu_cache()
    assert rig.run_alone("a2", a) == 16
    rig.check_idle()


def test_the_bound_is_a_multiple_of_the_bytes_in_flight(make_rig):
    rig = make_rig(extra={"max_inflight_bytes": "1MiB"})
    slot_bytes = block_bytes(rig.connector._kv_cache_config)
    assert rig.planner.stores.num_blocks_max == 4 * (1 << 20) // slot_bytes
    tiny = make_rig(extra={"max_inflight_bytes": 4096})
    assert tiny.planner.stores.num_blocks_max >= 1


# ---- a part dies -------------------------------------------------------------------------------


def kill_loop(rig: Rig) -> None:
    rig.workers[1].loop.kill()


def break_device(rig: Rig) -> None:
    rig.devices[1].is_broken = True


def fail_self_test(rig: Rig) -> None:
    output = KVConnectorOutput(kv_connector_worker_meta=StepReport(lost_ranks=(1,)))
    rig.connector.update_connector_output(output)


def share_alone(rig: Rig) -> None:
    memory = MemoryFacts(MemoryKind.PAGEABLE, "refused")
    facts = [HostFacts(rank, memory, ("each",), num_sharing=rank + 1) for rank in range(2)]
    output = KVConnectorOutput(kv_connector_worker_meta=StepReport(host_facts=tuple(facts)))
    rig.connector.update_connector_output(output)


@pytest.mark.parametrize("death", [kill_loop, break_device, fail_self_test, share_alone])
def test_when_a_rank_can_copy_no_more_the_cache_misses_and_says_so_once(
    make_rig, errors, monkeypatch, death
):
    monkeypatch.setattr(ranks, "FAILED_IN_A_ROW_MAX", 3)
    rig = make_rig(num_blocks=30, tensor_ranks=2)
    a = rig.warm()
    assert rig.planner.gauges()["is_disabled"] == 0
    death(rig)
    for index in range(6):
        rig.run_alone(f"r{index}", rig.prompt(41, index))
        rig.forget_gpu_cache()
    assert rig.planner.gauges()["is_disabled"] == 1
    (message,) = errors
    assert "Rank 1 can no longer copy" in message
    seen = len(rig.plans)
    assert rig.run_alone("last", a) == 0
    assert all(not plan.stores_after_forward and not plan.loads for plan in rig.plans[seen:])
    assert rig.counts["contained_errors"] == 0
    rig.check_idle()


def test_copies_that_fail_now_and_then_do_not_end_the_cache(make_rig, monkeypatch):
    monkeypatch.setattr(ranks, "FAILED_IN_A_ROW_MAX", 3)
    rig = make_rig(num_blocks=30)
    rig.start()
    for index in range(6):
        fail_next_copy(rig)
        rig.run_alone(f"r{index}", rig.prompt(41, index))
        rig.run_alone(f"s{index}", rig.prompt(41, 10 + index))
    assert num_failed(rig.counts, "store") == 6
    assert rig.planner.gauges()["is_disabled"] == 0
