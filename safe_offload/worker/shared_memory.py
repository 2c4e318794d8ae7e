"""One host memory for ranks that hold the same KV cache (docs/architecture.md says why and how).

All ranks share, or none does: if one stored its share only while another had a memory of its own, a
load would bring what was never written there. So the first rank lets the others use the memory when
every one of them has mapped it; whatever goes wrong before is a `SharingError` on all of them.

Source: Linux, memfd_create(2), unix(7) (abstract addresses, SCM_RIGHTS, SO_PEERCRED).
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import mmap
import os
import socket
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from safe_offload.errors import SharingError
from safe_offload.layout import PAGE_BYTES, HostLayout
from safe_offload.protocol import Transfer
from safe_offload.worker.host_memory import HostMemory

JOIN_TIMEOUT_S = 60.0
"""How long ranks, which register at about the same time, wait for one another."""
POLL_S = 0.02
MESSAGE_BYTES_MAX = 256
MAPPED, COMMITTED = b"mapped", b"committed"
CHECKSUM_BYTES = 8
OVERCOMMIT = Path("/proc/sys/vm/overcommit_memory")


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
    address: str,
    check_available: Callable[[], None],
    timeout_s: float = JOIN_TIMEOUT_S,
) -> HostMemory:
    """Map one memory in all ranks of a share, with room for `checksum_table` after the slots.

    Args:
        share: which rank this is.
        layout: of the slots, the same on all ranks.
        address: where the ranks meet, see `meeting_place`.
        check_available: called on the first rank before the memory is made; its error goes through.
        timeout_s: how long the ranks wait for one another.

    Raises:
        SharingError: the memory cannot be shared, by any rank.
    """
    meeting = _Meeting(
        f"\0{address}",
        share.count,
        _table_offset(layout) + layout.num_slots * CHECKSUM_BYTES,
        hashlib.sha256(repr(layout).encode()).digest(),
        time.monotonic() + timeout_s,
    )
    if layout.slots_per_slab < share.count:
        raise SharingError(f"there are fewer slots than the {share.count} ranks")
    try:
        mapping = meeting.join() if share.index else meeting.lead(check_available)
    except TimeoutError as error:
        raise SharingError(f"not all {share.count} ranks met within {timeout_s:g} s") from error
    except (OSError, AttributeError) as error:  # the system refuses something, or has no memfd
        raise SharingError(str(error)) from error
    return HostMemory(mapping)


def meeting_place(first_rank: int) -> str:
    """Return an address of the ranks that share one memory, all children of one process.

    Containers with one network may have process ids of their own, hence the namespace of these.

    Raises:
        SharingError: the system does not tell the namespace.
    """
    try:
        namespace = os.stat("/proc/self/ns/pid").st_ino
    except OSError as error:
        raise SharingError(str(error)) from error
    return f"safe-offload/{namespace}/{os.getppid()}/{first_rank}"


def checksum_table(host: HostMemory, layout: HostLayout) -> npt.NDArray[np.uint64]:
    """Return the checksums of all slots: noted by the rank that stored, compared by all."""
    offset = _table_offset(layout)
    memory: npt.NDArray[np.uint8] = host.tensor.numpy()
    return memory[offset : offset + layout.num_slots * CHECKSUM_BYTES].view(np.uint64)


def _table_offset(layout: HostLayout) -> int:
    return -(-layout.size_bytes // PAGE_BYTES) * PAGE_BYTES


@dataclass(frozen=True, slots=True)
class _Meeting:
    """How the ranks get the descriptor of one memory.

    Attributes:
        address: of the first rank's socket.
        terms: what has to be the same on all ranks.
        deadline_s: of the monotonic clock.
    """

    address: str
    num_ranks: int
    size_bytes: int
    terms: bytes
    deadline_s: float

    def lead(self, check_available: Callable[[], None]) -> mmap.mmap:
        """Make the memory when all other ranks are here; return when all have mapped it."""
        with contextlib.ExitStack() as stack:
            with _new_socket() as listener:
                # First of all: a rank that finds no leader here waits.
                listener.bind(self.address)
                listener.listen(self.num_ranks)
                peers = [
                    stack.enter_context(self._accept(listener)) for _ in range(1, self.num_ranks)
                ]
            check_available()
            descriptor = _make_memory(self.size_bytes)
            stack.callback(os.close, descriptor)
            mapping = self._map(descriptor)
            for peer in peers:
                socket.send_fds(peer, [self.terms], [descriptor])
            if any(peer.recv(MESSAGE_BYTES_MAX) != MAPPED for peer in peers):
                raise SharingError("a rank could not map the memory")
            for peer in peers:
                # A rank that has died by now takes the engine with it.
                with contextlib.suppress(OSError):
                    peer.send(COMMITTED)
        return mapping

    def join(self) -> mmap.mmap:
        """Map the memory of the first rank; return when all others have mapped it too."""
        with self._connect() as leader:
            _require_same_user(leader)
            leader.send(self.terms)
            # Without a limit: if this rank gave up by itself, the others might begin without it.
            # That of the first rank holds, and its death ends the connection.
            leader.settimeout(None)
            message, descriptors, _, _ = socket.recv_fds(leader, MESSAGE_BYTES_MAX, 1)
            if not descriptors or message != self.terms:
                raise SharingError("another rank could not go on")
            try:
                mapping = self._map(descriptors[0])
            finally:
                os.close(descriptors[0])
            leader.send(MAPPED)
            if leader.recv(MESSAGE_BYTES_MAX) != COMMITTED:
                raise SharingError("another rank could not map the memory")
        return mapping

    def _accept(self, listener: socket.socket) -> socket.socket:
        listener.settimeout(self._left_s())
        peer, _ = listener.accept()
        try:
            _require_same_user(peer)
            peer.settimeout(self._left_s())
            if peer.recv(MESSAGE_BYTES_MAX) != self.terms:
                raise SharingError("the ranks have KV caches of different layouts")
        except BaseException:
            peer.close()
            raise
        return peer

    def _connect(self) -> socket.socket:
        while True:
            leader = _new_socket()
            try:
                leader.connect(self.address)
                return leader
            except ConnectionRefusedError:  # no leader is there yet
                leader.close()
                if time.monotonic() > self.deadline_s:
                    raise TimeoutError from None
                time.sleep(POLL_S)
            except BaseException:
                leader.close()
                raise

    def _left_s(self) -> float:
        return max(POLL_S, self.deadline_s - time.monotonic())

    def _map(self, descriptor: int) -> mmap.mmap:
        if os.fstat(descriptor).st_size != self.size_bytes:
            raise SharingError("the memory has another size than was agreed")
        return mmap.mmap(
            descriptor,
            self.size_bytes,
            flags=mmap.MAP_SHARED,
            prot=mmap.PROT_READ | mmap.PROT_WRITE,
        )


def _new_socket() -> socket.socket:
    return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def _make_memory(size_bytes: int) -> int:
    """Return the descriptor of new memory of a fixed size.

    Raises:
        SharingError: the system may grant the memory and lack it later.
    """
    with contextlib.suppress(OSError):
        if OVERCOMMIT.read_text().strip() == "2":
            # Pages of shared memory are counted when they are touched, and SIGBUS ends the process
            # if there is none left; private memory is refused when it is asked for.
            raise SharingError("vm.overcommit_memory is 2")
    descriptor = os.memfd_create("safe-offload", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(descriptor, size_bytes)
        # A memory that shrinks would end, by SIGBUS, every process that has it mapped.
        seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _require_same_user(peer: socket.socket) -> None:
    """Raise SharingError for a process of another user, whom an abstract address lets in."""
    credentials = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    _, user_id, _ = struct.unpack("3i", credentials)
    if user_id != os.geteuid():
        raise SharingError(f"a process of user {user_id} has taken the place of a rank")
