"""The benchmark of the copies: for real on the CPU, over a device of threads for the GPU."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from safe_offload.commands.bench.report import Report
from safe_offload.commands.bench.transfer_cases import Case, Traffic
from safe_offload.commands.bench.transfer_rigs import LIMIT, LOOP, OURS, CpuRig
from safe_offload.errors import SafeOffloadError
from tests.benchmarks import transfer
from tests.benchmarks.__main__ import main
from tests.benchmarks.transfer import (
    Measurement,
    TransferOptions,
    make_report,
    measure,
    shares_by_range,
    time_in_turn,
)
from tests.commands.bench.fake_gpu_rig import MakeGpuRig, fake_gpu_rigs

TINY = ["--range-bytes", "4096", "--layers", "2", "--rounds", "2", "--max-bytes", "65536"]
LARGE = Case(64 << 10, 256, 1)
SMALL = Case(4 << 10, 2, 1)


@pytest.fixture
def make_gpu_rig() -> Iterator[MakeGpuRig]:
    with fake_gpu_rigs() as make:
        yield make


# ---- the command ---------------------------------------------------------------------------------


def test_a_tiny_run_on_the_cpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "transfer.json"
    command = ["transfer", "--device", "cpu", "--blocks", "1", "6", *TINY]
    assert main([*command, "--json", str(file)]) == 0
    output = capsys.readouterr().out
    assert "4 KiB 6 2 48 KiB both" in " ".join(output.split())
    assert "Device: " in output
    content = json.loads(file.read_text())
    assert [m["traffic"] for m in content["measurements"]] == [
        "store", "load", "store", "load", "both",
    ]  # fmt: skip
    for measurement in content["measurements"]:
        assert set(measurement["seconds"]) == {"safe_offload", "one copy", "loop"}
        assert all(s > 0 for samples in measurement["seconds"].values() for s in samples)
    assert content["machine"]["commit"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU")
def test_a_tiny_run_on_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["transfer", "--device", "cuda", "--blocks", "1", "6", *TINY]) == 0
    assert "4 KiB 6 2 48 KiB both" in " ".join(capsys.readouterr().out.split())


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
    assert main(["transfer", "--device", "cpu", *arguments]) == 1
    assert message in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_none_is_pretended(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["transfer", "--device", "cuda", "--quick"]) == 1
    assert "torch sees no GPU" in capsys.readouterr().err


# ---- how it is timed -----------------------------------------------------------------------------


def test_every_way_is_timed_in_every_round_and_each_goes_first() -> None:
    calls: list[str] = []

    def timed(way: str) -> Callable[[], float]:
        return lambda: calls.append(way) or 1.0

    seconds = time_in_turn({way: timed(way) for way in (OURS, LIMIT, LOOP)}, 3)
    assert {way: len(samples) for way, samples in seconds.items()} == dict.fromkeys(seconds, 3)
    assert calls[3::3] == [OURS, LIMIT, LOOP], "after the warm-up"


def test_short_copies_get_more_rounds() -> None:
    seconds = time_in_turn({OURS: lambda: transfer.CASE_S_MIN / 5}, 3)
    assert len(seconds[OURS]) in (4, 5)
    seconds = time_in_turn({OURS: lambda: 0.0}, 3)
    assert len(seconds[OURS]) == 3 * transfer.ROUNDS_FACTOR


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


@pytest.mark.parametrize("traffic", Traffic)
def test_every_way_on_a_gpu_moves_the_bytes(make_gpu_rig, traffic) -> None:
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


def test_bytes_that_do_not_come_back_end_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = CpuRig(Case(4096, 6, 3))
    rig.check()
    monkeypatch.setattr(rig, "copy", lambda copies: None)
    with pytest.raises(SafeOffloadError, match="other bytes"):
        rig.check()
    rig.close()


def test_a_driver_that_does_not_lock_is_an_error_with_a_fix(make_gpu_rig) -> None:
    with pytest.raises(SafeOffloadError, match="ulimit -l"):
        make_gpu_rig(Case(4096, 4, 2), num_lockable=0)


def test_a_way_that_is_handed_in_is_timed_beside_the_others(make_gpu_rig) -> None:
    options = TransferOptions((Case(4096, 4, 2),), 1, 1 << 20, make_gpu_rig, "threads")
    found = measure(options, lambda line: None, lambda rig, traffic: {"another": lambda: 1.0})
    assert [set(one.seconds) for one in found] == [{OURS, LIMIT, LOOP, "another"}] * 3
    assert "device time" in make_report(options, found, {}).render()


# ---- the report, from samples made by hand -------------------------------------------------------


def three_rounds(case: Case, traffic: Traffic, **seconds: float) -> Measurement:
    """Return three rounds, the median as given."""
    ways = {"limit": LIMIT, "ours": OURS, "loop": LOOP, "other": "other"}
    return Measurement(
        case,
        traffic,
        {ways[way]: [2 * s, s, s / 2] for way, s in ({"limit": 1.0} | seconds).items()},
    )


MEASUREMENTS = [
    three_rounds(SMALL, Traffic.STORE, ours=100.0, loop=2.0),
    three_rounds(LARGE, Traffic.STORE, ours=1.25, loop=2.0, other=4.0),
    three_rounds(Case(64 << 10, 512, 1), Traffic.STORE, ours=2.0, loop=2.0),
    three_rounds(LARGE, Traffic.LOAD, ours=1.0, loop=2.0),
]


@pytest.fixture
def report() -> Report:
    options = TransferOptions((LARGE,), 3, 1 << 30, CpuRig, "a machine")
    return make_report(options, MEASUREMENTS, {"date": "2026-01-01", "commit": "abc"})


def test_a_share_is_a_median_of_the_rounds_own_ratios() -> None:
    half_slow = Measurement(LARGE, Traffic.LOAD, {LIMIT: [1.0, 1.0, 5.0], OURS: [2.0, 10.0, 10.0]})
    assert half_slow.share(OURS) == 0.5
    assert half_slow.share(LOOP) is None, "it was not measured"


def test_a_rate_is_one_of_the_median_time() -> None:
    assert MEASUREMENTS[1].share(OURS) == pytest.approx(0.8)
    assert MEASUREMENTS[1].rate_gbps(OURS) == pytest.approx((16 << 20) / 1.25 / 1e9)


def test_the_summary_leaves_small_copies_out() -> None:
    assert shares_by_range(MEASUREMENTS, Traffic.STORE, OURS) == {
        64 << 10: [pytest.approx(0.8), pytest.approx(0.5)]
    }
    assert shares_by_range(MEASUREMENTS, Traffic.BOTH, OURS) == {}


def test_the_table_has_method_rows_and_summary(report: Report) -> None:
    text = report.render()
    assert text.startswith("Device: a machine. 2026-01-01, commit abc.")
    assert "3 to 3 rounds" in text
    row = next(line for line in text.splitlines() if "16 MiB" in line and "store" in line)
    assert row.split()[-3:] == ["0.80", "0.50", "0.25"]
    assert "store safe_offload 64 KiB 0.65 (0.50)" in text


def test_the_json_file_holds_method_figures_and_samples(report: Report) -> None:
    content = json.loads(json.dumps(report.to_json()))
    first = content["measurements"][0]
    assert first["case"]["num_blocks"] == 2
    assert first["size_bytes"] == 8 << 10
    assert first["seconds"]["loop"] == [4.0, 2.0, 1.0]
    assert content["measurements"][1]["share_of_limit"]["other"] == pytest.approx(0.25)
    assert "the median of the rounds' own ratios" in content["method"]
