"""One host memory for ranks that hold the same KV cache.

All ranks share, or none does: if one stored its share only while another had a memory of its own, a
load would bring what was never written there. So the first rank lets the others use the memory when
every one of them has mapped it; whatever goes wrong before is a `SharingError` on all of them.

Ranks meet at an abstract address, which every process of the network can read once it is there. So
it cannot be guessed before, each end asks the kernel which process the other one is, and shows that
it has the engine's secret. One that cannot is turned away, and the ranks go on.

Source: Linux, memfd_create(2), unix(7) (abstract addresses, SCM_RIGHTS, SO_PEERCRED),
proc_pid_stat(5).
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import logging
import mmap
import multiprocessing
import os
import socket
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np
import numpy.typing as npt

from safe_offload.errors import SharingError
from safe_offload.layout import PAGE_BYTES, HostLayout
from safe_offload.mapped_files import make_memfd, map_file, map_new
from safe_offload.observe.counters import is_milestone
from safe_offload.protocol import Transfer
from safe_offload.worker.memory.host_memory import HostMemory

logger = logging.getLogger(f"vllm.{__name__}")

JOIN_TIMEOUT_S = 60.0
"""How long ranks, which register at about the same time, wait for one another."""
POLL_S = 0.02
MESSAGE_BYTES_MAX = 256
MAPPED, COMMITTED = b"mapped", b"committed"
TERMS_BYTES = hashlib.sha256().digest_size
CHECKSUM_BYTES = 8
OVERCOMMIT = Path("/proc/sys/vm/overcommit_memory")
STRANGER = (
    "Rejected a process that tried to join the shared host memory of this engine's ranks: pid %d "
    "(0: in another PID namespace), user %d. It received nothing. Rejected so far: %d."
)


@dataclass(frozen=True, slots=True)
class Share:
    """Which, from 0, of how many ranks with one memory this is."""

    index: int = 0
    count: int = 1

    @classmethod
    def of_rank(cls, rank: int, count: int) -> Share:
        """Return the share of a rank: `count` ranks in a row have one memory."""
        return cls(rank % count, count)

    def part(self, num_items: int, turn: int = 0) -> range:
        """Return this rank's part of things numbered from 0; parts go round with `turn`."""
        at = (self.index + turn) % self.count
        return range(at * num_items // self.count, (at + 1) * num_items // self.count)

    def of_store(self, store: Transfer) -> Transfer | None:
        """Return what this rank stores of a transfer, None if that is nothing.

        Parts are consecutive, so that runs of blocks stay one copy, and go round, so that stores of
        one block are not always the same rank's.
        """
        part = self.part(len(store.block_ids), store.transfer_id)
        if not part:
            return None
        chosen = slice(part.start, part.stop)
        return Transfer(store.transfer_id, store.block_ids[chosen], store.slot_ids[chosen])


ALONE = Share()


def share_memory(
    share: Share,
    layout: HostLayout,
    secret: bytes,
    check_available: Callable[[], None],
    timeout_s: float = JOIN_TIMEOUT_S,
) -> HostMemory:
    """Map one memory in all ranks of a share, with room for `checksum_table` after the slots.

    All ranks have the same `layout`. `check_available` is called on the first rank before the
    memory is made; its error goes through. SharingError: no rank can share the memory.
    """
    if layout.slots_per_slab < share.count:
        raise SharingError(f"there are fewer slots than the {share.count} ranks")
    try:
        meeting = _Meeting(
            share,
            secret,
            bytes_with_checksums(layout),
            hashlib.sha256(repr(layout).encode()).digest(),
            time.monotonic() + timeout_s,
            _Process.this(),
        )
        mapping = meeting.join() if share.index else meeting.lead(check_available)
    except TimeoutError as error:
        raise SharingError(f"not all {share.count} ranks joined within {timeout_s:g} s") from error
    except (OSError, AttributeError) as error:  # the system refuses something, or has no memfd
        raise SharingError(str(error)) from error
    return HostMemory(mapping)


def map_alone(size_bytes: int) -> mmap.mmap:
    """Map memory that a helper of this process can map too; SharingError if it is refused."""
    _check_overcommit()
    try:
        return map_new(size_bytes)
    except (OSError, AttributeError) as error:
        raise SharingError(str(error)) from error


def secret_of(first_rank: int) -> bytes:
    """Return what only the ranks know that share one memory, all children of one process.

    It comes from the random key that multiprocessing hands down to every process it starts, and
    keeps out of files, arguments and environments. vLLM starts its ranks so.
    Source: Python, Process.authkey; vLLM 0.32.0, v1/executor/multiproc_executor.py.
    """
    these = f"safe-offload/{os.getppid()}/{first_rank}".encode()
    return hmac.digest(multiprocessing.current_process().authkey, these, "sha256")


def address_of(secret: bytes) -> str:
    """Return the address where the ranks of a secret meet; it does not reveal the secret."""
    return f"safe-offload/{hmac.digest(secret, b'address', 'sha256').hex()}"


def bytes_with_checksums(layout: HostLayout) -> int:
    """Return the size of a memory with room for `checksum_table` after the slots."""
    return _table_offset(layout) + layout.num_slots * CHECKSUM_BYTES


def checksum_table(host: HostMemory, layout: HostLayout) -> npt.NDArray[np.uint64]:
    """Return the checksums of all slots: recorded by the rank that stored, compared by all."""
    offset = _table_offset(layout)
    memory: npt.NDArray[np.uint8] = host.tensor.numpy()
    return memory[offset : offset + layout.num_slots * CHECKSUM_BYTES].view(np.uint64)


def _table_offset(layout: HostLayout) -> int:
    return -(-layout.size_bytes // PAGE_BYTES) * PAGE_BYTES


@dataclass(frozen=True, slots=True)
class _Process:
    """A process as /proc shows it, with its start in ticks: a number alone is used again."""

    number: int
    parent: int
    started: int

    @classmethod
    def of(cls, number: int | str) -> Self:
        """Read /proc; OSError if there is no such process in this PID namespace."""
        head, _, facts = Path(f"/proc/{number}/stat").read_text().rpartition(")")
        fields = facts.split()
        return cls(int(head.split()[0]), int(fields[1]), int(fields[19]))

    @classmethod
    def this(cls) -> Self:
        """Return this process.

        SharingError: /proc belongs to another PID namespace, so it cannot identify others.
        """
        process = cls.of("self")
        if (process.number, process.parent) != (os.getpid(), os.getppid()):
            raise SharingError("/proc shows the processes of another PID namespace")
        return process


@dataclass(slots=True)
class _Meeting:
    """How the ranks get the descriptor of one memory.

    `terms` have to be the same on all ranks; `deadline_s` is of the monotonic clock.
    """

    share: Share
    secret: bytes
    size_bytes: int
    terms: bytes
    deadline_s: float
    process: _Process
    num_strangers: int = 0

    def lead(self, check_available: Callable[[], None]) -> mmap.mmap:
        """Make the memory when all other ranks are here; return when all have mapped it."""
        with contextlib.ExitStack() as stack:
            with _new_socket() as listener:
                # First of all: a rank that finds no leader here waits.
                listener.bind(f"\0{address_of(self.secret)}")
                listener.listen(self.share.count)
                missing = set(range(1, self.share.count))
                peers = []
                while missing:
                    if (peer := self._accept(listener, missing)) is not None:
                        peers.append(stack.enter_context(peer))
            check_available()
            _check_overcommit()
            descriptor = make_memfd(self.size_bytes)
            stack.callback(os.close, descriptor)
            mapping = self._map(descriptor)
            badge = self.badge(0, self.process, self.terms)
            for peer in peers:
                socket.send_fds(peer, [badge], [descriptor])
            if any(peer.recv(MESSAGE_BYTES_MAX) != MAPPED for peer in peers):
                raise SharingError("a rank could not map the memory")
            for peer in peers:
                # A rank that has died by now takes the engine with it.
                with contextlib.suppress(OSError):
                    peer.send(COMMITTED)
        return mapping

    def join(self) -> mmap.mmap:
        """Map the memory of the first rank; return when all others have mapped it too."""
        leader, process = self._find_leader()
        with leader, contextlib.ExitStack() as stack:
            leader.send(self.badge(self.share.index, self.process, self.terms))
            # Without a limit: if this rank gave up by itself, the others might begin without it.
            # That of the first rank holds, and its death ends the connection.
            leader.settimeout(None)
            message, descriptors, _, _ = socket.recv_fds(leader, MESSAGE_BYTES_MAX, 1)
            for descriptor in descriptors:
                stack.callback(os.close, descriptor)
            is_first = hmac.compare_digest(message, self.badge(0, process, self.terms))
            if not descriptors or not is_first:
                raise SharingError("another rank failed")
            mapping = self._map(descriptors[0])
            leader.send(MAPPED)
            if leader.recv(MESSAGE_BYTES_MAX) != COMMITTED:
                raise SharingError("another rank could not map the memory")
        return mapping

    def badge(self, index: int, process: _Process, terms: bytes) -> bytes:
        """Return the proof that a process is a rank of this engine.

        It is useless to other processes: the kernel tells which one presents it.
        """
        claim = f"{index}/{self.share.count}/{process}/".encode() + terms
        return terms + hmac.digest(self.secret, claim, "sha256")

    def _accept(self, listener: socket.socket, missing: set[int]) -> socket.socket | None:
        """Return a connection to a rank that was missing, None if a stranger has come."""
        listener.settimeout(self._left_s())
        peer, _ = listener.accept()
        try:
            index = self._rank_of(peer)
        except BaseException:
            peer.close()
            raise
        if index not in missing:
            self._turn_away(peer)
            return None
        missing.remove(index)
        return peer

    def _rank_of(self, peer: socket.socket) -> int | None:
        """Return which rank has connected, None if none; SharingError if its terms are others."""
        process = self._relative(peer)
        if process is None:
            return None
        peer.settimeout(self._left_s())
        try:
            shown = peer.recv(MESSAGE_BYTES_MAX)
        except ConnectionError:
            return None
        terms = shown[:TERMS_BYTES]
        for index in range(1, self.share.count):
            if hmac.compare_digest(shown, self.badge(index, process, terms)):
                if terms != self.terms:
                    raise SharingError("the ranks have KV caches of different layouts")
                return index
        return None

    def _relative(self, peer: socket.socket) -> _Process | None:
        """Return the process of a peer if it is of this user and a child of this one's parent."""
        number, user_id = _credentials(peer)
        try:
            process = _Process.of(number)
        except OSError:  # of another namespace, which is number 0, or it has ended
            return None
        is_ours = user_id == os.geteuid() and process.parent == self.process.parent
        return process if is_ours else None

    def _turn_away(self, stranger: socket.socket) -> None:
        number, user_id = _credentials(stranger)
        stranger.close()
        self.num_strangers += 1
        if is_milestone(self.num_strangers):
            logger.warning(STRANGER, number, user_id, self.num_strangers)

    def _find_leader(self) -> tuple[socket.socket, _Process]:
        """Return a connection to the first rank, and its process."""
        while True:
            leader = _new_socket()
            try:
                leader.settimeout(self._left_s())
                leader.connect(f"\0{address_of(self.secret)}")
                process = self._relative(leader)
                if process is not None:
                    return leader, process
                self._turn_away(leader)
            except (ConnectionRefusedError, BlockingIOError):  # none is there yet, or many wait
                leader.close()
            except BaseException:
                leader.close()
                raise
            time.sleep(POLL_S)

    def _left_s(self) -> float:
        left_s = self.deadline_s - time.monotonic()
        if left_s <= 0:
            raise TimeoutError
        return left_s

    def _map(self, descriptor: int) -> mmap.mmap:
        if os.fstat(descriptor).st_size != self.size_bytes:
            raise SharingError("the memory does not have the agreed size")
        return map_file(descriptor)


def _new_socket() -> socket.socket:
    return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def _check_overcommit() -> None:
    """Raise SharingError if mapped memory may turn out to be missing when it is touched."""
    with contextlib.suppress(OSError):
        if OVERCOMMIT.read_text().strip() == "2":
            # Pages of shared memory are counted when they are touched, and SIGBUS ends the process
            # if there is none left; private memory is refused when it is mapped.
            raise SharingError("vm.overcommit_memory is 2")


def _credentials(peer: socket.socket) -> tuple[int, int]:
    """Return number and user of the process that connected, or listens; 0: of no process here."""
    credentials = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    number, user_id, _ = struct.unpack("3i", credentials)
    return number, user_id
