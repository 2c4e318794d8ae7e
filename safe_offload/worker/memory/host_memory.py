"""Host memory of one worker: its allocation, after a check that there is enough.

The kernel grants more than exists, and kills the engine when the pages are touched.
"""

from __future__ import annotations

import logging
import mmap
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Final

from safe_offload.config.options import OffloadConfig
from safe_offload.config.units import MIB, format_bytes
from safe_offload.errors import ConfigError, InvariantError
from safe_offload.mapped_files import address_of, advise, find_file, hide, is_of_parent
from safe_offload.worker.memory import huge_pages
from safe_offload.worker.memory.huge_pages import read_text

if TYPE_CHECKING:
    import torch

# What must stay free, the larger of the two.
HEADROOM_BYTES_MIN: Final = 512 * MIB
HEADROOM_PERCENT: Final = 5

logger = logging.getLogger(f"vllm.{__name__}")


class HostMemory:
    """One range of zero-filled, pageable host memory, as bytes.

    It is hidden (`hide`). Made by `allocate`, or over a mapping that other processes have too
    (`shared_memory`). One owner makes and closes it; `close` alone changes it.
    """

    def __init__(self, mapping: mmap.mmap) -> None:
        import torch  # `safe-offload doctor` only checks the size, without torch

        file = find_file(address_of(memoryview(mapping)))
        given = huge_pages.of_private() if file is None else huge_pages.of_file(file.descriptor)
        self.has_huge_pages: Final = advise(mapping, "MADV_HUGEPAGE") and given.is_given
        hide(mapping)
        self._mapping: mmap.mmap | None = mapping
        # torch.frombuffer holds its argument but not a buffer export: only with a memoryview
        # between the two can the mapping not be unmapped under a tensor that is still alive.
        self._tensor: torch.Tensor | None = torch.frombuffer(memoryview(mapping), dtype=torch.uint8)
        self.size_bytes: Final = len(mapping)

    @classmethod
    def allocate(cls, size_bytes: int) -> HostMemory:
        """Map host memory; no page is touched. ConfigError if the system refuses it."""
        if size_bytes < 1:
            raise ConfigError(f"Host memory of {size_bytes} bytes; expected at least 1 byte.")
        try:
            mapping = mmap.mmap(
                -1,
                size_bytes,
                flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS,
                prot=mmap.PROT_READ | mmap.PROT_WRITE,
            )
        except (OSError, OverflowError) as error:
            raise ConfigError(
                f"The system refused {format_bytes(size_bytes)} of host memory: {error}. Fix: "
                'lower "cpu_bytes_to_use", or raise the limit (ulimit -v, vm.overcommit_memory, '
                "vm.overcommit_ratio)."
            ) from error
        return cls(mapping)

    def __repr__(self) -> str:
        return f"<HostMemory: {format_bytes(self.size_bytes)}{'' if self._mapping else ', closed'}>"

    @property
    def tensor(self) -> torch.Tensor:
        """The whole range: shape (size_bytes,), uint8, at a page boundary; not after `close`."""
        if self._tensor is None:
            raise InvariantError("I8", "host memory is used after it was closed.")
        return self._tensor

    def close(self) -> None:
        """Give the pages back at once, the addresses with the last view; a second call is free.

        A view that is left reads zeros. Pages that another process has mapped too stay.
        """
        mapping, self._mapping, self._tensor = self._mapping, None, None
        if mapping is None or is_of_parent(mapping):
            return
        advise(mapping, "MADV_DONTNEED")
        try:
            mapping.close()
        except BufferError:
            logger.debug("A view of the host memory outlives it; unmapped when the view goes.")


def available_host_bytes(
    *,
    meminfo_path: Path = Path("/proc/meminfo"),
    cgroup_path: Path = Path("/proc/self/cgroup"),
    cgroup_root: Path = Path("/sys/fs/cgroup"),
) -> int:
    """Return the bytes of host memory that this process could take now without swapping.

    The minimum of the bytes available on the machine and those left below each memory limit of this
    process's cgroup and its ancestors, version 1 or 2 (containers, systemd, Slurm). File cache
    counts as free, since the kernel drops it on demand.

    Source: Linux kernel, Documentation/filesystems/proc.rst (MemAvailable) and
    Documentation/admin-guide/cgroup-v2.rst (memory.max, memory.high, memory.current, memory.stat).
    """
    available_bytes = _machine_available_bytes(meminfo_path)
    for folder, is_version_2 in _memory_cgroups(cgroup_path, cgroup_root):
        left_bytes = _cgroup_left_bytes(folder, is_version_2=is_version_2)
        if left_bytes is not None:
            available_bytes = min(available_bytes, left_bytes)
    return available_bytes


def check_host_bytes(
    config: OffloadConfig, *, bytes_per_rank: int, num_ranks_on_host: int, available_bytes: int
) -> None:
    """Raise ConfigError, with what would fit, for a host pool that the machine cannot hold.

    Args:
        config: has the key that decided the size, for the fix.
        bytes_per_rank: that each worker is about to take.
        num_ranks_on_host: all count, because each touches its pages only later.
        available_bytes: before any of them took its pool.
    """
    headroom_bytes = max(HEADROOM_BYTES_MIN, available_bytes * HEADROOM_PERCENT // 100)
    segments_bytes = sum(tier.host_bytes for tier in config.tiers)
    segments_bytes = segments_bytes // config.world_size * num_ranks_on_host
    usable_bytes = max(0, available_bytes - headroom_bytes - segments_bytes)
    needed_bytes = bytes_per_rank * num_ranks_on_host
    if needed_bytes <= usable_bytes:
        return
    key = config.capacity_key
    needed = (
        f"{format_bytes(needed_bytes)} ({num_ranks_on_host} ranks on this machine, "
        f"{format_bytes(bytes_per_rank)} each)"
        if num_ranks_on_host > 1
        else format_bytes(needed_bytes)
    )
    raise ConfigError(
        f'The host pool ("{key}") needs {needed}; {format_bytes(available_bytes)} of host memory '
        f"is available, of which {format_bytes(headroom_bytes)} must stay free"
        + (f' and {format_bytes(segments_bytes)} are for "segment"' if segments_bytes else "")
        + ". "
        f"Fix: {_fitting_value(config, bytes_per_rank, usable_bytes // num_ranks_on_host)}"
    )


def _fitting_value(config: OffloadConfig, bytes_per_rank: int, fitting_bytes: int) -> str:
    """Return the largest value of the deciding key that fits, as an instruction."""
    key = config.capacity_key
    if key == "num_cpu_blocks":
        num_slots = (config.num_slots or 0) * fitting_bytes // bytes_per_rank
        value = str(num_slots) if num_slots else None
    else:
        num_shares = config.world_size if key == "cpu_bytes_to_use" else 1
        size_mib = fitting_bytes * num_shares // MIB
        value = f'"{size_mib}MiB"' if size_mib else None
    if value is None:
        return "free memory on this machine (or raise the container's limit); nothing fits now."
    return (
        f'set "{key}" in kv_connector_extra_config to at most {value}, '
        "free memory, or raise the container's limit."
    )


def _machine_available_bytes(meminfo_path: Path) -> int:
    """Return MemAvailable, or the free pages where there is no such figure."""
    available_kib = stat_values(meminfo_path).get("MemAvailable:")
    if available_kib is not None:
        return available_kib * 1024
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _memory_cgroups(cgroup_path: Path, cgroup_root: Path) -> Iterator[tuple[Path, bool]]:
    """Yield (folder, is_version_2) of this process's memory cgroups and all their ancestors.

    A container may lack folders of the path; its own limit is at the root of its mount.
    """
    for line in read_text(cgroup_path).splitlines():
        hierarchy, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if hierarchy == "0" and not controllers:
            # Beside version 1, version 2 is mounted one level down.
            roots = [(cgroup_root, True), (cgroup_root / "unified", True)]
        elif "memory" in controllers.split(","):
            roots = [(cgroup_root / "memory", False)]
        else:
            continue
        names = [name for name in path.split("/") if name]
        if ".." in names:
            names = []  # it is above the root of this namespace
        for root, is_version_2 in roots:
            for depth in range(len(names), -1, -1):
                yield root.joinpath(*names[:depth]), is_version_2


def _cgroup_left_bytes(folder: Path, *, is_version_2: bool) -> int | None:
    """Return the bytes left below a cgroup's limit, or None where there is no limit."""
    if is_version_2:
        # Above memory.high the kernel throttles the group until it is of no use.
        limits = [_read_int(folder / "memory.max"), _read_int(folder / "memory.high")]
        usage_bytes = _read_int(folder / "memory.current")
        cache_keys = ("active_file", "inactive_file")
    else:
        limits = [_read_int(folder / "memory.limit_in_bytes")]
        usage_bytes = _read_int(folder / "memory.usage_in_bytes")
        cache_keys = ("total_active_file", "total_inactive_file")
    limits_bytes = [limit for limit in limits if limit is not None]
    if not limits_bytes or usage_bytes is None:
        return None
    statistics = stat_values(folder / "memory.stat")
    cache_bytes = sum(statistics.get(key, 0) for key in cache_keys)
    return max(0, min(limits_bytes) - max(0, usage_bytes - cache_bytes))


def _read_int(path: Path) -> int | None:
    """Return the one number in a file, or None (no such file, or the word "max")."""
    return _number(read_text(path).strip())


def stat_values(path: Path) -> dict[str, int]:
    """Return the `name number` lines of a kernel statistics file."""
    lines = (line.split() for line in read_text(path).splitlines())
    values = {fields[0]: _number(fields[1]) for fields in lines if len(fields) > 1}
    return {name: value for name, value in values.items() if value is not None}


def _number(text: str) -> int | None:
    return int(text) if text.isascii() and text.isdigit() else None
