"""Sleep and wake-up (vLLM 0.33 on): copies have ended before the KV cache's memory goes (G5)."""

import logging
import threading

import pytest
import torch

from safe_offload.errors import TransferError
from safe_offload.protocol import EMPTY_PLAN, FailureReason, StepPlan, Transfer
from safe_offload.worker import bridge as bridge_module
from tests.worker.fake_backend import transfer
from tests.worker.test_bridge import Worker, faked


@pytest.fixture
def worker():
    made = Worker()
    yield made
    made.bridge.shutdown()


def test_sleep_waits_for_the_copies_in_flight_and_reports_them_afterwards(worker, monkeypatch):
    backend = faked(worker, monkeypatch)
    worker.step(StepPlan(stores_after_forward=(transfer(1),)))
    backend.wait_for(1)
    polled = threading.Event()

    def poll(seconds: float) -> None:
        if not polled.is_set():
            polled.set()
            backend.complete(1)

    monkeypatch.setattr(bridge_module.time, "sleep", poll)
    worker.bridge.unregister_kv_caches()
    assert polled.is_set(), "it did not wait"
    report = worker.bridge.build_connector_worker_meta()
    assert [(o.transfer_id, o.failure) for o in report.outcomes] == [(1, None)]


def test_nothing_starts_while_asleep_and_all_is_served_after_waking(worker):
    worker.register()
    worker.write_block(2, 20)
    worker.step(StepPlan(stores_after_forward=(Transfer(1, (2,), (5,)),)))
    worker.bridge.unregister_kv_caches()
    worker.bridge.unregister_kv_caches()  # as often as vLLM likes
    worker.storage.zero_()  # vLLM drops the bytes
    worker.step(StepPlan(loads=(Transfer(2, (3,), (5,)),)))
    assert worker.settle() == {1: None, 2: FailureReason.CANCELLED}
    assert worker.read_block(3) == [0, 0, 0], "nobody wrote into memory that is gone"
    worker.bridge.restore_kv_caches()
    worker.bridge.restore_kv_caches()
    worker.step(StepPlan(loads=(Transfer(3, (3,), (5,)),)))
    assert worker.settle()[3] is None
    assert worker.read_block(3) == [20, 21, 22], "what was stored before is still there"


def test_a_plan_that_was_not_begun_is_cancelled_by_sleep(worker, monkeypatch):
    faked(worker, monkeypatch)
    worker.bridge.bind_connector_metadata(StepPlan(loads=(Transfer(1, (3,), (5,)),)))
    worker.bridge.unregister_kv_caches()
    worker.bridge.start_load_kv()
    assert worker.settle() == {1: FailureReason.CANCELLED}


def test_a_copy_that_does_not_end_makes_the_sleep_fail_and_service_goes_on(worker, monkeypatch):
    backend = faked(worker, monkeypatch)
    worker.step(StepPlan(loads=(transfer(1),)))
    backend.wait_for(1)
    monkeypatch.setattr(bridge_module, "SLEEP_TIMEOUT_S", 0.0)
    with pytest.raises(TransferError, match="1 copies did not end"):
        worker.bridge.unregister_kv_caches()
    backend.complete(1)
    worker.step(StepPlan(loads=(transfer(2),)))
    backend.wait_for(2)
    backend.complete(2)
    worker.loop.flush()
    worker.step(EMPTY_PLAN)
    assert worker.outcomes() == {1: None, 2: None}


def test_sleep_without_transfers_does_nothing(worker):
    worker.bridge.unregister_kv_caches()
    worker.bridge.restore_kv_caches()
    worker.register()
    worker.bridge.shutdown()
    worker.bridge.unregister_kv_caches()


def test_the_same_kv_cache_may_be_registered_again(worker):
    worker.register()
    worker.write_block(2, 20)
    worker.step(StepPlan(stores_after_forward=(Transfer(1, (2,), (5,)),)))
    worker.settle()
    worker.bridge.unregister_kv_caches()
    worker.register()
    worker.step(StepPlan(loads=(Transfer(2, (3,), (5,)),)))
    assert worker.settle()[2] is None
    assert worker.read_block(3) == [20, 21, 22]


def test_with_another_kv_cache_every_transfer_fails_and_that_is_said(worker, package_log):
    worker.register()
    worker.step(StepPlan(stores_after_forward=(Transfer(1, (2,), (5,)),)))
    worker.bridge.register_kv_caches({"a": torch.zeros(worker.storage.numel(), dtype=torch.uint8)})
    worker.step(StepPlan(loads=(Transfer(2, (3,), (5,)),)))
    assert worker.settle()[2] is FailureReason.NOT_RUNNING
    errors = [record for record in package_log if record.levelno >= logging.ERROR]
    assert len(errors) == 1
    assert errors[0].getMessage().startswith("vLLM registered another KV cache")
