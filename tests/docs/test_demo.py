"""How a demo ends that is not let run to its end. `.ci/run` runs them whole."""

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

DEMO = Path(__file__).parents[2] / "examples/long_context_back_to_back.sh"

# What the demo asks of Python before the server is up, and a server that never is.
PYTHON = """#!/bin/sh
case "$*" in
*importlib.metadata*) exit 1 ;;
*socket*) echo 9 ;;
*-m*) echo the server starts; exec sleep 1000 ;;
*) echo 10 ;;
esac
"""


@pytest.fixture
def demo(tmp_path):
    """The demo, waiting for its server, which has been started."""
    python = tmp_path / "python"
    python.write_text(PYTHON)
    python.chmod(0o755)
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    environment = {**os.environ, "PYTHON": str(python), "TMPDIR": str(scratch), "MODEL": ""}
    process = subprocess.Popen(
        [DEMO],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    said = ""
    while "starting the server" not in said:
        said += process.stdout.readline()
    assert "random weights" in said
    while not any("starts" in log.read_text() for log in scratch.glob("*/server.log")):
        time.sleep(0.05)
    process.scratch = scratch
    yield process
    process.kill()
    process.wait()


def test_ctrl_c_leaves_neither_a_folder_nor_a_log_on_the_screen(demo):
    os.killpg(demo.pid, signal.SIGINT)
    said, _ = demo.communicate()
    assert demo.returncode == 130
    assert said.endswith("stopped; the servers end, and nothing stays behind\n")
    assert "log" not in said
    assert list(demo.scratch.iterdir()) == []


def test_a_demo_that_fails_says_where_its_logs_are(demo):
    server = ["pkill", "-KILL", "-P", str(demo.pid), "-f", "sleep 1000|-m vllm"]
    subprocess.run(server, check=True)
    said, _ = demo.communicate()
    assert demo.returncode == 1
    (kept,) = demo.scratch.iterdir()
    assert "FAILED: the server ended while it started" in said
    assert said.endswith(f"The logs and answers are kept in {kept} until you remove it.\n")
    assert "the server starts" in said
