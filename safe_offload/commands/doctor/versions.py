"""Checks of what is installed: Python packages and the driver."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from typing import Final

from safe_offload import __version__
from safe_offload.commands.doctor.findings import Finding, error, info, ok, warning
from safe_offload.commands.doctor.vllm_facts import VllmFacts
from safe_offload.compat.versions import version_of

CUPY_PACKAGES: Final = ("cupy-cuda12x", "cupy-cuda13x", "cupy-rocm-7-0", "cupy")


def check_versions(vllm: VllmFacts) -> Iterator[Finding]:
    """Compare vLLM with the versions that this package is tested with."""
    yield info(
        "versions.safe-offload", f"safe-offload {__version__}, Python {platform.python_version()}"
    )
    yield from _check_vllm(vllm)
    if vllm.torch_version:
        yield info("versions.torch", f"torch {vllm.torch_version}")


def _check_vllm(vllm: VllmFacts) -> Iterator[Finding]:
    id = "versions.vllm"
    if not vllm.version:
        yield error(
            id,
            f"vLLM cannot be imported: {vllm.problem}",
            "vLLM in the environment of this command",
            "install vLLM and safe-offload in the same environment, and run its safe-offload",
        )
        return
    if vllm.problem:
        yield warning(
            "versions.probe",
            f"vLLM did not answer every question: {vllm.problem}",
            "a process that imports vLLM and ends",
            'run `python -c "import vllm"` and look at what it prints',
        )
    tested = [f"{major}.{minor}" for major, minor in vllm.tested]
    if not tested or any(f"{vllm.version}.".startswith(f"{version}.") for version in tested):
        yield ok(id, f"vLLM {vllm.version}")
    else:
        yield warning(
            id,
            f"vLLM {vllm.version} is not one that safe-offload {__version__} is tested with",
            f"vLLM {', '.join(tested)}",
            f"install one of these (`pip install 'vllm~={tested[-1]}.0'`), or a newer "
            "safe-offload; otherwise watch the metric contained_errors",
        )


def check_gpu_packages(is_gpu: bool) -> Iterator[Finding]:
    """Look for cupy, which compiles the kernel that copies small blocks."""
    id = "versions.cupy"
    found = [f"{name} {version}" for name in CUPY_PACKAGES if (version := version_of(name))]
    if found:
        yield ok(id, found[0])
    elif not is_gpu:
        yield info(id, "not installed; only a GPU needs it")
    else:
        yield warning(
            id,
            "cupy is not installed: small blocks are copied without a kernel, which is slower",
            "cupy for the CUDA or ROCm of your torch",
            "pip install 'safe-offload[cuda12]' (or cuda13, rocm)",
        )
