"""Whether there is room in /dev/shm for a pool that engines share; doctor and engine agree."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from safe_offload.commands.doctor.machine import SharedMemory
from safe_offload.commands.doctor.memory import (
    check_huge_pages,
    check_pool,
    check_shared_memory,
    pools_of,
)
from safe_offload.commands.doctor.vllm_facts import VllmFacts
from safe_offload.config.options import OffloadConfig
from safe_offload.config.units import GIB, MIB
from safe_offload.errors import SharingError
from safe_offload.findings import Finding, Severity
from safe_offload.node.pools import Pool, open_rank, user_folder
from safe_offload.worker.memory.huge_pages import HugePages
from tests.commands.doctor.test_doctor import MACHINE, SOUND, wrong
from tests.node.engines import pools_in, wanted
from tests.tiers.files.mounts import mounted, remount

SHM = Path("/dev/shm")
EMPTY = SharedMemory(folder=SHM, free_bytes=64 * MIB, file_system="tmpfs")


def found_of(shared: SharedMemory, size: str = "512MiB", **settings: Any) -> list[Finding]:
    extra = {"share": "node", "cpu_bytes_to_use": size, **settings}
    pools = pools_of([OffloadConfig.from_extra_config(extra, world_size=2)], SOUND, shared)
    found = list(check_shared_memory(shared, pools))
    wrong(found)
    return [*found, *check_pool(MACHINE, pools)]


def test_a_pool_that_does_not_fit_is_an_error_with_ways_to_more_room():
    found, memory = found_of(EMPTY)
    assert (found.id, found.severity) == ("memory.shared-memory", Severity.ERROR)
    assert found.found.startswith("/dev/shm has 64 MiB free, and the pool needs 517 MiB")
    assert "docker run --shm-size" in found.fix
    assert "an emptyDir with medium: Memory" in found.fix
    assert "512.00 MiB for 2 ranks of" in memory.found, "once for all engines"


@pytest.mark.parametrize(("size", "fits"), [("32MiB", True), ("64MiB", False)])
def test_a_pool_needs_room_for_its_table_too(size, fits):
    found, _ = found_of(EMPTY, size)
    assert found.severity is (Severity.OK if fits else Severity.ERROR)


def test_nothing_is_said_where_no_pool_is_shared():
    shared = SharedMemory(folder=SHM, problem="Read-only file system")
    pools = pools_of([OffloadConfig()], SOUND, shared)
    assert list(check_shared_memory(shared, pools)) == []


def test_a_pool_that_is_there_needs_no_room():
    mine = Pool(SHM / "safe_offload-0/3f2a", "an-8b-model", 60 * GIB, 9, 9, 0, is_used=True)
    other = Pool(SHM / "safe_offload-0/77aa", "another", 80 * GIB, 9, 9, 0, is_used=False)
    shared = SharedMemory(folder=SHM, file_system="tmpfs", pools=(other, mine))
    (found,) = found_of(shared, "60GiB")
    assert found.severity is Severity.INFO
    assert "3f2a of 60.00 GiB exists for an-8b-model" in found.found
    found, _ = found_of(SharedMemory(folder=SHM, file_system="tmpfs", pools=(other,)), "60GiB")
    assert found.severity is Severity.ERROR, "only another model's is there"
    assert "safe-offload cache ls node" in found.fix


@pytest.mark.parametrize("vllm", [SOUND, VllmFacts()], ids=["its model", "any model"])
@pytest.mark.parametrize("gib", [1, 22, 26, 60])
def test_a_pool_of_another_size_leaves_no_room_for_a_new_one(vllm, gib):
    there = Pool(SHM / "safe_offload-0/3f2a", "an-8b-model", gib * GIB, 9, 9, 0, is_used=True)
    shared = SharedMemory(folder=SHM, free_bytes=19 * GIB, file_system="tmpfs", pools=(there,))
    extra = {"share": "node", "cpu_bytes_to_use": "24GiB"}
    machine = replace(MACHINE, available_bytes=19 * GIB)
    for size, severity in ((gib, Severity.INFO), (24, Severity.ERROR)):
        extra["cpu_bytes_to_use"] = f"{size}GiB"
        pools = pools_of([OffloadConfig.from_extra_config(extra, world_size=1)], vllm, shared)
        assert [found.severity for found in check_shared_memory(shared, pools)] == [severity]
        found = [finding.severity for finding in check_pool(machine, pools)]
        assert found == ([] if severity is Severity.INFO else [Severity.ERROR])


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({}, ["ok: transparent huge pages of private memory"]),
        ({"tiers": [{"url": "file:///kv"}]}, ["warning: transparent huge pages of memory that"]),
        ({"share": "node"}, ["warning: transparent huge pages of files in shared memory"]),
    ],
)
def test_each_pool_follows_the_setting_of_its_kind_for_huge_pages(settings, said):
    none = HugePages("never", is_given=False, fix="do this")
    shared = replace(EMPTY, huge_pages=none)
    machine = replace(MACHINE, shared_memory=shared, huge_pages_memfd=none)
    config = OffloadConfig.from_extra_config(settings, world_size=1)
    found = check_huge_pages(machine, pools_of([config], SOUND, shared))
    assert [f"{f.severity.value}: {f.found}"[: len(said[0])] for f in found] == said
    assert all(f.fix == "do this, on the host" for f in found if f.severity is Severity.WARNING)


def test_how_large_a_pool_in_blocks_is_may_be_unknown():
    pools = pools_of(
        [OffloadConfig.from_extra_config({"share": "node", "num_cpu_blocks": 9}, world_size=1)],
        SOUND.__class__(),
        EMPTY,
    )
    (found,) = check_shared_memory(EMPTY, pools)
    assert found.severity is Severity.INFO
    assert "MODEL is needed" in found.found


def test_a_disk_in_the_place_of_memory():
    found, _ = found_of(SharedMemory(folder=SHM, free_bytes=GIB, file_system="overlay"))
    assert found.severity is Severity.WARNING
    assert "is on overlay" in found.found


def test_a_folder_of_ours_that_others_can_read(tmp_path):
    with pools_in(tmp_path):
        user_folder().mkdir(mode=0o755)
        shared = SharedMemory.read()
        with pytest.raises(SharingError) as refused:
            open_rank(wanted(4))
    found, _ = found_of(shared)
    assert found.severity is Severity.ERROR
    assert str(refused.value) in found.found
    assert f"user {os.geteuid()}" in found.found


def test_a_folder_that_is_not_there(tmp_path):
    with pools_in(tmp_path / "missing"):
        assert "No such file or directory" in SharedMemory.read().problem


def test_on_a_small_file_system_doctor_says_what_the_engine_would(tmp_path):
    """Nothing is left there by looking; a pool that was made is found."""
    with mounted(tmp_path / "shm", size_bytes=4 * MIB) as folder, pools_in(folder):
        shared = SharedMemory.read()
        assert (shared.problem, shared.file_system, shared.free_bytes) == ("", "tmpfs", 4 * MIB)
        assert list(folder.iterdir()) == []
        remount(folder, "ro")
        assert "Read-only file system" in SharedMemory.read().problem
        remount(folder, "rw")
        found, _ = found_of(shared)
        with pytest.raises(SharingError) as refused:
            open_rank(wanted(16, size_of=lambda count: count * MIB))
        assert found.severity is Severity.ERROR
        assert found.fix in str(refused.value)
        (user_folder() / "pool" / "table").unlink()
        file = open_rank(wanted(16))
        (pool,) = SharedMemory.read().pools
        assert pool.num_slots == 16
        file.locks.close()
        file.mapping.close()
