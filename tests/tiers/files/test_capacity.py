"""What a directory may hold: kept by all processes, the least recently used goes first."""

import asyncio
import contextlib
import errno
import fcntl
import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from safe_offload.tiers.base import Result
from safe_offload.tiers.files import capacity, object_file
from safe_offload.tiers.files import file_store as files
from safe_offload.tiers.files.capacity import (
    EVICT_FROM,
    EVICT_TO,
    LOCK_FILE,
    ORPHAN_AGE_S,
    USAGE_FILE,
    Kept,
    Usage,
    keep,
)
from safe_offload.tiers.files.directory import Stored, size_on_disk, walk
from safe_offload.tiers.naming import HEADER_BYTES, namespace_folder
from tests.tiers.contract import PATIENCE_S, SPACE, fetch_one, filled, name_of, slot_of, spill_one
from tests.tiers.files.paths import path_in

OBJECT_BYTES = 60 << 10
FILE_BYTES = HEADER_BYTES + OBJECT_BYTES
LIMIT_BYTES = 64 * FILE_BYTES
SOURCE = filled((OBJECT_BYTES,))


@pytest.fixture
def make(make):
    return lambda capacity_bytes=LIMIT_BYTES, num_threads=4: make(
        capacity_bytes=capacity_bytes, num_threads=num_threads
    )


@contextlib.contextmanager
def opened(path: Path, flags: int = os.O_RDWR, *, is_locked: bool = False) -> Iterator[int]:
    file_fd = os.open(path, flags)
    try:
        if is_locked:
            fcntl.flock(file_fd, fcntl.LOCK_EX)
        yield file_fd
    finally:
        os.close(file_fd)


def held_bytes(root: Path) -> int:
    with opened(root, os.O_RDONLY) as root_fd:
        return sum(file.size_bytes for file, _ in walk(root_fd))


def taken_bytes(root: Path) -> int:
    with opened(root / USAGE_FILE) as usage_fd:
        usage = Usage.read(usage_fd)
    assert usage is not None
    return usage.taken_bytes


def set_taken(root: Path, size_bytes: int, generation: int = 7) -> None:
    with opened(root / USAGE_FILE) as usage_fd:
        Usage(generation, size_bytes).write(usage_fd)


def count(root: Path, limit_bytes: int | None = LIMIT_BYTES) -> Kept | None:
    with opened(root, os.O_RDONLY) as root_fd:
        return keep(root_fd, limit_bytes)


def set_age(path: Path, age_s: float) -> None:
    at_s = time.time() - age_s
    os.utime(path, (at_s, at_s))


def orphan_in(root: Path, age_s: float = 1e9, file: str = "tmp-1-1-aa") -> Path:
    orphan = root.joinpath(namespace_folder(SPACE), "01", file)
    orphan.write_bytes(b"x")
    set_age(orphan, age_s)
    return orphan


async def test_a_directory_never_holds_more_than_its_capacity(make, root):
    tiers = [make() for _ in range(3)]
    for start in range(0, 300, 30):
        batches = [[name_of(1000 * i + n) for n in range(start, start + 30)] for i in range(3)]
        results = await asyncio.gather(
            *(t.spill(b, [SOURCE] * 30) for t, b in zip(tiers, batches, strict=True))
        )
        assert {r for batch in results for r in batch} <= {Result.DONE, Result.FULL}
        with opened(root / LOCK_FILE, is_locked=True):  # a count would evict between the two looks
            assert held_bytes(root) <= min(taken_bytes(root), LIMIT_BYTES)
    assert held_bytes(root) > LIMIT_BYTES / 2


async def test_one_writer_is_not_refused_when_others_can_be_evicted(make):
    tier = make(num_threads=1)
    results = await tier.spill([name_of(n) for n in range(300)], [SOURCE] * 300)
    assert set(results) == {Result.DONE}
    assert tier.used_bytes <= LIMIT_BYTES


async def test_what_was_used_least_recently_goes_first(make, root):
    tier, names = make(), [name_of(n) for n in range(50)]
    await tier.spill(names, [SOURCE] * 50)
    order = random.Random(3).sample(range(50), 50)
    for age, number in enumerate(order):
        set_age(path_in(root, names[number]), 1000 + age)
    kept = count(root, 50 * FILE_BYTES)
    assert kept is not None
    assert kept.held_bytes == held_bytes(root) <= EVICT_TO * 50 * FILE_BYTES
    assert kept.num_evicted == 5
    gone = {names[number] for number in order[-5:]}
    assert await tier.probe(names) == [name not in gone for name in names]


async def test_a_hit_and_a_second_store_make_an_object_young(make, root):
    tier, names = make(), [name_of(n) for n in range(50)]
    await tier.spill(names, [SOURCE] * 50)
    for name in names:
        set_age(path_in(root, name), 1000)
    assert await fetch_one(tier, names[7], slot_of((OBJECT_BYTES,))) is Result.DONE
    assert await spill_one(tier, names[8], SOURCE) is Result.PRESENT
    count(root, 10 * FILE_BYTES)
    there = await tier.probe(names)
    assert there[7]
    assert there[8]
    assert sum(there) == 9


async def test_a_hit_is_noted_at_most_once_a_minute(make, root, monkeypatch):
    """By us: many file systems are mounted so that the kernel notes it once a day, or never."""
    tier, noted, real = make(), [], os.utime
    await spill_one(tier, name_of(1), SOURCE)
    set_age(path_in(root, name_of(1)), 100)

    def note(file: int, *, ns: tuple[int, int]) -> None:
        noted.append(ns[0])
        real(file, ns=ns)

    monkeypatch.setattr(object_file.os, "utime", note)
    for _ in range(3):
        assert await fetch_one(tier, name_of(1), slot_of((OBJECT_BYTES,))) is Result.DONE
    assert len(noted) == 1
    assert abs(noted[0] - time.time_ns()) < 100 * 10**9


async def test_what_a_closed_engine_took_ahead_goes_back(make, root):
    tier = make(capacity_bytes=1 << 30)
    await spill_one(tier, name_of(1), SOURCE)
    assert taken_bytes(root) > 2 * FILE_BYTES
    await tier.close()
    assert taken_bytes(root) == FILE_BYTES == held_bytes(root)


async def test_what_a_killed_engine_took_ahead_is_found_by_the_next_count(make, root):
    await spill_one(make(capacity_bytes=1 << 30), name_of(1), SOURCE)  # and is never closed
    count(root, 1 << 30)
    assert taken_bytes(root) == FILE_BYTES


async def test_what_was_taken_before_a_count_is_void_after_it(make, root):
    """Else it could be written beside what the count has found to be free."""
    tier = make(capacity_bytes=1 << 30)
    await spill_one(tier, name_of(1), SOURCE)
    count(root, 1 << 30)
    await spill_one(tier, name_of(2), SOURCE)
    assert taken_bytes(root) >= 2 * FILE_BYTES


@pytest.mark.parametrize("damage", [b"", b"x" * 24, b"x" * 100, bytes(24)])
async def test_a_usage_file_that_is_damaged_is_counted_anew(make, root, damage):
    names = [name_of(n) for n in range(10)]
    await make().spill(names, [SOURCE] * 10)
    (root / USAGE_FILE).write_bytes(damage)
    assert await spill_one(make(), name_of(11), SOURCE) is Result.DONE
    assert taken_bytes(root) >= held_bytes(root) == 11 * FILE_BYTES


async def test_orphans_are_swept_after_an_hour(make, root):
    tier = make()
    await spill_one(tier, name_of(1), SOURCE)
    old = orphan_in(root, ORPHAN_AGE_S + 10)
    young = orphan_in(root, ORPHAN_AGE_S - 60, "tmp-2-1-bb")
    kept = count(root)
    assert kept is not None
    assert kept.num_orphans == 1
    assert not old.exists()
    assert young.exists(), "it may be written at this moment"


async def test_the_first_store_sweeps(make, root):
    await spill_one(make(None), name_of(1), SOURCE)
    orphan = orphan_in(root)
    tier = make()
    await spill_one(tier, name_of(2), SOURCE)
    await tier.close()  # waits for the count
    assert not orphan.exists()


async def test_an_object_larger_than_the_capacity_is_refused(make, root):
    tier = make(capacity_bytes=FILE_BYTES - 1)
    assert await spill_one(tier, name_of(1), SOURCE) is Result.FULL
    assert await spill_one(make(capacity_bytes=FILE_BYTES), name_of(1), SOURCE) is Result.DONE


async def test_one_process_evicts_at_a_time(make, root, monkeypatch):
    """Who finds no room while another is at it drops its store."""
    monkeypatch.setattr(capacity, "_PATIENCE_S", 0.05)
    monkeypatch.setattr(capacity, "_PAUSE_S", 0.0)
    tier = make(num_threads=1)
    await tier.spill([name_of(n) for n in range(60)], [SOURCE] * 60)
    with opened(root / LOCK_FILE, is_locked=True):
        assert count(root) is None
        results = await tier.spill([name_of(n) for n in range(100, 110)], [SOURCE] * 10)
        assert Result.FULL in results
        assert held_bytes(root) <= LIMIT_BYTES
    results = await tier.spill([name_of(n) for n in range(200, 260)], [SOURCE] * 60)
    assert Result.DONE in results
    assert held_bytes(root) <= LIMIT_BYTES


async def test_a_count_that_is_wanted_when_one_has_just_ended_is_made(make, root, monkeypatch):
    """The first has woken who waited for it, and its thread has not come to the end of its job."""
    has_counted, is_wanted_again = threading.Event(), threading.Event()
    real_start = files.start_threads

    class Keeper(ThreadPoolExecutor):
        num_jobs = 0

        def submit(self, job: Callable[..., None], /, **options: bool) -> Future[None]:  # type: ignore[override]
            self.num_jobs += 1
            if self.num_jobs > 1:
                is_wanted_again.set()
            return super().submit(self._run, job, options)

        def _run(self, job: Callable[..., None], options: dict[str, bool]) -> None:
            job(**options)
            has_counted.set()
            is_wanted_again.wait(PATIENCE_S)

    def start(num_threads: int, name: str) -> ThreadPoolExecutor:
        return Keeper(1) if name.endswith("keep") else real_start(num_threads, name)

    monkeypatch.setattr(files, "start_threads", start)
    monkeypatch.setattr(capacity, "_PATIENCE_S", PATIENCE_S)
    tier = make(num_threads=1)
    assert await spill_one(tier, name_of(1), SOURCE) is Result.DONE
    assert await asyncio.to_thread(has_counted.wait, PATIENCE_S)
    set_taken(root, LIMIT_BYTES)
    assert await spill_one(tier, name_of(2), SOURCE) is Result.DONE


async def test_who_finds_no_room_while_another_process_evicts_waits_for_it(make, root, monkeypatch):
    monkeypatch.setattr(capacity, "_PATIENCE_S", PATIENCE_S)
    tier, real_keep = make(num_threads=1), capacity.keep
    await tier.spill([name_of(n) for n in range(60)], [SOURCE] * 60)
    set_taken(root, LIMIT_BYTES)

    def keep_beside_another(*arguments: Any, **options: Any) -> Kept | None:
        monkeypatch.setattr(capacity, "keep", real_keep)
        lock_fd = os.open(root / LOCK_FILE, os.O_RDWR)
        fcntl.flock(lock_fd, fcntl.LOCK_EX)

        def end() -> None:
            set_taken(root, LIMIT_BYTES // 2, generation=8)
            os.close(lock_fd)

        kept = real_keep(*arguments, **options)
        threading.Timer(0.1, end).start()
        return kept

    monkeypatch.setattr(capacity, "keep", keep_beside_another)
    assert await spill_one(tier, name_of(100), SOURCE) is Result.DONE


async def test_without_a_lock_nothing_is_written(make, root, monkeypatch):
    """A file system without `flock`, or a process that is stopped while it has the lock."""
    monkeypatch.setattr(capacity, "_LOCK_PATIENCE_S", 0.02)
    await spill_one(make(), name_of(1), SOURCE)
    with opened(root / USAGE_FILE, is_locked=True):
        tier = make()
        assert await spill_one(tier, name_of(2), SOURCE) is Result.FAILED
        assert await fetch_one(tier, name_of(1), slot_of((OBJECT_BYTES,))) is Result.DONE


def test_a_file_takes_whole_pages():
    assert [size_on_disk(n) for n in (0, 1, 4096, 4097)] == [0, 4096, 4096, 8192]
    assert 0 < EVICT_TO < EVICT_FROM < 1


async def test_the_directory_is_counted_every_hour(make, root, monkeypatch):
    threads: dict[str, ThreadPoolExecutor] = {}
    real_start = files.start_threads

    def start(num_threads: int, name: str) -> ThreadPoolExecutor:
        threads[name] = real_start(num_threads, name)
        return threads[name]

    monkeypatch.setattr(files, "start_threads", start)
    tier = make(None)
    await spill_one(tier, name_of(1), SOURCE)
    first_count_ended = threads["safe-offload-tier-keep"].submit(int)
    await asyncio.wrap_future(first_count_ended)
    now_s = time.monotonic()
    monkeypatch.setattr(files.time, "monotonic", lambda: now_s + files.SWEEP_EVERY_S + 1)
    orphan = orphan_in(root)
    await spill_one(tier, name_of(2), SOURCE)
    await tier.close()
    assert not orphan.exists()


# ---- beside an engine without a capacity --------------------------------------------------------


async def test_an_engine_with_a_capacity_keeps_it_beside_one_without(make, root):
    """It evicts what the other has written before it writes, however much that is."""
    free, limited = make(None, num_threads=1), make(num_threads=1)
    num_written = 0
    for start in range(0, 1000, 200):
        await free.spill([name_of(n) for n in range(start, start + 150)], [SOURCE] * 150)
        assert held_bytes(root) > 2 * LIMIT_BYTES
        for number in range(start + 150, start + 160):
            if await spill_one(limited, name_of(number), SOURCE) is Result.DONE:
                num_written += 1
                assert held_bytes(root) <= LIMIT_BYTES
    assert num_written >= 40, "it is not kept from writing either"
    assert taken_bytes(root) >= held_bytes(root)


async def test_engines_without_a_capacity_take_little_ahead(make, root):
    """What they take is not there for those that have one."""
    await make(None).spill([name_of(n) for n in range(60)], [SOURCE] * 60)
    assert held_bytes(root) <= taken_bytes(root) <= held_bytes(root) + 4 * FILE_BYTES


def test_while_what_is_there_is_counted_nothing_is_taken_ahead(root, monkeypatch):
    root.mkdir(mode=0o700)
    free, real_walk = capacity.CapacityShare(None), capacity.walk

    def walk(root_fd: int) -> Iterator[tuple[Stored, int]]:
        assert free.take(root_fd, FILE_BYTES) is not None
        return real_walk(root_fd)

    monkeypatch.setattr(capacity, "walk", walk)
    assert count(root, None) is not None
    assert taken_bytes(root) == FILE_BYTES


async def test_while_an_engine_without_a_capacity_counts_others_take_nothing(
    make, root, monkeypatch
):
    await make(None).spill([name_of(n) for n in range(100)], [SOURCE] * 100)
    (root / USAGE_FILE).unlink()
    other, taken, real_walk = capacity.CapacityShare(LIMIT_BYTES), [], capacity.walk

    def walk(root_fd: int) -> Iterator[tuple[Stored, int]]:
        taken.append(other.take(root_fd, FILE_BYTES))
        return real_walk(root_fd)

    monkeypatch.setattr(capacity, "walk", walk)
    count(root, None)
    assert taken == [None]
    assert taken_bytes(root) == held_bytes(root) == 100 * FILE_BYTES


async def test_without_a_lock_an_engine_without_a_capacity_writes(make, root, monkeypatch):
    """There is no `flock` on some network file systems, and it needs none."""

    def refuse(*_: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(capacity.fcntl, "flock", refuse)
    assert await spill_one(make(None), name_of(1), SOURCE) is Result.DONE
    assert await spill_one(make(), name_of(2), SOURCE) is Result.FAILED
