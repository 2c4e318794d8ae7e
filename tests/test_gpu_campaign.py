"""`make gpu-campaign` without a GPU: steps that pass, fail, hang, die, and are cut off."""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from io import BufferedWriter
from pathlib import Path
from typing import Any

import pytest
from vllm.engine.arg_utils import EngineArgs

from safe_offload.commands.bench.engine import BenchOptions
from safe_offload.commands.doctor.vllm_facts import MARK
from tests.benchmarks import __main__ as benchmarks
from tests.gpu import campaign, shapes
from tests.gpu.campaign import STOP_S, Facts, Result, Results, ask_torch, read_end
from tests.gpu.steps import (
    BUDGET_S,
    FIGURES,
    ROOT,
    UNPACKED_S,
    Step,
    find_gpu_tests,
    first_steps,
    make_steps,
)
from tests.worker.waiting import wait_until

GPU = Facts({"GPU": "1 x stand-in", "Commit": "abc1234"}, no_gpu="", num_gpus=1)
HANGING_S = 0.01

TESTS = """
import pytest

def test_good(): pass

def test_bad(): assert 40 + 2 == 43, "the answer"

@pytest.mark.skip(reason="no cupy here")
def test_left_out(): pass
"""


class Budget:
    """Has some seconds left whenever it is asked."""

    def __init__(self, *left_s: float) -> None:
        self.lefts_s = list(left_s)

    def left_s(self) -> float:
        return STOP_S + (self.lefts_s.pop(0) if len(self.lefts_s) > 1 else self.lefts_s[0])


def python(name: str, code: str, estimate_s: float = 1.0, **options: Any) -> Step:
    """A step that is a piece of Python."""
    return Step(name, estimate_s, (sys.executable, "-c", code), **options)


def verdicts_of(
    steps: list[Step], folder: Path, *left_s: float, facts: Facts = GPU, small: bool = False
) -> dict[str, str]:
    """Run steps; returns what became of them."""
    results = Results(folder)
    budget: Any = Budget(*(left_s or (600.0,)))
    campaign.run(steps, facts, results, budget, lambda line: None, small=small)
    return {step.name: results.read(step).verdict for step in steps}


class SlowToHang(subprocess.Popen[bytes]):
    """Its time is not up before the last word of its command is in its log."""

    def __init__(self, command: Sequence[str], *, stdout: BufferedWriter, **options: Any) -> None:
        super().__init__(command, stdout=stdout, **options)
        self.log = Path(stdout.name)

    def wait(self, timeout: float | None = None) -> int:
        if timeout is not None and timeout < 2 * HANGING_S:
            wait_until(lambda: "so far" in self.log.read_text())
        return super().wait(timeout)


@pytest.fixture
def slow_to_hang(monkeypatch):
    monkeypatch.setattr(campaign.subprocess, "Popen", SlowToHang)


def test_every_step_runs_whatever_became_of_the_ones_before(tmp_path):
    steps = [
        python("good", "print('all is well')"),
        python("bad", "import sys; print('the reason'); sys.exit(3)"),
        python("dead", "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)"),
        Step("missing", 1.0, ("/nowhere/python",)),
        python("last", f"print(open({str(tmp_path / campaign.REPORT)!r}).read())"),
    ]
    assert list(verdicts_of(steps, tmp_path).values()) == [
        "passed",
        "FAILED (exit status 3)",
        "FAILED (ended by SIGSEGV)",
        "FAILED (could not be started: [Errno 2] No such file or directory: '/nowhere/python')",
        "passed",
    ]
    text = (tmp_path / campaign.REPORT).read_text()
    assert "2 of 5 steps passed" in text
    for words in ("the reason", "exit status 3", "abc1234"):
        assert words in text
    assert "| last | not run yet |" in (tmp_path / "last" / campaign.LOG).read_text()


def test_what_does_not_fit_waits_for_the_next_time(tmp_path):
    steps = [python("long", "pass", estimate_s=100.0), python("short", "pass", estimate_s=5.0)]
    assert verdicts_of(steps, tmp_path, 90.0) == {"long": "not run yet", "short": "passed"}
    before = (tmp_path / "short" / campaign.RESULT).read_bytes()
    assert verdicts_of(steps, tmp_path, 110.0) == {"long": "passed", "short": "passed"}
    assert (tmp_path / "short" / campaign.RESULT).read_bytes() == before, "it is not run again"


def test_what_was_cut_off_comes_after_the_others_and_not_more_than_twice(tmp_path, slow_to_hang):
    """Engines run in a session of their own, and some do not listen."""
    grandchild = "import signal, time; signal.signal(signal.SIGINT, signal.SIG_IGN);"
    grandchild += "print('grandchild', __import__('os').getpid(), flush=True); time.sleep(1000)"
    child = "import subprocess, sys, time\n"
    child += f"started = subprocess.Popen([sys.executable, '-c', {grandchild!r}],"
    child += "start_new_session=True, stdout=subprocess.PIPE, text=True)\n"
    child += "try:\n    print(started.stdout.readline(), 'so far', flush=True)\n"
    child += "    time.sleep(1000)\nfinally:\n    print('engines are down')"
    steps = [python("hanging", child, 0.0), python("next", "pass", 0.0)]
    cut_off = "cut off (did not end within 0 s)"
    assert verdicts_of(steps, tmp_path, HANGING_S, -1.0) == {
        "hanging": cut_off,
        "next": "not run yet",
    }
    log = tmp_path / "hanging" / campaign.LOG
    assert "engines are down" in log.read_text(), "it was asked to end first"
    pid = int(re.search(r"grandchild (\d+)", log.read_text()).group(1))
    wait_until(lambda: campaign.start_time_of(pid) is None)
    assert verdicts_of(steps, tmp_path, 600.0, HANGING_S) == {"hanging": cut_off, "next": "passed"}
    log.write_text("")
    verdicts_of(steps, tmp_path)
    assert log.read_text() == "", "not a third time"


def test_a_machine_that_goes_in_the_middle_of_a_step_leaves_a_folder_that_can_be_used(tmp_path):
    """And if only the campaign was killed, its step does not go on beside the next one."""
    script = f"""
import os, sys
from pathlib import Path
from tests import test_gpu_campaign as here
steps = [here.python("first", "pass"), here.python("second", {KILLS!r})]
here.verdicts_of(steps, Path(sys.argv[1]))
"""
    how: dict[str, Any] = {"cwd": ROOT, "env": {**os.environ, "PYTHONPATH": str(ROOT)}}
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path)], **how)
    assert done.returncode == -9
    pid = int((tmp_path / "second" / campaign.LOG).read_text().removeprefix("step "))
    wait_until(lambda: campaign.start_time_of(pid) is None)
    steps = [python("first", "raise SystemExit(1)"), python("second", "pass")]
    assert Results(tmp_path).read(steps[1]).verdict == "cut off (its machine went)"
    assert verdicts_of(steps, tmp_path) == {"first": "passed", "second": "passed"}


KILLS = "import os, signal, time; print('step', os.getpid(), flush=True);"
KILLS += "os.kill(os.getppid(), signal.SIGKILL); time.sleep(1000)"


def test_a_report_has_tables_counts_and_the_reasons_of_failures(tmp_path):
    file = tmp_path / "test_stand_in.py"
    file.write_text(TESTS)
    command = (sys.executable, "-m", "pytest", "-v", "-rs", f"--rootdir={tmp_path}",
               "-c", os.devnull, "-p", "no:cacheprovider", str(file))  # fmt: skip
    write = "import json, sys; json.dump({'text': 'a table'}, open(sys.argv[1], 'w'))"
    steps = [
        Step("tests", 1.0, command),
        Step("none", 1.0, (*command, "-k", "left_out")),
        Step("bench", 1.0, (sys.executable, "-c", write, "{folder}/figures.json")),
    ]
    verdicts = verdicts_of(steps, tmp_path / "results").values()
    assert [*verdicts] == ["FAILED (exit status 1)", "FAILED (every test was skipped)", "passed"]
    text = (tmp_path / "results" / campaign.REPORT).read_text()
    assert "1 failed, 1 passed, 1 skipped" in text
    assert "```text\na table\n```" in text
    assert "AssertionError: the answer" in text
    assert "no cupy here" in text
    assert "test_good PASSED" not in text


def test_what_the_machine_lacks_is_left_out_and_the_report_says_so(tmp_path):
    steps = [python("agents", "pass", lacks="no traces here"), python("one", "pass")]
    assert verdicts_of(steps, tmp_path) == {"agents": "left out (no traces here)", "one": "passed"}
    assert "| agents | left out (no traces here) |" in (tmp_path / campaign.REPORT).read_text()


def test_steps_that_need_more_gpus_than_there_are_do_not_run(tmp_path):
    steps = [python("two", "pass", num_gpus=2), python("one", "pass")]
    two = "left out (needs 2 GPUs, found 1)"
    assert verdicts_of(steps, tmp_path) == {"two": two, "one": "passed"}
    more = Facts(GPU.rows, "", num_gpus=2)
    assert verdicts_of(steps, tmp_path, facts=more) == {"two": "passed", "one": "passed"}


def test_without_a_gpu_nothing_runs_and_it_says_so(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(campaign, "find_facts", lambda python: Facts({}, "No GPU: none"))
    assert campaign.main(["--budget-s", "60", "--folder", str(tmp_path)]) == 1
    assert capsys.readouterr().out == "No GPU: none. Nothing was run.\n"
    assert not [*tmp_path.iterdir()]


def test_every_file_with_tests_of_a_gpu_is_a_step_and_names_are_folders():
    steps = make_steps(sys.executable)
    names = [step.name for step in steps]
    words = {word for step in steps for word in step.command}
    assert {str(file.relative_to(ROOT)) for file in find_gpu_tests()} < words
    assert len({*names}) == len(names)
    assert not [name for name in names if "/" in name]


def test_what_proves_most_fits_into_one_call_on_a_machine_that_has_nothing_yet(capsys):
    steps = first_steps(sys.executable)
    names = ["smoke", "llama", "return-gemma3", "return-mla"]
    assert [step.name for step in steps] == names
    sum_s = UNPACKED_S + sum(step.estimate_s for step in steps)
    assert sum_s <= BUDGET_S - STOP_S
    assert campaign.main(["--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1 + len(names)].split() == [
        names[-1],
        f"{steps[-1].estimate_s:.0f}",
        f"{sum_s:.0f}",
    ]
    assert len(lines) == 2 + len(make_steps(sys.executable))


@pytest.mark.parametrize("is_small", [False, True])
def test_every_command_of_a_benchmark_is_understood(is_small, monkeypatch):
    """The whole of it runs on a GPU only, where a typo costs minutes."""
    ran, engine_args = [], set[str]()
    for step in make_steps(sys.executable):
        words = [*(step.small if is_small else step.command)]
        if words[2] not in ("tests.benchmarks", "tests.gpu.small"):
            continue
        module = importlib.import_module(f"tests.benchmarks.{words[3]}")
        monkeypatch.setattr(module, "run_command", lambda arguments: ran.append(arguments) or 0)
        assert benchmarks.main(words[3:]) == 0
        engine_args |= {*getattr(ran[-1], "engine_args", ())}
    assert len(ran) > 10
    assert engine_args <= EngineArgs.__dataclass_fields__.keys()


@pytest.mark.nightly
@pytest.mark.parametrize("shape", shapes.SHAPES)
def test_vllm_can_make_every_shape_of_a_model(shape, tmp_path):
    """Out of tensors without memory."""
    model = shapes.take_shape(BenchOptions(), shape, tmp_path).model
    command = (sys.executable, "-m", "safe_offload.commands.doctor.probe", model)
    done = subprocess.run((*command, "--load-format", "dummy"), cwd=ROOT, capture_output=True)
    known = json.loads(done.stdout.splitlines()[-1].removeprefix(MARK.encode()))
    assert known["model"]["block_bytes"] > 0, known


@pytest.mark.engine
@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    "step",
    [
        step
        for step in make_steps(sys.executable)
        if "tests.gpu.small" in step.small and not step.lacks
    ],
    ids=lambda step: step.name,
)
def test_a_step_on_the_cpu(step, tmp_path):
    """All of them in one run: `make gpu-campaign SMALL=1`."""
    facts = Facts({"GPU": "none"}, "No GPU: none")
    found = verdicts_of([step], tmp_path, 3000.0, facts=facts, small=True)
    assert found == {step.name: "passed"}, read_end(tmp_path / step.name / campaign.LOG)[-3000:]
    assert f"## {step.name}" in (tmp_path / campaign.REPORT).read_text()


def test_make_test_gpu_collects_every_file_with_tests_of_a_gpu():
    """And no other: the whole tree takes half a minute, and tools that a GPU machine may lack."""
    (line,) = re.findall(r"^GPU_TESTS := (.+)$", (ROOT / "Makefile").read_text(), re.M)
    places = [ROOT / name for name in line.split()]
    named = {
        file
        for place in places
        for file in (place.glob("test_*.py") if place.is_dir() else [place])
    }
    assert named == set(find_gpu_tests())


def test_figures_name_first_where_a_peer_is_ahead(tmp_path):
    engine = {name: [2.1, 2.9] for name in ("first pass", "second pass", "own hit")}
    peer = engine | {"own hit": [1.0, 1.5], "first pass": [2.45, 2.5], "tokens": [1.0, 1.0]}
    samples = {"ours": engine | {"tokens": [9.0, 9.0]}, "SCO": peer}
    found = {"return-llama": {"scenario": "return", "samples": samples}}
    for name, content in found.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / FIGURES).write_text(json.dumps(content))
    part = tmp_path / "return-llama/figures-busy.json"
    part.write_text(json.dumps({"samples": {"ours": {"hit": [1.5]}, "OC": {"hit": [1.25]}}}))
    assert [*campaign.peers_ahead(campaign.read_figures(tmp_path))] == [
        "return-llama, own hit: SCO 1.2500 s, ours 2.5000 s",
        "return-llama-busy, hit: OC 1.2500 s, ours 1.5000 s",
    ]
    text = campaign.render([], Results(tmp_path))
    assert "another connector is ahead: 2.\n- return-llama, own hit" in text


# ---- the text ------------------------------------------------------------------------------------


def test_secrets_of_the_environment_and_the_home_folder_are_not_told(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_abcdefgh")
    monkeypatch.setenv("HOME", "/home/someone")
    step, results = Step("step", 1.0, ("run",)), Results(tmp_path)
    results.of(step).mkdir()
    log = results.of(step) / campaign.LOG
    log.write_text("\x1b[1;36mAuthorization: hf_abcdefgh, from /home/someone/.cache")
    results.write(step, Result("step", "FAILED (x)", command=("run", "hf_abcdefgh"), text="text"))
    text = campaign.render([step], results)
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
    monkeypatch.setattr(campaign, "PROBE_TIMEOUT_S", 0.5 if "sleep" in code else 600)
    _, problem = ask_torch((sys.executable, "-c", code))
    assert problem.startswith("No GPU")
    assert words in problem


def test_the_last_line_printed_is_the_path_of_the_report(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(campaign, "find_facts", lambda python: GPU)
    for code, status in (("pass", 0), ("raise SystemExit(1)", 1)):
        monkeypatch.setattr(campaign, "make_steps", lambda *_, code=code: [python("step", code)])
        folder = tmp_path / str(status)
        assert campaign.main(["--budget-s", "600", "--folder", str(folder)]) == status
        path = Path(capsys.readouterr().out.splitlines()[-1])
        assert path.is_relative_to(folder)
        assert "# safe_offload on a GPU" in path.read_text()
