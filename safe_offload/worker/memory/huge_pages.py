"""Huge pages of host memory: each kind of memory follows another setting of the kernel.

Private memory follows `enabled`. A memfd, which processes of tiers or ranks with one copy map too,
follows `shmem_enabled`, and files of a pool that engines share the `huge=` of their mount: their
pages are taken before anybody maps them, so `advise` gives none.

Source: Linux 6.18, Documentation/admin-guide/mm/transhuge.rst and filesystems/tmpfs.rst.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import NamedTuple

FOLDER = "/sys/kernel/mm/transparent_hugepage"


class HugePages(NamedTuple):
    """The setting that one kind of memory follows.

    Attributes:
        word: the setting; empty if it is not known.
        is_given: to memory with MADV_HUGEPAGE, as ours has; also if unknown.
        fix: the command that changes it.
    """

    word: str
    is_given: bool
    fix: str


def of_private(system: Path = Path("/sys")) -> HugePages:
    """Return the setting for memory of one process."""
    word = _chosen(system, "enabled")
    return HugePages(word, word != "never", f"echo madvise > {FOLDER}/enabled")


def of_memfd(system: Path = Path("/sys")) -> HugePages:
    """Return the setting for a memfd, which several processes map."""
    word = _chosen(system, "shmem_enabled")
    fix = f"echo advise > {FOLDER}/shmem_enabled"
    return HugePages(word, word not in ("never", "deny"), fix)


def of_mount(
    device: int, system: Path = Path("/sys"), mounts: Path = Path("/proc/self/mountinfo")
) -> HugePages:
    """Return the setting for files in memory, by their `st_dev`."""
    word, point = _overall(system, "shmem_enabled"), ""
    for line in read_text(mounts).splitlines():
        mount, _, source = line.partition(" - ")
        fields = mount.split()
        if fields[2] == f"{os.major(device)}:{os.minor(device)}":
            point = fields[4]
            if word not in ("deny", "force"):
                found = re.search(r"\bhuge=(\w+)", source)
                word = found[1] if found else "never"
    if not point:
        return HugePages("", is_given=True, fix="")
    is_given = word in ("always", "within_size", "force")
    return HugePages(word, is_given, f"mount -o remount,huge=within_size {point}")


def of_file(descriptor: int) -> HugePages:
    """Return the setting for an open file in memory."""
    if os.readlink(f"/proc/self/fd/{descriptor}").startswith("/memfd:"):
        return of_memfd()
    return of_mount(os.fstat(descriptor).st_dev)


def read_text(path: Path) -> str:
    """Return the text of a file of the kernel; empty if there is none."""
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def _chosen(system: Path, name: str) -> str:
    """Return the word for the size that a page table entry has; it may leave it to all sizes'."""
    folder = system / "kernel/mm/transparent_hugepage"
    size_bytes = read_text(folder / "hpage_pmd_size").strip()
    kib = int(size_bytes) >> 10 if size_bytes.isdigit() else 0
    own, overall = _bracketed(folder / f"hugepages-{kib}kB" / name), _overall(system, name)
    return overall if own in ("", "inherit") or overall == "deny" else own


def _overall(system: Path, name: str) -> str:
    return _bracketed(system / "kernel/mm/transparent_hugepage" / name)


def _bracketed(path: Path) -> str:
    match = re.search(r"\[(\S+)\]", read_text(path))
    return match[1] if match else ""
