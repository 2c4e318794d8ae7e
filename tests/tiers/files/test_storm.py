"""A short storm; `python -m tests.tiers.files.storm` runs a long one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]


def test_processes_that_are_killed_leave_nothing_wrong_behind(tmp_path):
    command = [sys.executable, "-m", "tests.tiers.files.storm", "--minutes", "0.05"]
    done = subprocess.run(
        [*command, "--seed", "1", "--directory", str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "no wrong byte, no orphan left, capacity kept" in done.stdout
