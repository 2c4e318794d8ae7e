"""What may lie in the place of an object, and what may become of the directory of a file tier.

Each is a miss or a store that is dropped, with a result that says why and a line in the log.
"""

import asyncio
import contextlib
import ctypes
import errno
import os
import shutil
import socket
import stat
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from safe_offload.tiers.base import Name, Result
from safe_offload.tiers.files import object_file
from safe_offload.tiers.naming import namespace, namespace_folder
from tests.tiers.contract import (
    FACTS,
    PATIENCE_S,
    SPACE,
    bytes_of,
    fetch_one,
    filled,
    name_of,
    slot_of,
    spill_one,
)
from tests.tiers.files.mounts import mount, mounted, remount, unmount
from tests.tiers.files.paths import files_below, folders_below, path_in, said

LENGTHS = (4096, 4096)
NOBODY = 65534


@pytest.fixture
def other_user(base):
    """A directory of a user who is not root, who may read and write everything."""
    root = base / "tier"
    root.mkdir(mode=0o700)
    if os.geteuid() == 0:
        os.chown(root, NOBODY, NOBODY)
    return root


@contextlib.contextmanager
def as_other_user() -> Iterator[None]:
    """Threads that are started meanwhile touch files as a user who is not root.

    Source: setfsuid(2): of the calling thread, inherited by those that it starts.
    """
    libc = ctypes.CDLL(None)
    if os.geteuid() == 0:
        libc.setfsuid(NOBODY)
    try:
        yield
    finally:
        libc.setfsuid(os.geteuid())


# ---- in the place of an object ------------------------------------------------------------------


def a_directory(path: Path) -> None:
    path.unlink()
    path.mkdir()
    (path / "something").touch()


def a_link_to_a_good_object(path: Path) -> None:
    path.rename(path.with_name("aside"))
    path.symlink_to("aside")


def a_link_to_nothing(path: Path) -> None:
    path.unlink()
    path.symlink_to("nowhere")


def a_fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def a_socket(path: Path) -> None:
    path.unlink()
    with contextlib.chdir(path.parent), socket.socket(socket.AF_UNIX) as made:
        made.bind(path.name)  # its path would be too long


@pytest.mark.parametrize(
    "put", [a_directory, a_link_to_a_good_object, a_link_to_nothing, a_fifo, a_socket]
)
async def test_what_is_not_a_file_is_unreadable_and_asked_for_once(make, root, put, package_log):
    tier, name = make(), name_of(1)
    await spill_one(tier, name, filled(LENGTHS))
    path = path_in(root, name)
    put(path)
    fetched = await asyncio.wait_for(fetch_one(tier, name, slot_of(LENGTHS)), PATIENCE_S)
    assert fetched is Result.UNREADABLE
    assert path.is_symlink() or path.exists(), "it is not ours to delete"
    assert await tier.probe([name]) == [False], "it is not offered again"
    assert any("Unusable object in tier" in line for line in said(package_log))
    spilled = await spill_one(tier, name, filled(LENGTHS))
    assert spilled is (Result.UNREADABLE if path.is_dir() else Result.DONE)
    assert await tier.probe([name]) == [spilled is Result.DONE]
    assert not [file for file in files_below(root) if "tmp-" in file]


async def test_a_link_in_place_of_a_folder_is_not_followed(make, root, tmp_path):
    tier, name = make(), name_of(1)
    await spill_one(tier, name, filled(LENGTHS))
    for folder in (path_in(root, name).parent, path_in(root, name).parent.parent):
        aside = tmp_path / folder.name
        folder.rename(aside)
        folder.symlink_to(aside)
        before = files_below(aside)
        assert await fetch_one(tier, name, slot_of(LENGTHS)) in (Result.UNREADABLE, Result.FAILED)
        other = Name(SPACE, 1, name.block_hash)
        assert await spill_one(tier, other, filled(LENGTHS)) in (Result.UNREADABLE, Result.FAILED)
        assert files_below(aside) == before
        folder.unlink()
        aside.rename(folder)
    assert await fetch_one(make(), name, slot_of(LENGTHS)) is Result.DONE


async def test_a_file_of_mode_000_is_unreadable_until_it_is_written_again(
    other_user, make, package_log
):
    with as_other_user():
        tier, name = make(other_user), name_of(1)
    assert await spill_one(tier, name, filled(LENGTHS)) is Result.DONE
    path_in(other_user, name).chmod(0)
    assert await fetch_one(tier, name, slot_of(LENGTHS)) is Result.UNREADABLE
    assert await tier.probe([name]) == [False]
    assert len(said(package_log)) == 1
    path_in(other_user, name).unlink()
    assert await spill_one(tier, name, filled(LENGTHS)) is Result.DONE
    assert await tier.probe([name]) == [True]


# ---- the directory ------------------------------------------------------------------------------


async def test_nobody_else_may_read_what_is_stored(make, root):
    before = os.umask(0)
    try:
        await spill_one(make(capacity_bytes=1 << 20), name_of(1), filled(LENGTHS))
    finally:
        os.umask(before)
    paths = [*folders_below(root), *(root / file for file in files_below(root))]
    assert len(paths) == 3 + 4
    for path in paths:
        mode = stat.S_IMODE(path.stat().st_mode)
        assert mode == (0o700 if path.is_dir() else 0o600), path


async def test_a_directory_that_others_may_write_is_taken_back(make, root):
    """As with a volume of Kubernetes that has an fsGroup."""
    await spill_one(make(), name_of(1), filled(LENGTHS))
    folder = root / namespace_folder(SPACE)
    folder.chmod(0o2770)
    assert await fetch_one(make(), name_of(1), slot_of(LENGTHS)) is Result.DONE
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


async def test_a_directory_that_cannot_be_written_can_be_read(other_user, make, package_log):
    with as_other_user():
        first, tier = make(other_user), make(other_user)
    assert await spill_one(first, name_of(1), filled(LENGTHS)) is Result.DONE
    assert await tier.probe([name_of(1)]) == [True]
    folders = folders_below(other_user)
    for folder in folders:
        folder.chmod(0o500)
    assert await fetch_one(tier, name_of(1), slot_of(LENGTHS)) is Result.DONE
    assert await spill_one(tier, name_of(2), filled(LENGTHS)) is Result.REFUSED
    assert any("failed to read or write" in line for line in said(package_log))
    for folder in folders:
        folder.chmod(0o700)


async def test_a_directory_that_is_removed_while_it_is_used_is_made_again(make, root):
    tier = make(capacity_bytes=1 << 20)
    for _ in range(2):
        assert await spill_one(tier, name_of(1), filled(LENGTHS)) is Result.DONE
        assert await tier.probe([name_of(1)]) == [True]
        shutil.rmtree(root)
        assert await fetch_one(tier, name_of(1), slot_of(LENGTHS)) is Result.ABSENT
    assert await spill_one(tier, name_of(1), filled(LENGTHS)) is Result.DONE
    shutil.rmtree(root / namespace_folder(SPACE))
    assert await spill_one(tier, name_of(1), filled(LENGTHS)) is Result.DONE
    assert (root / namespace_folder(SPACE) / "namespace.json").exists()


async def test_nothing_is_written_below_a_mount_that_is_gone(make, tmp_path, package_log):
    folder = tmp_path / "mnt"
    with mounted(folder):
        tier = make(folder / "kv")
        assert await spill_one(tier, name_of(1), filled(LENGTHS)) is Result.DONE
        unmount(folder)  # no descriptor is kept, else this fails
        with pytest.raises(OSError, match=r"nothing is mounted at .* any more"):
            await tier.probe([name_of(1)])
        assert await spill_one(tier, name_of(1), filled(LENGTHS)) is Result.FAILED
        assert list(folder.iterdir()) == []
        assert len(said(package_log)) == 1
        mount(folder)
        assert await spill_one(tier, name_of(1), filled(LENGTHS)) is Result.DONE
        assert await fetch_one(tier, name_of(1), slot_of(LENGTHS)) is Result.DONE


async def test_a_read_only_file_system_is_read(make, tmp_path, package_log):
    with mounted(tmp_path / "mnt") as folder:
        assert await spill_one(make(folder), name_of(1), filled(LENGTHS)) is Result.DONE
        remount(folder, "ro")
        tier = make(folder)
        assert await tier.probe([name_of(1)]) == [True]
        assert await fetch_one(tier, name_of(1), slot_of(LENGTHS)) is Result.DONE
        assert await spill_one(tier, name_of(2), filled(LENGTHS)) is Result.REFUSED
        assert any("Read-only file system" in line for line in said(package_log))
        remount(folder, "rw")
        assert await spill_one(tier, name_of(2), filled(LENGTHS)) is Result.DONE


@pytest.mark.parametrize("kind", ["tmpfs", "ext4"])
@pytest.mark.parametrize("capacity_bytes", [None, 1 << 30])
async def test_a_full_disk_drops_stores_and_makes_room(
    make, tmp_path, kind, capacity_bytes, package_log
):
    with mounted(tmp_path / "mnt", kind, 16 << 20) as folder:
        tier = make(folder / "kv", capacity_bytes=capacity_bytes)
        names = [name_of(number) for number in range(400)]
        source, results = filled((256 << 10,)), []
        for name in names:
            results.append(await spill_one(tier, name, source))
        assert set(results) == {Result.DONE, Result.FULL}
        assert results.count(Result.DONE) > 60, "the disk holds about 60: some were evicted"
        assert any("is full" in line and "Fix: free" in line for line in said(package_log))
        assert len(said(package_log)) == 1
        there = await tier.probe(names)
        assert 30 < sum(there) < 64
        held = [name for name, is_there in zip(names, there, strict=True) if is_there]
        targets = [slot_of((256 << 10,)) for _ in held]
        fetched = await tier.fetch(held, targets)  # while some may be evicted
        assert set(fetched) <= {Result.DONE, Result.ABSENT}
        arrived = [t for t, result in zip(targets, fetched, strict=True) if result is Result.DONE]
        assert {bytes_of(target) for target in arrived} == {bytes_of(source)}
        assert not [file for file in files_below(folder) if "tmp-" in file]


# ---- what the system may do ----------------------------------------------------------------------


async def test_without_direct_access_everything_goes_through_the_page_cache(
    make, monkeypatch, package_log
):
    real_open = os.open

    def refuse_direct(path: str, flags: int, *args: int, **options: int) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real_open(path, flags, *args, **options)

    monkeypatch.setattr(object_file.os, "open", refuse_direct)
    tier = make()
    for number, shift in enumerate((0, 1)):
        source, target = filled(LENGTHS, number, shift=shift), slot_of(LENGTHS, shift=shift)
        assert await spill_one(tier, name_of(number), source) is Result.DONE
        assert await fetch_one(tier, name_of(number), target) is Result.DONE
        assert bytes_of(target) == bytes_of(source)
    lines = [record.getMessage() for record in package_log]
    assert sum("with buffered I/O" in line for line in lines) == 1


@pytest.mark.parametrize("shift", [0, 1])
async def test_reads_and_writes_that_come_in_pieces_are_gone_on_with(make, monkeypatch, shift):
    def in_pieces(real: Callable[..., int]) -> Callable[..., int]:
        return lambda fd, buffers, offset: real(fd, [buffers[0][:4096]], offset)

    for which in ("preadv", "pwritev"):
        monkeypatch.setattr(object_file.os, which, in_pieces(getattr(os, which)))
    source, target = filled((4096, 12288, 8192), 1, shift=shift), slot_of((24576,), shift=shift)
    tier = make()
    assert await spill_one(tier, name_of(1), source) is Result.DONE
    assert await fetch_one(tier, name_of(1), target) is Result.DONE
    assert bytes_of(target) == bytes_of(source)


async def test_a_write_that_ends_early_leaves_no_object(make, root, monkeypatch):
    tier = make()
    await spill_one(tier, name_of(0), filled(LENGTHS))
    monkeypatch.setattr(object_file.os, "pwritev", lambda *_: 0)
    assert await spill_one(tier, name_of(1), filled(LENGTHS)) is Result.FAILED
    assert await tier.probe([name_of(1)]) == [False]
    assert not [file for file in files_below(root) if "tmp-" in file]


async def test_an_error_of_the_device_is_a_failure(make, monkeypatch, package_log):
    def broken(*_: object) -> int:
        raise OSError(errno.EIO, "Input/output error")

    tier = make()
    await spill_one(tier, name_of(0), filled(LENGTHS))
    monkeypatch.setattr(object_file.os, "preadv", broken)
    for _ in range(3):
        assert await fetch_one(tier, name_of(0), slot_of(LENGTHS)) is Result.FAILED
    assert len(said(package_log)) == 1, "once a minute"


async def test_a_batch_that_is_given_up_ends_with_the_object_that_was_begun(make, monkeypatch):
    has_begun, may_end, real_write = threading.Event(), threading.Event(), os.pwritev

    def write(*arguments: Any) -> int:
        has_begun.set()
        assert may_end.wait(PATIENCE_S)
        return real_write(*arguments)

    tier = make(num_threads=1)
    await spill_one(tier, name_of(0), filled(LENGTHS))
    monkeypatch.setattr(object_file.os, "pwritev", write)
    names = [name_of(number) for number in (1, 2, 3)]
    spilling = asyncio.ensure_future(tier.spill(names, [filled(LENGTHS)] * 3))
    try:
        assert await asyncio.to_thread(has_begun.wait, PATIENCE_S)
        spilling.cancel()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert not spilling.done()
    finally:
        may_end.set()
    assert await spilling == [Result.DONE, Result.CANCELLED, Result.CANCELLED]


async def test_no_descriptor_is_left_open(make):
    tier = make(capacity_bytes=1 << 20)
    before = len(os.listdir("/proc/self/fd"))
    for number in range(3):
        await spill_one(tier, name_of(number), filled(LENGTHS))
        await fetch_one(tier, name_of(number), slot_of(LENGTHS))
        await fetch_one(tier, name_of(100), slot_of(LENGTHS))
        await tier.probe([name_of(number), name_of(9, space=namespace(FACTS, "w"))])
    await tier.close()
    assert len(os.listdir("/proc/self/fd")) <= before
