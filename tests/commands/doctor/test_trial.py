"""The copies on trial, on both kinds of backend."""

import contextlib
import functools
from typing import Any

import pytest
import torch

from safe_offload.commands.doctor.trial import devices, run_trial
from safe_offload.config.options import OffloadConfig
from safe_offload.worker.copies.base import CopyPath
from safe_offload.worker.copies.gpu import GpuBackend
from safe_offload.worker.copies.rows import Rows
from tests.worker.copies.fake_device import CALLS, FakeGpu, FakeRows

CPU = torch.device("cpu")
CONFIG = OffloadConfig()


def open_on(gpu: FakeGpu) -> Any:
    """What opens the GPU backend on a GPU of threads."""

    def open(storage: Any, _: Any, layout: Any, host: Any, config: Any) -> tuple[Any, Any]:
        device = gpu.open()
        backend = GpuBackend(device, storage.data_ptr(), layout, host, CopyPath.KERNEL)
        return backend, FakeRows(gpu, device, Rows(storage, CPU, layout.geometry))

    return open


def test_the_ways_of_the_cpu_pass():
    tried = run_trial(CPU, CONFIG)
    assert (tried.name, tried.passed) == ("cpu", ("batch", "each"))
    assert not tried.failure
    assert not tried.problems
    assert not tried.is_pageable


def test_a_way_of_a_gpu_that_corrupts_is_told_from_those_that_do_not(gpu):
    gpu.corrupted = {(CALLS[CopyPath.KERNEL], True)}
    tried = run_trial(CPU, CONFIG, open=open_on(gpu))
    assert tried.passed == ("batch", "each")
    assert "COPY_FAILED: store" in tried.problems["kernel"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="mixes threads with the GPU that is here")
@pytest.mark.parametrize("is_refused", [False, True])
def test_a_gpu_is_named_and_whether_it_locks_memory(gpu, monkeypatch, is_refused):
    on_cpu = functools.partial(lambda make, *n, device=None, **how: make(*n, **how), torch.zeros)
    monkeypatch.setattr(torch, "zeros", on_cpu)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "a GPU of threads")
    monkeypatch.setattr(torch.cuda, "device", lambda _: contextlib.nullcontext())
    if is_refused:
        gpu.num_lockable = 0
    tried = run_trial(torch.device("cuda", 1), CONFIG, open=open_on(gpu))
    assert tried.name == "cuda:1 (a GPU of threads)"
    assert tried.passed == (("each",) if is_refused else ("kernel", "batch", "each"))
    assert tried.is_pageable == is_refused
    assert not tried.failure
    assert not gpu.locked


def test_a_device_that_cannot_be_tried_is_named():
    def refuse(*_: Any) -> Any:
        raise RuntimeError("no such device")

    tried = run_trial(CPU, CONFIG, open=refuse)
    assert (tried.failure, tried.passed) == ("RuntimeError: no such device", ())


def test_every_gpu_is_tried_or_else_the_cpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert [str(device) for device in devices()] == ["cuda:0", "cuda:1"]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert devices() == [CPU]
