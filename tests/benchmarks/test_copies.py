"""`python -m tests.benchmarks copies`: latencies, and vLLM's copies beside ours."""

import json
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

from safe_offload.worker.copies.base import Direction
from tests.benchmarks import copies
from tests.benchmarks.__main__ import main
from tests.benchmarks.fake_gpu_rig import fake_gpu_rigs
from tests.benchmarks.transfer import TransferOptions, make_report, measure
from tests.benchmarks.transfer_cases import Case

VLLM_COPIES = "tests.benchmarks.vllm_copies"
TINY = ["--range-bytes", "4096", "--blocks", "2", "--layers", "2", "--rounds", "2"]
LATENCIES = ["submit a store", "submit a load", "descriptors", "issue to awaited",
             "done to awaited"]  # fmt: skip


class FakeVllmCopies(ModuleType):
    """Stands for `vllm_copies`; notes what it was asked for."""

    given: list[str]

    def batched_call(self, copy: Any, layers: Any, stream: Any) -> Callable[[], None]:
        return lambda: self.given.append(f"batch {copy.direction.value}")

    def has_kernel_for(self, range_bytes: int, direction: Direction) -> bool:
        return range_bytes < 28 << 10

    def kernel_launch(self, ranges: Any, stream: Any) -> Callable[[], None]:
        return lambda: self.given.append(f"kernel {len(ranges)}")


def test_a_tiny_run_on_the_cpu_has_latencies(tmp_path):
    file = tmp_path / "copies.json"
    command = ["copies", "--device", "cpu", "--max-bytes", "65536", *TINY]
    assert main([*command, "--json", str(file)]) == 0
    content = json.loads(file.read_text())
    assert [latency["name"] for latency in content["latencies"]] == LATENCIES
    assert content["missing"] == {}


@pytest.mark.parametrize("is_missing", [False, True])
def test_a_whole_report_of_a_gpu(is_missing, monkeypatch):
    fake = FakeVllmCopies(VLLM_COPIES)
    fake.given = []
    monkeypatch.delattr(VLLM_COPIES, raising=False)
    monkeypatch.setitem(sys.modules, VLLM_COPIES, None if is_missing else fake)
    if not is_missing:
        monkeypatch.setattr(VLLM_COPIES, fake, raising=False)
    ways = copies.VllmWays()
    with fake_gpu_rigs() as make_rig:
        cases = (Case(4096, 4, 2), Case(32 << 10, 2, 2))
        options = TransferOptions(cases, 2, 1 << 20, make_rig, "a GPU of threads")
        report = make_report(options, measure(options, lambda line: None, ways), {})
        report = copies.with_more(report, copies.measure_latencies(options), ways.missing)
    found = report.to_json()
    assert [latency["name"] for latency in found["latencies"]] == [
        *LATENCIES[:3], "store given", "fence behind it", "load behind it",
        *LATENCIES[3:], "fence, host", "fence, device", "host wait",
    ]  # fmt: skip
    if is_missing:
        assert set(found["missing"]) == {copies.VLLM_BATCH, copies.VLLM_KERNEL}
        assert "not measured: vLLM batch (ModuleNotFoundError" in report.render()
        return
    assert found["missing"] == {}
    ways_of = [
        set(m["seconds"]) - {"safe_offload", "one copy", "loop"} for m in found["measurements"]
    ]
    batch, both = {copies.VLLM_BATCH}, {copies.VLLM_BATCH, copies.VLLM_KERNEL}
    assert ways_of == [batch, both, batch, batch, batch, batch], "the kernel is for short loads"
    assert "kernel 8" in fake.given, "a range for each layer of each block"
