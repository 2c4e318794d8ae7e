"""Figures, table and picture of `safe-offload bench transfer`, from samples made by hand."""

import json
from pathlib import Path

import pytest

from safe_offload.bench.transfer_grid import Case, Traffic, Way
from safe_offload.bench.transfer_report import (
    Latency,
    Measurement,
    TransferReport,
    draw_plot,
    render_table,
)

LARGE = Case(64 << 10, 256, 1)
SMALL = Case(4 << 10, 2, 1)


def measure(case: Case, traffic: Traffic, **seconds: float) -> Measurement:
    """Return three rounds, the median as given."""
    return Measurement(
        case,
        traffic,
        {Way[way]: [2 * s, s, s / 2] for way, s in ({"LIMIT": 1.0} | seconds).items()},
    )


@pytest.fixture
def report() -> TransferReport:
    return TransferReport(
        device="a machine",
        clock="a clock",
        measurements=[
            measure(SMALL, Traffic.STORE, OURS=100.0, LOOP=2.0),
            measure(LARGE, Traffic.STORE, OURS=1.25, LOOP=2.0, VLLM_BATCH=4.0),
            measure(Case(64 << 10, 512, 1), Traffic.STORE, OURS=2.0, LOOP=2.0),
            measure(LARGE, Traffic.LOAD, OURS=1.0, LOOP=2.0),
        ],
        latencies=[Latency("submit", "issue()", (30.0, 10.0, 20.0))],
        missing={"vLLM kernel": "ImportError: no vllm"},
        machine={"date": "2026-01-01", "commit": "abc"},
    )


def test_a_share_is_a_median_of_the_rounds_own_ratios(report: TransferReport) -> None:
    half_slow = Measurement(
        LARGE, Traffic.LOAD, {Way.LIMIT: [1.0, 1.0, 5.0], Way.OURS: [2.0, 10.0, 10.0]}
    )
    assert half_slow.share(Way.OURS) == 0.5
    assert half_slow.ratio_of_medians(Way.OURS) == 0.1


def test_a_rate_is_one_of_the_median_time(report: TransferReport) -> None:
    assert report.measurements[1].share(Way.OURS) == pytest.approx(0.8)
    assert report.measurements[1].rate_gbps(Way.OURS) == pytest.approx((16 << 20) / 1.25 / 1e9)


def test_a_way_that_was_not_measured_has_no_share(report: TransferReport) -> None:
    assert report.measurements[0].share(Way.VLLM_BATCH) is None
    assert report.ways == [Way.OURS, Way.LOOP, Way.VLLM_BATCH]


def test_the_summary_leaves_small_copies_out(report: TransferReport) -> None:
    assert report.shares_by_range(Traffic.STORE, Way.OURS) == {
        64 << 10: [pytest.approx(0.8), pytest.approx(0.5)]
    }
    assert report.shares_by_range(Traffic.BOTH, Way.OURS) == {}


def test_the_table_has_method_rows_summary_and_latencies(report: TransferReport) -> None:
    table = render_table(report)
    assert table.startswith("Device: a machine. 2026-01-01, commit abc.")
    assert "3 to 3 rounds" in table
    row = next(line for line in table.splitlines() if "16 MiB store" in line)
    assert row.split()[-3:] == ["0.80", "0.50", "0.25"]
    assert "store safe_offload 64 KiB 0.65 (0.50)" in table
    assert "submit                20.0 us    10.0 us    30.0 us  issue()" in table
    assert "not measured: vLLM kernel (ImportError: no vllm)" in table


def test_the_json_file_holds_method_figures_and_samples(report: TransferReport) -> None:
    content = json.loads(json.dumps(report.to_json()))
    first = content["measurements"][0]
    assert first["case"]["num_blocks"] == 2
    assert first["size_bytes"] == 8 << 10
    assert first["seconds"]["loop"] == [4.0, 2.0, 1.0]
    assert content["measurements"][1]["share_of_limit"]["vLLM batch"] == pytest.approx(0.25)
    assert content["latencies"][0]["median_us"] == 20
    assert "the median of the rounds' own ratios" in content["method"]


def test_the_plot_is_a_png(report: TransferReport, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    draw_plot(report, tmp_path / "bench.png")
    assert (tmp_path / "bench.png").read_bytes().startswith(b"\x89PNG")
