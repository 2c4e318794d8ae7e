"""Facts of this machine and process, read from the system here alone.

Source: Linux kernel, Documentation/filesystems/proc.rst (meminfo, status), admin-guide/mm/
transhuge.rst; ABI/stable/sysfs-devices-node; getrlimit(2).
"""

from __future__ import annotations

import os
import re
import resource
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from safe_offload.errors import SharingError
from safe_offload.node import pools
from safe_offload.tiers.files.diagnosis import file_system_of
from safe_offload.worker.memory import huge_pages
from safe_offload.worker.memory.host_memory import available_host_bytes
from safe_offload.worker.memory.huge_pages import HugePages, read_text
from safe_offload.worker.memory.placement import cores_of, numbers_in

UNKNOWN = HugePages("", is_given=True, fix="")


@dataclass(frozen=True, slots=True)
class NumaNode:
    """One NUMA node: the memory that is free on it, and its cores."""

    free_bytes: int
    cores: frozenset[int]


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
    swap_bytes: int = 0
    swap_used_bytes: int = 0
    memlock_bytes: int | None = None  # that a process may lock; None for no limit
    huge_pages: str = ""  # the word in brackets in `transparent_hugepage/enabled`
    huge_pages_memfd: HugePages = UNKNOWN
    nodes: Mapping[int, NumaNode] = field(default_factory=dict)
    allowed_nodes: frozenset[int] = frozenset()  # that this process may take memory from
    cores: frozenset[int] = frozenset()  # that this process may run on
    environment: Mapping[str, str] = field(default_factory=dict)
    is_root: bool = False
    shared_memory: SharedMemory | None = None


def read_machine(
    *,
    proc: Path = Path("/proc"),
    system: Path = Path("/sys"),
    cgroup_root: Path = Path("/sys/fs/cgroup"),
) -> Machine:
    """Read the facts from the folders where Linux shows them."""
    meminfo = _kib_values(proc / "meminfo")
    swap_bytes = meminfo.get("SwapTotal", 0) * 1024
    memlock_bytes, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return Machine(
        available_bytes=available_host_bytes(
            meminfo_path=proc / "meminfo",
            cgroup_path=proc / "self/cgroup",
            cgroup_root=cgroup_root,
        ),
        machine_available_bytes=meminfo.get("MemAvailable", 0) * 1024,
        swap_bytes=swap_bytes,
        swap_used_bytes=swap_bytes - meminfo.get("SwapFree", 0) * 1024,
        memlock_bytes=None if memlock_bytes == resource.RLIM_INFINITY else memlock_bytes,
        huge_pages=huge_pages.of_private(system).word,
        huge_pages_memfd=huge_pages.of_memfd(system),
        nodes=_read_nodes(system),
        allowed_nodes=_allowed_nodes(proc / "self/status"),
        cores=frozenset(os.sched_getaffinity(0)),
        environment=dict(os.environ),
        is_root=os.geteuid() == 0,
        shared_memory=SharedMemory.read(),
    )


def _read_nodes(system: Path) -> dict[int, NumaNode]:
    nodes: dict[int, NumaNode] = {}
    for folder in sorted((system / "devices/system/node").glob("node[0-9]*")):
        number = int(folder.name[4:])
        try:
            cores = frozenset(cores_of(number, system))
        except (OSError, ValueError):
            cores = frozenset()
        # Its lines begin with "Node 0 ". File cache counts as free: the kernel drops it on demand.
        free = _kib_values(folder / "meminfo", skip=2)
        free_kib = free.get("MemFree", 0) + free.get("FilePages", 0) - free.get("Shmem", 0)
        nodes[number] = NumaNode(free_kib * 1024, cores)
    return nodes


def _kib_values(path: Path, skip: int = 0) -> dict[str, int]:
    """Return the `name: number kB` lines of a file, without the first `skip` words of each."""
    values: dict[str, int] = {}
    for line in read_text(path).splitlines():
        words = line.split()[skip:]
        if len(words) > 1 and words[1].isdigit():
            values[words[0].rstrip(":")] = int(words[1])
    return values


def _allowed_nodes(path: Path) -> frozenset[int]:
    match = re.search(r"^Mems_allowed_list:\s*(\S+)", read_text(path), re.MULTILINE)
    return frozenset(numbers_in(match[1]) if match else ())
