"""`make gpu-campaign` without a GPU: steps that pass, fail, hang, die, and are cut off."""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from vllm.engine.arg_utils import EngineArgs

from safe_offload.commands.bench.engine import BenchOptions
from safe_offload.commands.doctor.vllm_facts import MARK
from tests import stopping
from tests.benchmarks import __main__ as benchmarks
from tests.benchmarks import agents_engine
from tests.gpu import campaign, pictures, shapes
from tests.gpu.campaign import STOP_S, ask_torch, read_log
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

TESTS = """
import pytest

def test_good(): pass

def test_bad(): assert 40 + 2 == 43, "the answer"

@pytest.mark.skip(reason="no cupy here")
def test_left_out(): pass
"""
SHORTER = {"users": ("--users", "2", "3", "--turns", "2", "--rounds", "1")}
"""Than for a picture."""


def python(name: str, code: str, estimate_s: float = 0.0, **options: Any) -> Step:
    """A step that is a piece of Python."""
    return Step(name, estimate_s, (sys.executable, "-c", code), **options)


def verdicts_of(
    steps: list[Step],
    folder: Path,
    left_s: float = 600.0,
    num_gpus: int = 1,
    *,
    small: bool = False,
) -> dict[str, str]:
    """Run steps; returns what became of them."""
    campaign.run(steps, folder, time.monotonic() + STOP_S + left_s, num_gpus, small=small)
    return {step.name: campaign.verdict_of(folder, step) for step in steps}


def report_of(steps: list[Step], folder: Path) -> str:
    return campaign.render(steps, folder, {"Commit": "abc1234"})


def test_every_step_runs_whatever_became_of_the_ones_before(tmp_path):
    steps = [
        python("good", "print('all is well')"),
        python("bad", "import sys; print('the reason'); sys.exit(3)"),
        python("dead", "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)"),
        Step("missing", 0.0, ("/nowhere/python",)),
        python("long", "pass", estimate_s=1000.0),
        python("two", "pass", num_gpus=2),
        python("agents", "pass", lacks="no traces here"),
        python("last", "pass"),
    ]
    assert list(verdicts_of(steps, tmp_path).values()) == [
        "passed",
        "FAILED (exit status 3)",
        "FAILED (SIGSEGV)",
        "FAILED (could not be started: [Errno 2] No such file or directory: '/nowhere/python')",
        *["not run yet"] * 3,
        "passed",
    ]
    text = report_of(steps, tmp_path)
    assert "2 of 8 steps passed" in text
    for words in ("the reason", "exit status 3", "abc1234", "| long | not run yet |"):
        assert words in text
    (tmp_path / "good" / campaign.LOG).write_text("")
    found = verdicts_of(steps, tmp_path, 2000.0, num_gpus=2)
    assert (found["long"], found["two"], found["agents"]) == ("passed", "passed", "not run yet")
    assert not (tmp_path / "good" / campaign.LOG).read_text(), "it is not run again"


def test_what_a_step_that_is_cut_off_has_started_ends_and_it_is_run_again(tmp_path):
    """Engines run in a session of their own, and some do not listen."""
    grandchild = "import signal, time; signal.signal(signal.SIGINT, signal.SIG_IGN);"
    grandchild += "print('grandchild', __import__('os').getpid(), flush=True); time.sleep(1000)"
    child = "import subprocess, sys, time\n"
    child += f"started = subprocess.Popen([sys.executable, '-c', {grandchild!r}],"
    child += "start_new_session=True, stdout=subprocess.PIPE, text=True)\n"
    child += "try:\n    print(started.stdout.readline(), 'so far', flush=True)\n"
    child += "    time.sleep(1000)\nfinally:\n    print('engines are down')"
    assert verdicts_of([python("hanging", child)], tmp_path, 5.0) == {"hanging": "not run yet"}
    log = (tmp_path / "hanging" / campaign.LOG).read_text()
    assert "engines are down" in log, "it was asked to end first"
    assert not stopping.is_running(int(re.search(r"grandchild (\d+)", log).group(1)))
    assert verdicts_of([python("hanging", "pass")], tmp_path) == {"hanging": "passed"}


def test_a_report_has_tables_counts_and_the_reasons_of_failures(tmp_path):
    file = tmp_path / "test_stand_in.py"
    file.write_text(TESTS)
    program = (sys.executable, "-m", "pytest", "-v", "-rs", "-c", os.devnull)
    alone = (f"--rootdir={tmp_path}", "-p", "no:cacheprovider", str(file))
    command = ("env", "PYTEST_DISABLE_PLUGIN_AUTOLOAD=1", *program, *alone)
    write = "import json, sys; json.dump({'text': 'a table'}, open(sys.argv[1], 'w'))"
    steps = [
        Step("tests", 1.0, command),
        Step("none", 1.0, (*command, "-k", "left_out")),
        Step("bench", 1.0, (sys.executable, "-c", write, "{folder}/figures.json")),
    ]
    verdicts = verdicts_of(steps, tmp_path / "results").values()
    assert [*verdicts] == ["FAILED (exit status 1)", "FAILED (every test was skipped)", "passed"]
    text = report_of(steps, tmp_path / "results")
    expected = "1 failed, 1 passed, 1 skipped", "```text\na table\n```", "no cupy here"
    for words in (*expected, "AssertionError: the answer"):
        assert words in text
    assert "test_good PASSED" not in text


def test_every_file_with_tests_of_a_gpu_is_a_step_and_collected_by_make_test_gpu():
    """And no other: the whole tree takes half a minute, and tools that a GPU machine may lack."""
    steps, files = make_steps(sys.executable), set(find_gpu_tests())
    names = [step.name for step in steps]
    words = {word for step in steps for word in step.command}
    assert {str(file.relative_to(ROOT)) for file in files} < words
    assert len({*names}) == len(names)
    assert not [name for name in names if "/" in name]
    (line,) = re.findall(r"^GPU_TESTS := (.+)$", (ROOT / "Makefile").read_text(), re.M)
    places = [ROOT / name for name in line.split()]
    named = [place.glob("test_*.py") if place.is_dir() else [place] for place in places]
    assert {file for some in named for file in some} == files


def test_what_proves_most_fits_into_one_call_on_a_machine_that_has_nothing_yet(capsys):
    steps = first_steps(sys.executable)
    sum_s = UNPACKED_S + sum(step.estimate_s for step in steps)
    assert sum_s <= BUDGET_S - STOP_S
    assert campaign.main(["--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[2:6]] == [step.name for step in steps]
    assert lines[5].split()[-1] == f"{sum_s:.0f}"
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
    step = replace(step, small=(*step.small, *SHORTER.get(step.name, ())))
    found = verdicts_of([step], tmp_path, 3000.0, num_gpus=0, small=True)
    assert found == {step.name: "passed"}, read_log(tmp_path / step.name / campaign.LOG)[-3000:]


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
    text = report_of([], tmp_path)
    assert "another connector is ahead: 2.\n- return-llama, own hit" in text


def test_secrets_of_the_environment_and_the_home_folder_are_not_told(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_abcdefgh")
    monkeypatch.setenv("HOME", "/home/someone")
    log = "Authorization: hf_abcdefgh, from /home/someone/.cache"
    assert campaign.hide_secrets(log) == "Authorization: ***, from ~/.cache"


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("import os; os.abort()", "exit status -6"),
        ("import time; time.sleep(1000)", "did not find out within 0.5 s"),
    ],
)
def test_a_torch_that_dies_or_hangs_is_no_gpu(code, words, monkeypatch):
    monkeypatch.setattr(campaign, "PROBE_TIMEOUT_S", 0.5 if "sleep" in code else 600)
    _, problem = ask_torch((sys.executable, "-c", code))
    assert problem.startswith("No GPU")
    assert words in problem


def test_the_last_line_printed_is_the_path_of_the_report(tmp_path, monkeypatch, capsys):
    for gpus, code, status in ((["a"], "raise SystemExit(1)", 1), ([], "", 1)):
        monkeypatch.setattr(campaign, "find_facts", lambda gpus=gpus: ({"GPU": str(gpus)}, gpus))
        monkeypatch.setattr(campaign, "make_steps", lambda *_, code=code: [python("step", code)])
        folder = tmp_path / f"{len(gpus)}{status}"
        assert campaign.main(["--budget-s", "600", "--folder", str(folder)]) == status
        last = capsys.readouterr().out.splitlines()[-1]
        if gpus:
            assert "# safe_offload on a GPU" in Path(last).read_text()
        else:
            assert (last, folder.exists()) == ("Nothing was run.", False)


def test_pictures_have_every_engine_and_name_those_that_did_not_start(tmp_path):
    machine = {"date": "2026-11-29 10:00 UTC", "load_average_before": [3.0, 2.0, 1.0]}
    tokens = {name: [100.0] for name in agents_engine.TOKENS} | {"requests": [4.0]}
    figures = {"second pass": [0.25, 0.5], "own hit": [0.125], "first token, mean": [1.0]}
    samples = {engine: {**figures, **tokens} for engine in ("none", "ours", "OC")}
    part = {
        "samples": samples,
        "machine": machine,
        "options": {"turns": 4, "rounds": 2, "num_gpu_blocks": 50, "block_size": 32},
        "requests_per_s": {"none": [4.0, 1.0], "ours": [2.0, 2.0], "OC": [2.0]},
    }
    steps = {"lengths-1000": part, "lengths-16000": part, "users-4": part, "llama-busy": part}
    files = [*pictures.draw(steps, "one GPU", tmp_path)]
    assert [file.name for file in files] == ["lengths.svg", "users.svg"]
    points = pictures.points_of(steps, "lengths")
    ranges = ([0.125, 0.125], [0.125, 0.125])
    found = pictures.line(points, "OC", "second pass")
    assert found == ([1000, 16_000], [0.375, 0.375], ranges)
    assert not pictures.line(points, "SCO", "second pass").numbers
    absent = "SimpleCPUOffloadConnector does not start"
    where = "one GPU, load average 3; 2026-11-29; median and range of 2 rounds"
    for file in files:
        for words in ("safe_offload", "OffloadingConnector", where, absent):
            assert f">{words}<" in file.read_text()
    sizes = "4 prompts of 75 tokens on average; the KV pool holds 1,600 tokens"
    users = files[1].read_text()
    assert f">each user sends {sizes}; x: safe_offload / no connector<" in users
    assert ">0.5 to 2.0 x<" in users
