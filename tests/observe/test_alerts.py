"""The alerts of examples/observability, checked by Prometheus' own tool and against our metrics."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from tests.observe.reference_page import NAMES
from tests.programs import find_program

FOLDER = Path(__file__).parents[2] / "examples" / "observability"
PROMTOOL = find_program("promtool")
FILES = ["alerts.yaml", "alerts_test.yaml"]

needs_promtool = pytest.mark.skipif(
    PROMTOOL is None, reason="no promtool: `make servers`, or put one on the PATH"
)


def check(command: str, path: Path) -> subprocess.CompletedProcess[str]:
    assert PROMTOOL is not None
    return subprocess.run(
        [PROMTOOL, *command.split(), path.name], cwd=path.parent, capture_output=True, text=True
    )


@needs_promtool
@pytest.mark.parametrize(
    ("command", "name"),
    [
        ("check config", "prometheus.yml"),
        ("check rules", "alerts.yaml"),
        ("test rules", "alerts_test.yaml"),
    ],
)
def test_prometheus_accepts_the_files_and_their_tests_pass(command: str, name: str) -> None:
    result = check(command, FOLDER / name)
    assert result.returncode == 0, result.stdout + result.stderr


@needs_promtool
@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("          and max_over_time(vllm:num_requests_running[30m]) == 0\n", ""),
        ("sum without (hit)", "sum"),
        ("overdue_transfers_total[10m]) > 0", "overdue_transfers_total[10m]) >= 0"),
        ("mean1h < 60", "mean1h > 60"),
        ('{reason="full"}[5m]', '{reason="full"}[30m]'),
    ],
)
def test_the_tests_of_the_rules_notice_a_wrong_one(tmp_path: Path, right: str, wrong: str) -> None:
    for name in FILES:
        text = (FOLDER / name).read_text()
        assert name != "alerts.yaml" or right in text
        (tmp_path / name).write_text(text.replace(right, wrong))
    assert check("check rules", tmp_path / "alerts.yaml").returncode == 0
    result = check("test rules", tmp_path / "alerts_test.yaml")
    assert result.returncode != 0
    assert "FAILED" in result.stdout + result.stderr


@pytest.mark.parametrize("name", FILES)
def test_alerts_are_about_metrics_that_exist(name: str) -> None:
    named = set(re.findall(r"vllm:safe_offload_(\w+)", (FOLDER / name).read_text()))
    assert named
    assert {name.removesuffix("_total") for name in named} <= NAMES
