"""One memory for several ranks: they all have it or none has, and it goes with the last of them."""

import contextlib
import dataclasses
import gc
import hashlib
import itertools
import mmap
import multiprocessing
import os
import secrets
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace

import pytest

from safe_offload.errors import SharingError
from safe_offload.layout import PAGE_BYTES, Geometry, HostLayout, Segment
from safe_offload.protocol import Transfer, ids_of
from safe_offload.worker.memory import shared_memory
from safe_offload.worker.memory.host_memory import HostMemory
from safe_offload.worker.memory.shared_memory import Share, address_of, checksum_table, share_memory
from tests.fresh_process import start
from tests.worker.waiting import PATIENCE_S, wait_until

LAYOUT = HostLayout.in_one_slab(Geometry((Segment(64, 0, 64),), num_blocks=8), num_slots=100)
SIZE_BYTES = LAYOUT.size_bytes + -LAYOUT.size_bytes % PAGE_BYTES + 8 * LAYOUT.num_slots
NAME = "memfd:safe-offload"


def transfer(transfer_id: int, blocks: Iterable[int], slots: Iterable[int]) -> Transfer:
    return Transfer(transfer_id, ids_of(blocks), ids_of(slots))


def nothing() -> None:
    """Enough memory."""


class Ranks:
    """Ranks that are threads: each maps the memory for itself."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.secret = secrets.token_bytes()
        self.address = address_of(self.secret)
        self._executor = ThreadPoolExecutor(count)

    def start(
        self,
        index: int,
        *,
        layout: HostLayout = LAYOUT,
        check: Callable[[], None] = nothing,
        timeout_s: float = PATIENCE_S,
    ) -> Future[HostMemory]:
        share = Share(index, self.count)
        return self._executor.submit(share_memory, share, layout, self.secret, check, timeout_s)

    def meet(self) -> list[HostMemory]:
        futures = [self.start(index) for index in range(self.count)]
        return [future.result(PATIENCE_S) for future in futures]

    def pass_deadline(self, futures: Iterable[Future[HostMemory]]) -> None:
        """Let all deadlines pass; ranks that wait for somebody to come see it when he comes."""
        leaps = itertools.count(1)  # one begins late, and has a deadline of its own
        shared_memory.time = SimpleNamespace(  # type: ignore[assignment]
            monotonic=lambda: time.monotonic() + next(leaps) * 2 * PATIENCE_S, sleep=time.sleep
        )
        while not all(future.done() for future in futures):
            with new_socket() as peer, contextlib.suppress(OSError):
                peer.setblocking(False)
                peer.connect(f"\0{self.address}")
            time.sleep(0.001)

    def close(self) -> None:
        self._executor.shutdown()


@pytest.fixture
def make_ranks(monkeypatch):
    monkeypatch.setattr(shared_memory, "time", time)  # which `pass_deadline` replaces
    if ours_in(os.getpid()) != (0, 0):
        gc.collect()  # what other tests no longer use
    made: list[Ranks] = []

    def make(count: int) -> Ranks:
        made.append(Ranks(count))
        return made[-1]

    yield make
    for ranks in made:
        ranks.close()
    assert ours_in(os.getpid()) == (0, 0), "a test has left memory or a descriptor behind"


def ours_in(pid: int) -> tuple[int, int]:
    """How many mappings and descriptors of shared memory a process has."""
    return len(inodes_in(pid)), sum(NAME in target for _, target in links_of(pid))


def inodes_in(pid: int | str) -> list[str]:
    """The inode of each mapping of shared memory in a process."""
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return [line.split()[4] for line in lines if NAME in line]


def links_of(pid: int) -> Iterator[tuple[int, str]]:
    """The descriptors of a process, and what they are of."""
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            yield int(link.name), str(link.readlink())


def new_socket() -> socket.socket:
    return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def badge_of(ranks: Ranks, index: int, secret: bytes = b"", ticks: int = 0) -> bytes:
    """What a rank of this process shows, or one with another secret or start."""
    terms = hashlib.sha256(repr(LAYOUT).encode()).digest()
    process = shared_memory._Process.this()
    process = dataclasses.replace(process, started=process.started + ticks)
    secret = secret or ranks.secret
    share = Share(index, ranks.count)
    meeting = shared_memory._Meeting(share, secret, SIZE_BYTES, terms, 0.0, process)
    return meeting.badge(index, process, terms)


def expect_that_nobody_shares(futures: list[Future[HostMemory]], why: str) -> None:
    errors = [future.exception(PATIENCE_S) for future in futures]
    assert all(isinstance(error, SharingError) for error in errors), errors
    assert any(why in str(error) for error in errors), errors


# ---- shares --------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2, 3, 8])
@pytest.mark.parametrize("num_blocks", [1, 2, 3, 7, 64])
def test_every_block_of_a_store_is_one_ranks_share(count, num_blocks):
    for transfer_id in range(2 * count):
        whole = transfer(transfer_id, range(10, 10 + num_blocks), range(50, 50 + num_blocks))
        parts = [Share(index, count).of_store(whole) for index in range(count)]
        pairs = [
            pair
            for part in parts
            if part is not None
            for pair in zip(part.block_ids, part.slot_ids, strict=True)
        ]
        assert sorted(pairs) == list(zip(whole.block_ids, whole.slot_ids, strict=True))
        sizes = [len(part.block_ids) if part is not None else 0 for part in parts]
        assert max(sizes) - min(sizes) <= 1


def test_stores_of_one_block_go_round():
    alone = [transfer(transfer_id, [3], [7]) for transfer_id in range(9)]
    stored = Counter(
        index for index in range(3) for one in alone if Share(index, 3).of_store(one) is not None
    )
    assert stored == {0: 3, 1: 3, 2: 3}


# ---- meeting -------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [2, 5])
def test_what_one_rank_writes_all_ranks_read(make_ranks, count):
    memories = make_ranks(count).meet()
    assert len({memory.tensor.data_ptr() for memory in memories}) == count
    assert all(not memory.tensor.any() for memory in memories)
    for index, memory in enumerate(memories):
        memory.tensor[64 * index] = index + 1
    for memory in memories:
        assert memory.tensor[: 64 * count : 64].tolist() == list(range(1, count + 1))
    tables = [checksum_table(memory, LAYOUT) for memory in memories]
    tables[0][-1] = 2**64 - 1
    assert tables[-1][-1] == 2**64 - 1
    assert len(tables[0]) == LAYOUT.num_slots
    assert memories[0].tensor[: LAYOUT.size_bytes].sum() == sum(range(1, count + 1))
    assert ours_in(os.getpid()) == (count, 2 * count), "a mapping a rank, and two descriptors"
    del tables
    for memory in memories:
        memory.close()


def test_the_memory_cannot_be_made_smaller(make_ranks):
    memories = make_ranks(2).meet()
    descriptors = [number for number, target in links_of(os.getpid()) if NAME in target]
    assert len(descriptors) == 2 * 2
    for descriptor in descriptors:
        with pytest.raises(PermissionError):
            os.ftruncate(descriptor, mmap.PAGESIZE)
    for memory in memories:
        memory.close()


# ---- nobody shares -------------------------------------------------------------------------------


@pytest.mark.parametrize("missing", [0, 1])
def test_nobody_shares_if_a_rank_does_not_come(make_ranks, missing):
    ranks = make_ranks(3)
    futures = [ranks.start(index, timeout_s=0.3) for index in range(3) if index != missing]
    expect_that_nobody_shares(futures, "not all 3 ranks joined within 0.3 s")


def test_nobody_shares_if_layouts_differ(make_ranks):
    ranks = make_ranks(2)
    other = HostLayout.in_one_slab(Geometry((Segment(128, 0, 64),), num_blocks=8), num_slots=100)
    assert other.size_bytes == LAYOUT.size_bytes
    expect_that_nobody_shares([ranks.start(0), ranks.start(1, layout=other)], "different layouts")


def test_nobody_shares_if_there_are_fewer_slots_than_ranks(make_ranks):
    ranks = make_ranks(3)
    few = HostLayout.in_one_slab(LAYOUT.geometry, num_slots=2)
    expect_that_nobody_shares([ranks.start(i, layout=few) for i in range(3)], "fewer slots")


def test_nobody_shares_where_memory_may_lack_when_it_is_touched(make_ranks, monkeypatch, tmp_path):
    (tmp_path / "overcommit").write_text("2\n")
    monkeypatch.setattr(shared_memory, "OVERCOMMIT", tmp_path / "overcommit")
    ranks = make_ranks(2)
    expect_that_nobody_shares([ranks.start(i) for i in range(2)], "vm.overcommit_memory is 2")


def test_nobody_shares_if_one_rank_cannot_map_the_memory(make_ranks, monkeypatch):
    original = shared_memory._Meeting._map
    refused = []

    def map_once(self: object, descriptor: int) -> mmap.mmap:
        if refused:
            return original(self, descriptor)
        mapping = original(self, descriptor)  # of the first rank, which is the first to map
        refused.append(True)
        monkeypatch.setattr(shared_memory._Meeting, "_map", refuse)
        return mapping

    def refuse(self: object, descriptor: int) -> mmap.mmap:
        monkeypatch.setattr(shared_memory._Meeting, "_map", original)
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(shared_memory._Meeting, "_map", map_once)
    ranks = make_ranks(3)
    expect_that_nobody_shares([ranks.start(i) for i in range(3)], "Cannot allocate memory")


@pytest.mark.parametrize("num_messages", [0, 1], ids=["before its terms", "before it has mapped"])
def test_nobody_shares_if_a_rank_dies_on_the_way(make_ranks, num_messages):
    ranks = make_ranks(3)
    futures = [ranks.start(0), ranks.start(1)]
    with new_socket() as dying:
        while True:
            with contextlib.suppress(ConnectionRefusedError):
                dying.connect(f"\0{ranks.address}")
                break
            assert not futures[0].done()
        if num_messages:
            dying.send(badge_of(ranks, 2))
    # Who comes when the first rank has given up finds nobody, and waits as long as it may.
    ranks.pass_deadline(futures)
    expect_that_nobody_shares(futures, "")


def test_nobody_shares_if_the_first_rank_dies_on_the_way(make_ranks):
    ranks = make_ranks(3)
    later = [ranks.start(index) for index in (1, 2)]
    with new_socket() as dying:
        dying.bind(f"\0{ranks.address}")
        dying.listen()
        dying.accept()[0].close()  # the other has not been let in, or has not come
    ranks.pass_deadline(later)
    expect_that_nobody_shares(later, "")


def test_a_rank_does_not_share_if_the_first_dies_before_all_have_the_memory(make_ranks):
    ranks = make_ranks(2)
    with new_socket() as listener:
        listener.bind(f"\0{ranks.address}")
        listener.listen()
        joining = ranks.start(1)
        with listener.accept()[0] as dying:
            dying.recv(256)
            memory = os.memfd_create("first")
            os.ftruncate(memory, SIZE_BYTES)
            socket.send_fds(dying, [badge_of(ranks, 0)], [memory])
            os.close(memory)
            assert dying.recv(256) == b"mapped"
    expect_that_nobody_shares([joining], "another rank could not map the memory")


def test_the_first_rank_waits_no_longer_for_those_who_keep_coming_and_show_nothing(make_ranks):
    ranks = make_ranks(2)
    first = ranks.start(0, timeout_s=0.3)
    while not first.done():
        with new_socket() as peer, contextlib.suppress(OSError):
            peer.settimeout(PATIENCE_S)
            peer.connect(f"\0{ranks.address}")
    expect_that_nobody_shares([first], "not all 2 ranks joined within 0.3 s")


def test_nobody_shares_if_a_rank_comes_twice(make_ranks):
    ranks = make_ranks(3)
    futures = [ranks.start(index, timeout_s=0.5) for index in (0, 1, 1)]
    expect_that_nobody_shares(futures, "not all 3 ranks joined")


def test_nobody_shares_with_a_process_of_another_user(make_ranks, monkeypatch, caplog):
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    ranks = make_ranks(2)
    futures = [ranks.start(i) for i in range(2)]
    wait_until(lambda: f"user {os.getuid()}. It received nothing" in caplog.text)
    ranks.pass_deadline(futures)
    expect_that_nobody_shares(futures, "not all 2 ranks joined")


def test_nobody_shares_where_proc_shows_other_processes(make_ranks, monkeypatch):
    ranks, parent = make_ranks(2), os.getppid()
    monkeypatch.setattr(os, "getppid", lambda: parent + 1)
    expect_that_nobody_shares([ranks.start(i) for i in range(2)], "another PID namespace")


# ---- processes -----------------------------------------------------------------------------------


def run_rank(index: int, secret: bytes, pipe: Connection) -> None:
    """Of a rank: write to the memory when it is told to, and tell the sum of its bytes."""
    memory = share_memory(Share(index, 2), LAYOUT, secret, nothing)
    while True:
        pipe.send(int(memory.tensor[: LAYOUT.size_bytes].sum()))
        if pipe.recv():
            memory.tensor.fill_(7)


def test_a_rank_that_is_killed_leaves_its_bytes_to_the_others_and_nothing_to_the_system(tmp_path):
    secret = secrets.token_bytes()
    before = set(os.listdir("/dev/shm"))
    pipes, children = [], []
    for index in range(2):
        mine, of_rank = multiprocessing.Pipe()
        pipes.append(mine)
        how = {"log": tmp_path / f"log-{index}", "environment": os.environ}
        children.append(start(run_rank, index, secret, of_rank, **how))
        of_rank.close()
    try:
        assert [pipe.recv() for pipe in pipes] == [0, 0]
        pipes[1].send(True)
        assert pipes[1].recv() == 7 * LAYOUT.size_bytes
        (inode,) = {inode for child in children for inode in inodes_in(child.pid)}
        assert inode in mapped_anywhere()
        assert address_of(secret) not in Path("/proc/net/unix").read_text()
        children[1].kill()
        children[1].join(PATIENCE_S)
        pipes[0].send(False)
        assert pipes[0].recv() == 7 * LAYOUT.size_bytes
    finally:
        for child, pipe in zip(children, pipes, strict=True):
            child.kill()
            child.join(PATIENCE_S)
            pipe.close()
    assert inode not in mapped_anywhere()
    # Names with "test" are of tests that run beside this one.
    left = set(os.listdir("/dev/shm")) - before
    assert not [name for name in left if "safe" in name and "test" not in name]


def mapped_anywhere() -> set[str]:
    """Inodes of the shared memory of every process."""
    found: set[str] = set()
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError, PermissionError):
            found.update(inodes_in(process.name))
    return found
