"""Where host memory lies: on which NUMA node, in pages of which size.

A page lies on the NUMA node of the core that touches it first. So the thread that page-locks moves
to the cores of the GPU's node; a pool on the other socket has about half the link (vllm#30492).

Source: Linux, Documentation/ABI/testing/sysfs-bus-pci (numa_node), sysfs-devices-node (cpulist),
Documentation/filesystems/proc.rst (smaps), numa(7) (numa_maps).
"""

from __future__ import annotations

import os
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

SYSTEM = Path("/sys")
PROCESS = Path("/proc/self")


def numa_node_of(pci_address: str, system: Path = SYSTEM) -> int | None:
    """Return the NUMA node of a device on the PCI bus, None where there is only one or none."""
    try:
        node = int((system / "bus/pci/devices" / pci_address / "numa_node").read_text())
        cores_of(node, system)
    except (OSError, ValueError):
        return None
    return node


def cores_of(node: int, system: Path = SYSTEM) -> set[int]:
    """Return the cores of a NUMA node; raises OSError or ValueError if unknown."""
    return numbers_in((system / f"devices/system/node/node{node}/cpulist").read_text().strip())


def numbers_in(listed: str) -> set[int]:
    """Return the numbers of a list as the kernel writes it, such as "0-3,8"; raises ValueError."""
    numbers: set[int] = set()
    for part in filter(None, listed.split(",")):
        first, _, last = part.partition("-")
        numbers.update(range(int(first), int(last or first) + 1))
    return numbers


def move_thread_to(node: int, system: Path = SYSTEM) -> str:
    """Let the calling thread run on the cores of a NUMA node only; return why not, or nothing."""
    try:
        os.sched_setaffinity(0, cores_of(node, system))
    except (OSError, ValueError) as error:
        return str(error)
    return ""


@dataclass(frozen=True, slots=True)
class Pages:
    """The pages of a range of touched memory; None or empty if unknown."""

    huge_percent: int | None
    node_percent: dict[int, int]

    def __str__(self) -> str:
        """In words, such as "100 % in huge pages, 100 % on NUMA node 1"."""
        huge = self.huge_percent
        size = "page size unknown" if huge is None else f"{huge} % in huge pages"
        nodes = (f"{share} % on NUMA node {node}" for node, share in self.node_percent.items())
        return ", ".join([size, *nodes])


def pages_of(address: int, size_bytes: int, process: Path = PROCESS) -> Pages:
    """Return the pages of a range of touched memory, from /proc."""
    end = address + size_bytes
    return Pages(_huge_percent(address, end, process), _node_percent(address, end, process))


def _huge_percent(address: int, end: int, process: Path) -> int | None:
    try:
        lines = (process / "smaps").read_text().splitlines()
    except OSError:
        return None
    kib: Counter[str] = Counter()
    is_inside = False
    for line in lines:
        if header := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            is_inside = int(header[1], 16) < end and int(header[2], 16) > address
        elif is_inside and (value := re.match(r"(\w+): +(\d+) kB", line)):
            kib[value[1]] += int(value[2])
    return _percent(kib["AnonHugePages"] + kib["ShmemPmdMapped"], kib["Rss"])


def _node_percent(address: int, end: int, process: Path) -> dict[int, int]:
    try:
        lines = (process / "numa_maps").read_text().splitlines()
    except OSError:
        return {}
    pages: Counter[int] = Counter()
    for line in lines:
        if address <= int(line.split()[0], 16) < end:
            for node, count in re.findall(r" N(\d+)=(\d+)", line):
                pages[int(node)] += int(count)
    return {node: _percent(count, pages.total()) for node, count in sorted(pages.items())}


def _percent(part: int, whole: int) -> int:
    return 100 * part // whole if whole else 0
