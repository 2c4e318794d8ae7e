"""The benchmark of the copies: for real on the CPU, over a device of threads for the GPU."""

import json

import pytest
import torch

from safe_offload.errors import SafeOffloadError
from tests.benchmarks.__main__ import main
from tests.benchmarks.fake_gpu_rig import fake_gpu_rigs
from tests.benchmarks.transfer_cases import Case, Traffic
from tests.benchmarks.transfer_rigs import LIMIT, LOOP, OURS, CpuRig

TINY = ["--range-bytes", "4096", "--blocks", "1", "6", "--layers", "2", "--rounds", "2"]
LARGE = Case(64 << 10, 256, 1)
SMALL = Case(4 << 10, 2, 1)


@pytest.fixture
def make_gpu_rig():
    with fake_gpu_rigs() as make:
        yield make


def test_a_tiny_run_on_the_cpu(tmp_path, capsys):
    file = tmp_path / "transfer.json"
    assert main(["transfer", "--device", "cpu", *TINY, "--json", str(file)]) == 0
    output = capsys.readouterr().out
    assert "4 KiB 6 2 48 KiB both" in " ".join(output.split())
    measurements = json.loads(file.read_text())["measurements"]
    assert [one["traffic"] for one in measurements] == ["store", "load", "store", "load", "both"]
    assert all(set(one["seconds"]) == {OURS, LIMIT, LOOP} for one in measurements)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU")
def test_a_tiny_run_on_a_gpu(capsys):
    assert main(["transfer", "--device", "cuda", *TINY]) == 0
    assert "4 KiB 6 2 48 KiB both" in " ".join(capsys.readouterr().out.split())


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_none_is_pretended(capsys):
    assert main(["transfer", "--device", "cuda", "--quick"]) == 1
    assert "torch sees no GPU" in capsys.readouterr().err


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


def test_memory_that_is_not_locked_is_not_measured(make_gpu_rig):
    with pytest.raises(SafeOffloadError, match="ulimit -l"):
        make_gpu_rig(Case(4096, 4, 2), num_lockable=0)
