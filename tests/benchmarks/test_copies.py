"""The benchmark of the copies: for real on the CPU, over a device of threads for the GPU."""

import json
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch

from safe_offload.errors import SafeOffloadError
from safe_offload.worker.copies.base import Direction
from tests.benchmarks import copies
from tests.benchmarks.__main__ import main
from tests.benchmarks.copies import CopyOptions, make_report, measure
from tests.benchmarks.copy_rigs import LIMIT, LOOP, OURS, Case, CpuRig, Traffic
from tests.benchmarks.fake_gpu_rig import fake_gpu_rigs

VLLM_COPIES = "tests.benchmarks.vllm_copies"
TINY = ["--range-bytes", "4096", "--blocks", "1", "6", "--layers", "2", "--rounds", "2"]


@pytest.fixture
def make_gpu_rig():
    with fake_gpu_rigs() as make:
        yield make


def test_a_tiny_run_on_the_cpu(tmp_path, capsys):
    file = tmp_path / "copies.json"
    command = ["copies", "--device", "cpu", "--max-bytes", "65536", *TINY]
    assert main([*command, "--json", str(file)]) == 0
    output = capsys.readouterr().out
    assert "4 KiB 6 2 48 KiB both" in " ".join(output.split())
    found = json.loads(file.read_text())
    measured = [one["traffic"] for one in found["measurements"]]
    assert measured == ["store", "load", "store", "load", "both"]
    assert all(set(one["seconds"]) == {OURS, LIMIT, LOOP} for one in found["measurements"])
    assert len(found["latencies_us"]) == 3
    assert found["missing"] == {}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU")
def test_a_tiny_run_on_a_gpu(capsys):
    assert main(["copies", "--device", "cuda", *TINY]) == 0
    assert "4 KiB 6 2 48 KiB both" in " ".join(capsys.readouterr().out.split())


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_none_is_pretended(capsys):
    assert main(["copies", "--device", "cuda", "--quick"]) == 1
    assert "torch sees no GPU" in capsys.readouterr().err


class FakeVllmCopies(ModuleType):
    """Takes the place of `vllm_copies`; records its calls."""

    calls: list[str]

    def batched_call(self, copy: Any, layers: Any, stream: Any) -> Callable[[], None]:
        return lambda: self.calls.append(f"batch {copy.direction.value}")

    def has_kernel_for(self, range_bytes: int, direction: Direction) -> bool:
        return range_bytes < 28 << 10

    def kernel_launch(self, ranges: Any, stream: Any) -> Callable[[], None]:
        return lambda: self.calls.append(f"kernel {len(ranges)}")


def test_a_whole_report_of_a_gpu(make_gpu_rig, monkeypatch):
    fake = FakeVllmCopies(VLLM_COPIES)
    fake.calls = []
    monkeypatch.setitem(sys.modules, VLLM_COPIES, fake)
    monkeypatch.setattr(VLLM_COPIES, fake, raising=False)
    ways = copies.VllmWays()
    cases = (Case(4096, 4, 2), Case(32 << 10, 2, 2))
    options = CopyOptions(cases, 2, 1 << 20, make_gpu_rig, "a GPU of threads")
    measurements = measure(options, lambda line: None, ways)
    latencies = copies.measure_latencies(options)
    assert len(latencies) == 17
    forwards = [name for name in latencies if name.startswith(("forward", "beside"))]
    assert len(forwards) == 6, "alone, by kernel and by batch, in two sizes of range"
    assert min(min(latencies[name]) for name in forwards) >= 1000.0
    loads = [name for name in latencies if name.startswith("load by")]
    assert min(min(latencies[name]) for name in loads) > 0.0
    assert make_report(options, measurements, latencies, ways.missing, {}).render()
    assert ways.missing == {}
    ways_of = [set(one.seconds) - {OURS, LIMIT, LOOP} for one in measurements]
    batch, both = {copies.VLLM_BATCH}, {copies.VLLM_BATCH, copies.VLLM_KERNEL}
    assert ways_of == [batch, both, batch, batch, batch, batch], "the kernel is for short loads"
    assert "kernel 8" in fake.calls, "a range for each layer of each block"


# ---- against a wrong figure --------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["cpu", "gpu"])
@pytest.mark.parametrize("traffic", Traffic)
def test_every_way_moves_the_bytes(make_gpu_rig, kind, traffic):
    case = Case(4096, 6, 3)
    rig = CpuRig(case) if kind == "cpu" else make_gpu_rig(case)
    half = case.size_bytes // 2
    num_stored, num_loaded = {
        Traffic.STORE: (2 * half, 0),
        Traffic.LOAD: (0, 2 * half),
        Traffic.BOTH: (half, half),
    }[traffic]
    for timed in rig.ways(traffic).values():
        rig.storage.fill_(1)
        rig.host.tensor.fill_(2)
        assert timed() > 0
        assert (rig.host.tensor == 1).sum() == num_stored
        assert (rig.storage == 2).sum() == num_loaded
    rig.close()


def test_bytes_that_do_not_come_back_end_the_run(monkeypatch):
    rig = CpuRig(Case(4096, 6, 3))
    rig.check()
    monkeypatch.setattr(rig, "copy", lambda copies: None)
    with pytest.raises(SafeOffloadError, match="other bytes"):
        rig.check()
    rig.close()
