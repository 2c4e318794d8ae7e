"""A short storm; `python -m tests.tiers.files.storm` runs a long one."""

from __future__ import annotations

import subprocess
import sys


def test_processes_that_are_killed_leave_nothing_wrong_behind(tmp_path):
    """They are forks of a process without threads, which that of all tests is not."""
    options = ["--minutes", "0.01", "--seed", "1", "--directory", str(tmp_path)]
    command = [sys.executable, "-m", "tests.tiers.files.storm", *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done
    assert "no wrong byte, no orphan left, capacity kept" in done.stdout
