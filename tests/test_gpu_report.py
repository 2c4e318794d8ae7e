"""`make gpu-report` without a GPU: parts that pass, fail, hang and die."""

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from io import BufferedWriter
from pathlib import Path
from typing import Any

import pytest

from tests.gpu import report
from tests.gpu.report import Facts, Part, Result, ask_torch, find_gpu_tests, make_parts
from tests.worker.waiting import wait_until

GPU = Facts({"GPU": "1 x stand-in", "Commit": "abc1234"}, no_gpu="")
HANGING_S = 0.01

TESTS = """
import pytest

def test_good(): pass

def test_bad(): assert 40 + 2 == 43, "the answer"

@pytest.mark.skip(reason="no cupy here")
def test_left_out(): pass
"""


def python(name: str, code: str, timeout_s: float = 600.0, **options: object) -> Part:
    """A part that is a piece of Python."""
    return Part(name, (sys.executable, "-c", code), timeout_s, **options)


def report_of(parts: list[Part], facts: Facts, folder: Path) -> tuple[list[str], str]:
    """Run parts; returns what became of them, and the report."""
    results = report.run(parts, facts, folder, lambda line: None)
    return [result.verdict for result in results], (folder / report.REPORT).read_text()


class SlowToHang(subprocess.Popen[bytes]):
    """Its time is not up before the last word of its command is in its log."""

    def __init__(self, command: Sequence[str], *, stdout: BufferedWriter, **options: Any) -> None:
        super().__init__(command, stdout=stdout, **options)
        self.log = Path(stdout.name)

    def wait(self, timeout: float | None = None) -> int:
        if timeout == HANGING_S:
            wait_until(lambda: "so far" in self.log.read_text())
        return super().wait(timeout)


@pytest.fixture
def slow_to_hang(monkeypatch):
    monkeypatch.setattr(report.subprocess, "Popen", SlowToHang)


def test_every_part_runs_whatever_became_of_the_ones_before(tmp_path, slow_to_hang):
    parts = [
        python("good", "print('all is well')"),
        python("bad", "import sys; print('the reason'); sys.exit(3)"),
        python("hanging", "import time; print('so far', flush=True); time.sleep(1000)", HANGING_S),
        python("dead", "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)"),
        Part("missing", ("/nowhere/python",), 1.0),
        python("last", f"print(open({str(tmp_path / report.REPORT)!r}).read())"),
    ]
    verdicts, text = report_of(parts, GPU, tmp_path)
    assert verdicts == [
        "passed",
        "FAILED (exit status 3)",
        "FAILED (did not end within 0.01 s)",
        "FAILED (ended by SIGSEGV)",
        "FAILED (could not be started: [Errno 2] No such file or directory: '/nowhere/python')",
        "passed",
    ]
    assert "2 of 6 parts passed" in text
    for words in ("all is well", "the reason", "so far", "exit status 3", "abc1234"):
        assert words in text
    assert "| last | not run (its turn has not come) |" in (tmp_path / "last.log").read_text()


def test_what_a_hanging_part_has_started_ends_with_it(tmp_path, slow_to_hang):
    """Engines run in a session of their own, and some do not listen."""
    grandchild = "import signal, time; signal.signal(signal.SIGINT, signal.SIG_IGN);"
    grandchild += "print('grandchild', __import__('os').getpid(), flush=True); time.sleep(1000)"
    child = "import subprocess, sys, time\n"
    child += "started = subprocess.Popen([sys.executable, '-c', sys.argv[1]],"
    child += "start_new_session=True, stdout=subprocess.PIPE, text=True)\n"
    child += "try:\n    print(started.stdout.readline(), 'so far', flush=True)\n"
    child += "    time.sleep(1000)\nfinally:\n    print('engines are down')"
    command = (sys.executable, "-c", child, grandchild)
    _, text = report_of([Part("hanging", command, HANGING_S)], GPU, tmp_path)
    assert "engines are down" in text, "it was asked to end first"
    pid = int(re.search(r"grandchild (\d+)", (tmp_path / "hanging.log").read_text()).group(1))
    wait_until(lambda: report.start_time_of(pid) is None)
    assert pid not in report.descendants(os.getpid())


def test_a_report_says_which_tests_failed_and_which_were_skipped_and_why(tmp_path):
    file = tmp_path / "test_stand_in.py"
    file.write_text(TESTS)
    command = (sys.executable, "-m", "pytest", "-v", "-rs", f"--rootdir={tmp_path}",
               "-c", os.devnull, "-p", "no:cacheprovider", str(file))  # fmt: skip
    parts = [Part("tests", command, 600.0), Part("none", (*command, "-k", "left_out"), 600.0)]
    verdicts, text = report_of(parts, GPU, tmp_path)
    assert verdicts == ["FAILED (exit status 1)", "not run (every test was skipped)"]
    assert "| tests | FAILED (exit status 1) | 1 failed, 1 passed, 1 skipped |" in text
    assert "AssertionError: the answer" in text
    assert "no cupy here" in text
    assert "test_good PASSED" not in text


def test_every_file_with_tests_of_a_gpu_is_a_part(tmp_path):
    names = {str(file.relative_to(report.ROOT)) for file in find_gpu_tests()}
    assert "tests/benchmarks/test_transfer.py" in names
    assert {file.name for file in (report.ROOT / "tests/gpu").glob("test_*.py")} <= {
        Path(name).name for name in names
    }
    parts = make_parts(tmp_path, "some/model", ["--rounds", "1"], 1.0)
    assert names < {part.name for part in parts}
    assert [part.name for part in parts[-3:]] == ["copies", "bench engine", "layouts"]
    assert all(part.command[-2:] == ("--rounds", "1") for part in parts[-2:])


def test_make_test_gpu_collects_every_file_with_tests_of_a_gpu():
    """And no other: the whole tree takes half a minute, and tools that a GPU machine may lack."""
    (line,) = re.findall(r"^GPU_TESTS := (.+)$", (report.ROOT / "Makefile").read_text(), re.M)
    places = [report.ROOT / name for name in line.split()]
    named = {
        file
        for place in places
        for file in (place.glob("test_*.py") if place.is_dir() else [place])
    }
    assert named == set(find_gpu_tests())


# ---- the text ------------------------------------------------------------------------------------


def test_secrets_of_the_environment_and_the_home_folder_are_not_told(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_abcdefgh")
    monkeypatch.setenv("HOME", "/home/someone")
    log = tmp_path / "part.log"
    log.write_text("\x1b[1;36mAuthorization: hf_abcdefgh, from /home/someone/.cache")
    part = Part("part", ("run", "hf_abcdefgh"), 1.0)
    text = report.render(GPU, [Result(part, "FAILED (x)", logs=(log,))])
    for hidden in ("abcdefgh", "someone", "\x1b"):
        assert hidden not in text
    assert "from ~/.cache" in text


# ---- the machine ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("import torch_that_is_not_there", "No module named 'torch_that_is_not_there'"),
        ("import os; os.abort()", "exit status -6"),
        ("import time; time.sleep(1000)", "did not find out within 0.5 s"),
        ('print(\'{"torch": "2.13.0", "gpus": []}\')', "torch 2.13.0 sees none"),
    ],
)
def test_a_torch_that_is_missing_or_dies_or_hangs_is_no_gpu(code, words, monkeypatch):
    monkeypatch.setattr(report, "PROBE_TIMEOUT_S", 0.5 if "sleep" in code else 600)
    _, problem = ask_torch((sys.executable, "-c", code))
    assert problem.startswith("No GPU")
    assert words in problem


def test_the_last_line_printed_is_the_path_of_the_report(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(report, "find_facts", lambda python: GPU)
    for code, status in (("pass", 0), ("raise SystemExit(1)", 1)):
        monkeypatch.setattr(report, "make_parts", lambda *_, code=code: [python("part", code)])
        folder = tmp_path / str(status)
        assert report.main(["--model", "some/model", "--output", str(folder)]) == status
        path = Path(capsys.readouterr().out.splitlines()[-1])
        assert path.is_relative_to(folder)
        assert "# GPU report of safe_offload" in path.read_text()
