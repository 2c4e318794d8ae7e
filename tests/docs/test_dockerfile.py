"""The Dockerfile of examples/container: its syntax, and what COPY and RUN do. No image is built."""

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from safe_offload import __version__
from safe_offload.config.transfer_config import CONNECTOR_NAME
from tests.programs import find_program

ROOT = Path(__file__).parents[2]
DOCKERFILE = ROOT / "examples" / "container" / "Dockerfile"
STEPS = [
    line.split(maxsplit=1)
    for line in re.sub(r"\\\n\s*", "", DOCKERFILE.read_text()).splitlines()
    if line and not line.startswith("#")
]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
WHEEL = "safe_offload-0.1.0-py3-none-any.whl"


def arguments_of(word: str) -> list[str]:
    return [rest for step, rest in STEPS if step == word]


@pytest.mark.skipif(not find_program("hadolint"), reason="no hadolint: `make servers` gets it")
def test_hadolint_finds_nothing():
    hadolint = find_program("hadolint")
    assert hadolint
    found = subprocess.run([hadolint, DOCKERFILE], capture_output=True, text=True)
    assert (found.stdout, found.returncode) == ("", 0)


def test_it_is_built_on_a_version_of_vllm_that_is_tested():
    (image,) = (each for each in arguments_of("ARG") if each.startswith("VLLM_IMAGE="))
    version = image.partition(":v")[2]
    assert f"vLLM {version}" in (ROOT / "docs" / "hacking.md").read_text()
    assert image.startswith("VLLM_IMAGE=vllm/vllm-openai:")


def run_step(
    folder: Path, versions: str, file: str
) -> tuple[subprocess.CompletedProcess[str], list[str]]:
    """Run the RUN step where torch says these versions; return how it ended and what was called."""
    source, programs, packages = (folder / name for name in ("source", "programs", "packages"))
    for made in (source, programs, packages / "torch"):
        made.mkdir(parents=True)
    (source / file).touch()
    (packages / "torch" / "__init__.py").touch()
    (packages / "torch" / "version.py").write_text(versions)
    calls = folder / "calls"
    for program in ("uv", "safe-offload", "install"):
        stub = programs / program
        stub.write_text(f'#!/bin/sh\necho "{program} $*" >>{calls}\n')
        stub.chmod(0o755)
    (run,) = arguments_of("RUN")
    script = re.sub(r"^--mount=\S+ +", "", run).replace("/source", str(source))
    path = f"{programs}:{Path(sys.executable).parent}:{os.defpath}"
    done = subprocess.run(
        ["/bin/sh", "-c", script],
        env={"PATH": path, "PYTHONPATH": str(packages)},
        capture_output=True,
        text=True,
    )
    lines = calls.read_text().splitlines() if calls.exists() else []
    return done, [line.replace(str(source), "/source") for line in lines]


@pytest.mark.parametrize(
    ("versions", "extra", "file"),
    [
        ("cuda, hip = '12.9', None", "cuda12", "pyproject.toml"),
        ("cuda, hip = '13.0', None", "cuda13", WHEEL),
        ("cuda, hip = None, '7.0.51831'", "rocm", "pyproject.toml"),
    ],
)
def test_it_installs_the_extra_that_fits_the_torch_of_the_image(tmp_path, versions, extra, file):
    done, calls = run_step(tmp_path, versions, file)
    assert done.returncode == 0, done.stderr
    source = "/source" if file == "pyproject.toml" else f"/source/{WHEEL}"
    assert calls[0] == f"uv pip install --system {source}[{extra},s3]"
    assert {extra, "s3"} <= PROJECT["optional-dependencies"].keys()
    assert calls[1].startswith("safe-offload config --kv-transfer-config ")
    assert CONNECTOR_NAME in calls[1]


def test_nothing_is_installed_beside_a_torch_of_the_cpu(tmp_path):
    done, calls = run_step(tmp_path, "cuda, hip = None, None", "pyproject.toml")
    assert done.returncode != 0
    assert calls == []


def test_every_command_that_builds_the_image_names_the_file_and_a_tag_that_is_used():
    pages = [*(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*"), ROOT / "README.md"]
    commands = {
        tuple(found)
        for page in pages
        if page.is_file()
        for found in re.findall(
            r"docker build -f (\S+) -t (\S+) \.", page.read_text(errors="ignore")
        )
    }
    assert commands == {(str(DOCKERFILE.relative_to(ROOT)), f"vllm-safe-offload:{__version__}")}
