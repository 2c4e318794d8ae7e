"""`make gpu-report` without a GPU: parts that pass, fail, hang and die, and real figures."""

from __future__ import annotations

import os
import re
import sys
import time
from pathlib import Path

import pytest

from tests.benchmarks.__main__ import main as benchmark
from tests.gpu import report, report_text
from tests.gpu.report import Part, descendants, find_gpu_tests, make_parts, run
from tests.gpu.report_facts import Facts, ask_torch, find_facts
from tests.gpu.report_tests import TestCase, read_test_cases
from tests.gpu.report_text import REPORT_CHARS_MAX, Done, Result, read_end, render

GPU = Facts((("GPU", "1 x stand-in"), ("Commit", "abc1234")), no_gpu="")
NO_GPU = Facts((("GPU", "none"),), no_gpu="No GPU: torch 2.13.0 sees none")

TESTS = """
import pytest

def test_good(): pass

def test_bad(): assert 40 + 2 == 43, "the answer"

@pytest.mark.skip(reason="no cupy here")
def test_left_out(): pass

def test_lethal():
    import os, signal
    if {is_lethal}: os.kill(os.getpid(), signal.SIGKILL)
"""


def python(name: str, code: str, timeout_s: float = 60.0, **options: object) -> Part:
    """A part that is a piece of Python."""
    return Part(name, (sys.executable, "-c", code), timeout_s, **options)


def pytest_part(folder: Path, *, is_lethal: bool) -> Part:
    """A part that runs `TESTS`."""
    file = folder / "test_stand_in.py"
    file.write_text(TESTS.format(is_lethal=is_lethal))
    junit = folder / "junit.xml"
    command = (sys.executable, "-m", "pytest", "-v", f"--junitxml={junit}", f"--rootdir={folder}",
               "-c", os.devnull, "-p", "no:cacheprovider", str(file))  # fmt: skip
    return Part("tests", command, 60.0, junit=junit)


def report_of(parts: list[Part], facts: Facts, folder: Path) -> tuple[list[Result], str]:
    """Run parts; returns what became of them, and the report."""
    results = run(parts, facts, folder, lambda line: None)
    return results, (folder / report.REPORT).read_text()


# ---- parts ---------------------------------------------------------------------------------------


def test_every_part_runs_whatever_became_of_the_ones_before(tmp_path, monkeypatch):
    monkeypatch.setattr(report, "STOP_S", 0.5)
    parts = [
        python("good", "print('all is well')"),
        python("bad", "import sys; print('the reason'); sys.exit(3)"),
        python("hanging", "import time; print('so far', flush=True); time.sleep(1000)", 4.0),
        python("dead", "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)"),
        Part("missing", ("/nowhere/python",), 1.0),
        python("last", "pass"),
    ]
    results, text = report_of(parts, GPU, tmp_path)
    assert [result.verdict for result in results] == [
        "passed",
        "FAILED (exit status 3)",
        "FAILED (did not end within 4 s)",
        "FAILED (ended by SIGSEGV)",
        "FAILED (could not be started: [Errno 2] No such file or directory: '/nowhere/python')",
        "passed",
    ]
    assert "2 of 6 parts passed" in text
    for words in ("all is well", "the reason", "so far", "exit status 3", "abc1234"):
        assert words in text


def test_what_a_hanging_part_has_started_ends_with_it(tmp_path, monkeypatch):
    """Engines run in a session of their own, and some do not listen."""
    monkeypatch.setattr(report, "STOP_S", 0.5)
    grandchild = "import signal, time; signal.signal(signal.SIGINT, signal.SIG_IGN);"
    grandchild += "print('grandchild', __import__('os').getpid(), flush=True); time.sleep(1000)"
    child = "import os, signal, subprocess, sys, time;"
    child += "signal.signal(signal.SIGINT, lambda *_: os._exit(1));"
    child += "subprocess.Popen([sys.executable, '-c', sys.argv[1]], start_new_session=True);"
    child += "time.sleep(1000)"
    command = (sys.executable, "-c", child, grandchild)
    report_of([Part("hanging", command, 6.0)], GPU, tmp_path)
    pid = int(re.search(r"grandchild (\d+)", (tmp_path / "hanging.log").read_text()).group(1))
    deadline_s = time.monotonic() + 10
    while report.start_time_of(pid) is not None:
        assert time.monotonic() < deadline_s, "the grandchild is still there"
        time.sleep(0.05)
    assert pid not in descendants(os.getpid())


def test_a_hanging_part_may_end_its_engines_itself(tmp_path):
    code = "import time\ntry:\n    time.sleep(1000)\nfinally:\n    print('engines are down')"
    _, text = report_of([python("hanging", code, 4.0)], GPU, tmp_path)
    assert "engines are down" in text


def test_without_a_gpu_nothing_is_measured_and_nothing_passes(tmp_path):
    parts = [python("bench", "raise SystemExit('was run')", needs_gpu=True)]
    (result,), text = report_of(parts, NO_GPU, tmp_path)
    assert result.done is Done.NOT_RUN
    assert "No GPU: torch 2.13.0 sees none" in text
    assert "was run" not in text.partition("commands")[0]


def test_the_report_is_there_before_the_last_part_has_ended(tmp_path):
    code = f"print(open({str(tmp_path / report.REPORT)!r}).read())"
    report_of([python("first", "pass"), python("second", code)], GPU, tmp_path)
    assert "| second | not run (its turn has not come) |" in (tmp_path / "second.log").read_text()


# ---- tests ---------------------------------------------------------------------------------------


def test_a_report_says_which_tests_failed_and_which_were_skipped_and_why(tmp_path):
    (result,), text = report_of([pytest_part(tmp_path, is_lethal=False)], GPU, tmp_path)
    assert {test.name.partition("::")[2]: test.outcome for test in result.tests} == {
        "test_good": "passed",
        "test_bad": "failed",
        "test_left_out": "skipped",
        "test_lethal": "passed",
    }
    assert "| tests | FAILED (exit status 1) | 2 | 1 | 1 |" in text
    assert "AssertionError: the answer" in text
    assert "- 1 tests: no cupy here" in text


def test_what_was_tested_before_a_crash_is_known(tmp_path):
    """No XML is written then."""
    (result,), text = report_of([pytest_part(tmp_path, is_lethal=True)], GPU, tmp_path)
    assert [(test.name.partition("::")[2], test.outcome) for test in result.tests] == [
        ("test_good", "passed"),
        ("test_bad", "failed"),
        ("test_left_out", "skipped"),
        ("test_lethal", "failed"),
    ]
    assert "the run ended or was ended in this test" in text


def test_no_tests_are_no_error(tmp_path):
    (tmp_path / "log").write_text("ModuleNotFoundError: No module named 'torch'\n")
    assert read_test_cases(tmp_path / "missing.xml", tmp_path / "log") == []


def test_tests_that_were_all_skipped_have_not_passed(tmp_path):
    part = pytest_part(tmp_path, is_lethal=False)
    part = Part("tests", (*part.command, "-k", "left_out"), 60.0, junit=part.junit)
    (result,), _ = report_of([part], GPU, tmp_path)
    assert result.verdict == "not run (every test was skipped: no cupy here)"


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


# ---- figures -------------------------------------------------------------------------------------


def test_copies_are_told_as_shares_of_the_limit(tmp_path):
    """Real JSON; the device is another one."""
    figures = tmp_path / "transfer.json"
    sizes = ["--range-bytes", "1048576", "--blocks", "16", "--layers", "1", "--rounds", "2"]
    assert benchmark(["copies", "--device", "cpu", *sizes, "--json", str(figures)]) == 0
    text = render(GPU, [Result("copies", ("x",), Done.PASSED, "", figures=figures)])
    assert re.search(r"\| store \| 1,048,576 \| [\d.]+ GB/s \|.* [\d.]+ \(lowest", text)
    assert "| loop / limit | safe_offload / limit |" in text
    assert "- issue to awaited: " in text


def test_layouts_are_told_as_ratios(tmp_path):
    figures = tmp_path / "layouts.json"
    sizes = ["--copies-only", "--device", "cpu", "--blocks", "2", "--copy-rounds", "2"]
    assert benchmark(["layouts", *sizes, "--json", str(figures)]) == 0
    text = render(GPU, [Result("layouts", ("x",), Done.PASSED, "", figures=figures)])
    for traffic in ("store", "load", "both"):
        assert re.search(rf"- copies, {traffic}: [\d.]+ \([\d.]+ to [\d.]+\)", text)
    assert "- answers that differ between the engines: 0" in text


def test_the_engine_is_told_with_its_logs(tmp_path):
    import json

    from safe_offload.commands.bench.engine_report import make_report
    from tests.commands.bench.test_engine_report import make_found

    figures, logs = tmp_path / "engine.json", tmp_path / "logs"
    figures.write_text(json.dumps(make_report(make_found()).to_json()))
    logs.mkdir()
    (logs / "SafeCPUOffloadConnector.log").write_text(
        "\x1b[1;36m(Worker pid=7)\x1b[0;0m INFO 11-22 03:11:47 [bridge.py:128] Rank 0 keeps it.\n"
        "(Worker pid=7) INFO 11-22 03:11:47 [gpu_worker.py:66] loaded\n"
    )
    result = Result("bench engine", ("x",), Done.PASSED, "", figures=figures, engine_logs=logs)
    text = render(GPU, [Result("x", ("x",)), Result(**vars(result) | {"log": figures})])
    assert "second pass: 20.0 times faster with the connector" in text
    own = text.partition("what the connector logged")[2].partition("</details>")[0]
    assert "Rank 0 keeps it." in own
    assert "gpu_worker" not in own
    assert "\x1b" not in text


def test_a_benchmark_that_was_cut_off_has_no_figures(tmp_path):
    (tmp_path / "transfer.json").write_text('{"measurements": [')
    result = Result("copies", ("x",), Done.FAILED, "x", figures=tmp_path / "transfer.json")
    assert "limit of the hardware" not in render(GPU, [result])


# ---- the text ------------------------------------------------------------------------------------


def test_a_report_fits_into_an_issue_whatever_there_is_to_tell(tmp_path):
    log = tmp_path / "part.log"
    log.write_text("word\n" * 100_000 + "the end")
    tests = [TestCase(f"test_{'z' * 300}{i}", "failed", "why\n" * 5000) for i in range(900)]
    results = [
        Result(f"part {i}", ("x" * 1000,), Done.FAILED, "y" * 9000, log=log, tests=tests)
        for i in range(12)
    ]
    text = render(GPU, results)
    assert len(text) <= REPORT_CHARS_MAX
    assert text.count("the end") == 12
    assert re.search(r"- and 10,?\d+ more", text)
    assert text.count("<details>") == text.count("</details>")


def test_secrets_of_the_environment_and_the_home_folder_are_not_told(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_abcdefgh")
    monkeypatch.setenv("HOME", "/home/someone")
    log = tmp_path / "part.log"
    log.write_text("Authorization: hf_abcdefgh, from /home/someone/.cache")
    text = render(GPU, [Result("part", ("run", "hf_abcdefgh"), Done.FAILED, "x", log=log)])
    assert "abcdefgh" not in text
    assert "someone" not in text
    assert "from ~/.cache" in text


def test_a_log_cannot_break_out_of_its_fence(tmp_path):
    log = tmp_path / "part.log"
    log.write_text("```\n# not a heading\n````")
    text = render(GPU, [Result("part", ("x",), Done.FAILED, "x", log=log)])
    assert "`````text\n```\n# not a heading\n````\n`````\n" in text


def test_only_the_end_of_a_huge_log_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr(report_text, "READ_CHARS_MAX", 100)
    log = tmp_path / "part.log"
    log.write_text("a" * 1000 + "b" * 100)
    assert read_end(log) == "b" * 100


# ---- the machine ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("import torch_that_is_not_there", "No module named 'torch_that_is_not_there'"),
        ("import os; os.abort()", "exit status -6"),
        ("import time; time.sleep(1000)", "did not find out within 0.5 s"),
        ('print(\'{"torch": "2.13.0", "is_available": false}\')', "torch 2.13.0 sees none"),
    ],
)
def test_a_torch_that_is_missing_or_dies_or_hangs_is_no_gpu(code, words, monkeypatch):
    monkeypatch.setattr("tests.gpu.report_facts.PROBE_TIMEOUT_S", 0.5 if "sleep" in code else 60)
    _, problem = ask_torch((sys.executable, "-c", code))
    assert problem.startswith("No GPU")
    assert words in problem


def test_the_facts_name_commit_packages_and_system():
    rows = dict(find_facts(sys.executable).rows)
    assert re.match(r"[0-9a-f]{7}|unknown", rows["Commit"])
    assert "torch 2." in rows["Packages"]
    assert "Linux" in rows["System"]
    assert rows["GPU"]


def test_the_last_line_printed_is_the_path_of_the_report(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(report, "find_facts", lambda python: GPU)
    for code, status in (("pass", 0), ("raise SystemExit(1)", 1)):
        monkeypatch.setattr(report, "make_parts", lambda *_, code=code: [python("part", code)])
        folder = tmp_path / str(status)
        assert report.main(["--model", "some/model", "--output", str(folder)]) == status
        path = Path(capsys.readouterr().out.splitlines()[-1])
        assert path.is_relative_to(folder)
        assert "# GPU report of safe_offload" in path.read_text()
