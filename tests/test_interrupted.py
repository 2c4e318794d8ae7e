"""Ctrl-C of `make test`: it ends the run, and is no failure of a test that was under way.

A terminal sends it to the whole process group, so that a test that takes it for an error reports
that before the run ends.
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
A_TEST = """
import time
from pathlib import Path


def test_that_takes_long():
    Path(__file__).with_suffix(".begun").touch()
    try:
        time.sleep(1000)
    except KeyboardInterrupt:
        raise AssertionError("interrupted")
"""


@pytest.mark.nightly
def test_ctrl_c_fails_no_test(tmp_path):
    files = [tmp_path / f"test_{name}.py" for name in "ab"]
    for file in files:
        file.write_text(A_TEST)
    options = ("-n", "2", "-p", "tests.conftest", "-c", "/dev/null", "--rootdir", tmp_path)
    run = subprocess.Popen(
        [sys.executable, "-m", "pytest", *options, *files],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    while not all(file.with_suffix(".begun").exists() for file in files):
        assert run.poll() is None, run.communicate()[0]
        time.sleep(0.05)
    os.killpg(run.pid, signal.SIGINT)
    said, _ = run.communicate()
    assert "KeyboardInterrupt" in said
    assert run.returncode == 2, said
    assert "failed" not in said
