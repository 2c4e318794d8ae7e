"""What is said of huge pages is what the kernel does, for each kind of host memory."""

import os
from pathlib import Path
from typing import Any

import pytest

from safe_offload.config.units import MIB
from safe_offload.mapped_files import map_file
from safe_offload.node.table import make_file
from safe_offload.worker.memory import huge_pages
from safe_offload.worker.memory.host_memory import HostMemory
from safe_offload.worker.memory.placement import pages_of
from safe_offload.worker.memory.shared_memory import map_alone

WORDS = "always within_size advise madvise never deny force inherit"
SIZE = 16 * MIB
SHM = Path("/dev/shm")


def write(path: Path, chosen: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(WORDS.replace(chosen, f"[{chosen}]", 1) + "\n")


@pytest.fixture
def system(tmp_path: Path) -> Path:
    """A system that gives none to files in memory."""
    folder = tmp_path / "kernel/mm/transparent_hugepage"
    write(folder / "enabled", "madvise")
    write(folder / "shmem_enabled", "never")
    (folder / "hpage_pmd_size").write_text("2097152\n")
    return tmp_path


@pytest.mark.parametrize(
    ("overall", "own", "is_given"),
    [
        ("never", "", False),
        ("advise", "", True),
        ("deny", "", False),
        ("never", "inherit", False),
        ("advise", "inherit", True),
        ("never", "advise", True),
        ("advise", "never", False),
        ("deny", "advise", False),
    ],
)
def test_memory_of_several_processes_follows_its_own_setting(system, overall, own, is_given):
    folder = system / "kernel/mm/transparent_hugepage"
    write(folder / "shmem_enabled", overall)
    if own:
        write(folder / "hugepages-2048kB/shmem_enabled", own)
    write(folder / "hugepages-64kB/shmem_enabled", "never")
    assert huge_pages.of_memfd(system).is_given is is_given
    assert huge_pages.of_private(system).is_given
    write(folder / "enabled", "never")
    assert not huge_pages.of_private(system).is_given


@pytest.mark.parametrize(
    ("overall", "options", "is_given"),
    [
        ("advise", "rw", False),
        ("never", "rw,huge=never", False),
        ("never", "rw,huge=advise", False),
        ("never", "rw,huge=within_size,size=1g", True),
        ("never", "rw,huge=always", True),
        ("deny", "rw,huge=always", False),
        ("force", "rw", True),
    ],
)
def test_files_in_memory_follow_their_mount(system, overall, options, is_given):
    write(system / "kernel/mm/transparent_hugepage/shmem_enabled", overall)
    mounts = system / "mountinfo"
    mounts.write_text(
        "23 1 0:21 / /sys rw - sysfs sysfs rw\n"
        f"25 24 0:42 / /dev/shm rw,relatime shared:3 - tmpfs shm {options}\n"
    )
    found = huge_pages.of_mount(os.makedev(0, 42), system, mounts)
    assert found.is_given is is_given
    assert found.fix == "mount -o remount,huge=within_size /dev/shm"
    assert huge_pages.of_mount(os.makedev(0, 43), system, mounts).word == ""


def test_a_system_that_says_nothing_is_not_taken_to_refuse(tmp_path):
    assert huge_pages.of_private(tmp_path) == ("", True, huge_pages.of_private().fix)
    assert huge_pages.of_memfd(tmp_path).is_given
    assert huge_pages.of_mount(os.stat(SHM).st_dev, tmp_path, tmp_path / "none").is_given


def in_file(size_bytes: int) -> Any:
    path = SHM / f"safe_offload-test-{os.getpid()}"
    make_file(path, size_bytes, {})
    fd = os.open(path, os.O_RDWR)
    path.unlink()
    mapping = map_file(fd)
    os.close(fd)
    return mapping


@pytest.mark.parametrize("make", [map_alone, in_file])
def test_where_the_kernel_gives_none_nothing_else_is_said(make):
    """With the settings of this machine."""
    memory = HostMemory(make(SIZE))
    memory.tensor.fill_(1)
    pages = pages_of(memory.tensor.data_ptr(), SIZE)
    assert memory.has_huge_pages or not pages.huge_percent
    memory.close()


@pytest.mark.parametrize("is_given", [False, True])
@pytest.mark.parametrize(
    ("make", "kind"),
    [(HostMemory.allocate, "of_private"), (map_alone, "of_memfd"), (in_file, "of_mount")],
)
def test_each_kind_of_memory_has_them_where_its_own_setting_gives_them(
    monkeypatch, make, kind, is_given
):
    for name in ("of_private", "of_memfd", "of_mount"):
        setting = huge_pages.HugePages("", is_given is (name == kind), "")
        monkeypatch.setattr(huge_pages, name, lambda *_, setting=setting: setting)
    made = make(SIZE)
    memory = made if isinstance(made, HostMemory) else HostMemory(made)
    assert memory.has_huge_pages is is_given
    memory.close()
