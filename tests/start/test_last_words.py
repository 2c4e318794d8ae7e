"""A refusal in a child is the last line of the process that the user has started.

Real processes: a pipe of another process can only be tried with one.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from safe_offload.start import last_words

PROJECT = Path(__file__).parents[2]
REFUSE = """
from safe_offload.errors import ConfigError
from safe_offload.start.last_words import telling

@telling
def start():
    raise ConfigError("the pool is too small.")

try:
    start()
except ConfigError:
    pass
else:
    raise SystemExit("the error did not pass")
"""
PARENT = f"""
import os, subprocess, sys
from safe_offload.start import last_words
refuse = [sys.executable, "-c", {REFUSE!r}]
"""
LINE = "SafeCPUOffloadConnector aborted the start: the pool is too small."


def run(script: str, **environment: str) -> list[str]:
    """The lines that a process and its children write; no process above it listens."""
    inherited = {name: value for name, value in os.environ.items() if name != last_words.VARIABLE}
    done = subprocess.run(
        [sys.executable, "-c", PARENT + script],
        env=inherited | {"PYTHONPATH": str(PROJECT)} | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    return done.stdout.splitlines()


def test_a_refusal_in_a_child_is_the_last_line_and_said_once():
    lines = run(
        """
last_words.listen()
for _ in range(2):  # as two ranks do
    subprocess.run(refuse, check=True)
raise RuntimeError("Engine core initialization failed. See root cause above.")
"""
    )
    assert lines[-2:] == [
        "RuntimeError: Engine core initialization failed. See root cause above.",
        LINE,
    ]
    assert lines.count(LINE) == 1


def test_a_refusal_in_a_forked_child_is_said_by_its_parent_alone():
    lines = run(
        f"""
last_words.listen()
if os.fork() == 0:
    exec({REFUSE!r})
    raise SystemExit  # runs what was registered for the exit, as os._exit does not
os.wait()
print("the child has ended", flush=True)
"""
    )
    assert lines == ["the child has ended", LINE]


def test_a_child_knows_that_its_parent_listens():
    lines = run(
        """
ask = [sys.executable, "-c", "from safe_offload.start import last_words as words; "
       "print(words.is_another_listening())"]
print(last_words.is_another_listening(), flush=True)
subprocess.run(ask, check=True)
last_words.listen()
print(last_words.is_another_listening(), flush=True)
subprocess.run(ask, check=True)
"""
    )
    assert lines == ["False", "False", "False", "True"]


def test_without_a_refusal_nothing_is_said():
    assert run("last_words.listen()\nsubprocess.run([sys.executable, '-c', ''])") == []


def test_a_refusal_in_the_process_itself_is_left_to_its_traceback():
    assert run(f"last_words.listen()\nexec({REFUSE!r})") == []


def test_a_second_engine_forgets_what_the_first_one_refused():
    lines = run(
        """
last_words.listen()
subprocess.run(refuse, check=True)
last_words.listen()
"""
    )
    assert lines == []


@pytest.mark.parametrize(
    "found",
    [
        "",
        "nonsense",
        "1 2 3",
        "999999999 5 pipe:[1]",  # no such process
        "{pid} {number} pipe:[1]",  # the same numbers, in another container
    ],
)
def test_what_is_not_the_pipe_is_not_written_to(found, tmp_path):
    with (tmp_path / "file").open("w+") as file:
        text = found.format(pid=os.getpid(), number=file.fileno())
        lines = run(REFUSE, SAFE_OFFLOAD_START_ERRORS=text)
        assert lines == []
        assert file.read() == ""
