"""Where host memory lies, from what the system tells of nodes and pages."""

import mmap
import os
from unittest.mock import Mock

import pytest

from safe_offload.worker.memory import placement
from safe_offload.worker.memory.host_memory import HostMemory

SMAPS = """\
7f0000000000-7f0000200000 rw-p 00000000 00:00 0
Size:               2048 kB
Rss:                2048 kB
AnonHugePages:      2048 kB
7f0000200000-7f0000400000 rw-p 00000000 00:00 0
Rss:                2048 kB
AnonHugePages:         0 kB
7f0000800000-7f0000a00000 rw-p 00000000 00:00 0
Rss:                2048 kB
AnonHugePages:      2048 kB
"""
NUMA_MAPS = """\
7f0000000000 default anon=512 dirty=512 N0=128 N1=384 kernelpagesize_kB=4
7f0000200000 default anon=512 dirty=512 N1=512 kernelpagesize_kB=4
7f0000800000 default anon=512 dirty=512 N0=512 kernelpagesize_kB=4
"""


@pytest.fixture
def system(tmp_path):
    """A machine with a GPU on the second of two nodes, and one whose node is not known."""
    for address, node in (("0000:07:00.0", "1"), ("0000:08:00.0", "-1")):
        folder = tmp_path / "bus/pci/devices" / address
        folder.mkdir(parents=True)
        (folder / "numa_node").write_text(f"{node}\n")
    for node, cores in (("0", "0-3"), ("1", "4-5,8,10-11")):
        folder = tmp_path / f"devices/system/node/node{node}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(f"{cores}\n")
    return tmp_path


def test_the_node_of_a_gpu_and_its_cores_are_read(system):
    assert placement.numa_node_of("0000:07:00.0", system) == 1
    assert placement.cores_of(1, system) == {4, 5, 8, 10, 11}


@pytest.mark.parametrize("address", ["0000:08:00.0", "0000:09:00.0", ""])
def test_a_machine_that_tells_no_node_has_none(system, address):
    assert placement.numa_node_of(address, system) is None


def test_a_thread_moves_to_the_cores_of_a_node(system, monkeypatch):
    moved = []
    monkeypatch.setattr(os, "sched_setaffinity", lambda pid, cores: moved.append((pid, cores)))
    assert placement.move_thread_to(1, system) == ""
    assert moved == [(0, {4, 5, 8, 10, 11})]


def test_cores_that_may_not_be_used_are_a_reason_and_no_error(system, monkeypatch):
    monkeypatch.setattr(os, "sched_setaffinity", Mock(side_effect=OSError(22, "Invalid argument")))
    assert "Invalid argument" in placement.move_thread_to(1, system)


def test_pages_are_described_by_size_and_node(tmp_path):
    (tmp_path / "smaps").write_text(SMAPS)
    (tmp_path / "numa_maps").write_text(NUMA_MAPS)
    found = placement.pages_of(0x7F0000000000, 4 << 20, tmp_path)
    assert str(found) == "50 % in huge pages, 12 % on NUMA node 0, 87 % on NUMA node 1"


def test_a_system_that_tells_nothing_is_described_so(tmp_path):
    assert str(placement.pages_of(0, 4096, tmp_path)) == "page size unknown"


def test_this_system_tells_of_memory_that_was_touched():
    memory = HostMemory.allocate(8 * mmap.PAGESIZE)
    memory.tensor.fill_(1)
    assert "% in huge" in str(placement.pages_of(memory.tensor.data_ptr(), memory.size_bytes))
    memory.close()
