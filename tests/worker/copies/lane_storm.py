"""Copies of every size at once, some of them fenced and some given up, with every byte compared.

The same on a device of threads (test_gpu.py) and on a GPU (tests/gpu/test_lane.py).
"""

import random
from dataclasses import dataclass
from typing import Any

import numpy as np

from safe_offload.errors import TransferError
from safe_offload.layout import Geometry
from safe_offload.protocol import FailureReason
from safe_offload.worker.copies.base import Direction
from tests.worker.copies.contract import PATIENCE_S, Bytes, Subject, _layers_outermost

NUM_BLOCKS = 4000
NUM_COPIES = 6


def geometry() -> Geometry:
    """Two layers of short rows, so that a copy of many blocks has many pieces."""
    return _layers_outermost(NUM_BLOCKS, 16, 16)


@dataclass
class Issued:
    """A copy, and the blocks and slots that are its own."""

    direction: Direction
    blocks: list[int]
    slots: list[int]
    completion: Any

    def is_whole(self) -> bool:
        """Wait for its end; whether it has copied everything."""
        error = self.completion.future.exception(PATIENCE_S)
        if error is None:
            return True
        assert isinstance(error, TransferError)
        assert error.reason is FailureReason.CANCELLED
        return False


def run_storm(subject: Subject, seed: int, num_rounds: int) -> dict[bool, int]:
    """Copy, fence, overwrite and give up; return how many copies were whole, and how many not."""
    rng, counts = random.Random(seed), {True: 0, False: 0}
    for index in range(num_rounds):
        storage, host = subject.fill(1000 * seed + index)
        # What is stored is overwritten right behind the fences, so nothing is loaded then.
        is_overwritten = index % 2 == 0
        copies = _issue(subject, rng, [Direction.STORE] if is_overwritten else list(Direction))
        for copy in rng.sample(copies, 2):
            copy.completion.cancel()
        if is_overwritten:
            for copy in rng.sample(copies, len(copies)):
                assert subject.backend.fence(copy.completion, PATIENCE_S)
            subject.write_storage(storage ^ 0xFF)
        ends = [copy.is_whole() for copy in copies]
        found_storage, found_host = subject.read_storage(), subject.read_host()
        expected_storage = storage ^ 0xFF if is_overwritten else storage.copy()
        for copy, is_whole in zip(copies, ends, strict=True):
            counts[is_whole] += 1
            is_store = copy.direction is Direction.STORE
            target, found = (host, found_host) if is_store else (expected_storage, found_storage)
            _expect(subject, copy, storage if is_store else host, target, found, is_whole=is_whole)
        np.testing.assert_array_equal(found_host, host)
        np.testing.assert_array_equal(found_storage, expected_storage)
    return counts


def _issue(subject: Subject, rng: random.Random, directions: list[Direction]) -> list[Issued]:
    blocks, slots = (rng.sample(range(NUM_BLOCKS), NUM_BLOCKS) for _ in range(2))
    copies = []
    for _ in range(NUM_COPIES):
        count = rng.choice([1, 5, 600])
        mine = [blocks.pop() for _ in range(count)], [slots.pop() for _ in range(count)]
        direction = rng.choice(directions)
        copies.append(Issued(direction, *mine, subject.issue(direction, *mine)))
    return copies


def _expect(
    subject: Subject, copy: Issued, source: Bytes, target: Bytes, found: Bytes, *, is_whole: bool
) -> None:
    """Put into `target` what a copy brings; of one that was given up, what it has brought."""
    for block, slot in zip(copy.blocks, copy.slots, strict=True):
        for in_storage, in_host in subject.ranges(block, slot):
            is_store = copy.direction is Direction.STORE
            there, here = (in_host, in_storage) if is_store else (in_storage, in_host)
            if is_whole:
                target[there] = source[here]
            else:
                has_come = np.array_equal(found[there], source[here])
                assert has_come or np.array_equal(found[there], target[there])
                target[there] = found[there]
