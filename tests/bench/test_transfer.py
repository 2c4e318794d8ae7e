"""`safe-offload bench transfer`: for real on the CPU, over a device of threads for the GPU."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from safe_offload.bench import transfer
from safe_offload.bench.transfer import TransferOptions, measure, time_in_turn
from safe_offload.bench.transfer_grid import Case, Traffic, Way
from safe_offload.bench.transfer_report import render_table
from safe_offload.bench.transfer_rigs import CpuRig, GpuRig
from safe_offload.cli import main
from safe_offload.errors import SafeOffloadError
from safe_offload.worker.backends.base import Direction
from tests.worker.backends.fake_device import FakeGpu, FakeStream

TINY = ["--range-bytes", "4096", "--layers", "2", "--rounds", "2", "--max-bytes", "65536"]


class FakeStopwatch:
    """See `Stopwatch`; the time when a stream of threads gets there."""

    def __init__(self) -> None:
        self._times_s: list[float] = []
        self._stream: FakeStream | None = None

    def start(self, stream: FakeStream) -> None:
        self._times_s.clear()
        stream.enqueue(lambda: self._times_s.append(time.perf_counter()))

    def stop(self, stream: FakeStream) -> None:
        stream.enqueue(lambda: self._times_s.append(time.perf_counter()))
        self._stream = stream

    def elapsed_s(self) -> float:
        assert self._stream is not None
        self._stream.synchronize()
        first_s, second_s = self._times_s
        return second_s - first_s


MakeGpuRig = Callable[..., GpuRig]


@pytest.fixture
def make_gpu_rig() -> Iterator[MakeGpuRig]:
    gpus: list[FakeGpu] = []

    def make(case: Case, num_lockable: int = 1) -> GpuRig:
        gpus.append(FakeGpu())
        gpus[-1].num_lockable = num_lockable
        storage = torch.empty(case.size_bytes, dtype=torch.uint8)
        return GpuRig(case, storage, gpus[-1].open(), FakeStopwatch())

    yield make
    for gpu in gpus:
        gpu.close()


class FakeVllmCopies(ModuleType):
    """Stands for `vllm_copies`; notes what it was asked for."""

    def __init__(self) -> None:
        super().__init__("safe_offload.bench.vllm_copies")
        self.given: list[str] = []
        self.shapes: set[tuple[int, ...]] = set()

    def batched_call(self, copy: Any, layers: Any, stream: Any) -> Callable[[], None]:
        self.shapes |= {tuple(layer.shape) for side in layers for layer in side}
        return lambda: self.given.append(f"batch {copy.direction.value}")

    def has_kernel_for(self, range_bytes: int, direction: Direction) -> bool:
        return range_bytes < 28 << 10

    def kernel_launch(self, ranges: Any, stream: Any) -> Callable[[], None]:
        return lambda: self.given.append(f"kernel {len(ranges)}")


@pytest.fixture
def vllm_copies(monkeypatch: pytest.MonkeyPatch) -> FakeVllmCopies:
    fake = FakeVllmCopies()
    monkeypatch.setitem(sys.modules, fake.__name__, fake)
    monkeypatch.setattr("safe_offload.bench.vllm_copies", fake, raising=False)
    return fake


@pytest.fixture
def no_vllm_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("safe_offload.bench.vllm_copies", raising=False)
    monkeypatch.setitem(sys.modules, "safe_offload.bench.vllm_copies", None)


# ---- the command ---------------------------------------------------------------------------------


def test_a_tiny_run_on_the_cpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "transfer.json"
    command = ["bench", "transfer", "--device", "cpu", "--blocks", "1", "6", *TINY]
    assert main([*command, "--json", str(file)]) == 0
    output = capsys.readouterr().out
    assert "4 KiB      6      2    48 KiB both" in output
    assert "Device: " in output
    content = json.loads(file.read_text())
    assert [m["traffic"] for m in content["measurements"]] == [
        "store", "load", "store", "load", "both",
    ]  # fmt: skip
    for measurement in content["measurements"]:
        assert set(measurement["seconds"]) == {"safe_offload", "one copy", "loop"}
        assert all(s > 0 for samples in measurement["seconds"].values() for s in samples)
    assert {latency["name"] for latency in content["latencies"]} == {
        "submit a store",
        "submit a load",
        "descriptors",
        "issue to awaited",
        "done to awaited",
    }
    assert content["machine"]["commit"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU")
def test_a_tiny_run_on_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "transfer", "--device", "cuda", "--blocks", "1", "6", *TINY]) == 0
    output = capsys.readouterr().out
    assert "4 KiB      6      2    48 KiB both" in output
    assert "fence, device" in output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rounds", "0"], "expected at least 1"),
        (["--range-bytes", "12"], "expected multiples of 8"),
        (["--max-bytes", "100"], "no size of copy is that small"),
        (["--range-bytes", str(1 << 40), "--max-bytes", str(1 << 60)], "fix: --max-bytes"),
    ],
)
def test_what_cannot_be_measured_is_an_error_with_a_fix(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "transfer", "--device", "cpu", *arguments]) == 1
    assert message in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_none_is_pretended(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "transfer", "--device", "cuda", "--quick"]) == 1
    assert "torch sees no GPU" in capsys.readouterr().err


# ---- how it is timed -----------------------------------------------------------------------------


def test_every_way_is_timed_in_every_round_and_each_goes_first() -> None:
    calls: list[Way] = []

    def timed(way: Way) -> Callable[[], float]:
        return lambda: calls.append(way) or 1.0

    seconds = time_in_turn({way: timed(way) for way in (Way.OURS, Way.LIMIT, Way.LOOP)}, 3)
    assert {way: len(samples) for way, samples in seconds.items()} == dict.fromkeys(seconds, 3)
    assert calls[3::3] == [Way.OURS, Way.LIMIT, Way.LOOP], "after the warm-up"


def test_short_copies_get_more_rounds() -> None:
    seconds = time_in_turn({Way.OURS: lambda: transfer.CASE_S_MIN / 5}, 3)
    assert len(seconds[Way.OURS]) in (4, 5)
    seconds = time_in_turn({Way.OURS: lambda: 0.0}, 3)
    assert len(seconds[Way.OURS]) == 3 * transfer.ROUNDS_FACTOR


@pytest.mark.parametrize("traffic", Traffic)
def test_every_way_on_the_cpu_moves_the_bytes(traffic: Traffic) -> None:
    rig = CpuRig(Case(4096, 6, 3))
    for way, timed in rig.ways(traffic).items():
        rig.storage.fill_(1)
        rig.host.tensor.fill_(2)
        timed()
        found = rig.storage.sum() + rig.host.tensor.sum()
        if traffic is Traffic.BOTH:
            assert (rig.storage == 2).sum() == (rig.host.tensor == 1).sum() == 6 * 3 * 4096 / 2
        else:
            assert found == 2 * rig.case.size_bytes * (1 if traffic is Traffic.STORE else 2), way
    rig.close()


def test_bytes_that_do_not_come_back_end_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = CpuRig(Case(4096, 6, 3))
    rig.check()
    monkeypatch.setattr(rig, "copy", lambda copies: None)
    with pytest.raises(SafeOffloadError, match="other bytes"):
        rig.check()
    rig.close()


# ---- a GPU of threads ----------------------------------------------------------------------------


@pytest.mark.parametrize("traffic", Traffic)
def test_every_way_on_a_gpu_moves_the_bytes(make_gpu_rig, no_vllm_copies, traffic) -> None:
    rig = make_gpu_rig(Case(4096, 6, 3))
    for timed in rig.ways(traffic).values():
        rig.storage.fill_(1)
        rig.host.tensor.fill_(2)
        assert timed() > 0
        num_stored = {Traffic.STORE: 6, Traffic.LOAD: 0, Traffic.BOTH: 3}[traffic]
        num_loaded = {Traffic.STORE: 0, Traffic.LOAD: 6, Traffic.BOTH: 3}[traffic]
        assert (rig.host.tensor == 1).sum() == num_stored * 3 * 4096
        assert (rig.storage == 2).sum() == num_loaded * 3 * 4096
    rig.close()


def test_a_whole_report_of_a_gpu(make_gpu_rig, vllm_copies: FakeVllmCopies) -> None:
    options = TransferOptions((Case(4096, 4, 2), Case(32 << 10, 2, 2)), 2, 1 << 20)
    report = measure(options, make_gpu_rig, "a GPU of threads", lambda line: None)
    table = render_table(report)
    assert {"fence, host", "fence, device", "host wait"} <= {x.name for x in report.latencies}
    assert [way.value for way in report.ways] == [
        "safe_offload", "loop", "vLLM batch", "vLLM kernel",
    ]  # fmt: skip
    assert "device time" in table
    assert not report.missing
    with_kernel = [m for m in report.measurements if Way.VLLM_KERNEL in m.seconds]
    assert [(m.case.range_bytes, m.traffic) for m in with_kernel] == [(4096, Traffic.LOAD)]
    assert vllm_copies.shapes == {(4, 4096), (2, 32 << 10)}
    assert "kernel 8" in vllm_copies.given, "a range for each layer of each block"


def test_a_way_of_vllm_that_does_not_work_here_is_said_to_be_missing(
    make_gpu_rig, no_vllm_copies
) -> None:
    options = TransferOptions((Case(4096, 4, 2),), 1, 1 << 20)
    report = measure(options, make_gpu_rig, "a GPU of threads", lambda line: None)
    assert set(report.missing) == {"vLLM batch", "vLLM kernel"}
    assert "not measured: vLLM batch (ModuleNotFoundError" in render_table(report)


def test_a_driver_that_does_not_lock_is_an_error_with_a_fix(make_gpu_rig) -> None:
    with pytest.raises(SafeOffloadError, match="ulimit -l"):
        make_gpu_rig(Case(4096, 4, 2), num_lockable=0)
