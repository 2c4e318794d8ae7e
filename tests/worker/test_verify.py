"""Checksums: noted behind a store, compared behind a load, beside the loop."""

import random
import threading

import numpy as np
import torch

from safe_offload.layout import HostLayout, Segment, make_geometry
from safe_offload.protocol import FailureReason, Transfer
from safe_offload.worker.copies.base import Direction
from safe_offload.worker.copies.cpu import CpuBackend
from safe_offload.worker.copies.threads import DirectionThreads
from safe_offload.worker.memory.host_memory import HostMemory
from tests.worker.driven import DrivenTransfers, drained, flush, join, looked_at, submit
from tests.worker.fake_backend import PATIENCE_S

LOAD, STORE = Direction.LOAD, Direction.STORE
MISMATCH = FailureReason.CHECKSUM_MISMATCH


def settle(transfers: DrivenTransfers) -> list[tuple[int, FailureReason | None]]:
    """Return what has settled once the threads that look have looked."""
    flush(transfers)
    looked_at(transfers.threads)
    return drained(transfers)


# ---- after copies ------------------------------------------------------------------------------


def test_a_load_of_what_has_changed_fails_and_names_the_slots(backend, start):
    transfers = start(verify_every=1)
    transfers.submit(STORE, Transfer(10, (0, 1, 2, 3), (0, 1, 2, 3)))
    backend.complete(0)
    assert settle(transfers) == [(10, None)]
    backend.slots = {1: 5, 3: 7}
    transfers.submit(LOAD, Transfer(11, (50, 51, 52, 53), (3, 2, 1, 0)))
    backend.complete(50)
    assert settle(transfers) == [(11, MISMATCH)]
    assert transfers.take_bad_slots() == (1, 3)
    assert transfers.take_bad_slots() == ()
    transfers.submit(LOAD, Transfer(12, (60, 61), (2, 0)))
    backend.complete(60)
    assert settle(transfers) == [(12, None)]


def test_nobody_looks_at_memory_that_is_gone(backend, start):
    transfers = start(verify_every=1)
    entered, released = threading.Event(), threading.Event()

    def hold(slot_ids: list[int]) -> None:
        entered.set()
        assert released.wait(PATIENCE_S)

    backend.on_checksums = hold
    submit(transfers, LOAD, 1, 2)
    backend.complete(1)
    backend.complete(2)
    assert entered.wait(PATIENCE_S)
    transfers.loop.kill()
    assert not backend.closing.wait(0.1), "it frees the memory"
    released.set()
    join(transfers)
    assert backend.is_closed
    dead = FailureReason.NOT_RUNNING
    assert sorted(transfers.drain()) == [(1, dead), (2, dead)]


# ---- real memory -------------------------------------------------------------------------------

NUM_SLOTS = 16
PAGE = 96


class RealCopies:
    """The CPU backend, with every load compared."""

    def __init__(self) -> None:
        num_blocks = 2 * NUM_SLOTS
        geometry = make_geometry(
            [Segment(PAGE, layer * PAGE * num_blocks, PAGE - 8) for layer in range(3)],
            num_blocks,
            3 * PAGE * num_blocks,
        )
        self.storage = torch.from_numpy(
            np.random.default_rng(1).integers(0, 256, 3 * PAGE * num_blocks, np.uint8)
        )
        layout = HostLayout.in_one_slab(geometry, NUM_SLOTS)
        self.host = HostMemory.allocate(layout.size_bytes)
        threads = DirectionThreads("safe-offload")
        backend = CpuBackend(self.storage.data_ptr(), layout, self.host, threads)
        self.transfers = DrivenTransfers(backend, 1 << 20, verify_every=1)
        self._num_transfers = 0

    def run(self, direction: Direction) -> FailureReason | None:
        """Store the first half of the blocks, or load the second; why it failed."""
        slots = tuple(range(NUM_SLOTS))
        blocks = slots if direction is STORE else tuple(NUM_SLOTS + slot for slot in slots)
        self._num_transfers += 1
        self.transfers.submit(direction, Transfer(self._num_transfers, blocks, slots))
        while not (settled := self.transfers.drain()):
            flush(self.transfers)
        ((transfer_id, failure),) = settled
        assert transfer_id == self._num_transfers
        return failure


def test_of_a_thousand_bits_that_flip_in_host_memory_every_one_is_noticed():
    real = RealCopies()
    try:
        assert real.run(STORE) is None
        assert real.run(LOAD) is None
        kept = real.host.tensor.numpy()
        rng = random.Random(7)
        row_bytes = real.host.size_bytes // NUM_SLOTS // 3
        for _ in range(200):
            slots = sorted(rng.sample(range(NUM_SLOTS), 5))
            # Three segments of 88 bytes, each an array with a row for every slot.
            rows = [NUM_SLOTS * rng.randrange(3) + slot for slot in slots]
            flips = [(row * row_bytes + rng.randrange(row_bytes), rng.randrange(8)) for row in rows]
            for byte, bit in flips:
                kept[byte] ^= 1 << bit
            assert real.run(LOAD) is MISMATCH, flips
            assert real.transfers.take_bad_slots() == tuple(slots)
            for byte, bit in flips:
                kept[byte] ^= 1 << bit
        assert real.run(LOAD) is None, "every bit is what it was"
    finally:
        assert real.transfers.close()
