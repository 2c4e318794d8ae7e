"""What every backend owes transfers, as tests that a backend's module inherits.

    class TestCpuBackend(BackendContract):
        @pytest.fixture
        def make_subject(self): ...

`make_subject(geometry, num_slots)` builds the backend over a storage and a host pool of its own.
The expected bytes are worked out here block by block from the geometry alone, and always compared
as a whole: GPU storage and host pool, gaps and neighbours included.
"""

import asyncio
import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from safe_offload.errors import TransferError
from safe_offload.layout import Geometry, HostLayout, Segment, make_geometry
from safe_offload.protocol import FailureReason
from safe_offload.worker.copies.base import Backend, Copy, Direction
from safe_offload.worker.memory.host_memory import HostMemory
from tests.worker.waiting import PATIENCE_S

Bytes = npt.NDArray[np.uint8]
Pairs = tuple[list[int], list[int]]

NUM_BLOCKS = 23
NUM_SLOTS = 31
NUM_SEEDS = 6


def _layers_outermost(num_blocks: int, *row_bytes: int, gap_bytes: int = 0) -> Geometry:
    segments, offset = [], 0
    for length in row_bytes:
        segments.append(Segment(length, offset, length))
        offset += length * num_blocks + gap_bytes
    return make_geometry(segments, num_blocks, offset)


def _block_outermost(num_blocks: int, stride: int, *ranges: tuple[int, int]) -> Geometry:
    segments = [Segment(stride, offset, length) for offset, length in ranges]
    return make_geometry(segments, num_blocks, num_blocks * stride)


GEOMETRIES = {
    "one layer": _layers_outermost(NUM_BLOCKS, 64),
    "layers outermost": _layers_outermost(NUM_BLOCKS, 96, 96, 96),
    "rows of different sizes": _layers_outermost(NUM_BLOCKS, 16, 4096, 8, gap_bytes=40),
    "blocks outermost": _block_outermost(NUM_BLOCKS, 256, (0, 256)),
    "blocks outermost with gaps": _block_outermost(NUM_BLOCKS, 256, (0, 48), (64, 128), (200, 24)),
    "a gap in one segment only": make_geometry(
        [Segment(64, 128, 64), Segment(80, 128 + 64 * NUM_BLOCKS, 72)], NUM_BLOCKS, 8192
    ),
}


class Subject(ABC):
    """A backend and the memory that it copies between."""

    backend: Backend  # under test
    layout: HostLayout  # where the slots lie in the host memory
    host: HostMemory  # the host pool

    @property
    def geometry(self) -> Geometry:
        """Where the blocks lie in the storage."""
        return self.layout.geometry

    @abstractmethod
    def read_storage(self) -> Bytes:
        """A copy of the whole KV cache storage, as the compute stream sees it."""

    @abstractmethod
    def write_storage(self, content: Bytes) -> None:
        """Overwrite the whole KV cache storage, in the compute stream's order."""

    def read_host(self) -> Bytes:
        """A copy of the whole host pool."""
        return self.host.tensor.numpy().copy()

    def write_host(self, content: Bytes) -> None:
        """Overwrite the whole host pool."""
        self.host.tensor.numpy()[:] = content

    @abstractmethod
    def hold(self, direction: Direction) -> Callable[[], None]:
        """Keep copies of a direction from moving a byte until the returned function is called.

        To be called before the copies are issued.
        """

    @abstractmethod
    def is_host_memory_free(self) -> bool:
        """Whether the host pool has been given back."""

    # ---- the same for all ----------------------------------------------------------------------

    def issue(
        self, direction: Direction, blocks: list[int], slots: list[int], mark: Any = None
    ) -> Any:
        """Issue a copy behind a mark, or behind what the compute stream has been given."""
        copy = Copy(direction, np.array(blocks, np.int64), np.array(slots, np.int64))
        return self.backend.issue(copy, mark or self.backend.mark())

    async def copy(self, direction: Direction, blocks: list[int], slots: list[int]) -> None:
        """Issue a copy and wait until it has ended."""
        await asyncio.wait_for(self.issue(direction, blocks, slots).wait(), PATIENCE_S)

    def fill(self, seed: int) -> tuple[Bytes, Bytes]:
        """Poison both memories by different noise; returns what they hold."""
        noise = np.random.default_rng(seed)
        storage = noise.integers(0, 256, self.read_storage().size, np.uint8)
        host = noise.integers(0, 256, self.read_host().size, np.uint8)
        self.write_storage(storage)
        self.write_host(host)
        return storage, host

    def ranges(self, block: int, slot: int) -> Iterator[tuple[slice, slice]]:
        """Every byte of a block, and where it belongs in a slot."""
        rows = self.layout.ranges_of(slot)
        for segment, (row, length) in zip(self.geometry.segments, rows, strict=True):
            start = segment.offset_bytes + block * segment.stride_bytes
            yield slice(start, start + length), slice(row, row + length)

    def arrive(self, direction: Direction, pairs: Pairs, storage: Bytes, host: Bytes) -> None:
        """Put what copies of blocks and slots bring into what the two memories held before."""
        for block, slot in zip(*pairs, strict=True):
            for in_storage, in_host in self.ranges(block, slot):
                if direction is Direction.STORE:
                    host[in_host] = storage[in_storage]
                else:
                    storage[in_storage] = host[in_host]

    def assert_holds(self, storage: Bytes, host: Bytes) -> None:
        """Compare every byte of both memories."""
        np.testing.assert_array_equal(self.read_host(), host)
        np.testing.assert_array_equal(self.read_storage(), storage)

    async def check_copy(self, direction: Direction, pairs: Pairs, seed: int) -> None:
        """Copy between memories of noise, and compare every byte."""
        storage, host = self.fill(seed)
        await self.copy(direction, *pairs)
        self.arrive(direction, pairs, storage, host)
        self.assert_holds(storage, host)


MakeSubject = Callable[[Geometry, int], Subject]


def random_pairs(seed: int) -> Pairs:
    """Some blocks and slots: single ones, runs, and both ends, in an order that is not theirs."""
    rng = random.Random(seed)
    count = rng.randint(1, min(NUM_BLOCKS, NUM_SLOTS))
    if seed % 3 == 0:  # runs
        start = rng.randint(0, NUM_BLOCKS - count)
        first = rng.randint(0, NUM_SLOTS - count)
        pairs = [(start + i, first + i) for i in range(count)]
    else:
        blocks = rng.sample(range(NUM_BLOCKS), count)
        pairs = list(zip(blocks, rng.sample(range(NUM_SLOTS), count), strict=True))
    if seed % 2:
        rng.shuffle(pairs)
    return [block for block, _ in pairs], [slot for _, slot in pairs]


class BackendContract:
    """The tests; a subclass gives `make_subject`."""

    @pytest.fixture
    def make_subject(self) -> MakeSubject:
        raise NotImplementedError

    @pytest.fixture(params=GEOMETRIES)
    def subject(self, request: pytest.FixtureRequest, make_subject: MakeSubject) -> Subject:
        return make_subject(GEOMETRIES[request.param], NUM_SLOTS)

    @pytest.fixture
    def plain(self, make_subject: MakeSubject) -> Subject:
        return make_subject(GEOMETRIES["layers outermost"], NUM_SLOTS)

    # ---- bytes ---------------------------------------------------------------------------------

    def test_it_says_how_large_a_slot_is_and_how_many_there_are(self, subject):
        assert subject.backend.slot_bytes == subject.geometry.slot_bytes
        assert subject.backend.num_slots == NUM_SLOTS
        assert subject.backend.num_usable_slots <= NUM_SLOTS

    @pytest.mark.parametrize("direction", Direction)
    async def test_a_copy_fills_its_targets_and_changes_no_other_byte(self, subject, direction):
        for seed in range(NUM_SEEDS):
            await subject.check_copy(direction, random_pairs(seed), seed)

    async def test_what_was_stored_comes_back_into_other_blocks(self, subject):
        storage, _ = subject.fill(1)
        blocks = random.Random(2).sample(range(NUM_BLOCKS), NUM_BLOCKS)
        slots = random.Random(3).sample(range(NUM_SLOTS), NUM_BLOCKS)
        await subject.copy(Direction.STORE, blocks, slots)
        scrambled = subject.read_storage() ^ 0xFF
        subject.write_storage(scrambled)
        targets = random.Random(4).sample(range(NUM_BLOCKS), NUM_BLOCKS)
        await subject.copy(Direction.LOAD, targets, slots)
        for block, target in zip(blocks, targets, strict=True):
            for (source, _), (in_storage, _) in zip(
                subject.ranges(block, 0), subject.ranges(target, 0), strict=True
            ):
                scrambled[in_storage] = storage[source]
        np.testing.assert_array_equal(subject.read_storage(), scrambled)

    async def test_one_slot_can_be_loaded_into_many_blocks(self, plain):
        await plain.check_copy(Direction.LOAD, ([0, 1, 2, 9], [7, 7, 8, 8]), seed=5)

    @pytest.mark.parametrize("direction", Direction)
    @pytest.mark.parametrize(
        "order",
        [
            "one run",
            pytest.param("every second block", marks=pytest.mark.nightly),
            "shuffled",
            pytest.param("backwards", marks=pytest.mark.nightly),
        ],
    )
    async def test_copies_of_thousands_of_ranges_arrive_whole(self, make_subject, direction, order):
        count = 1300  # of two layers: three pieces of a lane
        subject = make_subject(_layers_outermost(2 * count, 24, 520), count)
        blocks = {
            "one run": list(range(count)),
            "every second block": list(range(0, 2 * count, 2)),
            "shuffled": random.Random(7).sample(range(2 * count), count),
            "backwards": list(range(count - 1, -1, -1)),
        }[order]
        await subject.check_copy(direction, (blocks, list(range(count))), seed=6)

    @pytest.mark.parametrize("direction", Direction)
    async def test_runs_and_rows_beyond_a_megabyte_arrive_whole(self, make_subject, direction):
        subject = make_subject(_layers_outermost(24, 64 << 10, 48, 1 << 20), 24)
        # A long run of each layer, a single block of it, and single blocks around.
        pairs = [*range(3, 20), 23, 1, 21], [*range(6, 23), 0, 2, 4]
        await subject.check_copy(direction, pairs, seed=8)

    # ---- plans that are wrong ------------------------------------------------------------------

    @pytest.mark.parametrize("direction", Direction)
    @pytest.mark.parametrize(
        ("blocks", "slots"),
        [
            ([0, NUM_BLOCKS, 1], [0, 1, 2]),
            ([0, -1, 1], [0, 1, 2]),
            ([1 << 60], [0]),
            ([0, 1, 2], [0, NUM_SLOTS, 1]),
            ([0, 1, 2], [0, 1, -1]),
            ([0], [-(1 << 62)]),
        ],
    )
    async def test_an_id_out_of_range_is_refused_before_anything_moves(
        self, plain, direction, blocks, slots
    ):
        storage, host = plain.fill(9)
        with pytest.raises(TransferError) as caught:
            plain.issue(direction, blocks, slots)
        assert caught.value.reason is FailureReason.BAD_PLAN
        await plain.copy(Direction.STORE, [0], [0])  # whatever was started has ended
        plain.arrive(Direction.STORE, ([0], [0]), storage, host)
        plain.assert_holds(storage, host)

    async def test_the_first_and_the_last_id_are_in_range(self, plain):
        await plain.copy(Direction.STORE, [0, NUM_BLOCKS - 1], [NUM_SLOTS - 1, 0])

    # ---- fences --------------------------------------------------------------------------------

    async def test_a_source_may_be_overwritten_behind_a_fence(self, plain):
        storage, host = plain.fill(10)
        pairs = list(range(NUM_BLOCKS)), list(range(NUM_BLOCKS))
        completion = plain.issue(Direction.STORE, *pairs)
        assert plain.backend.fence(completion, PATIENCE_S)
        plain.write_storage(storage ^ 0xFF)
        await asyncio.wait_for(completion.wait(), PATIENCE_S)
        plain.arrive(Direction.STORE, pairs, storage, host)
        plain.assert_holds(storage ^ 0xFF, host)

    async def test_a_fence_on_a_copy_that_has_ended_is_kept(self, plain):
        completion = plain.issue(Direction.STORE, [0], [0])
        await asyncio.wait_for(completion.wait(), PATIENCE_S)
        assert plain.backend.fence(completion, 0.0)

    # ---- loads that the next step reads --------------------------------------------------------

    async def test_a_load_that_is_joined_is_whole_in_all_that_comes_next(self, plain):
        storage, host = plain.fill(10)
        pairs = list(range(NUM_BLOCKS)), list(range(NUM_BLOCKS))
        assert plain.backend.join(plain.issue(Direction.LOAD, *pairs))
        plain.arrive(Direction.LOAD, pairs, storage, host)
        plain.assert_holds(storage, host)

    async def test_a_load_that_was_taken_back_is_not_joined(self, plain):
        release = plain.hold(Direction.LOAD)
        completions = [plain.issue(Direction.LOAD, [i], [i]) for i in range(4)]
        taken_back = [completion for completion in completions if completion.cancel()]
        release()
        assert not any(plain.backend.join(completion) for completion in taken_back)
        for completion in taken_back:
            with pytest.raises(TransferError):
                await completion.wait()

    # ---- copies that are taken back ------------------------------------------------------------

    @pytest.mark.parametrize("direction", Direction)
    async def test_a_copy_that_has_ended_is_not_taken_back(self, plain, direction):
        completion = plain.issue(direction, [3], [4])
        await asyncio.wait_for(completion.wait(), PATIENCE_S)
        assert not completion.cancel()
        await asyncio.wait_for(completion.wait(), PATIENCE_S)

    @pytest.mark.parametrize("direction", Direction)
    async def test_a_copy_that_is_taken_back_has_moved_nothing_and_one_that_is_not_all(
        self, plain, direction
    ):
        storage, host = plain.fill(12)
        release = plain.hold(direction)
        completions = {i: plain.issue(direction, [i], [i]) for i in range(4)}
        taken_back = {i for i, completion in completions.items() if completion.cancel()}
        release()
        for i, completion in completions.items():
            if i in taken_back:
                with pytest.raises(TransferError):
                    await asyncio.wait_for(completion.wait(), PATIENCE_S)
                continue
            await asyncio.wait_for(completion.wait(), PATIENCE_S)
            plain.arrive(direction, ([i], [i]), storage, host)
        plain.assert_holds(storage, host)

    # ---- checksums -----------------------------------------------------------------------------

    def test_a_slot_has_the_checksum_of_its_bytes_wherever_it_lies(self, subject):
        _, host = subject.fill(13)
        for (_, first), (_, other) in zip(
            subject.ranges(0, 2), subject.ranges(0, NUM_SLOTS - 1), strict=True
        ):
            host[other] = host[first]
        subject.write_host(host)
        found = subject.backend.checksums(np.array([2, 3, NUM_SLOTS - 1, 2]))
        assert found.dtype == np.uint64
        assert found[0] == found[2] == found[3] != found[1]
        assert len(subject.backend.checksums(np.array([], np.int64))) == 0

    def test_every_byte_of_a_slot_is_in_its_checksum_and_no_other(self, subject):
        _, host = subject.fill(14)
        before = subject.backend.checksums(np.arange(NUM_SLOTS))
        assert len(set(before.tolist())) == NUM_SLOTS
        rng = random.Random(15)
        places = [place for _, place in subject.ranges(0, 5)]
        picked = {p for place in places for p in (place.start, place.stop - 1)}
        picked.update(rng.choices([b for p in places for b in range(p.start, p.stop)], k=20))
        for byte in sorted(picked):
            host[byte] ^= 1 << rng.randrange(8)
            subject.write_host(host)
            after = subject.backend.checksums(np.arange(NUM_SLOTS))
            assert np.flatnonzero(after != before).tolist() == [5]
            before = after

    # ---- the two directions --------------------------------------------------------------------

    @pytest.mark.parametrize("held", Direction)
    async def test_one_direction_does_not_wait_behind_the_other(self, plain, held):
        storage, host = plain.fill(11)
        other = Direction.LOAD if held is Direction.STORE else Direction.STORE
        release = plain.hold(held)
        try:
            behind = [plain.issue(held, [i], [i]) for i in range(8)]
            await plain.copy(other, [20], [30])
        finally:
            release()
        for completion in behind:
            await asyncio.wait_for(completion.wait(), PATIENCE_S)
        plain.arrive(held, (list(range(8)), list(range(8))), storage, host)
        plain.arrive(other, ([20], [30]), storage, host)
        plain.assert_holds(storage, host)

    # ---- the end -------------------------------------------------------------------------------

    def test_closing_twice_is_the_same_as_once_and_frees_the_memory(self, plain):
        assert not plain.is_host_memory_free()
        plain.backend.close()
        assert plain.is_host_memory_free()
        plain.backend.close()
        assert plain.is_host_memory_free()

    @pytest.mark.parametrize("direction", Direction)
    def test_a_copy_issued_after_close_is_refused(self, plain, direction):
        plain.backend.close()
        with pytest.raises(TransferError) as caught:
            plain.issue(direction, [0], [0])
        assert caught.value.reason is FailureReason.NOT_RUNNING

    async def test_a_copy_that_ended_before_close_still_says_so(self, plain):
        completion = plain.issue(Direction.STORE, [0], [0])
        await asyncio.wait_for(completion.wait(), PATIENCE_S)
        plain.backend.close()
        await asyncio.wait_for(completion.wait(), PATIENCE_S)
        assert plain.backend.fence(completion, 0.0)
