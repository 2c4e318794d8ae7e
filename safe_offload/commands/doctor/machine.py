"""Facts of this machine and process, read from the system here alone.

Source: Linux kernel, Documentation/filesystems/proc.rst (meminfo), admin-guide/mm/transhuge.rst.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from safe_offload.errors import SharingError
from safe_offload.node import pools
from safe_offload.tiers.files.diagnosis import file_system_of
from safe_offload.worker.memory import huge_pages
from safe_offload.worker.memory.host_memory import available_host_bytes, stat_values
from safe_offload.worker.memory.huge_pages import HugePages

UNKNOWN = HugePages("", is_given=True, fix="")


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedMemory:
    """The folder in memory where engines with `"share": "node"` keep their pools."""

    folder: Path
    free_bytes: int = 0
    file_system: str = ""  # empty if not known
    pools: tuple[pools.Pool, ...] = ()  # of this user
    problem: str = ""  # why this user can have none there; empty if they can
    huge_pages: HugePages = UNKNOWN

    @classmethod
    def read(cls) -> Self:
        """Check it as `open_rank` does; nothing is left there."""
        folder, ours = pools.BASE, pools.user_folder()
        try:
            if ours.exists():
                pools.require_own(ours)
            with tempfile.TemporaryFile(dir=ours if ours.exists() else folder):
                pass
            return cls(
                folder=folder,
                free_bytes=pools.free_bytes(folder),
                file_system=file_system_of(folder),
                pools=tuple(pools.find_pools()),
                huge_pages=huge_pages.of_mount(folder.stat().st_dev),
            )
        except OSError as error:
            return cls(folder=folder, problem=f"{folder}: {error.strerror}")
        except SharingError as error:
            return cls(folder=folder, problem=str(error))


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """The machine, and what of it this process may use; empty if unknown."""

    available_bytes: int  # of host memory, without swapping and below every limit of the cgroups
    machine_available_bytes: int  # the same without the limits of the cgroups
    huge_pages: HugePages = UNKNOWN
    huge_pages_memfd: HugePages = UNKNOWN
    environment: Mapping[str, str] = field(default_factory=dict)
    is_root: bool = False
    shared_memory: SharedMemory | None = None


def read_machine(
    *,
    proc: Path = Path("/proc"),
    cgroup_root: Path = Path("/sys/fs/cgroup"),
) -> Machine:
    """Read the facts from the folders where Linux shows them."""
    kib = stat_values(proc / "meminfo")
    return Machine(
        available_bytes=available_host_bytes(
            meminfo_path=proc / "meminfo",
            cgroup_path=proc / "self/cgroup",
            cgroup_root=cgroup_root,
        ),
        machine_available_bytes=kib.get("MemAvailable:", 0) * 1024,
        huge_pages=huge_pages.of_private(),
        huge_pages_memfd=huge_pages.of_memfd(),
        environment=dict(os.environ),
        is_root=os.geteuid() == 0,
        shared_memory=SharedMemory.read(),
    )
