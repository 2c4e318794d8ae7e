"""`make venv` on machines where it cannot work: its last line says what is wrong and what to do.

`make venv` itself runs before all tests, with a pip that works.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests import ci_script

ROOT = Path(__file__).parents[1]
GET_SERVERS = ROOT / ".ci" / "get-servers"


make_venv = ci_script.load("make_venv")


def last_line_of_set_up(venv: Path, python: str = sys.executable, **environment: str) -> str:
    """Run the set-up, which has to fail, and return the last line that it prints."""
    found = subprocess.run(
        [ROOT / ".ci/make-venv", venv, python, ".ci/requirements-cpu.txt", "2.13.0", "0.32.0"],
        cwd=ROOT,
        env={**os.environ, "INSTALLER": "pip", "TORCH": "pypi", **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert found.returncode == 1, found.stdout
    assert "Traceback" not in found.stdout
    return found.stdout.splitlines()[-1]


def an_interpreter(folder: Path, *, fits: bool, venv: bool = True) -> str:
    """Write a program that answers what the set-up asks an interpreter."""
    program = folder / "another-python"
    program.write_text(
        "#!/bin/sh\n"
        f'case "$*" in *version_info*) exit {int(not fits)};; *ensurepip*) exit {int(not venv)};;\n'
        "*--version*) echo Python of another kind;; esac\n"
    )
    program.chmod(0o755)
    return str(program)


def test_a_python_that_does_not_exist_is_named(tmp_path):
    said = last_line_of_set_up(tmp_path / "venv", "/nonexist")
    assert said.startswith("make venv: PYTHON=/nonexist does not exist")
    assert "leave PYTHON out" in said


@pytest.mark.parametrize(
    ("fits", "words"),
    [
        (False, "is Python of another kind; it has to be Python 3.11 to 3.13"),
        (True, "cannot make virtual environments. Debian: apt-get install python3-venv"),
    ],
)
def test_a_python_that_is_too_old_or_has_no_venv_is_named(tmp_path, fits, words):
    another = an_interpreter(tmp_path, fits=fits, venv=False)
    assert words in last_line_of_set_up(tmp_path / "venv", another)


@pytest.mark.nightly
def test_an_index_without_the_packages_is_told(tmp_path):
    said = last_line_of_set_up(tmp_path / "venv", PIP_NO_INDEX="1", PIP_FIND_LINKS=str(tmp_path))
    assert said.startswith("make venv: the package index lacks a wheel for this Python or machine")


def test_words_that_are_not_known_are_refused(tmp_path):
    assert "write INSTALLER=pip" in last_line_of_set_up(tmp_path / "venv", INSTALLER="conda")
    assert "TORCH=cuda is not known" in make_venv_error(
        lambda: make_venv.torch_source(Pip(), "cuda")
    )
    assert not (tmp_path / "venv").exists()


@pytest.mark.parametrize(
    ("wanted", "reachable", "source"),
    [("auto", True, ["--index-url", "…"]), ("auto", False, []), ("pypi", True, [])],
)
def test_torch_for_the_cpu_is_taken_where_its_index_can_be_reached(
    wanted, reachable, source, monkeypatch
):
    monkeypatch.setattr(make_venv, "_can_reach", lambda _: reachable)
    assert make_venv.torch_source(Pip(), wanted) == source


def test_torch_for_the_cpu_that_is_asked_for_and_cannot_be_had_ends_the_set_up(monkeypatch):
    monkeypatch.setattr(make_venv, "_can_reach", lambda _: False)
    assert "Write TORCH=pypi" in make_venv_error(lambda: make_venv.torch_source(Pip(), "cpu"))


class Pip:
    cpu_torch = ("--index-url", "…")


def make_venv_error(call) -> str:
    with pytest.raises(make_venv.SetUpError) as raised:
        call()
    return str(raised.value)


def test_a_disk_without_room_is_told_before_anything_is_downloaded(tmp_path, monkeypatch, capsys):
    usage = shutil.disk_usage(tmp_path)._replace(free=300 * 10**6)
    monkeypatch.setattr(make_venv.shutil, "disk_usage", lambda _: usage)
    said = make_venv_error(
        lambda: make_venv.require_room(tmp_path / "venv", make_venv.Size(900, 3500), tmp_path)
    )
    # The environment, and each download twice until the installer has ended.
    assert said.startswith("needs 5.3 GB on the file system of")
    assert "has 0.3 GB free" in said
    assert "make venv VENV=/path" in said
    assert "up to 0.9 GB to download" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("output", "words"),
    [
        (
            "ERROR: Could not install: [Errno 28] No space left on device",
            "disk is full",
        ),
        ("SSLError(SSLCertVerificationError(1, '[SSL: CERTIFICATE_VERIFY_FAILED]", "PIP_CERT"),
        (
            "WARNING: Retrying … NewConnectionError …\nERROR: No matching distribution found for x",
            "cannot be reached",
        ),
        ("ERROR: No matching distribution found for torch==2.13.0", "lacks a wheel"),
        ("ERROR: something else", ""),
    ],
)
def test_the_cause_is_found_in_what_pip_says(output, words):
    assert words in make_venv.cause_of(output)
    assert bool(make_venv.cause_of(output)) == bool(words)


@pytest.mark.parametrize(
    ("total_mb", "said"), [(800, "200 of up to 800 MB, about 120 s left"), (60, "200 MB")]
)
def test_progress_says_package_megabytes_and_seconds_left(capsys, monkeypatch, total_mb, said):
    clock = iter([0.0, 20.0, 40.0])
    monkeypatch.setattr(make_venv.time, "monotonic", lambda: next(clock, 40.0))
    progress = make_venv.Progress(total_mb)
    progress.read("  Downloading torch-2.13.0-cp311-cp311-manylinux_2_28_x86_64.whl (200.0 MB)\n")
    progress.read("Progress 200000000 of 200000000\n")
    assert f"1 torch: {said}\n" in capsys.readouterr().out
    progress.read("Installing collected packages: a, b\n")
    assert "unpacking 2 packages" in capsys.readouterr().out


def test_help_has_users_first_and_names_every_variable():
    said = subprocess.check_output(["make", "-s", "help"], cwd=ROOT, text=True)
    titles = ("\nUse\n", "\nSet up\n", "\nTest a change\n", "\nLook closer\n", "\nRelease\n")
    assert sorted(titles, key=said.index) == list(titles)
    assert said.index("make demo ") < said.index("\nSet up\n")
    makefile = (ROOT / "Makefile").read_text()
    variables = re.findall(r"^([A-Z_]+) \?=", makefile, re.MULTILINE)
    assert [name for name in variables if f"{name}=" not in said] == []
    targets = re.findall(r"^([a-z-]+):", makefile, re.MULTILINE)
    hidden = {"needs-gpu", "known-vllm"}
    assert [name for name in targets if f"make {name} " not in said] == sorted(
        hidden, key=targets.index
    )


@pytest.fixture
def programs(tmp_path):
    """A folder with every program that `make servers` gets, and a pip that does nothing."""
    for name in (
        *("prometheus", "promtool", "redis-server", "redis-cli", "redis-benchmark"),
        *("dynamo-indexer", "helm", "hadolint", "mooncake_master"),
    ):
        (tmp_path / name).touch(mode=0o755)
    (tmp_path / "python").write_text("#!/bin/sh\n")
    (tmp_path / "python").chmod(0o755)
    return tmp_path


def test_a_server_that_is_got_is_named_with_its_size_and_the_time_it_took(programs):
    (programs / "dynamo-indexer").unlink()
    said = subprocess.check_output(
        [GET_SERVERS, programs], env={"PATH": "/usr/bin:/bin"}, text=True
    )
    assert re.fullmatch(
        r"make servers: the indexer of Dynamo's router, 227 MB \.\.\. \d+ s\n", said
    )
