"""How a demo ends that is not let run to its end. `.ci/run` runs them whole."""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

import pytest

DEMO = Path(__file__).parents[2] / "examples/long_context_back_to_back.sh"

# What the demo asks of Python before the server is up, and a server that never is.
PYTHON = """#!/bin/sh
case "$*" in
*importlib.metadata* | *small_model.py) exit 1 ;;
*socket*) echo 9 ;;
-m*)
    touch "$TMPDIR/left behind"
    echo "(server) INFO [core.py:12] the server starts"
    exec {server} ;;
*) echo 10 ;;
esac
"""
# As vLLM's processes do, it has shared memory; it does not end when it is asked to.
STUBBORN = """
import signal
from multiprocessing.shared_memory import SharedMemory

signal.signal(signal.SIGTERM, signal.SIG_IGN)
print(SharedMemory(create=True, size=1 << 20).name, flush=True)
while True:
    signal.pause()
"""


def start(
    programs: Path, scratch: Path, server: str = "sleep 1000", **environment: str
) -> subprocess.Popen[str]:
    """Start the demo, with this server."""
    python = programs / "python"
    python.write_text(PYTHON.format(server=server))
    python.chmod(0o755)
    ours = {"PYTHON": str(python), "TMPDIR": str(scratch), "MODEL": "tiny"}
    return subprocess.Popen(
        [DEMO],
        env=os.environ | ours | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def logged(demo: subprocess.Popen[str], scratch: Path, num_lines: int) -> list[str]:
    """Wait until the server of a demo has logged so many lines."""
    assert demo.stdout is not None
    said = ""
    while "starting the server" not in said:
        line = demo.stdout.readline()
        assert line, said
        said += line
    assert "random weights" in said
    assert ("goes on with the tiny model" in said) == ("SmolLM2" in said)
    while True:
        for log in scratch.glob("*/server.log"):
            if len(lines := log.read_text().splitlines()) >= num_lines:
                return lines
        time.sleep(0.05)


@pytest.fixture
def scratch():
    """A folder whose name leaves room for that of a socket."""
    with tempfile.TemporaryDirectory(prefix="demo") as folder:
        yield Path(folder)


@pytest.fixture
def demo(tmp_path, scratch):
    """The demo, waiting for its server, which has been started."""
    process = start(tmp_path, scratch)
    logged(process, scratch, 1)
    yield process
    process.kill()
    process.wait()


def interrupted(demo):
    """Press Ctrl-C and return the output; bash loses it if a child of its ends by itself then."""
    while True:
        os.killpg(demo.pid, signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            return demo.communicate(timeout=60)[0]


@pytest.fixture
def neighbour():
    """Shared memory that is not the demo's."""
    made = SharedMemory(create=True, size=1 << 20)
    yield Path("/dev/shm", made.name)
    made.close()
    made.unlink()


def test_ctrl_c_kills_a_server_that_does_not_end_and_its_shared_memory_goes(
    tmp_path, scratch, neighbour
):
    (tmp_path / "server.py").write_text(STUBBORN)
    server = f"{sys.executable} {tmp_path / 'server.py'}"
    demo = start(tmp_path, scratch, server, STOP_TIMEOUT="0", MODEL="")
    _, name = logged(demo, scratch, 2)
    assert Path("/dev/shm", name).exists()
    said = interrupted(demo)
    assert "log" not in said
    assert (demo.returncode, said.endswith("nothing stays behind\n")) == (130, True)
    assert not Path("/dev/shm", name).exists()
    assert list(scratch.iterdir()) == []
    assert neighbour.exists()


def test_a_demo_that_fails_says_where_its_logs_are(demo, scratch):
    server = ["pkill", "-KILL", "-P", str(demo.pid), "-f", "sleep 1000|-m vllm"]
    subprocess.run(server, check=True)
    said, _ = demo.communicate()
    assert demo.returncode == 1
    (kept,) = scratch.iterdir()
    assert not (kept / "tmp").exists()
    assert "FAILED: the server ended while it started" in said
    assert said.endswith(f"The logs and answers are kept in {kept} until you remove it.\n")
    assert "the server starts" in said
