"""`python -m tests.benchmarks copies`: latencies, and vLLM's copies beside ours."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from safe_offload.commands.bench.report import Report
from safe_offload.commands.bench.transfer_cases import Case
from safe_offload.worker.copies.base import Direction
from tests.benchmarks import copies
from tests.benchmarks.__main__ import main
from tests.benchmarks.transfer import TransferOptions, make_report, measure
from tests.commands.bench.fake_gpu_rig import MakeGpuRig, fake_gpu_rigs

VLLM_COPIES = "tests.benchmarks.vllm_copies"
TINY = ["--range-bytes", "4096", "--layers", "2", "--rounds", "2", "--max-bytes", "65536"]
LATENCIES = ["submit a store", "submit a load", "descriptors", "issue to awaited",
             "done to awaited"]  # fmt: skip


@pytest.fixture
def make_gpu_rig() -> Iterator[MakeGpuRig]:
    with fake_gpu_rigs() as make:
        yield make


class FakeVllmCopies(ModuleType):
    """Stands for `vllm_copies`; notes what it was asked for."""

    def __init__(self) -> None:
        super().__init__(VLLM_COPIES)
        self.given: list[str] = []
        self.shapes: set[tuple[int, ...]] = set()

    def batched_call(self, copy: Any, layers: Any, stream: Any) -> Callable[[], None]:
        self.shapes |= {tuple(layer.shape) for side in layers for layer in side}
        return lambda: self.given.append(f"batch {copy.direction.value}")

    def has_kernel_for(self, range_bytes: int, direction: Direction) -> bool:
        return range_bytes < 28 << 10

    def kernel_launch(self, ranges: Any, stream: Any) -> Callable[[], None]:
        return lambda: self.given.append(f"kernel {len(ranges)}")


def report_of(cases: tuple[Case, ...], make_rig: MakeGpuRig) -> Report:
    options = TransferOptions(cases, 2, 1 << 20, make_rig, "a GPU of threads")
    ways = copies.VllmWays()
    measurements = measure(options, lambda line: None, ways)
    report = make_report(options, measurements, {})
    return copies.with_more(report, copies.measure_latencies(options), ways.missing)


def test_a_tiny_run_on_the_cpu_has_latencies(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    file, picture = tmp_path / "copies.json", tmp_path / "copies.png"
    command = ["copies", "--device", "cpu", "--blocks", "2", *TINY]
    command += ["--json", str(file), "--plot", str(picture)]
    assert main(command) == 0
    content = json.loads(file.read_text())
    assert [latency["name"] for latency in content["latencies"]] == LATENCIES
    assert content["missing"] == {}
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "issue() until await wait() has returned" in capsys.readouterr().out


def test_a_whole_report_of_a_gpu(make_gpu_rig, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeVllmCopies()
    monkeypatch.setitem(sys.modules, VLLM_COPIES, fake)
    monkeypatch.setattr("tests.benchmarks.vllm_copies", fake, raising=False)
    cases = (Case(4096, 4, 2), Case(32 << 10, 2, 2))
    found = report_of(cases, make_gpu_rig).to_json()
    assert [latency["name"] for latency in found["latencies"]] == [
        *LATENCIES[:3], "store given", "fence behind it", "load behind it",
        *LATENCIES[3:], "fence, host", "fence, device", "host wait",
    ]  # fmt: skip
    assert found["missing"] == {}
    ways = [set(m["seconds"]) - {"safe_offload", "one copy", "loop"} for m in found["measurements"]]
    batch, both = {copies.VLLM_BATCH}, {copies.VLLM_BATCH, copies.VLLM_KERNEL}
    assert ways == [batch, both, batch, batch, batch, batch], "the kernel is for short loads"
    assert fake.shapes == {(4, 4096), (2, 32 << 10)}
    assert "kernel 8" in fake.given, "a range for each layer of each block"


def test_a_way_of_vllm_that_does_not_work_here_is_said_to_be_missing(
    make_gpu_rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr("tests.benchmarks.vllm_copies", raising=False)
    monkeypatch.setitem(sys.modules, VLLM_COPIES, None)
    report = report_of((Case(4096, 4, 2),), make_gpu_rig)
    assert set(report.to_json()["missing"]) == {copies.VLLM_BATCH, copies.VLLM_KERNEL}
    assert "not measured: vLLM batch (ModuleNotFoundError" in report.render()
