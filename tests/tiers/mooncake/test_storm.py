"""A short storm; `python -m tests.tiers.mooncake.storm` runs a long one."""

import subprocess
import sys

import pytest


@pytest.mark.nightly
def test_engines_machines_and_masters_that_are_killed_leave_nothing_wrong_behind():
    command = [sys.executable, "-m", "tests.tiers.mooncake.storm", "--seconds", "30"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done
    assert "no wrong byte, no late write" in done.stdout
