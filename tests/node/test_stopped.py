"""A process that is stopped (SIGSTOP, docker pause, a debugger) holds up nobody else for long."""

import contextlib
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from safe_offload.errors import StalledError
from safe_offload.node import pools
from safe_offload.node.locks import LOTS, NAPS, Locks
from safe_offload.node.pools import open_rank, remove_pool, user_folder, wait_for
from tests.node.engines import Engine, hash_of, pools_in, wanted
from tests.worker.waiting import wait_until

SLOTS = 256
A, B = (hash_of(9, number) for number in range(2))


@contextlib.contextmanager
def stopped(work: Callable[..., Any], *args: Any) -> Iterator[Any]:
    """A process that has stopped itself in the middle of its work; killed in the end."""
    process = multiprocessing.get_context("fork").Process(target=work, args=args)
    process.start()
    wait_until(lambda: _state_of(process.pid) == "T")
    try:
        yield process
    finally:
        process.kill()
        process.join()


def _state_of(process_id: int | None) -> str:
    return Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()[0]


def stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def make_and_stop(name: str) -> None:
    open_rank(wanted(SLOTS, name=name, check=lambda _: stop())).locks.close()


def free_and_stop() -> None:
    """Stop with the nap of a neighbour, whose lots are about to be freed."""
    engine = Engine(SLOTS)
    take = engine.table.locks.take

    def take_and_stop(place: int) -> bool:
        if (has_it := take(place)) and NAPS <= place < LOTS and place != NAPS + engine.table.engine:
            stop()
        return has_it

    engine.table.locks.take = take_and_stop
    engine.slots.grant(SLOTS)
    engine.slots.grant(SLOTS)


@pytest.fixture
def folder(tmp_path):
    with pools_in(tmp_path):
        yield tmp_path


def test_who_makes_a_pool_holds_up_nobody_who_wants_another(folder):
    open_rank(wanted(SLOTS, name="old")).locks.close()
    with stopped(make_and_stop, "pool"):
        open_rank(wanted(SLOTS, name="another")).locks.close()
        assert remove_pool(user_folder() / "old") == ""
        assert "being created" in remove_pool(user_folder() / "pool")


@pytest.mark.parametrize("is_killed", [True, False])
def test_who_waits_for_a_pool_that_is_being_made_gives_up_or_goes_on(
    folder, monkeypatch, is_killed
):
    with stopped(make_and_stop, "pool") as process:
        monkeypatch.setattr(pools, "MAKING_TIMEOUT_S", 0.1)
        with pytest.raises(StalledError, match="made no progress for"):
            open_rank(wanted(SLOTS))
        os.kill(process.pid, signal.SIGKILL if is_killed else signal.SIGCONT)
        process.join()
        file = open_rank(wanted(SLOTS))
        assert file.is_new == is_killed
        file.locks.close()


def test_memory_that_is_being_taken_is_waited_for_as_long_as_it_grows(folder, package_log):
    one, other = (Locks(str(folder / "lock"), make=True) for _ in range(2))
    one.take(7)
    sizes = iter(range(60))

    def size() -> int:
        if (found := next(sizes)) == 59:
            one.close()
        return found

    wait_for(other, 7, "creating it", 0.0, size)
    assert [line.getMessage() for line in package_log if "Waiting for" in line.getMessage()] == [
        "Waiting for another process: creating it. It may be suspended."
    ]
    other.close()


def test_what_others_are_about_to_take_is_no_room(folder):
    asked: list[int] = []
    with stopped(_take_and_stop):
        open_rank(wanted(SLOTS, name="another", check=asked.append)).locks.close()
    assert asked[0] > 64 << 20


def _take_and_stop() -> None:
    take = os.posix_fallocate

    def take_or_stop(fd: int, at: int, size_bytes: int) -> None:
        if size_bytes > 64 << 20:  # not the table
            stop()
        take(fd, at, size_bytes)

    os.posix_fallocate = take_or_stop
    open_rank(wanted(1, name="big", size_of=lambda count: 64 << 20))


@pytest.mark.parametrize("how", [signal.SIGCONT, signal.SIGKILL])
def test_who_cannot_wake_wakes_when_the_stopped_one_goes_on_or_dies(folder, how):
    victim = Engine(SLOTS)
    slots = victim.store(A, B)
    victim.table.nap()
    with stopped(free_and_stop) as process:
        assert not victim.lots.wake()
        os.kill(process.pid, how)
        process.join()
        assert victim.lots.wake()
        assert victim.find(A, B) == slots
    victim.check()
    victim.close()


def serve_and_stop() -> None:
    engine = Engine(SLOTS)
    engine.store(A)
    lease = engine.begin(B)
    stop()
    engine.end(lease)
    engine.check()


def test_who_is_stopped_is_not_dead_and_keeps_its_place_and_slots(folder):
    with stopped(serve_and_stop) as process:
        other = Engine(SLOTS)
        assert other.table.bury(0.0) == other.table.bury(1e9) == 0
        third = Engine(SLOTS)
        assert len({0, other.table.engine, third.table.engine}) == 3
        assert len(other.find(A)) == 1
        granted = {*other.slots.grant(SLOTS), *third.slots.grant(SLOTS)}
        os.kill(process.pid, signal.SIGCONT)
        process.join()
        assert process.exitcode == 0
        assert not granted.intersection(other.find(A, B))
        assert len(other.find(A, B)) == 2
    for engine in (other, third):
        engine.close()
