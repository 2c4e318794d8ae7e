"""Host memory: what is mapped and given back, and how much of it a machine has."""

import gc
import mmap
import os
from pathlib import Path

import pytest

from safe_offload.config.options import OffloadConfig
from safe_offload.config.units import GIB, MIB
from safe_offload.errors import ConfigError, InvariantError
from safe_offload.worker.memory import huge_pages
from safe_offload.worker.memory.host_memory import (
    HEADROOM_BYTES_MIN,
    HostMemory,
    available_host_bytes,
    check_host_bytes,
)
from tests.fresh_process import run_script
from tests.worker.memory.pools import is_closed


def smaps_of(address: int) -> dict[str, str]:
    """What the kernel says about the mapping that holds an address of this process."""
    found: dict[str, str] = {}
    for line in Path("/proc/self/smaps").read_text().splitlines():
        head, _, rest = line.partition(" ")
        if "-" in head and not head.endswith(":"):
            if found:
                return found
            start, _, end = head.partition("-")
            if int(start, 16) <= address < int(end, 16):
                found["range"] = head
        elif found:
            found[head.rstrip(":")] = rest.strip()
    return found


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_memory_is_private_and_stays_out_of_children_and_core_dumps():
    memory = HostMemory.allocate(4 * MIB)
    memory.tensor.fill_(1)
    seen = smaps_of(memory.tensor.data_ptr())
    flags = seen["VmFlags"].split()
    assert "sh" not in flags
    assert "dc" in flags
    assert "dd" in flags
    assert ("hg" in flags and huge_pages.of_private().is_given) is memory.has_huge_pages
    memory.close()


def test_closing_twice_is_closing_once():
    memory = HostMemory.allocate(MIB)
    assert not is_closed(memory)
    memory.close()
    memory.close()
    assert is_closed(memory)


def test_memory_cannot_be_used_after_it_was_closed():
    memory = HostMemory.allocate(MIB)
    memory.close()
    with pytest.raises(InvariantError, match=r"^I8: "):
        _ = memory.tensor


def test_memory_that_nobody_closes_goes_with_its_owner():
    before = resident_bytes()
    memory = HostMemory.allocate(256 * MIB)
    memory.tensor.fill_(1)
    del memory
    gc.collect()
    assert resident_bytes() - before < 16 * MIB


@pytest.mark.parametrize("size_bytes", [0, -1])
def test_a_size_that_is_not_positive_is_refused(size_bytes):
    with pytest.raises(ConfigError, match="at least 1 byte"):
        HostMemory.allocate(size_bytes)


@pytest.mark.parametrize("size_bytes", [1 << 60, 1 << 80])
def test_a_size_that_the_system_refuses_is_a_config_error_with_the_fix(size_bytes):
    with pytest.raises(ConfigError, match="Fix: lower"):
        HostMemory.allocate(size_bytes)


def test_a_system_that_takes_no_advice_gives_memory_all_the_same(monkeypatch):
    for option in ("MADV_HUGEPAGE", "MADV_DONTFORK", "MADV_DONTDUMP"):
        monkeypatch.setattr(mmap, option, 9999)
    memory = HostMemory.allocate(MIB)
    assert not memory.has_huge_pages
    monkeypatch.delattr(mmap, "MADV_HUGEPAGE")
    assert not HostMemory.allocate(MIB).has_huge_pages
    memory.tensor.fill_(1)
    memory.close()


@pytest.mark.parametrize("end", ["memory.close()", "del memory, view", "memory.close(); del view"])
def test_a_forked_child_does_not_unmap_what_lies_where_the_memory_was(tmp_path, end):
    """Found as a crash of children in which the garbage collector ran, at a random place."""
    run_script(FORKED.format(end=end), tmp_path, {})


FORKED = """
import ctypes, mmap, os, sys
from safe_offload.worker.memory.host_memory import HostMemory

SIZE_BYTES = 64 << 20
memory = HostMemory.allocate(SIZE_BYTES)
view = memory.tensor[:1]
address = memory.tensor.data_ptr()
child = os.fork()
if child:
    memory.tensor.fill_(1)
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
map_at = ctypes.CDLL(None).mmap
map_at.restype = ctypes.c_void_p
map_at.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
MAP_FIXED_NOREPLACE = 0x100000
flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_FIXED_NOREPLACE
assert map_at(address, SIZE_BYTES, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0) == address
ctypes.memset(address, 7, SIZE_BYTES)
{end}
os._exit(ctypes.string_at(address, SIZE_BYTES) != bytes([7]) * SIZE_BYTES)
"""


class Machine:
    """A machine made of files, as the kernel would write them."""

    def __init__(self, folder: Path, available_bytes: int) -> None:
        self.folder = folder
        self.meminfo_path = folder / "meminfo"
        self.meminfo_path.write_text(
            f"MemTotal:       999 kB\nMemAvailable:   {available_bytes // 1024} kB\n"
            "HugePages_Total:       0\n"
        )
        self.cgroup_path = folder / "cgroup"
        self.cgroup_root = folder / "sys"

    def write(self, path: str, **files: object) -> None:
        (self.cgroup_root / path).mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            (self.cgroup_root / path / name.replace("__", ".")).write_text(f"{content}\n")

    def available(self, cgroup: str = "") -> int:
        self.cgroup_path.write_text(cgroup)
        return available_host_bytes(
            meminfo_path=self.meminfo_path,
            cgroup_path=self.cgroup_path,
            cgroup_root=self.cgroup_root,
        )


@pytest.fixture
def machine(tmp_path):
    return Machine(tmp_path, available_bytes=100 * GIB)


STAT = f"anon 1\nactive_file {GIB}\ninactive_file {2 * GIB}\nshmem 5"


@pytest.mark.parametrize(
    ("high", "maximum", "stat", "gib"),
    [
        pytest.param("max", "max", "", 100, id="no limit"),
        pytest.param("max", 10 * GIB, "", 6, id="less what is used"),
        pytest.param("max", 200 * GIB, "", 100, id="above what the machine has"),
        pytest.param(8 * GIB, 10 * GIB, "", 4, id="a throttling limit"),
        pytest.param("max", 10 * GIB, STAT, 9, id="file cache counts as free"),
        pytest.param("max", 1 * GIB, "", 0, id="above its limit"),
    ],
)
def test_a_version_2_group_has_what_is_left_below_its_limit(machine, high, maximum, stat, gib):
    assert machine.available() == 100 * GIB
    machine.write(
        "a", memory__max=maximum, memory__high=high, memory__current=4 * GIB, memory__stat=stat
    )
    assert machine.available("0::/a\n") == gib * GIB


def test_the_tightest_ancestor_decides(machine):
    machine.write("a/b", memory__max=50 * GIB, memory__current=1 * GIB)
    machine.write("a", memory__max=20 * GIB, memory__current=15 * GIB)
    machine.write("", memory__max="max", memory__current=30 * GIB)
    assert machine.available("0::/a/b\n") == 5 * GIB


def test_a_version_1_group_counts_and_its_word_for_no_limit_is_known(machine):
    stat = f"total_active_file {GIB}\ntotal_inactive_file 0\nactive_file {3 * GIB}"
    machine.write(
        "memory/slurm/job",
        memory__limit_in_bytes=10 * GIB,
        memory__usage_in_bytes=4 * GIB,
        memory__stat=stat,
    )
    machine.write("memory", memory__limit_in_bytes=(1 << 63) - 4096, memory__usage_in_bytes=1)
    assert machine.available("5:cpu,cpuacct:/x\n4:memory:/slurm/job\n0::/\n") == 7 * GIB


def test_version_2_beside_version_1_is_found_one_level_down(machine):
    machine.write("unified/a", memory__max=3 * GIB, memory__current=1 * GIB)
    assert machine.available("4:memory:/\n0::/a\n") == 2 * GIB


def test_in_a_container_the_limit_at_the_root_of_the_mount_counts(machine):
    machine.write("memory", memory__limit_in_bytes=2 * GIB, memory__usage_in_bytes=0)
    assert machine.available("4:memory:/docker/0123abc\n") == 2 * GIB
    machine.write("", memory__max=1 * GIB, memory__current=0)
    machine.write("other", memory__max=1 * MIB, memory__current=0)
    machine.write("..", memory__max=2 * MIB, memory__current=0)
    assert machine.available("0::/../../other\n") == 1 * GIB


def test_files_that_make_no_sense_are_passed_over(machine):
    machine.write("a", memory__max="junk", memory__high="", memory__current="-3")
    machine.write("", memory__max=4 * GIB, memory__current="٣")
    assert machine.available("0::/a\nno colons\n::::\n\n") == 100 * GIB


def test_without_the_kernels_figure_the_free_pages_count(machine):
    machine.meminfo_path.write_text("MemFree: 1 kB\n")
    assert machine.available() > 0


def check(extra: dict[str, object], pool_bytes: int, available_bytes: int, ranks: int = 1) -> None:
    check_host_bytes(
        OffloadConfig.from_extra_config(extra, world_size=ranks),
        bytes_per_rank=pool_bytes,
        num_ranks_on_host=ranks,
        available_bytes=available_bytes,
    )


def refusal(*args: object) -> str:
    with pytest.raises(ConfigError) as caught:
        check(*args)  # type: ignore[arg-type]
    return str(caught.value)


def test_a_pool_may_take_all_but_the_headroom():
    small = 2 * GIB
    check({}, small - HEADROOM_BYTES_MIN, small)
    refusal({}, small - HEADROOM_BYTES_MIN + 1, small)
    large = 1000 * GIB
    check({}, 950 * GIB, large)
    refusal({}, 950 * GIB + 1, large)


def test_a_pool_that_does_not_fit_is_refused_with_needed_available_and_the_value_that_fits():
    message = refusal({"cpu_bytes_to_use": "64GiB"}, 64 * GIB, 20 * GIB)
    assert 'The host pool ("cpu_bytes_to_use") needs 64.00 GiB' in message
    assert "20.00 GiB of host memory is available" in message
    assert "1.00 GiB must stay free" in message
    assert f'at most "{19 * 1024}MiB"' in message
    check({"cpu_bytes_to_use": f"{19 * 1024}MiB"}, 19 * GIB, 20 * GIB)


def test_all_ranks_of_the_machine_count():
    check({}, 4 * GIB, 20 * GIB, 4)
    message = refusal({"cpu_bytes_to_use": "32GiB"}, 8 * GIB, 20 * GIB, 4)
    assert "32.00 GiB (4 ranks on this machine, 8.00 GiB each)" in message
    assert f'set "cpu_bytes_to_use" in kv_connector_extra_config to at most "{19 * 1024}MiB"' in (
        message
    )


def test_memory_given_to_a_store_of_many_machines_counts():
    tier = {"url": "mooncake://master", "segment": "8GiB"}
    check({"tiers": [tier]}, 11 * GIB, 20 * GIB)
    message = refusal({"cpu_bytes_to_use": "12GiB", "tiers": [tier]}, 6 * GIB, 20 * GIB, 2)
    assert '1.00 GiB must stay free and 8.00 GiB are for "segment"' in message
    assert f'at most "{11 * 1024}MiB"' in message


def test_the_fix_names_the_key_that_decided():
    message = refusal({"cpu_bytes_to_use_per_rank": "8GiB"}, 8 * GIB, 20 * GIB, 4)
    assert (
        f'"cpu_bytes_to_use_per_rank" in kv_connector_extra_config to at most "{19 * 256}MiB"'
        in (message)
    )
    message = refusal({"num_cpu_blocks": 1000}, 10 * GIB, 2 * GIB)
    assert '"num_cpu_blocks" in kv_connector_extra_config to at most 150,' in message


@pytest.mark.parametrize("extra", [{}, {"num_cpu_blocks": 1}])
def test_where_nothing_fits_no_value_is_suggested(extra):
    message = refusal(extra, 8 * GIB, 100 * MIB)
    assert "nothing fits now" in message
    assert "set " not in message
