"""The copies on trial: the order of fenced overwrites, on both kinds of backend."""

import contextlib
import functools
from contextlib import closing
from typing import Any

import pytest
import torch

from safe_offload.commands.doctor import trial
from safe_offload.commands.doctor.model import BreakEven, break_even, check_break_even
from safe_offload.commands.doctor.trial import SMALL, Order, devices, run_trial, weight_seconds
from safe_offload.config.options import OffloadConfig
from safe_offload.worker.copies.base import CopyPath
from safe_offload.worker.copies.choice import open_backend
from safe_offload.worker.copies.gpu import GpuBackend
from safe_offload.worker.copies.rows import TorchRows
from safe_offload.worker.loop_thread import LoopThread
from safe_offload.worker.memory.host_memory import HostMemory
from safe_offload.worker.transfers import Transfers
from tests.commands.doctor.test_doctor import MODEL
from tests.worker.copies.fake_device import CALLS, FakeGpu, FakeRows

CPU = torch.device("cpu")
CONFIG = OffloadConfig()


@pytest.fixture(autouse=True)
def small_copies(monkeypatch):
    monkeypatch.setattr(trial, "LARGE", SMALL)
    monkeypatch.setattr(trial, "TIMED_COPIES", 1)


def open_on(gpu: FakeGpu) -> Any:
    """What opens the GPU backend on a GPU of threads."""

    def open(storage: Any, _: Any, layout: Any, host: Any, config: Any) -> tuple[Any, Any]:
        device = gpu.open()
        backend = GpuBackend(device, storage.data_ptr(), layout, host, CopyPath.KERNEL)
        return backend, FakeRows(gpu, device, TorchRows(storage, CPU, layout.geometry))

    return open


def count_torn(open: Any, rounds: int, *, is_fenced: bool) -> int:
    storage = torch.zeros(SMALL.size_bytes, dtype=torch.uint8)
    host = HostMemory.allocate(SMALL.size_bytes)
    backend, rows = open(storage.untyped_storage(), CPU, SMALL, host, CONFIG)
    with closing(Transfers(backend, LoopThread(), CONFIG.max_inflight_bytes)) as transfers:
        order = Order(transfers, rows, host.tensor.numpy(), SMALL)
        done, num_torn = order.count_torn(rounds, is_fenced=is_fenced)
    assert done == rounds
    return num_torn


@pytest.mark.parametrize("kind", ["cpu", "gpu"])
def test_no_store_is_torn_behind_a_fence_and_some_are_without(gpu, kind):
    gpu.delay_s = 0.001
    open = open_backend if kind == "cpu" else open_on(gpu)
    assert count_torn(open, 20, is_fenced=True) == 0
    assert count_torn(open, 20, is_fenced=False) > 0


def test_the_trial_of_the_cpu_finds_everything_that_is_reported(monkeypatch):
    time_copies = trial.time_copies
    monkeypatch.setattr(trial, "time_copies", lambda *given: time_copies(*given) and 1e-4)
    tried = run_trial(CPU, CONFIG, rounds=5)
    assert tried.passed == ("batch", "each")
    assert tried.rounds == {"batch": 5, "each": 5}
    assert tried.torn == {"batch": 0, "each": 0}
    gbps = dict.fromkeys(("store", "load", "both"), round(SMALL.size_bytes / 1e-4 / 1e9, 2))
    assert tried.gbps == dict.fromkeys(tried.passed, gbps)
    assert tried.ready_bytes_per_s > 0
    assert not tried.failures
    assert not tried.problems


def test_a_way_of_a_gpu_that_corrupts_is_told_from_those_that_do_not(gpu):
    gpu.corrupted = {(CALLS[CopyPath.KERNEL], True)}
    tried = run_trial(CPU, CONFIG, open=open_on(gpu), rounds=3)
    assert tried.passed == ("batch", "each")
    assert "COPY_FAILED: store" in tried.problems["kernel"]
    assert tried.torn == {"batch": 0, "each": 0}


@pytest.mark.skipif(torch.cuda.is_available(), reason="mixes threads with the GPU that is here")
@pytest.mark.parametrize("is_refused", [False, True])
def test_a_gpu_is_timed_with_locked_memory_only(gpu, monkeypatch, is_refused):
    for make in (torch.ones, torch.zeros):
        on_cpu = functools.partial(lambda make, *n, device=None, **how: make(*n, **how), make)
        monkeypatch.setattr(torch, make.__name__, on_cpu)
    monkeypatch.setattr(trial, "Device", lambda _: gpu.open())
    monkeypatch.setattr(trial.placement, "numa_node_of", lambda _: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "a GPU of threads")
    monkeypatch.setattr(torch.cuda, "device", lambda _: contextlib.nullcontext())
    if is_refused:
        gpu.num_lockable = 0
    tried = run_trial(torch.device("cuda", 1), CONFIG, open=open_on(gpu), rounds=2)
    assert (tried.name, tried.node) == ("cuda:1 (a GPU of threads)", 1)
    if is_refused:
        assert f"not page-lock {SMALL.size_bytes} bytes; fix: ulimit" in tried.failures["rates"]
        assert "the driver did not page-lock a slab" in tried.failures["ready"]
    else:
        assert not tried.failures
        assert tried.passed == ("kernel", "batch", "each") == tuple(tried.gbps)
        assert tried.ready_bytes_per_s > 0
    assert not gpu.locked


def test_a_part_of_the_trial_that_fails_leaves_the_others(gpu):
    def refuse(*_: Any) -> Any:
        raise RuntimeError("no such device")

    tried = run_trial(CPU, CONFIG, open=refuse)
    assert tried.failures == {"self-test": "RuntimeError: no such device"}
    assert tried.ready_bytes_per_s > 0


def test_every_gpu_is_tried_or_else_the_cpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert [str(device) for device in devices()] == ["cuda:0", "cuda:1"]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert devices() == [CPU]


def test_the_time_of_computing_is_measured_for_a_few_lengths():
    seconds = weight_seconds("cpu", "float32")
    assert len(seconds) == 3
    assert all(value > 0 for value in seconds.values())


STEADY = {1: 1e-12, 256: 2e-12, 4096: 2e-11}
"""Seconds for each weight: of 8 billion, 8 ms for one token and 160 ms for 4,096."""


def test_a_hit_pays_from_where_loading_overtakes_computing():
    found = break_even(MODEL, 1, 20.0, STEADY)
    assert found.num_tokens is not None
    faster = break_even(MODEL, 1, 100.0, STEADY)
    assert faster.num_tokens is not None
    assert faster.num_tokens <= found.num_tokens
    assert faster.load_tokens_per_s > found.load_tokens_per_s


def test_a_link_that_is_slower_than_computing_never_pays():
    assert break_even(MODEL, 1, 0.1, STEADY).num_tokens is None
    (found,) = check_break_even(BreakEven(None, 100, 10))
    assert "no hit is expected to be loaded faster" in found.found
